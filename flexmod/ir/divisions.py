"""Quotients and remainders in torch that accept every number a kernel may see.

torch raises an error for an integer divided by 0, and ends the process for the smallest integer divided by
-1. On the CPU it returns nan as the remainder of floats whose quotient is large.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def _safe(divide: Callable[[Any, Any], Any], *, rest: bool = False) -> Callable[[Any, Any], Any]:
    """Makes a division whose integer version takes a divisor of 0 for 1, and wraps, as kernels do."""

    def safe(a: Any, b: Any) -> Any:
        if a.dtype.is_floating_point:
            return divide(a, b)
        if not a.dtype.is_signed:
            return divide(a, torch.where(b == 0, 1, b))
        found = divide(a, torch.where((b == 0) | (b == -1), 1, b))
        return found if rest else found * torch.where(b == -1, -1, 1).to(b.dtype)

    return safe


def _differentiated(a: Any, b: Any) -> bool:
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)


def _rest(a: Any, b: Any) -> Any:
    """torch's remainder where float64 holds the quotient and 1 / b, since torch can differentiate it."""
    if not a.dtype.is_floating_point or _differentiated(a, b):
        return torch.fmod(a, b)
    rest, divisor = a.double(), b.double()
    if a.dtype == torch.float64:
        for scale in (2.0**700, 1.0):
            rest = torch.fmod(rest, divisor * 2.0**700 * scale)
        unit = torch.where(divisor.abs() < 2.0**-800, torch.full_like(divisor, 2.0**200), 1.0)
        return torch.fmod(rest * unit, divisor * unit) / unit
    return torch.fmod(rest, divisor).to(a.dtype)


def _rest_with_sign_of_divisor(a: Any, b: Any) -> Any:
    if not a.dtype.is_floating_point or _differentiated(a, b):
        return torch.remainder(a, b)
    rest = _rest(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _floor(a: Any, b: Any) -> Any:
    """The floor of a / b from the exact remainder, as torch computes it."""
    if not a.dtype.is_floating_point:
        return torch.floor_divide(a, b)
    a, b = a.detach(), b.detach()
    rest = _rest(a, b)
    quotient = (a - rest) / b
    quotient = torch.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    nearest = quotient.floor()
    nearest = torch.where(quotient - nearest > 0.5, nearest + 1, nearest)
    nearest = torch.where(quotient == 0, torch.copysign(torch.zeros_like(quotient), a / b), nearest)
    return torch.where(b == 0, a / b, nearest)


floor_divide = _safe(_floor)
trunc_divide = _safe(partial(torch.div, rounding_mode="trunc"))
remainder, fmod = _safe(_rest_with_sign_of_divisor, rest=True), _safe(_rest, rest=True)
