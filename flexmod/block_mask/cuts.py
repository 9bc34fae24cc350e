"""Cuts parts out of a block mask: some batches, heads and rows of tiles, or the upper left corner.

A part's tiles come from the table of tiles. No element is evaluated, so a user's own lists stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flexmod.block_mask import selection, tiles
from flexmod.block_mask.data import AnyMask, MaskData
from flexmod.block_mask.mask_mod import MaskMod, trace_mask
from flexmod.block_mask.rebase import KEPT, Affine, Composed, Rebased, block_positions, positions
from flexmod.errors import BlockMaskCropError
from flexmod.ir.offsets import NO_OFFSETS, IndexMap, Positions, of_positions


def sliced(mask: AnyMask, index: Any) -> AnyMask:
    """The part mask[b, h, q]; its mask_mod sees the positions of the whole. Raises BlockMaskIndexError."""
    shape = (*mask.storage.batch, mask.storage.grid[0])
    b, h, q = selection.of(index, shape)
    size = mask.BLOCK_SIZE[0]
    query = selection.length_of(q, shape[-1], mask.seq_lengths[0], size)
    found = _positions_of(mask, b, block_positions(q, size, mask.device))
    moves = {"b": positions(b, shape[0], mask.device), "h": positions(h, shape[1], mask.device)}
    needed = {name: move if name in mask._traced.graph.reads else KEPT for name, move in moves.items()}
    mask_mod = of_positions(mask.mask_mod)
    if any(move != KEPT for move in needed.values()):
        mask_mod = Rebased(mask_mod, *needed.values())
    mask_mod = mask_mod if found is None else found.mask(mask_mod)
    table = mask.table()
    chosen = [range(1) if n == 1 else numbers for n, numbers in zip(table.shape, (b, h), strict=False)]
    part = selection.take(table, (*chosen, q))
    return _of_table(mask, part, (len(b), len(h)), (query, mask.seq_lengths[1]), mask_mod)


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
    rows, columns = map(tiles.tile_count, lengths, mask.BLOCK_SIZE)
    table = mask.table()[..., :rows, :columns].clone()
    tiles.keep_padding_partial(table, lengths, mask.BLOCK_SIZE)
    return _of_table(mask, table, mask.storage.batch, lengths, mask.mask_mod)


def _of_table(
    mask: AnyMask, table: Tensor, batch: tuple[int, ...], lengths: tuple[int, int], mask_mod: MaskMod
) -> AnyMask:
    """Makes a part of `mask` from that part of its table."""
    traced = mask._traced if mask_mod is mask.mask_mod else trace_mask(mask_mod, mask.device)
    part = type(mask).of_table(
        table, batch, lengths, mask.BLOCK_SIZE, mask_mod, traced, separate=mask.storage.separate,
        by_column=mask.storage.by_column, full_tiles_padded=mask.full_tiles_padded,
    )  # fmt: skip
    part._classified = mask.classified
    return part
