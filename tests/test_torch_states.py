"""What a caller has set in torch, around a call: results are those of the plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import odd_tensors as odd
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flexmod
from flexmod import compiler, create_block_mask, flex_attention
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


@pytest.fixture
def nothing_derived() -> Iterator[None]:
    for function in vars(compiler).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    yield


@pytest.mark.usefixtures("nothing_derived")
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
