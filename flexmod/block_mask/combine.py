"""Combines block masks: a & b, a | b, ~a, masks one after another, and a mask for other lengths.

The tiles of the operands decide most tiles of the result: a & b is empty where either mask is empty. Only
undecided tiles are evaluated, as in the builder (`refine.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import is_

import torch
from torch import Tensor

from flexmod.block_mask import refine
from flexmod.block_mask.data import AnyMask, MaskData
from flexmod.block_mask.derived import Combined, Complement, How, Listed, OfBatch
from flexmod.block_mask.mask_mod import MaskMod, trace_mask
from flexmod.block_mask.refine import OPEN
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, keep_padding_partial, tile_count
from flexmod.errors import BlockMaskCombineError, BlockMaskResizeError
from flexmod.ir.offsets import NO_OFFSETS, of_positions
from flexmod.ir.passes import fitted
from flexmod.ir.sizes import check_sizes
from flexmod.ir.trace import Traced

Lengths = tuple[int, int]


def combined(first: AnyMask, second: AnyMask, how: How) -> AnyMask:
    """The mask of the elements that both masks keep, or that either keeps. Raises BlockMaskCombineError."""
    batch = _common_batch(first, second)
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
        _check_dimensions(mask)
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
        batch += _batch(previous)[0]
        if not _same_for_each_entry(previous, mask):
            mask_mod = OfBatch(mask_mod, _elements(mask), batch)
    batch += _batch(masks[-1])[0]
    table = torch.cat([mask.table().expand(_batch(mask)[0], heads, -1, -1) for mask in masks])
    first, others = masks[0], masks[1:]
    return _finished(first, table, (batch, heads), first.seq_lengths, _at(first, mask_mod), others)


def _same_for_each_entry(first: MaskData, second: MaskData) -> bool:
    """Do both masks keep the same elements in every batch entry?"""
    one, other = first._traced, second._traced
    same = one.graph.key == other.graph.key and all(map(is_, one.tensors, other.tensors))
    return same and "b" not in one.graph.reads and first.classified and second.classified


def complement(mask: AnyMask) -> AnyMask:
    """The mask of the elements that `mask` drops. Raises BlockMaskCombineError."""
    _check_dimensions(mask)
    was = mask.table()
    table = FULL - was
    # a partial tile stays partial if its mask_mod made it so, and not its padding
    if not (mask.classified and mask.storage.separate):
        table[was == PARTIAL] = OPEN
    _reopen_ragged(table, mask.seq_lengths, mask.BLOCK_SIZE)
    return _finished(mask, table, _batch(mask), mask.seq_lengths, _at(mask, Complement(_elements(mask))))


def resized(mask: AnyMask, lengths: Lengths) -> AnyMask:
    """The mask of the same mask_mod for other lengths, which may be larger. Raises BlockMaskResizeError."""
    grows = any(new > old for new, old in zip(lengths, mask.seq_lengths, strict=True))
    if not mask.classified and grows:
        raise BlockMaskResizeError(
            mask_q=mask.seq_lengths[0], mask_kv=mask.seq_lengths[1], query=lengths[0], key=lengths[1]
        )
    rows, columns = (tile_count(n, size) for n, size in zip(lengths, mask.BLOCK_SIZE, strict=True))
    was = mask.table()
    if mask.classified:
        _reopen_ragged(was, mask.seq_lengths, mask.BLOCK_SIZE)
    table = was.new_full((*was.shape[:-2], rows, columns), OPEN)
    kept = was[..., :rows, :columns]
    table[..., : kept.shape[-2], : kept.shape[-1]] = kept
    if mask.classified:
        _reopen_ragged(table, lengths, mask.BLOCK_SIZE)
    return _finished(mask, table, mask.storage.batch, lengths, mask.mask_mod)


def _finished(
    mask: AnyMask,
    table: Tensor,
    batch: tuple[int, ...],
    lengths: Lengths,
    mask_mod: MaskMod,
    others: Sequence[AnyMask] = (),
) -> AnyMask:
    """Decides the OPEN tiles of a table, and makes a mask like `mask` and `others` from it."""
    traced = mask._traced if mask_mod is mask.mask_mod else trace_mask(mask_mod, mask.device)
    if bool((table == OPEN).any()):
        sizes = (*((1,) * (2 - len(batch)) + batch), *lengths)
        check_sizes(traced.graph, sizes, "the block mask")
        fits = Traced(fitted(traced.graph.of_any_size(), sizes), traced.tensors)
        table = refine.finish(fits, sizes, mask.BLOCK_SIZE, table)
    alike = (mask, *others)
    separate = all(m.storage.separate for m in alike)
    keep_padding_partial(table, lengths, mask.BLOCK_SIZE)
    made = type(mask).of_table(
        table if separate else table.clamp(max=PARTIAL), batch, lengths, mask.BLOCK_SIZE, mask_mod, traced,
        separate=separate, by_column=any(m.storage.by_column for m in alike),
    )  # fmt: skip
    made._classified = mask_mod is not mask.mask_mod or mask.classified
    return made


def _reopen_ragged(table: Tensor, lengths: Lengths, block: tuple[int, int]) -> None:
    """Marks partial tiles that contain the end of a length as OPEN, in place: the end may be the only reason
    why they are partial."""
    for axis in (0, 1):
        if lengths[axis] % block[axis]:
            edge = table.select(axis - 2, -1)
            edge[edge == PARTIAL] = OPEN


def _elements(mask: MaskData) -> MaskMod:
    """A mask_mod, of positions, that equals the mask at every element."""
    if mask.classified:
        return of_positions(mask.mask_mod)
    if mask.positions is not None:
        raise BlockMaskCombineError(
            problem=f"the lists of one were written to, and it has {mask.positions}",
            advice="build it of its mask_mod, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, q_offset=...)",
        )
    return Listed(mask.mask_mod, mask.table(), mask.BLOCK_SIZE)


def _at(mask: MaskData, mask_mod: MaskMod) -> MaskMod:
    """The mask_mod at the positions of a mask."""
    return mask_mod if mask.positions is None else mask.positions.mask(mask_mod)


def _batch(mask: MaskData) -> tuple[int, int]:
    batch, heads = mask.storage.batch
    return batch, heads


def _check_dimensions(mask: MaskData) -> None:
    if len(mask.storage.batch) != 2:
        raise BlockMaskCombineError(
            problem=f"one has the shape {mask.shape}, without dimensions for batch and head",
            advice="give its lists dimensions for B and H, of size 1 where the mask is the same for each",
        )


def _common_batch(first: MaskData, second: MaskData) -> tuple[int, int]:
    """Checks that the masks fit together, and returns their common batch dimensions."""
    _check_alike(first, second)
    return _common_size((first, second), 0), _common_size((first, second), 1)


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
    size = max(_batch(mask)[dimension] for mask in masks)
    for mask in masks:
        own = _batch(mask)[dimension]
        reads = index in mask.traced.graph.reads
        if own != size and (own != 1 or reads):
            why = f", and its mask_mod reads {index}" if own == 1 else ""
            raise BlockMaskCombineError(
                problem=f"one has {axis}={own}{why}; the other has {axis}={size}",
                advice=f"build both with {axis}={size}",
            )
    return size
