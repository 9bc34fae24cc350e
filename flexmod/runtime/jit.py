"""Triton's own launcher: compiles a kernel for the arguments of a launch, and launches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexmod.runtime.counters import filled


def start(function: Any, grid: tuple[int], device: torch.device | None, arguments: Mapping[str, Any]) -> Any:
    """function[grid](**arguments) on the device, or in the interpreter where there is none.

    Returns what Triton compiled.
    """
    if device is None:
        return function[grid](**arguments)
    with torch.cuda.device(device):
        return function[grid](**_ready(arguments, device))


def compiled(function: Any, device: torch.device, arguments: Mapping[str, Any]) -> Any:
    """What a launch with these arguments would run."""
    with torch.cuda.device(device):
        return function.warmup(grid=(1,), **_ready(arguments, device))


def _ready(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Products fused with sums, said outright: Triton's default for it is about to change."""
    return {"enable_fp_fusion": True, **filled(arguments, device)}
