"""Interval rules for the op table: from the bounds of the arguments to the bounds of the result.

A bound is a pair of ends (lowest, highest); for a truth value the pair is (must be true, may be true). Rules
assume exact arithmetic: the caller checks that the dtype can hold the result.

An end is a Python number, or a symbol: a value that a kernel knows when it runs (`ends.End`). One rule serves
both, since rules use operators and the helpers below, and never test a symbol's truth. Rules in `ROUNDED`
bound floating-point results too, if their ends are rounded as the operation rounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

Bounds = tuple[Any, Any]
UNKNOWN: Bounds = (-math.inf, math.inf)


# ends


def is_number(end: Any) -> bool:
    return isinstance(end, (bool, int, float))


def is_endless(end: Any) -> bool:
    return isinstance(end, float) and math.isinf(end)


def span(end: Any) -> Bounds:
    """Bounds of an end, in Python numbers."""
    return (end, end) if is_number(end) else (end.lowest, end.highest)


def known_ends(a: Bounds) -> Bounds:
    """Turns bounds that may be symbols into bounds in Python numbers."""
    return span(a[0])[0], span(a[1])[1]


def applied(name: str, on_numbers: Callable[..., Any], *values: Any) -> Any:
    """Applies an operation of the table to ends: returns a number if all are numbers, else a symbol."""
    for value in values:
        if not is_number(value):
            return value.apply(name, *values)
    return on_numbers(*values)


def least(x: Any, y: Any) -> Any:
    return applied("minimum", lambda x, y: math.nan if x != x or y != y else min(x, y), x, y)


def greatest(x: Any, y: Any) -> Any:
    return applied("maximum", lambda x, y: math.nan if x != x or y != y else max(x, y), x, y)


def choose(condition: Any, x: Any, y: Any) -> Any:
    if is_number(condition):
        return x if condition else y
    return condition.apply("where", condition, x, y)


def choose_bounds(condition: Any, a: Bounds, b: Bounds) -> Bounds:
    return choose(condition, a[0], b[0]), choose(condition, a[1], b[1])


def no(truth: Any) -> Any:
    return applied("logical_not", lambda x: not x, truth)


def is_known(end: Any) -> Any:
    """Is the end finite? An infinite one may stand for an unknown value or for nan."""
    return not is_endless(end) if is_number(end) else end.is_finite()


def is_point(a: Bounds) -> bool:
    """Do the bounds contain one value only?"""
    return a[0] is a[1] or (is_number(a[0]) and is_number(a[1]) and bool(a[0] == a[1]))


def _hull(*values: Any) -> Bounds:
    low = high = values[0]
    for value in values[1:]:
        low, high = least(low, value), greatest(high, value)
    # inf * 0 is nan: nothing is known then
    return UNKNOWN if is_number(low) and low != low else (low, high)


def _times(x: Any, y: Any) -> Any:
    """Multiplies ends of integers. An infinite end stands for a large integer, so 0 times it is 0."""
    if (is_number(x) and x == 0) or (is_number(y) and y == 0):
        return 0
    return x * y


# arithmetic


def add(a: Bounds, b: Bounds) -> Bounds:
    if _truths(a, b):
        return either(a, b)
    return a[0] + b[0], a[1] + b[1]


def sub(a: Bounds, b: Bounds) -> Bounds:
    return a[0] - b[1], a[1] - b[0]


def neg(a: Bounds) -> Bounds:
    return -a[1], -a[0]


def mul(a: Bounds, b: Bounds) -> Bounds:
    if _truths(a, b):
        return both(a, b)
    return _product(a, b, _times)


def mul_floats(a: Bounds, b: Bounds) -> Bounds:
    """Bounds a floating-point product. An infinite end may be a real infinity, and 0 times it is nan."""
    return _product(a, b, operator.mul)


def _product(a: Bounds, b: Bounds, times: Callable[[Any, Any], Any]) -> Bounds:
    for one, other in ((a, b), (b, a)):
        if is_point(one):
            ends = times(other[0], one[0]), times(other[1], one[0])
            return choose_bounds(one[0] >= 0, ends, ends[::-1])
    return _hull(*(times(x, y) for x in a for y in b))


def absolute(a: Bounds) -> Bounds:
    return greatest(greatest(a[0], -a[1]), 0), greatest(-a[0], a[1])


def div(a: Bounds, b: Bounds) -> Bounds:
    """Bounds a floating-point quotient."""
    same_sign = (b[0] > 0) | (b[1] < 0)
    if is_number(same_sign) and not same_sign:
        return UNKNOWN
    divisors = (b[0],) if is_point(b) else b
    low, high = _hull(*(x / y for x in a for y in divisors))
    return choose_bounds(same_sign, (low, high), UNKNOWN)


def _divided(name: str, whole: Callable[[int, int], int]) -> Callable[[Bounds, Bounds], Bounds]:
    """Makes the rule of a quotient. For a negative divisor, it bounds the quotient of -a and -b."""

    def quotient(x: Any, y: Any) -> Any:
        if is_endless(x):
            return math.nan if is_endless(y) else x
        if is_endless(y):
            return -1 if name == "floor_divide" and known_ends((x, x))[0] < 0 else 0
        return applied(name, whole, x, y)

    def of_positive(a: Bounds, b: Bounds) -> Bounds:
        if is_point(b):
            return quotient(a[0], b[0]), quotient(a[1], b[0])
        return _hull(*(quotient(x, y) for x in a for y in b))

    def rule(a: Bounds, b: Bounds) -> Bounds:
        is_positive, is_negative = b[0] > 0, b[1] < 0
        flipped_a, flipped_b = choose_bounds(is_negative, neg(a), a), choose_bounds(is_negative, neg(b), b)
        has_sign = is_positive | is_negative
        # no rule divides by a divisor that may be 0
        safe = choose_bounds(has_sign, flipped_b, (1, 1))
        return choose_bounds(has_sign, of_positive(flipped_a, safe), UNKNOWN)

    return rule


def _truncated(x: int, y: int) -> int:
    return x // y if (x < 0) == (y < 0) else -(-x // y)


floor_divide = _divided("floor_divide", lambda x, y: x // y)
trunc_divide = _divided("trunc_divide", _truncated)


def remainder(a: Bounds, b: Bounds) -> Bounds:
    """The result has the sign of b and is smaller than b. It ascends while the quotient stays the same."""
    positive = choose_bounds(b[0] > 0, _remainder_of_positive(a, b), UNKNOWN)
    return choose_bounds(b[1] < 0, (b[0] + 1, 0), positive)


def _remainder_of_positive(a: Bounds, b: Bounds) -> Bounds:
    whole: Bounds = (0, b[1] - 1)
    if any(map(is_endless, (*a, *b))):
        return (0, least(a[1], whole[1])) if known_ends(a)[0] >= 0 else whole
    if not is_point(b):
        return 0, choose(a[0] >= 0, least(greatest(a[1], 0), whole[1]), whole[1])
    divisor = greatest(b[0], 1)
    turn = applied("floor_divide", lambda x, y: x // y, a[0], divisor) * divisor
    return choose_bounds(a[1] - turn < divisor, (a[0] - turn, a[1] - turn), whole)


def fmod(a: Bounds, b: Bounds) -> Bounds:
    """The result has the sign of a and is smaller than b."""
    low, high = least(a[0], 0), greatest(a[1], 0)
    if any(map(is_endless, b)):
        return low, high
    most = greatest(absolute(b)[1] - 1, 0)
    return greatest(low, -most), least(high, most)


def power(a: Bounds, b: Bounds) -> Bounds:
    """Exponents over 64 count as 64: any base but -1, 0 and 1 leaves every integer dtype there."""
    a, b = known_ends(a), known_ends(b)
    if _unknown(a) or _unknown(b):
        return UNKNOWN
    low, high = max(0, min(b[0], 64)), max(0, min(b[1], 64))
    if a[0] >= 1 and b[0] >= 0:
        return a[0] ** low, a[1] ** high
    largest = max(1, abs(a[0]), abs(a[1])) ** high
    return (0 if a[0] >= 0 else -largest), largest


def _ascending(name: str, on_numbers: Callable[[Any], Any]) -> Callable[[Bounds], Bounds]:
    """Makes the rule for a function that never descends."""

    def rule(a: Bounds) -> Bounds:
        low, high = (x if is_endless(x) else applied(name, on_numbers, x) for x in a)
        return low, high

    return rule


floor, ceil = _ascending("floor", math.floor), _ascending("ceil", math.ceil)
trunc, nearest = _ascending("trunc", math.trunc), _ascending("round", round)


def sign(a: Bounds) -> Bounds:
    low, high = (applied("sign", lambda x: (x > 0) - (x < 0), x) for x in a)
    return low, high


def square_root(a: Bounds) -> Bounds:
    """Widens the bounds by one per cent: some chips round roots incorrectly, and not in ascending order."""
    low, high = (x if is_endless(x) else applied("sqrt", lambda x: math.sqrt(max(x, 0)), x) for x in a)
    return choose_bounds(a[0] >= 0, (low * 0.99, high * 1.01), UNKNOWN)


def hypot(a: Bounds, b: Bounds) -> Bounds:
    """Between the longer side and the sum of both; widened as roots are."""
    a, b = absolute(a), absolute(b)
    return greatest(a[0], b[0]) * 0.99, (a[1] + b[1]) * 1.01


def within_one(a: Bounds) -> Bounds:
    """Bounds a tanh or a sine; nan stays nan."""
    return -1.0, 1.0


def share(a: Bounds) -> Bounds:
    """Bounds a sigmoid."""
    return 0.0, 1.0


def minimum(a: Bounds, b: Bounds) -> Bounds:
    return least(a[0], b[0]), least(a[1], b[1])


def maximum(a: Bounds, b: Bounds) -> Bounds:
    return greatest(a[0], b[0]), greatest(a[1], b[1])


def where(c: Bounds, a: Bounds, b: Bounds) -> Bounds:
    return choose_bounds(c[0], a, choose_bounds(no(c[1]), b, (least(a[0], b[0]), greatest(a[1], b[1]))))


# comparisons


def lt(a: Bounds, b: Bounds) -> Bounds:
    return a[1] < b[0], a[0] < b[1]


def le(a: Bounds, b: Bounds) -> Bounds:
    return (a[1] <= b[0]) & is_known(a[1]) & is_known(b[0]), a[0] <= b[1]


def gt(a: Bounds, b: Bounds) -> Bounds:
    return lt(b, a)


def ge(a: Bounds, b: Bounds) -> Bounds:
    return le(b, a)


def eq(a: Bounds, b: Bounds) -> Bounds:
    if is_point(a) and is_point(b):
        return a[0] == b[0], a[0] == b[0]
    return (a[0] == b[1]) & (a[1] == b[0]), (a[0] <= b[1]) & (b[0] <= a[1])


def ne(a: Bounds, b: Bounds) -> Bounds:
    return invert(eq(a, b))


# logic and bits


def invert(a: Bounds) -> Bounds:
    return no(a[1]), no(a[0])


def both(a: Bounds, b: Bounds) -> Bounds:
    return a[0] & b[0], a[1] & b[1]


def either(a: Bounds, b: Bounds) -> Bounds:
    return a[0] | b[0], a[1] | b[1]


def one_of(a: Bounds, b: Bounds) -> Bounds:
    """Exclusive or."""
    return (a[0] & no(b[1])) | (b[0] & no(a[1])), (a[1] & no(b[0])) | (b[1] & no(a[0]))


def shift_left(a: Bounds, b: Bounds) -> Bounds:
    """torch returns 0 for a shift by less than 0, and for one by the number's width or more."""
    if is_number(b[0]) and is_point(b) and 0 <= b[0] < 31:
        return mul(a, (2 ** b[0],) * 2)
    a, b = known_ends(a), known_ends(b)
    if _unknown(b):
        return UNKNOWN
    low, high = max(0, min(b[0], 64)), max(0, min(b[1], 64))
    return _hull(0, *(_times(x, 2**n) for x in a for n in (low, high)))


def shift_right(a: Bounds, b: Bounds) -> Bounds:
    if is_number(b[0]) and is_point(b) and 0 <= b[0] < 31:
        return floor_divide(a, (2 ** b[0],) * 2)
    return least(a[0], choose(a[0] >= 0, 0, -1)), greatest(a[1], choose(a[1] >= 0, 0, -1))


def bitwise_and(a: Bounds, b: Bounds) -> Bounds:
    if _truths(a, b):
        return both(a, b)
    for one, other in ((a, b), (b, a)):
        if is_number(one[0]) and is_point(one) and one[0] > 0 and one[0] & (one[0] + 1) == 0:
            return remainder(other, (one[0] + 1,) * 2)
    a, b = known_ends(a), known_ends(b)
    tops = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(tops)) if tops else _two_powers(a, b)


def bitwise_or(a: Bounds, b: Bounds) -> Bounds:
    if _truths(a, b):
        return either(a, b)
    a, b = known_ends(a), known_ends(b)
    low, high = _two_powers(a, b)
    return (low if low < 0 else max(a[0], b[0])), high


def bitwise_xor(a: Bounds, b: Bounds) -> Bounds:
    return one_of(a, b) if _truths(a, b) else _two_powers(known_ends(a), known_ends(b))


def bitwise_not(a: Bounds) -> Bounds:
    if all(isinstance(known_ends(a)[i], bool) for i in (0, 1)):
        return invert(a)
    return -1 - a[1], -1 - a[0]


def _unknown(a: Bounds) -> bool:
    return math.isinf(a[0]) or math.isinf(a[1])


def _truths(a: Bounds, b: Bounds) -> bool:
    """Are both bounds of truth values, and not of numbers that happen to be 0 and 1?"""
    return all(isinstance(end, bool) for x in (a, b) for end in known_ends(x))


def _two_powers(a: Bounds, b: Bounds) -> Bounds:
    """The range of numbers that need no more bits than the widest end, without negative ones if none is."""
    endless = _unknown(a) or _unknown(b)
    top = math.inf if endless else 2 ** max(int(x).bit_length() for x in (*a, *b))
    return (0 if a[0] >= 0 and b[0] >= 0 else -top), top - 1


ROUNDED = frozenset({
    add, sub, mul, div, neg, absolute, minimum, maximum, where, floor, ceil, trunc, nearest, sign,
    square_root, hypot, lt, le, gt, ge, eq, ne,
})  # fmt: skip


def rounded_rule(rule: Callable[..., Bounds] | None) -> Callable[..., Bounds] | None:
    """The rule for rounded floating-point results, if an operation's rule holds for them."""
    return mul_floats if rule is mul else rule if rule in ROUNDED else None


# For an argument without ends, which may be nan, these rules would return bounds with an end.
KEEP_NAN = frozenset({minimum, maximum, absolute, sign, hypot})
# The results may leave int64 when the arguments are large.
ARITHMETIC = frozenset({add, sub, mul, neg, absolute})


def are_positive(a: Bounds, b: Bounds, bits: int) -> bool:
    """Does a quotient or a remainder of these numbers round down and towards 0 alike?"""
    return a[0] >= 0 and b[0] > 0


def divides_safely(a: Bounds, b: Bounds, bits: int) -> bool:
    """Do these numbers exclude division by 0, and of the smallest integer by -1?"""
    return b[0] > 0 or b[1] < -1 or (b[1] < 0 and a[0] > -(2 ** (bits - 1)))


def few_turns(a: Bounds, b: Bounds, bits: int) -> bool:
    """Does the quotient of these floating-point numbers have at most 54 bits?"""
    if b[0] <= 0 <= b[1] or not all(map(math.isfinite, (*a, *b))):
        return False
    return max(abs(a[0]), abs(a[1])) <= 2.0**54 * min(abs(b[0]), abs(b[1]))


def shift_within(a: Bounds, b: Bounds, bits: int) -> bool:
    """Do these numbers shift by less than the width of the shifted number?"""
    return b[0] >= 0 and b[1] < bits
