"""Finds score mods that add a bias to the score, score + f(b, h, q_idx, kv_idx), and computes the bias.

A bias along diagonals, such as ALiBi's or a table of relative positions, needs one number for each difference
of positions. `Bias` computes these once a call. In a view of this line with both strides 1, the next row is
the line one number later: so rows come in descending order.

A steep bias, such as ALiBi's, makes weights of distant keys smaller than 2^-126. Intel's processors multiply
such denormal numbers in a hundred times the time: a backward took four to seven times as long. So a bias is
-inf where the weight is certainly below 2^-66, which no sum in float32 shows. `blocks` leaves them out too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from flexmod.backends.arguments import Problem
from flexmod.backends.steps import Step
from flexmod.ir.derivative import LARGEST_ON_LINE, is_diagonal
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Graph, GraphBuilder, Node, arguments_first, rebuild
from flexmod.ir.ops import CAST
from flexmod.ir.trace import Traced

FLOATS = (torch.float32, torch.float64)
# The logarithm of the largest weight that may be left out, and a bias from which on weights may be denormal.
LEFT_OUT, STEEP = -46.0, -60.0


@lru_cache(256)
def added_to_score(graph: Graph) -> Graph | None:
    """Returns the graph of f if the score mod is score + f, where f does not depend on the score.

    f may be -inf where the mod is -inf. Returns None for any other mod, and for two sums with the score: each
    rounds.
    """
    builder = GraphBuilder()
    copy = rebuild(graph, builder=builder)
    added: dict[Node, Node | None] = {}
    for node in copy.nodes:
        added[node] = _added(builder, node, added)
    found = added[copy.result]
    return None if found is None else graph.of([found])


def _added(builder: GraphBuilder, node: Node, added: Mapping[Node, Node | None]) -> Node | None:
    """Returns f for a node that is score + f. `added`: f of each argument."""
    if node.is_input("score"):
        return builder.const(0.0)
    if node.dtype not in FLOATS or "score" not in node.home:
        return None
    args = node.args
    if node.op == CAST:
        return added[args[0]]
    if node.op == "where" and "score" not in args[0].home:
        branches = [x if x.is_const and x.value == -torch.inf else added[x] for x in args[1:]]
        if None not in branches:
            return builder.node("where", [args[0], *branches], node.dtype)  # type: ignore[list-item]
    if node.op not in ("add", "sub"):
        return None
    for place in (0, 1) if node.op == "add" else (0,):
        own, other = args[place], args[1 - place]
        if "score" in own.home and "score" not in other.home:
            first = added[own]
            if first is None or not _is_exact(first):  # (score + 1e9) - 1e9 is not the score
                return None
            if not first.is_const or first.value != 0.0:
                return builder.node(node.op, [first, other], node.dtype)
            if node.op == "add":
                return builder.node(CAST, [other], node.dtype)
            return builder.node("mul", [other, builder.const(-1.0)], node.dtype)
    return None


def _is_exact(added: Node) -> bool:
    """Returns whether score + f has no rounding: f is 0 or -inf."""
    exact: set[Node] = set()
    for node in arguments_first([added]):
        choice = node.op == "where" and exact.issuperset(node.args[1:])
        if choice or node.is_const and node.value in (0.0, -torch.inf):
            exact.add(node)
    return added in exact


@lru_cache(256)
def _has_line(graph: Graph) -> bool:
    return graph.reads >= {"q_idx", "kv_idx"} and is_diagonal(graph)


def _without_casts(node: Node) -> Node:
    return _without_casts(node.args[0]) if node.op == CAST else node


class Bias:
    """The bias of one call, whose score mod must add one, see `added_to_score`."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor) -> None:
        assert problem.score is not None
        graph = added_to_score(problem.score.graph)
        assert graph is not None
        self._traced = Traced(graph, problem.score.tensors)
        self._operands = problem.scale, q, k
        self._lengths = q.shape[2], k.shape[2]
        self._diagonal = max(self._lengths) <= LARGEST_ON_LINE and _has_line(graph)
        self._new = _without_casts(graph.result).op != "load"  # else a view of a captured tensor
        self.replaces = any(node.is_const and node.value == -torch.inf for node in graph.nodes)
        self._lines: dict[tuple[range, range], Tensor] = {}

    def of(self, step: Step, dtype: torch.dtype) -> Tensor:
        """Returns the bias of a step's scores, -inf where the mask is False.

        It broadcasts to [z, g, rows, columns], with 4 dimensions.
        """
        bias = self._evaluated(step, dtype)
        steep = self._is_steep(bias)
        if step.forbidden:
            shapes = (x.shape[:2] for x in (bias, *(x for _, x in step.forbidden)))
            heads = [max(sizes) for sizes in zip(*shapes, strict=True)]
            is_own = self._new and bias.shape == (*heads, *step.shape[2:])
            bias = bias if is_own else bias.expand(*heads, *step.shape[2:]).clone()
            step.forbid(bias, -torch.inf)
        return self._without_the_least(bias, bias.amax(-1, keepdim=True)) if steep else bias

    def from_last_row(self, step: Step, dtype: torch.dtype) -> Tensor | None:
        """Returns the same with the last row first, as a view of the bias by diagonal, in little memory.

        None if bias and mask are not constant along diagonals.
        """
        rows, columns = step.row_span, step.columns
        if not self._diagonal or len(columns) > 1 or (step.forbidden and step.diagonals is None):
            return None
        line = self._line(step, dtype)
        first, size = self._lengths[0] - rows.stop + columns[0].start, sum(step.shape[2:]) - 1
        line = line[..., first : first + size]
        steep = self._is_steep(line)
        if step.forbidden:
            line = line.where(~step.diagonals, -torch.inf)  # type: ignore[operator]
        of_all_rows = line[..., step.shape[2] - 1 : step.shape[3]]
        if steep and of_all_rows.shape[-1] > 0:
            line = self._without_the_least(line, of_all_rows.amax(-1, keepdim=True))
        strides = *line.stride()[:2], 1, 1
        return line.as_strided((*line.shape[:2], *step.shape[2:]), strides, line.storage_offset())

    def _line(self, step: Step, dtype: torch.dtype) -> Tensor:
        """Returns the bias by difference of positions, the largest first, [1 or z, 1 or g, differences]."""
        known = self._lines.get((step.z, step.g))
        if known is None:
            length, keys = self._lengths
            difference = torch.arange(length - 1, -keys, -1, device=step.heads.device)
            q_idx, kv_idx = difference.clamp(min=0), (-difference).clamp(min=0)
            known = self._evaluated(step, dtype, q_idx=q_idx, kv_idx=kv_idx)[:, :, 0].contiguous()
            self._lines[step.z, step.g] = known
        return known

    @cached_property
    def _bound(self) -> float:
        """The largest possible score without the bias."""
        scale, q, k = self._operands
        return abs(scale) * largest_row(q, torch.float32) * largest_row(k, torch.float32)

    def _is_steep(self, bias: Tensor) -> bool:
        """Returns whether weights may be denormal, of a bias without a mask."""
        return bias.dtype == torch.float32 and bias.numel() > 0 and bool(bias.amin() < STEEP)

    def _without_the_least(self, bias: Tensor, largest: Tensor) -> Tensor:
        """Returns -inf where a weight is certainly negligible; `largest` is a bias that its row has too."""
        return bias.masked_fill(bias < largest - (2.0 * self._bound - LEFT_OUT), -torch.inf)

    def _evaluated(self, step: Step, dtype: torch.dtype, **positions: Tensor) -> Tensor:
        at = {**step.positions, **positions}
        (bias,) = evaluate(self._traced.graph, self._traced.tensors, real=dtype, **at)
        return bias.to(dtype)[(None,) * (4 - bias.dim())]


def largest_row(x: Tensor, dtype: torch.dtype) -> float:
    """Returns the largest norm of a row, computed in a dtype; nan if x has one."""
    return float(torch.linalg.vector_norm(x, dim=-1, dtype=dtype).amax()) if x.numel() else 0.0
