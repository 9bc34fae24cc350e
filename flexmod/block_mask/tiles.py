"""Converts between tiles as a table and tiles as lists.

        table   int8 [..., Qb, KVb]: EMPTY, PARTIAL or FULL for each tile
        lists   counts int32 [..., R], indices int32 [..., R, C]: row r has the tiles
                indices[r, :counts[r]], ascending, and then the remaining ones

All functions use a bounded number of 64-bit positions at a time, so converting a very long mask takes little
memory beyond the result.

`Runs` stores tiles as runs: each run is a range of consecutive tiles of one kind, partial or full, in a row.

        rows     int32 [..., R, 2, 3]   for a row's partial tiles, then for its full tiles: the number of
                                        tiles, the number of runs, and the place of the first run in `spans`
        spans    int32 [N, 2]           the first tile of a run, and the tile after its last
        order    int32 [..., R]         the rows, longest first; None if not computed

The runs of one kind in a row are consecutive in `spans`, in ascending order. Rows may be stored in any order,
with gaps.

A mask's memory grows with its boundary: a causal mask has two runs a row at every length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.ir.graph import POSITIONS
from flexmod.runtime.private_torch import fix_sizes

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
# Metadata of torch's FLASH backward. Carried for `as_tuple` and `to`; flexmod reads none of it.
FLASH_PARTS = ("dq_write_order", "dq_write_order_full", "dq_kv_order")
EMPTY, PARTIAL, FULL = 0, 1, 2

# torch's sorts and counts make 64-bit positions, eight bytes a tile: this many tiles at a time
TILES_AT_ONCE = 1 << 22

Lists = tuple[Tensor, Tensor]
# the lists of a mask by their names, each a Tensor or None
Parts = dict[str, Any]


def tile_count(length: int, block: int) -> int:
    return -(-length // block)


def both_sizes(batch: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of batch entries and heads; a dimension that a mask lacks is 1."""
    entries, heads = (1, 1, *batch)[-2:]
    return entries, heads


def positions_on_axes(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """b, h, q_idx and kv_idx, each along its own axis of four."""
    positions = {}
    for axis, (name, size) in enumerate(zip(POSITIONS, sizes, strict=True)):
        shape = [1] * 4
        shape[axis] = size
        positions[name] = torch.arange(size, dtype=dtype, device=device).view(shape)
    return positions


class MaskLayout(NamedTuple):
    """What a block mask has besides its mask_mod. `sizes` are B, H, Q_LEN and KV_LEN.

    `separate` False lists full tiles as partial.
    """

    sizes: tuple[int, int, int, int]
    block: tuple[int, int]
    device: torch.device
    separate: bool

    def grid(self) -> tuple[int, int]:
        """Returns the numbers of tiles, (Qb, KVb)."""
        return tile_count(self.sizes[2], self.block[0]), tile_count(self.sizes[3], self.block[1])


def ordered(active: Tensor) -> Lists:
    """Converts a bool table [..., R, C] to counts int32 [..., R] and indices int32 [..., R, C]."""
    *lead, columns = active.shape
    flat = active.reshape(-1, columns)
    counts = flat.sum(-1, dtype=torch.int32)
    indices = torch.empty(flat.shape, dtype=torch.int32, device=active.device)
    for rows in row_groups(flat):
        indices[rows] = flat[rows].to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts.reshape(lead), indices.reshape(active.shape)


def dense(lists: Lists, columns: int) -> Tensor:
    """Converts counts [..., R] and indices [..., R, width] to a bool table [..., R, columns]."""
    counts, indices = lists
    *lead, width = indices.shape
    flat_counts, flat = counts.reshape(-1, 1), indices.reshape(-1, width)
    # one more column takes the entries after a row's count
    table = torch.zeros(flat.shape[0], columns + 1, dtype=torch.bool, device=indices.device)
    place = torch.arange(width, dtype=torch.int32, device=indices.device)
    for rows in row_groups(flat):
        target = torch.where(place < flat_counts[rows], flat[rows], columns)
        table[rows].scatter_(-1, target.long(), True)
    return table[:, :columns].reshape(*lead, columns)


def transposed(lists: Lists, columns: int) -> Lists:
    """The same tiles listed by column: counts [..., columns], indices [..., columns, R]."""
    return ordered(dense(lists, columns).mT)


def row_groups(flat: Tensor) -> Iterator[slice]:
    """Slices of rows of a table [rows, columns], a bounded number of tiles each."""
    rows, columns = flat.shape
    step = max(1, TILES_AT_ONCE // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def keep_padding_partial(table: Tensor, seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> Tensor:
    """Marks FULL tiles that reach past the end of a length as PARTIAL, in place.

    Kernels compute every element of a full tile, padding included.
    """
    if seq_lengths[0] % block_size[0]:
        table[..., -1, :].clamp_(max=PARTIAL)
    if seq_lengths[1] % block_size[1]:
        table[..., -1].clamp_(max=PARTIAL)
    return table


@dataclass(frozen=True, eq=False)
class Runs:
    """The tiles of a mask in one direction: row by row, or column by column. See the head of this file."""

    rows: Tensor
    spans: Tensor
    order: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows, self.spans) if self.order is None else (self.rows, self.spans, self.order)

    def counts(self) -> Tensor:
        """int32 [2, ..., R]: how many partial and how many full tiles a row has."""
        return self.rows[..., 0].movedim(-1, 0)

    def table(self, columns: int) -> Tensor:
        """int8 [..., R, columns]: EMPTY, PARTIAL or FULL for each tile."""
        *lead, _, _ = self.rows.shape
        _, number, first = self.rows.reshape(-1, 2, 3).movedim(1, 0).flatten(0, 1).unbind(-1)
        rows = len(first) // 2
        here = torch.arange(len(self.spans), dtype=torch.int32, device=self.spans.device)
        # of several rows with the same first run, only one has runs: sort it last
        order = (first.long() * 2 + (number > 0)).argsort()
        owner = torch.searchsorted(first[order], here, right=True).sub_(1).clamp_(min=0)
        owner = order[owner]
        used = here < (first + number)[owner]
        kind = torch.where(used, owner // rows + PARTIAL, EMPTY).to(torch.int8)
        place = (owner % rows * (columns + 1))[:, None] + self.spans
        place = place.where(used[:, None], 0)
        edges = torch.zeros(rows * (columns + 1), dtype=torch.int8, device=self.spans.device)
        edges.index_add_(0, place[:, 0], kind)
        edges.index_add_(0, place[:, 1], -kind)
        table = edges.view(rows, columns + 1)
        for group in row_groups(table):
            table[group] = table[group].cumsum(-1, dtype=torch.int8)
        return table[:, :columns].view(*lead, columns)

    def with_fixed_sizes(self) -> Runs:
        """Tells torch.compile which sizes are the same in each mask.

        With dynamic=True it would expect them to change, and to stay equal to other sizes of the first call:
        what it compiles for a batch of 2 would serve no other batch.
        """
        fix_sizes(self.rows, 2)
        fix_sizes(self.spans, 1)
        return self

    def in_order(self) -> Runs:
        """Returns the runs with `order`; of equally long rows the first comes first."""
        longest_first = self.rows[..., 0].sum(-1).argsort(dim=-1, descending=True, stable=True)
        return Runs(self.rows, self.spans, longest_first.int())


def of_table(table: Tensor) -> Runs:
    """Finds the runs of a table int8 [..., R, C].

    Two synchronizations with its device for each four million tiles.
    """
    *lead, columns = table.shape
    flat = table.reshape(-1, columns)
    # each row ends with an empty entry, so that no run continues in the next row
    width = columns + 1
    found = []
    for group in row_groups(flat):
        padded = torch.nn.functional.pad(flat[group], (0, width - columns))
        kind, count = padded.flatten().unique_consecutive(return_counts=True)
        start = count.cumsum(0) - count
        used = (kind != EMPTY).nonzero()[:, 0]
        start, count, kind = start[used], count[used], kind[used].long()
        found.append(torch.stack([start // width + group.start, start % width, count, kind]))
    row, first, length, kind = torch.cat(found, 1)
    order = kind.argsort(stable=True)
    place = (row * 2 + kind - PARTIAL)[order]
    found_rows = torch.zeros(*lead, 2, 3, dtype=torch.int32, device=table.device)
    rows = found_rows.view(-1, 3)
    rows[:, 0].index_add_(0, place, length[order].int())
    rows[:, 1].index_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    number = rows[:, 1].view(-1, 2).T.flatten()
    rows[:, 2] = (number.cumsum(0, dtype=torch.int32) - number).view(2, -1).T.flatten()
    spans = torch.stack([first, first + length], 1)[order].int()
    return Runs(found_rows, spans)
