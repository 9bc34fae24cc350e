"""Compiles and launches kernels with Triton's own launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexmod.internals.triton import build_launcher
from flexmod.runtime.direct import COUNTER, filled


def start(function: Any, grid: tuple[int], device: torch.device | None, arguments: Mapping[str, Any]) -> Any:
    """Runs function[grid](**arguments) on the device, or in the interpreter if the device is None.

    Returns Triton's compiled kernel.
    """
    if device is None:
        return function[grid](**arguments)
    with torch.cuda.device(device):
        return function[grid](**_ready(arguments, device))


def compiled(function: Any, device: torch.device, arguments: Mapping[str, Any]) -> Any:
    """Returns the compiled kernel for a launch with these arguments."""
    with torch.cuda.device(device):
        return function.warmup(grid=(1,), **_ready(arguments, device))


def compile_ahead(function: Any, device: torch.device, arguments: Mapping[str, Any]) -> None:
    """Compiles the kernel for a launch, and its launcher in C, without loading or allocating anything.

    Tensors among `arguments` are stand-ins on meta, as aligned as the real ones.
    """
    counter = torch.empty(1, dtype=torch.int32, device="meta")
    given = {name: counter if value is COUNTER else value for name, value in arguments.items()}
    build_launcher(compiled(function, device, given))


def _ready(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Enables the fusion of products with sums explicitly, since Triton's default will change."""
    return {"enable_fp_fusion": True, **filled(arguments, device)}
