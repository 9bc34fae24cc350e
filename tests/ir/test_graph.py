"""Nodes are shared, and a graph's key says what it computes: no more, in every process alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmod.ir.graph import Capture, Graph, GraphBuilder, rebuild
from flexmod.ir.trace import trace

ROOT = Path(__file__).parents[2]
docs = torch.arange(8)
Q, K = torch.int32, torch.int32


def mask(mod: Callable[..., Any]) -> Graph:
    return trace(mod, "mask").graph


def test_equal_nodes_are_one() -> None:
    builder = GraphBuilder()
    q, k = builder.input("q_idx", Q), builder.input("kv_idx", K)
    assert builder.input("q_idx", Q) is q
    assert builder.node("add", (q, k), Q) is builder.node("add", (q, k), Q)
    assert builder.node("add", (q, k), Q) is not builder.node("add", (k, q), Q)
    assert builder.const(1) is builder.const(1)
    assert builder.fresh_const(1) is not builder.fresh_const(1)
    graph = mask(lambda b, h, q, k: (docs[q] == docs[k]) & (docs[q] > 3))
    assert [n.op for n in graph.nodes].count("load") == 2


@pytest.mark.parametrize(
    ("one", "other"), [(0, 0.0), (0.0, -0.0), (1, True), (False, 0), (math.nan, 1.0), (1, 2)]
)
def test_constants_that_differ_are_two(one: Any, other: Any) -> None:
    builder = GraphBuilder()
    assert builder.const(one) is not builder.const(other)
    graphs = [trace(lambda s, b, h, q, k, c=c: s * c, "score").graph for c in (one, other)]
    assert graphs[0] != graphs[1]


def test_nan_is_equal_to_itself() -> None:
    builder = GraphBuilder()
    assert builder.const(math.nan) is builder.const(math.nan)


def test_homes() -> None:
    def home(mod: Callable[..., Any]) -> set[str]:
        return set(mask(mod).reads)

    assert home(lambda b, h, q, k: True) == set()
    assert home(lambda b, h, q, k: docs[3] > 2) == set()
    assert home(lambda b, h, q, k: docs[b] > h) == {"b", "h"}
    assert home(lambda b, h, q, k: docs[q] > 2) == {"q_idx"}
    assert set(trace(lambda s, b, h, q, k: s, "score").graph.reads) == {"score", "b", "h", "q_idx", "kv_idx"}


def test_nodes_come_after_their_arguments() -> None:
    nodes = mask(lambda b, h, q, k: (q - k > 3) & (docs[q - k] == docs[k])).nodes
    assert all(nodes.index(a) < nodes.index(n) for n in nodes for a in n.args)
    assert len(set(nodes)) == len(nodes)


def test_a_deep_graph_needs_no_recursion() -> None:
    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(3000):
            q = q + k
        return q > 0

    graph = mask(mod)
    assert len(rebuild(graph, lambda b, n, a: None).nodes) == len(graph.nodes)


def test_lines_do_not_count() -> None:
    one = mask(lambda b, h, q, k: q - k <= 3)
    other = mask(lambda b, h, q, k: q - k <= 3)
    assert one.result.where != other.result.where
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_what_counts() -> None:
    base = mask(lambda b, h, q, k: q - k <= 3)
    assert base != mask(lambda b, h, q, k: k - q <= 3)
    assert base != mask(lambda b, h, q, k: q - k <= 4)
    assert base != mask(lambda b, h, q, k: q - k < 3)
    assert base != mask(lambda b, h, q, k: q - k <= 3.0)
    assert base != Graph("score", base.results)
    capture = Capture("docs", torch.int64, 1)
    assert Graph("mask", base.results, (capture,)) != base
    assert Graph("mask", base.results, (Capture("docs", torch.int32, 1),)) != Graph(
        "mask", base.results, (capture,)
    )
    assert base != "a graph"


def test_the_tensor_itself_does_not_count() -> None:
    graphs = [mask(lambda b, h, q, k, t=t: t[q] == t[k]) for t in (torch.arange(8), torch.arange(9))]
    assert graphs[0] == graphs[1]


def test_skeleton() -> None:
    def window(left: int, right: int) -> Graph:
        return mask(lambda b, h, q, k: (q - k <= left) & (k - q <= right))

    (one, first), (other, second), (third, _) = (window(*w).skeleton for w in ((64, 64), (64, 65), (0, 1)))
    assert one == other == third
    assert (first, second) == ((64, 64), (64, 65))
    assert window(64, 64).skeleton[0] != mask(lambda b, h, q, k: (q - k <= 64) & (k - q <= 64.0)).skeleton[0]


def test_text() -> None:
    graph = mask(lambda b, h, q, k: (docs[q] == docs[k]) & (q - k <= 2))
    source = "graph = mask(lambda b, h, q, k: (docs[q] == docs[k]) & (q - k <= 2))"
    line = f"# {__file__}:{test_text.__code__.co_firstlineno + 1}: {source}"
    assert str(graph) == "\n".join(
        [
            "mask(docs: int64[rank 1]):",
            f"  %0: int64 = docs[q_idx]                           {line}",
            f"  %1: int64 = docs[kv_idx]                          {line}",
            f"  %2: bool = eq(%0, %1)                             {line}",
            f"  %3: int32 = sub(q_idx, kv_idx)                    {line}",
            f"  %4: bool = le(%3, 2)                              {line}",
            f"  %5: bool = bitwise_and(%2, %4)                    {line}",
            "  return %5",
        ]
    )
