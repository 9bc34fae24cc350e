"""Rewrites a score_mod into the exponent of exp2, so that each element takes few instructions.

A weight is 2^(log2(e) * (score - row_max)). `exponent` rewrites a score's graph where that loses no digits.

        squashing   tanh and sigmoid of the score become `logistic`, 1 / (1 + 2^x).
                    The scale and the mod's factors go into its argument and result.
                    If the weights are rounded to float8 (`coarse`), a tanh becomes `tanh_approximate`.
        rows        A term that does not depend on kv_idx becomes a result of its own.
                    The kernel adds it to the row's largest score, not to each element.
        indices     A multiple of an index like q_idx - kv_idx is split at the tile's first key, `start`.
                    The row gets q_idx - start. The column gets `offset`, kv_idx - start, the same in every
                    tile. Both are small integers, exact in float32.
        unit        The last factor of all scores is multiplied by log2(e) once a program. If it is positive
                    and multiplies the plain score, so is the scale, and no element takes a product.
        base 2      Bounded scores come multiplied by log2(e), if that costs no element a multiplication.

Two kinds of scores are rewritten: small ones (`SMALL`), and an index times a slope up to `STEEP` plus a plain
score. If a slope is known only at run time, the graph returns it, and the kernel compares it with `STEEP`.
All other scores are computed as the mod writes them, in the same order as the backward: float32 rounds scores
near 1e9 to multiples of 64, so equal weights need equal scores.

`score_bounds` returns the bounds of a score by the interval rules.

`choose_tanhs` decides which tanh of a mod needs a small relative error. Kernels compute `tanh` as 1 - 2 / (1
+ 2^x), with an absolute error near 2e-7. That is enough for factors up to `SMALL`, for example a soft-cap of
50. With a larger factor, `cap * tanh(score / cap)` uses values of tanh near 0, so that tanh becomes
`tanh_relative`. So does a tanh whose factor is a tensor's element, of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from flexmod.ir import bounds
from flexmod.ir.bounds import UNKNOWN, Bounds
from flexmod.ir.graph import COLUMN, ROW, UNIFORM, Graph, GraphBuilder, Node, computed, rebuild
from flexmod.ir.ops import CAST, LOG2_E, OPS, strong
from flexmod.ir.passes import EXACT, as_float

# Scores up to this size may be computed in any order: their float32 error stays below 2^-12.
SMALL = 2048.0
# Weights in float8 take `tanh_approximate` with a factor up to this one. Its relative error of 2^-11 changes
# a weight by 1 / 32 at most, half of what rounding to three bits does.
COARSE = 64.0
# The sizes at which ranges of parameters end. Up to a soft-cap of 50, a row's first maximum can serve all its
# tiles in bfloat16, see `codegen.spec.min_fixed_max`.
ENDS = (50.0, SMALL)
# Operations that do not increase an argument's error.
_STEADY = {"add", "sub", "neg", "abs", "minimum", "maximum", "where", CAST, "tanh", "sigmoid", "sin", "cos"}


def choose_tanhs(graph: Graph, numbers: Mapping[int, int | float]) -> Graph:
    """Replaces each tanh of a score graph that needs it by `tanh_relative`.

    `numbers` are the values of its parameters, by place. Another value may need the other tanh, and so
    another graph.
    """
    gains = _gains(graph, numbers)

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op != "tanh" or node.dtype == torch.float64 or gains[node] <= SMALL:
            return None
        return builder.node("tanh_relative", args, node.dtype, None, node.where)

    return rebuild(graph, change)


def with_ranges(graph: Graph, numbers: Mapping[int, int | float]) -> Graph:
    """Gives parameters of a score graph a range around their numbers, so that bounds of scores are known.

    All numbers of a range share kernels. `numbers` are the parameters' values, by place.
    """
    used = (a for node in graph.nodes if strong(node.dtype).is_floating_point for a in node.args)
    as_floats = {node.value for node in used if node.op == "param"}
    sizes = {place: abs(float(number)) for place, number in numbers.items() if place in as_floats}
    ends = {place: next((end for end in ENDS if size <= end), None) for place, size in sizes.items()}
    return replace(graph, ranges=tuple((place, (-end, end)) for place, end in ends.items() if end))


def _gains(graph: Graph, numbers: Mapping[int, int | float]) -> dict[Node, float]:
    """By node, the largest factor from its error to the result's error; infinite if unknown."""
    gains = dict.fromkeys(graph.nodes, 0.0) | dict.fromkeys(graph.results, 1.0)
    for node in reversed(graph.nodes):
        for place, argument in enumerate(node.args):
            gain = gains[node] * _gain(node, place, numbers) if gains[node] else 0.0
            gains[argument] = max(gains[argument], gain)
    return gains


def _gain(node: Node, place: int, numbers: Mapping[int, int | float]) -> float:
    if node.op in _STEADY and not (node.op == "where" and place == 0):
        return 1.0
    if node.op == "mul" or node.op == "div" and place == 0:
        factor = _number(node.args[1 - place], numbers)
        if node.op == "div":
            factor = 1.0 / factor if factor else math.inf
        return math.inf if math.isnan(factor) else abs(factor)
    return math.inf


def _number(node: Node, numbers: Mapping[int, int | float]) -> float:
    if node.op == CAST:
        return _number(node.args[0], numbers)
    if node.op == "param":
        return float(numbers.get(node.value, math.nan))
    return float(node.value) if node.is_const else math.nan


# Rules that hold for all floats but nan.
FLOAT_RULES = bounds.ROUNDED | {bounds.within_one, bounds.share}
# Indices with slopes up to this one may be split at a tile's start: offset times slope is up to 1024 then.
STEEP = 8.0


@dataclass(frozen=True)
class Exponent:
    """A rewritten score: `graph` returns an element's part of it and, if there is one, the row's part.

    Their sum is the score, scaled in two cases. With `has_unit`, it is the score divided by the last result,
    a positive number that depends on b and h. With `in_base_2`, it is the score times log2(e).

    The graph's `score` is the product of a query and a key. It may read `scale`, `start` and `offset` too.
    The other results after the first `parts` are slopes that depend on b and h. If one exceeds STEEP, the
    kernel computes the score as written. `steep`: a constant slope does exceed it. `linear`: the column's
    terms are multiples of `offset`.
    """

    graph: Graph
    parts: int
    linear: bool = False
    has_unit: bool = False
    in_base_2: bool = False
    steep: bool = False


def exponent(
    graph: Graph, choose: bool = True, positive_scale: bool = False, coarse: bool = False
) -> Exponent:
    """The exponent of an optimized score graph. Without `choose`, only constant slopes are split.

    `positive_scale`: the graph's input `scale` is positive. `coarse`: the weights are rounded to float8.
    """
    if is_small(score_bounds(graph)):
        in_base_2 = _ExponentRewriter(graph, choose, positive_scale, coarse, LOG2_E)
        if not in_base_2.extra:
            return in_base_2.found()
    return _ExponentRewriter(graph, choose, positive_scale, coarse).found()


def is_small(bounds: Bounds) -> bool:
    """Are scores between these bounds small?"""
    return bounds[0] >= -SMALL and bounds[1] <= SMALL


@dataclass(frozen=True)
class _Factor:
    """A number times nodes that depend on b and h only."""

    number: float
    nodes: tuple[Node, ...] = ()

    def times(self, number: float, *nodes: Node) -> _Factor:
        return _Factor(self.number * number, (*self.nodes, *nodes))


class _ExponentRewriter:
    """Bounded scores are multiplied by `base`. `extra` counts the terms for which this costs each element one
    more multiplication."""

    def __init__(
        self, graph: Graph, choose: bool, positive_scale: bool, coarse: bool, base: float = 1.0
    ) -> None:
        self.given = graph
        self.choose = choose
        self.positive_scale = positive_scale
        self.coarse = coarse
        self.base = base
        self.known = node_bounds(graph)
        self.steps = _steps_of_kv(graph)
        self.tame = _tame(graph, self.steps)
        self.builder = GraphBuilder()
        self.raw = self.builder.input("score", torch.float32)
        self.scale = self.builder.input("scale", torch.float32)
        whole = self._times(self.raw, _Factor(1.0, (self.scale,)))
        self.builder.copies.update((node, whole) for node in graph.nodes if node.is_input("score"))
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
            terms = [*self._terms(rest, factor.times(base))]
            for own, node in terms if len(terms) > 1 else [self._alone(*terms[0])]:
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
            self.unit is not None, self.base != 1.0 and self.unit is None, self.steep,
        )  # fmt: skip

    def _in_units(self, node: Node) -> Node:
        """The node without its last factor, whose absolute value is the unit. The sign stays."""
        number = next((a for a in node.args if a.home <= UNIFORM), None)
        of_score = node.op == "mul" and "score" in node.home and node.dtype == torch.float32
        if not of_score or number is None or (number.is_const and not math.isfinite(number.value)):
            return self._scaled(_Factor(1.0), node)
        (rest,) = (a for a in node.args if a is not number)
        # a unit is never 0, since -inf / 0 is nan
        if number.is_const:
            value = float(number.value)
            self.unit = self._number(max(abs(value), 1e-30))
            return self._scaled(_Factor(math.copysign(bool(value), value)), rest)
        if self.positive_scale and rest.is_input("score") and self.known[number][0] >= 0:
            whole = self._product([self._float(number), self.scale])
            self.unit = self.builder.node("maximum", (whole, self._number(1e-30)), torch.float32)
            return self.raw
        size = self.builder.node("abs", (self._float(number),), torch.float32)
        self.unit = self.builder.node("maximum", (size, self._number(1e-30)), torch.float32)
        sign = self.builder.node("sign", (self._float(number),), torch.float32)
        return self._scaled(_Factor(1.0, (sign,)), rest)

    # multiples of indices beside a score

    def _without_indices(self, node: Node) -> tuple[Node, _Factor]:
        """Takes multiples of indices out of a sum, as columns and rows. Returns the remainder and its sign.

        The sum stays whole if the remainder is neither the plain score nor small: a sum with a large term
        must round as the mod writes it.
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
        plain, size = self._without_size(rest)
        if not found or not (plain.is_input("score") or self._is_small(rest)):
            return node, _Factor(1.0)
        for factor, one in found:
            self._place_index(factor, one)
        return (plain, size.times(sign)) if plain.is_input("score") else (rest, _Factor(sign))

    def _without_size(self, node: Node) -> tuple[Node, _Factor]:
        """The plain score of a product with a number that is not negative and depends on b and h only."""
        number = next((a for a in node.args if a.home <= UNIFORM and not a.is_const), None)
        if node.op == "mul" and number is not None and self.known[number][0] >= 0:
            (rest,) = (a for a in node.args if a is not number)
            if rest.is_input("score"):
                return rest, _Factor(1.0, (self._float(number),))
        return node, _Factor(1.0)

    def _index(self, node: Node, sign: float) -> tuple[_Factor, Node] | None:
        """A multiple of an index, or a small number that a row shares, as a factor and a node."""
        if "score" in node.home:
            return None
        ((factor, one),) = [*self._terms(node, _Factor(sign))]
        if one.home <= ROW and self._is_small(node):
            return factor, one
        steps = self.steps[one]
        if not steps or (factor.nodes and not self.choose):
            return None
        self.steep |= not factor.nodes and abs(factor.number * steps) > STEEP
        return None if self.steep else (factor, one)

    def _place_index(self, factor: _Factor, node: Node) -> None:
        if factor.nodes and not node.home <= ROW:
            number = factor.number * (self.steps[node] or 0)
            parts = [*factor.nodes, *([self._number(number)] if number != 1 else [])]
            self.slopes.append(self._product(parts))
        self._place(factor, node)

    def _is_small(self, node: Node) -> bool:
        """Is the node small by the interval rules? A multiple of a plain tanh is: `choose_tanhs`."""
        if is_small(self.known[node]):
            return True
        while node.op in ("mul", "div", "neg") and node.dtype == torch.float32:
            free = [a for a in node.args if not a.home <= UNIFORM]
            if len(free) != 1:
                return False
            node = free[0]
        return node.op == "tanh"

    # the terms of a small score

    def _terms(self, node: Node, factor: _Factor) -> Iterator[tuple[_Factor, Node]]:
        """The node as a sum of factors times nodes; splits only sums that contain the score, once each."""
        stack = [(node, factor)]
        while stack:
            node, factor = stack.pop()
            sides = node.args if node.dtype == torch.float32 else ()
            if node.home <= UNIFORM or node.op not in ("add", "sub", "neg", "mul", "div") or not sides:
                yield factor, node
            elif node.op == "neg":
                stack.append((sides[0], factor.times(-1.0)))
            elif node.op in ("mul", "div") and _is_factor(factor, sides[1], node.op):
                stack.append((sides[0], self._by(factor, sides[1], node.op)))
            elif node.op == "mul" and _is_factor(factor, sides[0]):
                stack.append((sides[1], self._by(factor, sides[0])))
            elif node.op in ("add", "sub") and "score" in node.home and self.given.users[node] <= 1:
                stack.append((sides[1], factor.times(-1.0) if node.op == "sub" else factor))
                stack.append((sides[0], factor))
            else:
                yield factor, node

    def _by(self, factor: _Factor, node: Node, op: str = "mul") -> _Factor:
        if node.is_const:
            number = float(node.value)
            return factor.times(number if op == "mul" else 1.0 / number)
        one = self._float(node)
        if op == "div":
            one = self.builder.node("div", (self._number(1.0), one), torch.float32, None, node.where)
        return factor.times(1.0, one)

    def _place(self, factor: _Factor, node: Node) -> None:
        """Adds a term where it costs least."""
        squashed = node.op in ("tanh", "sigmoid") and node.dtype == torch.float32
        if squashed and "score" in node.home and node in self.tame:
            self._place_squashed(factor, node)
        elif steps := self.steps[node]:
            offset = as_float(self.builder, self.builder.input("offset", torch.int32))
            self.columns.append(self._times(offset, factor.times(float(steps))))
            self.rows.append(self._times(as_float(self.builder, self._at_start(node)), factor))
        elif node.home <= ROW:
            self.rows.append(self._times(self._float(node), factor))
        elif node.home <= COLUMN:
            self.columns.append(self._scaled(factor, node))
            self.linear = False
        else:
            self.extra += not node.is_input("score") and factor == _Factor(self.base)
            self.elements.append(self._scaled(factor, node))

    def _place_squashed(self, factor: _Factor, node: Node) -> None:
        """Adds a tanh or sigmoid: tanh(x) = 1 - 2 / (1 + e^2x), sigmoid(x) = 1 / (1 + e^-x)."""
        short = self._takes_approximate(factor, node)
        inner = -LOG2_E if node.op == "sigmoid" else 1.0 if short else 2.0 * LOG2_E
        argument = self._sum([self._scaled(f, n) for f, n in self._terms(node.args[0], _Factor(inner))])
        name = "tanh_approximate" if short else "logistic"
        squashed = self.builder.node(name, (argument,), torch.float32, None, node.where)
        if node.op == "tanh" and not short:
            self.rows.append(self._times(self._number(1.0), factor))
            factor = factor.times(-2.0)
        self.elements.append(self._times(squashed, factor))

    def _takes_approximate(self, factor: _Factor, node: Node) -> bool:
        known = not factor.nodes and abs(factor.number) <= COARSE * self.base
        return self.coarse and node.op == "tanh" and known

    def _alone(self, factor: _Factor, node: Node) -> tuple[_Factor, Node]:
        """The only small term. Alone in the score, an approximate tanh leaves its factor to the unit."""
        beside = self.columns or self.rows
        if beside or not self._takes_approximate(factor, node) or not factor.number:
            return factor, node
        self.unit = self._number(abs(factor.number) / self.base)
        return _Factor(math.copysign(1.0, factor.number)), node

    # nodes of the new graph

    def _scaled(self, factor: _Factor, node: Node) -> Node:
        if node.is_input("score"):
            return self._times(self.raw, factor.times(1.0, self.scale))
        return self._times(self._float(node), factor)

    def _times(self, node: Node, factor: _Factor) -> Node:
        """The node times a factor."""
        number, parts = factor.number, list(factor.nodes)
        if node.is_const:
            number *= float(node.value)
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
        return as_float(self.builder, self.builder.copied(node))

    def _at_start(self, node: Node) -> Node:
        """The node at the tile's first key."""
        indices = [n for n in self.given.nodes if n.is_input("kv_idx")]
        found = {n: self.builder.input("start", strong(n.dtype)) for n in indices}
        return computed(node, found, lambda n: self.builder.keep(n, tuple([found[a] for a in n.args])))


def _is_factor(factor: _Factor, node: Node, op: str = "mul") -> bool:
    """Does it depend on b and h only, and does the product of constant factors stay well within float32?"""
    if not node.is_const:
        return node.home <= UNIFORM
    number = abs(float(node.value))
    if number == 0 or number != number:
        return op == "mul"
    size = abs(factor.number) * number if op == "mul" else abs(factor.number) / number
    fits = 2.0**-100 < number < 2.0**100
    return fits and (factor.number == 0 or 2.0**-100 < size < 2.0**100)


def _steps_of_kv(graph: Graph) -> dict[Node, int | None]:
    """By how much a sum of integers grows from key to key, by node; None for any other node."""
    found: dict[Node, int | None] = {}
    for node in graph.nodes:
        found[node] = _step_of_kv(node, [found[a] for a in node.args])
    return found


def _step_of_kv(node: Node, steps: Sequence[int | None]) -> int | None:
    if node.is_input("kv_idx"):
        return 1
    if node.is_const:
        value = float(node.value)
        return 0 if value.is_integer() and abs(value) <= EXACT else None  # others round in the sum
    if not strong(node.dtype).is_floating_point and "kv_idx" not in node.home:
        return 0
    if node.op not in ("add", "sub", "neg") and not (node.op == CAST and node.dtype == torch.float32):
        return None
    if None in steps or strong(node.dtype) == torch.bool:
        return None
    first, *rest = steps
    sign = -1 if node.op in ("sub", "neg") else 1
    return sign * first if node.op == "neg" else first + sign * sum(rest)  # type: ignore[operator, arg-type]


def _tame(graph: Graph, steps: Mapping[Node, int | None]) -> set[Node]:
    """The nodes that are finite in every column if the score and the row's terms are finite.

    `logistic` may process neighbors together, so it must not read elements captured for masked keys or for
    keys past the end.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        own = node.is_input("score") or node.home <= ROW or steps[node] is not None
        passes = "score" in node.home or node.op in ("add", "sub", "mul", "neg")
        if own or passes and found.issuperset(node.args):
            found.add(node)
    return found


def score_bounds(graph: Graph) -> Bounds:
    """Bounds of a score for any product of query and key. They leave nan out."""
    return node_bounds(graph)[graph.result]


def node_bounds(graph: Graph) -> dict[Node, Bounds]:
    """`score_bounds` of each node."""
    ranges = dict(graph.ranges)
    known: dict[Node, Bounds] = {}
    for node in graph.nodes:
        found = ranges.get(node.value, UNKNOWN) if node.op == "param" else _bounds_of(node, known)
        known[node] = UNKNOWN if any(end != end for end in found) else found
    return known


def _bounds_of(node: Node, known: dict[Node, Bounds]) -> Bounds:
    if node.is_const:
        return float(node.value), float(node.value)
    if node.dtype == torch.bool:
        return False, True
    row = OPS.get(node.op)
    if row is None or node.dtype != torch.float32 or row.interval not in FLOAT_RULES:
        return UNKNOWN
    low, high = row.interval(*(known[a] for a in node.args))
    return float(low), float(high)
