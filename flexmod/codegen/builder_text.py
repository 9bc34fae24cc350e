"""Writes the texts that build block masks: the bounds of a rectangle, and the terms that the bounds use.

`BuilderKernels` are the kernels for one mask_mod. The compiler passes them to their launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch

from flexmod.codegen.expressions import TRITON_DTYPES, Function, filled, fresh, register_dtype
from flexmod.codegen.kernels import Captured, IndexWatch, ModText, Parameter
from flexmod.codegen.triton_text import TritonWriter
from flexmod.ir.graph import Graph, Node
from flexmod.ir.intervals import BoundsTerm
from flexmod.ir.ops import strong
from flexmod.runtime.plan import Place, RunNumber


@dataclass(frozen=True)
class BuilderTerm:
    """A term in a builder's kernels. `stored` is the dtype of its bounds in memory."""

    name: str
    axis: str
    dtype: torch.dtype
    text: ModText

    @property
    def stored(self) -> torch.dtype:
        """The dtype in memory. Small integers and truth values widen, since reductions need 32 bits."""
        return torch.int32 if not self.floating and self.dtype.itemsize < 4 else register_dtype(self.dtype)

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def triton_dtype(self) -> str:
        return TRITON_DTYPES[self.stored]

    @property
    def suffix(self) -> str:
        """The suffix of the reductions' names."""
        return "_float" if self.floating else ""

    @property
    def top(self) -> str:
        """An upper bound of all values."""
        return 'float("inf")' if self.floating else str(torch.iinfo(self.stored).max)

    @property
    def bottom(self) -> str:
        return '-float("inf")' if self.floating else str(torch.iinfo(self.stored).min)

    @property
    def given(self) -> str:
        """The text that casts a loaded bound to the dtype that the bounds function takes."""
        if self.dtype == torch.bool:
            return " != 0"
        return "" if register_dtype(self.dtype) == self.stored else f".to({TRITON_DTYPES[self.dtype]})"


@dataclass(frozen=True)
class BoundsText:
    """The bounds function, and its two calls: for a whole square of tiles, and for each of its tiles.

    In the second call, q_low, q_high, kv_low, kv_high and the bounds of row and column terms have shape
    [SIDE], and their names end in `s`. A diagonal term has the bounds of the whole square in both.
    """

    text: ModText
    of_square: str
    of_tiles: str


# inputs that are positions from 0 on; the first may stand for a difference of two positions
PLACES = ("q_idx", "b", "h", "kv_idx", "q_low", "q_high", "kv_low", "kv_high")


class _Whole(TritonWriter):
    """Writes one device function of all inputs of a graph. Its captures have a mask's names in a kernel."""

    def __init__(self, graph: Graph, main: str, checked: bool, signed: bool = False) -> None:
        inputs = sorted({str(n.value) for n in graph.nodes if n.op == "input"} - {"b", "h"})
        super().__init__(graph, main, ("b", "h", *inputs), PLACES[int(signed) :], checked)
        self.suffix, self.owner = "_of_mask", "mask_mod"
        self.numbers, self.found = f"{main}_number", f"{main}_found"
        self.signed = signed
        self.hoisted = {}

    def returned(self, main: Function) -> list[str]:
        values = [self.shaped(self.value(main, result), result) for result in self.graph.results]
        if len(values) == 1:
            return values
        names = ("certain", "possible")
        return [main.bind(fresh(name, self.taken), text) for name, text in zip(names, values, strict=True)]

    def live(self, index: Node, found: str) -> str:
        """All indices count here, except if q_idx is a difference, which may lie past an end."""
        return f"q_idx < tl.load({found})" if self.signed and "q_idx" in index.home else "True"

    def shaped(self, value: str, result: Node) -> str:
        """Turns a constant into a tensor."""
        constant = {"True": "b >= 0", "False": "b < 0"} if strong(result.dtype) == torch.bool else {}
        return constant.get(value, value)


def write_term(term: BoundsTerm, checked: bool = False) -> BuilderTerm:
    """Writes a term: the function `name`_at of its position."""
    name = term.low.removesuffix("_low")
    text = _Whole(term.graph, f"{name}_at", checked, term.axis == "diagonal").write()
    return BuilderTerm(name, term.axis, term.dtype, text)


def write_bounds(graph: Graph, terms: tuple[BuilderTerm, ...], checked: bool = False) -> BoundsText:
    """Writes a graph of bounds: the function tile_bounds, and its two calls."""
    text = _Whole(graph, "tile_bounds", checked).write()
    by_name = {f"{term.name}_{end}": term for term in terms for end in ("low", "high")}
    square, tiles = [], []
    for name in text.arguments[2:]:
        term = by_name.get(name)
        if term is not None and term.axis == "diagonal":
            square.append(name)
            tiles.append(name + "s")
            continue
        of_rows = name.startswith("q_") if term is None else term.axis == "row"
        suffix, given = (term.suffix, term.given) if term else ("", "")
        function = "lowest" if name.endswith("_low") else "highest"
        square.append(f"{function}{suffix}({name}){given}")
        tiles.append(f"{name}[{':, None' if of_rows else 'None, :'}]{given}")
    captured = [p.name for p in text.parameters]
    of_square, of_tiles = (_call("tile_bounds", ["b", "h", *ends, *captured]) for ends in (square, tiles))
    return BoundsText(text, of_square, of_tiles)


def _call(function: str, arguments: list[str]) -> str:
    """A call on several lines."""
    return f"{function}(\n{filled(', '.join(arguments), 94)}\n)"


Numbers = Sequence[bool | int | float]


@dataclass(eq=False)
class BuilderKernels:
    """The texts, and the module that is built from them at its first use."""

    terms: tuple[BuilderTerm, ...]
    bounds: BoundsText
    mask: ModText
    build: Callable[[], ModuleType]

    @cached_property
    def module(self) -> ModuleType:
        return self.build()

    def texts(self, kernel: str) -> list[ModText]:
        """The texts that a kernel calls, in order: the bounds, the mask, then the terms."""
        first, stop = {"terms_kernel": (2, None), "squares_kernel": (0, 2), "elements_kernel": (1, 2)}[kernel]
        return self._texts[first:stop]

    @cached_property
    def _texts(self) -> list[ModText]:
        return [self.bounds.text, self.mask, *(term.text for term in self.terms)]

    @cached_property
    def number_parameters(self) -> tuple[tuple[int, Parameter], ...]:
        """The parameters for numbers, each with the place of its text."""
        return tuple(
            (place, p) for place, text in enumerate(self._texts) for p in text.parameters if p.is_number
        )

    @cached_property
    def numbers(self) -> tuple[RunNumber, ...]:
        """The steps of a plan that supply `number_parameters`."""
        return tuple(RunNumber(parameter.name) for _, parameter in self.number_parameters)

    def captured(self, kernel: str, tensors: Sequence[Place], watch: IndexWatch | None) -> dict[str, object]:
        """The launch arguments that a kernel's texts need, by name. `watch`: for kernels that check."""
        given: dict[str, object] = {}
        for text in self.texts(kernel):
            given |= Captured(tensors, None, watch).arguments(text)
        return given


@dataclass(frozen=True, eq=False)
class Builder:
    """The kernels for one graph, and their parameters' numbers, text by text."""

    kernels: BuilderKernels
    numbers: tuple[Numbers, ...]

    def run_numbers(self) -> list[bool | int | float]:
        """The values that a run passes for `BuilderKernels.numbers`."""
        return [parameter.number(self.numbers[place]) for place, parameter in self.kernels.number_parameters]
