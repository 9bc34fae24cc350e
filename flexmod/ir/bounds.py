"""Interval rules for the op table: from the bounds of the arguments to the bounds of the result.

A bound is a pair (lowest, highest) of Python numbers; a truth value is (must be true, may be true) as 0 and 1.
Rules are for exact arithmetic: who uses them checks that the dtype can hold the result (`passes.widen`).
"""

from __future__ import annotations

import math
from typing import Any

Bounds = tuple[Any, Any]
UNKNOWN: Bounds = (-math.inf, math.inf)


def _hull(*values: Any) -> Bounds:
    # inf * 0 is nan: nothing is known then
    if any(v != v for v in values):
        return UNKNOWN
    return min(values), max(values)


def _times(x: Any, y: Any) -> Any:
    return 0 if x == 0 or y == 0 else x * y


def add(a: Bounds, b: Bounds) -> Bounds:
    return a[0] + b[0], a[1] + b[1]


def sub(a: Bounds, b: Bounds) -> Bounds:
    return a[0] - b[1], a[1] - b[0]


def neg(a: Bounds) -> Bounds:
    return -a[1], -a[0]


def mul(a: Bounds, b: Bounds) -> Bounds:
    return _hull(*(_times(x, y) for x in a for y in b))


def absolute(a: Bounds) -> Bounds:
    low = 0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return low, max(abs(a[0]), abs(a[1]))


def floor_divide(a: Bounds, b: Bounds) -> Bounds:
    if b[0] <= 0 <= b[1]:
        return UNKNOWN
    return _hull(*(x if math.isinf(x) and not math.isinf(y) and y > 0 else x // y for x in a for y in b))


def remainder(a: Bounds, b: Bounds) -> Bounds:
    if b[0] <= 0:
        return UNKNOWN
    if a[0] >= 0:
        return 0, min(a[1], b[1] - 1 if isinstance(b[1], int) else b[1])
    return 0, b[1] - 1 if isinstance(b[1], int) else b[1]


def minimum(a: Bounds, b: Bounds) -> Bounds:
    return min(a[0], b[0]), min(a[1], b[1])


def maximum(a: Bounds, b: Bounds) -> Bounds:
    return max(a[0], b[0]), max(a[1], b[1])


def where(c: Bounds, a: Bounds, b: Bounds) -> Bounds:
    if c[0]:
        return a
    if not c[1]:
        return b
    return min(a[0], b[0]), max(a[1], b[1])


def lt(a: Bounds, b: Bounds) -> Bounds:
    return int(a[1] < b[0]), int(a[0] < b[1])


def le(a: Bounds, b: Bounds) -> Bounds:
    return int(a[1] <= b[0]), int(a[0] <= b[1])


def gt(a: Bounds, b: Bounds) -> Bounds:
    return lt(b, a)


def ge(a: Bounds, b: Bounds) -> Bounds:
    return le(b, a)


def eq(a: Bounds, b: Bounds) -> Bounds:
    return int(a[0] == a[1] == b[0] == b[1]), int(a[0] <= b[1] and b[0] <= a[1])


def ne(a: Bounds, b: Bounds) -> Bounds:
    return invert(eq(a, b))


def invert(a: Bounds) -> Bounds:
    return 1 - a[1], 1 - a[0]


def both(a: Bounds, b: Bounds) -> Bounds:
    return min(a[0], b[0]), min(a[1], b[1])


def either(a: Bounds, b: Bounds) -> Bounds:
    return max(a[0], b[0]), max(a[1], b[1])
