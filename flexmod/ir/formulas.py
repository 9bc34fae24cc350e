"""Torch functions that are written in terms of other torch functions, and so need no row of the table.

Signatures follow torch's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    return _at_most(x if min is None else _at_least(x, min), max)


def _at_least(x: Any, low: Any) -> Any:
    # torch passes a float's gradient on at the limit itself; an integer's interval must end at the limit
    return _limited(x, operator.lt, operator.ge, low) if x.is_floating_point() else x.maximum(low)


def _at_most(x: Any, high: Any) -> Any:
    if high is None:
        return x
    return _limited(x, operator.gt, operator.le, high) if x.is_floating_point() else x.minimum(high)


def _limited(x: Any, outside: Callable[..., Any], within: Callable[..., Any], limit: Any) -> Any:
    """Replaces x by the limit where x lies outside. A nan limit makes the result nan, as in torch.

    Compares a captured tensor's value only together with x: compared alone, it would become a constant.
    """
    if not hasattr(limit, "is_floating_point"):
        return torch.where(outside(x, limit), limit, x) if limit == limit else torch.full_like(x, limit)
    if not limit.is_floating_point():
        return torch.where(outside(x, limit), limit, x)
    return torch.where(torch.logical_not(within(x, limit)) & (x == x), limit, x)


def _relu(x: Any) -> Any:
    # the gradient at 0 is 0, as in torch
    return torch.where(x <= 0, 0, x) if x.is_floating_point() else x.maximum(0)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    if isinstance(value, int):  # in the result's dtype, in which torch multiplies
        dtype = x.dtype
        for factor in (a, b):
            dtype = torch.promote_types(dtype, getattr(factor, "dtype", dtype))
        value = torch.full_like(x, value, dtype=dtype)
    return x + value * a * b


def _isfinite(x: Any) -> Any:
    return torch.logical_not(torch.isnan(x) | torch.isinf(x))


def _lerp(a: Any, b: Any, weight: Any) -> Any:
    # from the nearer end, as torch does: a weight of 1 gives b, however large a is
    way = b - a
    from_a, from_b = a + weight * way, b - (1 - weight) * way
    if isinstance(weight, (int, float)):
        return from_a if abs(weight) < 0.5 else from_b
    return torch.where(abs(weight) < 0.5, from_a, from_b)


COMPOSED: dict[str, Callable[..., Any]] = {
    "rsub": lambda x, other, *, alpha=1: torch.sub(other, x, alpha=alpha),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _at_least,
    "clamp_max": _at_most,
    "relu": _relu,
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": _gelu,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "softplus": lambda x: x.maximum(0.0) + torch.log1p(torch.exp(-torch.abs(x))),
    "log10": lambda x: torch.log2(x) * math.log10(2.0),
    "isfinite": _isfinite,
    "masked_fill": lambda x, mask, value: torch.where(mask, value, x),
    "lerp": _lerp,
    "addcmul": _addcmul,
    "positive": lambda x: x,
    "clone": lambda x, memory_format=None: x,
    "contiguous": lambda x: x,
}
