"""Bounds of values after rounding to a dtype: casts, integers that wrap, nan.

Bounds are pairs of Ends or Python numbers (see `ends.py`). For a value that may leave the dtype they become
the dtype's limits, or UNKNOWN for floats.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flexmod.ir import bounds
from flexmod.ir.bounds import Bounds
from flexmod.ir.ends import End, dtype_limits
from flexmod.ir.graph import GraphBuilder, Node
from flexmod.ir.linear import INTEGERS
from flexmod.ir.ops import CAST, number, strong


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
    whole = _ends(lambda end: _whole(builder, end, target, (least, most)), safe)
    return bounds.choose_bounds(inside, whole, limits)


def _whole(builder: GraphBuilder, end: Any, target: torch.dtype, span: Bounds) -> Any:
    if not isinstance(end, End):
        return int(end)
    wide = target if target in INTEGERS else torch.int32
    return End(builder, builder.node(CAST, (end.node,), wide, wide), span)


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
