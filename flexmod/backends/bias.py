"""Finds score mods that add a bias to the score, score + f(b, h, q_idx, kv_idx), and computes the bias.

A bias along diagonals, such as ALiBi's or a table of relative positions, needs one number for each difference
of positions. `Bias` computes these once a call and spreads them over each step's scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flexmod.backends.steps import Step
from flexmod.ir.derivative import is_diagonal
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Graph, GraphBuilder, Node, rebuild
from flexmod.ir.ops import CAST
from flexmod.ir.trace import Traced

FLOATS = (torch.float32, torch.float64)


@lru_cache(256)
def added_to_score(graph: Graph) -> Graph | None:
    """Returns the graph of f if the score mod is score + f, where f does not depend on the score.

    f may be -inf where the mod is -inf. Returns None for any other mod.
    """
    rebuilt = rebuild(graph, lambda builder, node, args: None)
    builder = GraphBuilder()
    builder.adopt(rebuilt.nodes)
    added = _added(builder, rebuilt.result)
    return None if added is None else graph.of([added])


def _added(builder: GraphBuilder, node: Node) -> Node | None:
    if node.op == "input" and node.value == "score":
        return builder.const(0.0)
    if node.dtype not in FLOATS or "score" not in node.home:
        return None
    args = node.args
    if node.op == CAST:
        return _added(builder, args[0])
    if node.op == "where" and "score" not in args[0].home:
        branches = [_branch(builder, x) for x in args[1:]]
        if None not in branches:
            return builder.node("where", [args[0], *branches], node.dtype)  # type: ignore[list-item]
    if node.op not in ("add", "sub"):
        return None
    for place in (0, 1) if node.op == "add" else (0,):
        own, other = args[place], args[1 - place]
        if "score" in own.home and "score" not in other.home:
            added = _added(builder, own)
            if added is None or not added.is_const or added.value != 0.0:
                return None if added is None else builder.node(node.op, [added, other], node.dtype)
            if node.op == "add":
                return builder.node(CAST, [other], node.dtype, node.dtype)
            return builder.node("mul", [other, builder.const(-1.0)], node.dtype)
    return None


def _branch(builder: GraphBuilder, node: Node) -> Node | None:
    return node if node.is_const and node.value == -torch.inf else _added(builder, node)


def _without_casts(node: Node) -> Node:
    return _without_casts(node.args[0]) if node.op == CAST else node


class Bias:
    """The bias of one call. `graph` computes f, see `added_to_score`."""

    def __init__(self, graph: Graph, tensors: Sequence[Tensor], lengths: tuple[int, int]) -> None:
        self._traced = Traced(graph, tuple(tensors))
        self._lengths = lengths
        self._diagonal = is_diagonal(graph) and graph.reads >= {"q_idx", "kv_idx"}
        self._new = _without_casts(graph.result).op != "load"  # else a view of a captured tensor
        self._line: dict[tuple[range, range], Tensor] = {}

    def of(self, step: Step, dtype: torch.dtype) -> Tensor:
        """Returns the bias of a step's scores, -inf where the mask is False.

        It broadcasts to [z, g, rows, columns], with 4 dimensions.
        """
        spread = self._diagonal and len(step.tiles.columns) == 1
        bias = self._spread(step, dtype) if spread else self._evaluated(step, dtype)
        if not step.forbidden:
            return bias
        heads = torch.broadcast_shapes(bias.shape[:2], *(x.shape[:2] for _, x in step.forbidden))
        whole = bias.expand(*heads, *step.shape[2:])
        if whole.shape != bias.shape or not (spread or self._new):
            whole = whole.clone()
        step.forbid(whole, -torch.inf)
        return whole

    def _evaluated(self, step: Step, dtype: torch.dtype, **positions: Tensor) -> Tensor:
        at = {**step.positions, **positions}
        (bias,) = evaluate(self._traced.graph, self._traced.tensors, real=dtype, **at)
        return bias.to(dtype)[(None,) * (4 - bias.dim())]

    def _spread(self, step: Step, dtype: torch.dtype) -> Tensor:
        """Reads each row from the differences' line, which begins with the largest difference.

        The next column is one to the right on the line, and the next row one to the left.
        """
        rows, columns = step.tiles.rows, step.tiles.columns[0]
        line = self._line.get((step.z, step.g))
        if line is None:
            length, keys = self._lengths
            difference = torch.arange(length - 1, -keys, -1)
            line = self._line[step.z, step.g] = self._evaluated(
                step, dtype, q_idx=difference.clamp(min=0), kv_idx=(-difference).clamp(min=0)
            ).contiguous()
        first = self._lengths[0] - rows.stop + columns.start
        shape = (*line.shape[:2], *step.shape[2:])
        from_last_row = line.as_strided(shape, (*line.stride()[:2], 1, 1), line.storage_offset() + first)
        return from_last_row.index_select(2, torch.arange(shape[2] - 1, -1, -1))
