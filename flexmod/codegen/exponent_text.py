"""Writes a score_mod's exponent of exp2, see `ir/exponents.py`, as device functions."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Literal

import torch

from flexmod.codegen.expressions import literal
from flexmod.codegen.functions import Function
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.triton_text import TritonWriter
from flexmod.ir.exponents import STEEP, exponent, score_bounds
from flexmod.ir.graph import Graph, Node

INDENT = "    "


def write_exponent(graph: Graph, checked: bool = False) -> ModText:
    """Writes the exponent of an optimized score graph."""
    found = exponent(graph, choose=not checked)  # a checked kernel has one text only
    writer = _ExponentWriter(found.graph, found.parts, checked)
    text = writer.write()
    of_program = [writer.of_program(node) for node in found.graph.results[found.parts :]]
    unit = of_program.pop() if found.has_unit else ""
    steep = " | ".join(f"(gl.abs({name}) > {STEEP})" for name in of_program)
    if found.steep:
        steep = "True"
    as_written = _WrappingWriter(graph, taken=writer.hoisted.values()).write() if of_program else None
    parameters = (*writer.parameters.values(), *(as_written.parameters if as_written else ()))
    return replace(
        text,
        parameters=tuple(dict.fromkeys(parameters)),
        shift=_shift(found.graph, found.parts),
        unit=unit,
        in_base_2=found.in_base_2,
        steep=steep,
        as_written=as_written,
        bounds=score_bounds(graph),
        linear_column=found.linear and "," not in text.column.partition(" = ")[0],
    )


def _shift(graph: Graph, parts: int) -> Literal["", "row", "tile"]:
    if parts == 1:
        return ""
    of_row = Graph("score", graph.results[1:parts])
    return "row" if any(n.op == "input" and n.value == "q_idx" for n in of_row.nodes) else "tile"


class _WrappingWriter(TritonWriter):
    def called(self, function: Function) -> str:
        """The function's call, on several lines if it is long: kernels indent calls deeply."""
        call = super().called(function)
        if len(call) < 80:
            return call
        name, inside = call.removesuffix(")").split("(", 1)
        return f"{name}(\n{textwrap.fill(inside, 84, initial_indent=INDENT, subsequent_indent=INDENT)}\n)"


class _ExponentWriter(_WrappingWriter):
    def __init__(self, graph: Graph, parts: int, checked: bool) -> None:
        super().__init__(graph, "score_exponent", checked=checked)
        self.owner = "score_mod"
        self.parts = parts

    def of_program(self, node: Node) -> str:
        """The text, in a kernel, for a number that depends on b and h only."""
        if node.is_const:
            return literal(node.value, torch.float32)
        if node.op == "param":
            self.value(Function(self.main, []), node)  # makes it a parameter of the kernel
            return self.parameters["number", node.value, 0].name
        return self.hoisted[node] + self.suffix

    def returned(self, main: Function) -> list[str]:
        rows = self.graph.results[1 : self.parts]
        return [*super().returned(main), *[self.value(main, row) for row in rows]]
