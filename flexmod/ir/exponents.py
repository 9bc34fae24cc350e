"""A score_mod as what the softmax takes it for: the exponent of a weight.

weight = 2^(exponent - peak), for exponent = log2(e) * score_mod(scale * product, ...). `exponent` rewrites a
score's graph so that a kernel's inner loop has few instructions for an element:

    factors     the scale, log2(e) and factors of the mod that b and h decide are multiplied once a program
    squashing   tanh and sigmoid of the score become `logistic`, 1 / (1 + 2^x), whose argument and result take
                such factors too
    rows        what is added along a whole row (kv_idx has no part in it) is a result of its own: it is taken
                from the row's peak, not added to elements
    indices     a multiple of an index like q_idx - kv_idx is split where the tile starts, at the key `start`:
                q_idx - start belongs to the row, and to the column `offset`, kv_idx - start, which is
                the same in every tile. Both are small whole numbers, exact in float32

A sum without the score in it stays as the user wrote it, since regrouping it may lose what cancels. float32
rounds at other places than in the mod as written, as often as there.

`score_bounds` is what the interval rules know of the score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from flexmod.ir import bounds
from flexmod.ir.bounds import UNKNOWN, Bounds
from flexmod.ir.graph import COLUMN, ROW, UNIFORM, Builder, Graph, Node, keep
from flexmod.ir.ops import CAST, LOG2_E, OPS, strong

# Rules that hold for floats, of which those that are no number are left out.
FLOAT_RULES = bounds.ROUNDED | {bounds.within_one, bounds.share}


@dataclass(frozen=True)
class Exponent:
    """`graph` has the result of an element, and where there is one that of its row.

    Their sum is the exponent, once the element's result is multiplied by log2(e), if it is not `in_base_2`:
    where elements that are not the score's own would each need a multiplication for it. Beside a score's
    inputs, of which `score` is the product of a query and a key, the graph may read `scale`, `start` and
    `offset`. `linear`: what it adds by column is multiples of `offset`.
    """

    graph: Graph
    in_base_2: bool
    linear: bool = False


def exponent(graph: Graph) -> Exponent:
    """Of an optimized score graph."""
    in_base_2 = _Rewriter(graph, LOG2_E)
    if not in_base_2.extra:
        return Exponent(in_base_2.graph(), True, in_base_2.linear)
    natural = _Rewriter(graph, 1.0)
    return Exponent(natural.graph(), False, natural.linear)


@dataclass(frozen=True)
class _Factor:
    """A number times nodes that b and h decide."""

    number: float
    nodes: tuple[Node, ...] = ()

    def times(self, number: float, *nodes: Node) -> _Factor:
        return _Factor(self.number * number, (*self.nodes, *nodes))


class _Rewriter:
    """`unit` is what the score is to be multiplied by, `extra` counts the terms for which this is one
    multiplication of an element more."""

    def __init__(self, graph: Graph, unit: float) -> None:
        self.given = graph
        self.unit = _Factor(unit)
        self.builder = Builder()
        self.raw = self.builder.input("score", torch.float32)
        self.scale = self.builder.input("scale", torch.float32)
        self.copies: dict[Node, Node] = {}
        self.elements: list[Node] = []
        self.columns: list[Node] = []
        self.rows: list[Node] = []
        self.extra = 0
        self.linear = True
        for factor, node in self._terms(graph.result, self.unit):
            self._place(factor, node)
        self.linear &= bool(self.columns)

    def graph(self) -> Graph:
        columns = [self._sum(self.columns)] if self.columns else []
        element = self._sum([*self.elements, *columns] or [self._number(0.0)])
        rows = [self._sum(self.rows)] if self.rows else []
        return self.given.of([element, *rows])

    # what a score is a sum of

    def _terms(self, node: Node, factor: _Factor) -> Iterator[tuple[_Factor, Node]]:
        """The node as a sum of factors times nodes; only a sum that the score is in is taken apart."""
        sides = node.args if node.dtype == torch.float32 else ()
        if node.home <= UNIFORM or node.op not in ("add", "sub", "neg", "mul", "div") or not sides:
            yield factor, node
        elif node.op == "neg":
            yield from self._terms(sides[0], factor.times(-1.0))
        elif node.op in ("mul", "div") and _is_factor(factor, sides[1], node.op):
            yield from self._terms(sides[0], self._by(factor, sides[1], node.op))
        elif node.op == "mul" and _is_factor(factor, sides[0]):
            yield from self._terms(sides[1], self._by(factor, sides[0]))
        elif node.op in ("add", "sub") and "score" in node.home:
            yield from self._terms(sides[0], factor)
            yield from self._terms(sides[1], factor.times(-1.0) if node.op == "sub" else factor)
        else:
            yield factor, node

    def _by(self, factor: _Factor, node: Node, op: str = "mul") -> _Factor:
        if node.is_const:
            number = float(node.value)  # type: ignore[arg-type]
            return factor.times(number if op == "mul" else 1.0 / number)
        one = self._float(node)
        if op == "div":
            one = self.builder.node("div", (self._number(1.0), one), torch.float32, None, node.where)
        return factor.times(1.0, one)

    def _place(self, factor: _Factor, node: Node) -> None:
        """A term where it costs least."""
        squashed = node.op in ("tanh", "sigmoid") and node.dtype == torch.float32
        if squashed and "score" in node.home and _is_tame(node):
            self._place_squashed(factor, node)
        elif (steps := _steps_of_kv(node)) is not None and steps:
            offset = self._as_float(self.builder.input("offset", torch.int32))
            self.columns.append(self._times(offset, factor.times(float(steps))))
            self._add_to_row(self._as_float(self._at_start(node)), factor)
        elif node.home <= ROW:
            self._add_to_row(self._float(node), factor)
        elif node.home <= COLUMN:
            self.columns.append(self._scaled(factor, node))
            self.linear = False
        else:
            self.extra += not _is_score(node) and factor == self.unit
            self.elements.append(self._scaled(factor, node))

    def _add_to_row(self, node: Node, factor: _Factor) -> None:
        self.rows.append(self._times(node, factor.times(LOG2_E / self.unit.number)))

    def _place_squashed(self, factor: _Factor, node: Node) -> None:
        """tanh(x) = 1 - 2 / (1 + e^2x), sigmoid(x) = 1 / (1 + e^-x)."""
        inner = _Factor(2.0 * LOG2_E if node.op == "tanh" else -LOG2_E)
        argument = self._sum([self._scaled(f, n) for f, n in self._terms(node.args[0], inner)])
        squashed = self.builder.node("logistic", (argument,), torch.float32, None, node.where)
        if node.op == "tanh":
            self._add_to_row(self._number(1.0), factor)
            factor = factor.times(-2.0)
        self.elements.append(self._times(squashed, factor))

    # nodes of the new graph

    def _scaled(self, factor: _Factor, node: Node) -> Node:
        if _is_score(node):
            return self._times(self.raw, factor.times(1.0, self.scale))
        return self._times(self._float(node), factor)

    def _times(self, node: Node, factor: _Factor) -> Node:
        """The node times one factor, whatever that is a product of."""
        number, parts = factor.number, list(factor.nodes)
        if node.is_const:
            number *= float(node.value)  # type: ignore[arg-type]
        if number != 1.0 or (node.is_const and not parts):
            parts.append(self._number(number))
        if not node.is_const:
            parts = [node, *([self._product(parts)] if parts else [])]
        return self._product(parts)

    def _product(self, parts: Sequence[Node]) -> Node:
        return reduce(lambda a, b: self.builder.node("mul", (a, b), torch.float32), parts)

    def _sum(self, terms: Sequence[Node]) -> Node:
        return reduce(lambda a, b: self.builder.node("add", (a, b), torch.float32), terms)

    def _number(self, value: float) -> Node:
        return self.builder.const(value, torch.float32)

    def _float(self, node: Node) -> Node:
        return self._as_float(self._copied(node))

    def _as_float(self, node: Node) -> Node:
        if node.dtype == torch.float32:
            return node
        if node.is_const:
            return self._number(float(node.value))  # type: ignore[arg-type]
        return self.builder.node(CAST, (node,), torch.float32, torch.float32, node.where)

    def _copied(self, node: Node) -> Node:
        if node not in self.copies:
            if _is_score(node):
                self.copies[node] = self._times(self.raw, _Factor(1.0, (self.scale,)))
            else:
                self.copies[node] = keep(self.builder, node, tuple(map(self._copied, node.args)))
        return self.copies[node]

    def _at_start(self, node: Node) -> Node:
        """The node at the tile's first key."""
        if node.op == "input" and node.value == "kv_idx":
            return self.builder.input("start", node.dtype)  # type: ignore[arg-type]
        if "kv_idx" not in node.home:
            return self._copied(node)
        return keep(self.builder, node, tuple(map(self._at_start, node.args)))


def _is_factor(factor: _Factor, node: Node, op: str = "mul") -> bool:
    """Do b and h decide it, and does the product of factors that are numbers stay well within float32?"""
    if not node.is_const:
        return node.home <= UNIFORM
    number = abs(float(node.value))  # type: ignore[arg-type]
    if number == 0 or number != number:
        return op == "mul"
    size = abs(factor.number) * number if op == "mul" else abs(factor.number) / number
    fits = 2.0**-100 < number < 2.0**100
    return fits and (factor.number == 0 or 2.0**-100 < size < 2.0**100)


def _is_score(node: Node) -> bool:
    return node.op == "input" and node.value == "score"


def _steps_of_kv(node: Node) -> int | None:
    """By how much a sum of whole numbers grows from key to key; None if it is anything else."""
    if node.op == "input" and node.value == "kv_idx":
        return 1
    if not strong(node.dtype).is_floating_point and "kv_idx" not in node.home:
        return 0
    if node.is_const:
        return 0 if float(node.value).is_integer() else None  # type: ignore[arg-type]
    if node.op not in ("add", "sub", "neg") and not (node.op == CAST and node.dtype == torch.float32):
        return None
    steps = [_steps_of_kv(a) for a in node.args]
    if None in steps or strong(node.dtype) == torch.bool:
        return None
    first, *rest = steps
    sign = -1 if node.op in ("sub", "neg") else 1
    return sign * first if node.op == "neg" else first + sign * sum(rest)  # type: ignore[operator, arg-type]


def _is_tame(node: Node) -> bool:
    """Is it a number in every column, where the score and what its row gives are?

    `logistic` may take neighbours together: what is captured for a masked key, or for one past the end, is
    not for it.
    """
    if _is_score(node) or node.home <= ROW or _steps_of_kv(node) is not None:
        return True
    return ("score" in node.home or node.op in ("add", "sub", "mul", "neg")) and all(map(_is_tame, node.args))


def score_bounds(graph: Graph) -> Bounds:
    """What a score lies between, whatever the product is; what is no number is left out."""
    known: dict[Node, Bounds] = {}
    for node in graph.nodes:
        known[node] = _without_nan(_bounds_of(node, known))
    return known[graph.result]


def _bounds_of(node: Node, known: dict[Node, Bounds]) -> Bounds:
    if node.is_const:
        return float(node.value), float(node.value)  # type: ignore[arg-type]
    if node.dtype == torch.bool:
        return False, True
    row = OPS.get(node.op)
    if row is None or node.dtype != torch.float32 or row.interval not in FLOAT_RULES:
        return UNKNOWN
    low, high = row.interval(*(known[a] for a in node.args))
    return float(low), float(high)


def _without_nan(found: Bounds) -> Bounds:
    return UNKNOWN if any(end != end for end in found) else found
