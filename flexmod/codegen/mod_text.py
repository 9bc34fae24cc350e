"""A mod as Triton text: the pieces that kernel templates insert, and the kernel parameters they need.

        text            the device functions, complete
        program         a statement that reads neither q_idx nor kv_idx, for the place where b and h are known
        row             a statement that reads q_idx, for the place outside the loop of the forward and of dQ
        column          a statement that reads kv_idx, for the place outside the loop of dK/dV
        call            the whole expression, over b, h, q_idx, kv_idx (and score, grad)
        arguments       the call's arguments before the parameters
        held_by_column  how many numbers, truth values apart, the column statement computes
        expensive       the homes whose statement loads, or takes more than a few instructions, and so
                        should run once for a row or a column
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flexmod.errors import Where
from flexmod.ir.derivative import Along
from flexmod.ir.exponents import is_small
from flexmod.plan import Place

Kind = Literal["pointer", "size", "stride", "number", "double", "found"]

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
    as float32. Checks write to a parameter of kind "found", see `codegen/watch.py`.
    """

    name: str
    kind: Kind
    index: int
    dim: int = 0
    comment: str = ""

    @property
    def is_number(self) -> bool:
        return self.kind in ("number", "double")

    def number(self, numbers: Sequence[bool | int | float]) -> bool | int | float:
        """The launch argument, for a parameter that is a number."""
        if self.kind == "number":
            return numbers[self.index]
        bits: int = struct.unpack("<q", struct.pack("<d", numbers[self.index]))[0]
        return bits

    def value(self, tensors: Sequence[Place], numbers: Sequence[bool | int | float]) -> object:
        """The launch argument for this parameter."""
        if self.is_number:
            return self.number(numbers)
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


@dataclass(frozen=True)
class ModText:
    """A graph's text from `codegen.triton_text.write`; the head of this file describes the fields."""

    text: str
    call: str
    program: str = ""
    row: str = ""
    column: str = ""
    parameters: tuple[Parameter, ...] = ()
    held_by_column: int = 0
    expensive: frozenset[str] = frozenset()
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
    def small(self) -> bool:
        """Is the score small for all operands? Then float32 has enough digits."""
        return is_small(self.bounds)

    @property
    def cheap(self) -> bool:
        """Do rows, columns and elements take few instructions each? A kernel may use such a text twice."""
        return self.expensive <= {"program"}

    @property
    def costly_rows(self) -> bool:
        return "row" in self.expensive and bool(self.row)


@dataclass(frozen=True)
class CaptureTexts:
    """The derivatives that compute gradients of captured tensors, by the direction of their sums.

    `row` and `column` replace the plain derivative in the dQ and the dK/dV kernel; `diagonal` and `element`
    have kernels of their own. If a backward computes these sums itself, `column` has the diagonals' terms
    too. A direction without terms is None.
    """

    row: ModText | None = None
    column: ModText | None = None
    diagonal: ModText | None = None
    element: ModText | None = None

    @property
    def besides_columns(self) -> bool:
        return any((self.row, self.diagonal, self.element))

    def by_kernel(self, grad: ModText | None) -> dict[str, ModText | None]:
        """The derivative that each kernel calls: `grad` if it has no terms."""
        return {
            "dq": self.row or grad,
            "dkdv": self.column or grad,
            "diagonal": self.diagonal,
            "scatter": self.element,
        }


NO_CAPTURES = CaptureTexts()
