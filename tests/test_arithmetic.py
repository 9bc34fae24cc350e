"""Arithmetic that torch defines: divisions by 0 behind a `where`, casts that wrap, rests, denormal divisors.

Each mod on every backend, as a score_mod and in a mask_mod, eagerly, by a handle and in a compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from arithmetic_mods import MODS, as_mask, eager
from tiers import long_but
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flexmod
from flexmod import create_block_mask, create_mask, flex_attention
from flexmod.ir.record import Recorded, encoded

SIZES = (1, 2, 24, 40)
ON_CPU = ("AUTO", "INTERPRET", "REFERENCE")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    heads, queries, keys = SIZES[1:]
    return tuple(torch.randn(1, heads, n, 16, generator=random) for n in (queries, keys, keys))  # type: ignore[return-value]


def attended(mod: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64 from the modified scores on."""
    scores = eager(mod, SIZES, q @ k.mT / 4)
    return (torch.softmax(scores.double(), -1) @ v.double()).float()


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", MODS)
def test_a_score_is_what_torch_makes_of_it(name: str, backend: str) -> None:
    q, k, v = inputs()
    expected = attended(MODS[name], q, k, v)
    options = {"BACKEND": backend}
    for _ in range(2):
        found = flex_attention(q, k, v, MODS[name], kernel_options=options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    handle = flexmod.compile(MODS[name], kernel_options=options)
    torch.testing.assert_close(handle(q, k, v), expected, rtol=1e-5, atol=2e-6)


IN_GRAPHS = ("divided", "hashed", "hashed_in_steps", "far_turns", "denormal_divisor")


@pytest.mark.parametrize("name", long_but(("divided", "far_turns"), IN_GRAPHS))
def test_in_a_compiled_graph(name: str) -> None:
    q, k, v = inputs()
    backend = "inductor" if name == "divided" else "aot_eager"
    found = torch.compile(lambda q, k, v: flex_attention(q, k, v, MODS[name]), backend=backend)(q, k, v)
    torch.testing.assert_close(found, attended(MODS[name], q, k, v), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODS)
def test_a_mask_is_what_torch_makes_of_it(name: str) -> None:
    mask_mod = as_mask(MODS[name])
    expected = eager(mask_mod, SIZES)
    assert torch.equal(create_mask(mask_mod, *SIZES, device="cpu"), expected)
    block_mask = create_block_mask(mask_mod, *SIZES, device="cpu", BLOCK_SIZE=16)
    q, k, v = inputs()
    scores = torch.where(expected, q @ k.mT / 4, -torch.inf)
    dead = ~expected.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    for backend in ON_CPU:
        found = flex_attention(q, k, v, block_mask=block_mask, kernel_options={"BACKEND": backend})
        torch.testing.assert_close(found, weights @ v, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", ["divided", "rest", "hashed", "far_turns", "denormal_divisor"])
def test_gradients(name: str, backend: str) -> None:
    """What is added to a score has no part in its derivative."""
    q, k, v = (x.requires_grad_() for x in inputs())
    out = flex_attention(q, k, v, MODS[name], kernel_options={"BACKEND": backend})
    found = torch.autograd.grad(out.sin().sum(), (q, k, v))
    expected = torch.autograd.grad(attended(MODS[name], q, k, v).sin().sum(), (q, k, v))
    for mine, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


# assignments with an operator

small = torch.arange(2 * 24 * 40).view(SIZES[1:]).to(torch.int8)
halves = 100 * torch.rand(SIZES[1:], generator=torch.Generator().manual_seed(3)).half()
rows = halves[..., :3].contiguous()


def times_a_position(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x = small[h, q, k]
    x *= k
    return s + x


def plus_a_wider_float(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x = halves[h, q, k]
    x += q / 3
    return s + x


def plus_a_wider_row(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    row = rows[h, q] + k
    row *= torch.stack([q / 3, q / 7, q / 11])
    return s + row[0] + row[2]


@pytest.mark.parametrize("mod", [times_a_position, plus_a_wider_float, plus_a_wider_row])
def test_a_value_keeps_its_dtype_in_an_assignment_with_an_operator(mod: Callable[..., Any]) -> None:
    q, k, v = inputs()
    expected = torch_flex_attention(q, k, v, mod)
    for backend in ON_CPU:
        found = flex_attention(q, k, v, mod, kernel_options={"BACKEND": backend})
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


# what keys hold


@pytest.mark.parametrize("backend", ON_CPU)
def test_zeros_of_both_signs_are_two_numbers(backend: str) -> None:
    """1 / c is an infinity of either sign."""
    q, k, v = inputs()

    def mod_of(c: float) -> Callable[..., Any]:
        return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx * c + c).reciprocal() > 0, score, 0.0)

    options = {"BACKEND": backend}
    plain, zeros = flex_attention(q, k, v, kernel_options=options), v.mean(2, keepdim=True).expand_as(q)
    for c, expected in ((0.0, plain), (-0.0, zeros), (0.0, plain)):
        found = flex_attention(q, k, v, mod_of(c), kernel_options=options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_zeros_of_both_signs_are_two_numbers_of_a_compiled_graph() -> None:
    step = ("__mul__", ("tuple", (("value", 3), ("real", 0))), (), False)
    steps = (step, ("__ge__", ("tuple", (("value", 4), ("real", 1))), (), False))
    text = encoded(("mask", steps, ("value", 5), (), torch.float32))
    for numbers in ((0.0, 1.0), (-0.0, 1.0), (math.nan, 1.0), (0.0, 1.0)):
        traced, _ = Recorded(text, (), (), numbers).traced(torch.device("cpu"))
        found = [node.value for node in traced.graph.nodes if node.is_const]
        assert list(map(repr, found)) == list(map(repr, numbers))


# the CPU's product of matrices makes 0.0 of -0.0
@pytest.mark.parametrize("backend", ["INTERPRET", "REFERENCE"])
def test_scales_of_both_signs_are_two(backend: str) -> None:
    q, k, v = (x.abs() for x in inputs())

    def sign(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(score.reciprocal() > 0, kv_idx * 0.1, 0.0)

    found = [
        flex_attention(q, k, v, sign, scale=scale, kernel_options={"BACKEND": backend}).clone()
        for scale in (0.0, -0.0, 0.0)
    ]
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])


def third(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A product by a third and 3 in the default dtype: which are rounded to another number depends on it."""
    large = (q_idx * 40 + kv_idx) * 1000003
    return score + torch.where(large * (1 / 3) * 3.0 != large, 1.0, 0.0) + (q_idx < 0.5)


@pytest.mark.parametrize("kind", ["eager", "handle", "compiled"])
def test_the_default_dtype_is_part_of_a_trace(kind: str) -> None:
    q, k, v = inputs()
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, third), backend="aot_eager")
    seen = []
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            expected = attended(third, q, k, v)
            seen.append(expected)
            ways = {"eager": lambda *x: flex_attention(*x, third), "compiled": compiled}
            attend = flexmod.compile(third) if kind == "handle" else ways[kind]
            torch.testing.assert_close(attend(q, k, v), expected, rtol=1e-5, atol=2e-6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.allclose(seen[0], seen[1])


def test_a_handle_keeps_the_default_dtype_of_its_trace() -> None:
    q, k, v = inputs()
    expected, handle = attended(third, q, k, v), flexmod.compile(third)
    try:
        torch.set_default_dtype(torch.float64)
        torch.testing.assert_close(handle(q, k, v), expected, rtol=1e-5, atol=2e-6)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ON_CPU)
def test_a_number_stays_float32_in_half_arithmetic(backend: str) -> None:
    """Whether it is a constant of the kernels or an argument of them."""
    table = torch.tensor([3.0], dtype=torch.float16)
    q, k, v = torch.randn(3, 1, 1, 20, 16).unbind()
    for number in (0.1, 0.3, 0.7):

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, number: float = number) -> Any:
            return score - (table[h] * number).float() * kv_idx * 8

        found = flex_attention(q, k, v, score_mod, kernel_options={"BACKEND": backend})
        factor = (table * number).double()  # torch's own product
        scores = q.double() @ k.double().mT / 4 - factor * torch.arange(20) * 8
        torch.testing.assert_close(found.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ON_CPU)
def test_powers_of_positions(backend: str) -> None:
    """Their bounds exceed every float: 2147483647 ** 2147483647 where kernels serve calls of any size."""
    q, k, v = torch.randn(3, 1, 1, 20, 16).unbind()
    found = flex_attention(
        q, k, v, lambda score, b, h, q_idx, kv_idx: score + b**kv_idx, kernel_options={"BACKEND": backend}
    )
    scores = q.double() @ k.double().mT / 4 + 0 ** torch.arange(20)
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=1e-5)
    assert create_block_mask(lambda b, h, q_idx, kv_idx: q_idx**kv_idx >= 0, None, None, 70000, 128)
