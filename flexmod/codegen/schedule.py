"""Which program does which tile, in which order: the first statements of the kernels, and their grids.

A grid is flat. The tiles of one head follow each other, so that programs that run together share its keys and
values in the L2; heads of one group are neighbors for the same reason. Where a mask is at work the long rows
(causal: the last queries, the first keys) go first, so that the short ones fill the tail.
"""

from __future__ import annotations


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


def grid(batch: int, heads: int, length: int, block: int) -> tuple[int]:
    """The number of programs for `length` rows in tiles of `block`, for each head of each batch entry."""
    return (batch * heads * -(-length // block),)
