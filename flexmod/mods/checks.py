"""Checks the arguments of the functions that make score mods. Each check raises LibraryArgumentError."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.masks.checks import check_kind


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
