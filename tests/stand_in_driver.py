"""A driver for Triton that names a chip and has none: kernels are compiled for it by the way of a launch."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class Driver:
    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: list[tuple[str, bool]] = []
"""(kernel, whether Triton found it in its cache), in the order in which they came."""


def _listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
    compiled.append((src.name, cache_hit))


def install(arch: int = 90) -> None:
    driver.set_active(Driver(GPUTarget("cuda", arch, 32)))  # type: ignore[arg-type]
    triton.knobs.compilation.listener = _listen


def count() -> int:
    """How many kernels were compiled, and not found."""
    return sum(not hit for _, hit in compiled)
