"""Gradients of captured tensors from the generated kernels, in the interpreter, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from learned_mods import causal, every_third, learned_mods, random
from reference_case import LargestTensor, make_case
from torch import Tensor

from flexmod import create_block_mask, errors, flex_attention
from flexmod.backends import generated

BATCH, HEADS, ROWS, COLUMNS = 2, 2, 35, 21
LEARNED = learned_mods(BATCH, HEADS, ROWS, COLUMNS)
TILES = dict.fromkeys([f"BLOCK_{side}{number}" for side in "MN" for number in ("", 1, 2, 3)], 16)
INTERPRET = {"BACKEND": "INTERPRET", **TILES}
REFERENCE = {"BACKEND": "REFERENCE"}
MASKS: dict[str, Any] = {"no mask": None, "causal": causal, "every third": every_third}
SINGLE = torch.float32


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under deterministic algorithms torch fills what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms("any_order" not in request.fixturenames)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def any_order() -> None:
    """For a test of the sums that atomics make."""


def mask_of(mask_mod: Any, rows: int = ROWS, columns: int = COLUMNS, block: Any = 16) -> Any:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, None, None, rows, columns, device="cpu", BLOCK_SIZE=block)


def case(dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS) -> Any:
    return make_case(
        batch=BATCH, kv_batch=1, heads=HEADS, kv_heads=1, q_len=rows, kv_len=columns, head_dim=8, dtype=dtype
    )


def gradients(
    score_mod: Any, learned: list[Tensor], mask: Any, call: Any, *, lse: bool = True, **options: Any
) -> tuple[Tensor, ...]:
    """Of q, k, v and of what is learned, through out and lse."""
    inputs = [x.detach().requires_grad_() for x in call.inputs]
    out, lse_ = flex_attention(*inputs, score_mod, mask, enable_gqa=True, return_lse=True, **options)
    weights = random(*lse_.shape).to(lse_.dtype) if lse else torch.zeros_like(lse_)
    results = [out, lse_.nan_to_num(neginf=0.0)]
    return torch.autograd.grad(results, [*inputs, *learned], [call.grad_out, weights])


def check(
    make: Callable[..., Any], tensors: list[Tensor], mask: Any, dtype: torch.dtype = SINGLE,
    sizes: tuple[int, int] = (ROWS, COLUMNS), options: Any = None, factor: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All gradients, held to those of float64 by the norm of what differs."""
    call = case(dtype, *sizes)
    learned = [x.detach().clone().requires_grad_() for x in tensors]
    found = gradients(make(*learned), learned, mask, call, kernel_options=INTERPRET | (options or {}))
    wide = [x.detach().double().requires_grad_() for x in tensors]
    doubled = case(torch.float64, *sizes)
    q, k, v, grad = (x.to(dtype).double() for x in (*call.inputs, call.grad_out))
    exact_call = type(call)(q, k, v, grad, doubled.scale)
    exact = gradients(make(*wide), wide, mask, exact_call, kernel_options=REFERENCE)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, SINGLE: 4e-6}[dtype] * factor
    for x, truth in zip(found, exact, strict=True):
        assert x.shape == truth.shape
        error, size = float((x.double() - truth).norm()), float(truth.norm())
        assert error <= tolerance * (size + 1.0), f"{error:.3g} of {size:.3g}"
    return found


def tensors_of(name: str, dtype: torch.dtype = SINGLE) -> list[Tensor]:
    return [random(*shape, seed=n).to(dtype) for n, shape in enumerate(LEARNED[name].shapes)]


@pytest.mark.parametrize("mask", [None, every_third])
@pytest.mark.parametrize("name", LEARNED)
def test_float32(name: str, mask: Any) -> None:
    check(LEARNED[name].make, tensors_of(name), mask_of(mask))


@pytest.mark.parametrize("name", LEARNED)
def test_bfloat16(name: str) -> None:
    """Captured tensors are float32 still: their gradients are never rounded to less."""
    check(LEARNED[name].make, tensors_of(name), mask_of(causal), torch.bfloat16)


@pytest.mark.parametrize("name", LEARNED)
def test_captures_of_half_precision(name: str) -> None:
    """Their gradients are rounded once; a mod that computes in float16 rounds more often."""
    tensors = tensors_of(name, torch.float16)
    found = check(LEARNED[name].make, tensors, mask_of(causal), torch.float16, factor=4.0)
    assert all(x.dtype == torch.float16 for x in found[3:])
