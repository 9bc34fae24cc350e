"""Differences of positions as floats: graphs before and after, and the same numbers bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS, Graph
from flexmod.ir.passes import EXACT, fitted
from flexmod.ir.trace import trace

slopes = torch.tensor([0.5, 0.25])
places = torch.arange(64, dtype=torch.int32)


def body(graph: Graph) -> str:
    """The graph's lines, without the user's."""
    return "; ".join(line.partition("  #")[0].strip() for line in str(graph).splitlines()[1:])


UNCHANGED = None
PAIRS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "ALiBi": (
        lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "%0: float32 = slopes[h]; %1: float32 = cast(kv_idx); %2: float32 = cast(q_idx); "
        "%3: float32 = sub(%1, %2); %4: float32 = mul(%0, %3); %5: float32 = add(score, %4); return %5",
    ),
    "a distance": (
        lambda s, b, h, q, k: s - (q - k).abs().float(),
        "%0: float32 = cast(q_idx); %1: float32 = cast(kv_idx); %2: float32 = sub(%0, %1); "
        "%3: float32 = abs(%2); %4: float32 = sub(score, %3); return %4",
    ),
    "no zero becomes negative": (
        lambda s, b, h, q, k: s / -(q - k),
        "%0: float32 = cast(q_idx); %1: float32 = cast(kv_idx); %2: float32 = sub(%0, %1); "
        "%3: float32 = sub(0.0, %2); %4: float32 = div(score, %3); return %4",
    ),
    "rows alone are cheap as they are": (lambda s, b, h, q, k: s + q * 0.5, UNCHANGED),
    "an index stays an integer": (lambda s, b, h, q, k: s + slopes[(q - k) % 2], UNCHANGED),
    "so it does on its way through a float": (
        lambda s, b, h, q, k: s + slopes[(q - k).abs().float().log1p().int()],
        UNCHANGED,
    ),
    "a product may be a negative zero": (lambda s, b, h, q, k: s + 0.5 * (q * k), UNCHANGED),
    "a loaded integer may be anything": (lambda s, b, h, q, k: s + 0.5 * (places[q] - k), UNCHANGED),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    mod, expected = PAIRS[name]
    graph = trace(mod, "score").graph
    assert body(fitted(graph, (2, 2, 64, 64))) == (body(graph) if expected is UNCHANGED else expected)


def test_only_where_float32_is_exact() -> None:
    graph = trace(lambda s, b, h, q, k: s + 0.5 * (q - k), "score").graph
    assert fitted(graph, (1, 1, EXACT + 1, 4)) != graph
    assert fitted(graph, (1, 1, EXACT + 2, 4)) == graph


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_same_numbers_bit_for_bit(data: st.DataObject) -> None:
    """Random trees of what is converted, at the ends of what positions may be."""

    def tree(depth: int) -> Callable[[Any, Any], Any]:
        kind = data.draw(st.sampled_from(["q", "k", "number"] if depth == 0 else ["one", "two"]))
        if kind == "q":
            return lambda q, k: q // 3
        if kind == "k":
            return lambda q, k: k
        if kind == "number":
            number = data.draw(st.integers(-(2**20), 2**20))
            return lambda q, k: torch.full_like(q, number)
        first = tree(depth - 1)
        if kind == "one":
            one = data.draw(st.sampled_from([torch.neg, torch.abs]))
            return lambda q, k: one(first(q, k))
        second = tree(depth - 1)
        two = data.draw(st.sampled_from([torch.add, torch.sub, torch.minimum, torch.maximum]))
        return lambda q, k: two(first(q, k), second(q, k))

    made = tree(data.draw(st.integers(1, 4)))
    graph = trace(lambda s, b, h, q, k: s / made(q, k), "score").graph  # tells 0.0 from -0.0
    length = 2**22
    some = torch.tensor([0, 1, 2, 3, 5, length // 2, length - 1])
    at = dict(zip(POSITIONS, (some[:1], some[:1], some[:, None], some), strict=True))
    before, after = (
        evaluate(g, (), score=torch.ones(7, 7), **at)[0]
        for g in (graph, fitted(graph, (1, 1, length, length)))
    )
    assert torch.equal(before, after)
