"""Decides which tensors a kernel can read. torch dispatches some others; the rest raise errors.

A kernel gets a pointer, a shape and strides, which suffice for a tensor with its own strided storage. torch
marks each other kind of tensor with a dispatch key. So a kernel gets only tensors whose keys are listed here.

Inside torch's function transforms (torch.func, forward-mode AD), a tensor wraps another one, level by level.
torch's operations unwrap it; a kernel cannot. autograd.Function removes the wrappers of `grad` and `vjp`. All
others raise errors, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from flexmod.errors import (
    FakeTensorError,
    ForwardModeError,
    FreedStorageError,
    JitTraceError,
    NestedTensorInput,
    TensorKindError,
    VmapError,
)
from flexmod.errors.base import counted
from flexmod.runtime import private_torch as internals
from flexmod.runtime.private_torch import NO_OVERRIDE, is_wrapped
from flexmod.runtime.private_torch import dispatch_key_bits as _bits
from flexmod.runtime.private_torch import dispatch_keys as _keys
from flexmod.runtime.private_torch import recorded_by_torch as recorded_by_torch

CLASSES = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided

# keys of a strided tensor with its own storage; a call resolves `Negative` before a launch
_READABLE = _bits(
    "CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "Negative"
)
_PYTHON = _bits("Python") & ~_bits("CPU", "CUDA")
# tensors for torch.ops.flexmod.attention: subclasses with __torch_dispatch__, functionalized tensors, zeros
# without storage
_MIXED_TEXTS = ("got mixed torch.Tensor and", "Cannot find device mesh")  # torch of a DTensor beside others
_DISPATCHED = _PYTHON | _bits("Functionalize", "ZeroTensor")


def overridden(tensors: Sequence[Any]) -> bool:
    """Returns whether a class or a mode must see a call on tensors for which has_torch_function is true.

    The mode of torch.set_default_device need not see it: it changes only factory functions. A mod may call
    one, so the mode must stay active.
    """
    if not all(map(internals.is_device_mode, internals.function_modes())):
        return True
    if not internals.torch_function_enabled():
        return False
    classes = [type(tensor) for tensor in tensors if type(tensor) not in CLASSES]
    return any(getattr(kind, "__torch_function__", NO_OVERRIDE) is not NO_OVERRIDE for kind in classes)


def refuse_nested(query: Any, key: Any, value: Any) -> None:
    """Raises NestedTensorInput for nested tensors, before any code reads shapes.

    torch ends the process when TorchDynamo enters a function and reads the strides of a nested tensor with
    strided layout.
    """
    try:
        nested = query.is_nested or key.is_nested or value.is_nested
    except AttributeError:  # not a tensor; a later check raises
        return
    if nested:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.is_nested:
                raise NestedTensorInput(name=name)


def refuse_jit_trace() -> None:
    """Raises JitTraceError inside torch.jit.trace."""
    if internals.in_jit_trace():
        raise JitTraceError()


def is_batched(tensor: Tensor) -> bool:
    """Returns whether a vmap at any level maps over the tensor."""
    while is_wrapped(tensor):
        if internals.is_vmap_wrapper(tensor):
            return True
        tensor = internals.unwrapped(tensor)
    return internals.is_vmap_wrapper(tensor)


def innermost(tensor: Tensor) -> Tensor:
    """Returns the tensor below all wrappers of grad, vjp and vmap; keeps a functionalized tensor."""
    while is_wrapped(tensor) and not internals.is_functional_wrapper(tensor):
        tensor = internals.unwrapped(tensor)
    return tensor


def requires_grad(tensor: Tensor) -> bool:
    """Returns whether the tensor requires a gradient, at any level of torch.func."""
    while not tensor.requires_grad and internals.in_transform() and is_wrapped(tensor):
        tensor = internals.unwrapped(tensor)
    return tensor.requires_grad


def records_gradients() -> bool:
    """Returns whether autograd records operations: never in inference mode, also with gradients enabled.

    TorchDynamo cannot trace it.
    """
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def no_autocast(kind: str) -> AbstractContextManager[None]:
    """Disables autocast in a block, so that the float32 operations of backends and mods stay float32."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext()


def autocasts(kind: str) -> bool:
    """Returns whether autocast is on for a device type; False for types without autocast, such as meta."""
    return kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)


def check_transforms(tensors: Mapping[str, object]) -> None:
    """Checks the tensors of a call; ignores objects that are no tensors, which other checks refuse.

    Raises:
        VmapError: a tensor is mapped over.
        ForwardModeError: a tensor carries a tangent.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if is_batched(tensor):
            raise VmapError(name=name)
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise ForwardModeError(name=name)


def plain(tensor: Tensor, name: str) -> Tensor:
    """Returns a tensor that needs no derivative without wrappers, and as a plain torch.Tensor.

    Raises:
        VmapError: the tensor has a value for each entry of a mapped dimension.
    """
    if is_batched(tensor):
        raise VmapError(name=name)
    return as_plain_class(innermost(tensor))


def as_plain_class(tensor: Tensor) -> Tensor:
    """Returns a subclass that only renames its storage as a plain torch.Tensor; differentiable."""
    if type(tensor) in CLASSES or is_dispatched(tensor) or is_wrapped(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def is_dispatched(tensor: Tensor) -> bool:
    """Returns whether torch dispatches operations on the tensor to code other than kernels on its storage."""
    return bool(_keys(tensor) & _DISPATCHED) or tensor.device.type == "meta"


def any_dispatched(tensors: Iterable[Tensor]) -> bool:
    """Returns `is_dispatched` for any of the tensors, or whether a TorchDispatchMode must see operations."""
    return bool(internals.dispatch_mode_count()) or any(map(is_dispatched, tensors))


def tensor_key(tensor: Tensor) -> tuple[object, ...] | None:
    """Every property of a tensor that a kernel may depend on, except its values and its address.

    None for an unusual tensor: a subclass, a tensor that is not strided or has the negative bit, a wrapper of
    torch.func, one without storage of its own. The key includes the storage's size, since a storage may
    shrink and a known call is not validated again.
    """
    if type(tensor) not in CLASSES or tensor.layout is not _STRIDED or tensor.is_neg() or is_wrapped(tensor):
        return None
    pointer, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    if not (pointer and size) and tensor.numel() and not tensor.is_meta:
        return None
    try:
        return (
            tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
            pointer % 16, size,
        )  # fmt: skip
    except RuntimeError:  # a nested tensor claims to be strided and has no shape
        return None


def has_no_values(tensor: Tensor) -> bool:
    """Returns whether the tensor has no values: on the meta device, or from a FakeTensorMode."""
    return tensor.device.type == "meta" or getattr(tensor, "fake_mode", None) is not None


def is_hidden(tensor: Tensor) -> bool:
    """Returns whether the host cannot read the tensor's values: it has none, or a transform wraps it."""
    return has_no_values(tensor) or is_wrapped(tensor)


@contextmanager
def naming_mixed(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Surrounds a torch operation on tensors of several kinds, and names one if torch cannot mix them.

    Raises FakeTensorError, or TensorKindError for a DTensor beside other tensors.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not any(text in str(error) for text in _MIXED_TEXTS):
            raise
        name, tensor = next((n, t) for n, t in tensors.items() if _keys(t) & _PYTHON)
        kind, advice = _described(name, tensor)
        raise TensorKindError(name=name, kind=kind, advice=advice) from error
    except AssertionError as error:
        if "fake" not in str(error).lower():
            raise
        advice = (
            "make all tensors of a call within one FakeTensorMode, or all of them outside; "
            "FakeTensorMode(allow_non_fake_inputs=True) takes real ones too"
        )
        raise FakeTensorError(problem=_mixed(tensors), advice=advice) from error


def _mixed(tensors: Mapping[str, Tensor]) -> str:
    modes = {name: getattr(tensor, "fake_mode", None) for name, tensor in tensors.items()}
    fake = [name for name, mode in modes.items() if mode is not None]
    real = [name for name, mode in modes.items() if mode is None]
    if fake and real:
        return f"{fake[0]} is a fake tensor, a shape without values, and {real[0]} is a real one"
    if real:
        return f"{real[0]} is a real tensor, and a FakeTensorMode is active"
    other = next((name for name in fake if modes[name] is not modes[fake[0]]), fake[-1])
    return f"{fake[0]} and {other} are fake tensors of two modes"


def check(tensors: Mapping[str, Tensor]) -> None:
    """Checks that a kernel can read each tensor, or that torch dispatches it.

    Raises:
        TensorKindError: a tensor is of another kind.
        FreedStorageError: a storage is too small for its tensor's elements.
    """
    for name, tensor in tensors.items():
        if not _keys(tensor) & ~_READABLE:  # the quick answer for most tensors
            check_storage(name, tensor)
            continue
        if not is_dispatched(tensor):
            if is_dispatched(innermost(tensor)):
                refuse_transformed({name: tensor})
            check_readable({name: tensor})
            continue
        functional = internals.is_functionalized(tensor)
        if functional and is_wrapped(internals.functional_inner(tensor)):
            raise TensorKindError(
                name=name, kind="functionalized inside of another transform of torch.func",
                advice=f"{name} outside of one of the two",
            )  # fmt: skip


def refuse_transformed(tensors: Mapping[str, Tensor]) -> None:
    """Raises TensorKindError for a tensor in a transform of torch.func: torch.library's node of autograd,
    through which torch dispatches a call, has no rule for it.
    """
    for name, tensor in tensors.items():
        if innermost(tensor) is not tensor:
            raise TensorKindError(
                name=name,
                kind="inside of a transform of torch.func and of what torch dispatches (functionalize, "
                "make_fx, a FakeTensorMode, a subclass)",
                advice=f"{name} outside of it: take torch.autograd.grad in place of torch.func.grad",
            )  # fmt: skip


def with_storage(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of zeros without storage: in lists that hold None, torch makes none."""
    return tensor.clone() if _keys(tensor) & _bits("ZeroTensor") else tensor


def check_readable(tensors: Mapping[str, Tensor]) -> None:
    """Checks that a kernel can read each tensor below its torch.func wrappers.

    Raises TensorKindError, FreedStorageError.
    """
    for name, tensor in tensors.items():
        inner = innermost(tensor)
        if _keys(inner) & ~_READABLE:
            kind, advice = _described(name, inner)
            raise TensorKindError(name=name, kind=kind, advice=advice)
        check_storage(name, inner)


def check_class(name: str, tensor: Tensor) -> None:
    """Raises TensorKindError if a captured tensor's class has its own __torch_function__.

    A kernel reads the elements, so the class could not change how to read them.
    """
    kind = type(tensor)
    if kind in CLASSES or _keys(tensor) & _PYTHON:
        return
    override = kind.__torch_function__
    if override is NO_OVERRIDE or getattr(override, "__func__", None) is Tensor.__torch_function__.__func__:  # type: ignore[attr-defined]
        return
    if is_lazy(tensor):
        raise TensorKindError(
            name=name, kind="a parameter of a lazy module, without a shape yet",
            advice=f"{name} after the first forward of its module",
        )  # fmt: skip
    raise TensorKindError(
        name=name, kind=f"of the class {kind.__name__}, whose own __torch_function__ may change what is read",
        advice=f"{name}.as_subclass(torch.Tensor), if its storage holds the elements",
    )  # fmt: skip


def check_storage(name: str, tensor: Tensor) -> None:
    """Raises FreedStorageError if the storage is too small for the tensor's elements."""
    if _is_freed(tensor):
        present = tensor.untyped_storage().nbytes()
        needed = _bytes_needed(tensor)
        raise FreedStorageError(
            name=name, needed=needed, bytes=counted(needed, "byte"), present=present
        )  # fmt: skip


def ends_the_process(tensor: Tensor) -> bool:
    """Returns whether reading the tensor in torch would end the process, since its storage is freed."""
    return not is_dispatched(tensor) and not _keys(tensor) & ~_READABLE and _is_freed(tensor)


def _is_freed(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() < _bytes_needed(tensor) or not storage.data_ptr()


def _bytes_needed(tensor: Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _described(name: str, tensor: Tensor) -> tuple[str, str]:
    """Describes a tensor that no kernel can read, and what to pass instead."""
    keys, kind = _keys(tensor), type(tensor).__name__
    first = name.split(",")[0]
    it = first if first.replace(".", "_").isidentifier() else "it"
    if keys & _PYTHON:
        methods = ("to_local", "full_tensor", "wait", "dequantize")
        own = [x for x in methods if getattr(type(tensor), x, None) is not getattr(Tensor, x, None)]
        plain = " or ".join(f"{it}.{method}()" for method in own) or "the tensor inside of it"
        return f"of the class {kind}, which alone can reach its elements", plain
    of_functionalization = "a tensor of functionalization", " outside of torch.func.functionalize"
    rows = (
        (keys & _bits("Functionalize"), *of_functionalization),
        (keys & _bits("ZeroTensor"), "zeros without storage", ".clone()"),
        (keys & _bits("Conjugate"), "a conjugate that was not computed", ".resolve_conj()"),
        (tensor.is_quantized, "quantized", ".dequantize()"),
        (tensor.is_nested, "a nested tensor", ".values()"),
        (tensor.layout is not torch.strided, f"a tensor of layout {tensor.layout}", ".to_dense()"),
        (True, f"a tensor on {tensor.device}", " on cuda or cpu"),
    )
    return next((described, it + advice) for applies, described, advice in rows if applies)
