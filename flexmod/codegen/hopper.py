"""Kernels for Hopper chips (sm_90): which calls they support, their text, and their ladder of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, ClassVar, get_args

import torch

from flexmod.codegen import cache, render
from flexmod.codegen.kernels import NO_CAPTURES, CaptureTexts, Kernels, ModText
from flexmod.codegen.ladder import ENDS_SOON
from flexmod.codegen.spec import FLOAT8, Direction, KernelSpec, Limits
from flexmod.errors.base import counted
from flexmod.ir.graph import dtype_name
from flexmod.ir.ops import HALF

Registers = tuple[int, int, int]

NAME, TARGET = "hopper", "sm_90"
# the widest head dimension: a thread has no registers for more
WIDEST = 256
# the fastest shapes spill up to 30 registers; if all spill more than `endured`, the portable kernels run
LIMITS = Limits(passing=32, endured=64, by_code=True, gives_way=True)
# bytes of the instructions of a forward whose elements are expensive: a processor waits if there are more, as
# it has no room for them. Otherwise code is long for heads that take another loop.
LONGEST = 112 << 10
# a thread's registers by the number of consumers: in a consumer, in the producer, and at the start
REGISTERS: Mapping[int, Registers] = {1: (232, 24, 128), 2: (240, 24, 168), 3: (160, 32, 128)}
# log2 of the largest weight, for float8 values: weights in float8 need its whole range
ROOM = {torch.float8_e4m3fn: 8.0, torch.float8_e5m2: 15.0}


@dataclass(frozen=True)
class ForwardShape:
    """The forward's shape: `consumers` groups of four warps with 64 queries each, `block_n` keys at a time.

    `stages` tiles are in flight. Two programs of one consumer share a processor: one computes while the other
    one begins or ends its tile of queries, or waits for what a mask reads.

    `longest`: the most bytes of instructions with which it passes.
    """

    consumers: int
    block_n: int
    stages: int = 2
    longest: int | None = field(default=None, compare=False)

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def programs(self) -> int:
        """How many programs share a processor."""
        return 2 if self.consumers == 1 else 1

    def arguments(self) -> Mapping[str, int]:
        own = {"CONSUMERS": self.consumers, "BLOCK_N": self.block_n, "STAGES": self.stages}
        return {**own, **_warps(REGISTERS[self.consumers])}

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} ({counted(self.consumers, 'consumer')})"


@dataclass(frozen=True)
class BackwardShape:
    """The backward's shape: `block_m` queries at a time over `block_n` keys, with `stages` tiles in flight.

        ahead           issues the next score before dQ is read from its accumulator
        late            issues dp after p is computed, not before; this takes fewer registers
        shared_operand  dK's product reads the gradients of the scores from shared memory, not registers
        chunks          in how many chunks of queries scores are processed, 1 or 4

    None where a template has no such choice.
    """

    block_m: int
    ahead: bool | None
    shared_operand: bool | None
    late: bool | None
    stages: int = 2
    block_n: int = 128
    chunks: int | None = None

    def arguments(self) -> Mapping[str, int]:
        given: Mapping[str, int | None] = {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "STAGES": self.stages, "AHEAD": self.ahead,
            "LATE": self.late, "SHARED_OPERAND": self.shared_operand, "CHUNKS": self.chunks,
        }  # fmt: skip
        chosen = {name: value for name, value in given.items() if value is not None}
        return {**chosen, **_warps(REGISTERS[2])}

    def __str__(self) -> str:
        parts = ["dQ a step late" if self.ahead is None else "ahead" if self.ahead else "in step"]
        if self.shared_operand is not None:
            parts.append("shared operand" if self.shared_operand else "own operand")
        if self.late:
            parts.append("late")
        if self.chunks == 4:
            parts.append("4 chunks")
        return f"{self.block_m}x{self.block_n} ({', '.join(parts)})"


Shape = ForwardShape | BackwardShape


def _warps(registers: Registers) -> Mapping[str, int]:
    consumer, producer, start = registers
    return {"CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer, "num_warps": 4, "maxnreg": start}


def spec_obstacle(spec: KernelSpec, direction: Direction) -> str | None:
    """Why the forward's or the backward's kernels do not support a spec, or None if they do."""
    if spec.q_dtype not in (*HALF, *FLOAT8):
        return f"{dtype_name(spec.q_dtype)} operands"
    of_values = (*HALF, *FLOAT8) if spec.q_dtype in FLOAT8 else (spec.q_dtype,)
    if spec.k_dtype != spec.q_dtype or spec.v_dtype not in of_values:
        return "keys and values of another dtype than the queries"
    if spec.out_dtype not in (None, *HALF):
        return f"an output in {dtype_name(spec.out_dtype)}"
    for dim in (spec.head_dim, spec.value_dim):
        if dim > WIDEST:
            return f"a head dimension of {dim}, above {WIDEST}"
        whole = 16 // spec.q_dtype.itemsize
        if dim % whole:
            return (
                f"a head dimension of {dim}, no multiple of {whole}: the TMA unit addresses rows of 16 bytes"
            )
    if min(spec.head_tile, spec.value_tile) < 64:
        return f"head dimensions of {spec.head_dim} and {spec.value_dim}: the tiles are 64 wide"
    if 0 < spec.short < ENDS_SOON:
        return "a short call: small tiles of the portable kernels take less time"
    if spec.decoding is not None:
        return "few queries: portable kernels share the keys of a tile among programs"
    if spec.mask_block is not None:
        rows, columns = (128, 64) if direction == "forward" else (64, 64 if wide(spec) else 128)
        if spec.mask_block[0] % rows or spec.mask_block[1] % columns:
            q_block, kv_block = spec.mask_block
            return f"blocks of {q_block} x {kv_block} in the mask, no multiples of {rows} x {columns}"
    return None


def stepped(spec: KernelSpec) -> bool:
    """Does a launch write the steps of the forward's tiles? A tile may cross rows of the mask's blocks."""
    return spec.v_dtype in FLOAT8 and spec.mask_block is not None


def narrow(spec: KernelSpec) -> bool:
    """Are heads 64 wide? Their accumulators leave registers free."""
    return max(spec.head_tile, spec.value_tile) <= 64


def wide(spec: KernelSpec) -> bool:
    """Do the backward's consumers share 64 keys? 64 keys each would take too many registers."""
    return max(spec.head_tile, spec.value_tile) > 128


def delayed(spec: KernelSpec, score: ModText | None, captures: CaptureTexts) -> bool:
    """Do the backward's consumers, with 64 keys each, take dQ a step late?

    Heads of 192 with values of up to 128 leave registers for that. Tiles of a captured tensor find no shared
    memory.
    """
    fits = spec.head_used == 192 and spec.value_tile <= 128
    whole = spec.mask_block is None or spec.mask_block[1] % 128 == 0
    return fits and whole and _divisible(score, captures)


def chunked(spec: KernelSpec, score: ModText | None, captures: CaptureTexts) -> bool:
    """Can the backward's consumers process a tile's scores in chunks?"""
    apart = score is not None and not wide(spec) and _divisible(score, captures)
    return apart or delayed(spec, score, captures)


def _divisible(score: ModText | None, captures: CaptureTexts) -> bool:
    """Does a backward treat each query's scores on their own?

    Sums of captures' terms must be by column, and take only the finished gradient.
    """
    summed = captures.column
    few = summed is None or (summed.keeps_zeros and all(term.along == "column" for term in summed.terms))
    return few and captures.added is None and not (score and score.pair_tile)


def sum_block(head_tile: int, block_m: int) -> tuple[int, int, int]:
    """The block that a consumer of the backward adds to dQ at a time, in rows of `sum_row` numbers.

    It has 64 queries and half of the columns, or all of them if a tile has 128 queries; 64 columns at most.
    """
    row = sum_row(head_tile)
    return 1, 64 * min(head_tile * block_m // 128, 64) // row, row


def sum_row(head_tile: int) -> int:
    """How many numbers of dQ's sums form a row.

    The TMA unit takes 32 numbers of a row. A row of 64 goes out as two halves, sent by two warps each, which
    is faster. It takes one more register, which heads of 64 do not have.
    """
    return 32 if head_tile <= 64 else 64


def ladder(
    spec: KernelSpec,
    direction: Direction,
    score: ModText | None,
    mask: ModText | None,
    captures: CaptureTexts = NO_CAPTURES,
) -> tuple[Shape, ...]:
    """The shapes to try, best first. Measured on an H200."""
    if direction == "backward":
        if delayed(spec, score, captures):
            whole = BackwardShape(64, ahead=None, shared_operand=None, late=None, chunks=1)
            return (whole, replace(whole, chunks=4)) if score else (whole,)
        return _backward_ladder(spec, score, mask, chunked(spec, score, captures))
    kv_block = spec.mask_block[1] if spec.mask_block else 128
    fitting = (shape for shape in _forward_ladder(spec, score, mask) if kv_block % shape.block_n == 0)
    longest = LONGEST if score is not None and "element" in score.expensive else None
    return tuple(replace(shape, longest=longest) for shape in fitting)


def _forward_ladder(spec: KernelSpec, score: ModText | None, mask: ModText | None) -> list[ForwardShape]:
    widest = max(spec.head_tile, spec.value_tile)
    if spec.v_dtype in FLOAT8:
        return _float8_ladder(widest, bool(mask and mask.column_values) and not (score and score.pair_tile))
    narrow, wide = ForwardShape(2, 64), ForwardShape(2, 128)
    # a captured tensor's tile in float32 takes memory from others
    pair = score.pair_tile if score else None
    large = pair is not None and pair.dtype is torch.float32
    if widest > (64 if large else 128):
        return [narrow]
    # each number by column takes as many registers of a thread as a row of its scores
    values = sum(mod.column_values for mod in (score, mask) if mod)
    # smaller tiles leave registers for work on each element
    busy = widest > 64 and score is not None and "element" in score.expensive
    shapes = [narrow, wide] if values > 2 or busy else [wide, narrow]
    if large:
        return shapes
    # where code is long, two programs share it; the consumers of one program have copies of their own
    computes = score is not None and score.computes
    if widest > 64:
        return [narrow, ForwardShape(1, 64), wide] if computes else shapes
    if computes:
        shapes = [ForwardShape(1, 128), ForwardShape(1, 64, 3), *shapes]
    few = not values or (score and score.linear_column)
    if spec.mask_block is None and few:
        shapes.insert(0, ForwardShape(3, 128))
    if spec.short or mask and mask.column_values:
        shapes.insert(0, ForwardShape(1, 128))
    return list(dict.fromkeys(shapes))


def _float8_ladder(widest: int, by_column: bool) -> list[ForwardShape]:
    """Shapes for values in float8, whose tiles take half of the memory.

    `by_column`: the mask has numbers by column. While a consumer waits for them, another program computes.
    """
    shapes = [ForwardShape(2, 128, 3 if widest <= 128 else 2), ForwardShape(2, 64, 4 if widest <= 128 else 3)]
    if widest <= 128:
        shapes.insert(0, ForwardShape(1, 128) if by_column else ForwardShape(3, 128, 3))
    return shapes


def _backward_ladder(
    spec: KernelSpec, score: ModText | None, mask: ModText | None, in_chunks: bool
) -> tuple[BackwardShape, ...]:
    if wide(spec):
        return tuple(
            BackwardShape(64, ahead=ahead, shared_operand=None, late=late, block_n=64)
            for ahead, late in ((True, False), (True, True), (False, True))
        )
    late = score is not None
    shapes = [
        BackwardShape(64, ahead=True, shared_operand=True, late=late),
        BackwardShape(64, ahead=True, shared_operand=True, late=not late),
        BackwardShape(64, ahead=False, shared_operand=True, late=True),
    ]
    if in_chunks:
        # what spills as a whole does not in chunks, and takes less time
        shapes = [replace(shapes[0], chunks=1), replace(shapes[-1], chunks=4)]
    if narrow(spec) and (spec.mask_block or (128, 128))[0] % 128 == 0 and not (score and score.pair_tile):
        tall = [
            BackwardShape(128, ahead=True, shared_operand=False, late=False),
            BackwardShape(128, ahead=False, shared_operand=False, late=True),
        ]
        # a score_mod, or a mask's numbers by row, need the registers of dp and of the next score
        tall = tall[1:] if score or (mask and mask.row) else tall
        shapes = [*(replace(shape, chunks=shapes[0].chunks) for shape in tall), *shapes]
    return tuple(shapes)


@dataclass(eq=False)
class HopperKernels:
    """The Hopper version of the kernels of `portable`. `tiles`: see `Made`."""

    portable: Kernels
    tiles: dict[tuple[str, torch.device], Any] = field(default_factory=dict)

    family: ClassVar[str] = NAME
    limits: ClassVar[Limits] = LIMITS
    rungs: ClassVar[tuple[type, ...]] = (ForwardShape, BackwardShape)

    @property
    def spec(self) -> KernelSpec:
        return self.portable.spec

    @property
    def interpreted(self) -> bool:
        return self.portable.interpreted

    @property
    def score(self) -> ModText | None:
        """The score_mod for a backward, or its exponent for a forward."""
        return self.portable.family_score

    def ladder(self, kernel: Any) -> tuple[Any, ...]:
        """Shapes for the forward and the backward kernels; tiles for the portable kernels next to them."""
        if kernel not in get_args(Direction):
            return self.portable.ladder(kernel)
        p = self.portable
        return ladder(self.spec, kernel, self.score, p.mask, p.captures)

    @property
    def text(self) -> str:
        p = self.portable
        return text(p.spec, self.score, p.mask, p.grad, p.captures)

    @cached_property
    def module(self) -> ModuleType:
        p = self.portable
        names = ["hopper_attention", *(["score"] if p.score else []), *(["mask"] if p.mask else [])]
        return cache.load(self.text, "_".join(names))

    def choices(self, direction: Direction) -> list[Shape]:
        """The shapes that tuning tries: the ladder's, and for a backward also the other order of dp and p."""
        rungs = self.ladder(direction)
        late = [
            replace(shape, late=not shape.late)
            for shape in rungs
            if isinstance(shape, BackwardShape) and shape.late is not None
        ]
        return list(dict.fromkeys([*rungs, *late]))


# the same object for all calls of a spec and its mods
hopper_kernels = lru_cache(cache.KEPT)(HopperKernels)


def text(
    spec: KernelSpec,
    score: ModText | None = None,
    mask: ModText | None = None,
    grad: ModText | None = None,
    captures: CaptureTexts = NO_CAPTURES,
) -> str:
    """Renders the module for a spec and its mods: `forward_kernel`, or a backward's three kernels.

    A forward takes the exponent of a score_mod as `score`. Of the captures' gradients, this module computes
    the sums in `column` and `added`.
    """
    own = CaptureTexts(column=captures.column, added=captures.added)
    is_delayed = spec.backward and delayed(spec, score, captures)
    return render.render(
        spec, score, mask, grad, own, template="hopper_module.jinja", target="hopper",
        narrow=narrow(spec), wide=wide(spec) and not is_delayed, delayed=is_delayed,
        chunked=spec.backward and chunked(spec, score, captures),
        sum_row=sum_row(spec.head_tile), room=ROOM.get(spec.v_dtype), stepped=stepped(spec),
    )  # fmt: skip
