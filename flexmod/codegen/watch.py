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


class Watch:
    """What the kernels of one call find, for `lengths` (queries, keys)."""

    def __init__(self, lengths: tuple[int, int], device: torch.device) -> None:
        self._lengths, self._device = lengths, device
        self._rooms: list[tuple[Sequence[Check], Sequence[Tensor], Tensor]] = []

    def room(self, checks: Sequence[Check], tensors: Sequence[Tensor]) -> Tensor:
        """What the text with these checks writes to, int64: both lengths, then a number for each check.

        It is 0, or tells of an index outside, after negative ones were counted from the end: see
        `check_bounds` in `prelude.py`.
        """
        made = torch.tensor([*self._lengths, *[0] * len(checks)], device=self._device)
        self._rooms.append((checks, tensors, made))
        return made

    def look(self) -> None:
        """Waits for the kernels. Raises CaptureBoundsError for the first check that failed, in the text."""
        for checks, tensors, room in self._rooms:
            # asked of torch, so that a tape sees that the host has read a value
            if not bool(room[FOUND_HEAD:].any()):
                continue
            met = room[FOUND_HEAD:].tolist()
            check, number = next(pair for pair in zip(checks, met, strict=True) if pair[1])
            shape = tensors[check.capture].shape
            index = number // 2 if number % 2 else -(number // 2) - shape[check.dim]
            raise CaptureBoundsError.of(check.name, check.mod, shape, check.dim, index, check.where)
