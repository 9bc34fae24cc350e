"""Gradients of captured tensors, summed tile by tile.

A term, the gradient of one loaded element for each score, is first summed over what the load's index does not
read: the slopes of heads see one number a tile and head, a bias of the keys one a column. Only what is left
is added to the elements, one after the other in a fixed order, so that two runs agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexmod.backends.interface import Problem
from flexmod.ir.graph import Graph


class CaptureSums:
    """The sums of one backward; `problem.capture_grad` says which terms there are."""

    def __init__(self, problem: Problem, real: torch.dtype) -> None:
        assert problem.score is not None and problem.capture_grad is not None
        self.graph: Graph = problem.capture_grad.graph
        self._loads = problem.capture_grad.loads
        self._tensors = problem.score.tensors
        self._sums: dict[int, Tensor] = {}
        for number in self._loads:
            tensor = self._tensors[number]
            dtype = torch.promote_types(real, tensor.dtype)
            self._sums[number] = torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)

    def add(self, values: Sequence[Tensor], shape: tuple[int, ...], forbid: Callable[[Tensor], None]) -> None:
        """Adds the terms of a tile of scores of this shape.

        `values` are the graph's results but for the first. Terms are written in place: `forbid` makes one 0
        where the mask says no.
        """
        rest = iter(values)
        for number in self._loads:
            term = next(rest)
            sizes = self._tensors[number].shape
            indices = [next(rest) for _ in sizes]
            if term.shape != shape:  # a constant
                term = term.expand(shape).clone()
            forbid(term)
            total = self._sums[number]
            place = _place(indices, sizes, total.device)
            term = _sum_to(term.to(total.dtype), place.shape)
            total.index_add_(0, place.expand(term.shape).flatten(), term.flatten())

    def result(self) -> tuple[Tensor | None, ...]:
        """One gradient for each captured tensor, in its shape and dtype; None for one without a term."""
        return tuple(
            self._sums[number].view(tensor.shape).to(tensor.dtype) if number in self._sums else None
            for number, tensor in enumerate(self._tensors)
        )


def _place(indices: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where the loaded elements are in a contiguous tensor of these sizes, int64."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (index, size) in enumerate(zip(indices, sizes, strict=True)):
        index = index.long()
        index = torch.where(index < 0, index + size, index)
        place = place + index * math.prod(sizes[axis + 1 :])
    return place


def _sum_to(term: Tensor, shape: torch.Size) -> Tensor:
    """The sum over all dimensions along which a tensor of `shape`, broadcast to the term's, is the same."""
    missing = term.dim() - len(shape)
    same = [d for d in range(term.dim()) if d < missing or shape[d - missing] == 1]
    return term.sum(same, keepdim=True) if same else term
