"""Converts between tiles as a table and tiles as lists.

        table   int8 [..., Qb, KVb]: EMPTY, PARTIAL or FULL for each tile
        lists   counts int32 [..., R], indices int32 [..., R, C]: row r has the tiles
                indices[r, :counts[r]], ascending, and then the remaining ones

All functions use a bounded number of 64-bit positions at a time, so converting a very long mask takes little
memory beyond the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
# Metadata of torch's FLASH backward. Carried for `as_tuple` and `to`; flexmod reads none of it.
FLASH_PARTS = ("dq_write_order", "dq_write_order_full", "dq_kv_order")
EMPTY, PARTIAL, FULL = 0, 1, 2

# torch's cumsum and scatter work on 64-bit positions, eight bytes a tile: this many tiles at a time
TILES_AT_ONCE = 1 << 22

Lists = tuple[Tensor, Tensor]
# the lists of a mask by their names, each a Tensor or None
Parts = dict[str, Any]


def tile_count(length: int, block: int) -> int:
    return -(-length // block)


def ordered(active: Tensor) -> Lists:
    """Converts a bool table [..., R, C] to counts int32 [..., R] and indices int32 [..., R, C]."""
    *lead, columns = active.shape
    flat = active.reshape(-1, columns)
    counts = flat.sum(-1, dtype=torch.int32)
    indices = torch.empty(flat.shape, dtype=torch.int32, device=active.device)
    numbers = torch.arange(columns, dtype=torch.int32, device=active.device)
    for rows in row_groups(flat):
        here = flat[rows]
        up_to = here.cumsum(-1)
        place = torch.where(here, up_to - 1, counts[rows, None] + numbers - up_to)
        indices[rows].scatter_(-1, place, numbers.expand(place.shape))
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


def each(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    """Applies `change` to each part that is not None."""
    return {name: None if part is None else change(part) for name, part in parts.items()}
