"""A mod as Triton text: the pieces that the kernel templates splice in, and the kernel parameters they need.

    text      the device functions, complete
    program   a statement that reads neither q_idx nor kv_idx; it stands where b and h are known
    row       a statement that reads q_idx; it stands outside the loop of the forward and of dQ
    column    a statement that reads kv_idx; it stands outside the loop of dK/dV
    call      the expression of the whole, over b, h, q_idx, kv_idx (and score, grad)

A statement that nothing needs is "". `arguments` are those of the call that come before the parameters.
`held_by_column` counts the numbers, truth values apart, that the column statement makes; `expensive`: the
homes whose statement loads, or takes more than a few instructions, so that it had better run once for a row
or a column. `waits_for_score`: a load's place depends on the score; `keeps_zeros`: a derivative with terms
does not read the score, and is 0 wherever the incoming gradient is; `compares`: elements are told apart by
their positions, row and column together; `divides`: whole numbers made of positions are divided. The call of
a mask gives an int1 tile, that of a score or of its derivative a float32 tile, and that of a derivative with
`terms` a tuple, see `codegen.term_text`.

An exponent's call takes the raw product of a query and a key as `score`, and may read `scale`, `start_n` and
`offset`, see `ir/exponents.py`. `shift`, "row" or "tile": it gives a tuple, a tile and what is to be added to
all of a row of it, [rows, 1] or one number. `steep`: a condition, known once a program, under which the
largest score is to be subtracted first, and `as_written`, the score as the mod has it, to be called.
`unit`: a number of the program, by which the call divides the score. `in_base_2`: the call gives the score
times log2(e). `bounds` are those of the score. `linear_column`: the column statement makes one number, a
multiple of `offset`.

`checks` are there where FLEXMOD_CHECK_BOUNDS asks for them, in the order of their places.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flexmod.errors import Where
from flexmod.ir.exponents import is_small
from flexmod.ir.reductions import Along
from flexmod.plan import Place

Kind = Literal["pointer", "size", "stride", "number", "double", "found"]

# Numbers of a "found" parameter before those of the checks: M and N.
FOUND_HEAD = 2


class Check(NamedTuple):
    """An index of a load that a kernel checks: into dimension `dim` of captured tensor `capture`.

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

    `index` counts captured tensors, or for kind "number" the promoted constants; `dim` is the dimension whose
    size or stride (in elements) it is. A "double" is the bits of one as an int64: a launch takes floats as
    float32. Kind "found" is what checks write to, see `codegen/watch.py`.
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
        """The launch argument where this parameter stands for a number."""
        if self.kind == "number":
            return numbers[self.index]
        bits: int = struct.unpack("<q", struct.pack("<d", numbers[self.index]))[0]
        return bits

    def value(self, tensors: Sequence[Place], numbers: Sequence[bool | int | float]) -> object:
        """The launch argument that this parameter stands for."""
        if self.is_number:
            return self.number(numbers)
        tensor = tensors[self.index]
        if self.kind == "size":
            return tensor.shape[self.dim]
        return tensor.stride(self.dim) if self.kind == "stride" else tensor


class TermText(NamedTuple):
    """A term of a captured tensor's gradient: its name, that of the sum it goes into, the tensor's number.

    `along`: how it is summed, see `ir/reductions.py`.
    """

    name: str
    into: str
    capture: int
    along: Along


@dataclass(frozen=True)
class ModText:
    """What `codegen.triton_text.write` makes of a graph; see the head of this file."""

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
        """Is the score small, whatever the operands are? Then float32 has digits enough."""
        return is_small(self.bounds)

    @property
    def cheap(self) -> bool:
        """Is each row, column and element made in a few instructions? A kernel may have such a text twice."""
        return self.expensive <= {"program"}

    @property
    def costly_rows(self) -> bool:
        return "row" in self.expensive and bool(self.row)


@dataclass(frozen=True)
class CaptureTexts:
    """The derivatives that make gradients of captured tensors, by how their terms are summed.

    `row` and `column` take the place of the plain derivative in the dQ and the dK/dV kernel; `diagonal` and
    `element` have kernels of their own. For a backward that makes these sums itself, `column` has
    the terms of diagonals too. None where no term is summed that way.
    """

    row: ModText | None = None
    column: ModText | None = None
    diagonal: ModText | None = None
    element: ModText | None = None

    @property
    def besides_columns(self) -> bool:
        return any((self.row, self.diagonal, self.element))

    def by_kernel(self, grad: ModText | None) -> dict[str, ModText | None]:
        """The derivative that each kernel calls, `grad` where it has no terms."""
        return {
            "dq": self.row or grad,
            "dkdv": self.column or grad,
            "diagonal": self.diagonal,
            "scatter": self.element,
        }


NO_CAPTURES = CaptureTexts()
