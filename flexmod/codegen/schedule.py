"""The grids of attention's kernels: how many programs there are.

`device_functions/attention.py` decides which program computes which tile, and in which order.
"""

from __future__ import annotations

from flexmod.plan import Extent, cdiv


def diagonal_count(length: Extent, keys: Extent, block_m: int, block_n: int) -> Extent:
    """The number of diagonals of tiles, of `block_m` queries by `block_n` keys, a divisor."""
    return cdiv(keys, block_n) + (cdiv(length, block_m) - 1) * (block_m // block_n)


def grid(batch: Extent, heads: Extent, length: Extent, block: int) -> Extent:
    """The number of programs for `length` rows in tiles of `block`, for each head of each batch entry."""
    return batch * heads * cdiv(length, block)
