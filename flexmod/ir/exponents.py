"""A score_mod as the exponent of a weight: the score itself, in few instructions for an element.

weight = 2^(log2(e) * (score - largest)). `exponent` rewrites a score's graph where that costs no digits:

    squashing   tanh and sigmoid of the score become `logistic`, 1 / (1 + 2^x), whose argument and result take
                the scale and the mod's factors
    rows        what is added along a whole row (kv_idx has no part in it) is a result of its own: it is added
                to the row's largest score, not to elements
    indices     a multiple of an index like q_idx - kv_idx is split where the tile starts, at the key `start`:
                q_idx - start belongs to the row, and to the column `offset`, kv_idx - start, which is
                the same in every tile. Both are small whole numbers, exact in float32

    unit        the last factor of all scores is multiplied by log2(e) once a program
    base 2      where it costs no element a multiplication, bounded scores come multiplied by log2(e)

All other scores are computed as written, in the order of the mod. So does the backward, and float32 rounds
scores near 1e9 to multiples of 64: weights of both agree where their scores do. Rewritten are scores that
are small (`SMALL`), and an index times a slope up to `STEEP` beside a plain score. For slopes that are known
at run time alone the graph gives the numbers to compare with it.

`score_bounds` is what the interval rules know of the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from flexmod.ir import bounds
from flexmod.ir.bounds import UNKNOWN, Bounds
from flexmod.ir.graph import COLUMN, ROW, UNIFORM, Graph, GraphBuilder, Node, keep
from flexmod.ir.ops import CAST, LOG2_E, OPS, strong
from flexmod.ir.tanhs import SMALL

# Rules that hold for floats, of which those that are no number are left out.
FLOAT_RULES = bounds.ROUNDED | {bounds.within_one, bounds.share}
# Slopes of an index up to this one may be split at a tile's start: an offset times a slope is up to 1024.
STEEP = 8.0


@dataclass(frozen=True)
class Exponent:
    """`graph` has the score of an element, and where there is one what is added along its row.

    Their sum is the score; `has_unit`: the score divided by the last result, which is positive and decided by
    b and h; `in_base_2`: the score times log2(e). Beside a score's inputs, of which `score` is the product of
    a query and a key, the graph may read `scale`, `start` and `offset`. The other results after the first
    `parts` are slopes, decided by b and h: where one is beyond STEEP, the score is to be computed as written.
    `steep`: so it is, for a slope that is a number. `linear`: what it adds by column is multiples of
    `offset`.
    """

    graph: Graph
    parts: int
    linear: bool = False
    has_unit: bool = False
    in_base_2: bool = False
    steep: bool = False


def exponent(graph: Graph, choose: bool = True) -> Exponent:
    """Of an optimized score graph. Without `choose` no slopes are split that are known at run time alone."""
    if is_small(score_bounds(graph)):
        in_base_2 = _ExponentRewriter(graph, choose, LOG2_E)
        if not in_base_2.extra:
            return in_base_2.found()
    return _ExponentRewriter(graph, choose).found()


def is_small(bounds: Bounds) -> bool:
    """Are scores between these bounds small?"""
    return bounds[0] >= -SMALL and bounds[1] <= SMALL


@dataclass(frozen=True)
class _Factor:
    """A number times nodes that b and h decide."""

    number: float
    nodes: tuple[Node, ...] = ()

    def times(self, number: float, *nodes: Node) -> _Factor:
        return _Factor(self.number * number, (*self.nodes, *nodes))


class _ExponentRewriter:
    """`base` is what a bounded score is to be multiplied by, `extra` counts the terms for which this is one
    multiplication of an element more."""

    def __init__(self, graph: Graph, choose: bool, base: float = 1.0) -> None:
        self.given = graph
        self.choose = choose
        self.base = base
        self.known = node_bounds(graph)
        self.builder = GraphBuilder()
        self.raw = self.builder.input("score", torch.float32)
        self.scale = self.builder.input("scale", torch.float32)
        self.copies: dict[Node, Node] = {}
        self.elements: list[Node] = []
        self.columns: list[Node] = []
        self.rows: list[Node] = []
        self.slopes: list[Node] = []
        self.unit: Node | None = None
        self.steep = False
        self.extra = 0
        self.linear = True
        rest, factor = graph.result, _Factor(1.0)
        if not is_small(self.known[rest]):
            rest, factor = self._without_indices(rest)
        if self._is_small(rest):
            factor = factor.times(base)
            for own, node in self._terms(rest, factor):
                self._place(own, node)
        else:
            self.elements.append(self._in_units(rest) if rest is graph.result else self._scaled(factor, rest))

    def found(self) -> Exponent:
        columns = [self._sum(self.columns)] if self.columns else []
        element = self._sum([*self.elements, *columns] or [self._number(0.0)])
        rows = [self._sum(self.rows)] if self.rows else []
        others = [*self.slopes, *([self.unit] if self.unit else [])]
        return Exponent(
            self.given.of([element, *rows, *others]), 1 + len(rows), self.linear and bool(self.columns),
            self.unit is not None, self.base != 1.0, self.steep,
        )  # fmt: skip

    def _in_units(self, node: Node) -> Node:
        """The node without its last factor, whose size is the unit. Its sign stays."""
        number = next((a for a in node.args if a.home <= UNIFORM), None)
        if node.op != "mul" or number is None or "score" not in node.home or node.dtype != torch.float32:
            return self._scaled(_Factor(1.0), node)
        (rest,) = (a for a in node.args if a is not number)
        # a unit is not 0, by which -inf is no number
        if number.is_const:
            value = float(number.value)  # type: ignore[arg-type]
            self.unit = self._number(max(abs(value), 1e-30))
            return self._scaled(_Factor(math.copysign(bool(value), value)), rest)
        size = self.builder.node("abs", (self._float(number),), torch.float32)
        self.unit = self.builder.node("maximum", (size, self._number(1e-30)), torch.float32)
        sign = self.builder.node("sign", (self._float(number),), torch.float32)
        return self._scaled(_Factor(1.0, (sign,)), rest)

    # multiples of indices beside a score

    def _without_indices(self, node: Node) -> tuple[Node, _Factor]:
        """What is left of the sum, and its sign; multiples of indices have become columns and rows.

        All of it is left where that is more than the plain score or a small one: a sum with what may be large
        is rounded as it is written.
        """
        rest, sign, found = node, 1.0, list[tuple[_Factor, Node]]()
        while rest.op in ("add", "sub", "neg") and rest.dtype == torch.float32 and "score" in rest.home:
            if rest.op == "neg":
                rest, sign = rest.args[0], -sign
                continue
            of_second = -sign if rest.op == "sub" else sign
            (first, second) = rest.args
            if "score" in first.home and (index := self._index(second, of_second)):
                rest = first
            elif "score" in second.home and (index := self._index(first, sign)):
                rest, sign = second, of_second
            else:
                break
            found.append(index)
        if not found or not (_is_score(rest) or self._is_small(rest)):
            return node, _Factor(1.0)
        for factor, one in found:
            self._place_index(factor, one)
        return rest, _Factor(sign)

    def _index(self, node: Node, sign: float) -> tuple[_Factor, Node] | None:
        """A multiple of an index, or a small number of the row, as a factor and a node."""
        if "score" in node.home:
            return None
        ((factor, one),) = [*self._terms(node, _Factor(sign))]
        if one.home <= ROW and self._is_small(node):
            return factor, one
        steps = _steps_of_kv(one)
        if not steps or (factor.nodes and not self.choose):
            return None
        self.steep |= not factor.nodes and abs(factor.number * steps) > STEEP
        return None if self.steep else (factor, one)

    def _place_index(self, factor: _Factor, node: Node) -> None:
        if factor.nodes and not node.home <= ROW:
            number = factor.number * (_steps_of_kv(node) or 0)
            parts = [*factor.nodes, *([self._number(number)] if number != 1 else [])]
            self.slopes.append(self._product(parts))
        self._place(factor, node)

    def _is_small(self, node: Node) -> bool:
        """By the interval rules; a multiple of a plain tanh is: see `tanhs.py`."""
        if is_small(self.known[node]):
            return True
        while node.op in ("mul", "div", "neg") and node.dtype == torch.float32:
            free = [a for a in node.args if not a.home <= UNIFORM]
            if len(free) != 1:
                return False
            node = free[0]
        return node.op == "tanh"

    # what a small score is a sum of

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
            self.rows.append(self._times(self._as_float(self._at_start(node)), factor))
        elif node.home <= ROW:
            self.rows.append(self._times(self._float(node), factor))
        elif node.home <= COLUMN:
            self.columns.append(self._scaled(factor, node))
            self.linear = False
        else:
            self.extra += not _is_score(node) and factor == _Factor(self.base)
            self.elements.append(self._scaled(factor, node))

    def _place_squashed(self, factor: _Factor, node: Node) -> None:
        """tanh(x) = 1 - 2 / (1 + e^2x), sigmoid(x) = 1 / (1 + e^-x)."""
        inner = _Factor(2.0 * LOG2_E if node.op == "tanh" else -LOG2_E)
        argument = self._sum([self._scaled(f, n) for f, n in self._terms(node.args[0], inner)])
        squashed = self.builder.node("logistic", (argument,), torch.float32, None, node.where)
        if node.op == "tanh":
            self.rows.append(self._times(self._number(1.0), factor))
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
    return node_bounds(graph)[graph.result]


def node_bounds(graph: Graph) -> dict[Node, Bounds]:
    """`score_bounds` of each node."""
    known: dict[Node, Bounds] = {}
    for node in graph.nodes:
        known[node] = _without_nan(_bounds_of(node, known))
    return known


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
