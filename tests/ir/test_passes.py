"""Passes, one before-and-after pair a rule, as the graphs' own text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmod import masks
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Graph
from flexmod.ir.integers import integer_bounds, needs_int64
from flexmod.ir.offsets import MaskAt, Positions
from flexmod.ir.passes import (
    fitted,
    fold,
    optimize,
    promote_constants,
    simplify,
    split_mask,
    widen,
)
from flexmod.ir.trace import trace

docs = torch.arange(8)
flags = torch.ones(8, dtype=torch.bool)
heads = torch.ones(4)
small = torch.ones(8, dtype=torch.int8)


def text(graph: Graph | None) -> str:
    """The graph's body, a line an operation, without the user's lines."""
    if graph is None:
        return "None"
    return "; ".join(line.partition("  #")[0].strip() for line in str(graph).splitlines()[1:])


def score(mod: Callable[..., Any]) -> Graph:
    return trace(mod, "score").graph


def mask(mod: Callable[..., Any]) -> Graph:
    return trace(mod, "mask").graph


number = torch.tensor

FOLD = {
    "numbers": (
        lambda s, b, h, q, k: s + torch.full_like(s, 2) * 3,
        "%0: float32 = add(score, 6.0); return %0",
    ),
    "a cast": (lambda s, b, h, q, k: s + torch.full_like(q, 2.9), "%0: float32 = add(score, 2); return %0"),
    "a double is exact": (
        lambda s, b, h, q, k: torch.full_like(s, 0.1, dtype=torch.float64) * s,
        "%0: float64 = mul(0.1, score); %1: float32 = cast(%0); return %1",
    ),
    "halves round": (
        lambda s, b, h, q, k: s * torch.full_like(s, 0.1, dtype=torch.float16),
        "%0: float32 = mul(score, 0.0999755859375); return %0",
    ),
    "truths": (lambda s, b, h, q, k: torch.where(torch.ones_like(q > 1) & False, s, 1.0), None),
    "loads stay": (
        lambda s, b, h, q, k: s + heads[h],
        "%0: float32 = heads[h]; %1: float32 = add(score, %0); return %1",
    ),
}


@pytest.mark.parametrize(("mod", "after"), FOLD.values(), ids=FOLD)
def test_fold(mod: Callable[..., Any], after: str | None) -> None:
    expected = after or "%0: float32 = where(False, score, 1.0); return %0"
    assert text(fold(score(mod))) == expected


KEPT = object()
SIMPLIFY: dict[str, tuple[Callable[..., Any], Any]] = {
    "x + 0 of integers": (lambda s, b, h, q, k: s * (q + 0), "%0: float32 = mul(score, q_idx); return %0"),
    "x + 0 of floats stays: -0.0": (lambda s, b, h, q, k: s + 0.0, KEPT),
    "x - 0": (lambda s, b, h, q, k: s - 0.0, "return score"),
    "x * 1": (lambda s, b, h, q, k: 1 * s * 1.0, "return score"),
    "an integer * 1.0 becomes a float": (lambda s, b, h, q, k: q * 1.0, KEPT),
    "x / 1": (lambda s, b, h, q, k: s / 1, "return score"),
    "an integer / 1 becomes a float": (
        lambda s, b, h, q, k: q / 1,
        "%0: float32 = mul(q_idx, 1.0); return %0",
    ),
    "score / number": (lambda s, b, h, q, k: s / 4, "%0: float32 = mul(score, 0.25); return %0"),
    "a position / number stays exact": (lambda s, b, h, q, k: s + q / 49, KEPT),
    "a position / a power of two is exact": (
        lambda s, b, h, q, k: s + q / -8,
        "%0: float32 = mul(q_idx, -0.125); %1: float32 = add(score, %0); return %1",
    ),
    "1 / 2^127 has few digits": (lambda s, b, h, q, k: s + q / 2.0**127, KEPT),
    "log1p of a whole number": (
        lambda s, b, h, q, k: torch.log1p(torch.abs(q.float() - k)) * s,
        "%0: float32 = cast(q_idx); %1: float32 = sub(%0, kv_idx); %2: float32 = abs(%1); "
        "%3: float32 = add(%2, 1.0); %4: float32 = log(%3); %5: float32 = mul(%4, score); return %5",
    ),
    "log1p of a fraction stays": (lambda s, b, h, q, k: torch.log1p(q * 0.1) * s, KEPT),
    "log1p in half precision stays": (lambda s, b, h, q, k: torch.log1p(q.half()) * s, KEPT),
    "score / 0 stays": (lambda s, b, h, q, k: s / 0, KEPT),
    "x ** 1": (lambda s, b, h, q, k: s**1, "return score"),
    "x ** 2": (lambda s, b, h, q, k: s**2, "%0: float32 = mul(score, score); return %0"),
    "x ** 3": (
        lambda s, b, h, q, k: s**3,
        "%0: float32 = mul(score, score); %1: float32 = mul(%0, score); return %1",
    ),
    "x ** 4": (
        lambda s, b, h, q, k: s**4,
        "%0: float32 = mul(score, score); %1: float32 = mul(%0, %0); return %1",
    ),
    "x ** 0.5": (lambda s, b, h, q, k: s**0.5, "%0: float32 = sqrt(score); return %0"),
    "a half ** 3 rounds once": (lambda s, b, h, q, k: s.half() ** 3, KEPT),
    "x ** 7 stays": (lambda s, b, h, q, k: s**7, KEPT),
    "- - x": (lambda s, b, h, q, k: -torch.neg(s), "return score"),
    "~ ~ x": (lambda s, b, h, q, k: s * (~~q), "%0: float32 = mul(score, q_idx); return %0"),
    "not not truth": (
        lambda s, b, h, q, k: torch.where(torch.logical_not(torch.logical_not(q > k)), s, 0),
        "%0: bool = gt(q_idx, kv_idx); %1: float32 = where(%0, score, 0); return %1",
    ),
    "not not number is a truth": (lambda s, b, h, q, k: s * torch.logical_not(torch.logical_not(q)), KEPT),
    "c & True": (
        lambda s, b, h, q, k: torch.where((q > k) & True, s, 0),
        "%0: bool = gt(q_idx, kv_idx); %1: float32 = where(%0, score, 0); return %1",
    ),
    "c & False": (
        lambda s, b, h, q, k: torch.where((q > k) & False, s, 0.5),
        "%0: float32 = cast(0.5); return %0",
    ),
    "c | True": (lambda s, b, h, q, k: torch.where((q > k) | True, s, 0.5), "return score"),
    "c | False, c & c": (
        lambda s, b, h, q, k: torch.where(((q > k) | False) & (q > k), s, 0),
        "%0: bool = gt(q_idx, kv_idx); %1: float32 = where(%0, score, 0); return %1",
    ),
    "bits are no truths": (lambda s, b, h, q, k: s * (q & 1) * (q | 0), KEPT),
    "where(c, x, x)": (lambda s, b, h, q, k: torch.where(q > k, s, s), "return score"),
    "min(x, x)": (lambda s, b, h, q, k: torch.minimum(s, s), "return score"),
    "nothing": (lambda s, b, h, q, k: torch.tanh(s) * 2, KEPT),
}


@pytest.mark.parametrize(("mod", "after"), SIMPLIFY.values(), ids=SIMPLIFY)
def test_simplify(mod: Callable[..., Any], after: Any) -> None:
    graph = score(mod)
    found = text(simplify(simplify(graph)))
    assert found == (text(graph) if after is KEPT else after)


CAUSAL = "%0: bool = ge(q_idx, kv_idx); return %0"
SPLIT: dict[str, tuple[Callable[..., Any], str, str]] = {
    "nothing": (lambda s, b, h, q, k: s, "None", "None"),
    "no mask": (lambda s, b, h, q, k: s * 2, "%0: float32 = mul(score, 2); return %0", "None"),
    "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), "None", CAUSAL),
    "the other way round": (
        lambda s, b, h, q, k: torch.where(q < k, -float("inf"), s * 2),
        "%0: float32 = mul(score, 2); return %0",
        "%0: bool = lt(q_idx, kv_idx); %1: bool = logical_not(%0); return %1",
    ),
    "masked_fill": (
        lambda s, b, h, q, k: s.masked_fill(q < k, -float("inf")),
        "None",
        "%0: bool = lt(q_idx, kv_idx); %1: bool = logical_not(%0); return %1",
    ),
    "two": (
        lambda s, b, h, q, k: torch.where(q >= k, torch.where(k > 2, s, -float("inf")), -float("inf")),
        "None",
        "%0: bool = ge(q_idx, kv_idx); %1: bool = gt(kv_idx, 2); %2: bool = bitwise_and(%0, %1); return %2",
    ),
    "added": (lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -float("inf")), "None", CAUSAL),
    "added to more": (
        lambda s, b, h, q, k: torch.where(q >= k, q * 0.5, -float("inf")) + s,
        "%0: float32 = mul(q_idx, 0.5); %1: float32 = add(score, %0); return %1",
        CAUSAL,
    ),
    "an infinite tensor": (
        lambda s, b, h, q, k: torch.where(q >= k, s, torch.full_like(s, -float("inf"))),
        "None",
        CAUSAL,
    ),
    "integers where kept": (
        lambda s, b, h, q, k: torch.where(q >= k, q, -float("inf")),
        "%0: float32 = cast(q_idx); return %0",
        CAUSAL,
    ),
    "of the score": (
        lambda s, b, h, q, k: torch.where(s > 0, s, -float("inf")),
        "%0: bool = gt(score, 0); %1: float32 = where(%0, score, -inf); return %1",
        "None",
    ),
    "+inf": (
        lambda s, b, h, q, k: torch.where(q >= k, s, float("inf")),
        "%0: bool = ge(q_idx, kv_idx); %1: float32 = where(%0, score, inf); return %1",
        "None",
    ),
}


@pytest.mark.parametrize(("mod", "left", "mask_text"), SPLIT.values(), ids=SPLIT)
def test_split_mask(mod: Callable[..., Any], left: str, mask_text: str) -> None:
    graph = optimize(score(mod))
    rest, split = split_mask(graph)
    assert (text(rest), text(split)) == (left, mask_text)


def test_split_keeps_the_meaning() -> None:
    places = {
        n: torch.arange(6).view(s)
        for n, s in (("b", (-1, 1, 1, 1)), ("h", (-1, 1, 1)), ("q_idx", (-1, 1)), ("kv_idx", (-1,)))
    }
    tile = torch.randn(6, 6, 6, 6)
    for mod, _, _ in SPLIT.values():
        whole = optimize(score(mod))
        rest, split = split_mask(whole)
        (expected,) = evaluate(whole, (), **places, score=tile)
        found = tile if rest is None else evaluate(rest, (), **places, score=tile)[0]
        keep = torch.tensor(True) if split is None else evaluate(split, (), **places)[0]
        found = torch.where(keep, found, -torch.inf).expand(tile.shape)
        torch.testing.assert_close(found, expected.expand(tile.shape), rtol=0, atol=0)


def test_promote_constants() -> None:
    graph = mask(lambda b, h, q, k: (q - k <= 64) & (k >= 3))
    assert text(promote_constants(graph, frozenset({1}))) == (
        "%0: int32 = sub(q_idx, kv_idx); %1: bool = le(%0, 64); %2: bool = ge(kv_idx, param1); "
        "%3: bool = bitwise_and(%1, %2); return %3"
    )


def test_promotion_is_by_place_not_by_value() -> None:
    graph = mask(lambda b, h, q, k: (q - k <= 64) & (k - q <= 64))
    assert len(graph.skeleton[1]) == 2
    assert "param0" in text(promote_constants(graph, frozenset({0})))
    assert "64" in text(promote_constants(graph, frozenset({0})))


def test_widen() -> None:
    graph = mask(lambda b, h, q, k: (q * 7 + docs[q] > k.to(torch.int16)) & (q * 0.5 > 1))
    assert text(widen(graph)) == (
        "%0: int64 = mul(q_idx, 7); %1: int64 = docs[q_idx]; %2: int64 = add(%0, %1); "
        "%3: int16 = cast(kv_idx); "
        "%4: bool = gt(%2, %3); %5: float32 = mul(q_idx, 0.5); %6: bool = gt(%5, 1); "
        "%7: bool = bitwise_and(%4, %6); return %7"
    )


LONG, SHORT = 1 << 17, 1 << 10
INT64: dict[str, tuple[Callable[..., Any], int, bool]] = {
    "a comparison": (lambda b, h, q, k: q >= k, LONG, False),
    "a product": (lambda b, h, q, k: q * k > 5, LONG, True),
    "a small product": (lambda b, h, q, k: q * k > 5, SHORT, False),
    "a product below": (lambda b, h, q, k: q * -k > 5, LONG, True),
    "a power": (lambda b, h, q, k: q**2 > k, LONG, True),
    "a small power": (lambda b, h, q, k: q**2 > k, SHORT, False),
    "a shift": (lambda b, h, q, k: (q << 20) > k, LONG, True),
    "a shift back": (lambda b, h, q, k: (q >> 3) > k, LONG, False),
    "a number": (lambda b, h, q, k: q < 2**40, SHORT, True),
    "an intermediate": (lambda b, h, q, k: (q * 100000) // 100000 > k, LONG, True),
    "a remainder": (lambda b, h, q, k: (q % 100) * 1000 > k, LONG, False),
    "a clamp": (lambda b, h, q, k: (q - k).clamp(-5, 5) * 100000 > k, LONG, False),
    "a float": (lambda b, h, q, k: q * 1e9 > k, LONG, False),
    "bits": (lambda b, h, q, k: (q & 1023) * 1000000 > k, LONG, False),
    "already long": (lambda b, h, q, k: q.long() * k > 5, LONG, False),
    "a captured number wraps as in torch": (lambda b, h, q, k: docs.int()[q] * q > k, LONG, False),
}


@pytest.mark.parametrize(("mod", "extent", "wide"), INT64.values(), ids=INT64)
def test_needs_int64(mod: Callable[..., Any], extent: int, wide: bool) -> None:
    extents = {"b": 2, "h": 2, "q_idx": extent, "kv_idx": extent}
    assert needs_int64(mask(mod), extents) is wide


def test_a_promoted_number_counts() -> None:
    graph = promote_constants(mask(lambda b, h, q, k: q * 1000 > k), frozenset({0}))
    extents = {"b": 2, "h": 2, "q_idx": LONG, "kv_idx": LONG}
    assert not needs_int64(graph, extents, {0: 1000})
    assert needs_int64(graph, extents, {0: 100000})
    assert not needs_int64(graph, extents)


BOUNDED: tuple[Callable[..., Any], ...] = (
    lambda q, k: q - 2 * k + 3,
    lambda q, k: torch.where((q > 3) & (k > 2), q, -1),
    lambda q, k: torch.where(flags[q % 8], q, -5),
    lambda q, k: torch.where(torch.logical_and(q, k), q, -5),
    lambda q, k: q.to(torch.int8) + 0,
    lambda q, k: (q * 20).to(torch.uint8) + 300,
    lambda q, k: q * 20 * (q > k),
    lambda q, k: (q - k).clamp(-3, 4) % 5,
    lambda q, k: (q - k) // 3 + (q + 1) // (k + 1),
    lambda q, k: small[q % 8] * q,
    lambda q, k: torch.where(q * 0.5 > k, q, -k),
    lambda q, k: abs(q - k) ** 2 - (q << 3) + (k >> 1),
    lambda q, k: (q & k) + (q | k) - (q ^ k) + ~q,
    lambda q, k: torch.sign(q - k) * torch.fmod(q - k, 4),
    lambda q, k: (q + k).to(torch.int16) * 3000,
    lambda q, k: torch.maximum(q, k) - torch.minimum(q, torch.tensor(5)),
)


@pytest.mark.parametrize("number", range(len(BOUNDED)))
@pytest.mark.parametrize("may_wrap", [False, True])
def test_bounds_of_a_graph_hold_its_values(number: int, may_wrap: bool) -> None:
    graph = score(lambda s, b, h, q, k: BOUNDED[number](q, k))
    extents = {"b": 1, "h": 1, "q_idx": 40, "kv_idx": 30}
    known = integer_bounds(graph, extents, may_wrap=may_wrap)
    q, k = torch.arange(40)[:, None], torch.arange(30)
    values = [n for n in graph.nodes if not n.is_const and n.dtype != torch.float32]
    one = torch.zeros((), dtype=torch.int32)
    tensors = trace(lambda s, b, h, q, k: BOUNDED[number](q, k), "score").tensors
    found = evaluate(Graph("score", tuple(values), graph.captures), tensors, b=one, h=one, q_idx=q, kv_idx=k)
    for node, value in zip(values, found, strict=True):
        low, high = known[node]
        assert low <= value.min().item(), node
        assert value.max().item() <= high, node


@settings(max_examples=30, derandomize=True)
@given(st.integers(1, 2**31), st.integers(1, 2**31), st.integers(-(2**31), 2**31))
def test_what_needs_no_int64_does_not_overflow(queries: int, keys: int, factor: int) -> None:
    graph = mask(lambda b, h, q, k: q * factor - k > 3)
    extents = {"b": 1, "h": 1, "q_idx": queries, "kv_idx": keys}
    ends = [q * factor - k for q in (0, queries - 1) for k in (0, keys - 1)] + [(queries - 1) * factor]
    exceeds = any(not -(2**31) <= e < 2**31 for e in (*ends, factor))
    assert needs_int64(graph, extents) is exceeds


def test_the_negative_of_a_difference() -> None:
    """Of integers only: -(a - b) is -0.0 where b - a is 0.0."""
    whole = text(optimize(mask(lambda b, h, q, k: -(q - k) > 3)))
    assert whole == "%0: int32 = sub(kv_idx, q_idx); %1: bool = gt(%0, 3); return %1"
    assert "neg" in text(optimize(score(lambda s, b, h, q, k: -(s - q))))


# casts to int32


def stays(mod: Any, length: int) -> Graph:
    return fitted(trace(mod, "mask").graph, (1, 1, length, length))


def test_a_cast_to_int32_is_dropped_where_nothing_leaves_it() -> None:
    plain, cast = (lambda b, h, q, k: q * 3 >= k), (lambda b, h, q, k: (q.int() * 3).to(torch.int32) >= k)
    assert stays(cast, 1000) == stays(plain, 1000)
    assert text(stays(cast, 2**30)) != text(stays(plain, 2**30))


def test_arithmetic_on_a_cast_is_not_widened() -> None:
    graph = stays(lambda b, h, q, k: (q.int() * 2**20) % 7 + q * 2**20 > k, 2**14)
    inside = [n for n in graph.nodes if n.op == "remainder"]
    assert [n.dtype for n in inside] == [torch.int32]
    assert {n.dtype for n in graph.nodes if n.op == "input"} == {torch.int64}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_positions_of_a_table_are_widened(dtype: torch.dtype) -> None:
    """A captured integer wraps, but not as a position: of an order, or plus an offset."""
    order = torch.arange(1000).flip(0).to(dtype)
    numbers = torch.tensor([3], dtype=dtype)

    def far(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q * 2**22 >= k * (2**22 - 1)

    for mod in (masks.reordered(far, order), MaskAt(far, Positions(numbers, numbers))):
        traced = trace(mod, "mask")
        graph = fitted(traced.graph, (1, 1, 1000, 1000))
        zero, at = torch.tensor(0), torch.arange(1000, dtype=torch.int32)
        (found,) = evaluate(graph, traced.tensors, b=zero, h=zero, q_idx=at[:, None], kv_idx=at)
        place = order.long() if mod.__class__.__name__ != "MaskAt" else at.long() + 3
        torch.testing.assert_close(found, far(0, 0, place[:, None], place))


def test_a_clamped_entry_counts_as_a_position() -> None:
    table = torch.tensor([2**31 - 1], dtype=torch.int32)
    traced = trace(lambda b, h, q, k: q * 2**28 + table[h].clamp(0, 4096) * 2**20 >= k, "mask")
    graph = fitted(traced.graph, (1, 1, 64, 64))
    zero, at = torch.tensor(0), torch.arange(64, dtype=torch.int32)
    assert evaluate(graph, traced.tensors, b=zero, h=zero, q_idx=at, kv_idx=at)[0].all()


def test_bounds_know_what_wraps() -> None:
    """Behind a cast, and of captured numbers: (t & 0xFFFF) * 65536 may be negative."""
    values = torch.zeros(8, dtype=torch.int32)
    extents = dict.fromkeys(("b", "h", "q_idx", "kv_idx"), 2**20)
    for mod in (
        lambda b, h, q, k: q.int() * 65536 > 0,
        lambda b, h, q, k: (values[q] & 0xFFFF) * 65536 > 0,
        lambda b, h, q, k: values[q].abs() > 0,
        lambda b, h, q, k: (q * 65536).int().abs() > 0,
        lambda b, h, q, k: (values[q] & (2**40 - 1)) > 0,
    ):
        graph = trace(mod, "mask").graph
        known = integer_bounds(graph, extents)
        assert known[graph.result.args[0]] == (-math.inf, math.inf)
    graph = trace(lambda b, h, q, k: q * 65536 > 0, "mask").graph
    assert known_of(graph, extents) == (0, (2**20 - 1) * 65536)


def known_of(graph: Graph, extents: dict[str, int]) -> Any:
    return integer_bounds(graph, extents)[graph.result.args[0]]


def test_a_negative_zero_is_no_zero() -> None:
    for number, kept in ((0.0, False), (-0.0, True)):
        graph = simplify(trace(lambda s, b, h, q, k, c=number: s - c, "score").graph)
        assert ("sub" in text(graph)) == kept


@pytest.mark.parametrize("divisor", [1e-39, -1e-39, 1e-45, 2.0**127, -3e38, float("inf"), 0.0, float("nan")])
def test_a_score_is_divided_where_the_inverse_is_no_normal_number(divisor: float) -> None:
    graph = optimize(trace(lambda s, b, h, q, k: s / divisor, "score").graph)
    assert graph.result.op == "div"


@pytest.mark.parametrize("shared", ["heads[h]", "rows[q]", "rows[k]", "one"])
def test_a_score_is_multiplied_by_the_inverse_of_an_element_that_many_scores_share(shared: str) -> None:
    names = {"heads": torch.rand(4) + 1, "rows": torch.rand(64) + 1, "one": torch.tensor(3.0)}
    graph = optimize(trace(eval(f"lambda s, b, h, q, k: s / {shared}", names), "score").graph)
    product = graph.result
    assert product.op == "mul" and product.args[0].is_input("score")
    assert product.args[1].op == "div" and product.args[1].args[0].value == 1.0


def test_other_quotients_stay() -> None:
    rows, table, steps = torch.rand(64) + 1, torch.rand(64, 64) + 1, torch.tensor(49.0)
    for mod in (
        lambda s, b, h, q, k: s / table[q, k],
        lambda s, b, h, q, k: s / s,
        lambda s, b, h, q, k: s + torch.floor(q / steps),
        lambda s, b, h, q, k: rows[k] / rows[q] * s,
    ):
        left = [n for n in optimize(trace(mod, "score").graph).nodes if n.op == "div"]
        assert len(left) == 1 and not left[0].args[0].is_const


def test_numbers_of_the_default_dtype_have_it_in_the_graph() -> None:
    for dtype in (torch.float32, torch.float64):
        try:
            torch.set_default_dtype(dtype)
            graph = trace(lambda b, h, q, k: (q < 0.5) | (torch.where(q > k, 0.25, 1.5) > 1), "mask").graph
        finally:
            torch.set_default_dtype(torch.float32)
        assert {n.dtype for n in graph.nodes if n.is_const and type(n.value) is float} <= {dtype}
