"""Bounds of a graph's integer nodes, and whether int32 can hold them.

int32 arithmetic on positions is exact: where int32 would overflow, `passes.widen` makes it int64. All other
integers wrap as in torch, also integers that the user casts to int32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch

from flexmod.ir import bounds
from flexmod.ir.graph import DType, Graph, Node
from flexmod.ir.ops import CAST, OPS, number, strong

TRUTH: bounds.Bounds = (False, True)
# Far beyond any integer dtype, and small enough to be compared with inf.
LARGEST = 2**200
# values or bounds of a graph's parameters, by place
Numbers = Mapping[int, bool | int | float | bounds.Bounds]
# Operations whose result may leave the dtype of their arguments.
LEAVES_DTYPE = frozenset({
    "add", "sub", "mul", "neg", "abs", "pow", "shift_left", "floor_divide", "trunc_divide",
})  # fmt: skip


def integer_bounds(
    graph: Graph,
    extents: Mapping[str, int],
    numbers: Numbers | None = None,
    *,
    may_wrap: bool = False,
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
    """The int32 nodes that `widen` changes to int64: positions, and arithmetic on them up to a cast."""
    found: set[Node] = set()
    for node in graph.nodes:
        of_one = node.op in OPS and any(a in found for a in node.args)
        if strong(node.dtype) == torch.int32 and (node.op == "input" or of_one):
            found.add(node)
    return found


def _unwrapped(found: bounds.Bounds, node: Node) -> bounds.Bounds:
    """Bounds of exact arithmetic. Bounds without an end come from a load, and such arithmetic may wrap."""
    if all(map(math.isfinite, found)):
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
        return 0, extents[node.value] - 1  # type: ignore[index]
    if node.op in ("const", "param"):
        value: Any = node.value if node.is_const else numbers.get(node.value, math.nan)  # type: ignore[call-overload]
        if isinstance(value, tuple):
            return value
        return (value, value) if isinstance(value, (bool, int)) else bounds.UNKNOWN
    dtypes = [a.dtype for a in node.args]
    if node.op == CAST:
        return _cast_bounds(known[node.args[0]], strong(dtypes[0]), strong(node.dtype))
    row = OPS.get(node.op)
    if row is None or row.interval is None or strong(node.dtype).is_floating_point:
        return bounds.UNKNOWN
    at = row.argument_dtypes(dtypes, node.dtype)
    # with positions a number beyond int32 requires int64, elsewhere it wraps
    wraps = not any(a in exact for a in node.args)
    arguments = []
    for argument, dtype in zip(node.args, at, strict=True):
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
        beside = row is not None and any(a in judged for a in node.args)
        if beside and torch.int32 in row.argument_dtypes([a.dtype for a in node.args], node.dtype):  # type: ignore[union-attr]
            values += [a for a in node.args if a.op in ("const", "param")]
        for value in values:
            low, high = known[value]
            if math.isfinite(low) and math.isfinite(high) and not _fits((low, high), torch.int32):
                return True
    return False
