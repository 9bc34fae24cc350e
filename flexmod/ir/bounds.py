"""Interval rules for the op table: from the bounds of the arguments to the bounds of the result.

A bound is a pair (lowest, highest) of Python numbers; of a truth value it says (must be true, may be true) as
0 and 1. Rules are for exact arithmetic on integers and truth values: who uses them checks that the dtype can
hold the result (`passes.integer_bounds`).
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


def trunc_divide(a: Bounds, b: Bounds) -> Bounds:
    if b[0] <= 0 <= b[1] or _unknown(a) or _unknown(b):
        return UNKNOWN
    return _hull(*(x // y if (x < 0) == (y < 0) else -(-x // y) for x in a for y in b))


def fmod(a: Bounds, b: Bounds) -> Bounds:
    """The sign of a; smaller than b."""
    if _unknown(b):
        return (0 if a[0] >= 0 else a[0]), (0 if a[1] <= 0 else a[1])
    most = max(abs(b[0]), abs(b[1])) - 1
    return (0 if a[0] >= 0 else max(a[0], -most)), (0 if a[1] <= 0 else min(a[1], most))


def power(a: Bounds, b: Bounds) -> Bounds:
    """Exponents over 64 count as 64: what they make of anything but -1, 0 and 1 fits no integer."""
    if _unknown(a) or _unknown(b):
        return UNKNOWN
    low, high = max(0, min(b[0], 64)), max(0, min(b[1], 64))
    if a[0] >= 1 and b[0] >= 0:
        return a[0] ** low, a[1] ** high
    largest = max(1, abs(a[0]), abs(a[1])) ** high
    return (0 if a[0] >= 0 else -largest), largest


def sign(a: Bounds) -> Bounds:
    return (a[0] > 0) - (a[0] < 0), (a[1] > 0) - (a[1] < 0)


def shift_left(a: Bounds, b: Bounds) -> Bounds:
    """torch makes 0 of a shift by less than 0, or by as much as the number is wide."""
    if _unknown(b):
        return UNKNOWN
    low, high = max(0, min(b[0], 64)), max(0, min(b[1], 64))
    return _hull(0, *(_times(x, 2**n) for x in a for n in (low, high)))


def shift_right(a: Bounds, b: Bounds) -> Bounds:
    return min(a[0], 0 if a[0] >= 0 else -1), max(a[1], 0 if a[1] >= 0 else -1)


def bitwise_and(a: Bounds, b: Bounds) -> Bounds:
    if _truths(a, b):
        return both(a, b)
    tops = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(tops)) if tops else _two_powers(a, b)


def bitwise_or(a: Bounds, b: Bounds) -> Bounds:
    if _truths(a, b):
        return either(a, b)
    low, high = _two_powers(a, b)
    return (max(a[0], b[0]), high) if a[0] >= 0 and b[0] >= 0 else (low, high)


def bitwise_xor(a: Bounds, b: Bounds) -> Bounds:
    low, high = _two_powers(a, b)
    return (0, high) if a[0] >= 0 and b[0] >= 0 else (low, high)


def bitwise_not(a: Bounds) -> Bounds:
    return -1 - a[1], -1 - a[0]


def _unknown(a: Bounds) -> bool:
    return math.isinf(a[0]) or math.isinf(a[1])


def _truths(a: Bounds, b: Bounds) -> bool:
    return min(a[0], b[0]) >= 0 and max(a[1], b[1]) <= 1


def _two_powers(a: Bounds, b: Bounds) -> Bounds:
    """What fits the bits of the widest of them."""
    if _unknown(a) or _unknown(b):
        return UNKNOWN
    top = 2 ** max(x.bit_length() for x in (*a, *b))
    return -top, top - 1
