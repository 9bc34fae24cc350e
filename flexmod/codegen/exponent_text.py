"""A score_mod's exponent, see `ir/exponents.py`, as device functions."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Literal

from flexmod.codegen.functions import Function
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.triton_text import Writer
from flexmod.ir.exponents import exponent, score_bounds
from flexmod.ir.graph import Graph

INDENT = "    "


def write_exponent(graph: Graph, checked: bool = False) -> ModText:
    """That of an optimized score graph."""
    found = exponent(graph)
    text = _ExponentWriter(found.graph, checked).write()
    return replace(
        text,
        shift=_shift(found.graph),
        in_base_2=found.in_base_2,
        bounds=score_bounds(graph),
        linear_column=found.linear and "," not in text.column.partition(" = ")[0],
    )


def _shift(graph: Graph) -> Literal["", "row", "tile"]:
    if len(graph.results) == 1:
        return ""
    of_row = Graph("score", graph.results[1:])
    return "row" if any(n.op == "input" and n.value == "q_idx" for n in of_row.nodes) else "tile"


class _ExponentWriter(Writer):
    def __init__(self, graph: Graph, checked: bool) -> None:
        super().__init__(graph, "score_exponent", checked=checked)
        self.owner = "score_mod"

    def called(self, function: Function) -> str:
        """On lines of its own where it is long: calls stand far to the right in a kernel."""
        call = super().called(function)
        if len(call) < 80:
            return call
        name, inside = call.removesuffix(")").split("(", 1)
        return f"{name}(\n{textwrap.fill(inside, 84, initial_indent=INDENT, subsequent_indent=INDENT)}\n)"

    def returned(self, main: Function) -> list[str]:
        return [*super().returned(main), *[self.value(main, row) for row in self.graph.results[1:]]]
