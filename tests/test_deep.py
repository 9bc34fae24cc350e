"""Mods of hundreds of operations on top of each other: no recursion by depth, no time by number of paths."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flexmod import create_block_mask, create_mask, flex_attention
from flexmod.codegen import compiler
from flexmod.ir.trace import trace

DEEP = 200  # at two or three calls each, a recursion would exceed the limit below
table = torch.linspace(-1.0, 1.0, 7).requires_grad_()


@pytest.fixture(autouse=True)
def few_frames() -> Iterator[None]:
    """Python's limit of 1000 would ask for mods more than twice as deep."""
    before, frames = sys.getrecursionlimit(), len(inspect.stack(0))
    sys.setrecursionlimit(frames + 400)
    yield
    sys.setrecursionlimit(before)


def deep_score(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for _ in range(DEEP // 2):
        x = x * 0.99 + 0.01 * torch.sin(x + q * 0.1)
    return x


def deep_choice(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for number in range(DEEP):
        x = torch.where((q - k) % (number + 2) == 0, x + 1.0, x - 0.01)
    return x


def deep_branches(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for number in range(DEEP // 4):
        x = torch.where(q + number >= k, x, -float("inf")) + torch.where(k > number, 0.0, -float("inf"))
    return x


def deep_sum(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x = torch.tanh(x)
    for _ in range(DEEP):
        x = x - 0.01 * x  # twice in each step: 2^200 paths to the score
    return x


def deep_distance(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    far = q - k
    for _ in range(DEEP // 2):
        far = (far - k).abs().minimum(far + 1)
    return x + far * 0.001


def deep_index(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    far = q - k
    for number in range(DEEP // 3):
        far = (far - k + number).abs() % 7
    return x * table[far]


def deep_or(b: Any, h: Any, q: Any, k: Any) -> Any:
    kept = q == k
    for number in range(DEEP):
        kept = kept | (q - k == 3 * number)
    return kept


def deep_and(b: Any, h: Any, q: Any, k: Any) -> Any:
    kept = q >= k
    for number in range(DEEP // 4):
        kept = kept & (q != 5 * number + 2) & (kept & (k <= q + number))
    return kept


def deep_number(b: Any, h: Any, q: Any, k: Any) -> Any:
    far = q - k
    for number in range(DEEP // 3):
        far = (far + k).abs() % (number + 7)
    return far > 2


def deep_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    number = q
    for step in range(DEEP // 3):
        number = (number * 3 + step) % 7
    return number > k


SCORES = [deep_score, deep_choice, deep_branches, deep_sum, deep_distance, deep_index]


def attend(mod: Any, backend: str = "AUTO", length: int = 9) -> tuple[torch.Tensor, ...]:
    """out, and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 16, generator=generator).requires_grad_() for _ in range(3))
    out = flex_attention(q, k, v, mod, kernel_options={"BACKEND": backend})
    return out, *torch.autograd.grad(out.sum(), (q, k, v))


@pytest.mark.parametrize("mod", SCORES)
@pytest.mark.parametrize("split", [False, True])
def test_texts_of_a_score_mod(mod: Any, split: bool) -> None:
    lowered = compiler.lower(trace(mod, "score").graph, (1, 1, 9, 9), split=split)
    if lowered.graph is not None:  # only -inf branches
        captures = range(len(lowered.graph.captures))
        compiler.capture_texts(lowered.graph, tuple(captures))
        for text in (lowered.text, lowered.grad_text, lowered.exponent_text(True)):
            assert text is not None
            compile(text.text, mod.__name__, "exec")


@pytest.mark.parametrize("mod", SCORES)
def test_a_score_mod_on_the_cpu(mod: Any) -> None:
    for found, expected in zip(attend(mod), attend(mod, "REFERENCE"), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_score_mod_in_kernels() -> None:
    for found, expected in zip(attend(deep_score, "INTERPRET"), attend(deep_score, "REFERENCE"), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mod", [deep_or, deep_and, deep_number, deep_row])
def test_a_mask_mod(mod: Any) -> None:
    sizes = (1, 1, 20, 20)
    mask = create_block_mask(mod, *sizes, "cpu", BLOCK_SIZE=16)
    dense = create_mask(mod, *sizes, device="cpu")
    kept = torch.zeros(32, 32)
    kept[:20, :20] = dense[0, 0]
    tiles = kept.view(2, 16, 2, 16).sum((1, 3)) > 0
    assert torch.equal(mask.to_dense()[0, 0] > 0, tiles)
    text = compiler.builder(trace(mod, "mask").graph, sizes).kernels.bounds.text
    compile(text.text, mod.__name__, "exec")
