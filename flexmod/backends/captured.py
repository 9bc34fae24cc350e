"""Gradients of captured tensors, from the gradients of what each load gave the scores.

A term, the gradient of one loaded element for each score, is first summed over what the load's index does
not read: the slopes of heads see one number a head, a bias of the keys one a column. Only what is left is
added to the elements, one after the other in a fixed order, so that two runs agree bit for bit.

`CaptureSums` takes terms tile by tile, on the CPU; `gradients` takes the sums that kernels have made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexmod.backends.interface import Problem
from flexmod.ir.evaluate import evaluate, wrapped
from flexmod.ir.graph import Graph
from flexmod.ir.passes import Extents
from flexmod.ir.reductions import Along, GradientTerm

Sums = Mapping[Along, Sequence[Tensor]]
"""What kernels make of terms, float32, for each term in order:

    row         [B, Hq, M]
    column      [B, Hq, N]
    diagonal    [B, Hq, M + N - 1], by the distance q_idx - kv_idx, from 1 - N on
    element     the sums of a captured tensor's elements, flat, and a 0; one for each tensor in order
"""


class CaptureSums:
    """The sums of one backward; `problem.capture_grad` says which terms there are."""

    def __init__(self, problem: Problem, real: torch.dtype) -> None:
        assert problem.score is not None and problem.capture_grad is not None
        self.graph: Graph = problem.capture_grad.graph
        self._loads = problem.capture_grad.loads
        self._tensors = problem.score.tensors
        self._totals = {number: _Total(self._tensors[number], real) for number in self._loads}

    def add(self, values: Sequence[Tensor], shape: tuple[int, ...], forbid: Callable[[Tensor], None]) -> None:
        """Adds the terms of a tile of scores of this shape.

        `values` are the graph's results but for the first. Terms are written in place: `forbid` makes one 0
        where the mask says no.
        """
        rest = iter(values)
        for number in self._loads:
            term = next(rest)
            indices = [next(rest) for _ in self._tensors[number].shape]
            if term.shape != shape:  # a constant
                term = term.expand(shape).clone()
            forbid(term)
            self._totals[number].add(term, indices)

    def result(self) -> tuple[Tensor | None, ...]:
        """One gradient for each captured tensor, in its shape and dtype; None for one without a term."""
        return _results(self._totals, len(self._tensors))


def gradients(
    graph: Graph,
    terms: Sequence[GradientTerm],
    sums: Sums,
    tensors: Sequence[Tensor],
    numbers: Sequence[bool | int | float],
    extents: Extents,
) -> tuple[Tensor | None, ...]:
    """One gradient for each captured tensor, in its shape and dtype; None for one without a term.

    `graph` is the one that the terms are of, with the values `numbers` for its parameters; `extents` are B,
    Hq, M and N.
    """
    left = {along: iter(found) for along, found in sums.items()}
    scattered = dict.fromkeys(term.capture for term in terms if term.along == "element")
    totals = {n: _Total(tensors[n], torch.float32, next(left["element"])) for n in scattered}
    for term in terms:
        if term.along != "element":
            if term.capture not in totals:
                totals[term.capture] = _Total(tensors[term.capture], torch.float32)
            b, h, q_idx, kv_idx = _positions(term.along, extents, tensors[term.capture].device)
            indices = evaluate(
                graph.of(term.indices), tensors,
                b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, numbers=numbers, guarded=True,
            )  # fmt: skip
            totals[term.capture].add(next(left[term.along]), indices, torch.float64)
    return _results(totals, len(tensors))


def _positions(along: Along, extents: Extents, device: torch.device) -> tuple[Tensor, ...]:
    """b [B, 1, 1], h [Hq, 1], q_idx and kv_idx [length]: those that stand for what a sum has gone over."""
    batch, heads, length, keys = extents
    first, last = {"row": (0, length), "column": (0, keys), "diagonal": (1 - keys, length)}[along]
    place = torch.arange(first, last, device=device)
    b, h = (torch.arange(size, device=device) for size in (batch, heads))
    kv_idx = place if along == "column" else (-place).clamp(min=0)
    return b[:, None, None], h[:, None], place.clamp(min=0), kv_idx


class _Total:
    """The sum of a captured tensor's gradient, in float32 or wider, rounded once at the end."""

    def __init__(self, tensor: Tensor, real: torch.dtype, sums: Tensor | None = None) -> None:
        self._tensor = tensor
        dtype = torch.promote_types(real, tensor.dtype)
        # one element more takes what lies outside of the tensor
        size = tensor.numel() + 1
        self._sums = torch.zeros(size, dtype=dtype, device=tensor.device) if sums is None else sums.to(dtype)

    def add(self, term: Tensor, indices: Sequence[Tensor], wide: torch.dtype | None = None) -> None:
        """Adds each element of `term` to the element that the indices, broadcast to its shape, name.

        What the indices do not read is summed in `wide`, or else in the dtype of the sum.
        """
        place = self._place(indices)
        part = _sum_to(term, place.shape, wide or self._sums.dtype).to(self._sums.dtype)
        place, part = place.expand(part.shape).flatten(), part.flatten()
        if part.is_cuda:  # index_add_ has atomics there; this sorts
            self._sums.index_put_((place,), part, accumulate=True)
        else:
            self._sums.index_add_(0, place, part)

    def result(self) -> Tensor:
        return self._sums[:-1].view(self._tensor.shape).to(self._tensor.dtype)

    def _place(self, indices: Sequence[Tensor]) -> Tensor:
        """Where the loaded elements are in a contiguous tensor of the same sizes, int64."""
        sizes, device = self._tensor.shape, self._sums.device
        place = torch.zeros((), dtype=torch.int64, device=device)
        inside = torch.ones((), dtype=torch.bool, device=device)
        for axis, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            index, within = wrapped(index, size)
            place = place + index * math.prod(sizes[axis + 1 :])
            inside = inside & within
        return torch.where(inside, place, self._tensor.numel())


def _results(totals: Mapping[int, _Total], count: int) -> tuple[Tensor | None, ...]:
    return tuple(totals[number].result() if number in totals else None for number in range(count))


def _sum_to(term: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The sum over all dimensions along which a tensor of `shape`, broadcast to the term's, is the same."""
    missing = term.dim() - len(shape)
    same = [d for d in range(term.dim()) if d < missing or shape[d - missing] == 1]
    return term.sum(same, keepdim=True, dtype=dtype) if same else term
