"""Bounds of masks over tiles: sound on random graphs, readable, and what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from all_tiles import decide_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_masks import random_masks

from flexmod import masks
from flexmod.block_mask.build import and_masks
from flexmod.block_mask.refine import Axes
from flexmod.ir.evaluate import evaluate
from flexmod.ir.intervals import Analysis, analyze
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced, trace

CPU = torch.device("cpu")
Sizes = tuple[int, int, int, int]


def dense(traced: Traced, sizes: Sizes) -> torch.Tensor:
    b, h, q, kv = (
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)
    )
    (mask,) = evaluate(fitted(traced.graph, sizes), traced.tensors, b=b, h=h, q_idx=q, kv_idx=kv)
    return mask.expand(sizes)


def truth(mask: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(all True, any True) of each tile of a mask [B, H, Q, KV]."""
    rows, columns = (-(-n // size) for n, size in zip(mask.shape[2:], block, strict=True))

    def tiles(fill: float) -> torch.Tensor:
        pad = (0, columns * block[1] - mask.shape[3], 0, rows * block[0] - mask.shape[2])
        whole = F.pad(mask.float(), pad, value=fill)
        return whole.unflatten(3, (columns, block[1])).unflatten(2, (rows, block[0]))

    return tiles(1.0).amin((3, 5)).bool(), tiles(0.0).amax((3, 5)).bool()


def axes_of(traced: Traced, sizes: Sizes) -> Axes:
    analysis = analyze(fitted(traced.graph, sizes), sizes)
    return Axes(analysis, traced.tensors, sizes, CPU)


def assert_sound(traced: Traced, sizes: Sizes, block: tuple[int, int]) -> None:
    every, some = truth(dense(traced, sizes), block)
    axes = axes_of(traced, sizes)
    rows, columns = axes.tiles("row", block[0]), axes.tiles("column", block[1])
    certain, possible = decide_all(axes, rows, columns)
    assert not (certain & ~every).any(), axes.analysis.bounds
    assert not (~possible & some).any(), axes.analysis.bounds
    assert not (certain & ~possible).any(), axes.analysis.bounds


@settings(max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
@given(random_masks(), st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(1, 9))
def test_no_tile_of_a_random_mask_is_called_empty_or_full_that_is_not(
    traced: Traced, queries: int, keys: int, block_q: int, block_kv: int
) -> None:
    assert_sound(traced, (2, 3, queries, keys), (block_q, block_kv))


NUMBERS = torch.tensor([1.0, -2.0, torch.nan, 3.5, torch.inf, -torch.inf, 0.0, 1e30])
LARGE = torch.tensor([2**31 - 1, -(2**31), 5, 2**31 - 3], dtype=torch.int32)
HUGE = torch.tensor([2**63 - 1, -(2**63), 5, 2**62])
SMALL = torch.tensor([100, 120, -128, 127], dtype=torch.int8)

# what random graphs seldom come by
TRAPS = {
    "maximum of what may be no number": lambda b, h, q, k: torch.maximum(NUMBERS[q % 8] / k, NUMBERS[0]) > 0,
    "absolute value of no number": lambda b, h, q, k: abs(NUMBERS[q % 8] - k) >= 0,
    "no number is not equal": lambda b, h, q, k: NUMBERS[q % 8] + k != NUMBERS[k % 8],
    "infinite ends": lambda b, h, q, k: NUMBERS[q % 8] - NUMBERS[k % 8] <= NUMBERS[4],
    "a square of what may be no number": lambda b, h, q, k: (NUMBERS[q % 8] - k) ** 2 >= 0,
    "0 times what may be infinite": lambda b, h, q, k: (NUMBERS[q % 8] - NUMBERS[k % 8]) * 0.0 <= 1,
    "a half type times a denormal": lambda b, h, q, k: (NUMBERS[q % 8].half() - k) * 1e-45 == 0,
    "a cast to int32 wraps": lambda b, h, q, k: (q * 2**30 - k * 2**29).to(torch.int32) > 0,
    "arithmetic on a cast wraps": lambda b, h, q, k: q.int() * 2**29 - k.int() * 2**28 > 0,
    "a number beside a cast wraps": lambda b, h, q, k: q.int() + 2**32 < (k * 2**31).int() + 5,
    "a divisor of 0": lambda b, h, q, k: (q - k) // (k % 3) + (q - 3) % (q % 2) > 1,
    "int32 wraps": lambda b, h, q, k: LARGE[q % 4] + k > 0,
    "int32 wraps in a product": lambda b, h, q, k: LARGE[q % 4] * k > 0,
    "int64 wraps": lambda b, h, q, k: HUGE[q % 4] - k * LARGE[0] > 0,
    "int64 wraps, negated": lambda b, h, q, k: -(HUGE[q % 4] - k) < 3,
    "int8 wraps": lambda b, h, q, k: SMALL[q % 4] + SMALL[k % 4] > 0,
    "a cast wraps": lambda b, h, q, k: (q * 20 - k).to(torch.uint8) > 40,
    "a cast of a float": lambda b, h, q, k: (q * 0.7 - k * 0.3).to(torch.int32) >= 2,
    "a cast of a float beyond int32": lambda b, h, q, k: (q * 3e8 - k * 2e8).to(torch.int32) >= 2,
    "a divisor that may be zero": lambda b, h, q, k: (q + 1) / (k - 5.0) > 1,
    "a divisor below zero": lambda b, h, q, k: (q - k) // -3 >= -2,
    "a divisor of either sign": lambda b, h, q, k: (q - k) // torch.where(h > 0, -3, 2) >= -2,
    "remainders": lambda b, h, q, k: (q - 2 * k) % 7 < torch.fmod(q + k, 3),
    "a square": lambda b, h, q, k: (q - k) * (q - k) <= 40,
    "the difference of far terms": lambda b, h, q, k: (q - LARGE[q % 4]) - (k - LARGE[k % 4]) <= 3,
    "rounded sums": lambda b, h, q, k: (q.half() * 100.7 + k * 0.1) > 1000,
    "a mask of one": lambda b, h, q, k: (q == 7) & (k == 11),
    "what b decides, in a difference": lambda b, h, q, k: (q // 7 + b) < (q + k // 7),
    "not of a number, negated": lambda b, h, q, k: ~(torch.logical_not(h * 2) & (q >= 0)) | (q >= k + 9),
    "not of a number alone": lambda b, h, q, k: ~(torch.logical_not(h * 2) & (q >= 0)),
    "bits": lambda b, h, q, k: ((q ^ k) & 12) < ((q | k) >> 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str) -> None:
    traced = trace(TRAPS[name], "mask")
    for sizes, block in (((1, 2, 40, 33), (5, 3)), ((1, 2, 33, 40), (1, 1)), ((1, 2, 17, 40), (8, 40))):
        assert_sound(traced, sizes, block)


def test_positions_beyond_int32_are_bounded_in_int64() -> None:
    sizes = (1, 1, 2**20, 2**20)
    traced = trace(lambda b, h, q, k: q * 5000 > k * 4999, "mask")
    axes = axes_of(traced, sizes)
    rows, columns = axes.tiles("row", 2**14), axes.tiles("column", 2**14)
    certain, possible = decide_all(axes, rows, columns)
    assert all(n.dtype == torch.int64 for n in axes.analysis.bounds.nodes if n.op == "input")
    for i, j in ((0, 0), (5, 40), (40, 5), (63, 63), (63, 62), (62, 63)):
        q = i * 2**14 + torch.tensor([0, 2**14 - 1])[:, None]
        k = j * 2**14 + torch.tensor([0, 2**14 - 1])
        corners = q * 5000 > k * 4999
        assert certain[0, 0, i, j] == corners.all()
        assert possible[0, 0, i, j] == corners.any()


def test_functions_of_the_difference_beyond_int32_are_evaluated_in_int64() -> None:
    sizes = (1, 1, 2**19, 2**20)
    traced = trace(lambda b, h, q, k: (q * 5000 - k * 5000 + 1) % 7 == 0, "mask")
    axes = axes_of(traced, sizes)
    (term,) = axes.analysis.terms
    difference = torch.arange(1 - 2**20, 2**19)
    expected = F.pad(((difference * 5000 + 1) % 7 == 0).cumsum(0), (1, 0))
    assert term.axis == "diagonal"
    assert axes.values[term.low].flatten().tolist() == expected.tolist()


# text


def text(mask_mod: Any, sizes: Sizes = (1, 1, 1024, 1024)) -> tuple[Analysis, str]:
    traced = trace(mask_mod, "mask")
    analysis = analyze(fitted(traced.graph, sizes), sizes)
    lines = (line.split("#")[0].rstrip() for line in str(analysis.bounds).splitlines())
    return analysis, "\n".join(lines)


CAUSAL = """\
bounds():
  %0: bool = le(kv_high, q_low)
  %1: bool = le(kv_low, q_high)
  return %0, %1"""

WINDOW = """\
bounds():
  %0: bool = le(kv_high, q_low)
  %1: int32 = sub(q_high, kv_low)
  %2: bool = lt(%1, 200)
  %3: bool = bitwise_and(%0, %2)
  %4: bool = le(kv_low, q_high)
  %5: int32 = sub(q_low, kv_high)
  %6: bool = lt(%5, 200)
  %7: bool = bitwise_and(%4, %6)
  return %3, %7"""

DOCUMENT = """\
bounds(ids: int64[rank 2]):
  %0: bool = le(kv_high, q_low)
  %1: bool = eq(row0_low, column0_high)
  %2: bool = eq(row0_high, column0_low)
  %3: bool = bitwise_and(%1, %2)
  %4: bool = bitwise_and(%0, %3)
  %5: bool = le(kv_low, q_high)
  %6: bool = le(row0_low, column0_high)
  %7: bool = le(column0_low, row0_high)
  %8: bool = bitwise_and(%6, %7)
  %9: bool = bitwise_and(%5, %8)
  return %4, %9"""

DILATED = """\
bounds():
  return diagonal0_low, diagonal0_high"""


IDS = torch.zeros(2, 1024, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask_mod", "expected", "terms"),
    [
        (masks.causal(), CAUSAL, []),
        (masks.sliding_window(200), WINDOW, []),
        (masks.document(IDS, causal=True), DOCUMENT, ["ids[b, q_idx]", "ids[b, kv_idx]"]),
        (masks.dilated_window(8, 3), DILATED, ["remainder(q_idx, 3)"]),
    ],
    ids=["causal", "window", "document", "dilated"],
)
def test_text(mask_mod: Any, expected: str, terms: list[str]) -> None:
    analysis, found = text(mask_mod)
    assert found == expected
    assert len(analysis.terms) == len(terms)
    for term, line in zip(analysis.terms, terms, strict=True):
        assert line in str(term.graph)


def test_a_mask_that_keeps_everything_needs_nothing() -> None:
    assert text(and_masks())[1] == "bounds():\n  return True, True"


def test_what_heads_and_batches_decide_stays_in_the_graph() -> None:
    windows = torch.tensor([3, 5])
    analysis, found = text(masks.sliding_window(windows), (2, 2, 64, 64))
    assert "window[h]" in found
    assert not analysis.terms


def test_lengths_that_are_alike_share_a_graph() -> None:
    graph = trace(masks.sliding_window(200), "mask").graph
    assert analyze(graph, (1, 1, 5000, 5000)).bounds == analyze(graph, (1, 1, 6000, 8000)).bounds


def test_a_length_that_int32_only_just_holds_is_not_rounded_up() -> None:
    """q_idx * 1500 stays a linear form, which the next power of two would not allow."""
    length = 2**20 + 1
    analysis, found = text(lambda b, h, q, k: q * 1500 - k * 1500 <= 3000, (1, 1, length, length))
    assert not analysis.terms
    assert "int64" not in found
