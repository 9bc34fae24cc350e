"""Which sum the indices of a load allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learned_mods import learned_mods

from flexmod.ir.derivative import differentiate_captures, is_diagonal, terms_of
from flexmod.ir.graph import Graph
from flexmod.ir.passes import fitted, optimize, promote_constants, widen
from flexmod.ir.trace import trace

T = torch.zeros(64, requires_grad=True)
ROW, COLUMN, DIAGONAL, ELEMENT = "row", "column", "diagonal", "element"
PLACES = torch.arange(64)
COUNTS = torch.arange(4, dtype=torch.int32)

# what indexes T, and the sum that it allows
INDICES: dict[str, tuple[Callable[..., Any], str]] = {
    "number": (lambda b, h, q, k: 3, ROW),
    "batch and head": (lambda b, h, q, k: b + 2 * h, ROW),
    "query": (lambda b, h, q, k: 2 * q + h, ROW),
    "query, by a load": (lambda b, h, q, k: PLACES[q], ROW),
    "key": (lambda b, h, q, k: k // 2, COLUMN),
    "key, by a load of head and key": (lambda b, h, q, k: PLACES[k] + h, COLUMN),
    "distance": (lambda b, h, q, k: q - k, DIAGONAL),
    "distance the other way": (lambda b, h, q, k: 7 - q + k + h, DIAGONAL),
    "negated": (lambda b, h, q, k: -(q - k), DIAGONAL),
    "multiples": (lambda b, h, q, k: 3 * q - k * 3, DIAGONAL),
    "in pieces": (lambda b, h, q, k: (q + 5) * 2 - (k - 1) - k, DIAGONAL),
    "function of the distance": (lambda b, h, q, k: abs(q - k).clamp(max=5) // 2, DIAGONAL),
    "float function of the distance": (lambda b, h, q, k: torch.log((q - k).float()).int(), DIAGONAL),
    "distance, by a load": (lambda b, h, q, k: PLACES[q - k], DIAGONAL),
    "distance and a load of the head": (lambda b, h, q, k: q + COUNTS[h] - k, DIAGONAL),
    "distance by a load of the head": (lambda b, h, q, k: (q - k) * COUNTS[h], DIAGONAL),
    "choice by the sign": (lambda b, h, q, k: torch.where(q + 1 >= k, q - k, 0), DIAGONAL),
    "choice by two distances": (lambda b, h, q, k: ((q > k) & (2 * k != 3 + q + q)).int(), DIAGONAL),
    "wider distance": (lambda b, h, q, k: q.long() - k.long(), DIAGONAL),
    "narrow distance": (lambda b, h, q, k: q.to(torch.int16) - k.to(torch.int16), DIAGONAL),
    "sum": (lambda b, h, q, k: q + k, ELEMENT),
    "unequal multiples": (lambda b, h, q, k: 2 * q - k, ELEMENT),
    "unequal loads": (lambda b, h, q, k: q * COUNTS[h] - k * COUNTS[h], ELEMENT),
    "blocks": (lambda b, h, q, k: q // 2 - k // 2, ELEMENT),
    "remainders": (lambda b, h, q, k: q % 4 - k % 4, ELEMENT),
    "distance of loads": (lambda b, h, q, k: PLACES[q] - PLACES[k], ELEMENT),
    "wrapped before it is widened": (
        lambda b, h, q, k: q.to(torch.int16).int() - k.to(torch.int16).int(),
        ELEMENT,
    ),
    "comparison of what may wrap": (
        lambda b, h, q, k: (q.to(torch.int16) > k.to(torch.int16)).int(),
        ELEMENT,
    ),
    "distance and query": (lambda b, h, q, k: (q - k) + q, ELEMENT),
    "truth of a query": (lambda b, h, q, k: (q > 3).int() - (k > 3).int(), ELEMENT),
}


def alongs(score_mod: Callable[..., Any], change: Callable[..., Any] = optimize) -> list[str]:
    found = trace(score_mod, "score")
    learned = [n for n, t in enumerate(found.tensors) if t.is_floating_point()]
    return [term.along for term in terms_of(differentiate_captures(change(found.graph), learned))]


def fitted_to_a_call(graph: Graph) -> Graph:
    return optimize(fitted(graph, (2, 4, 64, 64)))


@pytest.mark.parametrize("change", [optimize, widen, fitted_to_a_call], ids=["int32", "int64", "fitted"])
@pytest.mark.parametrize("name", INDICES)
def test_index(name: str, change: Callable[..., Any]) -> None:
    index, along = INDICES[name]
    assert alongs(lambda s, b, h, q, k: s + T[index(b, h, q, k)], change) == [along]


def test_score() -> None:
    assert alongs(lambda s, b, h, q, k: s + T[s.int()]) == [ELEMENT]


def test_scalar() -> None:
    scalar = torch.zeros((), requires_grad=True)
    assert alongs(lambda s, b, h, q, k: s * scalar) == [ROW]


def test_a_load_may_have_wrapped_before_it_is_widened() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + T[(q + COUNTS[h]).long() - k.long()]

    assert alongs(score_mod) == [ELEMENT]
    assert alongs(score_mod, widen) == [DIAGONAL]


BIASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "difference of floats": (lambda q, k: 0.5 * (q.float() - k.float()), True),
    "floats of a sum": (lambda q, k: (q + 3).float() - k.double(), True),
    "negated": (lambda q, k: -q.float() + k.float(), True),
    "function of the difference": (lambda q, k: torch.where(q > k, 1.0, (q - k).float().sin()), True),
    "far position": (lambda q, k: (q + 2**30).float() - k.float(), False),
    "half position": (lambda q, k: q.half() - k.half(), False),
    "difference of multiples": (lambda q, k: q.float() - 2 * k.float(), False),
    "wrapped position": (lambda q, k: q.to(torch.uint8).float() - k.to(torch.uint8).float(), False),
    "table": (lambda q, k: PLACES[q].float() - k.float(), False),
}


@pytest.mark.parametrize("name", BIASES)
def test_constant_along_diagonals(name: str) -> None:
    bias, expected = BIASES[name]
    graph = trace(lambda s, b, h, q, k: bias(q, k), "score").graph
    assert is_diagonal(optimize(graph)) == is_diagonal(fitted_to_a_call(graph)) == expected


def test_wrapped_bytes_have_no_diagonal() -> None:
    """A byte has bounds even where it has wrapped."""
    assert alongs(lambda s, b, h, q, k: s + T[q.to(torch.uint8).int() - k.to(torch.uint8).int()]) == [ELEMENT]


def test_several_indices() -> None:
    table = torch.zeros(4, 4, requires_grad=True)
    assert alongs(lambda s, b, h, q, k: s + table[h, q - k] + table[q, h]) == [DIAGONAL, ROW]
    assert alongs(lambda s, b, h, q, k: s + table[q, q - k]) == [ELEMENT]


def test_promoted_numbers() -> None:
    """A number that may change is none to count on, but for one that is added."""

    def promoted(graph: Any) -> Any:
        return promote_constants(graph, frozenset(range(len(graph.skeleton[1]))))

    assert alongs(lambda s, b, h, q, k: s + T[q - k + 9], promoted) == [DIAGONAL]
    assert alongs(lambda s, b, h, q, k: s + T[2 * q - 2 * k], promoted) == [ELEMENT]
    assert alongs(lambda s, b, h, q, k: s + T[2 * (q - k)], promoted) == [DIAGONAL]


def test_the_terms_name_their_captures_and_indices() -> None:
    make, shapes = learned_mods(2, 4, 13, 11)["several"]
    found = trace(make(*(torch.zeros(shape, requires_grad=True) for shape in shapes)), "score")
    names = [capture.name for capture in found.graph.captures]
    terms = terms_of(differentiate_captures(found.graph, range(len(names))))
    assert {(names[term.capture], term.along, len(term.indices)) for term in terms} == {
        ("t", "diagonal", 1),
        ("u", "row", 1),
        ("v", "row", 0),
    }
