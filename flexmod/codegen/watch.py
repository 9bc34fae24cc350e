"""Finds indices outside of captured tensors, with FLEXMOD_CHECK_BOUNDS=1.

A kernel never reads outside of a tensor: such an index loads 0. Kernels that check write such indices to
memory, and the host reads them after the kernels have run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.codegen.mod_text import FOUND_HEAD, Check
from flexmod.errors import CaptureBoundsError
from flexmod.plan import Extent, Place, PlanWriter


class IndexWatch:
    """The checks of one plan's kernels, for `lengths` (queries, keys), on the device of the place `on`."""

    def __init__(self, writer: PlanWriter, lengths: tuple[Extent, Extent], on: Place) -> None:
        self._writer, self._lengths, self._on = writer, lengths, on
        self._rooms: list[tuple[Sequence[Check], Sequence[Place], Place]] = []

    def room(self, checks: Sequence[Check], tensors: Sequence[Place]) -> Place:
        """The tensor that a text with these checks writes to, see `found_nothing`."""
        count = FOUND_HEAD + len(checks)
        made = Place(f"found{len(self._rooms)}", (count,), (1,), torch.int64)
        self._writer.call(found_nothing, (self._on, *self._lengths, len(checks)), (made,))
        self._rooms.append((checks, tensors, made))
        return made

    def raise_if_out_of_bounds(self) -> None:
        """Adds the plan's last step, in which the host reads the results."""
        for checks, tensors, room in self._rooms:
            self._writer.call(raise_if_out_of_bounds, (_Checks(checks), tuple(tensors), room))


class _Checks(tuple[Check, ...]):
    """Checks as one argument of a step."""


def found_nothing(on: Tensor, length: int, keys: int, checks: int) -> tuple[Tensor]:
    """The initial tensor of the checks: both lengths, then a 0 for each check, int64.

    A kernel replaces the 0 by a code for an index outside of its tensor, with negative indices counted from
    the end: see `check_bounds` in `device_functions/arithmetic.py`.
    """
    return (torch.tensor([length, keys, *[0] * checks], device=on.device),)


def raise_if_out_of_bounds(checks: Sequence[Check], tensors: Sequence[Tensor], room: Tensor) -> tuple[()]:
    """Waits for the kernels. Raises CaptureBoundsError for the first failed check, in the text's order."""
    met = room[FOUND_HEAD:].tolist()
    for check, number in zip(checks, met, strict=True):
        if number:
            shape = tensors[check.capture].shape
            index = number // 2 if number % 2 else -(number // 2) - shape[check.dim]
            raise CaptureBoundsError.of(check.name, check.mod, shape, check.dim, index, check.where)
    return ()
