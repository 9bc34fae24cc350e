"""The texts of the builder of block masks: bounds of a rectangle, and the terms that they are made of."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import torch

from flexmod.codegen.expressions import TRITON_DTYPES, held
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.triton_text import write_whole
from flexmod.ir.graph import Graph
from flexmod.ir.intervals import Term


@dataclass(frozen=True)
class TermText:
    """A term in a builder's kernels. `stored` is the dtype of its bounds in memory."""

    name: str
    axis: str
    dtype: torch.dtype
    text: ModText

    @property
    def stored(self) -> torch.dtype:
        """Small integers and truth values grow: reductions are of 32 bits at least."""
        return torch.int32 if not self.floating and self.dtype.itemsize < 4 else held(self.dtype)

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def held(self) -> str:
        return TRITON_DTYPES[self.stored]

    @property
    def suffix(self) -> str:
        """Of the names of reductions."""
        return "_float" if self.floating else ""

    @property
    def top(self) -> str:
        """What no value is above."""
        return 'float("inf")' if self.floating else str(torch.iinfo(self.stored).max)

    @property
    def bottom(self) -> str:
        return '-float("inf")' if self.floating else str(torch.iinfo(self.stored).min)

    @property
    def given(self) -> str:
        """What brings a loaded bound to the dtype that the function of bounds takes."""
        if self.dtype == torch.bool:
            return " != 0"
        return "" if held(self.dtype) == self.stored else f".to({TRITON_DTYPES[self.dtype]})"


@dataclass(frozen=True)
class BoundsText:
    """The function of bounds, and its calls for a square of tiles as a whole and for each of its tiles.

    There, q_low, q_high, kv_low, kv_high and the bounds of terms by row and by column are [SIDE]; those of a
    diagonal term are those of the whole, and in the second call the names end in `s`.
    """

    text: ModText
    of_square: str
    of_tiles: str


def write_term(term: Term) -> TermText:
    """The text of a term: the function `name`_at of its position."""
    name = term.low.removesuffix("_low")
    text = write_whole(term.graph, f"{name}_at", signed=term.axis == "diagonal")
    return TermText(name, term.axis, term.dtype, text)


def write_bounds(graph: Graph, terms: tuple[TermText, ...]) -> BoundsText:
    """The text of a graph of bounds: the function tile_bounds, and its two calls."""
    text = write_whole(graph, "tile_bounds")
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
    inside = textwrap.fill(", ".join(arguments), 90, break_long_words=False, break_on_hyphens=False)
    return f"{function}(\n{textwrap.indent(inside, '    ')}\n)"
