"""Wraps private names of torch, so that only this file depends on them.

A name that every attention call uses is torch's own function, without a Python function in between.
tests/test_internals.py finds private names elsewhere.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _functorch
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import GetAttrKey as GetAttrKey
from torch.utils._pytree import tree_leaves as tree_leaves

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# __torch_function__, of calls

NO_OVERRIDE = torch._C._disabled_torch_function_impl
"""The __torch_function__ of classes that override nothing."""
torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
enable_torch_function: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction
"""Within it, classes and modes see torch functions, though a caller has switched that off."""


def function_modes() -> Iterator[Any]:
    """The active TorchFunctionModes, from the outermost."""
    return map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))


def is_device_mode(mode: object) -> bool:
    """Is it the mode of torch.set_default_device?"""
    return type(mode) is DeviceContext


# __torch_dispatch__, of operations

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
_KINDS_OF_MODES = torch._C._TorchDispatchModeKey
_RECORDING = (_KINDS_OF_MODES.FAKE, _KINDS_OF_MODES.PROXY, _KINDS_OF_MODES.FUNCTIONAL)


def recorded_by_torch() -> bool:
    """Is a mode active that makes a graph of the operations: FakeTensorMode, make_fx, functionalization?

    Such a graph would miss launches of kernels.
    """
    return any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDING)


def dispatch_key_bits(*names: str) -> int:
    """The dispatch keys with these names, as the bits that `dispatch_keys` has."""
    bits = 0
    for name in names:
        bits |= DispatchKeySet(getattr(DispatchKey, name)).raw_repr()
    return bits


def dispatch_keys(tensor: Tensor) -> int:
    """Returns the tensor's dispatch keys, one bit for each key."""
    return torch._C._dispatch_keys(tensor).raw_repr()


# devices and allocations: asked at each launch

_C: Any = torch._C  # a build without CUDA lacks some of the names


def current_device() -> int:
    """The number of the current GPU."""
    return _C._cuda_getDevice()


def current_stream(device: int) -> int:
    """The current stream of a GPU, as the driver has it."""
    return _C._cuda_getCurrentRawStream(device)


def is_stream_capturing() -> bool:
    """Does the current stream of the current GPU record a CUDA graph?"""
    return bool(_C._cuda_isCurrentStreamCapturing())


def quick_empty_strided(device_type: str) -> Callable[..., Tensor] | None:
    """empty_strided(size, stride, dtype) on the current device, as torch's own compiled graphs allocate.

    It takes half the time, and no dispatch mode sees it. None where torch has no such function.
    """
    return getattr(guards, f"_empty_strided_{device_type}", None)


# attention on the CPU

KEPT_MEMORY = 31 << 20


def flash_on_cpu() -> tuple[Callable[..., tuple[Tensor, ...]], ...] | None:
    """torch's flash attention for CPU tensors, forward and backward; None where torch has no such operations.

    Head dimensions of query, key and value must be equal, and a mask has the query's dtype. Of a row that
    attends to nothing, the log-sum-exp is 0. `is_causal` needs a positive scale.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    found = [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward")]
    return None if None in found else tuple(each.default for each in found)  # type: ignore[union-attr]


@cache
def linear_on_cpu() -> Any:
    """oneDNN's products in float32, which compiled models call; None where torch lacks them.

        default(x, weight, bias or None, f, numbers, algorithm)  f(x @ weight.mT)
        binary(x, y, weight, bias or None, "mul")                (x @ weight.mT) * y

    x is [M, K], weight [N, K], y [M, N], f the name of a function or "none". Unless all are dense, row by row
    or column by column, they take thousands of times as long.
    """
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if found is None or not torch.backends.mkldnn.is_available():
        return None
    # It allocates its results. The C library of Linux keeps freed memory, up to twice the largest size that
    # was freed so far. This makes that large: results then do not take new pages from the system each time.
    torch.empty(KEPT_MEMORY, dtype=torch.uint8, device="cpu")
    return found


# 0 for magnitudes up to a number, x for others and for nan: x, the number, and the keyword `out`.
hardshrink = torch.ops.aten.hardshrink.out

# Derivatives by their function's value: gradient, value, and the keyword `grad_input` for the result.
tanh_backward = torch.ops.aten.tanh_backward.grad_input
sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


# torch.func

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
outside_transforms: Callable[[], AbstractContextManager[object]] = torch._C._DisableFuncTorch
in_jit_trace: Callable[[], bool] = torch._C._is_tracing
is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
is_functional_wrapper: Callable[[Tensor], bool] = _functorch.is_functionaltensor
is_functionalized: Callable[[Tensor], bool] = torch._is_functional_tensor
functional_inner: Callable[[Tensor], Tensor] = torch._from_functional_tensor


def is_vmap_wrapper(tensor: Tensor) -> bool:
    """Is the tensor a wrapper of vmap? Says nothing of what it wraps."""
    return _functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def in_forward_ad() -> bool:
    """Does this code run inside torch.autograd.forward_ad.dual_level?"""
    return forward_ad._current_level >= 0


# what autograd keeps

UNCOUNTED = -1


def version_of(tensor: Tensor) -> int:
    """Returns the tensor's version, which counts writes; UNCOUNTED for a tensor of inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def default_saved_hooks() -> bool:
    """Do hooks pack what is saved for a backward: a checkpoint, an offload?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved_without_checks(ctx: Any) -> Iterator[Tensor]:
    """Yields the tensors of `ctx.save_for_backward`, even if ctx.saved_tensors raises after a write."""
    return (saved.data for saved in ctx._raw_saved_tensors)


# tensors and modules by their parts


def is_view(tensor: Tensor) -> bool:
    """Does autograd count the tensor as a view of another one?"""
    return tensor._is_view()


def ragged_dimension(tensor: Tensor) -> int:
    """Of a nested tensor of jagged layout."""
    return tensor._ragged_idx  # type: ignore[attr-defined]


def members_of_module(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Its own parameters, buffers and submodules by name, without a walk through the latter."""
    return module._parameters, module._buffers, module._modules


# TorchDynamo: code that runs in it has imported it


def dynamo() -> ModuleType:
    """For code that TorchDynamo runs: a graph is broken where its `graph_break` is called, in no helper."""
    return torch._dynamo


compiles_frames: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns something while TorchDynamo compiles each Python function that runs, outside of a graph too.

It gives up a function with a graph break in torch.func.grad, and compiles the next ones. No graph
may call this.
"""


def outside_of_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function that works on values: inside torch.compile the graph breaks once, at its call.

    TorchDynamo would compile each function that it calls, one by one: twenty seconds for a block mask.
    """

    @wraps(function)
    def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() or compiles_frames():
            return torch.compiler.disable(function)(*args, **named)
        return function(*args, **named)

    return call


def assume_constant(function: Function) -> Function:
    """torch.compiler.assume_constant_result, without the import of TorchDynamo, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def any_uncounted(tensors: Iterable[Tensor]) -> bool:
    """Is one of the tensors of inference mode? torch counts no writes to it."""
    return any(tensor.is_inference() for tensor in tensors)


def has_symbols(*tensors: Tensor) -> bool:
    """Returns whether a size of the tensors is a symbol of a graph."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    if not torch.compiler.is_dynamo_compiling():
        return any(type(size) is not int for size in sizes)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # a symbol's type is int here

    return not all(has_static_value(size) for size in sizes)


def fix_sizes(tensor: Tensor, last: int) -> None:
    """torch._dynamo.mark_static of the last dimensions, of the tensor that this one views too.

    It imports no TorchDynamo.
    """
    for known in (tensor, tensor._base):
        if known is not None:
            known._dynamo_static_indices = set(range(known.dim())[-last:])  # type: ignore[attr-defined]


def _translator() -> Any:
    """Returns TorchDynamo's translator of the running function's bytecode; None outside of TorchDynamo."""
    from torch._dynamo import symbolic_convert

    return getattr(symbolic_convert.tls, "current_tx", None)


def innermost_mode_name() -> str:
    """Returns the class name of the innermost TorchFunctionMode inside TorchDynamo, or ""."""
    translator = _translator()
    modes: Any = translator.symbolic_torch_function_state.mode_stack if translator else ()
    return modes[-1].python_type().__name__ if modes else ""


@assume_constant
def let_modes_change(let: bool) -> None:
    """Sets whether TorchDynamo may enter a mode within a checkpoint, where code runs twice.

    By default it enters none. flexmod's mode ends inside the checkpoint, so it is safe.
    """
    translator = _translator()
    if translator is not None:
        ask_modes_of_constructors()
        ask_modes_of_unary_operators()
        correct_recorded_values()
        translator.output.current_tracer.allow_side_effects_in_hop = let


@assume_constant
def guard_defaults() -> None:
    """Has TorchDynamo guard defaults of arguments until its trace ends: `def mod(..., by=slope)` in a loop.

    torch has an option that skips such guards, and some versions have it on.
    """
    from torch._dynamo import config

    translator, name = _translator(), "skip_guards_on_constant_func_defaults"
    if translator is not None and getattr(config, name, False):
        setattr(config, name, False)
        translator.output.add_cleanup_hook(partial(setattr, config, name, True))


@cache
def ask_modes_of_constructors() -> None:
    """See "Compiler bugs" in docs/archive/design_choices.md."""
    from torch._dynamo.variables import torch as functions
    from torch.utils._device import _device_constructors

    if hasattr(functions, "get_overridable_functions"):
        functions.get_overridable_functions().update(_device_constructors())


@cache
def ask_modes_of_unary_operators() -> None:
    """See "Compiler bugs" in docs/archive/design_choices.md."""
    methods = {"nb_negative_impl": "neg", "nb_absolute_impl": "abs", "nb_positive_impl": "positive"}
    _call_methods(methods, lambda _, tx: tx.symbolic_torch_function_state.in_torch_function_mode())


def _call_methods(names: Mapping[str, str], when: Callable[[Any, Any], bool]) -> None:
    """Makes functions of TorchDynamo's tensors call a method of the tensor instead, under a condition.

    `names` has the methods by the functions' names. A version of torch may lack some of the functions.
    """
    from torch._dynamo.variables import TensorVariable

    def calling(plain: Callable[..., Any], method: str) -> Callable[..., Any]:
        return lambda self, tx: self.call_method(tx, method, [], {}) if when(self, tx) else plain(self, tx)

    for name, method in names.items():
        plain = getattr(TensorVariable, name, None)
        if plain is not None:
            setattr(TensorVariable, name, calling(plain, method))


RECORDED_DIMENSIONS = 12  # of a recorded mod's values, more than other tensors have


@cache
def correct_recorded_values() -> None:
    """Makes TorchDynamo treat the values of a recorded mod as torch treats a mod's values.

    It runs the forward of a torch.autograd.Function as a part of the mod, and the recorder would miss the
    Function: torch turns gradients off there. It answers `x.shape` and `x.ndim` by itself: the recorder
    knows the shape that the mod means.
    """
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    def recorded(*values: Any) -> bool:
        if innermost_mode_name() != "Recorder":
            return False
        return any((getattr(value, "ndim", None) or 0) >= RECORDED_DIMENSIONS for value in values)

    _call_methods({"method_attr_shape": "size", "method_attr_ndim": "dim"}, lambda x, _: recorded(x))
    plain_apply = AutogradFunctionVariable.call_apply

    def apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not recorded(*args, *kwargs.values())):
            return plain_apply(self, tx, args, kwargs)

    AutogradFunctionVariable.call_apply = apply  # type: ignore[method-assign]


def takes_other_attention(model: Any) -> bool:
    """Says whether a model of Transformers calls its attention by name, so that another can serve it.

    Some models have a table of classes for the names that they know. Some drop a BlockMask, and would attend
    without a mask.
    """
    if not model._can_set_attn_implementation():
        return False
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError):  # of a class in a notebook
        return True
    return not re.search(r"_CLASSES\[[\w.]*config\._attn|not isinstance\(attention_mask, BlockMask\)", source)
