"""The tile sizes that are tried for a portable kernel, best first: `ladder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flexmod.codegen.spec import SMALLEST_TILE, KernelName, KernelSpec, Tile, option, template
from flexmod.errors import BlockSizeError, OptionValueError
from flexmod.ir.ops import HALF

# Rows are (BLOCK_M, BLOCK_N, warps, stages) by the padded head dimension, the wider of q's and v's. A list
# begins with the fastest tile and continues with tiles for less shared memory: 99 KB on small cards, 64 KB on
# AMD's. One stage costs registers if operands pass through them, so two stages of a smaller tile come first.
_Table = dict[KernelName, dict[int, tuple[tuple[int, int, int, int], ...]]]
_HALF: _Table = {
    "forward": {
        64: ((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1)),
        128: ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 1)),
        256: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)),
        512: ((64, 16, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1), (32, 16, 4, 1)),
    },
    "dq": {
        64: ((64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 4, 1)),
        128: (
            (128, 64, 8, 3),
            (128, 64, 8, 2),
            (64, 64, 4, 2),
            (64, 32, 4, 2),
            (64, 32, 4, 1),
            (32, 32, 4, 1),
        ),
        256: ((128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1)),
        512: ((32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 1), (16, 16, 4, 1)),
    },
    "dkdv": {
        64: ((128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 1)),
        128: ((64, 128, 8, 3), (32, 64, 4, 3), (32, 64, 4, 2), (32, 32, 4, 1)),
        256: ((32, 64, 8, 2), (16, 64, 8, 2), (32, 32, 4, 2), (16, 32, 4, 1)),
        512: ((16, 32, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1)),
    },
    "diagonal": {
        64: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)),
        128: ((128, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
        256: ((64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 4, 2)),
        512: ((32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 4, 1)),
    },
}
_TF32: _Table = {
    "forward": {
        64: ((128, 32, 8, 3), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((64, 32, 8, 3), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        256: ((32, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        512: ((16, 32, 8, 1), (16, 16, 4, 1)),
    },
    "dq": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((32, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        256: ((32, 32, 8, 1), (16, 16, 4, 1)),
        512: ((16, 16, 8, 1), (16, 16, 4, 1)),
    },
    "dkdv": {
        64: ((32, 64, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((32, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        256: ((32, 32, 8, 1), (16, 16, 4, 1)),
        512: ((16, 16, 8, 1), (16, 16, 4, 1)),
    },
    "diagonal": {
        64: ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
        128: ((64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 4, 2)),
        256: ((32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 4, 1)),
        512: ((16, 16, 8, 2), (16, 16, 8, 1), (16, 16, 4, 1)),
    },
}


class ShortRow(NamedTuple):
    """A kernel's first tile for up to `positions` queries and keys, in heads of up to `widest` columns.

    `of`: what must hold. "mask", "no mask"; "tile": a capture has tiles that kernels may copy; "busy": a
    score_mod takes more than a few instructions for each element.
    """

    kernel: KernelName
    positions: int
    widest: int
    of: tuple[str, ...]
    tile: tuple[int, int, int, int]


# Several small tiles share a processor. The first row that fits is taken. Without a mask, the dK/dV kernel of
# a tile that has all keys makes dQ too, and takes less time than two kernels even if it spills up to
# SHORT_SPILLS registers. Measured on an H200.
SHORT = (
    ShortRow("forward", 16, 128, (), (16, 16, 1, 2)),
    ShortRow("forward", 32, 64, (), (32, 32, 1, 2)),
    ShortRow("forward", 32, 128, (), (32, 32, 2, 2)),
    ShortRow("forward", 64, 32, (), (64, 32, 4, 3)),
    ShortRow("forward", 64, 64, ("tile",), (64, 32, 4, 3)),
    ShortRow("forward", 64, 64, ("busy",), (64, 64, 4, 3)),
    ShortRow("forward", 64, 64, (), (64, 32, 4, 3)),
    ShortRow("forward", 256, 64, ("no mask", "tile"), (64, 32, 4, 3)),
    ShortRow("forward", 256, 64, ("no mask",), (64, 64, 4, 3)),
    ShortRow("dq", 16, 128, (), (16, 16, 1, 2)),
    ShortRow("dq", 32, 128, (), (32, 32, 2, 2)),
    ShortRow("dq", 64, 128, (), (64, 32, 4, 3)),
    ShortRow("dq", 128, 64, (), (64, 32, 4, 3)),
    ShortRow("dkdv", 16, 64, (), (16, 16, 1, 2)),
    ShortRow("dkdv", 16, 128, (), (16, 16, 2, 1)),
    ShortRow("dkdv", 32, 32, (), (16, 32, 1, 2)),
    ShortRow("dkdv", 32, 64, (), (32, 32, 2, 2)),
    ShortRow("dkdv", 32, 128, (), (32, 32, 4, 2)),
    ShortRow("dkdv", 64, 32, ("no mask",), (32, 64, 2, 2)),
    ShortRow("dkdv", 64, 64, ("mask",), (32, 64, 4, 1)),
    ShortRow("dkdv", 64, 128, (), (32, 64, 4, 3)),
    ShortRow("dkdv", 128, 64, ("mask",), (32, 64, 4, 1)),
    ShortRow("dkdv", 128, 32, ("busy",), (64, 128, 4, 2)),
    ShortRow("dkdv", 128, 32, (), (64, 128, 4, 3)),
    ShortRow("dkdv", 128, 64, (), (32, 128, 4, 2)),
)
SHORT_SPILLS = 320
# Up to so many positions with a mask, in heads of up to 64 columns, a row of blocks ends soon. Portable
# kernels have the usual tiles there, but another family's forward may have a shape for it.
ENDS_SOON = 1024
# First for heads of up to 32 columns in half types.
_NARROW: dict[KernelName, Tile] = {"forward": Tile(64, 64, 4, 3), "dq": Tile(64, 32, 4, 3)}
# First for few queries: BLOCK_N, warps and stages by the padded head dimension of keys in a half type.
# Programs share the keys of a tile, or one has all of them.
_DECODING = {64: (128, 4, 3), 128: (64, 4, 3), 256: (64, 4, 2), 512: (32, 4, 2)}
_DECODING_WHOLE = {**_DECODING, 128: (128, 4, 2)}
# float32 products without tensor cores: a thread keeps whole rows of its operands, and spills in all of these
# tiles. So they are in the order of their times on an H200, and any may spill as much as it does. The keys of
# a tile, or queries for dK and dV, are added up one by one: sums of 64 would be faster, but less accurate. On
# AMD's chips a thread has twice the registers with four warps as with eight.
_IEEE: _Table = {
    "forward": {
        64: ((64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
        128: ((64, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
        256: ((16, 16, 4, 2), (16, 16, 4, 1)),
        512: ((16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "dq": {
        64: ((64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
        128: ((64, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
        256: ((16, 16, 4, 2), (16, 16, 4, 1)),
        512: ((16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "dkdv": {
        64: ((32, 32, 2, 2), (16, 16, 4, 1)),
        128: ((32, 16, 2, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
        256: ((16, 16, 4, 2), (16, 16, 4, 1)),
        512: ((16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "diagonal": {
        64: ((32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 4, 1)),
        128: ((16, 16, 8, 2), (16, 16, 8, 1)),
        256: ((16, 16, 8, 1),),
        512: ((16, 16, 8, 1),),
    },
}
# Six products in bfloat16 for one in float32, for heads of up to 256 columns, see `KernelSpec.on`. Threads
# have all parts of their operands in registers. So these spill too, and are in the order of their times.
_BF16X6: _Table = {
    "forward": {
        64: ((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((128, 64, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        256: ((128, 16, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    "dq": {
        64: ((64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((128, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        256: ((64, 16, 4, 1), (16, 16, 4, 1)),
    },
    "dkdv": {
        64: ((32, 128, 8, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((32, 32, 4, 1), (16, 64, 4, 1), (16, 16, 4, 1)),
        256: ((16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "diagonal": _TF32["diagonal"],
}
_SINGLE = {"ieee": _IEEE, "tf32": _TF32, "bf16x6": _BF16X6}
_SPILLS = 100_000
# kernel_options for a side of a tile. torch's numbers are 1 for the dK/dV kernel and 2 for the dQ kernel.
# The number 3 is ours, for the kernels that compute only gradients of captured tensors.
_SIDES: dict[KernelName, tuple[str, str]] = {
    "forward": ("BLOCK_M", "BLOCK_N"),
    "dq": ("BLOCK_M2", "BLOCK_N2"),
    "dkdv": ("BLOCK_M1", "BLOCK_N1"),
    "diagonal": ("BLOCK_M3", "BLOCK_N3"),
}


def ladder(
    spec: KernelSpec,
    kernel: KernelName,
    options: Mapping[str, Any],
    by_column: bool = False,
    waits_for_score: bool = False,
    busy: bool = False,
) -> tuple[Tile, ...]:
    """The tiles to try for a kernel, best first; later ones need less shared memory.

    `by_column`: a mod keeps numbers by column, many for each thread of a large tile. Then the forward tries
    small tiles first. If a score_mod is `busy`, it takes more than a few instructions for each element. If it
    `waits_for_score`, a load stands between two products. Triton's pipeliner fails on such a loop for some
    chips, so only one tile is in flight. `options` are validated kernel_options: a tile side, num_warps or
    num_stages among them applies to every rung.

    Raises:
        BlockSizeError: a side of the mask's blocks is not a multiple of 16.
        OptionValueError: a tile side does not divide the mask's blocks, or the keys of a tile along diagonals
            do not divide its queries.
    """
    table = _SINGLE[spec.precision] if spec.q_dtype is torch.float32 else _HALF
    widest = max(spec.head_tile, spec.value_tile)
    passing = _SPILLS if spec.exact else 0
    tried = [Tile(*row, passing) for row in table[_like(kernel)][min(max(widest, 64), 512)]]
    if spec.decoding is not None:
        sides = _DECODING if spec.split or spec.exact else _DECODING_WHOLE
        dtype = spec.q_dtype if spec.exact else spec.k_dtype
        column = max(widest, 64) * dtype.itemsize // 2  # of a half type
        few, (block_n, warps, stages) = spec.decoding.rows, sides[min(max(column, 64), 512)]
        # twice the warps have twice the registers, if four spill
        tried = [Tile(few, block_n, warps, stages, passing), Tile(few, block_n, 8, 2, passing), *tried]
    elif table is _HALF and (small := _small(spec, _like(kernel), widest, busy)):
        tried.insert(0, small)
    if waits_for_score:
        tried = [replace(tile, stages=1) for tile in tried]
    tiles = [_chosen(_inside(tile, spec, kernel), spec, kernel, options) for tile in tried]
    if by_column and kernel == "forward" and widest <= 128:
        tiles.sort(key=lambda tile: tile.block_m * tile.block_n > 64 * 64)
    return tuple(dict.fromkeys(tiles))


def short_length(spec: KernelSpec, longest: int, options: Mapping[str, Any]) -> int:
    """Returns up to how many positions a call counts as short; 0 if it does not.

    The direction is the spec's. `longest`: the larger of the numbers of queries and keys. A call in another
    dtype than a half type, or with kernel option TEMPLATE or tuned, is not short.
    """
    direction, masked = spec.direction, spec.mask_block is not None
    asked = template(options, direction) != "auto" or option(options, direction, "tuned", False)
    if asked or spec.q_dtype not in HALF:
        return 0
    widest = max(spec.head_dim, spec.value_dim)
    kernel, other = "dkdv" if spec.backward else "forward", "no mask" if masked else "mask"
    rows = [row for row in SHORT if row.kernel == kernel and other not in row.of]
    ends_soon = masked and kernel == "forward" and widest <= 64 and longest <= ENDS_SOON
    positions = (row.positions for row in rows if longest <= row.positions and widest <= row.widest)
    return min(positions, default=ENDS_SOON if ends_soon else 0)


def _small(spec: KernelSpec, kernel: KernelName, widest: int, busy: bool) -> Tile | None:
    """The tile that goes first: that of a short call, or of narrow heads."""
    if spec.short in (0, ENDS_SOON):
        return _NARROW.get(kernel) if widest <= 32 else None
    facts = {"mask" if spec.mask_block else "no mask", busy and "busy", spec.pair_tile is not None and "tile"}
    rows = [row for row in SHORT if row.kernel == kernel and facts.issuperset(row.of)]
    fitting = (Tile(*r.tile, SHORT_SPILLS) for r in rows if spec.short <= r.positions and widest <= r.widest)
    return next(fitting, None)


def _like(kernel: KernelName) -> KernelName:
    """The kernel whose tiles a kernel uses: delta_kernel must sum in the same order as dq_kernel."""
    return {"delta": "dq", "scatter": "diagonal"}.get(kernel, kernel)  # type: ignore[return-value]


def _inside(tile: Tile, spec: KernelSpec, kernel: KernelName) -> Tile:
    """Shrinks the tile until it divides the mask's blocks."""
    if spec.mask_block is None:
        return tile
    q_block, kv_block = spec.mask_block
    block_m, block_n = min(tile.block_m, q_block & -q_block), min(tile.block_n, kv_block & -kv_block)
    if min(block_m, block_n) < SMALLEST_TILE:
        raise BlockSizeError(
            block_size=spec.mask_block,
            problem=f"is no multiple of {SMALLEST_TILE} on both sides",
            advice=f"multiples of {SMALLEST_TILE}, e.g. 128",
        )
    if kernel == "diagonal":
        block_n = min(block_m, block_n)
    shrunk = block_m * block_n * 2 <= tile.block_m * tile.block_n
    return replace(tile, block_m=block_m, block_n=block_n, warps=min(tile.warps, 4) if shrunk else tile.warps)


def _chosen(tile: Tile, spec: KernelSpec, kernel: KernelName, options: Mapping[str, Any]) -> Tile:
    """The tile with the values from the options."""
    m_name, n_name = _SIDES[_like(kernel)]
    block_m = option(options, kernel, m_name, tile.block_m)
    block_n = option(options, kernel, n_name, tile.block_n)
    q_block, kv_block = spec.mask_block or (0, 0)
    for name, side, block in ((m_name, block_m, q_block), (n_name, block_n, kv_block)):
        if block % side:
            raise OptionValueError(name=name, value=side, accepted=f"a divisor of the mask's block, {block}")
    if kernel == "diagonal" and block_m % block_n:
        raise OptionValueError(name=n_name, value=block_n, accepted=f"a divisor of {m_name}, {block_m}")
    warps = option(options, kernel, "num_warps", tile.warps)
    stages = option(options, kernel, "num_stages", tile.stages)
    return replace(tile, block_m=block_m, block_n=block_n, warps=warps, stages=stages)
