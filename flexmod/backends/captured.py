"""Computes gradients of captured tensors from the terms of each load.

A term is the gradient of one loaded element for each score. First each term is summed over the positions that
the load's index does not read: one number for each head for slopes of heads, one for each column for a bias
of keys. Then these sums are added to the elements in a fixed order, so that two runs agree bit for bit.

`CaptureSums` takes terms tile by tile, on the CPU; `gradients` takes the sums from kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexmod.backends.interface import Problem
from flexmod.ir.derivative import Along, GradientTerm
from flexmod.ir.evaluate import evaluate, wrapped
from flexmod.ir.graph import Graph
from flexmod.ir.passes import Extents

Sums = Mapping[Along, Sequence[Tensor]]
"""What kernels make of terms, float32, for each term in order:

    row         [B, Hq, M]
    column      [B, Hq, N]
    diagonal    [B, Hq, M + N - 1], by the distance q_idx - kv_idx, from 1 - N on
    element     the sums of a captured tensor's elements, flat, and a 0; one for each tensor in order
"""


class CaptureSums:
    """Sums the terms of one backward; `problem.capture_grad` lists the terms."""

    def __init__(self, problem: Problem, real: torch.dtype) -> None:
        assert problem.score is not None and problem.capture_grad is not None
        self._loads = problem.capture_grad.loads
        self._tensors = problem.score.tensors
        self._totals = {number: _Total(self._tensors[number], real) for number in self._loads}

    def add(self, values: Sequence[Tensor], shape: tuple[int, ...], forbid: Callable[[Tensor], None]) -> None:
        """Adds the terms of a tile of scores with this shape.

        `values` are the graph's results except the first. It writes terms in place: `forbid` sets a term to 0
        where the mask is False.
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
        """Returns each captured tensor's gradient, in its shape and dtype, or None without a term."""
        return _results(self._totals, len(self._tensors))


def gradients(
    graph: Graph,
    terms: Sequence[GradientTerm],
    sums: Sums,
    tensors: Sequence[Tensor],
    numbers: Sequence[bool | int | float],
    extents: Extents,
) -> tuple[Tensor | None, ...]:
    """Returns each captured tensor's gradient, in its shape and dtype, or None without a term.

    `graph` is the graph of the terms, `numbers` has the values of its parameters, `extents` are B, Hq, M, N.
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
    """Returns b [B, 1, 1], h [Hq, 1], q_idx and kv_idx [length] for sums along this axis.

    A position that the sum covers has a representative value.
    """
    batch, heads, length, keys = extents
    first, last = {"row": (0, length), "column": (0, keys), "diagonal": (1 - keys, length)}[along]
    place = torch.arange(first, last, device=device)
    b, h = (torch.arange(size, device=device) for size in (batch, heads))
    kv_idx = place if along == "column" else (-place).clamp(min=0)
    return b[:, None, None], h[:, None], place.clamp(min=0), kv_idx


class _Total:
    """Accumulates a captured tensor's gradient in float32 or wider; rounds once at the end."""

    def __init__(self, tensor: Tensor, real: torch.dtype, sums: Tensor | None = None) -> None:
        self._tensor = tensor
        dtype = torch.promote_types(real, tensor.dtype)
        # one more element takes terms whose index lies outside of the tensor
        size = tensor.numel() + 1
        self._sums = torch.zeros(size, dtype=dtype, device=tensor.device) if sums is None else sums.to(dtype)

    def add(self, term: Tensor, indices: Sequence[Tensor], wide: torch.dtype | None = None) -> None:
        """Adds each element of `term` to the element at the indices, which broadcast to the term's shape.

        Sums over dimensions that the indices do not read use the dtype `wide`, or else the sum's dtype.
        """
        place = self._place(indices)
        part = _sum_to(term, place.shape, wide or self._sums.dtype).to(self._sums.dtype)
        place, part = place.expand(part.shape).flatten(), part.flatten()
        if part.is_cuda:  # index_add_ would use atomics; this sorts
            self._sums.index_put_((place,), part, accumulate=True)
        else:
            self._sums.index_add_(0, place, part)

    def result(self) -> Tensor:
        return self._sums[:-1].view(self._tensor.shape).to(self._tensor.dtype)

    def _place(self, indices: Sequence[Tensor]) -> Tensor:
        """Returns the loaded elements' offsets in a contiguous tensor of the same sizes, int64."""
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
    """Sums over the dimensions along which `shape` would broadcast to the term's shape."""
    missing = term.dim() - len(shape)
    same = [d for d in range(term.dim()) if d < missing or shape[d - missing] == 1]
    return term.sum(same, keepdim=True, dtype=dtype) if same else term
