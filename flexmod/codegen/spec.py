"""What shapes a kernel (KernelSpec), and the tile sizes to try for it (ladder), best first.

Everything else (lengths, head counts, strides, the scale's size, captured sizes) is a run-time argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flexmod.errors import BlockSizeError, OptionValueError
from flexmod.ir.exponents import is_small

Direction = Literal["forward", "backward"]
KernelName = Literal["forward", "delta", "dq", "dkdv", "diagonal", "scatter"]

# tl.dot wants 16 of everything, and a block of the mask is a whole number of tiles.
SMALLEST_TILE = 16


@dataclass(frozen=True)
class KernelSpec:
    """The facts that a module of kernels is rendered from, besides its mods.

    `mask_block` is (queries, keys) of a block of the mask, or None where every tile runs; `mask_form`: the
    mask has runs of blocks (`block_mask/runs.py`) or lists of single ones; `full_tiles_padded`: full ones may
    reach over an end. `precision` is tl.dot's input_precision for float32. `positive_scale` allows the
    running maximum of raw scores. `shared_kv`: several query heads, or the whole batch, read one head of keys
    (only the backward asks).
    """

    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    head_dim: int
    value_dim: int
    mask_block: tuple[int, int] | None = None
    mask_form: Literal["runs", "lists"] = "runs"
    full_tiles_padded: bool = False
    precision: Literal["ieee", "tf32"] = "ieee"
    positive_scale: bool = True
    shared_kv: bool = False
    backward: bool = False

    @property
    def exact(self) -> bool:
        """float32 inputs and products: sums are compensated, and the backward gets more than the lse."""
        return self.q_dtype is torch.float32 and self.precision == "ieee"

    @property
    def head_tile(self) -> int:
        return padded(self.head_dim)

    @property
    def value_tile(self) -> int:
        """Products on a matrix unit find values in rows as long as keys', up to 128 bytes, the longest that
        shared memory is laid out by: ptxas may lose addresses of unlike layouts, see `compiler_bugs`."""
        tile = padded(self.value_dim)
        return tile if self.exact else max(tile, min(self.head_tile, 128 // self.v_dtype.itemsize))

    @property
    def head_used(self) -> int:
        """The columns of a head tile that products need not skip: 192 of 256 where they hold the head."""
        return 192 if 128 < self.head_dim <= 192 else self.head_tile

    @property
    def value_used(self) -> int:
        return 192 if 128 < self.value_dim <= 192 else self.value_tile


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries x BLOCK_N keys at a time, by `warps` warps, with `stages` tiles in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} ({self.warps} warps, {self.stages} stages)"


# log2 of the smallest weight of a row's first tile under a fixed maximum, and of the largest of any tile.
# bfloat16 keeps room on both sides for values, and for sums of many.
SMALLEST_WEIGHT, LARGEST_WEIGHT = -100.0, 50.0


# The largest score, in base 2, whose product with a factor may be rounded: by 8, so that a weight is at most
# 2^8. Beyond, two scores that differ are 16 apart at least.
LARGEST_EXACT = 2.0**28
# The lse, in base 2, from which on one float32 is too few for a backward in half types. Below it, rounding
# the lse moves a row's weights by less than 2^-11, as far as float16 moves one.
LARGE = 2.0**14


def min_fixed_max(spec: KernelSpec, bounds: tuple[float, float]) -> float | None:
    """The least that a row's row_max may be, in base 2, if that of its first tile is to serve the whole row.

    Scores lie between `bounds`. None where weights would leave the range of the operands' dtype: float16 has
    too little of it, always; and where scores are large, so that a row_max has few digits.
    """
    if not is_small(bounds):
        return None
    low, high = (end * math.log2(math.e) for end in bounds)
    # not `>`: where both ends are the same infinity, the difference is no number
    if spec.q_dtype is not torch.bfloat16 or not high - low <= LARGEST_WEIGHT - SMALLEST_WEIGHT:
        return None
    return high - LARGEST_WEIGHT


def padded(dim: int) -> int:
    """The power of two, 16 at least, that holds a head dimension."""
    return max(SMALLEST_TILE, 1 << (dim - 1).bit_length())


# Rows are (BLOCK_M, BLOCK_N, warps, stages) by the padded head dimension, the wider of q's and v's. A list
# begins with the fastest and goes on to what fits less: the 99 KB of small cards, the 64 KB of AMD's. One
# stage costs registers where operands pass through them: two stages of a smaller tile come before it.
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
# float32 products without tensor cores: a thread holds whole rows of its operands, and spills soon. On AMD's
# chips a thread of four warps has twice the registers of one of eight.
_IEEE: _Table = {
    "forward": {
        64: ((64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 1)),
        128: ((32, 16, 8, 2), (16, 16, 4, 1)),
        256: ((32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 4, 1)),
        512: ((16, 32, 8, 1), (16, 16, 4, 1)),
    },
    "dq": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
        128: ((32, 16, 8, 2), (16, 16, 4, 1)),
        256: ((16, 16, 8, 1), (16, 16, 4, 1)),
        512: ((16, 16, 8, 1), (16, 16, 4, 1)),
    },
    "dkdv": {
        64: ((32, 32, 8, 2), (16, 16, 4, 1)),
        128: ((16, 32, 8, 2), (16, 16, 4, 1)),
        256: ((16, 16, 8, 1), (16, 16, 4, 1)),
        512: ((16, 16, 8, 1), (16, 16, 4, 1)),
    },
    "diagonal": {
        64: ((32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 4, 1)),
        128: ((16, 16, 8, 2), (16, 16, 8, 1)),
        256: ((16, 16, 8, 1),),
        512: ((16, 16, 8, 1),),
    },
}
# kernel_options that name a side of a tile, with torch's numbers: 1 is the dK/dV kernel, 2 the dQ kernel. 3,
# which torch has not, is for the kernels that exist for gradients of captured tensors alone.
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
) -> tuple[Tile, ...]:
    """The tiles to try for a kernel, best first; later ones need less shared memory.

    `by_column`: a mod holds numbers by column, and a thread has many of them in a large tile. Small ones go
    first in the forward then. `waits_for_score`: a load between two products, which Triton's pipeliner fails
    on for some chips, so that one tile is in flight.
    `options` are checked kernel_options: a tile side, num_warps or num_stages among them is on every rung.

    Raises:
        BlockSizeError: a block of the mask is no multiple of 16 on a side.
        OptionValueError: a tile side that the mask's blocks are no multiple of, or keys of a tile along
            diagonals that do not divide its queries.
    """
    single = _IEEE if spec.precision == "ieee" else _TF32
    table = single if spec.q_dtype is torch.float32 else _HALF
    widest = max(spec.head_tile, spec.value_tile)
    rows = table[_like(kernel)][min(max(widest, 64), 512)]
    if waits_for_score:
        rows = tuple((*row[:3], 1) for row in rows)
    tiles = [_chosen(_inside(Tile(*row), spec, kernel), spec, kernel, options) for row in rows]
    if by_column and kernel == "forward" and widest <= 128:
        tiles.sort(key=lambda tile: tile.block_m * tile.block_n > 64 * 64)
    return tuple(dict.fromkeys(tiles))


def _like(kernel: KernelName) -> KernelName:
    """Whose tiles a kernel takes. The sums of delta_kernel must come out as those of dq_kernel do."""
    return {"delta": "dq", "scatter": "diagonal"}.get(kernel, kernel)  # type: ignore[return-value]


def option(options: Mapping[str, Any], kernel: KernelName, name: str, default: Any) -> Any:
    """A kernel option as one kernel sees it: the prefix `fwd_` or `bwd_` counts more than the bare name."""
    prefix = "fwd_" if kernel == "forward" else "bwd_"
    return options.get(prefix + name, options.get(name, default))


def template(options: Mapping[str, Any], direction: Direction) -> str:
    """The kernel option TEMPLATE of a direction: "auto", or the name of a family."""
    return option(options, "forward" if direction == "forward" else "dq", "TEMPLATE", None) or "auto"


def statistics_rows(spec: KernelSpec) -> int:
    """Rows a program of the statistics kernel takes: about 8192 elements."""
    return max(SMALLEST_TILE, min(128, 8192 // spec.value_tile))


def _inside(tile: Tile, spec: KernelSpec, kernel: KernelName) -> Tile:
    """The tile, made small enough to divide the mask's blocks."""
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
    return Tile(block_m, block_n, min(tile.warps, 4) if shrunk else tile.warps, tile.stages)


def _chosen(tile: Tile, spec: KernelSpec, kernel: KernelName, options: Mapping[str, Any]) -> Tile:
    """The tile with what the options say in its place."""
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
    return Tile(block_m, block_n, warps, option(options, kernel, "num_stages", tile.stages))
