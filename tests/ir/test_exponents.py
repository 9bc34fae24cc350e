"""Scores as Hopper's forward computes them: the same numbers, in fewer steps; and their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexmod import mods
from flexmod.codegen.compiler import lower
from flexmod.ir.evaluate import evaluate
from flexmod.ir.exponents import Exponent, exponent, score_bounds
from flexmod.ir.graph import Graph
from flexmod.ir.ops import LOG2_E
from flexmod.ir.trace import trace

B, H, M, N = 2, 3, 24, 40
START = 16
generator = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


slopes, of_batch, of_row, of_column = random(H), random(B).exp(), random(64), random(64)
table = random(H, 128)

# name: (score_mod, how many steps an element takes, further results besides an element and its row)
MODS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "alibi": (mods.alibi(slopes), 2, "slope"),
    "alibi of a number": (mods.alibi(H), 2, "slope"),
    "softcap": (mods.softcap(16.0), 3, "base 2"),
    "relative": (mods.relative_position(), 2, ""),
    "the other way": (lambda s, b, h, q, k: s + (k - q + 3) * 0.5, 2, ""),
    "negated": (lambda s, b, h, q, k: -(s - slopes[h] * -(q - k)) / 2, 6, "unit"),
    "minus": (lambda s, b, h, q, k: slopes[h] * (q - k) - s, 2, "slope"),
    "steep": (lambda s, b, h, q, k: s + 9 * (k - q), 4, ""),
    "capped, slopes": (lambda s, b, h, q, k: 9 * torch.tanh(s / 9) + slopes[h] * (k - q), 4, "slope"),
    "temperature": (lambda s, b, h, q, k: s * slopes[h] / of_batch[b] * 3, 3, "unit"),
    "one factor": (lambda s, b, h, q, k: s * slopes[h], 1, "unit"),
    "row": (lambda s, b, h, q, k: s + of_row[q], 2, ""),
    "row and column": (lambda s, b, h, q, k: 0.5 * (s + of_row[q] - of_column[k]), 3, "unit"),
    "a difference": (lambda s, b, h, q, k: s + (of_row[q] - of_column[k]), 3, ""),
    "table": (lambda s, b, h, q, k: s + table[h, q - k + 64], 5, ""),
    "table, row, steps": (lambda s, b, h, q, k: s + table[h, q - k + 64] + of_row[q] - 3 * k, 7, ""),
    "scaled table": (lambda s, b, h, q, k: 2 * (s + table[h, q - k + 64]), 5, "unit"),
    "distance": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k), 5, ""),
    "capped sum": (lambda s, b, h, q, k: 30 * torch.tanh((s + slopes[h] * (q - k)) / 30) + 7, 6, "base 2"),
    "cap of captured": (lambda s, b, h, q, k: 9 * torch.tanh(s + of_column[k]), 4, "base 2"),
    "large cap": (lambda s, b, h, q, k: 1e8 * torch.tanh(s / 1e8), 3, "unit"),
    "learned cap": (lambda s, b, h, q, k: slopes[h] * torch.tanh(s / slopes[h]), 4, "unit"),
    "gate": (lambda s, b, h, q, k: torch.sigmoid(s) * 3 + torch.tanh(of_row[q]), 3, "base 2"),
    "twice": (lambda s, b, h, q, k: (s + 0.125 * q) + s, 3, ""),
    "square": (lambda s, b, h, q, k: s * s, 2, ""),
    "-inf": (lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), 3, ""),
    "-1e9": (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), 3, ""),
    "+1e9": (lambda s, b, h, q, k: s + 1e9, 2, ""),
    "infinite factor": (lambda s, b, h, q, k: -(s.abs() + 1) * math.inf, 5, ""),
    "no score": (lambda s, b, h, q, k: q * 1.5, 0, ""),
    "a number": (lambda s, b, h, q, k: 0.5, 0, "base 2"),
}


def lowered(score_mod: Callable[..., Any], length: int = 64) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    traced = trace(score_mod, "score")
    graph = lower(traced.graph, (B, H, length, length), split=False).graph
    assert graph is not None
    return graph, traced.tensors


def element_steps(found: Exponent) -> int:
    """Operations of the element's result that read rows and columns, or the product."""
    element = Graph("score", found.graph.results[:1])
    axes = {"q_idx", "kv_idx"}
    return sum(bool(n.args) and ("score" in n.home or axes <= n.home) for n in element.nodes)


@pytest.mark.parametrize("name", MODS)
def test_its_sum_is_the_score(name: str) -> None:
    score_mod, steps, made = MODS[name]
    graph, tensors = lowered(score_mod)
    found = exponent(graph)
    slopes_found = len(found.graph.results) - found.parts - found.has_unit
    facts = {"base 2": found.in_base_2, "unit": found.has_unit, "slope": slopes_found > 0}
    assert (element_steps(found), {fact for fact, there in facts.items() if there}) == (steps, {made} - {""})
    assert_sums_to_the_score(found, graph, tensors)


@pytest.mark.parametrize("name", MODS)
def test_its_sum_is_the_score_for_float8_too(name: str) -> None:
    graph, tensors = lowered(MODS[name][0])
    found = exponent(graph, coarse=True)
    assert_sums_to_the_score(found, graph, tensors)
    short = any(node.op == "tanh_approximate" for node in found.graph.nodes)
    assert short == (name in ("softcap", "capped, slopes", "capped sum"))


def assert_sums_to_the_score(found: Exponent, graph: Graph, tensors: tuple[torch.Tensor, ...]) -> None:
    product, scale = random(B, H, M, N).double() * 40, 0.3
    q_idx, offset = torch.arange(M)[:, None] + 8, torch.arange(N)
    given = {
        "b": torch.arange(B)[:, None, None, None],
        "h": torch.arange(H)[:, None, None],
        "q_idx": q_idx,
        "kv_idx": START + offset,
        "real": torch.float64,
    }
    (expected,) = evaluate(graph, tensors, score=product * scale, **given)
    others = {
        "scale": torch.tensor(scale, dtype=torch.float64),
        "offset": offset,
        "start": torch.tensor(START),
    }
    results = evaluate(found.graph, tensors, score=product, **others, **given)
    parts = results[: found.parts]
    for row in parts[1:]:
        assert row.shape[-1:] in ((), (1,))
    total = sum(parts).expand(B, H, M, N) / (LOG2_E if found.in_base_2 else 1.0)
    if found.has_unit:
        assert (results[-1] > 0).all()
        total = total * results[-1]
    torch.testing.assert_close(total.double(), expected.expand(B, H, M, N).double(), rtol=1e-12, atol=1e-10)


def test_the_texts_of_graphs() -> None:
    graph, _ = lowered(mods.softcap(16.0))
    assert without_lines(exponent(graph).graph) == (
        "score():\n"
        "  %0: float32 = mul(scale, 0.18033688011112042)\n"
        "  %1: float32 = mul(score, %0)\n"
        "  %2: float32 = logistic(%1)\n"
        "  %3: float32 = mul(%2, -46.16624130844683)\n"
        "  return %3, 23.083120654223414"
    )
    assert without_lines(exponent(graph, coarse=True).graph) == (
        "score():\n"
        "  %0: float32 = mul(scale, 0.0625)\n"
        "  %1: float32 = mul(score, %0)\n"
        "  %2: float32 = tanh_approximate(%1)\n"
        "  return %2, 16.0"
    )
    graph, _ = lowered(mods.relative_position())
    assert without_lines(exponent(graph).graph) == (
        "score():\n"
        "  %0: float32 = mul(score, scale)\n"
        "  %1: float32 = cast(offset)\n"
        "  %2: float32 = mul(%1, -1.0)\n"
        "  %3: float32 = add(%0, %2)\n"
        "  %4: float32 = cast(q_idx)\n"
        "  %5: float32 = cast(start)\n"
        "  %6: float32 = sub(%4, %5)\n"
        "  return %3, %6"
    )


def test_only_a_small_known_factor_takes_the_approximate_tanh() -> None:
    """Its error times 64 changes a weight by 1/32: half of what rounding to float8 does."""
    cap = torch.tensor([8.0])
    for of_score, taken in (
        (lambda s, b, h, q, k: 64.0 * torch.tanh(s), True),
        (lambda s, b, h, q, k: s * 0 - 64.0 * torch.tanh(s), True),
        (lambda s, b, h, q, k: 65.0 * torch.tanh(s), False),
        (lambda s, b, h, q, k: torch.sigmoid(s), False),
        (lambda s, b, h, q, k: torch.clamp(cap[h], 1.0, 9.0) * torch.tanh(s), False),
    ):
        found = exponent(lowered(of_score)[0], coarse=True)
        assert any(node.op == "tanh_approximate" for node in found.graph.nodes) == taken


LARGE = {
    "+1e9": lambda s, b, h, q, k: s + 1e9,
    "a row of 1e9": lambda s, b, h, q, k: s + 1e9 * of_row[q] - of_column[k],
    "one of two": lambda s, b, h, q, k: torch.where(q > k, -1e9, s) + slopes[h] * (q - k),
    "times 1e9": lambda s, b, h, q, k: s * slopes[h] * 1e9 + of_row[q],
    "steep": lambda s, b, h, q, k: s + 1e5 * (k - q),
    "a far position": lambda s, b, h, q, k: s + (k + 2**30).float() * 0.1,
    "a far float": lambda s, b, h, q, k: s + (k.float() + 2.0**30) * 0.1,
    "a cap of 1e8": lambda s, b, h, q, k: 1e8 * torch.tanh(s / 1e8) + of_row[q],
}


@pytest.mark.parametrize("name", LARGE)
def test_large_scores_are_rounded_as_written(name: str) -> None:
    """The backward computes them as written: near 1e9 another order is another multiple of 64."""
    graph, tensors = lowered(LARGE[name])
    found = exponent(graph)
    assert len(found.graph.results) == 1
    given = {
        "b": torch.arange(B)[:, None, None, None], "h": torch.arange(H)[:, None, None],
        "q_idx": torch.arange(M)[:, None], "kv_idx": START + torch.arange(N),
    }  # fmt: skip
    product, scale = random(B, H, M, N), torch.tensor(0.3)
    others = {"scale": scale, "offset": torch.arange(N), "start": torch.tensor(START)}
    (element,) = evaluate(found.graph, tensors, score=product, **others, **given)
    (score,) = evaluate(graph, tensors, score=product * scale, **given)
    assert torch.equal(*torch.broadcast_tensors(element, score))


def without_lines(graph: Graph) -> str:
    return "\n".join(line.split("#")[0].rstrip() for line in str(graph).splitlines())


def test_what_cancels_stays_as_it_was_written() -> None:
    """Sums of large numbers that nearly cancel: in float32 the exponent is as near as the score is."""
    large = torch.linspace(0, 1e6, 64)
    graph, tensors = lowered(lambda s, b, h, q, k: s + (large[q] - large[k]))
    found = exponent(graph)
    q_idx, offset = torch.arange(64)[:, None], torch.arange(32)
    given = {"b": torch.tensor(0), "h": torch.tensor(0), "q_idx": q_idx, "kv_idx": 32 + offset}
    product = torch.randn(64, 32, generator=generator)
    others = {"scale": torch.tensor(1.0), "offset": offset, "start": torch.tensor(32)}
    (element,) = evaluate(found.graph, tensors, score=product, **others, **given)
    (score,) = evaluate(graph, tensors, score=product, **given)
    assert torch.equal(element, score)


def test_an_index_is_exact_far_from_the_start() -> None:
    """Both parts of q_idx - kv_idx are whole numbers: in float32 their sum is the difference itself."""
    graph, tensors = lowered(mods.relative_position(), 1 << 23)
    found = exponent(graph)
    q_idx, start, offset = torch.tensor([[8_388_607], [3]]), torch.tensor(8_388_480), torch.arange(128)
    given = {"b": torch.tensor(0), "h": torch.tensor(0), "q_idx": q_idx, "kv_idx": start + offset}
    others = {"scale": torch.tensor(1.0), "offset": offset, "start": start}
    zero = torch.zeros(2, 128)
    element, row = evaluate(found.graph, tensors, score=zero, **others, **given)
    distance = (q_idx - (start + offset)).double()
    error = element.double() + row.double() - distance
    assert error[0].abs().max() == 0
    assert (error[1] / distance[1]).abs().max() < 2**-23


# Bounds


@pytest.mark.parametrize(
    ("score_mod", "expected"),
    [
        (mods.softcap(16.0), (-16.0, 16.0)),
        (lambda s, b, h, q, k: torch.sigmoid(s) * 3 - 1, (-1.0, 2.0)),
        (lambda s, b, h, q, k: torch.maximum(torch.minimum(s, s * 0 + 8.0), s * 0 - 4.0), (-4.0, 8.0)),
        (lambda s, b, h, q, k: torch.where(q >= k, torch.sin(s), 5.0), (-1.0, 5.0)),
        (lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s), -math.inf), (-math.inf, 1.0)),
        (lambda s, b, h, q, k: torch.tanh(s) + slopes[h], (-math.inf, math.inf)),
        (lambda s, b, h, q, k: torch.tanh(s) * (q - k), (-math.inf, math.inf)),
        (lambda s, b, h, q, k: torch.tanh(s).bfloat16(), (-math.inf, math.inf)),
        (mods.relative_position(), (-math.inf, math.inf)),
    ],
)
def test_bounds_of_a_score(score_mod: Callable[..., Any], expected: tuple[float, float]) -> None:
    assert score_bounds(lowered(score_mod)[0]) == expected


@pytest.mark.parametrize(
    ("score_mod", "taken"),
    [
        (lambda s, b, h, q, k: torch.tanh(s * slopes[h] + of_row[q] * (q - k)), True),
        (lambda s, b, h, q, k: torch.tanh(s * slopes[h] + of_row[q] - 0.25 * (q - k)), True),
        (lambda s, b, h, q, k: torch.sigmoid(torch.sin(s) * of_row[q]), True),
        (lambda s, b, h, q, k: torch.tanh(s + of_column[k]), False),
        (lambda s, b, h, q, k: torch.tanh(s + torch.sqrt(9.0 - k)), False),
        (lambda s, b, h, q, k: s + torch.tanh(of_row[q]), False),
    ],
)
def test_neighbours_meet_where_no_column_spoils_them(score_mod: Callable[..., Any], taken: bool) -> None:
    found = exponent(lowered(score_mod)[0]).graph
    assert any(n.op == "logistic" for n in found.nodes) == taken
