"""Computes attention on the CPU in plain torch, in blocks of scores: any score mod, in linear memory.

A block is a part of a step, see `steps`: as many heads as the budget allows, and all columns of its rows, so
no partial softmax needs merging. Of large blocks, see `products`, all heads share their keys. The backward
recomputes each row's weights from its scores: in half precision with its lse, else with the same rounding as
the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.captured import CaptureSums
from flexmod.backends.interface import Forward, Gradients, Problem
from flexmod.backends.products import FirstSteps, apply, first_steps, is_large, product
from flexmod.backends.reference import Heads, as_slice, in_order_of
from flexmod.backends.steps import Step, steps_of
from flexmod.backends.tiles import ROWS, TALL
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Graph
from flexmod.ir.ops import HALF
from flexmod.ir.source import MASK_ARGUMENTS

# Scores in one buffer, in elements: 4 MiB of float32, so that a few buffers fit in a last-level cache.
BUDGET = 1 << 20

LOG2_E = math.log2(math.e)
# A log-sum-exp up to this size has a rounding that changes weights no more than a score's does.
LARGEST_LSE = 32.0


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `interface`. Computes half precision in float32 and rounds at the end."""
    heads = Heads.of(q, k)
    query, key, value = heads.split_query(q), heads.split_key(k), heads.split_key(v)
    out = query.new_zeros((*query.shape[:3], v.shape[-1]))
    lse = query.new_full(query.shape[:3], -torch.inf)
    largest = lse.clone()
    for part, scores in scored_parts(problem, heads, query, key):
        highest, total = exponentials(scores)
        result = part.times_columns(scores, value) / total
        dead = highest == -torch.inf
        out[part.rows] = result.masked_fill_(dead, 0.0)
        lse[part.rows] = (highest + total.log()).masked_fill_(dead, -torch.inf).squeeze(-1)
        largest[part.rows] = highest.squeeze(-1)
    maximum = heads.join_query(largest) if want_max else None
    joined = in_order_of(heads.join_query(out).to(q.dtype), q)
    return Forward(joined, heads.join_query(lse), maximum)


def largest_scores(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
    """Returns `Forward.max_scores`."""
    heads = Heads.of(q, k)
    query, key = heads.split_query(q), heads.split_key(k)
    largest = query.new_full(query.shape[:3], -torch.inf)
    for part, scores in scored_parts(problem, heads, query, key):
        largest[part.rows] = scores.amax(-1)
    return heads.join_query(largest)


def scored_parts(
    problem: Problem, heads: Heads, query: Tensor, key: Tensor
) -> Iterator[tuple[ScorePart, Tensor]]:
    """Yields each part with its scores after score mod and mask, which are valid until the next part."""
    scratch = Scratch(query)
    for part in parts(problem, heads, query.shape[2], key.shape[1]):
        scores = part.scores(query, key, scratch)
        part.modify(scores, scores)
        yield part, scores


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
    """Runs a backward, see `interface`. Two runs agree bit for bit."""
    heads = Heads.of(q, k)
    query, key, value = heads.split_query(q), heads.split_key(k), heads.split_key(v)
    split = heads.split_query
    grad, of_lse = split(grad_out), None if grad_lse is None else split(grad_lse)
    softmax = Softmax(grad, split(out), split(lse), of_lse, coarse=q.dtype in HALF)

    dq = torch.zeros_like(query) if needs[0] else None
    by_column = zip((key, value), needs[1:], strict=True)
    dk, dv = (x.new_zeros(x.mT.shape) if need else None for x, need in by_column)  # [Z, dim, N]
    sums = None if problem.capture_grad is None else CaptureSums(problem, heads.real)
    scratch = Scratch(query)
    for part in parts(problem, heads, query.shape[2], key.shape[1]):
        scores = part.scores(query, key, scratch)
        weights = scratch.take("weights", part.shape) if problem.score else scores
        part.modify(scores, weights)
        softmax.weigh(weights, part.rows)
        if dv is not None:
            part.add_to_columns(dv, weights, grad, 1.0)
        if dq is None and dk is None and sums is None:
            continue
        change = part.product(grad, value, scratch, "change")
        softmax.differentiate(change, weights, part.rows)
        part.unmodify(scores, change, weights, sums)
        if dq is not None:
            dq[part.rows] = part.times_columns(change, key).mul_(problem.scale)
        if dk is not None:
            part.add_to_columns(dk, change, query, problem.scale)
    return Gradients(
        None if dq is None else as_gradient(heads.join_query(dq), q),
        None if dk is None else as_gradient(heads.join_key(dk.mT), k),
        None if dv is None else as_gradient(heads.join_key(dv.mT), v),
        () if sums is None else sums.result(),
    )


def as_gradient(found: Tensor, tensor: Tensor) -> Tensor:
    """Returns what was found for a tensor in its dtype, contiguous as the plan of a backward says."""
    return found.to(tensor.dtype, memory_format=torch.contiguous_format).contiguous()


class Softmax:
    """The softmax of a backward, with the terms of each row, [Z, G, M].

    `coarse`: it may read out and lse, whose rounding reaches the gradients. A row that attends to nothing has
    weights 0, and a constant lse.
    """

    def __init__(
        self, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, *, coarse: bool
    ) -> None:
        self._dead = lse == -torch.inf
        self._some_dead = bool(self._dead.any())
        self._grad_lse = None if grad_lse is None else grad_lse.masked_fill(self._dead, 0.0)
        self._coarse = coarse and lse_suffices(lse)
        if self._coarse:
            self._lse = lse.masked_fill(self._dead, torch.inf)
            self._delta = (grad * out).sum(-1)
            if self._grad_lse is not None:
                self._delta -= self._grad_lse

    def weigh(self, scores: Tensor, rows: tuple[slice, ...]) -> None:
        """Replaces scores of some rows and all their columns by their weights."""
        if self._coarse:
            scores.sub_(self._lse[rows][..., None]).mul_(LOG2_E).exp2_()
            return
        scores /= exponentials(scores)[1]
        if self._some_dead:
            scores.masked_fill_(self._dead[rows][..., None], 0.0)

    def differentiate(self, change: Tensor, weights: Tensor, rows: tuple[slice, ...]) -> None:
        """Turns gradients of weights into gradients of scores, in place."""
        if self._coarse:
            change.sub_(self._delta[rows][..., None]).mul_(weights)
            return
        delta = change.mul_(weights).sum(-1)
        if self._grad_lse is not None:
            delta -= self._grad_lse[rows]
        change.addcmul_(weights, delta[..., None], value=-1.0)


def lse_suffices(lse: Tensor) -> bool:
    """Returns whether a row's lse gives its weights nearly as exactly as its largest score and their sum."""
    return bool((lse.masked_fill(lse == -torch.inf, 0.0).abs() <= LARGEST_LSE).all())


class ScorePart:
    """A step, with what the score mod and its derivatives make of its scores.

    `first` has the graphs of the score mod, its derivative, and that with terms of captures.
    """

    def __init__(self, problem: Problem, step: Step, first: FirstSteps, large: bool) -> None:
        self.problem, self.step, self.first, self.large = problem, step, first, large
        self.shape, self.rows = step.shape, step.rows

    def scores(self, query: Tensor, key: Tensor, scratch: Scratch) -> Tensor:
        """Returns the scores after the first steps of the score mod, valid until the next call."""
        factor = self.problem.scale * self.first.factor
        return self.product(query, key, scratch, "scores", factor, self.first.function)

    def product(
        self, x: Tensor, y: Tensor, scratch: Scratch, name: str, factor: float = 1.0, function: str = ""
    ) -> Tensor:
        """Returns function(factor * x . y) for each row of x [Z, G, M, dim] and column of y [Z, N, dim].

        The result may be in the scratch memory of this name.
        """
        rows, columns = x[self.rows].flatten(1, 2), self.step.columns_of(y)
        if self.large:
            return product(rows[0] * factor, columns[0], function).view(self.shape)
        found = scratch.take(name, self.shape)
        flat = found.view(len(rows), -1, self.shape[3])
        torch.baddbmm(flat, rows, columns.mT, beta=0, alpha=factor, out=flat)
        if function:
            apply(function, found)
        return found

    def times_columns(self, weights: Tensor, x: Tensor) -> Tensor:
        """Returns weights @ columns of x [Z, N, dim], as [z, g, rows, dim]."""
        flat, columns = weights.flatten(1, 2), self.step.columns_of(x)
        found = product(flat[0], columns[0].mT) if self.large else torch.bmm(flat, columns)
        return found.view(*self.shape[:3], -1)

    def add_to_columns(self, target: Tensor, weights: Tensor, x: Tensor, factor: float) -> None:
        """Adds factor * rows of x [Z, G, M, dim] @ weights to the columns of `target` [Z, dim, N].

        Sums the rows of each head apart, since long sums lose precision.
        """
        rows, z = x[self.rows], as_slice(self.step.z)
        if self.large:
            of_group = rows[0].flatten(0, 1).mul(factor).mT.contiguous()
            found = product(of_group, weights.flatten(0, 2).mT, depth=self.shape[2])
            self.step.add_to_columns(target.mT, found.mT[None])
            return
        first, *more = self.step.tiles.columns
        for g in range(self.shape[1]):
            of_head, terms = rows[:, g].mT, weights[:, g]
            if more:
                self.step.add_to_columns(target.mT, torch.bmm(of_head, terms).mul_(factor).mT)
            else:
                target[z, :, first].baddbmm_(of_head, terms, alpha=factor)

    def modify(self, scores: Tensor, into: Tensor) -> None:
        """Writes the scores after the score mod and the mask, from those after its first steps."""
        graph = self.first.rest[0]
        if graph is not None:
            memory = {"overwrite": "score"} if scores is into else {"overwrite": "", "spare": into}
            (result,) = self._run(graph, score=scores, **memory)
            if result is not into:
                into.copy_(result)
        self.step.forbid(into, -torch.inf)

    def unmodify(self, scores: Tensor, change: Tensor, spare: Tensor, sums: CaptureSums | None) -> None:
        """Turns the gradient of the modified scores into the gradient of the natural ones, in place.

        Adds the terms of captured tensors to `sums`. A derivative may be infinite or NaN where the mask is
        False. Overwrites `spare`, of the shape of scores.
        """
        graph = self.first.rest[1 if sums is None else 2]
        if graph is None:
            return
        memory = {"overwrite": "grad", "spare": spare} if sums is None else {}
        by_score, *terms = self._run(graph, score=scores, grad=change, **memory)
        if sums is not None:
            # before the write to `change`: a term may be the same tensor
            sums.add(terms, self.shape, lambda term: self.step.forbid(term, 0.0))
        if by_score is not change:
            change.copy_(by_score)
        self.step.forbid(change, 0.0)

    def _run(
        self, graph: Graph, *, score: Tensor, grad: Tensor | None = None, **memory: Any
    ) -> tuple[Tensor, ...]:
        """Evaluates a graph of the score mod on all elements; `memory` passes to `evaluate`."""
        assert self.problem.score is not None
        reads_none = graph.reads.isdisjoint(MASK_ARGUMENTS)
        at = dict.fromkeys(MASK_ARGUMENTS, score) if reads_none else self.step.positions
        tensors, real = self.problem.score.tensors, self.step.heads.real
        return evaluate(graph, tensors, **at, score=score, grad=grad, real=real, quick=True, **memory)


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces scores by exp(score - largest of the row), and returns the largest and the sum of each row.

    As powers of 2, which a CPU computes in a quarter of the time, and as exactly. Makes NaN of dead rows.
    """
    highest = scores.amax(-1, keepdim=True)
    scores.sub_(highest).mul_(LOG2_E).exp2_()
    return highest, scores.sum(-1, keepdim=True)


def parts(problem: Problem, heads: Heads, rows: int, columns: int) -> Iterator[ScorePart]:
    """Splits a call into parts of at most BUDGET scores, without cutting rows.

    Rows that attend to nothing may be in no part.
    """
    score = None if problem.score is None else problem.score.graph
    with_captures = None if problem.capture_grad is None else problem.capture_grad.graph
    first = first_steps(score, problem.score_grad, with_captures)
    for whole in steps_of(problem.mask, heads, rows, columns, squares=False):
        large = is_large(heads.real, math.prod(whole.shape[1:3]), whole.shape[3])
        for step in whole.cut(BUDGET, TALL if large else ROWS, apart=large):
            yield ScorePart(problem, step, first, large)


class Scratch:
    """Buffers that parts of different shapes reuse."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialized contiguous tensor, valid until the next call with `name`."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = self._like.new_empty(size)
        elif buffer.numel() < size:  # by doubling: writes to new memory are slow
            buffer = self._buffers[name] = self._like.new_empty(max(size, 2 * buffer.numel()))
        return buffer[:size].view(shape)
