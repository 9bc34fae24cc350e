"""Parts of a block mask: some of its batches, heads and rows of tiles, or its upper left corner.

What a part holds is cut out of the table of tiles. No element is looked at, so lists that a user gave beside
a mask_mod stay as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.block_mask import selection, tiles
from flexmod.block_mask.data import AnyMask
from flexmod.block_mask.mask_mod import MaskMod, trace_mask
from flexmod.block_mask.rebase import KEPT, Rebased, block_positions, positions
from flexmod.errors import BlockMaskCropError


def sliced(mask: AnyMask, index: Any) -> AnyMask:
    """mask[b, h, q], which sees the positions of the whole. Raises BlockMaskIndexError."""
    shape = (*mask.held.batch, mask.held.grid[0])
    b, h, q = selection.of(index, shape)
    size = mask.BLOCK_SIZE[0]
    query = selection.length_of(q, shape[-1], mask.seq_lengths[0], size)
    moves = {
        "b": positions(b, shape[0], mask.device), "h": positions(h, shape[1], mask.device),
        "q_idx": block_positions(q, size, mask.device),
    }  # fmt: skip
    needed = {name: move if name in mask._traced.graph.reads else KEPT for name, move in moves.items()}
    unmoved = all(move == KEPT for move in needed.values())
    mask_mod = mask.mask_mod if unmoved else Rebased(mask.mask_mod, *needed.values())
    table = mask.table()
    chosen = [range(1) if n == 1 else numbers for n, numbers in zip(table.shape, (b, h), strict=False)]
    part = selection.take(table, (*chosen, q))
    return _of_table(mask, part, (len(b), len(h)), (query, mask.seq_lengths[1]), mask_mod)


def cropped(mask: AnyMask, lengths: tuple[int, int]) -> AnyMask:
    """The first queries and keys. Raises BlockMaskCropError where the lengths grow."""
    mask_q, mask_kv = mask.seq_lengths
    if lengths[0] > mask_q or lengths[1] > mask_kv:
        raise BlockMaskCropError(mask_q=mask_q, mask_kv=mask_kv, query=lengths[0], key=lengths[1])
    rows, columns = map(tiles.tile_count, lengths, mask.BLOCK_SIZE)
    table = mask.table()[..., :rows, :columns].clone()
    tiles.keep_padding_partial(table, lengths, mask.BLOCK_SIZE)
    return _of_table(mask, table, mask.held.batch, lengths, mask.mask_mod)


def _of_table(
    mask: AnyMask, table: Tensor, batch: tuple[int, ...], lengths: tuple[int, int], mask_mod: MaskMod
) -> AnyMask:
    """A part of `mask`, of its part of the table."""
    traced = mask._traced if mask_mod is mask.mask_mod else trace_mask(mask_mod, mask.device)
    part = type(mask).of_table(
        table, batch, lengths, mask.BLOCK_SIZE, mask_mod, traced, separate=mask.held.separate,
        by_column=mask.held.by_column, full_tiles_padded=mask.full_tiles_padded,
    )  # fmt: skip
    part._classified = mask.classified
    return part
