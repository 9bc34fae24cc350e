"""Finds backends by name. A call imports only the modules of its backend."""

from __future__ import annotations

from functools import cache
from typing import Any

from flexmod.runtime.locks import lazy_imports


@cache
def backend(name: str) -> Any:
    """Returns a backend, see `arguments.py`. Raises MissingPackage."""
    with lazy_imports():
        if name in ("cpu", "reference"):
            from flexmod.backends import in_torch

            return in_torch.ON_CPU if name == "cpu" else in_torch.REFERENCE
        from flexmod.runtime import side_by_side

        if name == "triton":
            side_by_side.start_ahead()
        from flexmod.backends import families

        return families.ON_GPU if name == "triton" else families.INTERPRETED
