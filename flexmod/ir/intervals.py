"""Graph -> Graph of bounds: is a mask EMPTY, FULL or undecided on a whole tile?

A tile is a rectangle of positions, q_low..q_high by kv_low..kv_high (both ends belong to it), in one b and h.
`analyze` makes a graph of two truth values of it: `certain`, the mask keeps every element, and `possible`, it
may keep some. A tile that is not possible is EMPTY, one that is certain is FULL; either is proven, for the
rules bound exact integers and monotone roundings, and whatever they know nothing of is possible and not
certain. The graph is evaluated or written as Triton like any other.

What reads positions of one axis alone is not bounded by rules but *evaluated*, at every position, and its
lowest and highest value over a tile's positions are inputs of the graph: a Term. So captured tensors are
exact, whatever they are indexed with. The same goes for a truth value of q_idx - kv_idx alone, evaluated at
every difference. Terms that arithmetic on the ends of a tile says as well are not made: the graph of a causal
mask, or of a window, has none.

Rules come in where rows and columns meet. `q_idx - kv_idx` is one linear form there, not two loose ends.
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
from flexmod.ir.ends import COMPARISONS, End, dtype_limits
from flexmod.ir.graph import POSITIONS, UNIFORM, Builder, Graph, Home, Node, keep
from flexmod.ir.linear import INTEGERS, Forms, Linear, regroup
from flexmod.ir.ops import CAST, OPS, number, strong
from flexmod.ir.passes import Extents, integer_bounds, needs_int64, optimize

# Arithmetic on int64 values of which nothing is known is bounded where they are below this: no sum of two and
# no product with an index then leaves int64.
MODERATE = 2**40
# Of an argument without ends, which may be nan, their rules would make one that has an end.
KEEP_NAN = frozenset({"minimum", "maximum", "abs", "sign"})
ARITHMETIC = frozenset({"add", "sub", "mul", "neg", "abs"})


@dataclass(frozen=True)
class Term:
    """A value whose bounds over a tile are inputs of the graph of bounds.

    axis    graph reads                        lowest and highest over
    row     b, h, q_idx                        q_low..q_high
    column  b, h, kv_idx                       kv_low..kv_high
    diagonal  b, h and q_idx, which stands for q_idx - kv_idx; bool
                                               q_low - kv_high..q_high - kv_low
    `low` and `high` are the names of the two inputs; of a truth value they say that all are True, and that
    any is.
    """

    axis: str
    graph: Graph
    low: str
    high: str

    @property
    def reads(self) -> Home:
        return self.graph.reads

    @property
    def dtype(self) -> torch.dtype:
        return strong(self.graph.result.dtype)


@dataclass(frozen=True)
class Analysis:
    """`bounds` has the results (certain, possible) and the captures of the mask, under the same numbers."""

    bounds: Graph
    terms: tuple[Term, ...]

    def of_axis(self, axis: str) -> tuple[Term, ...]:
        return tuple(t for t in self.terms if t.axis == axis)


@lru_cache(1024)
def analyze(graph: Graph, extents: Extents) -> Analysis:
    """The bounds of a mask whose positions run below `extents`, (B, H, Q_LEN, KV_LEN).

    `graph` is as wide as these ask for (`passes.fitted`): arithmetic on positions does not wrap.
    """
    return _Analyzer(optimize(graph), _rounded(graph, extents)).analyze()


def _rounded(graph: Graph, extents: Extents) -> dict[str, int]:
    """Extents up to which the graph serves too, so that lengths that are alike have one text."""
    wide = {name: 1 << (size - 1).bit_length() for name, size in zip(POSITIONS, extents, strict=True)}
    return wide if not needs_int64(graph, wide) else dict(zip(POSITIONS, extents, strict=True))


class _Analyzer:
    def __init__(self, graph: Graph, extents: dict[str, int]) -> None:
        forms = Forms(integer_bounds(graph, extents, may_wrap=True))
        self.graph = regroup(graph, forms)
        self.known = integer_bounds(self.graph, extents, may_wrap=True)
        self.forms = Forms(self.known)
        self.extents = extents
        self.builder = Builder()
        self.source = Builder()  # of what terms evaluate
        self.source.adopt(self.graph.nodes)
        self.terms: dict[tuple[str, Node], tuple[Term, Bounds]] = {}
        self.found: dict[Node, Bounds] = {}
        self.kept: dict[Node, Node] = {}
        self.on_diagonal: dict[Node, Node] = {}

    def analyze(self) -> Analysis:
        for node in self._needed():
            self.found[node] = self._bounds(node)
        nodes = [self._node(end) for end in self._of(self.graph.result)]
        graph = Graph("bounds", tuple(nodes), self.graph.captures)
        names = {n.value for n in graph.nodes if n.op == "input"}
        terms = (term for term, _ in self.terms.values())
        return Analysis(graph, tuple(t for t in terms if {t.low, t.high} & names))

    def _needed(self) -> list[Node]:
        """The nodes whose bounds rules make, arguments first: what stands in a term is not asked for."""
        wanted = {self.graph.result}
        for node in reversed(self.graph.nodes):
            plan = self._plan(node) if node in wanted else ""
            if plan in ("rule", "load"):
                wanted.update(node.args)
            elif plan == "linear":
                wanted.update(self._form(node).others)
        return [n for n in self.graph.nodes if n in wanted]

    def _node(self, end: Any) -> Node:
        return end.node if isinstance(end, End) else self.builder.const(bool(end), torch.bool)

    def _of(self, node: Node) -> Bounds:
        return self.found[node]

    # how a node's bounds come about

    def _plan(self, node: Node) -> str:
        """ "uniform", "term", "linear", "rule" or "load"."""
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
            return self._held(self._linear(self._form(node)), strong(node.dtype))
        if plan == "load":
            return self._load(node)
        return self._rule(node)

    def _form(self, node: Node) -> Linear:
        form = self.forms.of(node)
        assert form is not None
        return form

    def _uniform(self, node: Node) -> Any:
        """What b and h decide, a Python number where there is one."""
        if node.is_const and not isinstance(node.value, float):
            return node.value
        kept = self._keep(node)
        low, high = self.known[node]
        finite = math.isfinite(low) and math.isfinite(high)
        end = End(self.builder, kept, (low, high) if finite else None)
        return self._numbers_only((end, end), end.dtype)[0] if node.is_const else end

    def _keep(self, node: Node) -> Node:
        """The node in the graph of bounds."""
        if node not in self.kept:
            self.kept[node] = keep(self.builder, node, tuple(map(self._keep, node.args)))
        return self.kept[node]

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
            graph = Graph("term", (self._along(node) if axis == "diagonal" else node,), self.graph.captures)
            name = f"{axis}{sum(a == axis for a, _ in self.terms)}"
            term = Term(axis, graph, f"{name}_low", f"{name}_high")
            span = self.known.get(node, bounds.UNKNOWN)
            low, high = (
                End(
                    self.builder,
                    self.builder.input(name, term.dtype),
                    span if all(map(math.isfinite, span)) else None,
                )
                for name in (term.low, term.high)
            )
            self.terms[axis, node] = term, self._numbers_only((low, high), term.dtype)
        return self.terms[axis, node][1]

    def _along(self, node: Node) -> Node:
        """A node of the kind diagonal as a function of the difference, which q_idx stands for."""
        if node.home <= UNIFORM:
            return node
        if node not in self.on_diagonal:
            self.on_diagonal[node] = self._made_along(node)
        return self.on_diagonal[node]

    def _made_along(self, node: Node) -> Node:
        form = self.forms.of(node)
        if form is not None and node not in form.parts:
            return self._cast(self._sum_along(form), strong(node.dtype))
        if node.op in COMPARISONS and not all(map(self.forms.is_diagonal, node.args)):
            form = self.forms.difference(node)
            assert form is not None
            zero = self.source.const(0)
            return self.source.node(node.op, (self._sum_along(form), zero), torch.bool, None, node.where)
        return keep(self.source, node, tuple(map(self._along, node.args)))

    def _sum_along(self, form: Linear) -> Node:
        index = next(n for n in self.graph.nodes if n.op == "input" and n.value == "q_idx")
        along = Linear({index: form.of("q_idx")}, form.constant)
        for node in form.others:
            along = along.plus(Linear({self._along(node): form.parts[node]}))
        return self._sum(along, self._width(form))

    def _width(self, form: Linear) -> torch.dtype:
        """int32 where that holds all parts of the sum, in any order."""
        sizes = [abs(c) * max(map(abs, self.known[n])) for n, c in form.parts.items()]
        return torch.int32 if sum(sizes) + abs(form.constant) < 2**31 else torch.int64

    def _sum(self, form: Linear, dtype: torch.dtype) -> Node:
        """A linear form as nodes."""
        total: Node | None = None
        for node, coefficient in form.parts.items():
            part = self._cast(node, dtype)
            if coefficient != 1:
                part = self.source.node("mul", (part, self.source.const(coefficient, dtype)), dtype)
            total = part if total is None else self.source.node("add", (total, part), dtype)
        constant = self.source.const(form.constant, dtype)
        if total is None:
            return constant
        return self.source.node("add", (total, constant), dtype) if form.constant else total

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if strong(node.dtype) == dtype else self.source.node(CAST, (node,), dtype, dtype)

    # linear forms

    def _linear(self, form: Linear) -> Bounds:
        """The bounds of the sum; rows, columns and the rest are bounded each as a whole."""
        parts: list[tuple[Bounds, int]] = []
        for name in ("q_idx", "kv_idx"):
            kind = "row" if name == "q_idx" else "column"
            along = [n for n in form.others if self.forms.kind(n) == kind]
            index = next((n for n in form.parts if n.op == "input" and n.value == name), None)
            if index is not None and not along:
                parts.append((self._position(name, strong(index.dtype)), form.parts[index]))
            elif len(along) == 1 and index is None:
                parts.append((self._of(along[0]), form.parts[along[0]]))
            elif along:
                both = [*along, index] if index is not None else along
                part = Linear({n: form.parts[n] for n in both})
                whole = self._sum(part, self._width(part))
                self.known[whole] = part.between(self.known)
                parts.append((self._term(kind, whole), 1))
        rest = [n for n in form.others if self.forms.kind(n) not in ("row", "column")]
        parts += [(self._of(n), form.parts[n]) for n in rest]
        parts.sort(key=lambda part: part[1] < 0)  # what is subtracted comes last
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
            return self._cast_bounds(self._of(node.args[0]), node.args[0], dtype)
        row = OPS.get(node.op)
        floats = dtype.is_floating_point or any(strong(a.dtype).is_floating_point for a in node.args)
        if row is None or row.interval is None or (floats and row.interval not in bounds.ROUNDED):
            return dtype_limits(dtype)
        at = row.argument_dtypes([a.dtype for a in node.args], node.dtype)
        arguments = [
            self._cast_bounds(self._of(a), a, row.number_dtype(d) if a.is_const else d)
            for a, d in zip(node.args, at, strict=True)
        ]
        if node.op == "mul" and node.args[0] is node.args[1]:
            arguments = [bounds.absolute(a) for a in arguments]
        if node.op in ARITHMETIC and not floats:
            return self._arithmetic(row.interval, arguments, dtype)
        found = self._held(row.interval(*arguments), dtype)
        if floats and node.op in KEEP_NAN:
            for low, high in arguments:
                may_be_nan = bounds.no(bounds.is_known(low) | bounds.is_known(high))
                found = bounds.choose_bounds(may_be_nan, bounds.UNKNOWN, found)
        difference = self._difference(node)
        if difference is None:
            return found
        closer = row.interval(self._held(self._linear(difference), torch.int64), (0, 0))
        return found[0] | closer[0], found[1] & closer[1]

    def _difference(self, node: Node) -> Linear | None:
        """That of a comparison's sides, where they share something that it loses."""
        left, right = map(self.forms.of, node.args) if node.op in COMPARISONS else (None, None)
        if left is None or right is None:
            return None
        axes = [{self.forms.kind(n) for n in side.parts} & {"row", "column"} for side in (left, right)]
        if not axes[0] & axes[1] and not left.parts.keys() & right.parts.keys():
            return None
        difference = left.plus(right, -1)
        return difference if all(n in self.found or n.op == "input" for n in difference.parts) else None

    def _arithmetic(self, rule: Any, arguments: Sequence[Bounds], dtype: torch.dtype) -> Bounds:
        """A rule on integers, of which those of int64 may be too large for it."""
        moderate: Any = True
        taken = []
        for low, high in arguments:
            if not _is_moderate((low, high)):
                inside = (low >= -MODERATE) & (high <= MODERATE)
                moderate = moderate & inside
                low, high = (
                    end.within(-MODERATE, MODERATE) if isinstance(end, End) else end
                    for end in bounds.choose_bounds(inside, (low, high), (0, 0))
                )
            taken.append((low, high))
        found = self._held(rule(*taken), dtype)
        return bounds.choose_bounds(moderate, found, dtype_limits(dtype))

    def _load(self, node: Node) -> Bounds:
        """An element whose indices read rows and columns: known where each index has one value in a tile."""
        at: Any = True
        indices = []
        for argument in node.args:
            low, high = self._of(argument)
            at = at & (low == high)
            indices.append(low)
        dtype = strong(node.dtype)
        direct = [f for a in node.args if (f := self.forms.of(a)) and (f.of("q_idx") or f.of("kv_idx"))]
        if direct or at is False:  # an index that moves with every position has one value in no tile
            return dtype_limits(dtype)
        chosen = [self._index(bounds.choose(at, i, 0), a) for i, a in zip(indices, node.args, strict=True)]
        loaded = self.builder.node("load", chosen, node.dtype, node.value, node.where)
        end = End(self.builder, loaded)
        return bounds.choose_bounds(at, self._numbers_only((end, end), dtype), dtype_limits(dtype))

    def _index(self, end: Any, argument: Node) -> Node:
        return end.node if isinstance(end, End) else self.builder.const(end, strong(argument.dtype))

    def _cast_bounds(self, found: Bounds, source: Node, target: torch.dtype) -> Bounds:
        """The bounds of a value that is brought to another dtype."""
        dtype = strong(source.dtype)
        if source.is_const:
            return self._constant(source.value, target)
        if target == dtype:
            return found
        if target == torch.bool:
            return bounds.ne(found, (0, 0))
        if dtype == torch.bool:
            found = _ends(lambda end: end.cast(torch.int32) if isinstance(end, End) else int(end), found)
        if target.is_floating_point:
            ends = _ends(lambda end: self._as_float(end, target), found)
            return self._numbers_only(ends, target)
        if dtype.is_floating_point:
            return self._truncated(found, target)
        return self._held(found, target)

    def _constant(self, value: Any, target: torch.dtype) -> Bounds:
        rounded = number(value, target).item()
        if not target.is_floating_point:
            return rounded, rounded
        if not math.isfinite(rounded):
            return bounds.UNKNOWN if math.isnan(rounded) else (rounded, rounded)
        end = End(self.builder, self.builder.const(rounded, target), (rounded, rounded))
        return end, end

    def _as_float(self, end: Any, target: torch.dtype) -> Any:
        if isinstance(end, End):
            return end.cast(target)
        return end if bounds.is_endless(end) else self._constant(end, target)[0]

    def _truncated(self, found: Bounds, target: torch.dtype) -> Bounds:
        """A floating-point number as an integer, where the dtype has it; elsewhere it is the chip's own."""
        limits = dtype_limits(target)
        if any(map(bounds.is_number, found)):
            return limits
        least, most = max(limits[0], -(2**31)), min(limits[1], 2**30)
        inside = (found[0] >= float(least)) & (found[1] <= float(most))
        safe = bounds.choose_bounds(inside, found, (0.0, 0.0))
        whole = _ends(lambda end: self._whole(end, target, (least, most)), safe)
        return bounds.choose_bounds(inside, whole, limits)

    def _whole(self, end: Any, target: torch.dtype, span: Bounds) -> Any:
        if not isinstance(end, End):
            return int(end)
        wide = target if target in INTEGERS else torch.int32
        return End(self.builder, self.builder.node(CAST, (end.node,), wide, wide), span)

    # what a dtype holds

    def _held(self, found: Bounds, dtype: torch.dtype) -> Bounds:
        """The bounds as far as a dtype keeps to them: beyond its limits integers wrap."""
        if dtype.is_floating_point:
            return self._numbers_only(found, dtype)
        limits = dtype_limits(dtype)
        if any(isinstance(end, float) for end in found):
            return limits
        if dtype == torch.bool:
            return _ends(lambda end: bool(end) if bounds.is_number(end) else end, found)
        low, high = bounds.settled(found)[0], bounds.span(found[1])[1]
        if limits[0] <= low and high <= limits[1]:
            return found
        inside = (found[0] >= limits[0]) & (found[1] <= limits[1])
        held = bounds.choose_bounds(inside, found, limits)
        return _ends(lambda end: end.within(*limits) if isinstance(end, End) else end, held)

    def _numbers_only(self, found: Bounds, dtype: torch.dtype) -> Bounds:
        """Floating-point bounds without nan: what may be one is unknown."""
        if not dtype.is_floating_point:
            return found
        if any(isinstance(end, float) and math.isnan(end) for end in found):
            return bounds.UNKNOWN
        spans = [bounds.span(end) for end in found]
        if all(math.isfinite(x) for span in spans for x in span):
            return found
        bad: Any = False
        for end in found:
            if isinstance(end, End):
                bad = bad | End(self.builder, self.builder.node("isnan", (end.node,), torch.bool))
        return bounds.choose_bounds(bad, bounds.UNKNOWN, found)


def _ends(change: Any, found: Bounds) -> Bounds:
    """Both ends changed; one value stays one."""
    low = change(found[0])
    return (low, low) if found[0] is found[1] else (low, change(found[1]))


def _is_moderate(found: Bounds) -> bool:
    low, high = bounds.span(found[0])[0], bounds.span(found[1])[1]
    return low >= -MODERATE and high <= MODERATE
