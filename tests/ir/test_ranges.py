"""Comparisons as ranges: the same masks, in fewer steps for an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexmod import masks
from flexmod.codegen.compiler import lower
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import COLUMN, ROW, Graph
from flexmod.ir.integers import as_ranges
from flexmod.ir.passes import promote_constants
from flexmod.ir.trace import trace

LENGTH = 61
LOWEST, HIGHEST = -(2**31), 2**31 - 1
marks = torch.tensor([0, 5, -3, LOWEST, HIGHEST, 7, LOWEST + 1, 2], dtype=torch.int32).repeat(8)
wide = marks.long()

# name: (mask_mod, comparisons and absolute values of an element before, afterwards)
MASKS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "window": (masks.sliding_window(10), 2, 1),
    "window, the other way": (lambda b, h, q, k: (q - 9 <= k) & (k <= q), 2, 1),
    "open window": (lambda b, h, q, k: (q > k) & (q - k < 9), 2, 1),
    "may wrap": (lambda b, h, q, k: (q > k) & (q < k + 9), 2, 2),
    "both sides": (lambda b, h, q, k: abs(q - k) < 9, 2, 1),
    "limit first": (lambda b, h, q, k: (k - q).abs() <= 9, 2, 1),
    "row after column": (lambda b, h, q, k: (k - q >= -9) & (k <= q), 2, 1),
    "outside": (lambda b, h, q, k: abs(q - k) > 9, 2, 2),
    "image": (masks.standalone_window(8, 8, 3), 4, 1),
    "oblong": (masks.natten((8, 8), (3, 5)), 4, 2),
    "causal image": (masks.natten((8, 8), 3, causal=(True, False)), 4, 1),
    "two in turn": (lambda b, h, q, k: (q >= k) & (q % 9 >= k % 9) & (q - k < 8) & (q % 9 - k % 9 < 8), 4, 1),
    "one of two": (lambda b, h, q, k: ((q >= k) & (q - k < 5)) | (k < 3), 2, 1),
    "causal": (masks.causal(), 1, 1),
    "empty": (lambda b, h, q, k: (q >= k) & (q - k < 0), 2, 2),
    "never": (lambda b, h, q, k: abs(q - k) <= -1, 2, 2),
    "by row": (lambda b, h, q, k: (q >= 3) & (q <= 9), 0, 0),
    "twice": (lambda b, h, q, k: (2 * q >= 2 * k) & (2 * q - 2 * k <= 20), 2, 2),
    "floats": (lambda b, h, q, k: abs(q * 0.5 - k) <= 9.0, 2, 2),
    # the lowest number has no absolute value, and of what is captured nothing is known
    "captured": (lambda b, h, q, k: abs(marks[q] - marks[k]) <= 9, 2, 2),
    "captured, 64 bits": (lambda b, h, q, k: (wide[q] >= k) & (wide[q] - k <= 9), 2, 2),
    "from captured": (lambda b, h, q, k: (k >= marks[q]) & (k - marks[q] <= 9), 2, 2),
}  # fmt: skip


def lowered(mask_mod: Callable[..., Any], extent: int = 128) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    traced = trace(mask_mod, "mask")
    graph = lower(traced.graph, (1, 1, extent, extent), split=False).graph
    assert graph is not None
    return graph, traced.tensors


def steps(graph: Graph) -> int:
    """Comparisons and absolute values of an element."""
    counted = ("abs", "le", "lt", "ge", "gt", "unsigned_lt")
    return sum(n.op in counted and not (n.home <= ROW or n.home <= COLUMN) for n in graph.nodes)


def pairs(
    graph: Graph,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[Any, ...] = (),
    **score: torch.Tensor,
) -> torch.Tensor:
    positions = torch.arange(LENGTH, dtype=torch.int32)
    zero = torch.zeros((), dtype=torch.int32)
    places = {"b": zero, "h": zero, "q_idx": positions[:, None], "kv_idx": positions}
    (kept,) = evaluate(graph, tensors, numbers=numbers, **places, **score)
    return kept.expand(LENGTH, LENGTH)


@pytest.mark.parametrize("name", MASKS)
def test_the_same_mask_in_fewer_steps(name: str) -> None:
    mask_mod, before, after = MASKS[name]
    graph, tensors = lowered(mask_mod)
    found = as_ranges(graph)
    assert (steps(graph), steps(found)) == (before, after)
    assert torch.equal(pairs(found, tensors), pairs(graph, tensors))


@pytest.mark.parametrize("reach", [9, 1, 0, -1, -5, HIGHEST, LOWEST, LOWEST + 1])
@pytest.mark.parametrize("name", ["window", "open", "both sides", "within"])
def test_lengths_that_a_launch_gives(name: str, reach: int) -> None:
    """One graph for all of them, also where nothing is left of a range."""
    mods: dict[str, Callable[..., Any]] = {
        "window": lambda b, h, q, k: (q >= k) & (q - k <= reach),
        "open": lambda b, h, q, k: (k <= q) & (q - k < reach),
        "both sides": lambda b, h, q, k: abs(q - k) <= reach,
        "within": lambda b, h, q, k: abs(q - k) < reach,
    }
    graph, _ = lowered(mods[name])
    _, numbers = graph.skeleton
    found = as_ranges(promote_constants(graph, frozenset(range(len(numbers)))))
    assert steps(found) == 1
    assert torch.equal(pairs(found, (), numbers), pairs(graph, ()))


def test_what_is_added_goes_to_the_row() -> None:
    graph, _ = lowered(masks.standalone_window(8, 8, 3))
    assert "\n".join(line[:52].rstrip() for line in str(as_ranges(graph)).splitlines()) == (
        "mask():\n"
        "  %0: int32 = floor_divide(q_idx, 8)\n"
        "  %1: int32 = add(%0, 2)\n"
        "  %2: int32 = floor_divide(kv_idx, 8)\n"
        "  %3: int32 = sub(%1, %2)\n"
        "  %4: int32 = remainder(q_idx, 8)\n"
        "  %5: int32 = add(%4, 2)\n"
        "  %6: int32 = remainder(kv_idx, 8)\n"
        "  %7: int32 = sub(%5, %6)\n"
        "  %8: int32 = unsigned_max(%3, %7)\n"
        "  %9: bool = unsigned_lt(%8, 5)\n"
        "  return %9"
    )


def test_a_score_asks_as_the_mask_does() -> None:
    """So that a compiler finds the two equal."""
    window = masks.sliding_window(10)

    def near_ones(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where((q - k < 10) & (q >= k), s + (q - k), s * 2)

    graph = lower(trace(near_ones, "score").graph, (1, 1, 128, 128), split=False).graph
    assert graph is not None
    found = as_ranges(graph)
    assert (steps(graph), steps(found)) == (2, 1)
    (asked,) = (n for n in found.nodes if n.op == "unsigned_lt")
    assert Graph("mask", (asked,)) == as_ranges(lowered(window)[0])
    score = torch.randn(LENGTH, LENGTH)
    results = [pairs(g, (), score=score) for g in (graph, found)]
    assert torch.equal(*results)


def test_positions_of_64_bits_stay_comparisons() -> None:
    graph, _ = lowered(lambda b, h, q, k: abs(q * 1000 - k * 1000) <= 9, extent=2**30)
    assert str(as_ranges(graph)) == str(graph)
