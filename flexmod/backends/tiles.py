"""Splits a block mask into steps for the CPU backend: rows, columns, and elements that need the mask_mod.

A query attends to no key of an unlisted tile, whatever the mask_mod returns there. It attends to all keys of
a full tile. For a partial tile the mask_mod decides each element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmod.block_mask.storage import MaskSnapshot
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL

# Steps join small q blocks and cut large ones to about this many rows, enough for a fast product.
ROWS = 128


@dataclass(frozen=True)
class AskedColumns:
    """Columns of a step (`span`, counted within the step) whose elements need the mask_mod.

    `tiles` int8 [rows, width of span] has each element's tile kind; None if all of them are partial.
    """

    span: slice
    tiles: Tensor | None

    def allowed(self, said: Tensor) -> Tensor:
        """Returns the allowed elements from the mask_mod's result, which broadcasts to [..., rows, width]."""
        if self.tiles is None:
            return said
        return (self.tiles == FULL) | ((self.tiles == PARTIAL) & said)


@dataclass(frozen=True)
class TileStep:
    """Rows, and all columns that any of them attends to.

    `columns` is a slice, or int64 positions in ascending order if they have gaps.
    """

    rows: slice
    columns: slice | Tensor
    asked: tuple[AskedColumns, ...]

    @property
    def row_count(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def column_count(self) -> int:
        columns = self.columns
        return columns.stop - columns.start if isinstance(columns, slice) else len(columns)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns q_idx [rows, 1] and kv_idx [columns]."""
        columns = self.columns
        if isinstance(columns, slice):
            columns = torch.arange(columns.start, columns.stop, device=device)
        return torch.arange(self.rows.start, self.rows.stop, device=device)[:, None], columns


def shared_part(table: Tensor) -> Tensor:
    """Reduces a table's B or H to 1 if the tiles of all batch entries or all heads are the same."""
    for dim in (0, 1):
        first = table.narrow(dim, 0, 1)
        if bool((table == first).all()):
            table = first
    return table


def element_table(mask: MaskSnapshot, rows: int, columns: int) -> Tensor:
    """Returns each element's tile kind, int8 [B, H, rows, columns].

    B or H is 1 if the mask's tiles are the same for each.
    """
    table = mask.table()
    for dim, block, size in ((2, mask.BLOCK_SIZE[0], rows), (3, mask.BLOCK_SIZE[1], columns)):
        table = _spread(table, dim, block, size)
    return table


def _spread(table: Tensor, dim: int, block: int, size: int) -> Tensor:
    """Repeats tiles over `size` elements along a dimension; cuts the last tile."""
    return table.index_select(dim, torch.arange(size, device=table.device) // block)


def steps_without_mask(rows: int, columns: int, budget: int) -> Iterator[TileStep]:
    """Yields steps over all scores, of at most `budget` scores or one row."""
    yield from _cut(slice(0, rows), slice(0, columns), (), budget)


def steps_of_table(
    table: Tensor, block_size: tuple[int, int], rows: int, columns: int, budget: int
) -> Iterator[TileStep]:
    """Yields steps of one [Qb, KVb] tile table, rows ascending, without rows that attend to nothing."""
    q_block, kv_block = block_size
    together = max(1, ROWS // q_block)
    for first in range(0, table.shape[0], together):
        group = table[first : first + together]
        listed = (group != EMPTY).any(0)
        tiles = listed.nonzero().flatten()
        if len(tiles) == 0:
            continue
        span = slice(first * q_block, min((first + together) * q_block, rows))
        group = group[:, tiles]
        asked = tuple(_asked(group, block_size, span, _column_count(tiles, kv_block, columns)))
        yield from _cut(span, _columns(tiles, kv_block, columns), asked, budget)


def _asked(group: Tensor, block_size: tuple[int, int], rows: slice, width: int) -> Iterator[AskedColumns]:
    q_block, kv_block = block_size
    for first, last in _runs((group != FULL).any(0)):
        span = slice(first * kv_block, min(last * kv_block, width))
        kinds = group[:, first:last]
        if bool((kinds == PARTIAL).all()):
            yield AskedColumns(span, None)
            continue
        spread = _spread(kinds, 0, q_block, rows.stop - rows.start)
        yield AskedColumns(span, _spread(spread, 1, kv_block, span.stop - span.start))


def _cut(
    rows: slice, columns: slice | Tensor, asked: tuple[AskedColumns, ...], budget: int
) -> Iterator[TileStep]:
    whole = TileStep(rows, columns, asked)
    height = min(max(1, budget // whole.column_count), ROWS)
    if whole.row_count <= height:
        yield whole
        return
    for start in range(rows.start, rows.stop, height):
        stop = min(start + height, rows.stop)
        part = slice(start - rows.start, stop - rows.start)
        here = tuple(AskedColumns(a.span, None if a.tiles is None else a.tiles[part]) for a in asked)
        yield TileStep(slice(start, stop), columns, here)


def _columns(tiles: Tensor, block: int, columns: int) -> slice | Tensor:
    """Returns positions of ascending tiles; a slice if they have no gaps."""
    first, last = int(tiles[0]), int(tiles[-1])
    if last - first + 1 == len(tiles):
        return slice(first * block, min((last + 1) * block, columns))
    positions = (tiles[:, None] * block + torch.arange(block, device=tiles.device)).flatten()
    return positions[: _column_count(tiles, block, columns)]


def _column_count(tiles: Tensor, block: int, columns: int) -> int:
    """Counts the columns of ascending tiles, of which only the last may reach over the end."""
    return len(tiles) * block - max(0, (int(tiles[-1]) + 1) * block - columns)


def _runs(flags: Tensor) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each run of True."""
    edges = torch.nn.functional.pad(flags.to(torch.int8), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    yield from zip(starts.tolist(), stops.tolist(), strict=True)
