"""The kernels of one compiled attention. The compiler passes them to the launcher.

With FLEXMOD_CHECK_BOUNDS=1, kernels report indices outside of captured tensors. A kernel never reads outside
of a tensor: such an index loads 0. Kernels that check write such indices to memory, and the host reads them
after the kernels have run.

A `ModText` is a mod as Triton text: the pieces that kernel templates insert, and the kernel parameters they
need.

        text            the device functions, complete
        program         a statement that reads neither q_idx nor kv_idx, for the place where b and h are known
        row             a statement that reads q_idx, for the place outside the loop of the forward and of dQ
        column          a statement that reads kv_idx, for the place outside the loop of dK/dV
        call            the whole expression, over b, h, q_idx, kv_idx (and score, grad)
        arguments       the call's arguments before the parameters
        column_values   how many numbers, truth values apart, the column statement computes
        expensive       the homes whose statement loads, or takes more than a few instructions, and so
                        should run once for a row or a column
        computes        an element takes more than a few instructions, besides loads
        waits_for_score a load's place depends on the score
        keeps_zeros     a derivative with terms does not read the score, and is 0 if the incoming gradient is
        compares        elements are compared by their positions, row and column together
        divides         integers computed from positions are divided
        checks          with FLEXMOD_CHECK_BOUNDS, the index checks in the order of their places

An unused statement is "". A mask's call returns an int1 tile. The call of a score or of its derivative
returns a float32 tile; with `terms`, a derivative returns a tuple, see `codegen.term_text`.

An exponent's call takes the raw product of a query and a key as `score`, and may read `scale`, `start_n` and
`offset`, see `ir/exponents.py`. It has further fields:

        shift           "row" or "tile": the call returns a tile, and a term to add to each row of it,
                        [rows, 1] or one number
        steep           a condition, known once a program. If it is true, the kernel calls `as_written`, the
                        score in the mod's own form, and subtracts the largest score first.
        unit            a number, known once a program, by which the call divides the score
        in_base_2       the call returns the score times log2(e)
        bounds          bounds of the score
        linear_column   the column statement computes one number, a multiple of `offset`
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from flexmod.codegen.ladder import ladder
from flexmod.codegen.spec import KernelName, KernelSpec, Limits, Tile
from flexmod.errors import CaptureBoundsError, Where
from flexmod.ir.derivative import Along
from flexmod.ir.exponents import is_small
from flexmod.runtime.plan import Extent, Place, PlanWriter, RunNumber, Source

Kind = Literal["pointer", "tile", "size", "stride", "number", "double", "found"]

# A "found" parameter starts with this many numbers, M and N, before one for each check.
FOUND_HEAD = 2


class Check(NamedTuple):
    """An index that a kernel checks: of a load, into dimension `dim` of captured tensor `capture`.

    `mod` is "score_mod" or "mask_mod", `where` the user's line.
    """

    name: str
    mod: str
    capture: int
    dim: int
    where: Where | None


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter that a mod needs.

    `index` counts captured tensors, or for kind "number" the promoted constants. For a size or a stride (in
    elements), `dim` is the dimension. A "double" has a double's bits as an int64, since a launch takes floats
    as float32. Checks write to a parameter of kind "found", see `IndexWatch`. A "tile" is of a tensor of this
    `dtype`, read at [*at, q_idx, kv_idx]: the kernel gets the tensor's descriptor, the mod gets a tile.
    `row_length`: the size of the last of several dimensions. If Triton knows it as a multiple of 16, a thread
    loads several elements of a row at once.
    """

    name: str
    kind: Kind
    index: int
    dim: int = 0
    comment: str = ""
    at: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    row_length: bool = False

    @property
    def is_number(self) -> bool:
        return self.kind in ("number", "double")

    def number(self, numbers: Sequence[bool | int | float]) -> bool | int | float:
        """The launch argument, for a parameter that is a number."""
        if self.kind == "number":
            return numbers[self.index]
        return struct.unpack("<q", struct.pack("<d", numbers[self.index]))[0]

    def value(self, tensors: Sequence[Place], numbers: Sequence[bool | int | float] | None) -> object:
        """The launch argument for this parameter; without `numbers`, a run gives a number."""
        if self.is_number:
            return RunNumber(self.name) if numbers is None else self.number(numbers)
        tensor = tensors[self.index]
        if self.kind == "size":
            return tensor.shape[self.dim]
        return tensor.stride(self.dim) if self.kind == "stride" else tensor


class TermText(NamedTuple):
    """A term of a captured tensor's gradient: its name, the name of its sum, and the tensor's number.

    `along`: the direction of the sum, see `ir/derivative.py`.
    """

    name: str
    into: str
    capture: int
    along: Along

    @property
    def sums(self) -> str:
        """The kernel's argument for its sums."""
        return f"{self.into}_by_{self.along}".upper()


@dataclass(frozen=True)
class ModText:
    """A graph's text from `codegen.triton_text.write`; the head of this file describes the fields."""

    text: str
    call: str
    program: str = ""
    row: str = ""
    column: str = ""
    parameters: tuple[Parameter, ...] = ()
    column_values: int = 0
    expensive: frozenset[str] = frozenset()
    computes: bool = False
    waits_for_score: bool = False
    keeps_zeros: bool = False
    compares: bool = False
    divides: bool = False
    arguments: tuple[str, ...] = ()
    terms: tuple[TermText, ...] = ()
    shift: Literal["", "row", "tile"] = ""
    steep: str = ""
    unit: str = ""
    in_base_2: bool = False
    as_written: ModText | None = None
    linear_column: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)
    checks: tuple[Check, ...] = ()

    @property
    def pair_tile(self) -> Parameter | None:
        """The parameter for a tile of a captured tensor."""
        return next((p for p in self.parameters if p.kind == "tile"), None)

    @property
    def small(self) -> bool:
        """Is the score small for all operands? Then float32 has enough digits."""
        return is_small(self.bounds)

    @property
    def cheap(self) -> bool:
        """Do rows, columns and elements take few instructions each? A kernel may use such a text twice."""
        return self.expensive <= {"program"}

    @property
    def returns_grad(self) -> bool:
        """Does a derivative return the gradient as it comes? The score_mod's derivative is 1."""
        return self.text.rstrip().endswith("\n    return grad")

    @property
    def costly_rows(self) -> bool:
        return "row" in self.expensive and bool(self.row)


@dataclass(frozen=True)
class CaptureTexts:
    """The derivatives that compute gradients of captured tensors, by the direction of their sums.

    `row` and `column` replace the plain derivative in the dQ and the dK/dV kernel; `diagonal` and `element`
    have kernels of their own. If a backward computes these sums itself, `column` has the diagonals' terms
    too, and `added` may replace `element`. A direction without terms is None.
    """

    row: ModText | None = None
    column: ModText | None = None
    diagonal: ModText | None = None
    element: ModText | None = None
    added: ModText | None = None

    @property
    def besides_columns(self) -> bool:
        return any((self.row, self.diagonal, self.element))

    def by_kernel(self, grad: ModText | None) -> dict[str, ModText | None]:
        """The derivative that each kernel calls: `grad` if it has no terms. dkdv may call `added` too."""
        return {
            "dq": self.row or grad,
            "dkdv": self.column or grad,
            "diagonal": self.diagonal,
            "scatter": self.element,
            "added": self.added,
        }


NO_CAPTURES = CaptureTexts()


@dataclass(frozen=True)
class ByDistance:
    """Values of a score_mod for each distance, see `codegen/by_distance.py`.

    `text` returns them, in these `dtypes`; `reads` has which of b and h they depend on.
    """

    text: ModText
    dtypes: tuple[torch.dtype, ...]
    reads: tuple[str, ...]


class IndexWatch:
    """The checks of one plan's kernels, for `lengths` (queries, keys), on the device of the place `on`."""

    def __init__(self, writer: PlanWriter, lengths: tuple[Extent, Extent], on: Place) -> None:
        self._writer, self._lengths, self._on = writer, lengths, on
        self._rooms: list[tuple[Sequence[Check], Sequence[Place], Place]] = []

    def room(self, checks: Sequence[Check], tensors: Sequence[Place]) -> Place:
        """The tensor that a text with these checks writes to, see `found_nothing`."""
        count = FOUND_HEAD + len(checks)
        made = Place(f"found{len(self._rooms)}", (count,), (1,), torch.int64)
        self._writer.call(found_nothing, (self._on, *self._lengths, len(checks)), (made,))
        self._rooms.append((checks, tensors, made))
        return made

    def raise_if_out_of_bounds(self) -> None:
        """Adds the plan's last step, in which the host reads the results."""
        for checks, tensors, room in self._rooms:
            self._writer.call(raise_if_out_of_bounds, (checks, tuple(tensors), room))


def found_nothing(on: Tensor, length: int, keys: int, checks: int) -> tuple[Tensor]:
    """The initial tensor of the checks: both lengths, then a 0 for each check, int64.

    A kernel replaces the 0 by a code for an index outside of its tensor, with negative indices counted from
    the end: see `check_bounds` in `codegen/device_functions/arithmetic.py`.
    """
    return (torch.tensor([length, keys, *[0] * checks], device=on.device),)


def raise_if_out_of_bounds(checks: Sequence[Check], tensors: Sequence[Tensor], room: Tensor) -> tuple[()]:
    """Waits for the kernels. Raises CaptureBoundsError for the first failed check, in the text's order."""
    met = room[FOUND_HEAD:].tolist()
    for check, number in zip(checks, met, strict=True):
        if number:
            shape = tensors[check.capture].shape
            index = number // 2 if number % 2 else -(number // 2) - shape[check.dim]
            raise CaptureBoundsError.of(check.name, check.mod, shape, check.dim, index, check.where)
    return ()


class Captured(NamedTuple):
    """A mod's captures in a plan: its tensors (`Traced.tensors`), as places, and its promoted numbers.

    Without `numbers`, each run gives its own. `watch` is set for kernels that check the indices into the
    tensors.
    """

    tensors: Sequence[Place] = ()
    numbers: Sequence[bool | int | float] | None = ()
    watch: IndexWatch | None = None

    def arguments(self, text: ModText) -> dict[str, object]:
        """The launch arguments for a text's parameters, by name."""
        given = {p.name: p.value(self.tensors, self.numbers) for p in text.parameters if p.kind != "found"}
        if text.checks:
            assert self.watch is not None
            (name,) = (p.name for p in text.parameters if p.kind == "found")
            given[name] = self.watch.room(text.checks, self.tensors)
        return given


NOTHING = Captured()


class Made(Source, Protocol):
    """The kernels of a family for one direction of a variant, as launches and the choice of tiles use them.

    The portable kernels of the same mods are `portable`. The classes of its tiles, dataclasses of plain
    numbers, are `rungs`. The launcher fills `tiles`: each kernel's chosen rung on each device, or why there
    is none.
    """

    family: ClassVar[str]
    limits: ClassVar[Limits]
    rungs: ClassVar[tuple[type, ...]]

    @property
    def portable(self) -> Kernels: ...

    @property
    def spec(self) -> KernelSpec: ...

    @property
    def tiles(self) -> dict[tuple[str, torch.device], Any]: ...

    def ladder(self, kernel: Any) -> tuple[Any, ...]:
        """The rungs to try for a kernel, best first."""


@dataclass(eq=False)
class Kernels:
    """A spec, the mods' texts, and the module that is built from them at its first use.

        build           renders and loads the module for a spec
        grad            the derivative of `score`, if spec.backward
        captures        the derivatives that also compute gradients of captured tensors
        family_score    `score` for other families: a forward's as the exponent of its weights, see
                        `ir/exponents.py`; with the tile of a capture, see `variant.pair_tile`
        by_distance     what a kernel computes for each distance ahead of the others, for `score`
        options         validated kernel_options

    `interpreted`: Triton's interpreter runs the kernels on CPU tensors. `tiles`: see `Made`.
    """

    spec: KernelSpec
    build: Callable[[KernelSpec], ModuleType]
    score: ModText | None = None
    mask: ModText | None = None
    grad: ModText | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    interpreted: bool = False
    captures: CaptureTexts = NO_CAPTURES
    family_score: ModText | None = None
    by_distance: ByDistance | None = None
    tiles: dict[tuple[str, torch.device], Any] = field(default_factory=dict, init=False)
    _ladders: dict[KernelName, tuple[Tile, ...]] = field(default_factory=dict, init=False)

    family: ClassVar[str] = "portable"
    limits: ClassVar[Limits] = Limits(passing=64)
    rungs: ClassVar[tuple[type, ...]] = (Tile,)

    @property
    def portable(self) -> Kernels:
        return self

    @cached_property
    def module(self) -> ModuleType:
        return self.build(self.spec)

    @property
    def kept(self) -> tuple[str, ...]:
        """The forward's arguments for tensors that a backward needs besides the lse, [B, Hq, M] float32 each.

        The same for each score_mod: if a number becomes an argument later, the backward is another one.
        """
        return ("ROW_MAX", "TOTAL") if self.spec.exact else ("ROW_MAX", "REST")

    @property
    def small_scores(self) -> bool:
        """Are scores small for all operands? Then the backward needs only the lse."""
        return self.score is not None and self.score.small

    def ladder(self, kernel: KernelName) -> tuple[Tile, ...]:
        """The tiles to try; see `codegen/ladder.py`."""
        if kernel not in self._ladders:
            by_column = any(mod is not None and mod.column_values for mod in (self.score, self.mask))
            waits = self.score is not None and self.score.waits_for_score
            busy = self.score is not None and "element" in self.score.expensive
            self._ladders[kernel] = ladder(self.spec, kernel, self.options, by_column, waits, busy)
        return self._ladders[kernel]

    def mod_arguments(
        self, kernel: KernelName, score: Captured, mask: Captured, *, of_family: bool = False
    ) -> dict[str, object]:
        """The launch arguments that the mods of a kernel need, by name.

        `of_family`: the kernel is another family's, and calls `family_score`.
        """
        grad = self.captures.by_kernel(self.grad).get(kernel)
        added = self.captures.added if kernel == "dkdv" else None
        own = (self.family_score if of_family else self.score, grad, added)
        values: dict[str, object] = {}
        for text, captured in (*((text, score) for text in own), (self.mask, mask)):
            if text is not None:
                values |= captured.arguments(text)
        return values
