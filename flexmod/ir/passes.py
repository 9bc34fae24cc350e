"""The passes over a graph, in the order in which the compiler runs them.

Shared subexpressions and dead code need no pass: a GraphBuilder shares equal nodes, and a Graph contains only
the nodes that its results reach.

`convert_terms` computes differences of positions in float32 where that is exact. A mod such as
`slope * (kv_idx - q_idx)` subtracts integers and converts each difference to a float. GPUs convert much more
slowly than they add. Each integer below 2^24 is a float32 number, so there `float(kv_idx) - float(q_idx)`
gives the same bits. Only rows and columns need conversions then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from flexmod.ir.bounds import Bounds
from flexmod.ir.graph import POSITIONS, Graph, GraphBuilder, Node, home_of, rebuild
from flexmod.ir.integers import dtypes_when_widened, integer_bounds, needs_int64
from flexmod.ir.linear import AND, joined
from flexmod.ir.ops import CAST, HALF, OPS, is_ordinary, is_power_of_two, number, strong
from flexmod.ir.ops import fold as fold_values

Extents = tuple[int, int, int, int]
"""B, H, M, N: the positions b, h, q_idx and kv_idx run below these."""
Places = tuple[tuple[int, int | float | Bounds], ...]
"""The values or bounds of parameters, by place."""


def fold(graph: Graph) -> Graph:
    """Computes operations on constants, as torch does."""

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if not args or not all(a.is_const for a in args):
            return None
        if node.op == CAST:
            source, target = args[0], strong(node.dtype)
            # a Python number is rounded once, to the target; a tensor's value first to its own dtype
            at = target if isinstance(source.dtype, type) else source.dtype
            rounded = number(source.value, at).to(target)
            keeps = at == target == torch.float32 and bool(rounded.isfinite())  # see `fold` of the table
            value = float(source.value) if keeps else rounded.item()
        elif node.op in OPS:
            value = fold_values(node.op, [a.dtype for a in args], node.dtype, [a.value for a in args])
        else:
            return None
        return builder.const(value, node.dtype, node.where)

    return rebuild(graph, change)


def simplify(graph: Graph) -> Graph:
    """Applies exact identities, and a few whose error is below the score's own rounding (see `_RULES`)."""

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        for rule in _RULES.get(node.op, ()):
            new = rule(builder, node, args)
            if new is not None and new.dtype != node.dtype:
                return builder.node(CAST, (new,), node.dtype, None, node.where)
            if new is not None:
                return new
        return None

    return rebuild(graph, change)


def _const(node: Node, value: object) -> bool:
    return node.is_const and node.value == value


def _unit(
    value: object, sides: Sequence[int], *, integers_only: bool = False
) -> Callable[..., Node | None]:
    """x op value -> x, for a constant on one of these sides. -0.0 is not 0: -0.0 - -0.0 is 0.0."""

    def rule(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if integers_only and strong(node.dtype).is_floating_point:
            return None
        for side in sides:
            other = args[1 - side]
            found = _const(args[side], value) and repr(args[side].value) != "-0.0"
            if found and strong(other.dtype) == node.dtype:
                return other
        return None

    return rule


def _absorbing(value: bool) -> Callable[..., Node | None]:
    """x and False -> False, x and True -> x; x or True -> True, x or False -> x."""

    def rule(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.dtype != torch.bool:
            return None
        if any(_const(a, value) for a in args):
            return builder.const(value, torch.bool, node.where)
        return _unit(not value, (0, 1))(builder, node, args)

    return rule


def _idempotent(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    return args[0] if args[0] is args[1] and strong(args[0].dtype) == node.dtype else None


def _choose(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """where(True, a, b) -> a; where(c, a, a) -> a."""
    if args[0].is_const:
        return args[1] if args[0].value else args[2]
    return args[1] if args[1] is args[2] else None


def _twice(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """neg neg x -> x, not not x -> x."""
    inner = args[0]
    return inner.args[0] if inner.op == node.op and strong(inner.args[0].dtype) == node.dtype else None


def _swapped(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """-(a - b) -> b - a, for integers only: floats tell 0.0 from -0.0.

    Not only for speed: ptxas may lose a minus in the bounds of two distances, see `compiler_bugs`.
    """
    inner = args[0]
    if inner.op != "sub" or inner.dtype != node.dtype or strong(node.dtype).is_floating_point:
        return None
    return builder.node("sub", inner.args[::-1], node.dtype, None, node.where)


def _same_cast(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    return args[0] if args[0].dtype == node.dtype and not _is_wrap(node) else None


def _is_wrap(node: Node) -> bool:
    """Is it a cast of int32 to int32? `fitted` drops such casts if they change nothing."""
    return node.op == CAST and node.dtype == node.args[0].dtype == torch.int32


def _power(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """x ** 2 -> x * x, and other small powers."""
    base, exponent = args
    if not exponent.is_const or strong(base.dtype) != node.dtype:
        return None
    if exponent.value == 1:
        return base
    if exponent.value == 2 or exponent.value in (3, 4) and strong(node.dtype) not in HALF:
        square = builder.node("mul", (base, base), node.dtype, None, node.where)
        if exponent.value == 2:
            return square
        return builder.node(
            "mul", (square, square if exponent.value == 4 else base), node.dtype, None, node.where
        )
    if exponent.value == 0.5 and strong(node.dtype).is_floating_point:
        return builder.node("sqrt", (base,), node.dtype, None, node.where)
    return None


def _divide_by_number(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """x / c -> x * (1/c) for a power of two, which is exact, and for any c if x reads the score.

    A score gets one rounding more, after the many roundings of the dot product; floor(q_idx / 49) needs the
    exact quotient. And only if c and 1/c are normal float32 numbers, which have all digits.
    """
    if not args[1].is_const or node.dtype != torch.float32:
        return None
    value = float(args[1].value)
    if (is_power_of_two(value) or "score" in args[0].home) and is_ordinary(value):
        return builder.node("mul", (args[0], builder.const(1.0 / value)), node.dtype, None, node.where)
    return None


def _divide_by_shared(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """score / t[h] -> score * (1 / t[h]): a kernel divides once for a head, row or column of a tile."""
    whole, divisor = args
    shared = not divisor.is_const and home_of(divisor) != "element"
    if not shared or "score" not in whole.home or node.dtype != torch.float32:
        return None
    one = builder.const(1.0, torch.float32, node.where)
    inverse = builder.node("div", (one, divisor), torch.float32, None, node.where)
    return builder.node("mul", (whole, inverse), node.dtype, None, node.where)


def _log_of_next(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
    """log1p(x) -> log(1 + x) for whole numbers, whose sum has no small digits to lose."""
    if not _is_whole(args[0]) or node.dtype not in (torch.float32, torch.float64):
        return None
    one = builder.const(1.0, node.dtype, node.where)
    following = builder.node("add", (args[0], one), node.dtype, None, node.where)
    return builder.node("log", (following,), node.dtype, None, node.where)


def _is_whole(node: Node, depth: int = 6) -> bool:
    """Is a value a whole number or no finite one? True for integers, and sums of integers in floats."""
    if not strong(node.dtype).is_floating_point or node.is_const:
        return not node.is_const or float(node.value).is_integer()
    return depth > 0 and node.op in (*AS_FLOATS, CAST) and all(_is_whole(a, depth - 1) for a in node.args)


_RULES: Mapping[str, tuple[Callable[..., Node | None], ...]] = {
    "add": (_unit(0, (0, 1), integers_only=True),),  # -0.0 + 0 is 0.0
    "sub": (_unit(0, (1,)),),
    "mul": (_unit(1, (0, 1)),),
    "div": (_unit(1, (1,)), _divide_by_number, _divide_by_shared),
    "pow": (_power,),
    "log1p": (_log_of_next,),
    "neg": (_twice, _swapped),
    "logical_not": (_twice,),
    "bitwise_not": (_twice,),
    "bitwise_and": (_absorbing(False), _idempotent),
    "logical_and": (_absorbing(False), _idempotent),
    "bitwise_or": (_absorbing(True), _idempotent),
    "logical_or": (_absorbing(True), _idempotent),
    "minimum": (_idempotent,),
    "maximum": (_idempotent,),
    "where": (_choose,),
    CAST: (_same_cast,),
}

def optimize(graph: Graph) -> Graph:
    return fold(simplify(fold(graph)))


def split_mask(graph: Graph) -> tuple[Graph | None, Graph | None]:
    """Splits a score graph's -inf branches off as a mask: (the remaining score, the mask).

    `where(cond, score, -inf)` and `x + where(cond, y, -inf)` split if cond does not depend on the score. The
    first result is None if the remaining score is the plain score, the second if no branch splits off.
    """
    builder = GraphBuilder()
    score = rebuild(graph).result
    conditions: list[Node] = []
    while (split := _split_once(builder, score)) is not None:
        score, condition = split
        conditions.append(condition)
    left = None if score.op == "input" else graph.of([score])
    if not conditions:
        return left, None
    return left, graph.of([joined(builder, AND[0], conditions)], "mask")


def _split_once(builder: GraphBuilder, node: Node) -> tuple[Node, Node] | None:
    """(value where kept, condition to keep) of a root that is -inf on one side of a condition."""
    if node.op == "where" and "score" not in node.args[0].home:
        condition, yes, no = node.args
        if _const(no, -math.inf):
            return as_float(builder, yes), condition
        if _const(yes, -math.inf):
            keep = builder.node("logical_not", (condition,), torch.bool, None, node.where)
            return as_float(builder, no), keep
    if node.op == "add":
        for side in (0, 1):
            inner = _split_once(builder, node.args[side]) if node.args[side].op == "where" else None
            if inner is not None:
                value, condition = inner
                rest = node.args[1 - side]
                if _const(value, 0):
                    return as_float(builder, rest), condition
                return builder.node("add", (rest, value), node.dtype, None, node.where), condition
    return None


def as_float(builder: GraphBuilder, node: Node) -> Node:
    """The node in float32."""
    if node.dtype == torch.float32:
        return node
    if node.is_const:
        return builder.const(float(node.value), torch.float32, node.where)
    return builder.node(CAST, (node,), torch.float32, None, node.where)


def promote_constants(graph: Graph, slots: frozenset[int]) -> Graph:
    """Turns the constants at these places of `graph.skeleton` into run-time parameters, numbered by place.

    A launch takes floats as float32. A constant that is read as float64 becomes a float64 parameter; a
    constant that is read as both stays a constant.
    """
    dtypes = _dtypes_as_read(graph)
    places = {n: i for i, n in enumerate(n for n in graph.nodes if n.is_const)}

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        read = dtypes.get(node, set())
        if not node.is_const or places[node] not in slots or {torch.float64} < read:
            return None
        dtype = torch.float64 if torch.float64 in read else node.dtype
        return builder.node("param", (), dtype, places[node], node.where)

    return rebuild(graph, change)


def _dtypes_as_read(graph: Graph) -> dict[Node, set[torch.dtype]]:
    """The dtypes to which each floating-point constant is cast."""
    found: dict[Node, set[torch.dtype]] = {}

    def reads(node: Node, dtype: torch.dtype) -> None:
        if node.is_const and isinstance(node.value, float):
            found.setdefault(node, set()).add(dtype)

    for node in graph.nodes:
        if node.op == CAST:
            source = node.args[0]
            reads(source, strong(node.dtype if isinstance(source.dtype, type) else source.dtype))
        elif node.op in OPS:
            for argument, dtype in OPS[node.op].arguments(node):
                reads(argument, dtype)
    for result in graph.results:
        reads(result, strong(result.dtype))
    return found


def widen(graph: Graph, dtypes: Mapping[Node, torch.dtype] | None = None) -> Graph:
    """Makes positions int64, and every integer dtype that follows from theirs.

    Casts stay as they are. `dtypes` are the dtypes of nodes where they do not follow from the arguments.
    """

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op == "input" and node.dtype == torch.int32:
            return builder.input(node.value, torch.int64)
        if node.op in OPS and not strong(node.dtype).is_floating_point:
            follows = OPS[node.op].dtype(*(a.dtype for a in args))
            wide = builder.node(node.op, args, follows, node.value, node.where)
            dtype = (dtypes or {}).get(node, follows)
            return wide if dtype == follows else builder.node(CAST, (wide,), dtype, None, node.where)
        return None

    return rebuild(graph, change)


def _without_wraps(graph: Graph) -> Graph:
    if not any(map(_is_wrap, graph.nodes)):
        return graph
    return rebuild(graph, lambda b, n, args: args[0] if _is_wrap(n) else None)


@lru_cache(1024)
def fitted(graph: Graph, extents: Extents, numbers: Places = ()) -> Graph:
    """Adapts the graph to positions below `extents` and to parameters with these values or bounds.

    Widens integers to int64 if needed, and computes differences of positions in float32 where that is exact.
    Drops casts to int32 if no value would leave int32 without them.
    """
    places = dict(zip(POSITIONS, extents, strict=True))
    wide = _without_wraps(graph)
    if needs_int64(wide, places, dict(numbers)):
        judged = needs_int64(graph, places, dict(numbers))
        wide = widen(graph, dtypes_when_widened(graph)) if judged else graph
    return convert_terms(wide, integer_bounds(wide, places, dict(numbers)))


# float32 represents every integer up to here.
EXACT = 2**24

# Operations that are as exact on these floats as on integers, and never return -0.0.
AS_FLOATS = ("add", "sub", "neg", "abs", "minimum", "maximum")


def convert_terms(graph: Graph, known: Mapping[Node, Bounds]) -> Graph:
    """Computes integers that read rows and columns, and that become float32, in floats from the start.

    `known` are the bounds of the graph's nodes in the present call. Integers inside an index do not change:
    their differences decide how gradients of the loaded tensor are summed.
    """
    indices = [a for node in graph.nodes if node.op == "load" for a in node.args]
    of_indices = {*graph.of(indices).nodes}
    floats: dict[Node, Node] = {}

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if home_of(node) == "element":
            in_floats = _in_floats(builder, node, known, floats)
            if in_floats is not None:
                floats[node] = in_floats
        if node in of_indices:
            return None
        if node.op == CAST:
            return floats.get(node.args[0]) if node.dtype == torch.float32 else None
        row = OPS.get(node.op)
        if row is None:
            return None
        changed = tuple(
            floats.get(old, arg) if dtype == torch.float32 else arg
            for arg, (old, dtype) in zip(args, row.arguments(node), strict=True)
        )
        return None if changed == args else builder.node(node.op, changed, node.dtype, node.value, node.where)

    return rebuild(graph, change)


def _in_floats(
    builder: GraphBuilder, node: Node, known: Mapping[Node, Bounds], floats: Mapping[Node, Node]
) -> Node | None:
    """An integer that reads rows and columns, computed in floats from the start; None if that may round.

    `floats` has the arguments that are such integers.
    """
    if node.op not in (*AS_FLOATS, CAST) or not all(_fits(a, known) for a in (node, *node.args)):
        return None
    if any(home_of(a) == "element" and a not in floats for a in node.args):
        return None
    args = tuple(floats.get(a) or as_float(builder, builder.copies[a]) for a in node.args)
    if node.op == CAST:  # to an integer dtype that holds it
        return args[0]
    if node.op == "neg":  # -(0.0) would be -0.0
        zero = builder.const(0.0, torch.float32, node.where)
        return builder.node("sub", (zero, *args), torch.float32, None, node.where)
    return builder.node(node.op, args, torch.float32, None, node.where)


def _fits(node: Node, known: Mapping[Node, Bounds]) -> bool:
    """Is it an integer that float32 holds?"""
    low, high = known[node]
    return strong(node.dtype) in (torch.int32, torch.int64) and low >= -EXACT and high <= EXACT
