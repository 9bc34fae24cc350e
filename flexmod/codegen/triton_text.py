"""Writes a graph as Triton device functions that read like careful handwritten code.

A node with several users gets a line of its own; a node with one user becomes part of its expression. Values
that depend on b and h only are computed once a program, values that also depend on q_idx (or kv_idx) once a
row (or a column) of the tile. Each has a small function, and its results are arguments of the main function.

Names inside the functions are the user's. In a kernel, which may contain two mods, they end in `_of_mask`,
`_of_score` or `_of_grad`; no template's own name does.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch

from flexmod.codegen import device_functions
from flexmod.codegen.expressions import (
    TRITON_DTYPES,
    WIDTH,
    Function,
    asks_for_dtype,
    cast,
    costly,
    divides,
    expensive,
    fill,
    fresh,
    group,
    reads_pair,
    register_dtype,
    rounded,
    text_of_place,
    triton_literal,
)
from flexmod.codegen.kernels import FOUND_HEAD, Check, Kind, ModText, Parameter
from flexmod.ir import bounds
from flexmod.ir.ends import dtype_limits
from flexmod.ir.graph import ARGUMENTS, POSITIONS, Graph, Node, dtype_name, home_of
from flexmod.ir.integers import integer_bounds, products_that_decide
from flexmod.ir.ops import CAST, HALF, OPS, is_ordinary, kind, strong

# by home: the arguments of its function, and how its values' names end
HOISTED = {
    "program": (("b", "h"), "bh"),
    "row": (("b", "h", "q_idx"), "q"),
    "column": (("b", "h", "kv_idx"), "kv"),
}
JIT = "@triton.jit\n"
# operations below a value that `value` writes by recursion
DEEPEST = 100
# whether it is one for a whole tile, and a condition under which an index of a load lies inside
Guard = tuple[bool, str]
# further inputs of an exponent, and their names in a kernel
OF_KERNELS = {"scale": "scale", "offset": "offset", "start": "start_n"}


def write(graph: Graph, checked: bool = False, pair_tile: int | None = None) -> ModText:
    """Writes a mask, score or grad graph: its device functions, and the lines that call them in a kernel.

    `checked`: kernels check indices into captured tensors, see `codegen/kernels.py`. `pair_tile`: the number
    of a capture whose tile is an argument.
    """
    return TritonWriter(graph, checked=checked, pair_tile=pair_tile).write()


def _is_judged(node: Node) -> bool:
    """Is it a truth value that depends on an element's row and column positions?"""
    return node.dtype == torch.bool and home_of(node) == "element" and "score" not in node.home


class TritonWriter:
    """Writes one graph; `main` names the function of its results."""

    def __init__(
        self,
        graph: Graph,
        main: str = "",
        arguments: Sequence[str] = (),
        places: Sequence[str] = POSITIONS,
        checked: bool = False,
        taken: Collection[str] = (),
        pair_tile: int | None = None,
    ) -> None:
        """`arguments` are the inputs, in order, for graphs of other kinds; `places` are inputs from 0 on.

        `taken` are names that another text of the kernel uses for its hoisted values. `pair_tile` is the
        number of a capture of which the main function gets a tile, in place of a pointer.
        """
        self.pair_tile = None if checked else pair_tile
        self.checked = checked
        self.checks: list[Check] = []
        self.graph = graph
        self.arguments = tuple(arguments or ARGUMENTS[graph.kind])
        self.suffix = f"_of_{graph.kind}"
        self.main = main or {"mask": "mask_mod", "score": "score_mod", "grad": "score_grad"}[graph.kind]
        self.parameters: dict[tuple[Kind, object, int], Parameter] = {}
        self.owner = "score_mod" if graph.kind == "grad" else self.main  # owner of the captures
        self.numbers, self.found = "number", "found"
        self.given = {str(n.value) for n in graph.nodes if n.op == "input"} & OF_KERNELS.keys()
        self.captures = _capture_names(graph, (*self.arguments, *self.given))
        self.taken = reserved() | {*self.captures, *self.arguments, *self.given, *taken}
        self.written_first = _written_first(graph)
        self.users = graph.users + Counter(self.written_first)
        self.rounded_products = products_that_decide(graph)
        extents = dict.fromkeys(places, 2**31)
        self.known = integer_bounds(graph, extents)
        # bounds for padding too, where int32 may wrap
        self.certain = integer_bounds(graph, extents, may_wrap=True)
        self.hoisted = self._choose_hoisted()

    # where to compute each node

    def _choose_hoisted(self) -> dict[Node, str]:
        """Names the nodes with a cheaper home than one of their users. A load is named after its tensor."""
        frontier = {r for r in self.graph.results if r.args and home_of(r) != "element"}
        for node in self.graph.nodes:
            for argument in node.args:
                if home_of(argument) != home_of(node) and (argument.args or argument.op == "load"):
                    frontier.add(argument)
        return {n: fresh(self._describe(n), self.taken) for n in self.graph.nodes if n in frontier}

    def _describe(self, node: Node) -> str:
        suffix = HOISTED[home_of(node)][1]
        if node.op == "load":
            return f"{self.captures[node.value]}_{suffix}"
        return f"{node.op}_{suffix}"

    # writing

    def write(self) -> ModText:
        statements, texts = {}, []
        for home in HOISTED:
            nodes = [n for n in self.hoisted if home_of(n) == home]
            statements[home], text = self._write_hoisted(home, nodes)
            texts.append(text)
        main = self._function(self.main, self.arguments, "element")
        main.give_back(*self.returned(main))
        texts.append(main.source(JIT))
        text = "\n\n".join(t for t in texts if t)
        call = self.called(main)
        return ModText(
            text=text,
            call=call,
            parameters=tuple(self.parameters.values()),
            column_values=sum(home_of(n) == "column" and costly(n) for n in self.hoisted),
            expensive=frozenset(
                home_of(n) for n in self.graph.nodes if expensive(n) and not self._in_tile(n)
            ),
            computes=any(
                home_of(n) == "element" and expensive(n) and n.op != "load" for n in self.graph.nodes
            ),
            waits_for_score=any(n.op == "load" and "score" in n.home for n in self.graph.nodes),
            arguments=self.arguments,
            compares=any(_is_judged(n) for n in self.graph.nodes),
            divides=any(divides(n) and n.home for n in self.graph.nodes),
            program=statements["program"],
            row=statements["row"],
            column=statements["column"],
            checks=tuple(self.checks),
        )

    def returned(self, main: Function) -> list[str]:
        """The main function's results."""
        return [self.shaped(self.value(main, self.graph.result), self.graph.result)]

    def _write_hoisted(self, home: str, nodes: list[Node]) -> tuple[str, str]:
        if not nodes:
            return "", ""
        function = self._function(f"{self.main}_{home}", HOISTED[home][0], home)
        function.give_back(*[self.value(function, n) for n in nodes])
        targets = ", ".join(self.hoisted[n] + self.suffix for n in nodes)
        return f"{targets} = {self.called(function)}", function.source(JIT)

    def _function(self, name: str, arguments: Sequence[str], home: str) -> Function:
        """A function with the lines of `written_first`."""
        function = Function(name, list(arguments), home)
        for node in self.written_first:
            if not self.hoisted or home_of(node) == home:
                self.value(function, node)
        return function

    def called(self, function: Function) -> str:
        uses = function.uses.items()
        further = [OF_KERNELS[n] if n in self.given else n + (ending or self.suffix) for n, ending in uses]
        return f"{function.name}({', '.join([*function.arguments, *further])})"

    def shaped(self, value: str, result: Node) -> str:
        """Gives a result its shape: a score fills the tile even if the mod ignores it, and a constant mask
        becomes a tensor."""
        if self.graph.kind == "mask":
            constant = {"True": "kv_idx >= 0", "False": "kv_idx < 0"}
            return constant.get(value, value)
        if home_of(result) == "element":
            return value
        shape_of = "grad" if self.graph.kind == "grad" else "score"
        return f"tl.where({shape_of} == {shape_of}, {value}, {value})"

    # expressions

    def value(self, function: Function, node: Node) -> str:
        """An expression for a node inside a function."""
        name = self.hoisted.get(node)
        if name and home_of(node) != function.home:
            function.uses.setdefault(name)
            return name
        if node in function.names:
            return function.names[node]
        if node.op == "const":
            return triton_literal(node.value, strong(node.dtype))
        if node.op == "input":
            if node.value in self.given:
                function.uses.setdefault(str(node.value))
            return f"{node.value}.to(tl.int64)" if node.dtype == torch.int64 else str(node.value)
        if node.op == "param":
            return self._parameter_value(function, node)
        text = self._expression(function, node)
        function.quote(node)
        if name is None and self.users[node] <= 1 and len(text) <= WIDTH:
            return text
        name = name or fresh(f"{node.op}_{len(function.names)}", self.taken)
        function.names[node] = function.bind(name, text)
        return name

    def _parameter_value(self, function: Function, node: Node) -> str:
        """A promoted constant: see `promote_constants` and `Parameter`."""
        double = node.dtype == torch.float64
        name = self.parameter(
            function, f"{self.numbers}{node.value}", "double" if double else "number", node.value,
            comment="the bits of a Python number" if double else "a Python number",
        )  # fmt: skip
        return f"tl.cast({name}, tl.int64).to(tl.float64, bitcast=True)" if double else name

    def _expression(self, function: Function, node: Node) -> str:
        if node.op == "load":
            return self._load(function, node)
        if node.op == CAST:
            source = node.args[0]
            return cast(self.value(function, source), strong(source.dtype), node.dtype)  # type: ignore[arg-type]
        row = OPS[node.op]
        arguments = row.arguments(node)
        at = arguments[-1][1]
        template = self._template(node, at)
        has_dtype = asks_for_dtype(template, at)
        values = []
        for argument, dtype in arguments:
            if argument.is_const:
                values.append(triton_literal(argument.value, dtype, has_dtype=has_dtype))
            else:
                values.append(cast(self.value(function, argument), strong(argument.dtype), dtype))
        text = fill(template, values)
        if all(a.is_const or a.op == "param" for a in node.args[-2:]) and node.op == "where":
            text = f"({text}).to({TRITON_DTYPES[register_dtype(strong(node.dtype))]})"
        return rounded(text, strong(node.dtype))

    def _template(self, node: Node, at: torch.dtype) -> str:
        """The table's text, or a cheaper one if the bounds of the arguments permit it."""
        row = OPS[node.op]
        if node in self.rounded_products:
            return "rounded_product({0}, {1})"
        if row.exact and register_dtype(at) == torch.float32:
            # a chip's fast division fails for divisors near the ends of float32's range
            extreme = len(node.args) == 2 and node.args[1].is_const and not is_ordinary(node.args[1].value)
            if extreme or not {"score", "grad"} & node.home:
                return row.exact
        for text, suffices in row.plain.get(kind(at), ()):
            first, second = (self._span(a, at) for a in node.args)
            if suffices(first, second, at.itemsize * 8):
                return text
        return row.text(at)

    def _span(self, node: Node, at: torch.dtype) -> bounds.Bounds:
        """Bounds of an argument; a float has them only if it is a constant or was an integer."""
        if not at.is_floating_point:
            return self.known[node]
        if node.is_const:
            return float(node.value), float(node.value)
        whole = node.args[0] if node.op == CAST else node
        dtype = strong(whole.dtype)
        if dtype.is_floating_point:
            return bounds.UNKNOWN
        low, high = self.known[whole]
        return (low, high) if dtype == torch.int64 or math.isfinite(high - low) else dtype_limits(dtype)

    def _load(self, function: Function, node: Node) -> str:
        number: int = node.value
        capture = self.captures[number]
        spec = self.graph.captures[number]
        about = f"{dtype_name(spec.dtype)}, "
        about += "by distance" if spec.by_distance else f"rank {spec.rank}, captured by {self.owner}"
        if self._in_tile(node):
            at = tuple(map(str, map(text_of_place, node.args[:-2])))
            about += ": a descriptor"
            if ("tile", number, 0) not in self.parameters:
                name = fresh(f"{capture}_tile", self.taken) + self.suffix
                self.parameters["tile", number, 0] = Parameter(name, "tile", number, 0, about, at, spec.dtype)
            text = self.parameter(function, capture, "tile", number)
            return f"{text}.to(tl.float32)" if spec.dtype in HALF else text
        pointer = self.parameter(function, capture, "pointer", number, comment=about)
        terms = [pointer]
        guards: list[Guard] = []
        for dim in range(len(node.args)):
            value, its_guards = self.index(function, node, dim)
            guards += its_guards
            if self.checked and its_guards:
                self._check(function, node, dim, value)
            if value != "0":
                stride = self.parameter(function, f"{capture}_stride{dim}", "stride", number, dim)
                place = f"tl.cast({value}, tl.int64)" if spec.wide else value
                terms.append(stride if value == "1" else f"{place} * {stride}")
        place = " + ".join(terms)
        if not guards:
            text = f"tl.load({place})"
        else:
            guard = together(guards)
            if len(place) + len(guard) > WIDTH - 40:
                guard = self.bound_once(function, node, f"{capture}_inside", guard)
            text = f"tl.load({place}, mask={guard}, other=0)"
        return f"{text}.to(tl.float32)" if spec.dtype in HALF else text

    def _in_tile(self, node: Node) -> bool:
        return node.op == "load" and node.value == self.pair_tile and reads_pair(node)

    def index(self, function: Function, node: Node, dim: int) -> tuple[str, list[Guard]]:
        """An index of a load as a name or a number, and the conditions under which it lies inside.

        A negative index counts from the end.
        """
        number: int = node.value
        capture, index = self.captures[number], node.args[dim]
        value = self.value(function, index)
        if self.graph.captures[number].by_distance:  # has an element for each index
            return group(value), []
        if strong(index.dtype).itemsize < 4:
            value = cast(value, strong(index.dtype), torch.int32)
        low, high = self.known[index]
        narrow = strong(index.dtype).itemsize <= 4 and not self.graph.captures[number].wide
        if low < 0:
            size = self.parameter(function, f"{capture}_size{dim}", "size", number, dim)
            wrap = "wrap" if narrow and not self.checked else "wrap_any"  # a check reports the exact index
            value = f"{group(value)} + {size}" if high < 0 else f"{wrap}({value}, {size})"
        if not re.fullmatch(r"\w+", value):
            value = self.bound_once(function, node, f"{capture}_at{dim}", value)
        guards = []
        if not (index.is_const and index.value in (0, -1)):  # captured tensors are never empty
            if self.certain[index][0] < 0:
                guards.append(f"{value} >= 0")
            if high >= 0:
                size = self.parameter(function, f"{capture}_size{dim}", "size", number, dim)
                guards.append(f"{value} < {size}")
            if narrow and len(guards) == 2:
                guards = [f"in_range({value}, {size})"]
        return value, [(home_of(index) == "program", guard) for guard in guards]

    def _check(self, function: Function, node: Node, dim: int, value: str) -> None:
        """Writes a statement that records an index of a load if it lies outside."""
        number: int = node.value
        capture = self.graph.captures[number].name
        place = FOUND_HEAD + len(self.checks)
        self.checks.append(Check(capture, self.graph.mod_name, number, dim, node.where))
        found = self.parameter(function, self.found, "found", 0, comment="int64, see check_bounds")
        size = self.parameter(function, f"{self.captures[number]}_size{dim}", "size", number, dim)
        function.quote(node)
        live = self.live(node.args[dim], found)
        function.lines.append(f"check_bounds({found} + {place}, {value}, {size}, {live})")

    def live(self, index: Node, found: str) -> str:
        """The condition under which an index counts: outside of a tile's padding."""
        ends = {"q_idx": f"q_idx < tl.load({found})", "kv_idx": f"kv_idx < tl.load({found} + 1)"}
        return joined([end for name, end in ends.items() if name in index.home]) or "True"

    def bound_once(self, function: Function, node: Node, name: str, text: str) -> str:
        """The name of a load's part, with a line of its own at the first use."""
        if text not in function.bound:
            function.quote(node)
            function.bound[text] = function.bind(fresh(name, self.taken), text)
        return function.bound[text]

    def parameter(
        self, function: Function, name: str, kind: Kind, index: Any, dim: int = 0, comment: str = ""
    ) -> str:
        """The name of a kernel parameter inside the functions.

        A derivative has the score_mod's parameters, so that the compiler sees what both load and compute.
        """
        of_score = kind != "found" and self.graph.kind == "grad"
        suffix = "_of_score" if of_score else self.suffix
        known = self.parameters.get((kind, index, dim))
        if known is None:
            name = name if kind == "pointer" else fresh(name, self.taken)
            last = self.graph.captures[index].rank - 1 if kind == "size" else 0
            known = Parameter(name + suffix, kind, index, dim, comment, row_length=0 < dim == last)
            self.parameters[kind, index, dim] = known
        name = known.name.removesuffix(suffix)
        function.uses[name] = suffix
        return name


def _written_first(graph: Graph) -> list[Node]:
    """Nodes that get a line of their own before their users do, so that `value` never recurses deeply."""
    found: list[Node] = []
    depths: dict[Node, int] = {}
    for node in graph.nodes:
        depths[node] = 1 + max((depths[a] for a in node.args), default=0)
        if depths[node] == DEEPEST:
            depths[node] = 0
            found.append(node)
    return found


def together(guards: Sequence[Guard]) -> str:
    """All conditions as one, or "".

    `&` makes a block of a scalar condition. In Triton's interpreter it is one of integers, as the compared
    scalars were, and not all versions of it take integers as the mask of a load.
    """
    scalars = joined([text for scalar, text in guards if scalar])
    blocks = joined([text for scalar, text in guards if not scalar])
    return f"tl.where({scalars}, {blocks}, False)" if scalars and blocks else scalars or blocks


def joined(conditions: Sequence[str]) -> str:
    return conditions[0] if len(conditions) == 1 else " & ".join(f"({each})" for each in conditions)


def reserved() -> set[str]:
    """Names that have a meaning in every kernel."""
    own = {"b", "h", "q_idx", "kv_idx", "score", "grad", "tl", "triton", "float"}
    return own | device_functions.names() | set(keyword.kwlist)


def _capture_names(graph: Graph, arguments: Sequence[str]) -> list[str]:
    """The user's names, changed where they would collide with the writer's own."""
    taken = reserved() | set(arguments)
    return [fresh(c.name, taken) for c in graph.captures]
