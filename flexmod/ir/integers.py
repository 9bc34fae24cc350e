"""Bounds of a graph's integer nodes, whether int32 can hold them, and comparisons as ranges.

int32 arithmetic on positions is exact: where int32 would overflow, `passes.widen` makes it int64. All other
integers wrap as in torch, also integers that the user casts to int32.

`as_ranges` rewrites comparisons of elements into ranges, which take fewer instructions. A number lies in a
range, 0 <= x < count, if it is less than count as an unsigned number, since negative numbers are large then.
One comparison replaces two, and needs no absolute value:

    |q_idx - kv_idx| <= 8                            q_idx + 8 - kv_idx < 17
    (q_idx >= kv_idx) & (q_idx - kv_idx <= 1024)     q_idx - kv_idx < 1025

The constant is added to the row's side, once a row. Ranges of one length in a chain of `and` become one
range, of the largest number. 32 bits decide the comparison, so a sum may wrap on the way.

Masks and conditions in scores use the same form, so that the compiler can share common subexpressions.

`products_that_decide` finds products of floats that decide an integer or a truth value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from typing import Any

import torch

from flexmod.ir import bounds
from flexmod.ir.graph import POSITIONS, ROW, UNIFORM, DType, Graph, GraphBuilder, Node, home_of, rebuild
from flexmod.ir.linear import AND, Forms, Linear, is_logic, joined, links
from flexmod.ir.ops import CAST, COMPARISONS, HALF, OPS, is_power_of_two, number, strong

TRUTH: bounds.Bounds = (False, True)
# Far beyond any integer dtype, and small enough to be compared with inf.
LARGEST = 2**200
# values or bounds of a graph's parameters, by place
Numbers = Mapping[int, bool | int | float | bounds.Bounds]
# Operations whose result may leave the dtype of their arguments.
LEAVES_DTYPE = frozenset({
    "add", "sub", "mul", "neg", "abs", "pow", "shift_left", "floor_divide", "trunc_divide",
})  # fmt: skip
# Operations whose result is one of their arguments.
CHOICES = ("where", "minimum", "maximum")


def integer_bounds(
    graph: Graph, extents: Mapping[str, int], numbers: Numbers | None = None, *, may_wrap: bool = False
) -> dict[Node, bounds.Bounds]:
    """Bounds of each node's value when positions run below `extents`; UNKNOWN after a load.

    int32 arithmetic on positions counts as exact, since `widen` makes it so. With `may_wrap`, a value that
    int32 might not hold is UNKNOWN. In all other arithmetic, a value that may wrap is always UNKNOWN.
    """
    exact = set() if may_wrap else on_positions(graph)
    known: dict[Node, bounds.Bounds] = {}
    for node in graph.nodes:
        found = _bounds_of(node, known, extents, numbers or {}, exact)
        if node in exact:
            known[node] = _unwrapped(found, node)
        elif may_wrap or strong(node.dtype) != torch.int32 or node.op in LEAVES_DTYPE:
            known[node] = _clamp_to_dtype(found, strong(node.dtype), clamps=node.op in ("minimum", "maximum"))
        else:
            known[node] = found
    return known


def on_positions(graph: Graph) -> set[Node]:
    """The int32 nodes that `widen` changes to int64: positions, and arithmetic on them alone.

    Arithmetic with a cast or with a captured integer wraps. A number that a mod clamps counts as a position:
    so do offsets in tensors, and positions from a table (`as_position`).
    """
    found: set[Node] = set()
    wraps: set[Node] = set()
    for node in graph.nodes:
        of_found = node.op in OPS and any(a in found for a in node.args)
        if _is_wrapping(node, wraps):
            wraps.add(node)
        elif strong(node.dtype) == torch.int32 and (node.op == "input" or of_found or _is_clamped(node)):
            found.add(node)
    return found


def _is_wrapping(node: Node, wraps: Set[Node]) -> bool:
    """Is it an integer of at most 32 bits that a mod casts or captures, or computes from such integers?"""
    dtype = strong(node.dtype)
    if dtype.is_floating_point or dtype in (torch.bool, torch.int64):
        return False
    if node.op == CAST:
        return not (node.home <= UNIFORM and _is_clamped(node.args[0]))  # `ir/offsets.py` casts offsets
    return node.op == "load" or any(a in wraps for a in node.args) and not _is_clamped(node)


def _is_clamped(node: Node) -> bool:
    """Is it x.clamp(a number, a number)?"""
    lower = [a for a in node.args if a.op == "maximum"]
    return node.op == "minimum" and len(lower) == 1 and all(map(_has_number, (node, *lower)))


def _has_number(node: Node) -> bool:
    return any(a.op in ("const", "param") or a.op == CAST and a.args[0].is_const for a in node.args)


def dtypes_when_widened(graph: Graph) -> dict[Node, torch.dtype]:
    """The dtypes of int32 arithmetic in the widened graph: int64 on positions, else int32, as in torch.

    Choices between positions and other integers have the positions' dtype.
    """
    judged = on_positions(graph)
    return {
        node: torch.int64 if node in judged else torch.int32
        for node in graph.nodes
        if node.op in OPS and strong(node.dtype) == torch.int32 and (node in judged or node.op not in CHOICES)
    }


def _unwrapped(found: bounds.Bounds, node: Node) -> bounds.Bounds:
    """Bounds of exact arithmetic. Bounds without an end come from a load, and such arithmetic may wrap."""
    if all(isinstance(x, int) or math.isfinite(x) for x in found):  # a power may exceed all floats
        low, high = (max(-LARGEST, min(LARGEST, x)) for x in found)
        return low, high
    return bounds.UNKNOWN if node.op in LEAVES_DTYPE else found


def _clamp_to_dtype(found: bounds.Bounds, dtype: torch.dtype, clamps: bool) -> bounds.Bounds:
    """The bounds if the dtype holds them. An operation that `clamps` may bound one end alone."""
    if dtype.is_floating_point:
        return bounds.UNKNOWN
    if dtype == torch.bool:
        return (bool(found[0]), bool(found[1])) if found[0] >= 0 and found[1] <= 1 else TRUTH
    if _fits(found, dtype) or clamps and _fits(_finite_ends(found), dtype):
        return found
    return (0, 255) if dtype == torch.uint8 else bounds.UNKNOWN


def _finite_ends(found: bounds.Bounds) -> bounds.Bounds:
    ends = [x for x in found if math.isfinite(x)]
    return (min(ends), max(ends)) if ends else bounds.UNKNOWN


def _fits(found: bounds.Bounds, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= found[0] and found[1] <= limits.max


def _bounds_of(
    node: Node,
    known: Mapping[Node, bounds.Bounds],
    extents: Mapping[str, int],
    numbers: Numbers,
    exact: Set[Node],
) -> bounds.Bounds:
    if node.op == "input" and node.value in extents:
        return 0, extents[node.value] - 1
    if node.op in ("const", "param"):
        value: Any = node.value if node.is_const else numbers.get(node.value, math.nan)
        if isinstance(value, tuple):
            return value
        return (value, value) if isinstance(value, (bool, int)) else bounds.UNKNOWN
    if node.op == CAST:
        return _cast_bounds(known[node.args[0]], strong(node.args[0].dtype), strong(node.dtype))
    row = OPS.get(node.op)
    if row is None or row.interval is None or strong(node.dtype).is_floating_point:
        return bounds.UNKNOWN
    # with positions a number beyond int32 requires int64, elsewhere it wraps
    wraps = not any(a in exact for a in node.args)
    arguments = []
    for argument, dtype in row.arguments(node):
        found = known[argument]
        if wraps and type(argument.value) is int and argument.is_const and not dtype.is_floating_point:
            found = (number(argument.value, dtype).item(),) * 2
        arguments.append(_cast_bounds(found, argument.dtype, dtype))
    return row.interval(*arguments)


def _cast_bounds(found: bounds.Bounds, source: DType, target: torch.dtype) -> bounds.Bounds:
    """The bounds of a value after a cast to another dtype."""
    if target == torch.bool and strong(source) != torch.bool:
        return bounds.ne(found, (0, 0))
    if strong(source) == torch.bool and target != torch.bool:
        return int(found[0]), int(found[1])
    if target.is_floating_point or target == torch.bool or source == target or _fits(found, target):
        return found
    # keep a Python number beyond int32, so that `needs_int64` sees it
    return found if target == torch.int32 and isinstance(source, type) else bounds.UNKNOWN


def needs_int64(graph: Graph, extents: Mapping[str, int], numbers: Numbers | None = None) -> bool:
    """Can index arithmetic leave int32 when positions run below `extents`?

    Considers only positions and constants: captured int32 values, and casts to int32, wrap as in torch.
    """
    known = integer_bounds(graph, extents, numbers)
    judged = on_positions(graph)
    for node in graph.nodes:
        row = OPS.get(node.op)
        values = [node] if node in judged else []
        if row is not None and any(a in judged for a in node.args):
            values += [a for a, d in row.arguments(node) if a.op in ("const", "param") and d == torch.int32]
        for value in values:
            low, high = known[value]
            if math.isfinite(low) and math.isfinite(high) and not _fits((low, high), torch.int32):
                return True
    return False


LOWEST, HIGHEST = -(2**31), 2**31 - 1
# by comparison: which side is the larger one, and the least difference of the sides
SIDES = {"le": (1, 0), "lt": (1, 1), "ge": (0, 0), "gt": (0, 1)}


@dataclass(frozen=True)
class _Range:
    """0 <= place < count, which is equivalent to the links."""

    place: Linear
    count: Linear
    links: tuple[Node, ...]


def as_ranges(graph: Graph) -> Graph:
    """Replaces comparisons in the graph by ranges, where both are proven equal."""
    rewriter = _RangeRewriter(graph)
    return rebuild(graph, rewriter.rewritten, rewriter.builder)


def _of_row(form: Linear) -> int:
    """The row's coefficients. Their sign picks one of a form and its negative."""
    return sum(factor for node, factor in form.parts.items() if node.home <= ROW)


class _RangeRewriter:
    def __init__(self, graph: Graph) -> None:
        self.known = integer_bounds(graph, dict.fromkeys(POSITIONS, 2**31), may_wrap=True)
        self.forms = Forms(self.known)
        self.builder = GraphBuilder()
        # a part of a chain needs no ranges of its own
        chains = {n for n in graph.nodes if n.op in AND and is_logic(n)}
        self.whole = {*graph.results, *(a for n in graph.nodes if n not in chains for a in n.args)}

    def rewritten(self, builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node not in self.whole:
            return None
        chain = links(node, AND)
        ranges = self._ranges(chain)
        return self._judged(chain, ranges) if ranges else None

    def _judged(self, chain: Sequence[Node], ranges: Sequence[_Range]) -> Node:
        """The chain, with ranges of one length merged."""
        of_length: dict[object, list[_Range]] = {}
        for one in ranges:
            length = (frozenset(one.count.parts.items()), one.count.constant)
            of_length.setdefault(length, []).append(one)
        found = [self._inside(group) for group in of_length.values()]
        taken = {link for one in ranges for link in one.links}
        return joined(self.builder, AND[0], found + [self.builder.copies[n] for n in chain if n not in taken])

    # how to find ranges

    def _ranges(self, chain: Sequence[Node]) -> list[_Range]:
        compared = [n for n in chain if n.op in SIDES and home_of(n) == "element"]
        found = [one for link in compared if (one := self._distance(link)) is not None]
        taken = {link for one in found for link in one.links}
        return found + list(self._pairs([link for link in compared if link not in taken]))

    def _distance(self, link: Node) -> _Range | None:
        """Reads a link |x| <= limit as a range."""
        larger, gap = SIDES[link.op]
        limit, distance = link.args[larger], link.args[1 - larger]
        if distance.op != "abs" or limit.op not in ("const", "param"):
            return None
        inner, reach = self.forms.of(distance.args[0]), self.forms.of(limit)
        # the absolute value of the lowest integer is itself
        if inner is None or reach is None or self.known[distance.args[0]][0] <= LOWEST:
            return None
        reach = reach.plus(Linear({}, -gap))
        if _of_row(inner) < 0:
            inner = inner.plus(inner, -2)
        return self._range(inner.plus(reach), Linear({}, 1).plus(reach, 2), (link,))

    def _pairs(self, compared: Sequence[Node]) -> Iterator[_Range]:
        """Pairs of x >= 0 and x <= limit as ranges; a comparison is in one pair at most."""
        at_least_0 = {}
        for link in compared:
            larger, gap = SIDES[link.op]
            left, right = self.forms.of(link.args[larger]), self.forms.of(link.args[1 - larger])
            if left is not None and right is not None:
                at_least_0[link] = left.plus(right, -1).plus(Linear({}, -gap))
        # the same pair for either order of the two links
        links = sorted(at_least_0, key=lambda link: -_of_row(at_least_0[link]))
        for pair in permutations(links, 2):
            if all(link in at_least_0 for link in pair):
                place, rest = (at_least_0[link] for link in pair)
                if any(rest.parts.get(n) != -c for n, c in place.parts.items() if n.op != "param"):
                    continue  # no number of places; soon said, since a long chain has many pairs
                found = self._range(place, place.plus(rest).plus(Linear({}, 1)), pair)
                if found is not None:
                    yield found
                    at_least_0 = {link: form for link, form in at_least_0.items() if link not in pair}

    def _range(self, place: Linear, count: Linear, of: tuple[Node, ...]) -> _Range | None:
        """A range whose length is a constant or a parameter of the launch."""
        given = [node for node in place.parts if node.op == "param"]
        whole = all(abs(c) == 1 for c in place.parts.values())
        whole &= all(strong(n.dtype) == torch.int32 for n in place.parts if n not in given)
        if not whole or given and [*count.parts] != given:
            return None
        if not count.parts:
            return _Range(place, count, of) if 0 < count.constant <= HIGHEST else None
        (node, factor), *more = count.parts.items()
        return _Range(place, count, of) if node.op == "param" and factor > 0 and not more else None

    # how to write ranges

    def _inside(self, group: Sequence[_Range]) -> Node:
        """The node for 0 <= place < count, for several places."""
        where = group[0].links[0].where
        places = [self._sum(one) for one in group]
        farthest = reduce(lambda a, b: self._node("unsigned_max", a, b), places)
        return self.builder.node(
            "unsigned_lt", (farthest, self._count(group[0].count)), torch.bool, None, where
        )

    def _sum(self, one: _Range) -> Node:
        """The node for the place, with the row's terms first."""
        parts = sorted(one.place.parts.items(), key=lambda part: (not part[0].home <= ROW, -part[1]))
        of_row = [part for part in parts if part[0].home <= ROW]
        terms = [(self._whole(n), c) for n, c in parts]
        if one.place.constant:
            number = self.builder.const(abs(one.place.constant), torch.int32)
            terms.insert(len(of_row), (number, 1 if one.place.constant > 0 else -1))
        total, sign = terms[0]
        if sign < 0:
            total = self._node("neg", total)
        for node, sign in terms[1:]:
            total = self._node("add" if sign > 0 else "sub", total, node)
        return total

    def _count(self, count: Linear) -> Node:
        """How many numbers a range has: 0 if its end lies before its beginning."""
        if not count.parts:
            return self.builder.const(count.constant, torch.int32)
        ((node, factor),) = count.parts.items()
        given = self._whole(node)
        total = given if factor == 1 else self._node("mul", given, self.builder.const(factor, torch.int32))
        total = self._node("add", total, self.builder.const(count.constant, torch.int32))
        least = math.ceil((1 - count.constant) / factor)
        none = self.builder.node("lt", (given, self.builder.const(least, torch.int32)), torch.bool)
        return self._node("where", none, self.builder.const(0, torch.int32), total)

    def _whole(self, node: Node) -> Node:
        """A part of a sum, in 32 bits."""
        new = self.builder.copies[node]
        return new if new.dtype == torch.int32 else self._node(CAST, new)

    def _node(self, op: str, *args: Node) -> Node:
        return self.builder.node(op, args, torch.int32, None, args[-1].where)


def products_that_decide(graph: Graph) -> frozenset[Node]:
    """Products of floats, independent of the score, that decide a truth value or an integer.

    A fused multiply-add rounds once where torch rounds twice. With it, `q_idx * 0.01 + kv_idx * 0.1 > 0.6`
    may be true where torch gives false. A product that is only compared is never fused, and a half-precision
    product is rounded by a cast.
    """
    decides: set[Node] = set()
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if not (_jumps(node) or node in decides):
            continue
        decides.update(node.args)
        if node.op not in COMPARISONS:
            found.update(filter(_may_be_fused, node.args))
    return frozenset(found)


def _jumps(node: Node) -> bool:
    """May the last digit of an argument decide the result?"""
    if node.op == CAST:
        return not strong(node.dtype).is_floating_point
    return node.op in OPS and OPS[node.op].jumps


def _may_be_fused(node: Node) -> bool:
    dtype = strong(node.dtype)
    if node.op != "mul" or not dtype.is_floating_point or dtype in HALF:
        return False
    exact = any(a.is_const and is_power_of_two(a.value) for a in node.args)
    return not ({"score", "grad"} & node.home or exact)
