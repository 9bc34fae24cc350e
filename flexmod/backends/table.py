"""Finds backends by name. A call imports only the modules of its backend."""

from __future__ import annotations

from functools import cache
from typing import Any

from flexmod.runtime.lazy_imports import lazy_imports


@cache
def backend(name: str) -> Any:
    """Returns a backend, see `interface.py`. Has Triton start beside the first call on a GPU.

    Raises MissingPackage.
    """
    with lazy_imports():
        if name in ("cpu", "reference"):
            from flexmod.backends import in_torch

            return in_torch.ON_CPU if name == "cpu" else in_torch.REFERENCE
        from flexmod.backends import generated
        from flexmod.runtime import private_triton, side_by_side
    if name != "triton":
        return generated.INTERPRETED
    if side_by_side.threads() > 1:
        side_by_side.later(private_triton.start_compiler)
    return generated.ON_GPU
