"""Describes a call's allocations and launches as data.

A plan belongs to a variant and its chosen tiles. Its tensors are named places. Sizes, strides and grids are
expressions over named extents, which the tensors of a call fill in (`runtime/bound.py`). Nothing here touches
a tensor, so you can make, print and compare plans without a GPU.

    Allocate    a new tensor, of zeros or uninitialized
    View        another view of a tensor's memory
    Launch      a kernel; its arguments are places, TMA descriptors, numbers, extents or `RunNumber`s
    Call        a function of tensors and plain numbers, named and at the top of its module
    Keep        the same, whose results stay with the mask for later calls
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from flexmod.ir.graph import dtype_name

_ATOM = r"\w+(\([^()]*\))?"
PRODUCT = re.compile(rf"{_ATOM}( \* {_ATOM})*")


Extents = Mapping[str, int]


@dataclass(frozen=True)
class Size:
    """An integer that a call fills in: a name, or an expression over names, `cdiv(M, 128) * HQ * B`.

    `of` computes it from the names' values.
    """

    text: str
    rule: Callable[[Extents], int] | None = field(default=None, compare=False, repr=False)

    def of(self, extents: Extents) -> int:
        return extents[self.text] if self.rule is None else self.rule(extents)

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Extent) -> Extent:
        return self if other == 0 else _made(f"{self} + {other}", operator.add, self, other)

    def __radd__(self, other: int) -> Extent:
        return self if other == 0 else _made(f"{other} + {self}", operator.add, other, self)

    def __sub__(self, other: Extent) -> Size:
        return _made(f"{self} - {_factor(other)}", operator.sub, self, other)

    def __rsub__(self, other: int) -> Size:
        return _made(f"{other} - {_factor(self)}", operator.sub, other, self)

    def __mul__(self, other: Extent) -> Extent:
        if other in (0, 1):
            return self if other == 1 else 0
        return _made(f"{_factor(self)} * {_factor(other)}", operator.mul, self, other)

    def __rmul__(self, other: int) -> Extent:
        if other in (0, 1):
            return self if other == 1 else 0
        return _made(f"{other} * {_factor(self)}", operator.mul, other, self)

    def __floordiv__(self, other: Extent) -> Size:
        return _made(f"{_factor(self)} // {_divisor(other)}", operator.floordiv, self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return _made(f"{other} // {_divisor(self)}", operator.floordiv, other, self)


Extent = int | Size


def _made(text: str, rule: Callable[..., int], *parts: Extent) -> Size:
    return Size(text, lambda extents: rule(*(value_of(part, extents) for part in parts)))


def _factor(extent: Extent) -> str:
    text = str(extent)
    return text if PRODUCT.fullmatch(text) else f"({text})"


def _divisor(extent: Extent) -> str:
    text = str(extent)
    return text if text.isalnum() or text.isidentifier() else f"({text})"


def cdiv(extent: Extent, by: int) -> Extent:
    """Returns the quotient, rounded up."""
    if by == 1 or isinstance(extent, int):
        return -(-extent // by) if isinstance(extent, int) else extent
    return _made(f"cdiv({extent}, {by})", lambda size: -(-size // by), extent)


def least(one: Extent, other: Extent) -> Extent:
    """Returns the smaller one."""
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return _made(f"min({one}, {other})", min, one, other)


def if_several(size: Extent, value: Extent, otherwise: Extent = 0) -> Extent:
    """Returns `value` if a dimension has more than one entry, since the stride of one entry has no effect."""
    if isinstance(size, int):
        return value if size > 1 else otherwise
    if value == otherwise:
        return value
    text = f"({value} if {size} > 1 else {otherwise})"
    return _made(text, lambda count, some, none: some if count > 1 else none, size, value, otherwise)


def bits(extent: Extent) -> Extent:
    """Returns the number of binary digits."""
    if isinstance(extent, int):
        return extent.bit_length()
    return _made(f"bits({extent})", int.bit_length, extent)


def value_of(extent: Any, extents: Extents) -> Any:
    """Evaluates an expression for a call; returns any other value unchanged."""
    return extent.of(extents) if isinstance(extent, Size) else extent


def values_of(expressions: Sequence[Extent], extents: Extents) -> tuple[int, ...]:
    return tuple(value_of(extent, extents) for extent in expressions)


@dataclass(frozen=True)
class Place:
    """Stands for a tensor. Strides count elements."""

    name: str
    shape: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    dtype: torch.dtype

    def stride(self, dim: int) -> Extent:
        return self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> Extent:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {dtype_name(self.dtype)} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class RunNumber:
    """Stands for a plain number, an argument of each run."""

    name: str

    def __str__(self) -> str:
        return self.name


def contiguous(shape: Sequence[Extent]) -> tuple[Extent, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor of a place; the TMA unit copies blocks of this shape."""

    base: Place
    shape: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    block: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.base.name} in blocks of {list(self.block)}"


class Source(Protocol):
    """Gives a launch its kernel. `interpreted`: Triton's interpreter runs it, on CPU tensors."""

    @property
    def module(self) -> ModuleType: ...

    @property
    def interpreted(self) -> bool: ...


@dataclass(frozen=True)
class Allocate:
    place: Place
    zeros: bool = False

    def __str__(self) -> str:
        return f"{'zeros' if self.zeros else 'empty'}  {self.place}"


@dataclass(frozen=True)
class View:
    place: Place
    of: Place
    offset: Extent = 0

    def __str__(self) -> str:
        start = f" from {self.offset} on" if self.offset != 0 else ""
        return f"view   {self.place} of {self.of.name}{start}"


@dataclass(frozen=True)
class Launch:
    """Launches a kernel of the source in a 1-D grid. `rung`: its tile; None if it has no ladder."""

    source: Source = field(compare=False)
    kernel: str
    grid: Extent
    arguments: Mapping[str, Any]
    rung: Any = None

    @property
    def name(self) -> str:
        return f"{self.kernel}_kernel"

    def places(self) -> Iterator[Place]:
        for value in self.arguments.values():
            if isinstance(value, Descriptor):
                yield value.base
            elif isinstance(value, Place):
                yield value

    def __str__(self) -> str:
        tile = f", {self.rung}" if self.rung is not None else ""
        given = [f"{name}={_said(value)}" for name, value in self.arguments.items() if value is not None]
        lines = [f"launch {self.name}[{self.grid}]{tile}"]
        lines += ["           " + ", ".join(given[at : at + 4]) for at in range(0, len(given), 4)]
        return "\n".join(lines)


class MaskArgument:
    """Stands for a call's block mask in the arguments of a `Call`."""

    def __repr__(self) -> str:
        return "MASK"


MASK = MaskArgument()


@dataclass(frozen=True)
class Call:
    """Calls function(*arguments); a run replaces places, extents and MASK, also in lists, tuples and dicts.

    The function returns a tensor for each place of `makes`, and None for a place that is None.
    """

    function: Callable[..., Sequence[torch.Tensor | None]]
    arguments: tuple[Any, ...]
    makes: tuple[Place | None, ...]

    verb = "call"

    def __str__(self) -> str:
        made = ", ".join(str(place) for place in self.makes if place is not None)
        return f"{self.verb}   {self.function.__name__}" + (f" -> {made}" if made else "")


@dataclass(frozen=True)
class Keep(Call):
    """A `Call` whose results stay with the mask while the tensors in `arguments` keep their versions."""

    verb = "keep"


Step = Allocate | View | Launch | Call


class Binding(NamedTuple):
    """What the steps of a plan are bound to. `slots` numbers the places of a run by name."""

    slots: Mapping[str, int]
    extents: Extents
    device: torch.device


def _said(value: Any) -> str:
    return value.name if isinstance(value, Place) else str(value)


@dataclass(frozen=True)
class Plan:
    """The steps of a call, in order. A run takes `inputs` and `numbers`, and returns `results`."""

    inputs: tuple[Place | None, ...]
    steps: tuple[Step, ...]
    results: tuple[Place | None, ...]
    numbers: tuple[RunNumber, ...] = ()

    def launches(self, kernel: str | None = None) -> list[Launch]:
        """Returns all launches, or the launches of one kernel."""
        found = [step for step in self.steps if isinstance(step, Launch)]
        return [step for step in found if kernel in (None, step.kernel)]

    def __str__(self) -> str:
        lines = [f"given  {given}" for given in (*self.inputs, *self.numbers) if given is not None]
        lines += map(str, self.steps)
        lines += [f"return {place}" for place in self.results if place is not None]
        return "\n".join(lines)


class PlanWriter:
    """Writes the steps of a plan: each method adds one and returns its place."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def empty(
        self,
        name: str,
        shape: Sequence[Extent],
        dtype: torch.dtype = torch.float32,
        strides: Sequence[Extent] | None = None,
        *,
        zeros: bool = False,
    ) -> Place:
        """Allocates a new tensor, contiguous unless you give strides."""
        place = Place(name, tuple(shape), tuple(strides or contiguous(shape)), dtype)
        self.steps.append(Allocate(place, zeros))
        return place

    def allocate(self, places: Sequence[Place | None]) -> None:
        """Allocates new uninitialized tensors."""
        self.steps += [Allocate(place) for place in places if place is not None]

    def like(self, name: str, place: Place) -> Place:
        """Allocates a new tensor with a contiguous one's shape and dtype."""
        return self.empty(name, place.shape, place.dtype)

    def view(
        self,
        name: str,
        of: Place,
        shape: Sequence[Extent],
        strides: Sequence[Extent] | None = None,
        offset: Extent = 0,
    ) -> Place:
        place = Place(name, tuple(shape), tuple(strides or contiguous(shape)), of.dtype)
        self.steps.append(View(place, of, offset))
        return place

    def launch(
        self, source: Source, kernel: str, grid: Extent, arguments: Mapping[str, Any], rung: Any = None
    ) -> None:
        self.steps.append(Launch(source, kernel, grid, dict(arguments), rung))

    def call(
        self,
        function: Callable[..., Sequence[torch.Tensor | None]],
        arguments: Sequence[Any],
        makes: Sequence[Place | None] = (),
        step: type[Call] = Call,
    ) -> tuple[Place | None, ...]:
        self.steps.append(step(function, tuple(arguments), tuple(makes)))
        return tuple(makes)

    def plan(
        self,
        inputs: Sequence[Place | None],
        results: Sequence[Place | None],
        numbers: Sequence[RunNumber] = (),
    ) -> Plan:
        return Plan(tuple(inputs), tuple(self.steps), tuple(results), tuple(numbers))


def named(name: str, tensor: torch.Tensor, sizes: Sequence[Extent | None] = ()) -> Place:
    """Returns the place of an input of the tensor's kind. Strides are names; so are sizes unless given."""
    given = [*sizes, *[None] * (tensor.dim() - len(sizes))]
    shape = [Size(f"{name}_size{d}") if size is None else size for d, size in enumerate(given)]
    strides = [Size(f"{name}_stride{d}") for d in range(tensor.dim())]
    return Place(name, tuple(shape), tuple(strides), tensor.dtype)


def fixed(name: str, tensor: torch.Tensor) -> Place:
    """Returns the place of an input with exactly the tensor's sizes and strides."""
    return Place(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def extents_of(inputs: Sequence[Place | None], tensors: Sequence[torch.Tensor | None]) -> dict[str, int]:
    """Returns the values of the names in a plan's inputs for these tensors.

    Raises ValueError if a tensor does not match its place.
    """
    found: dict[str, int] = {}
    for place, tensor in zip(inputs, tensors, strict=True):
        if place is None or tensor is None:
            if place is not None or tensor is not None:
                raise ValueError(f"{place or 'nothing'} is what the plan takes, not {tensor}")
            continue
        if tensor.dim() != place.dim() or tensor.dtype != place.dtype:
            raise ValueError(f"{place} is what the plan takes, not {list(tensor.shape)} of {tensor.dtype}")
        for extent, size in _sizes(place, tensor):
            if isinstance(extent, Size) and extent.text.isidentifier():
                found.setdefault(extent.text, size)
    for place, tensor in zip(inputs, tensors, strict=True):
        for extent, size in _sizes(place, tensor):
            if value_of(extent, found) != size:
                wanted = f"{extent} is {value_of(extent, found)}"
                raise ValueError(f"{place} is what the plan takes: {wanted}, not {size}")
    return found


def _sizes(place: Place | None, tensor: torch.Tensor | None) -> Iterator[tuple[Extent, int]]:
    """Yields sizes, and strides of dimensions with more than one entry."""
    if place is not None and tensor is not None:
        yield from zip(place.shape, tensor.shape, strict=True)
        for extent, stride, size in zip(place.strides, tensor.stride(), tensor.shape, strict=True):
            atom = isinstance(extent, Size) and extent.text.isidentifier()
            if atom or size > 1 and tensor.numel():
                yield extent, stride
