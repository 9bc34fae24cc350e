"""The functions that the kernels for building block masks call."""

import triton
import triton.language as tl


@triton.jit
def lowest(x):
    return tl.min(x, 0)


@triton.jit
def highest(x):
    return tl.max(x, 0)


@triton.jit
def lowest_float(x):
    """The lowest element; nan if any element is nan."""
    return tl.where(tl.max((x != x).to(tl.int32), 0) != 0, float("nan"), tl.min(x, 0))


@triton.jit
def highest_float(x):
    return tl.where(tl.max((x != x).to(tl.int32), 0) != 0, float("nan"), tl.max(x, 0))


@triton.jit
def over_diagonals(counts, q_low, q_high, kv_low, kv_high, N):
    """Is a term of q_idx - kv_idx true at all differences in a rectangle, and at any?"""
    lowest = q_low - kv_high
    highest = q_high - kv_low
    number = tl.load(counts + (highest + N)) - tl.load(counts + (lowest + N - 1))
    return number == highest - lowest + 1, number > 0
