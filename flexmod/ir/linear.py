"""Linear forms of integer nodes, and the kind of each node.

        kind            reads
        program         b and h at most
        row             q_idx too
        column          kv_idx too
        diagonal        q_idx and kv_idx, only through their difference
        mixed           anything else

A Forms object finds both for the nodes of one graph.

`Sources` makes the nodes that a mask's terms evaluate: sums of its nodes, and functions of the difference.

`serves` decides whether a mask's bounds stay as tight when its numbers become parameters of the kernels:
terms are evaluated, parameters included, but rules use a constant's sign and size, and split products with
it. For a parameter they have its bounds at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from flexmod.ir import bounds
from flexmod.ir.graph import UNIFORM, Graph, GraphBuilder, Node, computed, home_of, rebuild
from flexmod.ir.ops import CAST, COMPARISONS, number, promote, strong

INTEGERS = (torch.int32, torch.int64)
AND, OR = ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or")
CONVEX, CONCAVE = frozenset({"convex"}), frozenset({"concave"})


@dataclass(frozen=True)
class Linear:
    """constant + the sum of coefficient * node, in exact integers: no part wraps."""

    parts: Mapping[Node, int] = field(default_factory=dict)
    constant: int = 0

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        parts = dict(self.parts)
        for node, coefficient in other.parts.items():
            parts[node] = parts.get(node, 0) + factor * coefficient
        kept = {n: c for n, c in parts.items() if c}
        return Linear(kept, self.constant + factor * other.constant)

    def of(self, name: str) -> int:
        """The coefficient of a position."""
        return sum(c for n, c in self.parts.items() if n.is_input(name))

    def between(self, known: Mapping[Node, bounds.Bounds]) -> bounds.Bounds:
        """Bounds of the sum, from its nodes' bounds."""
        total: bounds.Bounds = (self.constant, self.constant)
        for node, coefficient in self.parts.items():
            total = bounds.add(total, bounds.mul(known[node], (coefficient, coefficient)))
        return total

    @property
    def others(self) -> list[Node]:
        """The nodes that are not q_idx or kv_idx themselves."""
        return [n for n in self.parts if not (n.is_input("q_idx") or n.is_input("kv_idx"))]


class Forms:
    """The linear forms and the kinds of a graph's nodes.

    `known` are the nodes' bounds (`integers.integer_bounds`, may_wrap). A form splits arithmetic only if the
    bounds prove that it does not wrap.
    """

    def __init__(self, known: Mapping[Node, bounds.Bounds]) -> None:
        self.known = known
        self._forms: dict[Node, Linear | None] = {}
        self._diagonal: dict[Node, bool] = {}
        self._shapes: dict[Node, frozenset[str]] = {}

    def of(self, node: Node) -> Linear | None:
        """The linear form of an integer node; None for any other node."""
        return computed(node, self._forms, self._form)

    def _form(self, node: Node) -> Linear | None:
        if node.is_const and type(node.value) is int:
            return Linear({}, node.value)
        if strong(node.dtype) not in INTEGERS:
            return None
        if math.isfinite(self.known[node][0]) and math.isfinite(self.known[node][1]):
            forms = [self._argument(a, strong(node.dtype)) for a in node.args]
            if node.op in ("add", "sub", "mul", "neg", CAST) and all(f is not None for f in forms):
                taken = taken_apart(node.op, forms)  # type: ignore[arg-type]
                if taken is not None:
                    return taken
        return Linear({node: 1})

    def _argument(self, node: Node, dtype: torch.dtype) -> Linear | None:
        """The form of an argument after a cast to a dtype; a number beyond an integer dtype wraps."""
        if node.is_const and type(node.value) is int and dtype in INTEGERS:
            return Linear({}, int(number(node.value, dtype).item()))
        return self.of(node)

    def difference(self, comparison: Node) -> Linear | None:
        """The left side minus the right side of a comparison of integers."""
        at = promote(*(a.dtype for a in comparison.args))
        left, right = (self._argument(a, at) for a in comparison.args)
        return None if left is None or right is None else left.plus(right, -1)

    def kind(self, node: Node) -> str:
        home = home_of(node)
        return home if home != "element" else "diagonal" if self.is_diagonal(node) else "mixed"

    def is_diagonal(self, node: Node) -> bool:
        """Does it read q_idx and kv_idx only through their difference, or not at all?"""
        return computed(node, self._diagonal, self._is_diagonal)

    def _is_diagonal(self, node: Node) -> bool:
        if node.home <= UNIFORM:
            return True
        form = self.of(node)
        if form is not None and node not in form.parts:
            return self._form_is_diagonal(form)
        if node.op in COMPARISONS:
            form = self.difference(node)
            if form is not None and self._form_is_diagonal(form):
                return True
        return bool(node.args) and all(map(self.is_diagonal, node.args))

    def _form_is_diagonal(self, form: Linear) -> bool:
        return form.of("q_idx") == -form.of("kv_idx") and all(map(self.is_diagonal, form.others))

    def shapes(self, node: Node) -> frozenset[str]:
        """The shape of the set where a truth value of one kind (row, column, diagonal) is True.

        "convex" if the set is an interval on its axis, "concave" if its complement is. Interval arithmetic is
        exact for both: intervals that meet in pairs have a common element.
        """
        return computed(node, self._shapes, self._shapes_of)

    def _shapes_of(self, node: Node) -> frozenset[str]:
        if node.home <= UNIFORM:
            return CONVEX | CONCAVE
        if node.op in COMPARISONS:
            return self._comparison(node)
        if not is_logic(node):
            return frozenset()
        inner = [self.shapes(a) for a in node.args]
        if node.op in AND:
            return inner[0] & inner[1] & CONVEX
        if node.op in OR:
            return inner[0] & inner[1] & CONCAVE
        if node.op in ("bitwise_not", "logical_not"):
            return frozenset({"convex", "concave"} - inner[0]) if len(inner[0]) == 1 else inner[0]
        return frozenset()

    def _comparison(self, node: Node) -> frozenset[str]:
        difference = self.difference(node)
        if difference is None:
            return frozenset()
        others = [n for n in difference.others if not n.home <= UNIFORM]
        steps = {abs(c) for c in map(difference.of, ("q_idx", "kv_idx")) if c}
        if not others and len(steps) == 1:
            if node.op not in ("eq", "ne"):
                return CONVEX | CONCAVE
            return frozenset() if steps != {1} else CONVEX if node.op == "eq" else CONCAVE
        return self._distance(node) if len(others) == 1 and not steps else frozenset()

    def _distance(self, node: Node) -> frozenset[str]:
        """The shape of |x| <= n and similar comparisons."""
        left, right = node.args
        for one, other, inside in ((left, right, ("le", "lt")), (right, left, ("ge", "gt"))):
            inner = self.of(one.args[0]) if one.op == "abs" else None
            if inner is None or not other.home <= UNIFORM or node.op in ("eq", "ne"):
                continue
            if {abs(inner.of("q_idx")), abs(inner.of("kv_idx"))} <= {0, 1} and all(
                n.home <= UNIFORM for n in inner.others
            ):
                return CONVEX if node.op in inside else CONCAVE
        return frozenset()


def taken_apart(op: str, forms: list[Linear]) -> Linear | None:
    """The form of a sum, a difference, a negation, a cast, or a product with a number."""
    if op == "mul":
        for one, other in (forms, forms[::-1]):
            if not one.parts:
                return Linear().plus(other, one.constant)
        return None
    if op == "neg":
        return Linear().plus(forms[0], -1)
    return forms[0].plus(forms[1], -1 if op == "sub" else 1) if len(forms) == 2 else forms[0]


def regroup(graph: Graph, forms: Forms, builder: GraphBuilder) -> Graph:
    """Sorts chains of `and` and of `or` by kind. Links of one kind then form one truth value along their
    axis, with exact bounds."""

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        chain = next((names for names in (AND, OR) if node.op in names and is_logic(node)), None)
        if chain is None:
            return None
        groups: dict[str, list[Node]] = {}
        for link in links(node, chain):
            groups.setdefault(forms.kind(link), []).append(builder.copies[link])
        ends = [joined(builder, chain[0], group) for kind, group in groups.items() if kind != "mixed"]
        return joined(builder, chain[0], [*ends, *groups.get("mixed", [])])

    return rebuild(graph, change, builder)


def is_logic(node: Node) -> bool:
    return strong(node.dtype) == torch.bool and all(strong(a.dtype) == torch.bool for a in node.args)


def links(node: Node, chain: tuple[str, ...]) -> list[Node]:
    """The links of a chain of these operations; the node alone if it is no chain."""
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op in chain and is_logic(one):
            stack.extend(reversed(one.args))
        else:
            found.append(one)
    return found


def joined(builder: GraphBuilder, op: str, nodes: list[Node]) -> Node:
    result = nodes[0]
    for node in nodes[1:]:
        result = builder.node(op, (result, node), torch.bool, None, node.where)
    return result


class Sources:
    """Makes further nodes for a graph, in its builder."""

    def __init__(self, graph: Graph, forms: Forms, builder: GraphBuilder) -> None:
        self.graph = graph
        self.forms = forms
        self.builder = builder
        self._along: dict[Node, Node] = {}

    def along_diagonal(self, node: Node) -> Node:
        """Rewrites a diagonal node into a function of the difference; q_idx stands for the difference."""
        return computed(node, self._along, self._made_along)

    def _made_along(self, node: Node) -> Node:
        if node.home <= UNIFORM or not self.forms.is_diagonal(node):
            return node
        form = self.forms.of(node)
        if form is not None and node not in form.parts:
            return self._cast(self._sum_along(form), strong(node.dtype))
        if node.op in COMPARISONS and not all(map(self.forms.is_diagonal, node.args)):
            form = self.forms.difference(node)
            assert form is not None
            sides = self._sum_along(form), self.builder.const(0)
            return self.builder.node(node.op, sides, torch.bool, None, node.where)
        return self.builder.keep(node, tuple(map(self.along_diagonal, node.args)))

    def _sum_along(self, form: Linear) -> Node:
        index = next(n for n in self.graph.nodes if n.is_input("q_idx"))
        along = Linear({index: form.of("q_idx")}, form.constant)
        for node in form.others:
            along = along.plus(Linear({self.along_diagonal(node): form.parts[node]}))
        return self.sum(along, form)

    def sum(self, form: Linear, bounded: Linear | None = None) -> Node:
        """Writes a linear form as one node, which does not wrap.

        `bounded`: the same form, of nodes with bounds, if the nodes of `form` are new.
        """
        dtype = self._width(bounded or form)
        total: Node | None = None
        for node, coefficient in form.parts.items():
            part = self._cast(node, dtype)
            if coefficient != 1:
                part = self.builder.node("mul", (part, self.builder.const(coefficient, dtype)), dtype)
            total = part if total is None else self.builder.node("add", (total, part), dtype)
        constant = self.builder.const(form.constant, dtype)
        if total is None:
            return constant
        return self.builder.node("add", (total, constant), dtype) if form.constant else total

    def _width(self, form: Linear) -> torch.dtype:
        """int32 if it holds all partial sums, in any order; else int64."""
        sizes = [abs(c) * max(map(abs, self.forms.known[n])) for n, c in form.parts.items()]
        return torch.int32 if sum(sizes) + abs(form.constant) < 2**31 else torch.int64

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if strong(node.dtype) == dtype else self.builder.node(CAST, (node,), dtype)


# Integer operations whose rules stay exact when an argument depends on parameters; so do all comparisons.
KEEP_BOUNDS = frozenset({"add", "sub", "neg", "minimum", "maximum"})


def serves(graph: Graph, by_rules: Iterable[Node]) -> bool:
    """Are the bounds as tight with the graph's parameters as with its numbers?

    `by_rules`: the nodes with bounds by a rule, and not from a term or from b and h only.
    """
    uniform, opaque, products = _made_of_parameters(graph)
    for node in by_rules:
        if any(a in uniform for a in node.args) and not _keeps_bounds(node):
            return False
        hidden = [a for a in node.args if a in opaque]
        if not hidden:
            continue
        if node.op not in COMPARISONS or any(home_of(a) == "element" for a in node.args):
            return False
        if len(hidden) > 1 and not products.isdisjoint(hidden):  # with numbers, they might form a difference
            return False
    return True


def _keeps_bounds(node: Node) -> bool:
    if node.op in COMPARISONS:
        return True
    return node.op in KEEP_BOUNDS and not any(strong(a.dtype).is_floating_point for a in node.args)


def _made_of_parameters(graph: Graph) -> tuple[set[Node], set[Node], set[Node]]:
    """Three sets: nodes of b, h and parameters only; nodes that hide a parameter from the rules; and the
    hiding nodes with products."""
    uniform: set[Node] = set()
    opaque: set[Node] = set()
    products: set[Node] = set()
    for node in graph.nodes:
        given = any(a in uniform for a in node.args)
        if node.op == "param" or given and node.home <= UNIFORM:
            uniform.add(node)
        elif strong(node.dtype) != torch.bool:
            if any(a in opaque for a in node.args) or given and not _keeps_bounds(node):
                opaque.add(node)
            if any(a in products for a in node.args) or given and node.op == "mul":
                products.add(node)
    return uniform, opaque, products
