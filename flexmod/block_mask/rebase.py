"""Lets a sliced block mask keep its mask_mod: the slice passes the whole mask's positions to the mod.

        mask[1:3]             b -> b + 1
        mask[:, [4, 0, 2]]    h -> entries[h], a captured table
        mask[:, :, 5:]        q_idx -> q_idx + 5 * BLOCK_SIZE[0], an offset (`ir/offsets.py`)
        mask[:, :, [4, 0]]    q_idx -> entries[q_idx // BLOCK_SIZE[0]] * BLOCK_SIZE[0] + q_idx % BLOCK_SIZE[0]

Each index has a map of its own: a range, a table, or blocks of positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmod.ir.composed import Derived, moved
from flexmod.ir.offsets import IndexMap

MaskMod = Callable[..., Any]


@dataclass(frozen=True)
class Affine:
    start: int
    step: int = 1

    def __call__(self, index: Any) -> Any:
        return (index if self.step == 1 else index * self.step) + self.start

    def to(self, device: torch.device | str) -> IndexMap:
        return self


@dataclass(frozen=True, eq=False)
class Table:
    """Maps an index to `entries[index]`, int32 [n]."""

    entries: Tensor

    def __call__(self, index: Any) -> Any:
        return self.entries[index]

    def to(self, device: torch.device | str) -> IndexMap:
        return Table(self.entries.to(device))


@dataclass(frozen=True)
class InBlocks:
    """Maps blocks of `size` positions as a whole."""

    blocks: IndexMap
    size: int

    def __call__(self, index: Any) -> Any:
        return self.blocks(index // self.size) * self.size + index % self.size

    def to(self, device: torch.device | str) -> IndexMap:
        return InBlocks(self.blocks.to(device), self.size)


@dataclass(frozen=True)
class Composed:
    """Applies `second` to an index, then `first` to the result."""

    first: IndexMap
    second: IndexMap

    def __call__(self, index: Any) -> Any:
        return self.first(self.second(index))

    def to(self, device: torch.device | str) -> IndexMap:
        return Composed(self.first.to(device), self.second.to(device))


@dataclass(frozen=True)
class Same:
    """The identity, on the same number of positions."""

    def __call__(self, index: Any) -> Any:
        return index

    def to(self, device: torch.device | str) -> IndexMap:
        return self


KEPT = Same()


def positions(chosen: Sequence[int], size: int, device: torch.device) -> IndexMap:
    """The map from 0, 1, ... to the numbers chosen from `size`; KEPT if all are chosen.

    The first few numbers are not KEPT, although they map to themselves: a mod that expects all of them
    (`ir/graph.py`) must not see an unchanged position.
    """
    if isinstance(chosen, range):
        whole = chosen == range(size)
        return KEPT if whole else Affine(chosen.start, chosen.step)
    return Table(torch.tensor(chosen, dtype=torch.int32, device=device))


def block_positions(chosen: Sequence[int], size: int, device: torch.device) -> IndexMap:
    """Like `positions`, for positions in chosen blocks of `size`."""
    blocks = positions(chosen, len(chosen), device)
    if blocks == KEPT:
        return KEPT
    if isinstance(blocks, Affine) and blocks.step == 1:
        return Affine(blocks.start * size)
    return InBlocks(blocks, size)


def as_range(chosen: Sequence[int]) -> Sequence[int]:
    """A range if the numbers ascend evenly, which needs no table; else the numbers."""
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step > 0:
        steady = range(chosen[0], chosen[-1] + 1, step)
        if len(steady) == len(chosen) and all(map(operator.eq, steady, chosen)):
            return steady
    return chosen


@dataclass(frozen=True, eq=False)
class Rebased(Derived):
    """The mask_mod of a slice of batch entries and heads.

    `q` occurs only in old pickles, from before slices of rows had offsets: there, other mods see indices.
    """

    mask_mod: MaskMod
    b: IndexMap = KEPT
    h: IndexMap = KEPT
    q: IndexMap = KEPT

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        old = [
            index if move == KEPT else move(index)
            for move, index in ((self.b, b), (self.h, h), (self.q, q_idx))
        ]
        return self.mask_mod(*old, kv_idx)

    @property
    def __name__(self) -> str:
        return getattr(self.mask_mod, "__name__", type(self.mask_mod).__name__)

    def to(self, device: torch.device | str) -> Rebased:
        return Rebased(moved(self.mask_mod, device), self.b.to(device), self.h.to(device), self.q.to(device))
