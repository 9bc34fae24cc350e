"""The end of an interval as a node: a number that a kernel knows when it runs.

The rules of `bounds.py` run on Ends as on Python numbers. An End also has bounds of its own value, in Python
numbers. They keep integer arithmetic exact: it moves to int64 where int32 might overflow, and gives nan,
"nothing known", where int64 might. A result that they already decide needs no node.

Casts, integers that wrap and nan give the bounds of values after rounding to a dtype. For a value that may
leave the dtype they become the dtype's limits, or UNKNOWN for floats.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flexmod.ir import bounds
from flexmod.ir.bounds import Bounds
from flexmod.ir.graph import GraphBuilder, Node
from flexmod.ir.linear import INTEGERS
from flexmod.ir.ops import CAST, COMPARISONS, OPS, number, promote, strong

LOGIC = frozenset({"bitwise_and", "bitwise_or", "logical_not"})
UNITS = {"add": 0, "sub": 0, "mul": 1}  # numbers that change nothing on the right


def _operator(name: str) -> Any:
    return lambda end, other: end.apply(name, end, other)


def _reflected(name: str) -> Any:
    return lambda end, other: end.apply(name, other, end)


class End:
    """`node` has a strong dtype: bool, int32, int64 or a floating-point one. Its value is never nan."""

    __slots__ = ("builder", "highest", "lowest", "node")
    __hash__ = object.__hash__

    def __init__(self, builder: GraphBuilder, node: Node, span: bounds.Bounds | None = None) -> None:
        self.builder = builder
        self.node = node
        self.lowest, self.highest = span or dtype_limits(strong(node.dtype))

    @property
    def dtype(self) -> torch.dtype:
        return strong(self.node.dtype)

    def apply(self, name: str, *values: Any) -> Any:
        """Applies an operation of the table to ends; one of them is this."""
        if any(isinstance(v, float) and math.isnan(v) for v in values):
            return False if name in COMPARISONS else math.nan
        floats = [v.dtype for v in values if isinstance(v, End) and v.dtype.is_floating_point]
        if name == "where" and all(isinstance(v, float) for v in values[1:]):  # endless, of any float
            floats = [torch.float32]
        if not floats:
            values = tuple(map(_whole, values))
        simple = _simpler(name, values)
        if simple is not None:
            return simple
        span = _span_of(name, values, bool(floats))
        if bounds.is_point(span) and (name in COMPARISONS or not floats):
            return span[0]
        if floats:
            at = promote(*floats)
        elif name in LOGIC or all(isinstance(bounds.span(v)[0], bool) for v in values):
            at = torch.bool
        else:
            ends = [s for v in values for s in bounds.span(v) if not isinstance(s, bool)]
            ends += [] if name in COMPARISONS else span
            at = _integer_dtype(min(ends), max(ends))  # type: ignore[assignment]
            if at is None:
                return math.nan
        nodes = [
            self._operand(v, torch.bool if name == "where" and i == 0 else at) for i, v in enumerate(values)
        ]
        dtype = torch.bool if name in COMPARISONS else at
        return End(self.builder, self.builder.node(name, nodes, dtype), span)

    def _operand(self, value: Any, dtype: torch.dtype) -> Node:
        if isinstance(value, End):
            return value.cast(dtype).node
        return self.builder.const(number(value, dtype).item(), dtype)

    def cast(self, dtype: torch.dtype) -> End:
        """Casts the value to a dtype that holds it, or rounds it as torch does."""
        if dtype == self.dtype:
            return self
        span = self.lowest, self.highest
        if dtype.is_floating_point:
            span = _with_slack((float(span[0]), float(span[1])))
        elif self.dtype == torch.bool:
            span = int(span[0]), int(span[1])
        return End(self.builder, self.builder.node(CAST, (self.node,), dtype), span)

    def within(self, low: int, high: int) -> End:
        """The same end with the further knowledge that it lies in low..high."""
        return End(self.builder, self.node, (max(self.lowest, low), min(self.highest, high)))

    def is_finite(self) -> Any:
        if not self.dtype.is_floating_point or (math.isfinite(self.lowest) and math.isfinite(self.highest)):
            return True
        return self.apply("lt", self.apply("abs", self), math.inf)

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__ = __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected("div")
    __and__ = __rand__ = _operator("bitwise_and")
    __or__ = __ror__ = _operator("bitwise_or")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")

    def __neg__(self) -> Any:
        return self.apply("neg", self)


def dtype_limits(dtype: torch.dtype) -> bounds.Bounds:
    """The lowest and the highest value of a dtype."""
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return bounds.UNKNOWN
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _whole(value: Any) -> Any:
    """Replaces an infinite end of an integer by int64's limit."""
    return dtype_limits(torch.int64)[value > 0] if bounds.is_endless(value) else value


def _integer_dtype(low: int, high: int) -> torch.dtype | None:
    for dtype in INTEGERS:
        least, most = dtype_limits(dtype)
        if least <= low and high <= most:
            return dtype
    return None


def _with_slack(span: bounds.Bounds) -> bounds.Bounds:
    """Widens for rounding to any floating-point dtype; an end that a half type cannot hold is infinite."""
    low, high = span[0] - abs(span[0]) * 0.01 - 1e-6, span[1] + abs(span[1]) * 0.01 + 1e-6
    return (low if low > -6e4 else -math.inf), (high if high < 6e4 else math.inf)


def _span_of(name: str, values: tuple[Any, ...], floats: bool) -> bounds.Bounds:
    rule = bounds.rounded_rule(OPS[name].interval) if floats else OPS[name].interval
    assert rule is not None, "the rules of bounds apply operations with rules alone"
    found = rule(*map(bounds.span, values))
    return _with_slack(found) if floats and name not in COMPARISONS else found


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, End) and isinstance(y, End):
        return x.node is y.node
    return bounds.is_number(x) and bounds.is_number(y) and type(x) is type(y) and x == y


def _simpler(name: str, values: tuple[Any, ...]) -> Any:
    """The result if it is one of the values, or logic on them; None if it needs a computation.

    The simplification of the whole graph knows further rules, see `passes.simplify`.
    """
    if name in UNITS and _same(values[1], UNITS[name]):
        return values[0]
    if name in ("minimum", "maximum"):
        x, y = values
        if _same(x, y) or bounds.span(x)[1] <= bounds.span(y)[0]:
            return x if name == "minimum" else y
        if bounds.span(y)[1] <= bounds.span(x)[0]:
            return y if name == "minimum" else x
        return None
    if name == "where":
        return _simpler_choice(*values)
    return None


def _simpler_choice(condition: End, x: Any, y: Any) -> Any:
    if _same(x, y):
        return x
    if isinstance(x, bool):
        return condition | y if x else bounds.no(condition) & y
    if isinstance(y, bool):
        return bounds.no(condition) | x if y else condition & x
    return None


def brought_to(builder: GraphBuilder, found: Bounds, source: Node, target: torch.dtype) -> Bounds:
    """The bounds of a value after a cast to another dtype."""
    dtype = strong(source.dtype)
    if source.is_const:
        return constant(builder, source.value, target)
    if target == dtype:
        return found
    if target == torch.bool:
        return bounds.ne(found, (0, 0))
    if dtype == torch.bool:
        found = _ends(lambda end: end.cast(torch.int32) if isinstance(end, End) else int(end), found)
    if target.is_floating_point:
        ends = _ends(lambda end: _as_float(builder, end, target), found)
        return without_nan(builder, ends, target)
    if dtype.is_floating_point:
        return _truncated(builder, found, target)
    return clamp_to_dtype(builder, found, target)


def constant(builder: GraphBuilder, value: Any, target: torch.dtype) -> Bounds:
    rounded = number(value, target).item()
    if not target.is_floating_point:
        return rounded, rounded
    if not math.isfinite(rounded):
        return bounds.UNKNOWN if math.isnan(rounded) else (rounded, rounded)
    end = End(builder, builder.const(rounded, target), (rounded, rounded))
    return end, end


def _as_float(builder: GraphBuilder, end: Any, target: torch.dtype) -> Any:
    if isinstance(end, End):
        return end.cast(target)
    return end if bounds.is_endless(end) else constant(builder, end, target)[0]


def _truncated(builder: GraphBuilder, found: Bounds, target: torch.dtype) -> Bounds:
    """Bounds a float cast to an integer dtype. Outside the dtype's range each chip gives its own result."""
    limits = dtype_limits(target)
    if any(map(bounds.is_number, found)):
        return limits
    least, most = max(limits[0], -(2**31)), min(limits[1], 2**30)
    inside = (found[0] >= float(least)) & (found[1] <= float(most))
    safe = bounds.choose_bounds(inside, found, (0.0, 0.0))
    whole = _ends(lambda end: _whole_end(builder, end, target, (least, most)), safe)
    return bounds.choose_bounds(inside, whole, limits)


def _whole_end(builder: GraphBuilder, end: Any, target: torch.dtype, span: Bounds) -> Any:
    if not isinstance(end, End):
        return int(end)
    wide = target if target in INTEGERS else torch.int32
    return End(builder, builder.node(CAST, (end.node,), wide), span)


def clamp_to_dtype(builder: GraphBuilder, found: Bounds, dtype: torch.dtype) -> Bounds:
    """The bounds if the dtype holds them, else the dtype's limits, since integers wrap beyond them."""
    if dtype.is_floating_point:
        # torch multiplies a half type by a Python number in float32, then rounds
        rounded = _ends(lambda end: end.cast(dtype) if isinstance(end, End) else end, found)
        return without_nan(builder, rounded, dtype)
    limits = dtype_limits(dtype)
    if any(isinstance(end, float) for end in found):
        return limits
    if dtype == torch.bool:
        return _ends(lambda end: bool(end) if bounds.is_number(end) else end, found)
    low, high = bounds.known_ends(found)[0], bounds.span(found[1])[1]
    if limits[0] <= low and high <= limits[1]:
        return found
    inside = (found[0] >= limits[0]) & (found[1] <= limits[1])
    chosen = bounds.choose_bounds(inside, found, limits)
    return _ends(lambda end: end.within(*limits) if isinstance(end, End) else end, chosen)


def without_nan(builder: GraphBuilder, found: Bounds, dtype: torch.dtype) -> Bounds:
    """Floating-point bounds; UNKNOWN if the value may be nan."""
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
            bad = bad | End(builder, builder.node("isnan", (end.node,), torch.bool))
    return bounds.choose_bounds(bad, bounds.UNKNOWN, found)


def _ends(change: Any, found: Bounds) -> Bounds:
    """Changes both ends; bounds of a single value stay bounds of a single value."""
    low = change(found[0])
    return (low, low) if found[0] is found[1] else (low, change(found[1]))
