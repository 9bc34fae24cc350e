"""Computes block-sparse attention in plain torch, the default for CPU tensors, in linear memory.

`heads.Heads` lays out the heads of a call as [Z, G, length, dim]; `tiles` splits the mask into steps. A step
processes as many heads as the budget allows, and reads a group's keys and values once for all its query
heads. A step has all columns of its rows, so no partial softmax needs merging. The backward recomputes each
row's weights from its scores, with the same rounding as the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from flexmod.backends.captured import CaptureSums
from flexmod.backends.interface import Forward, Gradients, Problem
from flexmod.backends.reference import Heads, as_slice, chunks, in_order_of
from flexmod.backends.tiles import TileStep, shared_part, steps_of_table, steps_without_mask
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Graph

# Scores in one buffer, in elements: 16 MiB of float32, which fit in a usual last-level cache.
BUDGET = 1 << 22


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `interface`. Computes half precision in float32 and rounds at the end."""
    heads = Heads.of(q, k)
    query, key, value = heads.split_query(q), heads.split_key(k), heads.split_key(v)
    out = query.new_zeros((*query.shape[:3], v.shape[-1]))
    lse = query.new_full(query.shape[:3], -torch.inf)
    largest = lse.clone()
    scratch = Scratch(query)
    for part in parts(problem, heads, query.shape[2], key.shape[1]):
        scores = scratch.take("scores", part.shape)
        part.product(query, key, problem.scale, scores)
        part.modify(scores, scores)
        highest = scores.amax(-1)
        torch.softmax(scores, -1, out=scores)
        # The largest weight is exp(0) / sum, which gives the sum.
        total = highest - scores.amax(-1).log()
        result = torch.bmm(scores.flatten(1, 2), part.columns_of(value)).view(*part.shape[:3], -1)
        dead = highest == -torch.inf
        # not in place: a selective checkpoint may have saved the product
        out[part.rows] = result.masked_fill(dead[..., None], 0.0)
        lse[part.rows] = total.masked_fill_(dead, -torch.inf)
        largest[part.rows] = highest
    maximum = heads.join_query(largest) if want_max else None
    joined = in_order_of(heads.join_query(out).to(q.dtype), q)
    return Forward(joined, heads.join_query(lse), maximum)


def backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """Runs a backward, see `interface`. Two runs agree bit for bit.

    It does not read `out`, whose rounding would reach the gradients.
    """
    heads = Heads.of(q, k)
    query, key, value = heads.split_query(q), heads.split_key(k), heads.split_key(v)
    grad = heads.split_query(grad_out)
    dead = heads.split_query(lse) == -torch.inf
    some_dead = bool(dead.any())
    # The lse of a row without keys is constant: drop its incoming gradient.
    grad_sum = None if grad_lse is None else heads.split_query(grad_lse).masked_fill(dead, 0.0)

    wanted = zip((query, key, value), needs, strict=True)
    dq, dk, dv = (torch.zeros_like(x) if need else None for x, need in wanted)
    sums = None if problem.capture_grad is None else CaptureSums(problem, heads.real)
    scratch = Scratch(query)
    for part in parts(problem, heads, query.shape[2], key.shape[1]):
        scores = scratch.take("scores", part.shape)
        part.product(query, key, problem.scale, scores)
        weights = scratch.take("weights", part.shape) if problem.score else scores
        part.modify(scores, weights)
        torch.softmax(weights, -1, out=weights)
        if some_dead:
            weights.masked_fill_(dead[part.rows][..., None], 0.0)
        if dv is not None:
            part.add_to_columns(dv, weights, grad, 1.0)
        if dq is None and dk is None and sums is None:
            continue
        change = scratch.take("change", part.shape)
        part.product(grad, value, 1.0, change)
        delta = change.mul_(weights).sum(-1)
        if grad_sum is not None:
            delta -= grad_sum[part.rows]
        change.addcmul_(weights, delta[..., None], value=-1.0)
        part.unmodify(scores, change, sums)
        if dq is not None:
            result = torch.bmm(change.flatten(1, 2), part.columns_of(key)).mul_(problem.scale)
            dq[part.rows] = result.view(*part.shape[:3], -1)
        if dk is not None:
            part.add_to_columns(dk, change, query, problem.scale)
    return Gradients(
        None if dq is None else heads.join_query(dq).to(q.dtype),
        None if dk is None else heads.join_key(dk).to(k.dtype),
        None if dv is None else heads.join_key(dv).to(v.dtype),
        () if sums is None else sums.result(),
    )


@dataclass(frozen=True)
class ScorePart:
    """A step for some of the heads: z and g are ranges of the first two dimensions of [Z, G, length, dim]."""

    problem: Problem
    step: TileStep
    z: range
    g: range
    b: Tensor
    h: Tensor
    real: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores: [z, g, rows, columns]."""
        return len(self.z), len(self.g), self.step.row_count, self.step.column_count

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """The indices of this part's rows in a tensor laid out by query."""
        return as_slice(self.z), as_slice(self.g), self.step.rows

    def columns_of(self, x: Tensor) -> Tensor:
        """Returns this part's columns, [z, columns, dim], from a tensor [Z, N, dim]."""
        columns = self.step.columns
        x = x[as_slice(self.z)]
        return x[:, columns] if isinstance(columns, slice) else x.index_select(1, columns)

    def product(self, x: Tensor, y: Tensor, scale: float, into: Tensor) -> None:
        """Writes scale * x . y for each row of x [Z, G, M, dim] and each column of y [Z, N, dim]."""
        flat = into.view(len(self.z), -1, into.shape[-1])
        rows = x[self.rows].flatten(1, 2)
        torch.baddbmm(flat, rows, self.columns_of(y).mT, beta=0, alpha=scale, out=flat)

    def add_to_columns(self, target: Tensor, weights: Tensor, x: Tensor, scale: float) -> None:
        """Adds scale * weights^T @ rows of x [Z, G, M, dim] to the columns of `target` [Z, N, dim]."""
        columns, target = self.step.columns, target[as_slice(self.z)]
        transposed, rows = weights.flatten(1, 2).mT, x[self.rows].flatten(1, 2)
        if isinstance(columns, slice):
            target[:, columns].baddbmm_(transposed, rows, alpha=scale)
        else:
            target.index_add_(1, columns, torch.bmm(transposed, rows), alpha=scale)

    def modify(self, scores: Tensor, into: Tensor) -> None:
        """Writes the scores after the score mod and the mask."""
        if self.problem.score is not None:
            into.copy_(self._run(self.problem.score.graph, score=scores)[0])
        self._forbid(into, -torch.inf)

    def unmodify(self, scores: Tensor, change: Tensor, sums: CaptureSums | None = None) -> None:
        """Turns the gradient of the modified scores into the gradient of `scores`, in place.

        Adds the terms of captured tensors to `sums`. A derivative may be infinite or NaN where the mask is
        False.
        """
        if sums is None and self.problem.score_grad is None:
            return
        graph = self.problem.score_grad if sums is None else sums.graph
        assert graph is not None
        by_score, *terms = self._run(graph, score=scores, grad=change)
        if sums is not None:
            # before the write to `change`: a term may be the same tensor
            sums.add(terms, self.shape, lambda term: self._forbid(term, 0.0))
        change.copy_(by_score)
        self._forbid(change, 0.0)

    def _forbid(self, x: Tensor, value: float) -> None:
        """Writes `value` where the mask is False."""
        for span, forbidden in self.forbidden:
            x[..., span].masked_fill_(forbidden, value)

    @cached_property
    def forbidden(self) -> list[tuple[slice, Tensor]]:
        """Returns ranges of the step's columns, and a bool tensor that is True where the mask is False.

        The tensor broadcasts to [z, g, rows, width].
        """
        if not self.step.asked:
            return []
        assert self.problem.mask is not None
        traced = self.problem.mask.traced
        q_idx, kv_idx = self.positions
        found = []
        for asked in self.step.asked:
            (said,) = evaluate(
                traced.graph, traced.tensors, b=self.b, h=self.h, q_idx=q_idx, kv_idx=kv_idx[asked.span]
            )
            found.append((asked.span, ~asked.allowed(said)))
        return found

    @cached_property
    def positions(self) -> tuple[Tensor, Tensor]:
        return self.step.positions(self.b.device)

    def _run(self, graph: Graph, *, score: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
        """Evaluates a graph of the score mod on all elements."""
        assert self.problem.score is not None
        q_idx, kv_idx = self.positions
        return evaluate(
            graph, self.problem.score.tensors, b=self.b, h=self.h, q_idx=q_idx, kv_idx=kv_idx,
            score=score, grad=grad, real=self.real,
        )  # fmt: skip


def parts(problem: Problem, heads: Heads, rows: int, columns: int) -> Iterator[ScorePart]:
    """Splits a call into parts of at most BUDGET scores, without cutting rows.

    Rows that attend to nothing may be in no part.
    """
    b, h = (x[..., None, None] for x in heads.positions())
    for z, g, steps in _shares(problem, heads, rows, columns):
        for step in steps:
            size = step.row_count * step.column_count
            for zs, gs in chunks(z, g, BUDGET // size):
                here = as_slice(zs), as_slice(gs)
                yield ScorePart(problem, step, zs, gs, b[here], h[here], heads.real)


def _shares(
    problem: Problem, heads: Heads, rows: int, columns: int
) -> Iterator[tuple[range, range, Iterator[TileStep]]]:
    """Yields ranges of heads with the same tiles, and the steps for these tiles."""
    if problem.mask is None:
        yield *heads.where(None, None), steps_without_mask(rows, columns, BUDGET)
        return
    table = shared_part(problem.mask.table())
    for b, h in product(range(table.shape[0]), range(table.shape[1])):
        here = heads.where(b if table.shape[0] > 1 else None, h if table.shape[1] > 1 else None)
        yield *here, steps_of_table(table[b, h], problem.mask.BLOCK_SIZE, rows, columns, BUDGET)


class Scratch:
    """Buffers that parts of different shapes reuse."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialized contiguous tensor, valid until the next call with `name`."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size)
        return buffer[:size].view(shape)
