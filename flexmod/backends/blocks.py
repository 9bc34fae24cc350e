"""Computes attention on the CPU in plain torch, in blocks of scores: any score mod, in linear memory.

A block is a part of a step, see `steps`: as many heads as the budget allows, and all columns of its rows, so
no partial softmax needs merging. Of large blocks, see `products`, all heads share their keys. The backward
recomputes each row's weights from its scores: in half precision with its lse, else with the same rounding as
the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.arguments import SINGLE, BackwardInputs, Forward, Gradients, Problem
from flexmod.backends.captured import CaptureSums
from flexmod.backends.products import (
    FirstSteps,
    apply,
    first_steps,
    is_large,
    is_quick,
    multiply_by_derivative,
    product,
)
from flexmod.backends.steps import Step, steps_of
from flexmod.backends.tiles import ROWS, TALL, TALLER, Heads, StepRules, as_slice, in_order_of
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS, Graph
from flexmod.ir.ops import HALF
from flexmod.runtime.private_torch import hardshrink

# Scores in one buffer, in elements: 4 MiB of float32, so that a few buffers fit in a last-level cache.
BUDGET = 1 << 20
# How many times as many a large part has, and its columns where it need not have all of its rows.
MORE, WIDTH = 2, 2048

LOG2_E = math.log2(math.e)
# A weight below this part of a rounding is left out: 2^-66 in float32.
NEGLIGIBLE = 2.0**-43
# A log-sum-exp up to this size has a rounding that changes weights no more than a score's does.
LARGEST_LSE = 32.0


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `arguments`. Computes half precision in float32 and rounds at the end."""
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
        part.step.forbid(scores, -torch.inf)
        yield part, scores


def backward(problem: Problem, given: BackwardInputs, needs: tuple[bool, bool, bool]) -> Gradients:
    """Runs a backward, see `arguments`. Two runs agree bit for bit."""
    grad_out, grad_lse, q, k, v, out, lse = given[:SINGLE]
    heads = Heads.of(q, k)
    query, key, value = heads.split_query(q), heads.split_key(k), heads.split_key(v)
    split = heads.split_query
    grad, of_lse = split(grad_out), None if grad_lse is None else split(grad_lse)
    coarse = q.dtype in HALF and lse_suffices(lse)
    softmax = (Coarse if coarse else Softmax)(grad, value, split(out), split(lse), of_lse)

    dq = torch.zeros_like(query) if needs[0] else None
    by_column = zip((key, value), needs[1:], strict=True)
    dk, dv = (x.new_zeros(x.mT.shape) if need else None for x, need in by_column)  # [Z, dim, N]
    sums = None if problem.capture_grad is None else CaptureSums(problem, heads.real)
    scratch = Scratch(query)
    # rows are terms of sums, and long sums lose precision, which coarse gradients have to spare
    sizes = (TALLER, WIDTH) if coarse else (TALL, 0)
    for part in parts(problem, heads, query.shape[2], key.shape[1], *sizes):
        scores = part.scores(query, key, scratch)
        weights = scratch.take("weights", part.shape) if problem.score else scores
        softmax.weigh(part, scores, weights)
        if dv is not None:
            part.add_to_columns(dv, weights, grad, 1.0)
        if dq is None and dk is None and sums is None:
            continue
        change = softmax.change(part, weights, scratch)
        scale = problem.scale * part.unmodify(scores, change, weights, sums)
        if dq is not None:
            dq[part.rows].add_(part.times_columns(change, key), alpha=scale)
        if dk is not None:
            part.add_to_columns(dk, change, query, scale)
    by_row = [dq, *(None if x is None else x.mT for x in (dk, dv))]
    found = gradients_of(heads, by_row, (q, k, v))
    return found if sums is None else found._replace(captures=sums.result())


def gradients_of(heads: Heads, found: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Gradients:
    """Returns gradients of q, k and v from dq [Z, G, M, dim], dk and dv [Z, N, dim]."""
    each = zip((heads.join_query, heads.join_key, heads.join_key), found, tensors, strict=True)
    dq, dk, dv = (None if x is None else as_gradient(join(x), tensor) for join, x, tensor in each)
    return Gradients(dq, dk, dv, ())


def as_gradient(found: Tensor, tensor: Tensor) -> Tensor:
    """Returns a gradient in the dtype of its tensor, and contiguous, as the plan of a backward says."""
    if found.stride(-1) != 1:  # torch transposes one matrix in half the time that several take it
        by_row = found.new_empty(found.shape)
        for to, matrix in zip(by_row.flatten(0, 1), found.flatten(0, 1), strict=True):
            to.copy_(matrix)
        found = by_row
    return found.to(tensor.dtype, memory_format=torch.contiguous_format).contiguous()


class Softmax:
    """The softmax of a backward.

    Tensors by row are [Z, G, M, ...]. A row that attends to nothing has weights 0, and a constant lse.
    """

    def __init__(
        self, grad: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
    ) -> None:
        self._grad, self._value, self._dead = grad, value, lse == -torch.inf
        self._some_dead = bool(self._dead.any())
        self._grad_lse = None if grad_lse is None else grad_lse.masked_fill(self._dead, 0.0)

    def weigh(self, part: ScorePart, scores: Tensor, into: Tensor) -> None:
        """Writes the weights of scores after the first steps of the score mod."""
        part.modify(scores, into)
        part.step.forbid(into, -torch.inf)
        into /= exponentials(into)[1]
        if self._some_dead:
            into.masked_fill_(self._dead[part.rows][..., None], 0.0)

    def change(self, part: ScorePart, weights: Tensor, scratch: Scratch) -> Tensor:
        """Returns the gradients of the scores after the score mod."""
        change = part.product(self._grad, self._value, scratch, "change", times=weights)
        delta = change.sum(-1)
        if self._grad_lse is not None:
            delta -= self._grad_lse[part.rows]
        return change.addcmul_(weights, delta[..., None], value=-1.0)


class Coarse:
    """A Softmax that reads out and lse, whose rounding reaches the gradients.

    One more dimension of `grad` and `value` has the term of each row that all its gradients lose.
    """

    def __init__(
        self, grad: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
    ) -> None:
        dead = lse == -torch.inf
        self._shift = lse.masked_fill(dead, torch.inf)[..., None] * -LOG2_E
        delta = (grad * out).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse.masked_fill(dead, 0.0)
        self._grad = torch.cat([grad, -delta[..., None]], -1)
        self._value = torch.cat([value, torch.ones_like(value[..., :1])], -1)

    def weigh(self, part: ScorePart, scores: Tensor, into: Tensor) -> None:
        part.modify(scores, into, LOG2_E, self._shift[part.rows])
        powers_of_two(into)
        part.step.forbid(into, 0.0)

    def change(self, part: ScorePart, weights: Tensor, scratch: Scratch) -> Tensor:
        return part.product(self._grad, self._value, scratch, "change", times=weights)


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
        self,
        x: Tensor,
        y: Tensor,
        scratch: Scratch,
        name: str,
        factor: float = 1.0,
        function: str = "",
        times: Tensor | None = None,
    ) -> Tensor:
        """Returns function(factor * x . y) * times for each row of x [Z, G, M, dim] and column y [Z, N, dim].

        The result may be in the scratch memory of this name. `times` is of its shape.
        """
        rows, columns = x[self.rows].flatten(1, 2), self.step.columns_of(y)
        if factor != 1.0:  # MKL multiplies the sums or the rows by a factor, which depends on their number
            rows = rows * factor
        if self.large:
            others = None if times is None else times.flatten(0, 2)
            return product(rows[0], columns[0], function, times=others).view(self.shape)
        found = scratch.take(name, self.shape)
        torch.bmm(rows, columns.mT, out=found.view(len(rows), -1, self.shape[3]))
        if function:
            apply(function, found)
        return found if times is None else found.mul_(times)

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
            of_group = rows[0].flatten(0, 1).mT
            of_group = (of_group if factor == 1.0 else of_group * factor).contiguous()
            found = product(of_group, weights.flatten(0, 2).mT, depth=self.shape[2])
            self.step.add_to_columns(target.mT, found.mT[None])
            return
        first, *more = self.step.columns
        for g in range(self.shape[1]):
            of_head, terms = rows[:, g].mT, weights[:, g]
            if more:
                self.step.add_to_columns(target.mT, torch.bmm(of_head, terms).mul_(factor).mT)
            else:
                target[z, :, first].baddbmm_(of_head, terms, alpha=factor)

    def modify(self, scores: Tensor, into: Tensor, unit: float = 1.0, shift: Tensor | None = None) -> None:
        """Writes shift + unit * (score after the score mod), from those after its first steps.

        `shift` is [z, g, rows, 1], without inf.
        """
        graph, factor, _ = self.first.rest[0]
        found = scores
        if graph is not None:
            memory = {"overwrite": "score"} if scores is into else {"overwrite": "", "spare": into}
            found = self._run(graph, score=scores, **memory)[0].expand(self.shape)
        if shift is not None:
            torch.add(shift, found, alpha=unit * factor, out=into)
        elif unit * factor != 1.0:
            torch.mul(found, unit * factor, out=into)
        elif found is not into:
            into.copy_(found)

    def unmodify(self, scores: Tensor, change: Tensor, spare: Tensor, sums: CaptureSums | None) -> float:
        """Turns the gradient of the modified scores into the gradient of the natural ones, in place.

        Returns a factor that the gradient still lacks. Adds the terms of captured tensors to `sums`. A
        derivative may be infinite or NaN where the mask is False. Overwrites `spare`, of the shape of scores.
        """
        graph, factor, function = self.first.rest[1 if sums is None else 2]
        if graph is not None:
            memory = {"overwrite": "grad", "spare": spare} if sums is None else {}
            by_score, *terms = self._run(graph, score=scores, grad=change, **memory)
            if sums is not None:
                # before the write to `change`: a term may be the same tensor
                sums.add(terms, self.shape, lambda term: self.step.forbid(term, 0.0))
            if by_score is not change:
                change.copy_(by_score)
        if function:
            multiply_by_derivative(function, change, scores)
        if graph is not None or function:
            self.step.forbid(change, 0.0)
        return factor

    def _run(
        self, graph: Graph, *, score: Tensor, grad: Tensor | None = None, **memory: Any
    ) -> tuple[Tensor, ...]:
        """Evaluates a graph of the score mod on all elements; `memory` passes to `evaluate`."""
        assert self.problem.score is not None
        reads_none = graph.reads.isdisjoint(POSITIONS)
        at = dict.fromkeys(POSITIONS, score) if reads_none else self.step.positions
        tensors, real = self.problem.score.tensors, self.step.heads.real
        return evaluate(graph, tensors, **at, score=score, grad=grad, real=real, quick=True, **memory)


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces scores by exp(score - largest of the row), and returns the largest and the sum of each row.

    As powers of 2, which a CPU computes in a quarter of the time, and as exactly. Makes NaN of dead rows.
    """
    highest = scores.amax(-1, keepdim=True)
    powers_of_two(scores.sub_(highest).mul_(LOG2_E))
    return highest, scores.sum(-1, keepdim=True)


def powers_of_two(x: Tensor) -> None:
    """Replaces x by 2^x, and by 0 where it is negligible beside 1, see `bias`."""
    hardshrink(x.exp2_(), torch.finfo(x.dtype).eps * NEGLIGIBLE, out=x)


def parts(
    problem: Problem, heads: Heads, rows: int, columns: int, height: int = TALLER, width: int = 0
) -> Iterator[ScorePart]:
    """Splits a call into parts of at most BUDGET scores.

    Large ones have MORE times as many, at most `height` rows, and at most `width` columns if it is not 0.
    Others have all columns of their rows. Rows that attend to nothing may be in no part.
    """
    score = None if problem.score is None else problem.score.graph
    with_captures = None if problem.capture_grad is None else problem.capture_grad.graph
    first = first_steps(score, problem.score_grad, with_captures)
    quick = is_quick(heads.real)
    # taller steps compute more scores, and more passes over them would take longer than larger products save
    taller = quick and height > TALL and all(rest.graph is None for rest in first.rest)
    for whole in steps_of(problem.mask, heads, rows, columns, StepRules(taller=taller)):
        large = quick and is_large(math.prod(whole.shape[1:3]), whole.shape[3])
        sizes = (MORE * BUDGET, height) if large else (BUDGET, ROWS)
        for piece in whole.across(width) if large and width else (whole,):
            for step in piece.cut(*sizes, apart=large):
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
