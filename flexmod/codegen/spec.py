"""The facts that determine a kernel's text, KernelSpec, and the choice of its tile.

Everything else (lengths, head counts, strides, the scale's size, captured sizes) is a run-time argument.

`choose` chooses a kernel's tile from a ladder, the tile sizes to try: the same search for every family, in
launches and ahead of time.

Each rung is compiled and judged, and none runs. The search takes the first rung that passes, or else the best
acceptable one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

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
        precision           tl.dot's input_precision for float32, see `on`
        positive_scale      permits the running maximum of raw scores
        shared_kv           several query heads, or the whole batch, read one head of keys
        out_dtype           the output's dtype; None for the queries'
        value_scale         a scale, for the whole tensor or by head, multiplies the values
        pair_tile           the number of a score_mod's capture whose tiles kernels may copy, see
                            `variant.pair_tile`
        short               a call has at most so many queries and keys, see `ladder.SHORT`; 0 if
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
    precision: Literal["ieee", "tf32", "bf16x6"] = "ieee"
    positive_scale: bool = True
    shared_kv: bool = False
    backward: bool = False
    out_dtype: torch.dtype | None = None
    value_scale: bool = False
    pair_tile: int | None = None
    short: int = 0
    decoding: Decoding | None = None

    @property
    def makes_delta(self) -> bool:
        """May the kernel of dK and dV make delta? For more positions a kernel of its own takes less time."""
        return 0 < self.short <= 64 and self.mask_block is None

    @property
    def split(self) -> bool:
        """Do several programs share the keys of a tile of queries?"""
        return self.decoding is not None and self.decoding.split

    @property
    def exact(self) -> bool:
        """Are inputs float32, and products as accurate? Then the lse alone is not enough for a backward."""
        return self.q_dtype is torch.float32 and self.precision != "tf32"

    @property
    def compensates(self) -> tuple[str, ...]:
        """The sums of products that are compensated: all of products that are made in float32.

        Of products in bfloat16 only those over several heads: torch adds up heads in a tree.
        """
        if self.exact and self.precision == "ieee":
            return ("out", "grad_q", "grad_k", "grad_v")
        return ("grad_k", "grad_v") if self.exact and self.shared_kv else ()

    def on(self, family: str) -> KernelSpec:
        """The spec for a family of chips. NVIDIA's make a product in float32 of six in bfloat16.

        A number in float32 is the sum of three in bfloat16. Of their nine products, three are below the last
        digit of the first. Threads have no registers for the parts of wider heads.
        """
        if not family or not self.exact or max(self.head_tile, self.value_tile) > 256:
            return self
        return replace(self, precision="bf16x6")

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
        if self.v_dtype in FLOAT8 and self.q_dtype is not torch.float32:
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
    """BLOCK_M queries x BLOCK_N keys at a time, by `warps` warps, with `stages` tiles in flight.

    `passing`: how many registers it may spill, where that is more than the family's limit.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    passing: int = field(default=0, compare=False)

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


Rung = TypeVar("Rung", bound=Hashable)


class Verdict(NamedTuple):
    """The result of compiling a rung."""

    spills: int = 0
    """Registers that a thread spills to memory."""
    losses: tuple[str, ...] = ()
    """Reasons why it is slow, in words, see `compiler_bugs`. Its results are correct."""
    refusal: object = None
    """Why it cannot run: an error, or a class of errors; None if it can."""
    size: int = 0
    """Bytes of its instructions, if its family asks for machine code; otherwise 0."""

    def __str__(self) -> str:
        size = [f"{self.size >> 10} KB of instructions"] if self.size else []
        return ", ".join([f"a thread spills {counted(self.spills, 'register')}", *size, *self.losses])


class Limits(NamedTuple):
    """The limits for a family's kernels."""

    passing: int
    """A rung that spills up to this many registers of a thread passes; a rung may have its own number."""
    endured: float = math.inf
    """A rung that spills more than this is never taken."""
    by_code: bool = False
    """Does slow machine code keep a rung from passing? Code is slow too that exceeds a rung's `longest`."""
    gives_way: bool = False
    """If no rung is acceptable, another family's kernels run; rungs that do not compile are skipped."""

    def passed(self, verdict: Verdict, rung: object) -> bool:
        passing = max(self.passing, getattr(rung, "passing", 0))
        longest = getattr(rung, "longest", None)
        fits = verdict.spills <= passing and (longest is None or verdict.size <= longest)
        return verdict.refusal is None and fits and not verdict.losses


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
        if limits.passed(verdict, rung):
            return Chosen(rung, chosen.verdicts)
    endured = {r: v for r, v in chosen.runnable.items() if v.spills <= limits.endured}
    best = min(endured, key=lambda r: (bool(endured[r].losses), endured[r].spills), default=None)
    return Chosen(best, chosen.verdicts)
