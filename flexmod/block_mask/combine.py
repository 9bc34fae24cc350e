"""Combines block masks: a & b, a | b, ~a, masks one after another, and a mask for other lengths.

The tiles of the operands decide most tiles of the result: a & b is empty where either mask is empty. Only
undecided tiles are evaluated, as in the builder (`refine.py`).

`sliced` selects batches, heads and rows of tiles. A slice's tiles come from the table of tiles. No element is
evaluated, so a user's own lists stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from flexmod.block_mask import refine, selection
from flexmod.block_mask.data import AnyMask, MaskData
from flexmod.block_mask.parts import trace_mask
from flexmod.block_mask.refine import OPEN
from flexmod.block_mask.selection import KEPT, Affine, Composed, Rebased, block_positions, positions
from flexmod.block_mask.storage import TileStorage
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, both_sizes, keep_padding_partial, tile_count
from flexmod.errors import BlockMaskCombineError, BlockMaskCropError, BlockMaskResizeError, DenseMaskError
from flexmod.ir.composed import Derived, MaskMod
from flexmod.ir.graph import check_sizes, dtype_name, expect_size
from flexmod.ir.offsets import NO_OFFSETS, IndexMap, Positions, of_positions
from flexmod.ir.passes import fitted
from flexmod.ir.source import mod_name
from flexmod.ir.trace import Traced
from flexmod.runtime import tensor_kinds

How = Literal["and", "or"]


@dataclass(frozen=True, eq=False)
class Combined(Derived):
    """A mask_mod that keeps the elements that both of two mask_mods keep, or that either keeps."""

    how: How
    first: MaskMod
    second: MaskMod

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        first, second = (mask_mod(b, h, q_idx, kv_idx) for mask_mod in (self.first, self.second))
        return first & second if self.how == "and" else first | second

    @property
    def __name__(self) -> str:
        return f"({mod_name(self.first)} {self.how} {mod_name(self.second)})"


@dataclass(frozen=True, eq=False)
class Complement(Derived):
    """A mask_mod that keeps the elements that another mask_mod drops."""

    mask_mod: MaskMod

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = self.mask_mod(b, h, q_idx, kv_idx)
        return not kept if isinstance(kept, bool) else ~kept

    @property
    def __name__(self) -> str:
        return f"(not {mod_name(self.mask_mod)})"


@dataclass(frozen=True, eq=False)
class Listed(Derived):
    """A mask_mod for a mask with a user's own lists. It keeps all elements of full tiles, and in partial
    tiles the elements that the mask's mask_mod keeps.

    `tiles` int8 [B or 1, H or 1, Qb, KVb]. `lengths` are the lengths of the mask.
    """

    mask_mod: MaskMod
    tiles: Tensor
    block: tuple[int, int]
    lengths: tuple[int, int]

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch, heads = self.tiles.shape[:2]
        # the lists say nothing of other positions
        q_idx = expect_size(q_idx, self.lengths[0], "a block mask of lists", "seq_lengths[0]")
        kv_idx = expect_size(kv_idx, self.lengths[1], "a block mask of lists", "seq_lengths[1]")
        place = (
            b if batch > 1 else 0, h if heads > 1 else 0, q_idx // self.block[0], kv_idx // self.block[1]
        )  # fmt: skip
        kind = self.tiles[place]
        return (kind == FULL) | ((kind == PARTIAL) & self.mask_mod(b, h, q_idx, kv_idx))


@dataclass(frozen=True, eq=False)
class Dense(Derived):
    """A mask_mod that reads a dense mask. `dense` bool [B or 1, H or 1, Q_LEN, KV_LEN]."""

    dense: Tensor

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch, heads, queries, keys = self.dense.shape
        b = expect_size(b, batch, "a dense mask", "shape[0]") if batch > 1 else 0
        h = expect_size(h, heads, "a dense mask", "shape[1]") if heads > 1 else 0
        q_idx = expect_size(q_idx, queries, "a dense mask", "shape[2]")
        return self.dense[b, h, q_idx, expect_size(kv_idx, keys, "a dense mask", "shape[3]")]

    __name__ = "dense"


def dense_mask(dense: Tensor, given: tuple[int | None, ...]) -> tuple[MaskMod, tuple[int | None, ...]]:
    """The mask_mod that reads a dense mask, and the mask's sizes.

    Each given size must equal the tensor's, which may also be 1. Raises DenseMaskError, TensorKindError and
    FreedStorageError.
    """
    if not torch.compiler.is_compiling():
        tensor_kinds.check({"dense": dense})
    shape = tuple(dense.shape)
    if dense.dtype != torch.bool:
        positions = ", ".join(("b", "h", "q_idx", "kv_idx")[-len(shape) :])
        added = ", or dense >= 0 if -inf hides a pair and 0 keeps it" if dense.is_floating_point() else ""
        raise DenseMaskError(
            shape=shape, problem=f"is {dtype_name(dense.dtype)}, but it says True or False",
            advice=f"compare it, e.g. create_block_mask(dense > 0){added}. Numbers to add to scores are a "
            f"score_mod, lambda score, b, h, q_idx, kv_idx: score + dense[{positions}]",
        )  # fmt: skip
    if not 2 <= len(shape) <= 4:
        raise DenseMaskError(
            shape=shape, problem="has the wrong number of dimensions",
            advice="give [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN]",
        )  # fmt: skip
    whole = (1,) * (4 - len(shape)) + shape
    for axis, (name, size, own) in enumerate(zip(("B", "H", "Q_LEN", "KV_LEN"), given, whole, strict=True)):
        if size is not None and size != own and (axis > 1 or own != 1):
            advice = "leave B, H, Q_LEN and KV_LEN out: the tensor has them"
            if shape == (given[0], given[3]):
                advice = "index a padding mask [B, KV_LEN]: lambda b, h, q_idx, kv_idx: dense[b, kv_idx]"
            problem = f"has {name}={own}, but {name}={size} is given"
            raise DenseMaskError(shape=shape, problem=problem, advice=advice)
    sizes = [own if size is None else size for size, own in zip(given, whole, strict=True)]
    return Dense(dense.view(whole)), tuple(sizes)


@dataclass(frozen=True, eq=False)
class OfBatch(Derived):
    """The mask_mod of masks concatenated along the batch.

    The first `batch` entries use `first`. The others use `second`, which counts them from 0.
    """

    first: MaskMod
    second: MaskMod
    batch: int

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # both run for every b, so each needs a batch entry of its own mask
        first = self.first(b.clamp(max=self.batch - 1), h, q_idx, kv_idx)
        second = self.second((b - self.batch).clamp(min=0), h, q_idx, kv_idx)
        return ((b < self.batch) & first) | ((b >= self.batch) & second)

    @property
    def __name__(self) -> str:
        return f"cat({mod_name(self.first)}, {mod_name(self.second)})"


Lengths = tuple[int, int]


def combined(first: AnyMask, second: AnyMask, how: How) -> AnyMask:
    """The mask of the elements that both masks keep, or that either keeps. Raises BlockMaskCombineError."""
    _check_alike(first, second)
    batch = _common_size((first, second), 0), _common_size((first, second), 1)
    tables = torch.broadcast_tensors(first.table(), second.table())
    keeps, ends = (FULL, EMPTY) if how == "and" else (EMPTY, FULL)
    a, b = tables
    table = torch.where(a == keeps, b, torch.where(b == keeps, a, OPEN))
    table.masked_fill_((a == ends) | (b == ends), ends)
    mask_mod = _at(first, Combined(how, _elements(first), _elements(second)))
    return _finished(first, table, batch, first.seq_lengths, mask_mod, [second])


def concatenated(masks: Sequence[AnyMask]) -> AnyMask:
    """The mask of all batch entries of `masks`, one mask after another. Raises BlockMaskCombineError."""
    if not masks:
        raise BlockMaskCombineError(problem="there are none", advice="give one mask at least")
    for mask in masks:
        _check_alike(masks[0], mask)
    for name, (offset, _) in (masks[0].positions or NO_OFFSETS).tensors().items():
        if offset.numel() > 1:
            raise BlockMaskCombineError(
                problem=f"{name} has one element for each batch entry",
                advice=f"build one mask, with the elements of all entries in {name}",
            )
    heads = _common_size(masks, 1)
    batch = 0
    mask_mod = _elements(masks[0])
    for previous, mask in pairwise(masks):
        batch += previous.storage.batch[0]
        if not _same_for_each_entry(previous, mask):
            mask_mod = OfBatch(mask_mod, _elements(mask), batch)
    batch += masks[-1].storage.batch[0]
    table = torch.cat([mask.table().expand(mask.storage.batch[0], heads, -1, -1) for mask in masks])
    first, others = masks[0], masks[1:]
    return _finished(first, table, (batch, heads), first.seq_lengths, _at(first, mask_mod), others)


def _same_for_each_entry(first: MaskData, second: MaskData) -> bool:
    """Do both masks keep the same elements in every batch entry?"""
    one, other = first._traced, second._traced
    same = one.graph.key == other.graph.key and all(map(is_, one.tensors, other.tensors))
    return same and "b" not in one.graph.reads and first._is_classified and second._is_classified


def complement(mask: AnyMask) -> AnyMask:
    """The mask of the elements that `mask` drops. Raises BlockMaskCombineError."""
    _check_dimensions(mask)
    was = mask.table()
    table = FULL - was
    # a partial tile stays partial if its mask_mod made it so, and not its padding
    if not (mask._is_classified and mask.storage.separate):
        table[was == PARTIAL] = OPEN
    _reopen_ragged(table, mask.seq_lengths, mask.BLOCK_SIZE)
    mask_mod = _at(mask, Complement(_elements(mask)))
    return _finished(mask, table, mask.storage.batch, mask.seq_lengths, mask_mod)


def resized(mask: AnyMask, lengths: Lengths) -> AnyMask:
    """The mask of the same mask_mod for other lengths, which may be larger. Raises BlockMaskResizeError."""
    grows = any(new > old for new, old in zip(lengths, mask.seq_lengths, strict=True))
    if not mask._is_classified and grows:
        raise BlockMaskResizeError(
            mask_q=mask.seq_lengths[0], mask_kv=mask.seq_lengths[1], query=lengths[0], key=lengths[1]
        )
    rows, columns = (tile_count(n, size) for n, size in zip(lengths, mask.BLOCK_SIZE, strict=True))
    was = mask.table()
    if mask._is_classified:
        # positions past the old end may be kept, also in an empty tile
        _reopen_ragged(was, mask.seq_lengths, mask.BLOCK_SIZE, (EMPTY, PARTIAL))
    table = was.new_full((*was.shape[:-2], rows, columns), OPEN)
    kept = was[..., :rows, :columns]
    table[..., : kept.shape[-2], : kept.shape[-1]] = kept
    if mask._is_classified:
        _reopen_ragged(table, lengths, mask.BLOCK_SIZE)
    return _finished(mask, table, mask.storage.batch, lengths, mask.mask_mod, classified=mask._is_classified)


def _finished(
    mask: AnyMask,
    table: Tensor,
    batch: tuple[int, ...],
    lengths: Lengths,
    mask_mod: MaskMod,
    others: Sequence[AnyMask] = (),
    classified: bool = True,
) -> AnyMask:
    """Decides the OPEN tiles of a table, and makes a mask like `mask` and `others` from it.

    `classified`: mask_mod decides the tiles. A user's own full tiles stay full where they reach past the end
    of a length, since mask_mod may drop some of their elements.
    """
    traced = mask._traced if mask_mod is mask.mask_mod else trace_mask(mask_mod, mask.device)
    if bool((table == OPEN).any()):
        sizes = (*both_sizes(batch), *lengths)
        check_sizes(traced.graph, sizes, "the block mask")
        fits = Traced(fitted(traced.graph.of_any_size.with_lines, sizes), traced.tensors)
        table = refine.finish(fits, sizes, mask.BLOCK_SIZE, table)
    alike = (mask, *others)
    separate = all(m.storage.separate for m in alike)
    table = table if separate else table.clamp(max=PARTIAL)
    inside = keep_padding_partial(table.clone(), lengths, mask.BLOCK_SIZE)
    padded = not classified and not torch.equal(inside, table)
    storage = TileStorage.of_table(
        table if padded else inside, batch, separate, any(m.storage.by_column for m in alike)
    )
    return type(mask)._of_storage(
        storage, lengths, mask.BLOCK_SIZE, mask_mod, traced, padded, classified
    )


def _reopen_ragged(
    table: Tensor, lengths: Lengths, block: tuple[int, int], kinds: tuple[int, ...] = (PARTIAL,)
) -> None:
    """Marks tiles that contain the end of a length as OPEN, in place, if they are of these kinds.

    The end may be the only reason why a tile is partial.
    """
    for axis in (0, 1):
        if lengths[axis] % block[axis]:
            edge = table.select(axis - 2, -1)
            for kind in kinds:
                edge[edge == kind] = OPEN


def _elements(mask: MaskData) -> MaskMod:
    """A mask_mod, of positions, that equals the mask at every element."""
    if mask._is_classified:
        return of_positions(mask._as_made())
    if mask.positions is not None:
        raise BlockMaskCombineError(
            problem=f"the lists of one were written to, and it has {mask.positions}",
            advice="build it of its mask_mod, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, q_offset=...)",
        )
    return Listed(mask._as_made(), mask.table(), mask.BLOCK_SIZE, mask.seq_lengths)


def _at(mask: MaskData, mask_mod: MaskMod) -> MaskMod:
    """The mask_mod at the positions of a mask."""
    return mask_mod if mask.positions is None else mask.positions.mask(mask_mod)


def _check_dimensions(mask: MaskData) -> None:
    if len(mask.storage.batch) != 2:
        raise BlockMaskCombineError(
            problem=f"one has the shape {mask.shape}, without dimensions for batch and head",
            advice="give its lists dimensions for B and H, of size 1 where the mask is the same for each",
        )


def _check_alike(first: MaskData, second: MaskData) -> None:
    """Checks that two masks have the same lengths, tile sizes, device and offsets."""
    for name in ("seq_lengths", "BLOCK_SIZE", "device"):
        values = getattr(first, name), getattr(second, name)
        if values[0] != values[1]:
            raise BlockMaskCombineError(
                problem=f"{name} is {values[0]} in one and {values[1]} in the other",
                advice=f"build both with the same {name}; resize() and to() change lengths and device",
            )
    one, other = first.positions or NO_OFFSETS, second.positions or NO_OFFSETS
    if not one.agrees(other):
        raise BlockMaskCombineError(
            problem=f"{one} in one and {other} in the other",
            advice="build both with the same offsets, the very tensors if they are tensors",
        )
    _check_dimensions(first)
    _check_dimensions(second)


def _common_size(masks: Sequence[MaskData], dimension: int) -> int:
    """The common number of batch entries (dimension 0) or heads (1). A size of 1 broadcasts."""
    axis, index = "BH"[dimension], "bh"[dimension]
    size = max(mask.storage.batch[dimension] for mask in masks)
    for mask in masks:
        own = mask.storage.batch[dimension]
        reads = index in mask.traced.graph.reads
        if own != size and (own != 1 or reads):
            why = f", and its mask_mod reads {index}" if own == 1 else ""
            raise BlockMaskCombineError(
                problem=f"one has {axis}={own}{why}; the other has {axis}={size}",
                advice=f"build both with {axis}={size}",
            )
    return size


def sliced(mask: AnyMask, index: Any) -> AnyMask:
    """The part mask[b, h, q]; its mask_mod sees the positions of the whole. Raises BlockMaskIndexError."""
    shape = (*mask.storage.batch, mask.storage.grid[0])
    b, h, q = selection.of(index, shape)
    size = mask.BLOCK_SIZE[0]
    query = selection.length_of(q, shape[-1], mask.seq_lengths[0], size)
    found = _positions_of(mask, b, block_positions(q, size, mask.device))
    moves = {"b": positions(b, shape[0], mask.device), "h": positions(h, shape[1], mask.device)}
    needed = {name: move if name in mask._traced.graph.reads else KEPT for name, move in moves.items()}
    mask_mod = of_positions(mask._as_made())
    if any(move != KEPT for move in needed.values()):
        mask_mod = Rebased(mask_mod, **needed)
    mask_mod = mask_mod if found is None else found.mask(mask_mod)
    table = mask.table()
    chosen = [range(1) if n == 1 else numbers for n, numbers in zip(table.shape, (b, h), strict=False)]
    part = selection.take(table, (*chosen, q))
    lengths = query, mask.seq_lengths[1]
    return _finished(mask, part, (len(b), len(h)), lengths, mask_mod, classified=mask._is_classified)


def _positions_of(mask: MaskData, b: Sequence[int], rows: IndexMap) -> Positions | None:
    """The positions of a slice: the offsets of batch entries `b` and of its rows."""
    known = mask.positions or NO_OFFSETS
    if rows != KEPT and (known.rows is not None or not isinstance(rows, Affine)):
        known = replace(known, rows=rows if known.rows is None else Composed(known.rows, rows))
        return known.part(b, 0)
    return known.part(b, rows.start if isinstance(rows, Affine) else 0)


def cropped(mask: AnyMask, lengths: tuple[int, int]) -> AnyMask:
    """The mask for the first queries and keys. Raises BlockMaskCropError if a length grows."""
    mask_q, mask_kv = mask.seq_lengths
    if lengths[0] > mask_q or lengths[1] > mask_kv:
        raise BlockMaskCropError(mask_q=mask_q, mask_kv=mask_kv, query=lengths[0], key=lengths[1])
    return resized(mask, lengths)
