"""Checks the arguments of the functions that make masks and score mods. Each check raises
LibraryArgumentError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError

MaskMod = Callable[[Any, Any, Any, Any], Any]
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(function: str, name: str, value: Any, least: int) -> None:
    if not is_int(value) or value < least:
        raise LibraryArgumentError(
            function=function, name=name, value=repr(value), rule=f"an integer of {least} or more",
            advice="count it in positions",
        )  # fmt: skip


def check_image(function: str, height: int, width: int) -> None:
    check_number(function, "height", height, least=1)
    check_number(function, "width", width, least=1)


def check_tensor(function: str, name: str, value: Any, ranks: tuple[int, ...], shapes: str) -> Tensor:
    """Returns `value` if it is an integer tensor of one of these ranks."""
    return check_kind(
        function, name, value, ranks, isinstance(value, Tensor) and value.dtype in INTEGERS,
        rule=f"an integer tensor of shape {shapes}",
        advice="convert it, e.g. torch.as_tensor(values, dtype=torch.int32, device=query.device)",
    )  # fmt: skip


def check_kind(
    function: str, name: str, value: Any, ranks: tuple[int, ...], fits: bool, *, rule: str, advice: str
) -> Tensor:
    """Returns `value` if it is a tensor of one of these ranks and `fits` is true."""
    if isinstance(value, Tensor) and value.dim() in ranks and fits:
        return value
    given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise LibraryArgumentError(function=function, name=name, value=given, rule=rule, advice=advice)


def check_counts(function: str, name: str, value: Any, shape: str, least: int = 0) -> None:
    """Accepts one number of positions, or a tensor of such numbers; reads no values of a tensor."""
    if isinstance(value, Tensor):
        check_tensor(function, name, value, ranks=(1,), shapes=shape)
    else:
        check_number(function, name, value, least)


def check_extents(function: str, name: str, value: Any, axes: int) -> None:
    """Accepts a tuple with one positive integer for each axis."""
    if not isinstance(value, tuple) or len(value) != axes or not all(is_int(n) and n > 0 for n in value):
        raise LibraryArgumentError(
            function=function, name=name, value=repr(value), rule=f"a tuple of {axes} positive integers",
            advice="give one number for each axis, the slowest first",
        )  # fmt: skip


def check_axes(function: str, extent: Any) -> int:
    """Returns the number of an image's axes: 1, 2 or 3, each of one position or more."""
    if isinstance(extent, tuple) and len(extent) in (1, 2, 3) and all(is_int(n) and n > 0 for n in extent):
        return len(extent)
    raise LibraryArgumentError(
        function=function, name="extent", value=repr(extent), rule="a tuple of 1, 2 or 3 positive integers",
        advice="write (length,), (height, width) or (frames, height, width)",
    )  # fmt: skip


def check_positive(function: str, name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise LibraryArgumentError(
            function=function, name=name, value=repr(value), rule="a positive number",
            advice=f"write e.g. {function}(50.0)",
        )  # fmt: skip


def check_float(function: str, name: str, value: Any, ranks: tuple[int, ...], shapes: str) -> Tensor:
    """Returns `value` if it is a floating-point tensor of one of these ranks."""
    return check_kind(
        function, name, value, ranks, isinstance(value, Tensor) and value.is_floating_point(),
        rule=f"a floating-point tensor of shape {shapes}",
        advice="make it e.g. with torch.zeros(..., device=query.device), a parameter if it is learned",
    )  # fmt: skip
