"""The kernels that exist for gradients of captured tensors alone: launches, and the lists that they walk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.backends.arguments import Arguments, mask_strides
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, ordered, tile_count
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.schedule import diagonal_count, grid
from flexmod.codegen.spec import Tile, option
from flexmod.ir.traces import remember
from flexmod.ir.watched import UNCOUNTED, version_of
from flexmod.runtime.launch import launch

Extents = tuple[int, int, int, int]

# What is left of 64 bits for a sum: its sign, and one bit to spare for what rounding adds to a term.
FIXED_BITS = 62
DERIVED = 16  # arguments that a mask keeps


def sums_along_diagonals(
    kernels: Kernels, device: torch.device, extents: Extents, shared: Arguments, mask: MaskSnapshot | None
) -> list[Tensor]:
    """Each term's sums by q_idx - kv_idx, [B, Hq, M + N - 1] float32; `shared` are arguments of any tile."""
    text = kernels.captures.diagonal
    assert text is not None
    batch, heads, length, keys = extents
    windows: list[Tensor] = []

    def diagonals(tile: Tile) -> int:
        return diagonal_count(length, keys, tile.block_m, tile.block_n)

    def arguments(tile: Tile) -> Arguments:
        shape = (batch, heads, diagonals(tile), 2 * tile.block_m)
        windows[:] = [torch.empty(shape, dtype=torch.float32, device=device) for _ in text.terms]
        names = [f"{term.into.upper()}_BY_DIAGONAL" for term in text.terms]
        return {**shared, **dict(zip(names, windows, strict=True)), **_diagonal_lists(mask, tile)}

    tile = launch(kernels, "diagonal", device, lambda tile: grid(batch, heads, diagonals(tile), 1), arguments)
    return [_joined(window, tile, length, keys) for window in windows]


def _joined(windows: Tensor, tile: Tile, length: int, keys: int) -> Tensor:
    """The sums of neighboring diagonals of tiles, which overlap, added up: [B, Hq, M + N - 1]."""
    batch, heads, count, width = windows.shape
    hop = tile.block_n
    parts = windows.view(batch, heads, count, width // hop, hop)
    joined = windows.new_zeros((batch, heads, count + width // hop - 1, hop))
    for number in range(width // hop):
        joined[:, :, number : number + count] += parts[:, :, :, number]
    first = tile.block_m + (tile_count(keys, hop) - 1) * hop  # minus the least distance of the first window
    return joined.flatten(2)[:, :, first + 1 - keys : first + length]


def _diagonal_lists(mask: MaskSnapshot | None, tile: Tile) -> Arguments:
    """For each diagonal of tiles, those that the mask lists: see `_listed`. Remembered with the mask.

    Each stream has its own: another one could read them before they are written. What a CUDA graph makes is
    the graph's.
    """
    if mask is None:
        return {}
    parts, stream = mask.held.by_row(), 0
    if mask.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _listed(mask, tile)
        stream = torch.cuda.current_stream(mask.device).cuda_stream
    versions = [version_of(part) for part in parts]
    if UNCOUNTED in versions:  # a write would not be seen
        return _listed(mask, tile)
    key = (tile.block_m, tile.block_n, stream, *versions)
    known: Arguments | None = mask.derived.get(key)
    if known is None:
        known = _listed(mask, tile)
        remember(mask.derived, key, known, DERIVED)
    return known


def _listed(mask: MaskSnapshot, tile: Tile) -> Arguments:
    """Tiles of queries by diagonal, ascending: counts [.., diagonals], indices [.., diagonals, tiles] int32.

    A diagonal holds the tiles (m, m * BLOCK_M / BLOCK_N + a constant), of falling constants as in
    `schedule.diagonal_order`. Nothing here waits for the device.
    """
    block_m, block_n = tile.block_m, tile.block_n
    (length, keys), (q_block, kv_block) = mask.seq_lengths, mask.BLOCK_SIZE
    rows, columns = tile_count(length, block_m), tile_count(keys, block_n)
    blocks = mask.table()
    device = blocks.device
    row = torch.arange(rows, device=device)
    diagonal = torch.arange(diagonal_count(length, keys, block_m, block_n), device=device)[:, None]
    column = columns - 1 - diagonal + row * (block_m // block_n)
    outside = (column < 0) | (column >= columns)
    block_row, block_column = row * block_m // q_block, column.clamp(0, columns - 1) * block_n // kv_block
    table = blocks[:, :, block_row, block_column].masked_fill_(outside, EMPTY)
    counts, indices = ordered(table == PARTIAL)
    full_counts, full_indices = (
        ordered(table == FULL) if mask.held.separate else (None, None)
    )
    return {
        "DIAGONAL_COUNTS": counts,
        "DIAGONAL_TILES": indices,
        "FULL_DIAGONAL_COUNTS": full_counts,
        "FULL_DIAGONAL_TILES": full_indices,
        "tile_slots": rows,
        **mask_strides(counts.shape),
    }


def sums_of_elements(
    kernels: Kernels, device: torch.device, extents: Extents, shared: Arguments, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The sums of all elements of captured tensors and a 0, flat float32, for each that has such a term.

    `tensors` are all that the score_mod captures.

    By atomics in float32. Where torch or `kernel_options` ask for a deterministic result, in two passes: the
    largest term is found, and what it leaves room for is added up in fixed point, which has no rounding.
    """
    text = kernels.captures.element
    assert text is not None
    batch, heads, length, keys = extents
    sizes = {term.into: tensors[term.capture].numel() + 1 for term in text.terms}
    summands = batch * heads * length * keys * len(text.terms)
    room = FIXED_BITS - summands.bit_length()

    def buffers(suffix: str, dtype: torch.dtype, size: int | None = None) -> dict[str, Tensor]:
        return {
            name.upper() + suffix: torch.zeros(size or sizes[name], dtype=dtype, device=device)
            for name in sizes
        }

    def run(made: dict[str, Tensor]) -> dict[str, Tensor]:
        """One pass, which adds to what was made for it."""
        absent = {
            name.upper() + suffix: None for name in sizes for suffix in ("_BY_ELEMENT", "_FIXED", "_LARGEST")
        }
        arguments = {**shared, **absent, **made, "room": room}
        launch(kernels, "scatter", device, lambda tile: grid(batch, heads, length, tile.block_m), arguments)
        return made

    if not (
        torch.are_deterministic_algorithms_enabled()
        or option(kernels.options, "scatter", "deterministic", False)
    ):
        return list(run(buffers("_BY_ELEMENT", torch.float32)).values())
    largest = run(buffers("_LARGEST", torch.int32, 1))
    found = run({**buffers("_BY_ELEMENT", torch.float32), **buffers("_FIXED", torch.int64), **largest})
    return [
        found[f"{name}_BY_ELEMENT"] + _from_fixed(found[f"{name}_FIXED"], found[f"{name}_LARGEST"], room)
        for name in map(str.upper, sizes)
    ]


def _from_fixed(fixed: Tensor, largest: Tensor, room: int) -> Tensor:
    """Fixed-point sums as float32; the unit is that of `add_elements` in templates/elements.jinja."""
    shift = (room + 126 - (largest >> 23)).clamp(max=126)
    unit = (1023 - shift.long() << 52).view(torch.float64)
    return (fixed.double() * unit).float()
