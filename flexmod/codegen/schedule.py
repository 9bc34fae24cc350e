"""Which program does which tile, in which order: the first statements of the kernels, and their grids.

A grid is flat. The tiles of one head follow each other, so that programs that run together share its keys and
values in the L2; heads of one group are neighbors for the same reason. Where a mask is at work the long rows
(causal: the last queries, the first keys) go first, so that the short ones fill the tail.
"""

from __future__ import annotations

from flexmod.plan import Extent, cdiv


def query_order(last_first: bool) -> str:
    """Statements that turn the program's number into batch, head and start_m (a tile of queries)."""
    tile = "tiles - 1 - program % tiles" if last_first else "program % tiles"
    return "\n".join(
        [
            "program = tl.program_id(0)",
            "tiles = (M + BLOCK_M - 1) // BLOCK_M",
            f"start_m = ({tile}) * BLOCK_M",
            "head = program // tiles % HQ",
            "batch = program // tiles // HQ",
        ]
    )


def key_order() -> str:
    """Statements that turn the program's number into kv_batch, kv_head and start_n (a tile of keys)."""
    return "\n".join(
        [
            "program = tl.program_id(0)",
            "tiles = (N + BLOCK_N - 1) // BLOCK_N",
            "start_n = (program % tiles) * BLOCK_N",
            "kv_head = program // tiles % HKV",
            "kv_batch = program // tiles // HKV",
        ]
    )


def diagonal_order() -> str:
    """Statements that turn the program's number into batch, head and offset (a diagonal of tiles).

    Neighbors meet the same queries with neighboring keys at the same time.
    """
    return "\n".join(
        [
            "program = tl.program_id(0)",
            "key_tiles = (N + BLOCK_N - 1) // BLOCK_N",
            "diagonals = key_tiles + ((M + BLOCK_M - 1) // BLOCK_M - 1) * (BLOCK_M // BLOCK_N)",
            "diagonal = program % diagonals",
            "offset = (key_tiles - 1 - diagonal) * BLOCK_N",
            "head = program // diagonals % HQ",
            "batch = program // diagonals // HQ",
        ]
    )


def diagonal_count(length: Extent, keys: Extent, block_m: int, block_n: int) -> Extent:
    """The number of diagonals of tiles, of `block_m` queries by `block_n` keys, a divisor."""
    return cdiv(keys, block_n) + (cdiv(length, block_m) - 1) * (block_m // block_n)


def grid(batch: Extent, heads: Extent, length: Extent, block: int) -> Extent:
    """The number of programs for `length` rows in tiles of `block`, for each head of each batch entry."""
    return batch * heads * cdiv(length, block)
