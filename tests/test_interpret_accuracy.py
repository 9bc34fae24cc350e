"""The generated kernels themselves, in Triton's interpreter, against float64: every mask, dtype, odd shape.

Inputs lie in storage that is NaN around them, and what is allocated starts as NaN: a kernel that reads
outside of a tensor, or leaves an element unwritten, shows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference_case import Case, Limit, assert_within, eager_error_bound, expected, make_case
from torch import Tensor

from flexmod import AuxRequest, BlockMask, create_block_mask, flex_attention, masks, mods
from flexmod.codegen import compiler

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    d: int = 16
    dv: int = 16
    kv_heads: int = 2
    group: int = 1
    batch: int = 1
    layout: str = "bhsd"


def documents(shape: Shape) -> Any:
    ids = torch.arange(max(shape.m, shape.n)) * 3 // max(shape.m, shape.n)
    return masks.document(ids, causal=True)


def image_of(shape: Shape) -> tuple[int, int]:
    """Height and width of an image with one position for each query."""
    height = next(h for h in range(math.isqrt(shape.m), 0, -1) if shape.m % h == 0)
    return height, shape.m // height


def vision(shape: Shape) -> Any:
    """Three images; a fifth of the text sees none of them: dead rows."""
    intervals = torch.tensor(
        [[0, shape.m // 3], [shape.m // 4, shape.m // 2], [shape.m // 2, shape.m * 4 // 5]]
    )
    return masks.vision_cross(intervals, torch.arange(shape.n) * 3 // shape.n)


def lowest(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A window as a score mod with a finite number for -inf. Whole tiles have no other."""
    return torch.where((q_idx - kv_idx).abs() <= 9, score, torch.finfo(torch.float32).min)


def near_ones(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Asks what a mask of a window asks."""
    return torch.where((q_idx >= kv_idx) & (q_idx - kv_idx <= 9), score * 0.5 + (q_idx - kv_idx), score * 2)


# (score_mod, mask_mod) by name, made for a shape
MODS: dict[str, Callable[[Shape], tuple[Any, Any]]] = {
    "noop": lambda s: (None, None),
    "causal": lambda s: (None, masks.causal()),
    "causal score": lambda s: (mods.causal_score(), None),
    "sliding window": lambda s: (None, masks.sliding_window(9)),
    "prefix": lambda s: (None, masks.prefix_lm(s.n // 3)),
    "document": lambda s: (None, documents(s)),
    "sasa": lambda s: (None, masks.standalone_window(*image_of(s), window=3)),
    "natten": lambda s: (None, masks.natten(image_of(s), kernel=3)),
    "vision cross": lambda s: (None, vision(s)),
    "alibi": lambda s: (mods.alibi(s.kv_heads * s.group), masks.causal()),
    "softcap": lambda s: (mods.softcap(3.0), masks.causal()),
    "relative position": lambda s: (mods.relative_position(), None),
    "lowest": lambda s: (lowest, None),
    "near ones": lambda s: (near_ones, None),
    "near ones in a window": lambda s: (near_ones, masks.sliding_window(9)),
}

CASES: list[tuple[str, torch.dtype, Shape]] = [
    ("noop", SINGLE, Shape(1, 1)),
    ("noop", BRAIN, Shape(33, 1, d=24, dv=16, group=3)),
    ("noop", HALF, Shape(65, 97, d=64, dv=24)),
    ("noop", SINGLE, Shape(65, 65, batch=2, layout="bshd")),
    ("causal", HALF, Shape(97, 97, d=64, dv=64)),
    ("causal", BRAIN, Shape(65, 97, d=16, dv=24, group=3, kv_heads=1)),
    ("causal", SINGLE, Shape(130, 65, d=24, dv=24, kv_heads=1)),
    ("causal", HALF, Shape(1, 33)),
    ("causal score", BRAIN, Shape(65, 65, d=24, dv=64)),
    ("causal score", SINGLE, Shape(33, 65, group=3)),
    ("sliding window", HALF, Shape(97, 97, group=3, kv_heads=1, layout="bshd")),
    ("sliding window", SINGLE, Shape(65, 65, d=64, dv=16)),
    ("prefix", BRAIN, Shape(65, 65, d=64, dv=64, batch=2)),
    ("prefix", SINGLE, Shape(33, 130, d=24, dv=16)),
    ("document", HALF, Shape(97, 97, d=24, dv=24)),
    ("document", SINGLE, Shape(65, 65, group=3, batch=2)),
    ("sasa", HALF, Shape(65, 65)),
    ("natten", HALF, Shape(130, 130, d=16, dv=16, kv_heads=1)),
    ("natten", SINGLE, Shape(33, 33, d=64, dv=24)),
    ("vision cross", BRAIN, Shape(65, 130, d=24, dv=24, group=3, kv_heads=1)),
    ("vision cross", SINGLE, Shape(130, 33)),
    ("alibi", HALF, Shape(65, 65, d=64, dv=64, group=3, kv_heads=1)),
    ("alibi", BRAIN, Shape(130, 130, d=24, dv=16)),
    ("softcap", SINGLE, Shape(65, 65, d=24, dv=24, group=3)),
    ("softcap", BRAIN, Shape(130, 65, d=16, dv=64)),
    ("relative position", HALF, Shape(33, 33, d=64, dv=64)),
    ("near ones", BRAIN, Shape(65, 97)),
    ("near ones in a window", HALF, Shape(97, 97, d=24)),
    ("near ones in a window", SINGLE, Shape(65, 65)),
    ("lowest", HALF, Shape(97, 97)),
    ("lowest", SINGLE, Shape(65, 65)),
]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty_like(torch.zeros(9)).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def in_nan(x: Tensor) -> Tensor:
    """The same values, and the same order in memory, with NaN before, between and after the rows."""
    order = sorted(range(4), key=lambda i: -x.stride(i))
    dense = x.permute(order)
    storage = torch.full([size + 2 for size in dense.shape], math.nan, dtype=x.dtype)
    inside = storage[tuple(slice(1, 1 + size) for size in dense.shape)]
    inside.copy_(dense)
    return inside.permute([order.index(i) for i in range(4)])


def surrounded(case: Case) -> Case:
    q, k, v, grad_out = (in_nan(x) for x in (*case.inputs, case.grad_out))
    return replace(case, q=q, k=k, v=v, grad_out=grad_out)


def for_small_tensors(limits: dict[str, Limit]) -> dict[str, Limit]:
    """The largest error of a few hundred elements scatters by a factor of two around its usual size."""
    return {name: Limit(limit.rms, 2 * limit.max) for name, limit in limits.items()}


FIRST = {case[0]: case for case in reversed(CASES)}  # of each name


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        pytest.param(
            *case, id=f"{case[0]}-{case[1]}-{case[2].m}x{case[2].n}",
            marks=[] if case is FIRST[case[0]] else pytest.mark.long if number % 2 else pytest.mark.every,
        )
        for number, case in enumerate(CASES)
    ],
)  # fmt: skip
def test_against_float64(name: str, dtype: torch.dtype, shape: Shape) -> None:
    check(shape, dtype, *MODS[name](shape), seed=name)


def one_key(shape: Shape) -> Any:
    return lambda b, h, q_idx, kv_idx: q_idx == kv_idx


# mask_mod, what a score is capped at, and what the queries are multiplied by
BOUNDED: dict[str, tuple[Callable[[Shape], Any], float, float, Shape]] = {
    "all": (lambda s: None, 20.0, 1.0, Shape(65, 97, d=24, group=3, kv_heads=1)),
    "all, at the bound": (lambda s: None, 40.0, 100.0, Shape(33, 97, dv=24)),
    "causal": (lambda s: masks.causal(), 20.0, 1.0, Shape(97, 65, d=24, dv=64)),
    "causal, at the bound": (lambda s: masks.causal(), 50.0, 100.0, Shape(97, 97)),
    "window": (lambda s: masks.sliding_window(9), 50.0, 1.0, Shape(97, 97, dv=24)),
    "window, at the bound": (lambda s: masks.sliding_window(9), 40.0, 100.0, Shape(97, 97)),
    "documents": (documents, 5.0, 3.0, Shape(130, 130, batch=2, layout="bshd")),
    "dead rows": (vision, 20.0, 1.0, Shape(65, 130, d=24)),
    "one key": (one_key, 50.0, 1.0, Shape(65, 65)),
    "one key, at the bound": (one_key, 50.0, 100.0, Shape(65, 65)),
    "one key and a small cap": (one_key, 10.0, 1.0, Shape(65, 65)),
}


@pytest.fixture
def caps_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that differ from an earlier one: a cap that a launch gives is no bound."""
    monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.usefixtures("caps_are_constants")
def test_bounded_scores_against_float64(name: str) -> None:
    """A row's first tile has its peak, and the mask may keep nothing there."""
    mask_mod, cap, factor, shape = BOUNDED[name]
    # the error of tanh is near 1e-7
    check(shape, BRAIN, mods.softcap(cap), mask_mod(shape), seed=name, factor=factor, of_lse=2e-7 * cap)


@pytest.mark.parametrize("name", ["all", "causal", "window, at the bound", "dead rows"])
@pytest.mark.usefixtures("caps_are_constants")
def test_largest_scores_of_bounded_ones(name: str) -> None:
    """A kernel that takes no maximum takes one where it is asked for, and all else stays as it was."""
    mask_mod, cap, factor, shape = BOUNDED[name]
    case, mask = made(shape, BRAIN, mask_mod(shape), seed=name, factor=factor)
    options: dict[str, Any] = {"enable_gqa": True, "kernel_options": {"BACKEND": "INTERPRET"}}
    inputs = surrounded(case).inputs
    both = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(*inputs, mods.softcap(cap), mask, return_aux=both, **options)
    plain, lse = flex_attention(*inputs, mods.softcap(cap), mask, return_lse=True, **options)
    truth = expected(case, mods.softcap(cap), mask)
    torch.testing.assert_close(aux.max_scores.double(), truth.max_scores, rtol=1e-6, atol=1e-6 * cap)
    assert torch.equal(out, plain) and torch.equal(aux.lse, lse)


def made(
    shape: Shape, dtype: torch.dtype, mask_mod: Any, *, seed: str, factor: float = 1.0
) -> tuple[Case, BlockMask | None]:
    """`factor` makes the queries larger."""
    case = make_case(
        batch=shape.batch, heads=shape.kv_heads * shape.group, kv_heads=shape.kv_heads, q_len=shape.m,
        kv_len=shape.n, head_dim=shape.d, value_dim=shape.dv, dtype=dtype, layout=shape.layout,
        seed=zlib.crc32(f"{seed} {shape}".encode()),
    )  # fmt: skip
    case = replace(case, q=case.q * factor)
    if mask_mod is None:
        return case, None
    return case, create_block_mask(mask_mod, None, None, shape.m, shape.n, device="cpu", BLOCK_SIZE=32)


def check(
    shape: Shape, dtype: torch.dtype, score_mod: Any, mask_mod: Any, *,
    seed: str, factor: float = 1.0, of_lse: float = 2e-6,
) -> None:  # fmt: skip
    """Results and gradients beside their truth."""
    case, mask = made(shape, dtype, mask_mod, seed=seed, factor=factor)
    inside = surrounded(case)
    inputs = [x.detach().requires_grad_() for x in inside.inputs]
    out, lse = flex_attention(
        *inputs, score_mod, mask, enable_gqa=True, return_lse=True, kernel_options={"BACKEND": "INTERPRET"}
    )
    gradients = torch.autograd.grad(out, inputs, inside.grad_out)

    truth = expected(case, score_mod, mask)
    limits = for_small_tensors(eager_error_bound(case, truth, score_mod, mask))
    results = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    assert all(result.dtype == dtype for result in results.values())
    assert_within(results, truth, limits)
    torch.testing.assert_close(lse.detach().double(), truth.lse, rtol=2e-6, atol=of_lse)
