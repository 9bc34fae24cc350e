"""Writes device functions: the derivative of a score_mod by its loaded elements, and its exponent of exp2.

The main function's results depend on the direction of the sums (see `ir/derivative.py`):

        row, column     (gradient of the score, a term for each load)
        diagonal        a term for each load; with `reduce_in_backward`, `column` has these terms
        element         for each load a term, its place in a contiguous tensor of the capture's sizes
                        (int64), and whether it has a place: an index outside of the tensor has none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from flexmod.codegen.expressions import Function, cast, filled, fresh, literal
from flexmod.codegen.kernels import CaptureTexts, ModText, TermText
from flexmod.codegen.triton_text import Guard, TritonWriter, together
from flexmod.ir.derivative import Along, CaptureGrad, GradientTerm
from flexmod.ir.exponents import STEEP, exponent, score_bounds
from flexmod.ir.graph import Graph, Node
from flexmod.ir.ops import OPS, strong

MAIN: dict[Along, str] = {
    "row": "score_grad_by_row",
    "column": "score_grad_by_column",
    "diagonal": "grad_by_diagonal",
    "element": "grad_by_element",
}


def write_terms(
    found: CaptureGrad, terms: Sequence[GradientTerm], reduce_in_backward: bool = False, checked: bool = False
) -> CaptureTexts:
    """Writes the device functions for all terms of a CaptureGrad.

    `reduce_in_backward`: one kernel sums by column and along diagonals, from one text. Without such sums it
    adds the terms by element, if the score_mod adds finite multiples of elements to the score: others would
    take too many registers there.
    """
    texts: dict[str, ModText] = {}
    for along in MAIN:
        chosen = [
            term
            for term in terms
            if along == ("column" if reduce_in_backward and term.along == "diagonal" else term.along)
        ]
        if chosen:
            writer = _TermWriter(found.graph, along, chosen, checked)
            if reduce_in_backward and along == "element":
                writer.suffix = "_of_terms"  # a kernel that adds them has names of a derivative too
            texts[along] = writer.write()
    only = texts.get("element") if "column" not in texts else None
    if reduce_in_backward and only and only.keeps_zeros and only.cheap and found.graph.result.value == "grad":
        texts["added"] = texts.pop("element")
    return CaptureTexts(**texts)


class _TermWriter(TritonWriter):
    def __init__(self, graph: Graph, along: Along, terms: Sequence[GradientTerm], checked: bool) -> None:
        results = [graph.result] if along in ("row", "column") else []
        for term in terms:
            results += [term.gradient, *(term.indices if along == "element" else ())]
        super().__init__(graph.of(results), MAIN[along], checked=checked)
        self._along = along
        self._terms = terms

    def write(self) -> ModText:
        return replace(super().write(), terms=self._term_names(), keeps_zeros=self._keeps_zeros())

    def returned(self, main: Function) -> list[str]:
        values = super().returned(main) if self._along in ("row", "column") else []
        for term in self._terms:
            gradient = self.shaped(self.value(main, term.gradient), term.gradient)
            values.append(cast(gradient, strong(term.gradient.dtype), torch.float32))
            if self._along == "element":
                values += self._place(main, term)
        return values

    def _term_names(self) -> tuple[TermText, ...]:
        """Names that are unique without regard to case: buffers have the same names in capitals.

        Sums are called `<name>_by_<direction>`, as the main functions are.
        """
        taken = {function.partition("_by_")[0] for function in MAIN.values()}
        found: list[TermText] = []
        first: dict[int, str] = {}
        for term in self._terms:
            name = fresh(self.captures[term.capture].lower(), taken)
            into = first.setdefault(term.capture, name) if self._along == "element" else name
            found.append(TermText(name, into, term.capture, term.along))
        return tuple(found)

    def _keeps_zeros(self) -> bool:
        """Are results the gradient times factors that are always finite: numbers, integers of positions?"""
        return all(
            node.op != "load"
            and "score" not in node.home
            and (not strong(node.dtype).is_floating_point or _is_finite(node))
            for node in self.graph.nodes
        )

    def _place(self, main: Function, term: GradientTerm) -> tuple[str, str]:
        """The texts for the element's place, and for whether it has one."""
        load = Node("load", term.indices, torch.float32, term.capture)
        place = ""
        guards: list[Guard] = []
        for dim in range(len(term.indices)):
            value, its_guards = self.index(main, load, dim)
            guards += its_guards
            row = f"tl.cast({value}, tl.int64)"
            if place:
                name = f"{self.captures[term.capture]}_size{dim}"
                size = self.parameter(main, name, "size", term.capture, dim)
                row = f"({place}) * {size} + {row}"
            place = row
        name = f"{self.captures[term.capture]}_place"
        place = self.bound_once(main, load, name, place)
        return place, together(guards) or f"{place} >= 0"


def _is_finite(node: Node) -> bool:
    """Is a float finite if its arguments are, overflow aside?"""
    if node.is_const:
        return math.isfinite(node.value)
    return OPS[node.op].finite if node.op in OPS else True


def write_exponent(
    graph: Graph,
    checked: bool = False,
    positive_scale: bool = False,
    coarse: bool = False,
    pair_tile: int | None = None,
) -> ModText:
    """Writes the exponent of an optimized score graph, see `exponents.exponent`.

    `pair_tile`: the number of a capture whose tile is an argument, see `TritonWriter`.
    """
    # a checked kernel has one text only
    found = exponent(graph, choose=not checked, positive_scale=positive_scale, coarse=coarse)
    writer = _ExponentWriter(found.graph, found.parts, checked, pair_tile)
    text = writer.write()
    of_program = [writer.of_program(node) for node in found.graph.results[found.parts :]]
    unit = of_program.pop() if found.has_unit else ""
    steep = " | ".join(f"(gl.abs({name}) > {STEEP})" for name in of_program)
    if found.steep:
        steep = "True"
    as_written = None
    if of_program:
        as_written = _WrappingWriter(graph, taken=writer.hoisted.values(), pair_tile=pair_tile).write()
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
    return "row" if any(n.is_input("q_idx") for n in of_row.nodes) else "tile"


class _WrappingWriter(TritonWriter):
    def called(self, function: Function) -> str:
        """The function's call, on several lines if it is long: kernels indent calls deeply."""
        call = super().called(function)
        if len(call) < 80:
            return call
        name, inside = call.removesuffix(")").split("(", 1)
        return f"{name}(\n{filled(inside, 84)}\n)"


class _ExponentWriter(_WrappingWriter):
    def __init__(self, graph: Graph, parts: int, checked: bool, pair_tile: int | None) -> None:
        super().__init__(graph, "score_exponent", checked=checked, pair_tile=pair_tile)
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
