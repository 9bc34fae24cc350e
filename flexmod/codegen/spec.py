"""The facts that determine a kernel's text (KernelSpec), and its tile sizes to try (ladder), best first.

Everything else (lengths, head counts, strides, the scale's size, captured sizes) is a run-time argument.

`choose` chooses a kernel's tile from a ladder: the same search for every family, in launches and ahead of
time.

Each rung is compiled and judged, and none runs. The search takes the first rung that passes, or else the best
acceptable one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from flexmod.errors import BlockSizeError, OptionValueError
from flexmod.errors.base import counted
from flexmod.ir.exponents import is_small

Direction = Literal["forward", "backward"]
KernelName = Literal["forward", "delta", "dq", "dkdv", "diagonal", "scatter"]

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# the positions that share a scale of float8 by block
SCALE_BLOCK = 128

# tl.dot needs at least 16 on each side, and a block of the mask is a whole number of tiles.
SMALLEST_TILE = 16


class Decoding(NamedTuple):
    """How kernels compute few queries on many keys.

    One tile has all queries of `group` heads that share keys: row g * M + m is query m of head g. There are
    at most `rows`. `split`: PARTS programs share the keys of a tile. Each leaves its part of the output in
    float32, and `combine_kernel` merges them.
    """

    rows: int
    group: int
    split: bool


@dataclass(frozen=True)
class KernelSpec:
    """The facts, besides its mods, from which a module of kernels is rendered. Some of them:

        mask_block          (queries, keys) of a block of the mask; None if every tile runs
        mask_form           the mask has ranges of blocks (`block_mask/tiles.py`) or lists of single blocks
        full_tiles_padded   full blocks may reach past an end
        precision           tl.dot's input_precision for float32
        positive_scale      permits the running maximum of raw scores
        shared_kv           several query heads, or the whole batch, read one head of keys
        out_dtype           the output's dtype; None for the queries'
        value_scale         a scale, for the whole tensor or by head, multiplies the values
        pair_tile           the number of a score_mod's capture whose tiles kernels may copy, see
                            `variant.pair_tile`
        short               a call has at most so many queries and keys, see `triton.short_length`; 0 if
                            there may be more
        decoding            a call has few queries, see `backends/decoding.py`; None if there may be more

    Only the backward sets `shared_kv`. Only queries in float8 have an `out_dtype`.
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
    out_dtype: torch.dtype | None = None
    value_scale: bool = False
    pair_tile: int | None = None
    short: int = 0
    decoding: Decoding | None = None

    @property
    def split(self) -> bool:
        """Do several programs share the keys of a tile of queries?"""
        return self.decoding is not None and self.decoding.split

    @property
    def exact(self) -> bool:
        """Are inputs and products float32? Then sums are compensated, and the lse alone is not enough."""
        return self.q_dtype is torch.float32 and self.precision == "ieee"

    @property
    def direction(self) -> Direction:
        """The direction whose kernels the spec is for."""
        return "backward" if self.backward else "forward"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that have kernels: float8 has no backward."""
        float8 = any(dtype in FLOAT8 for dtype in (self.q_dtype, self.k_dtype, self.v_dtype))
        return ("forward",) if float8 else ("forward", "backward")

    def of_dtype(self, dtype: torch.dtype) -> KernelSpec:
        """The spec with one dtype for queries, keys and values; float8 gives bfloat16."""
        out_dtype, backward = (torch.bfloat16, False) if dtype in FLOAT8 else (None, self.backward)
        return replace(
            self, q_dtype=dtype, k_dtype=dtype, v_dtype=dtype, out_dtype=out_dtype, backward=backward
        )

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weights in their product with the values. float16 holds float8 exactly."""
        if self.v_dtype in FLOAT8:
            return torch.float16
        return self.v_dtype if self.q_dtype in FLOAT8 else self.q_dtype

    @property
    def head_tile(self) -> int:
        """The padded width of queries and keys. Products of float8 have 32 columns at least."""
        return max(padded(self.head_dim), 32 // self.q_dtype.itemsize)

    @property
    def value_tile(self) -> int:
        """The padded width of values, at least the keys' up to 128 bytes on matrix units.

        Then keys and values have the same shared memory layout, whose rows have up to 128 bytes: ptxas may
        lose addresses of different layouts, see `compiler_bugs`.
        """
        tile = padded(self.value_dim)
        return tile if self.exact else max(tile, min(self.head_tile, 128 // self.v_dtype.itemsize))

    @property
    def head_used(self) -> int:
        """The columns of a head tile that products use: 192 of 256 if they contain the head."""
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

    def arguments(self) -> Mapping[str, int]:
        sides = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return {**sides, "num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        programs = f"{counted(self.warps, 'warp')}, {counted(self.stages, 'stage')}"
        return f"{self.block_m}x{self.block_n} ({programs})"


# Under a fixed maximum: log2 of the smallest weight in a row's first tile, and of the largest in any tile.
# (bfloat16 keeps room on both sides for values, and for sums of many weights.)
SMALLEST_WEIGHT, LARGEST_WEIGHT = -100.0, 50.0


# The largest score, in base 2, whose product with a factor may be rounded: the error is up to 8, so a weight
# is at most 2^8. Beyond, two different scores differ by 16 at least.
LARGEST_EXACT = 2.0**28
# From this lse on, in base 2, a backward in half types needs more than one float32. Below it, rounding
# the lse moves a row's weights by less than 2^-11, as far as float16 moves one.
LARGE = 2.0**14


def min_fixed_max(spec: KernelSpec, bounds: tuple[float, float]) -> float | None:
    """The smallest row_max, in base 2, for which the first tile's row_max can serve the whole row.

    Scores lie between `bounds`. None if weights would leave the range of the operands' dtype (float16's range
    is always too small), or if scores are large, so that a row_max has few digits.
    """
    if not is_small(bounds):
        return None
    low, high = (end * math.log2(math.e) for end in bounds)
    # not `>`: if both ends are the same infinity, the difference is nan
    if spec.weight_dtype is not torch.bfloat16 or not high - low <= LARGEST_WEIGHT - SMALLEST_WEIGHT:
        return None
    return high - LARGEST_WEIGHT


def padded(dim: int) -> int:
    """A head dimension rounded up to a power of two, 16 at least."""
    return max(SMALLEST_TILE, 1 << (dim - 1).bit_length())


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
# First for short calls in half types, and for the forward of heads of up to 32.
_SMALL: dict[KernelName, tuple[int, int, int, int]] = {
    "forward": (64, 64, 4, 3), "dq": (64, 32, 4, 2), "dkdv": (32, 64, 4, 2)
}  # fmt: skip
# First for few queries: BLOCK_N, warps and stages by the padded head dimension of keys in a half type.
# Programs share the keys of a tile, or one has all of them.
_DECODING = {64: (128, 4, 3), 128: (64, 4, 3), 256: (64, 4, 2), 512: (32, 4, 2)}
_DECODING_WHOLE = {**_DECODING, 128: (128, 4, 2)}
# float32 products without tensor cores: a thread keeps whole rows of its operands, and spills soon. On AMD's
# chips a thread has twice the registers with four warps as with eight.
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
) -> tuple[Tile, ...]:
    """The tiles to try for a kernel, best first; later ones need less shared memory.

    `by_column`: a mod keeps numbers by column, many for each thread of a large tile. Then the forward tries
    small tiles first. `waits_for_score`: a load stands between two products. Triton's pipeliner fails on such
    a loop for some chips, so only one tile is in flight. `options` are validated kernel_options: a tile side,
    num_warps or num_stages among them applies to every rung.

    Raises:
        BlockSizeError: a side of the mask's blocks is not a multiple of 16.
        OptionValueError: a tile side does not divide the mask's blocks, or the keys of a tile along diagonals
            do not divide its queries.
    """
    single = _IEEE if spec.precision == "ieee" else _TF32
    table = single if spec.q_dtype is torch.float32 else _HALF
    widest = max(spec.head_tile, spec.value_tile)
    rows = table[_like(kernel)][min(max(widest, 64), 512)]
    small = _SMALL.get(_like(kernel))
    if spec.decoding is not None:
        sides = _DECODING if spec.split else _DECODING_WHOLE
        column = widest * spec.k_dtype.itemsize // 2  # of a half type
        few, (block_n, warps, stages) = spec.decoding.rows, sides[min(max(column, 64), 512)]
        # twice the warps have twice the registers, if four spill
        rows = ((few, block_n, warps, stages), (few, block_n, 8, 2), *rows)
    elif small and (spec.short or table is _HALF and kernel == "forward" and widest <= 32):
        rows = (small, *rows)
    if waits_for_score:
        rows = tuple((*row[:3], 1) for row in rows)
    tiles = [_chosen(_inside(Tile(*row), spec, kernel), spec, kernel, options) for row in rows]
    if by_column and kernel == "forward" and widest <= 128:
        tiles.sort(key=lambda tile: tile.block_m * tile.block_n > 64 * 64)
    return tuple(dict.fromkeys(tiles))


def _like(kernel: KernelName) -> KernelName:
    """The kernel whose tiles a kernel uses: delta_kernel must sum in the same order as dq_kernel."""
    return {"delta": "dq", "scatter": "diagonal"}.get(kernel, kernel)  # type: ignore[return-value]


def option(options: Mapping[str, Any], of: KernelName | Direction, name: str, default: Any) -> Any:
    """A kernel option for a kernel or a direction: a name with `fwd_` or `bwd_` overrides the bare name."""
    prefix = "fwd_" if of == "forward" else "bwd_"
    return options.get(prefix + name, options.get(name, default))


def template(options: Mapping[str, Any], direction: Direction) -> str:
    """The kernel option TEMPLATE of a direction: "auto", or the name of a family."""
    return option(options, direction, "TEMPLATE", None) or "auto"


def statistics_rows(spec: KernelSpec) -> int:
    """Rows for a program of the statistics kernel: about 8192 elements."""
    return max(SMALLEST_TILE, min(128, 8192 // spec.value_tile))


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
    return Tile(block_m, block_n, min(tile.warps, 4) if shrunk else tile.warps, tile.stages)


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
    return Tile(block_m, block_n, warps, option(options, kernel, "num_stages", tile.stages))


Rung = TypeVar("Rung", bound=Hashable)


class Verdict(NamedTuple):
    """The result of compiling a rung."""

    spills: int = 0
    """Registers that a thread spills to memory."""
    losses: tuple[str, ...] = ()
    """Reasons why it is slow, in words, see `compiler_bugs`. Its results are correct."""
    refusal: object = None
    """Why it cannot run: an error, or a class of errors; None if it can."""

    def __str__(self) -> str:
        return ", ".join([f"a thread spills {counted(self.spills, 'register')}", *self.losses])


class Limits(NamedTuple):
    """The limits for a family's kernels."""

    passing: int
    """A rung that spills up to this many registers of a thread passes."""
    endured: float = math.inf
    """A rung that spills more than this is never taken."""
    by_code: bool = False
    """Does slow machine code keep a rung from passing?"""
    gives_way: bool = False
    """If no rung is acceptable, another family's kernels run; rungs that do not compile are skipped."""

    def passed(self, verdict: Verdict) -> bool:
        return verdict.refusal is None and verdict.spills <= self.passing and not verdict.losses


@dataclass(frozen=True)
class Chosen(Generic[Rung]):
    """`rung` is None if each rung fails or spills more than `endured`; `verdicts`: in order."""

    rung: Rung | None
    verdicts: dict[Rung, Verdict]

    @property
    def runnable(self) -> dict[Rung, Verdict]:
        return {rung: verdict for rung, verdict in self.verdicts.items() if verdict.refusal is None}

    @property
    def refusals(self) -> dict[Rung, object]:
        return {r: verdict.refusal for r, verdict in self.verdicts.items() if verdict.refusal is not None}


def choose(ladder: Sequence[Rung], judge: Callable[[Rung], Verdict], limits: Limits) -> Chosen[Rung]:
    """Chooses the first rung that passes.

    If none passes, chooses the acceptable rung that spills least, and prefers rungs that are not slow.
    """
    chosen = Chosen[Rung](None, {})
    for rung in ladder:
        verdict = chosen.verdicts[rung] = judge(rung)
        if limits.passed(verdict):
            return Chosen(rung, chosen.verdicts)
    endured = {r: v for r, v in chosen.runnable.items() if v.spills <= limits.endured}
    best = min(endured, key=lambda r: (bool(endured[r].losses), endured[r].spills), default=None)
    return Chosen(best, chosen.verdicts)
