"""Products by oneDNN, at any size here: alone, in blocks of scores, and in the backward of half precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_case import expected, make_case
from torch import Tensor

import flexmod
from backends.test_cpu import (
    alibi,
    block_mask,
    both,
    causal,
    check,
    holes,
    late,
    problem_of,
    run,
    sinks_and_window,
)
from flexmod.backends import blocks, flash, in_torch, products, steps, tiles
from flexmod.backends.tiles import Heads
from flexmod.ir.derivative import differentiate
from flexmod.ir.passes import optimize
from flexmod.ir.trace import trace
from flexmod.runtime.private_torch import flash_on_cpu, linear_on_cpu

pytestmark = pytest.mark.skipif(linear_on_cpu() is None, reason="this torch has no oneDNN")


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each float32 product is oneDNN's."""
    for least in ("LEAST_ROWS", "LEAST_COLUMNS", "LEAST_SCORES"):
        monkeypatch.setattr(products, least, 1)
    monkeypatch.setattr(products, "FEW_THREADS", 1 << 20)
    monkeypatch.setattr(products, "_has_quick_product", lambda: True)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Of graphs that `optimize` has not seen, and that a product has whole but for a factor."""
    return 2 * torch.tanh(score * 0.5)


def sigmoid(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 3 * torch.sigmoid(score * -0.5) + 0.01 * kv_idx


def used_twice(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5 + torch.tanh(score * 0.5)


SHAPES: list[dict[str, Any]] = [
    {"q_len": 1, "kv_len": 150},
    {"q_len": 129, "kv_len": 1},
    {"q_len": 77, "kv_len": 200, "head_dim": 5, "value_dim": 7, "scale": 0.3},
    {"heads": 6, "kv_heads": 2, "q_len": 50, "batch": 3, "kv_batch": 1},
    {"heads": 3, "kv_heads": 1, "q_len": 140, "layout": "bshd", "batch": 2},
]
MASKS = [None, causal, late, sinks_and_window, both]


@pytest.mark.covering(2)
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("score_mod", [None, alibi, capped, sigmoid, used_twice, holes])
@pytest.mark.parametrize("mask_mod", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_calls(
    shape: dict[str, Any],
    mask_mod: Any,
    score_mod: Any,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward of half precision is by flash where that serves. `test_errors` has the limits of errors."""
    if dtype == torch.float32:
        monkeypatch.setattr(in_torch, "serves", lambda problem: False)
    case = make_case(dtype=dtype, **shape)
    mask = None if mask_mod is None else block_mask(case, mask_mod)
    truth, (result, grads) = expected(case, score_mod, mask), run(case, score_mod, mask)
    near = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for x, exact in zip((result.out, *grads[:3]), (truth.out, truth.dq, truth.dk, truth.dv), strict=True):
        assert x is not None
        torch.testing.assert_close(x.double(), exact, **near)
    assert all(x is not None and x.is_contiguous() for x in grads[:3])
    torch.testing.assert_close(result.lse.double(), truth.lse, rtol=3e-6, atol=3e-6)


@pytest.mark.covering(2)
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("score_mod", [capped, sigmoid, holes])
@pytest.mark.parametrize("mask_mod", MASKS)
@pytest.mark.parametrize("width", [64, 128])
def test_pieces_of_columns(
    width: int, mask_mod: Any, score_mod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward of half precision cuts columns, of which each piece has its own mask."""
    monkeypatch.setattr(blocks, "WIDTH", width)
    monkeypatch.setattr(tiles, "TALLER", 96)
    case = make_case(dtype=torch.bfloat16, heads=6, kv_heads=2, q_len=170, kv_len=199, batch=2)
    check(case, score_mod, None if mask_mod is None else block_mask(case, mask_mod, 32))


@pytest.mark.parametrize("rules", [tiles.StepRules(), tiles.StepRules(taller=True)])
@pytest.mark.parametrize("mask_mod", MASKS)
def test_a_step_across_columns(mask_mod: Any, rules: tiles.StepRules) -> None:
    """Its pieces have its columns in order, and forbid the same elements."""
    case = make_case(dtype=torch.float32, heads=6, kv_heads=2, q_len=170, kv_len=199, batch=2)
    mask = None if mask_mod is None else block_mask(case, mask_mod, 16)
    for step in steps.steps_of(problem_of(case, None, mask).mask, Heads.of(case.q, case.k), 170, 199, rules):
        whole = torch.zeros(step.shape)
        step.forbid(whole, -torch.inf)
        pieces = list(step.across(64))
        assert all(piece.shape[3] == 64 for piece in pieces[:-1]) and 0 < pieces[-1].shape[3] <= 64
        parts = [torch.zeros(piece.shape) for piece in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            assert piece.rows == step.rows
            piece.forbid(part, -torch.inf)
        assert torch.equal(torch.cat(parts, -1), whole)
        columns = torch.cat([piece.positions["kv_idx"] for piece in pieces])
        assert torch.equal(columns, step.positions["kv_idx"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [0.0, -torch.inf])
def test_forbidden_elements(value: float, dtype: torch.dtype) -> None:
    """Any element becomes the value, and others stay as they are."""
    case = make_case(dtype=torch.float32, heads=6, kv_heads=2, q_len=170, kv_len=199, batch=2)
    snapshot = problem_of(case, None, block_mask(case, both, 16)).mask
    heads = Heads.of(case.q, case.k)
    for step in steps.steps_of(snapshot, heads, 170, 199, tiles.StepRules()):
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3.0, -1e-7], dtype=dtype)
        before = odd[torch.arange(math.prod(step.shape)) % 6].view(step.shape)
        after, wanted = before.clone(), before.clone()
        step.forbid(after, value)
        for span, forbidden in step.forbidden:
            wanted[..., span] = torch.where(forbidden, value, before[..., span])
        torch.testing.assert_close(after, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(after.signbit(), wanted.signbit())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("score_mod", [None, capped])
@pytest.mark.parametrize("mask_mod", [None, late])
def test_gradient_through_lse(mask_mod: Any, score_mod: Any, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, heads=4, kv_heads=2, q_len=60)
    mask = None if mask_mod is None else block_mask(case, mask_mod)
    grad_lse = 3.0 * torch.randn(1, 4, 60, generator=torch.Generator().manual_seed(0))
    truth = expected(case, score_mod, mask, grad_lse)
    _, grads = run(case, score_mod, mask, grad_lse)
    near = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 1e-2}
    for x, exact in zip(grads[:3], (truth.dq, truth.dk, truth.dv), strict=True):
        assert x is not None
        torch.testing.assert_close(x.double(), exact, **near)


LARGE: dict[str, dict[str, Any]] = {
    "one head": {"heads": 1, "q_len": 700, "kv_len": 1500, "head_dim": 64},
    "shared keys": {"heads": 4, "kv_heads": 1, "q_len": 600, "kv_len": 513, "head_dim": 32, "value_dim": 48},
    "by batch entry": {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": 520, "kv_len": 1025, "layout": "bshd"},
}


# each pair of a size, a score mod and a dtype; the quick ones have each once
PAIRS = [
    pytest.param(
        name, (None, capped, sigmoid)[(row + column) % 3], dtype,
        marks=() if row == column else pytest.mark.long,
    )
    for row, name in enumerate(LARGE)
    for column, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32))
]  # fmt: skip


@pytest.mark.parametrize(("name", "score_mod", "dtype"), PAIRS)
def test_errors(name: str, score_mod: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are large, on any processor, with the limits of any other call."""
    monkeypatch.setattr(products, "_has_quick_product", lambda: True)
    monkeypatch.setattr(products, "FEW_THREADS", 1 << 20)
    monkeypatch.setattr(products, "LEAST_SCORES", 1 << 16)
    if dtype == torch.float32:
        monkeypatch.setattr(in_torch, "serves", lambda problem: False)
    case = make_case(dtype=dtype, **LARGE[name])
    check(case, score_mod, block_mask(case, lambda b, h, q, k: (k <= q + 800) & (k % 7 != b), 128))
    check(case, score_mod, None)


@pytest.mark.usefixtures("everywhere")
def test_gradients_of_captures() -> None:
    case = make_case(dtype=torch.float32, heads=4, kv_heads=2, q_len=60)
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(0))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 2 * torch.tanh(score * 0.5) * leaf[h] - leaf[h] * (q_idx - kv_idx)

    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = slopes.to(dtype).requires_grad_()
        out = flexmod.flex_attention(*(x.to(dtype) for x in case.inputs), mod, enable_gqa=True)
        found.append(torch.autograd.grad(out, leaf, case.grad_out.to(dtype))[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-4)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "a bias": {"mask": (1, 3)},
    "a bias of each head": {"mask": (2, 3)},
    "rows without keys": {"mask": (1, 1), "dead": True},
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("height", [1, 40, 512])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_by_products_are_those_of_torch(
    layout: str, height: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = flash_on_cpu()
    assert kernels is not None
    monkeypatch.setattr(flash, "TALLER", height)
    how, generator = CALLS[name], torch.Generator().manual_seed(0)
    shape, order = ((2, 3, 130, 24), (0, 1, 2, 3)) if layout == "bhsd" else ((2, 130, 3, 24), (0, 2, 1, 3))
    q, k, v, grad = (torch.randn(shape, generator=generator).permute(order) for _ in range(4))
    k, v = k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1)
    mask = torch.randn(*how["mask"], 130, 130, generator=generator) if "mask" in how else None
    if how.get("dead"):
        assert mask is not None
        mask[:, :, 20:90] = -torch.inf
    given = {"attn_mask": mask, "scale": 0.3}
    causal = how.get("causal", False)
    out, lse = kernels[0](q, k, v, 0.0, causal, **given)
    if how.get("dead"):
        lse[:, :, 20:90] = torch.inf
    wanted = kernels[1](grad, q, k, v, out, lse, 0.0, causal, **given)
    into = [torch.ones(x.shape) for x in (k, v)]
    given = {"attn_mask": None, "causal": causal} | given
    dq = flash.gradients_by_products(grad, q, out, lse, None, k, v, *into, **given)
    for x, y in zip((dq, *(x - 1.0 for x in into)), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_runs_agree_bit_for_bit(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, batch=2, heads=6, kv_heads=2, q_len=300, head_dim=32)
    leaves = [x.requires_grad_() for x in case.inputs]
    mask = block_mask(case, sinks_and_window)

    def run(mod: Any) -> list[Tensor]:
        out = flexmod.flex_attention(*leaves, mod, mask, enable_gqa=True)
        return [out, *torch.autograd.grad(out, leaves, case.grad_out)]

    for mod in (None, capped):
        assert all(map(torch.equal, run(mod), run(mod)))


@pytest.mark.parametrize("function", ["", *products.FUNCTIONS])
def test_product(function: str) -> None:
    """Of dense operands and of their transposes; the functions take what is not finite."""
    x, y = torch.randn(70, 33), torch.randn(90, 33)
    for left in (x, x.mT.contiguous().mT):
        for right in (y, y.mT.contiguous().mT):
            wanted = left.double() @ right.double().mT
            wanted = getattr(torch, function)(wanted) if function else wanted
            found = products.product(left, right, function).double()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 1e-30, 1e-4, 90.0, -90.0])
    found = products.product(odd[:, None], torch.ones(3, 1), function)[:, 0]
    alone = odd.clone()
    if function:
        products.apply(function, alone)
    for each in (found, alone):
        wanted = getattr(torch, function)(odd.double()) if function else odd.double()
        torch.testing.assert_close(each.double(), wanted, rtol=3e-7, atol=2e-38, equal_nan=True)


STEPS = {
    "soft-cap": (lambda s: 20.0 * torch.tanh(s / 20.0), 0.05, "tanh"),
    "approximate": (lambda s: 20.0 * flexmod.tanh_approximate(s / 20.0), 0.05, "tanh"),
    "sigmoid": (torch.sigmoid, 1.0, "sigmoid"),
    "factor": (lambda s: s * -0.5 + 1.0, -0.5, ""),
    "factor and square": (lambda s: (s * 0.5) ** 2, 0.5, ""),
    "function twice": (lambda s: torch.tanh(torch.tanh(s)), 1.0, "tanh"),
    "the score too": (lambda s: torch.tanh(s) + s, 1.0, ""),
    "the product too": (lambda s: torch.tanh(x := s * 0.5) + x, 0.5, ""),
    "a factor above 1": (lambda s: torch.tanh(s * 3.0), 1.0, ""),
    "zero": (lambda s: s * 0.0, 1.0, ""),
    "not a number": (lambda s: s * float("nan"), 1.0, ""),
    "another function": (lambda s: torch.exp(s * 0.5), 0.5, ""),
    "no score": (lambda s: torch.zeros_like(s), 1.0, ""),
    "the score": (lambda s: s, 1.0, ""),
}


@pytest.mark.parametrize("name", STEPS)
def test_first_steps(name: str) -> None:
    formula, factor, function = STEPS[name]
    graph = optimize(trace(lambda score, b, h, q_idx, kv_idx: formula(score), "score").graph)
    found = products.first_steps(graph, optimize(differentiate(graph)), None)
    assert (found.factor, found.function, found.rest[2]) == (factor, function, products.Rest())


def rests(formula: Any) -> list[tuple[list[str], float, str]]:
    """What is left of a score mod and of its derivative: the graph's lines, the factor, and the function."""
    graph = optimize(trace(lambda s, b, h, q_idx, kv_idx: formula(s, h, kv_idx), "score").graph)
    found = products.first_steps(graph, optimize(differentiate(graph))).rest
    return [(_lines(rest.graph), rest.factor, rest.function) for rest in found]


def _lines(graph: Any) -> list[str]:
    return [line.split("  #")[0].strip() for line in str(graph).splitlines()[1:]]


RESTS: dict[str, tuple[Any, list[tuple[list[str], float, str]]]] = {
    "soft-cap": (lambda s, h, k: 20.0 * torch.tanh(s / 20.0), [([], 20.0, ""), ([], 20.0 * 0.05, "tanh")]),
    "sigmoid": (lambda s, h, k: -2.0 * torch.sigmoid(s), [([], -2.0, ""), ([], -2.0, "sigmoid")]),
    "factor": (lambda s, h, k: s * 0.5, [([], 1.0, ""), ([], 0.5, "")]),
    "large factors": (
        lambda s, h, k: torch.tanh(s * 3.0) * 2.0,
        [
            (["%0: float32 = mul(score, 3.0)", "%1: float32 = tanh(%0)", "return %1"], 2.0, ""),
            (
                [
                    "%0: float32 = mul(score, 3.0)",
                    "%1: float32 = tanh(%0)",
                    "%2: float32 = mul(%1, %1)",
                    "%3: float32 = sub(1.0, %2)",
                    "%4: float32 = mul(grad, %3)",
                    "return %4",
                ],
                6.0,
                "",
            ),
        ],
    ),
    "a factor too large": (
        lambda s, h, k: torch.abs(s) * 1e30,
        [
            (["%0: float32 = abs(score)", "%1: float32 = mul(%0, 1e+30)", "return %1"], 1.0, ""),
            (
                [
                    "%0: float32 = mul(grad, 1e+30)",
                    "%1: float32 = sign(score)",
                    "%2: float32 = mul(%0, %1)",
                    "return %2",
                ],
                1.0,
                "",
            ),
        ],
    ),
    "two factors": (  # a score keeps the roundings of both, and a gradient may have that of their product
        lambda s, h, k: torch.abs(s) * 0.25 * 3.0,
        [
            (["%0: float32 = abs(score)", "%1: float32 = mul(%0, 0.25)", "return %1"], 3.0, ""),
            (["%0: float32 = sign(score)", "%1: float32 = mul(grad, %0)", "return %1"], 0.75, ""),
        ],
    ),
    "whole numbers": (
        lambda s, h, k: (h * k) * 0.5,
        [
            (["%0: int32 = mul(h, kv_idx)", "%1: float32 = mul(%0, 0.5)", "return %1"], 1.0, ""),
            (["return 0.0"], 1.0, ""),
        ],
    ),
}


@pytest.mark.parametrize("name", RESTS)
def test_rest(name: str) -> None:
    formula, wanted = RESTS[name]
    assert rests(formula) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_large_score_keeps_the_roundings_of_its_factors(dtype: torch.dtype) -> None:
    """A rounding of -65504 in float32 is 0.004, which weights show."""
    q, k, v = (torch.randn(1, 1, length, 4, dtype=dtype) for length in (9, 30, 30))

    def far(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return (score - 65504.0) * 1e-30 * 1e30

    found = flexmod.flex_attention(q, k, v, far, scale=1.0)
    wanted = far(q @ k.mT, 0, 0, 0, 0).double().softmax(-1) @ v.double()
    limit = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit)


def test_when_products_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_quick_product", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    large = products.is_large
    assert large(512, 512) and large(64, 4096)
    assert not large(1024, 500) and not large(63, 8192) and not large(256, 768)
    assert products.is_quick(torch.float32) and not products.is_quick(torch.float64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert not products.is_quick(torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(products, "_has_quick_product", lambda: False)
    assert not products.is_quick(torch.float32)


@pytest.mark.parametrize("hidden", [False, True])
def test_the_processor_is_read_in_any_state_of_the_system(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox may hide the file, and the user's encoding may not fit it."""

    def read_bytes(path: Path) -> bytes:
        if hidden:
            raise PermissionError(13, "Permission denied")
        return b"vendor_id: AuthenticAMD, \xff"

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "linear_on_cpu", lambda: object())
    assert products._has_quick_product.__wrapped__() is not hidden


def test_taller_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 512 causal rows computes 1.6 times their scores. That pays if a product has the whole mod."""
    monkeypatch.setattr(products, "_has_quick_product", lambda: True)
    monkeypatch.setattr(products, "FEW_THREADS", 1 << 20)
    case = make_case(dtype=torch.bfloat16, heads=1, q_len=1024, kv_len=1024, head_dim=8)
    mask = block_mask(case, causal, 128)

    def heights(score_mod: Any, *sizes: int) -> list[int]:
        heads = Heads.of(case.q, case.k)
        found = blocks.parts(problem_of(case, score_mod, mask), heads, 1024, 1024, *sizes)
        return [part.shape[2] for part in found]

    assert heights(capped) == [512, 512]
    assert heights(capped, tiles.TALLER, 512) == [512, 512, 512]  # the second step in two pieces
    assert max(heights(sigmoid)) == max(heights(capped, tiles.TALL)) == 128
