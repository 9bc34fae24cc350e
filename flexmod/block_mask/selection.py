"""Reads the index of mask[b, h, q]: which numbers it selects on each axis.

`Rebased` lets a sliced block mask keep its mask_mod: the slice passes the whole mask's positions to the mod.

        mask[1:3]             b -> b + 1
        mask[:, [4, 0, 2]]    h -> entries[h], a captured table
        mask[:, :, 5:]        q_idx -> q_idx + 5 * BLOCK_SIZE[0], an offset (`ir/offsets.py`)
        mask[:, :, [4, 0]]    q_idx -> entries[q_idx // BLOCK_SIZE[0]] * BLOCK_SIZE[0] + q_idx % BLOCK_SIZE[0]

Each index has a map of its own: a range, a table, or blocks of positions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmod.errors import BlockMaskIndexError
from flexmod.errors.base import counted, shown
from flexmod.ir.composed import Derived, MaskMod
from flexmod.ir.graph import as_int, as_position, expect_size
from flexmod.ir.offsets import IndexMap
from flexmod.ir.vectors import whole_index


@dataclass(frozen=True)
class Affine(IndexMap):
    start: int
    step: int = 1

    def __call__(self, index: Any) -> Any:
        return (index if self.step == 1 else index * self.step) + self.start


@dataclass(frozen=True, eq=False)
class Table(IndexMap):
    """Maps an index to `entries[index]`, int32 [n], numbers from 0 to `largest`."""

    entries: Tensor
    largest: int

    def __call__(self, index: Any) -> Any:
        return as_position(self.entries[index], index, self.largest)


@dataclass(frozen=True)
class InBlocks(IndexMap):
    """Maps blocks of `size` positions as a whole."""

    blocks: IndexMap
    size: int

    def __call__(self, index: Any) -> Any:
        if isinstance(self.blocks, Table):  # there are no further blocks
            count = self.blocks.entries.shape[0] * self.size
            index = expect_size(index, count, "a block mask of chosen rows", "rows of tiles")
        return self.blocks(index // self.size) * self.size + index % self.size


@dataclass(frozen=True)
class Composed(IndexMap):
    """Applies `second` to an index, then `first` to the result."""

    first: IndexMap
    second: IndexMap

    def __call__(self, index: Any) -> Any:
        return self.first(self.second(index))


@dataclass(frozen=True)
class Same(IndexMap):
    """The identity, on the same number of positions."""

    def __call__(self, index: Any) -> Any:
        return index


KEPT = Same()


def positions(chosen: Sequence[int], size: int, device: torch.device) -> IndexMap:
    """The map from 0, 1, ... to the numbers chosen from `size`; KEPT if all are chosen.

    The first few numbers are not KEPT, although they map to themselves: a mod that expects all of them
    (`ir/graph.py`) must not see an unchanged position.
    """
    if isinstance(chosen, range):
        whole = chosen == range(size)
        return KEPT if whole else Affine(chosen.start, chosen.step)
    return Table(torch.tensor(chosen, dtype=torch.int32, device=device), max(chosen))


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
    """The mask_mod of a slice of batch entries and heads."""

    mask_mod: MaskMod
    b: IndexMap = KEPT
    h: IndexMap = KEPT

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.mask_mod(self.b(b), self.h(h), q_idx, kv_idx)


AXES = ("batches", "heads", "rows of tiles")
Chosen = Sequence[int]


def of(index: Any, shape: tuple[int, ...]) -> tuple[Chosen, Chosen, Chosen]:
    """The selected numbers of b, h and q for an index into a mask of [B, H, Qb].

    A range if they ascend evenly, else a list. Raises BlockMaskIndexError.
    """
    ask = _Ask(index, shape)
    entries = index if isinstance(index, tuple) else (index,)
    if len(shape) != 3:
        ask.refuse(
            "only masks with a batch and a head dimension can be sliced", "add the missing dimensions first"
        )
    dots = sum(entry is Ellipsis for entry in entries)
    if dots > 1 or len(entries) - dots > 3:
        ask.refuse("too many indices", "give at most three, mask[b, h, q]")
    entries = whole_index(index, 3)
    if sum(not isinstance(entry, slice) and not _is_number(entry) for entry in entries) > 1:
        ask.refuse("lists on two axes could mean pairs or a grid", "index one axis at a time, mask[b][:, h]")
    b, h, q = (ask.chosen(entry, axis) for axis, entry in enumerate(entries))
    return b, h, q


def length_of(rows: Chosen, count: int, length: int, block: int) -> int:
    """The number of queries in the selected rows of tiles. The last of `count` rows may be short.

    A short row must stay last: the padding of a row in the middle would look like positions.
    """
    short = length - (count - 1) * block
    if short < block and count - 1 in rows[:-1]:
        raise BlockMaskIndexError(
            shape=f"{count}", axes=AXES[2], index=list(rows),
            problem=f"the last row holds {short} of {block} queries and can only come last",
            advice="put it at the end, or build the mask with a Q_LEN that the tiles divide",
        )  # fmt: skip
    return (len(rows) - 1) * block + (short if rows[-1] == count - 1 else block)


def take(part: Tensor, chosen: tuple[Chosen, ...]) -> Tensor:
    """Selects entries of the first three dimensions, at most one by a list; a view without one."""
    return part[tuple([slice(n.start, n.stop, n.step) if isinstance(n, range) else [*n] for n in chosen])]


class _Ask:
    """One index into one mask, for error messages."""

    def __init__(self, index: Any, shape: tuple[int, ...]) -> None:
        self.index = index
        self.shape = shape

    def refuse(self, problem: str, advice: str) -> NoReturn:
        axes = f"({', '.join(AXES)})" if len(self.shape) == 3 else "counts"
        raise BlockMaskIndexError(
            shape=self.shape, axes=axes, index=shown(self.index), problem=problem, advice=advice
        )

    def chosen(self, entry: Any, axis: int) -> Chosen:
        size = self.shape[axis]
        numbers = self._numbers(entry, axis)
        for number in numbers[:1] if isinstance(numbers, range) else numbers:
            if not -size <= number < size:
                problem = f"the number of {AXES[axis]} is {size}"
                self.refuse(problem, f"use numbers from {-size} to {size - 1}")
        if not len(numbers):
            self.refuse(f"it chooses none of the {AXES[axis]}", "choose at least one")
        return numbers if isinstance(numbers, range) else as_range([number % size for number in numbers])

    def _numbers(self, entry: Any, axis: int) -> Chosen:
        size = self.shape[axis]
        if isinstance(entry, slice):
            if entry.step is not None and entry.step < 1:
                self.refuse("a slice that runs backwards", "give the numbers as a list")
            steps = range(size)[entry]
            return range(steps.start, steps[-1] + 1, steps.step) if steps else steps
        if _is_number(entry):
            return [operator.index(entry)]
        like_list = isinstance(entry, (list, range)) or hasattr(entry, "__array__")
        if like_list and not isinstance(entry, Tensor):
            try:
                entry = torch.as_tensor(entry, device="cpu")
            except (TypeError, ValueError, RuntimeError):
                self.refuse("it is no list of numbers", "use one list of ints")
        if not isinstance(entry, Tensor):
            what = f"{type(entry).__name__} is no index"
            self.refuse(what, "use ints, slices, or one list or tensor of ints")
        return self._entries(entry, axis)

    def _entries(self, entries: Tensor, axis: int) -> Chosen:
        if entries.dim() == 1 and not len(entries):
            return range(0)
        if entries.dim() != 1 or not _has_integers(entries):
            self.refuse(
                f"a list has one dimension of ints or bools, not {entries.dim()} of {entries.dtype}",
                "flatten it",
            )
        if entries.dtype == torch.bool:
            if len(entries) != self.shape[axis]:
                self.refuse(
                    f"the list has {counted(len(entries), 'bool')}, but the number of {AXES[axis]} is "
                    f"{self.shape[axis]}",
                    "give one bool for each",
                )
            entries = entries.nonzero().flatten()
        return entries.tolist()


def _is_number(entry: Any) -> bool:
    """Is it an int, a numpy integer or a 0-d integer tensor?"""
    if isinstance(entry, Tensor):
        return entry.dim() == 0 and _has_integers(entry) and entry.dtype != torch.bool
    return as_int(entry) is not None and not getattr(entry, "shape", ())


def _has_integers(entries: Tensor) -> bool:
    return not entries.is_floating_point() and not entries.is_complex()
