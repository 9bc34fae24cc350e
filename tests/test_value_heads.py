"""Key and value with different numbers of heads, as in differential attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod import create_block_mask, errors, flex_attention, masks, mods

HEADS = {
    "fewer values": (4, 4, 2),
    "more values": (4, 2, 4),
    "groups of both": (12, 6, 4),
    "one value": (4, 2, 1),
}
MASK = create_block_mask(masks.causal(), None, None, 21, 21, "cpu", BLOCK_SIZE=16)


def inputs(heads: tuple[int, int, int]) -> list[Tensor]:
    return [torch.randn(2, n, 21, d, requires_grad=True) for n, d in zip(heads, (16, 16, 24), strict=True)]


def eager(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return flex_attention(q, k, v, mods.alibi(q.shape[1]), MASK, enable_gqa=True, **options)


def handle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attend = flexmod.compile(mods.alibi(q.shape[1]), masks.causal(), enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v), attend(q, k, v))
    return attend(q, k, v)


WAYS: dict[str, Callable[..., Tensor]] = {
    "cpu": eager,
    "reference": lambda *x: eager(*x, kernel_options={"BACKEND": "REFERENCE"}),
    "interpret": lambda *x: eager(*x, kernel_options={"BACKEND": "INTERPRET"}),
    "handle": handle,
    "graph": lambda *x: torch.compile(eager, backend="aot_eager", fullgraph=True)(*x),
}


SLOW = ("interpret", "graph")  # in the quick tests for one case each
CASES = [
    pytest.param(name, way, marks=[pytest.mark.long] * (way in SLOW and name != "groups of both"))
    for name in HEADS
    for way in WAYS
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_out_and_gradients(name: str, way: str) -> None:
    torch._dynamo.reset()
    given = inputs(HEADS[name])
    q, k, v = (x.double() for x in given)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = mods.alibi(q.shape[1])
    expected = flex_attention(q, k, v, bias, MASK, kernel_options={"BACKEND": "REFERENCE"})
    found = WAYS[way](*given)
    torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=1e-4)
    wanted = torch.autograd.grad(expected.sin().sum(), given)
    for grad, known in zip(torch.autograd.grad(found.sin().sum(), given), wanted, strict=True):
        torch.testing.assert_close(grad, known, atol=2e-4, rtol=1e-3)


def test_dimensions_in_another_order() -> None:
    q, k, v = inputs(HEADS["fewer values"])
    swapped = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    found = flex_attention(*swapped, enable_gqa=True, layout="bshd").transpose(1, 2)
    torch.testing.assert_close(found, flex_attention(q, k, v, enable_gqa=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4, 3), (4, 3, 4), (4, 4, 8)])
def test_numbers_that_do_not_divide(heads: tuple[int, int, int]) -> None:
    with pytest.raises(errors.KeyValueHeadsMismatch):
        flex_attention(*inputs(heads), enable_gqa=True)
