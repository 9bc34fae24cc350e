"""What a caller has set in torch, around a call: results equal the plain call's."""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import odd_tensors as odd
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import flexmod
from flexmod import create_block_mask, errors, flex_attention, masks, mods
from flexmod.codegen import compiler
from flexmod.ir.proxy import mentions_traced

LENGTH, BLOCK = 32, 16
INTERPRET, REFERENCE = {"BACKEND": "INTERPRET"}, {"BACKEND": "REFERENCE"}


class Strict(TorchFunctionMode):
    """A mode that takes tensors and numbers alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not mentions_traced((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


FUNCTION_STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "subclass": nullcontext,
    "no functions of subclasses": torch._C.DisableTorchFunctionSubclass,
    "no functions": torch._C.DisableTorchFunction,
}
IN_BACKWARD = {"mode": Strict}  # of the caller's torch, entered for the backward alone
# derivatives of these use torch functions on traced values
SCORES: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda s: s.clamp(max=0.7),
    "where": lambda s: torch.where(s > 0.1, s, s * 0.5),
    "abs": lambda s: torch.tanh(s.abs()),
    "minimum": lambda s: torch.minimum(s, s * 0.3),
    "remainder": lambda s: torch.remainder(s, s.square() + 1.5),
    "gelu": torch.nn.functional.gelu,
}


def near(i: Any, j: Any) -> Any:
    return torch.where(i > 4, i >= j, torch.minimum(i, j) < 3)


def qkv(**options: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 16, generator=draw).requires_grad_() for _ in range(3)]


def dense(tensors: list[Tensor], change: Callable[[Any], Any], bias: Tensor) -> Tensor:
    query, key, value = tensors
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    scores = change(query @ key.mT * 0.25) + change(bias)
    return torch.softmax(scores.masked_fill(~near(i, j), -torch.inf), -1) @ value


def forget_graphs() -> None:
    for function in vars(compiler).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.mark.covering(1, long=1, costly=("compiled", INTERPRET))
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("state", [*FUNCTION_STATES, *IN_BACKWARD])
@pytest.mark.parametrize(
    ("route", "options"),
    [("eager", None), ("eager", INTERPRET), ("eager", REFERENCE), ("handle", None), ("compiled", None)],
    ids=["cpu", "interpret", "reference", "handle", "compiled"],
)
def test_functions_of_torch_that_a_caller_has_switched_off(
    route: str, options: Any, state: str, name: str
) -> None:
    change, bias = SCORES[name], torch.linspace(-1, 1, LENGTH).requires_grad_()

    def changed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return change(score) + change(bias[kv_idx])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return near(q_idx, kv_idx)

    tensors, plain = qkv(), qkv()
    of_plain = torch.linspace(-1, 1, LENGTH).requires_grad_()
    wanted = dense(plain, change, of_plain)
    forget_graphs()
    query = tensors[0].as_subclass(odd.Renamed) if state == "subclass" else tensors[0]  # type: ignore[arg-type]
    with FUNCTION_STATES.get(state, nullcontext)():
        if route == "handle":
            out = flexmod.compile(changed, mask_mod, kernel_options=options)(query, *tensors[1:])
        else:
            mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
            attend = flex_attention
            if route == "compiled":
                torch._dynamo.reset()
                # AOTAutograd gives a subclass to no operation of torch.library
                backend = "eager" if state == "subclass" else "aot_eager"
                attend = torch.compile(flex_attention, backend=backend)
            out = attend(query, *tensors[1:], changed, mask, kernel_options=options)
        assert isinstance(out, Tensor)
    with (FUNCTION_STATES | IN_BACKWARD)[state]():
        torch.autograd.backward(out.as_subclass(Tensor).square().sum())  # type: ignore[arg-type]
    torch.testing.assert_close(out.as_subclass(Tensor), wanted, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
    wanted.square().sum().backward()
    for found, true in zip((*tensors, bias), (*plain, of_plain), strict=True):
        torch.testing.assert_close(found.grad, true.grad, rtol=1e-4, atol=1e-4)


# where tensors are made


DEVICE_STATES = ("with", "set")


@contextmanager
def meta_by_default(how: str) -> Iterator[None]:
    if how == "with":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


BIASES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "folded": lambda: lambda s, b, h, i, j: s + torch.full_like(s, 2.0).tanh() * (i - j),
    "split": lambda: lambda s, b, h, i, j: torch.where(i // 7 >= j // 7, s, -torch.inf),
    "softcap": lambda: mods.softcap(5.0),
    "alibi": lambda: mods.alibi(2),
    "sandwich": lambda: mods.sandwich(2, LENGTH, device="cpu"),
    "t5": lambda: mods.t5_bias(torch.linspace(0, 1, 64, device="cpu").view(32, 2)),
}


@pytest.mark.covering(1, long=1, costly=("compiled", INTERPRET))
@pytest.mark.parametrize("how", DEVICE_STATES)
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize(
    ("route", "options"),
    [("eager", None), ("eager", INTERPRET), ("eager", REFERENCE), ("handle", None), ("compiled", None)],
    ids=["cpu", "interpret", "reference", "handle", "compiled"],
)
def test_a_default_device_changes_no_call(route: str, options: Any, name: str, how: str) -> None:
    documents = torch.arange(LENGTH) // 5

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[q_idx] == documents[kv_idx]) | (q_idx > kv_idx + 3)

    def attended(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        bias = BIASES[name]()
        if route == "handle":
            out: Any = flexmod.compile(bias, mask_mod, kernel_options=options)(*tensors)
        else:
            mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
            attend: Any = flex_attention
            if route == "compiled":
                torch._dynamo.reset()
                attend = torch.compile(flex_attention, backend="aot_eager")
            out = attend(*tensors, bias, mask, kernel_options=options)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    wanted = attended(qkv())
    tensors = qkv()
    forget_graphs()
    with meta_by_default(how):
        found = attended(tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


USES: dict[str, Callable[[Any], Any]] = {
    "lists": lambda mask: mask.q_indices,
    "text": str,
    "svg": lambda mask: mask.to_svg(),
    "dense": lambda mask: mask.to_dense(),
    "slice": lambda mask: mask[0, :, [0, 1]].to_dense(),
    "resize": lambda mask: mask.resize(20, 20).to_dense(),
    "both": lambda mask: (mask & ~mask).to_dense(),
    "facts": lambda mask: mask.facts(),
    "scalars": lambda mask: pickle.loads(pickle.dumps(mask.mask_mod)).function(
        torch.tensor(0, device="cpu"), 0, 20, 3
    ),
    "elements": lambda mask: flexmod.create_mask(mask.mask_mod, None, None, LENGTH, LENGTH, device="cpu"),
    "copy": lambda mask: copy.deepcopy(mask).to_dense(),
}


@pytest.mark.parametrize("how", DEVICE_STATES)
@pytest.mark.parametrize("use", USES)
def test_a_default_device_changes_no_mask(use: str, how: str) -> None:
    documents = torch.arange(LENGTH) // 5

    def used() -> Any:
        mask_mod = masks.document(documents) & masks.causal()
        return USES[use](create_block_mask(mask_mod, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK))

    wanted = used()
    with meta_by_default(how):
        found = used()
    if isinstance(wanted, Tensor):
        assert found.device.type == "cpu"
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


FACTORIES = [
    f"torch.{name}" for name in (
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
        "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
    )
]  # fmt: skip


def test_every_tensor_is_made_on_a_device_that_the_code_names() -> None:
    """torch's default device is the user's: a tensor of the library that goes by it may have no values."""
    unnamed = []
    for file in Path(flexmod.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            made = isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
            if made and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                unnamed.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert not unnamed


# tensors without values, beside real ones; numbers that are none


ROUTES = pytest.mark.parametrize(
    ("route", "options"),
    [("eager", None), ("eager", INTERPRET), ("eager", REFERENCE), ("handle", None), ("handle", INTERPRET)],
    ids=["cpu", "interpret", "reference", "handle", "handle-interpret"],
)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=str)
def test_nothing_is_recorded_in_inference_mode_with_gradients_enabled(options: Any, first: bool) -> None:
    """As by torch's own operations; calls before and after, of the same kinds, are recorded."""
    tensors, slopes = qkv(), torch.rand(2, requires_grad=True)
    attend = flexmod.compile(lambda s, b, h, i, j: s + slopes[h] * j, kernel_options=options)

    def results() -> list[Tensor]:
        mask = create_block_mask(lambda b, h, i, j: i >= j * slopes[0], None, None, LENGTH, LENGTH, "cpu")
        mod = attend._mods["score"]
        return [attend(*tensors), flex_attention(*tensors, mod, mask, kernel_options=options)]

    if not first:
        attend(*tensors).sum().backward()
    with torch.inference_mode(), torch.enable_grad():
        found = results()
    assert not any(result.requires_grad for result in found)
    with torch.no_grad():
        for result, wanted in zip(found, results(), strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    attend(*tensors).sum().backward()
    assert slopes.grad is not None


@ROUTES
@pytest.mark.parametrize("place", ["query", "value", "captured by score_mod", "number", "mask_mod", "all"])
def test_fake_tensors_beside_real_ones_are_named(route: str, options: Any, place: str) -> None:
    with FakeTensorMode() as mode:
        fake = [tensor.clone() for tensor in map(mode.from_tensor, (*qkv(), torch.ones(LENGTH)))]
        number = torch.ones(())
    real = [*qkv(), torch.ones(LENGTH)]
    query, key, value, bias = real
    limits = torch.full((LENGTH,), LENGTH)
    if place == "query":
        query = fake[0]
    elif place == "value":
        value = fake[2]
    elif place == "captured by score_mod":
        bias = fake[3]
    elif place == "mask_mod":
        with mode:
            limits = torch.full((LENGTH,), LENGTH)
    factor = number if place == "number" else torch.ones(())

    def changed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * factor + bias[kv_idx]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < limits[q_idx]

    def attended() -> Any:
        if route == "handle":
            return flexmod.compile(changed, mask_mod, kernel_options=options)(query, key, value)
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
        return flex_attention(query, key, value, changed, mask, kernel_options=options)

    with pytest.raises(errors.FakeTensorError), mode if place == "all" else nullcontext():
        attended()


@pytest.mark.covering(1, long=1, costly=("compiled",))
@pytest.mark.parametrize("scale", [float("nan"), float("-inf"), 1e300, 10**400, True, "1", torch.ones(())])
@pytest.mark.parametrize("route", ["eager", "handle", "compiled"])
@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"])
def test_a_scale_that_is_no_number_is_named(route: str, options: Any, scale: Any) -> None:
    def attended(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex_attention(query, key, value, scale=scale, kernel_options=options)

    torch._dynamo.reset()
    made: dict[str, Callable[[], Any]] = {
        "eager": lambda: attended,
        "handle": lambda: flexmod.compile(scale=scale, kernel_options=options),
        "compiled": lambda: torch.compile(attended, backend="aot_eager"),
    }
    with pytest.raises((errors.ScaleError, errors.ScaleValueError)):
        made[route]()(*[tensor.detach() for tensor in qkv()])


def unnamed() -> Any:
    """A function in C that names no arguments, as newer Pythons show operator.itemgetter."""
    mod = partial(operator.neg)
    places = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = [inspect.Parameter(f"rest{place}", kind) for place, kind in enumerate(places)]
    mod.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return mod


@pytest.mark.parametrize(
    "mod", [dict, max, torch.where, partial(max, 1), operator.itemgetter(0), int, unnamed()]
)
def test_what_has_no_signature_is_named(mod: Any) -> None:
    for use in (
        lambda: flex_attention(*qkv(), score_mod=mod),
        lambda: flexmod.compile(mod),
        lambda: flexmod.compile(None, mod),
        lambda: create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu"),
        lambda: flexmod.create_mask(mod, None, None, LENGTH, LENGTH, device="cpu"),
    ):
        with pytest.raises(errors.NoSignatureError):
            use()
