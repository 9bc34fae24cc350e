"""Turns a mask's graph into a graph that decides whether a whole tile is EMPTY, FULL or undecided.

A tile is a rectangle of positions, q_low..q_high by kv_low..kv_high (both ends included), in one b and h.
`analyze` makes a graph of two truth values of a tile:

- `certain`: the mask keeps every element. The tile is FULL.
- `possible`: the mask may keep some element. If not, the tile is EMPTY.

Both answers are proven, since the rules bound exact integers and monotone roundings. If the rules know
nothing of a value, the tile is possible and not certain. The graph is evaluated or written as Triton like any
other.

A node that reads positions of one axis only is *evaluated* at every position, not bounded by rules. Its
lowest and highest value over a tile's positions become inputs of the graph: a BoundsTerm. So captured tensors
are exact, with any index. In the same way, a truth value of q_idx - kv_idx alone is evaluated at every
difference. Where arithmetic on a tile's ends gives the same bounds, the graph needs no term: the graphs of a
causal mask and of a window have none.

Rules bound the nodes that read both rows and columns. There, `q_idx - kv_idx` is one linear form, not two
separate ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flexmod.ir import bounds
from flexmod.ir.bounds import Bounds
from flexmod.ir.ends import End, brought_to, clamp_to_dtype, dtype_limits, without_nan
from flexmod.ir.graph import POSITIONS, UNIFORM, Graph, GraphBuilder, Node
from flexmod.ir.integers import Numbers, integer_bounds, needs_int64
from flexmod.ir.linear import Forms, Linear, Sources, regroup, serves
from flexmod.ir.ops import CAST, COMPARISONS, OPS, number, strong
from flexmod.ir.passes import Extents, Places, optimize, simplify

# Arithmetic on unknown int64 values is bounded if they are below this: then no sum of two, and no product
# with an index, leaves int64.
MODERATE = 2**40


@dataclass(frozen=True)
class BoundsTerm:
    """A value whose bounds over a tile are inputs of the graph of bounds.

        axis        graph reads         lowest and highest over
        row         b, h, q_idx         q_low..q_high
        column      b, h, kv_idx        kv_low..kv_high
        diagonal    b, h, q_idx         q_low - kv_high..q_high - kv_low

    On a diagonal, q_idx stands for q_idx - kv_idx, and the value is bool. `low` and `high` are the names of
    the two inputs. For a truth value, they mean that all elements are True, and that any element is.
    """

    axis: str
    graph: Graph
    low: str
    high: str

    @property
    def dtype(self) -> torch.dtype:
        return strong(self.graph.result.dtype)


@dataclass(frozen=True)
class Analysis:
    """`bounds` returns (certain, possible) and has the mask's captures, under the same numbers.

    `serves`: the bounds are as tight with parameters as with their numbers as constants.
    """

    bounds: Graph
    terms: tuple[BoundsTerm, ...]
    serves: bool = True

    def of_axis(self, axis: str) -> tuple[BoundsTerm, ...]:
        return tuple(t for t in self.terms if t.axis == axis)


@lru_cache(1024)
def analyze(graph: Graph, extents: Extents, numbers: Places = ()) -> Analysis:
    """The bounds of a mask whose positions run below `extents`, (B, H, Q_LEN, KV_LEN).

    `passes.fitted` must have widened `graph` for these extents and for the `numbers` of its parameters, so
    that arithmetic on positions does not wrap.
    """
    given = dict(numbers)
    return _Analyzer(optimize(graph), _rounded(graph, extents, given), given).analyze()


def _rounded(graph: Graph, extents: Extents, numbers: Numbers) -> dict[str, int]:
    """Rounds extents up as far as the graph holds, so that similar lengths share one text.

    They are 2 at least: a position that can only be 0 would be folded away.
    """
    wide = {name: 1 << max(1, (size - 1).bit_length()) for name, size in zip(POSITIONS, extents, strict=True)}
    return wide if not needs_int64(graph, wide, numbers) else dict(zip(POSITIONS, extents, strict=True))


class _Analyzer:
    def __init__(self, graph: Graph, extents: dict[str, int], numbers: Numbers) -> None:
        forms = Forms(integer_bounds(graph, extents, numbers, may_wrap=True))
        of_graph = GraphBuilder()
        self.graph = regroup(graph, forms, of_graph)
        self.known = integer_bounds(self.graph, extents, numbers, may_wrap=True)
        self.forms = Forms(self.known)
        self.extents = extents
        self.builder = GraphBuilder()
        self.sources = Sources(self.graph, self.forms, of_graph)
        self.terms: dict[tuple[str, Node], tuple[BoundsTerm, Bounds]] = {}
        self.found: dict[Node, Bounds] = {}

    def analyze(self) -> Analysis:
        for node in self._needed():
            self.found[node] = self._bounds(node)
        nodes = [self._node(end, torch.bool) for end in self._of(self.graph.result)]
        graph = simplify(self.graph.of(nodes, "bounds"))
        names = {n.value for n in graph.nodes if n.op == "input"}
        terms = (term for term, _ in self.terms.values())
        used = tuple(t for t in terms if {t.low, t.high} & names)
        by_rules = [n for n in self._needed() if self._plan(n) in ("rule", "linear", "load")]
        return Analysis(graph, used, serves(self.graph, by_rules))

    def _needed(self) -> list[Node]:
        """The nodes that need bounds, arguments first; nodes inside a term need none."""
        wanted = {self.graph.result}
        for node in reversed(self.graph.nodes):
            plan = self._plan(node) if node in wanted else ""
            if plan in ("rule", "load"):
                wanted.update(node.args)
            elif plan == "linear":
                wanted.update(self._form(node).others)
        return [n for n in self.graph.nodes if n in wanted]

    def _node(self, end: Any, dtype: torch.dtype) -> Node:
        return end.node if isinstance(end, End) else self.builder.const(number(end, dtype).item(), dtype)

    def _of(self, node: Node) -> Bounds:
        if node not in self.found and node.home <= UNIFORM:
            self.found[node] = self._bounds(node)
        return self.found[node]

    # how to bound a node

    def _plan(self, node: Node) -> str:
        """How to bound the node: "uniform", "term", "linear", "rule" or "load"."""
        if node.home <= UNIFORM:
            return "uniform"
        kind = self.forms.kind(node)
        if strong(node.dtype) == torch.bool and kind != "mixed":
            return "rule" if self.forms.shapes(node) else "term"
        form = self.forms.of(node)
        if form is not None and (node not in form.parts or node.op == "input"):
            positions = all(n.home <= UNIFORM for n in form.others)
            if positions or kind in ("mixed", "diagonal"):
                return "linear"
        if kind in ("row", "column"):
            return "term"
        return "load" if node.op == "load" else "rule"

    def _bounds(self, node: Node) -> Bounds:
        plan = self._plan(node)
        if plan == "uniform":
            end = self._uniform(node)
            return end, end
        if plan == "term":
            return self._term(self.forms.kind(node), node)
        if plan == "linear":
            return clamp_to_dtype(self.builder, self._linear(self._form(node)), strong(node.dtype))
        if plan == "load":
            return self._load(node)
        return self._rule(node)

    def _form(self, node: Node) -> Linear:
        form = self.forms.of(node)
        assert form is not None
        return form

    def _uniform(self, node: Node) -> Any:
        """A value that depends on b and h only, as a Python number if possible. It is exact, nan included."""
        if node.is_const and not isinstance(node.value, float):
            return node.value
        return End(self.builder, self.builder.copied(node), self._finite(node))

    def _finite(self, node: Node) -> Bounds | None:
        """A node's bounds over all positions, if known."""
        found = self.known[node]
        return found if all(map(math.isfinite, found)) else None

    def _position(self, name: str, dtype: torch.dtype) -> Bounds:
        span = (0, self.extents[name] - 1)
        short = name.removesuffix("_idx")
        low, high = (
            End(self.builder, self.builder.input(f"{short}_{end}", dtype), span) for end in ("low", "high")
        )
        return low, high

    # terms

    def _term(self, axis: str, node: Node) -> Bounds:
        if (axis, node) not in self.terms:
            value = self.sources.along_diagonal(node) if axis == "diagonal" else node
            name = f"{axis}{sum(a == axis for a, _ in self.terms)}"
            graph = self.graph.of([value], "term")
            term = BoundsTerm(axis, graph, f"{name}_low", f"{name}_high")
            span = self._finite(node)
            inputs = [self.builder.input(end, term.dtype) for end in (term.low, term.high)]
            low, high = (End(self.builder, one, span) for one in inputs)
            self.terms[axis, node] = term, without_nan(self.builder, (low, high), term.dtype)
        return self.terms[axis, node][1]

    # linear forms

    def _linear(self, form: Linear) -> Bounds:
        """Bounds the sum; rows, columns and the remainder are each bounded as a whole."""
        parts: list[tuple[Bounds, int]] = []
        for name, kind in (("q_idx", "row"), ("kv_idx", "column")):
            along = [n for n in form.others if self.forms.kind(n) == kind]
            index = next((n for n in form.parts if n.is_input(name)), None)
            if index is not None and not along:
                parts.append((self._position(name, strong(index.dtype)), form.parts[index]))
            elif len(along) == 1 and index is None:
                parts.append((self._of(along[0]), form.parts[along[0]]))
            elif along:
                both = [*along, index] if index is not None else along
                part = Linear({n: form.parts[n] for n in both})
                whole = self.sources.sum(part)
                self.known[whole] = part.between(self.known)
                parts.append((self._term(kind, whole), 1))
        rest = [n for n in form.others if self.forms.kind(n) not in ("row", "column")]
        parts += [(self._of(n), form.parts[n]) for n in rest]
        parts.sort(key=lambda part: part[1] < 0)  # subtracted parts come last
        total: Bounds | None = None
        for one, coefficient in parts:
            scaled = bounds.mul(one, (abs(coefficient),) * 2)
            if total is None:
                total = scaled if coefficient > 0 else bounds.neg(scaled)
            else:
                total = (bounds.add if coefficient > 0 else bounds.sub)(total, scaled)
        constant = form.constant
        if total is None:
            return constant, constant
        return bounds.add(total, (constant,) * 2) if constant >= 0 else bounds.sub(total, (-constant,) * 2)

    # rules

    def _rule(self, node: Node) -> Bounds:
        dtype = strong(node.dtype)
        if node.op == CAST:
            return brought_to(self.builder, self._of(node.args[0]), node.args[0], dtype)
        row = OPS.get(node.op)
        floats = dtype.is_floating_point or any(strong(a.dtype).is_floating_point for a in node.args)
        interval = row.interval if row else None
        rule = bounds.rounded_rule(interval) if floats else interval
        if row is None or rule is None:
            return dtype_limits(dtype)
        arguments = [brought_to(self.builder, self._of(a), a, d) for a, d in row.arguments(node)]
        squares = node.op == "mul" and node.args[0] is node.args[1] and dtype != torch.bool
        sizes = [bounds.absolute(a) for a in arguments] if squares else arguments
        if rule in bounds.ARITHMETIC and not floats:
            return self._arithmetic(rule, sizes, dtype)
        found = clamp_to_dtype(self.builder, rule(*sizes), dtype)
        if floats and (squares or rule in bounds.KEEP_NAN):
            for low, high in arguments:
                may_be_nan = bounds.no(bounds.is_known(low) | bounds.is_known(high))
                found = bounds.choose_bounds(may_be_nan, bounds.UNKNOWN, found)
        difference = self._difference(node)
        if difference is None:
            return found
        closer = rule(clamp_to_dtype(self.builder, self._linear(difference), torch.int64), (0, 0))
        return found[0] | closer[0], found[1] & closer[1]

    def _difference(self, node: Node) -> Linear | None:
        """The difference of a comparison's sides, if it cancels something that they share."""
        left, right = map(self.forms.of, node.args) if node.op in COMPARISONS else (None, None)
        if left is None or right is None:
            return None
        axes = [{self.forms.kind(n) for n in side.parts} & {"row", "column"} for side in (left, right)]
        if not axes[0] & axes[1] and not left.parts.keys() & right.parts.keys():
            return None
        difference = left.plus(right, -1)
        known = (n in self.found or n.op == "input" or n.home <= UNIFORM for n in difference.parts)
        return difference if all(known) else None

    def _arithmetic(self, rule: Any, arguments: Sequence[Bounds], dtype: torch.dtype) -> Bounds:
        """Applies a rule to integers; int64 values may be too large for it."""
        moderate: Any = True
        taken = []
        for low, high in arguments:
            least, most = bounds.known_ends((low, high))
            if least < -MODERATE or most > MODERATE:
                inside = (low >= -MODERATE) & (high <= MODERATE)
                moderate = moderate & inside
                low, high = (
                    end.within(-MODERATE, MODERATE) if isinstance(end, End) else end
                    for end in bounds.choose_bounds(inside, (low, high), (0, 0))
                )
            taken.append((low, high))
        found = clamp_to_dtype(self.builder, rule(*taken), dtype)
        return bounds.choose_bounds(moderate, found, dtype_limits(dtype))

    def _load(self, node: Node) -> Bounds:
        """Bounds a load whose indices read rows and columns: known if each index has one value in a tile."""
        at: Any = True
        indices = []
        for argument in node.args:
            low, high = self._of(argument)
            at = at & (low == high)
            indices.append(low)
        dtype = strong(node.dtype)
        direct = [f for a in node.args if (f := self.forms.of(a)) and (f.of("q_idx") or f.of("kv_idx"))]
        if direct or at is False:  # an index that changes with every position never has one value in a tile
            return dtype_limits(dtype)
        chosen = [
            self._node(bounds.choose(at, i, 0), strong(a.dtype))
            for i, a in zip(indices, node.args, strict=True)
        ]
        loaded = self.builder.node("load", chosen, node.dtype, node.value, node.where)
        end = End(self.builder, loaded)
        return bounds.choose_bounds(at, without_nan(self.builder, (end, end), dtype), dtype_limits(dtype))
