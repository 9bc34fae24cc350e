"""Indices outside of captured tensors, as FLEXMOD_CHECK_BOUNDS=1 finds them.

A kernel never reads there: what such an index loads is 0. Kernels that check keep in memory which ones there
were, and the host looks when they have run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.codegen.mod_text import FOUND_HEAD, Check
from flexmod.errors import CaptureBoundsError
from flexmod.plan import Extent, Place, PlanWriter


class IndexWatch:
    """What the kernels of one plan find, for `lengths` (queries, keys), on the device of the place `on`."""

    def __init__(self, writer: PlanWriter, lengths: tuple[Extent, Extent], on: Place) -> None:
        self._writer, self._lengths, self._on = writer, lengths, on
        self._rooms: list[tuple[Sequence[Check], Sequence[Place], Place]] = []

    def room(self, checks: Sequence[Check], tensors: Sequence[Place]) -> Place:
        """What the text with these checks writes to: see `found_nothing`."""
        count = FOUND_HEAD + len(checks)
        made = Place(f"found{len(self._rooms)}", (count,), (1,), torch.int64)
        self._writer.call(found_nothing, (self._on, *self._lengths, len(checks)), (made,))
        self._rooms.append((checks, tensors, made))
        return made

    def raise_if_out_of_bounds(self) -> None:
        """Writes the last step: the host looks."""
        for checks, tensors, room in self._rooms:
            self._writer.call(raise_if_out_of_bounds, (_Checks(checks), tuple(tensors), room))


class _Checks(tuple[Check, ...]):
    """Checks as one argument of a step."""


def found_nothing(on: Tensor, length: int, keys: int, checks: int) -> tuple[Tensor]:
    """Both lengths, then a number for each check, int64.

    It is 0, or tells of an index outside, after negative ones were counted from the end: see `check_bounds`
    in `device_functions/arithmetic.py`.
    """
    return (torch.tensor([length, keys, *[0] * checks], device=on.device),)


def raise_if_out_of_bounds(checks: Sequence[Check], tensors: Sequence[Tensor], room: Tensor) -> tuple[()]:
    """Waits for the kernels. Raises CaptureBoundsError for the first check that failed, in the text."""
    met = room[FOUND_HEAD:].tolist()
    for check, number in zip(checks, met, strict=True):
        if number:
            shape = tensors[check.capture].shape
            index = number // 2 if number % 2 else -(number // 2) - shape[check.dim]
            raise CaptureBoundsError.of(check.name, check.mod, shape, check.dim, index, check.where)
    return ()
