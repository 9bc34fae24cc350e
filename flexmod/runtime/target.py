"""Describes the chips that flexmod compiles for.

Sources: the CUDA C++ programming guide, technical specifications per compute capability (maximum shared
memory per thread block); the CDNA3 instruction set manual (64 KB of local data share per workgroup).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from flexmod.codegen.device_functions import Family
from flexmod.errors import NotAGpuError, UnknownTarget
from flexmod.runtime.locks import lazy_imports

if TYPE_CHECKING:
    from flexmod.runtime.private_triton import GPUTarget


@dataclass(frozen=True)
class Target:
    """One kind of chip, or one device."""

    name: str
    """`sm_90`, `gfx942`."""
    backend: Literal["cuda", "hip"]
    shared_limit: int
    """Bytes of shared memory that one block can ask for."""
    warp_size: int = 32
    tensor_columns: int = 0
    """Columns of tensor memory that one block can have; 0 without such memory."""
    float8: bool = False
    """Its matrix unit multiplies float8_e4m3fn and float8_e5m2."""
    processors: int | None = None
    """Streaming multiprocessors or compute units of the device; None for a kind of chip."""

    @property
    def triton(self) -> GPUTarget:
        with lazy_imports():
            from flexmod.runtime.private_triton import GPUTarget
        arch = int(self.name.removeprefix("sm_")) if self.backend == "cuda" else self.name
        return GPUTarget(self.backend, arch, self.warp_size)


_KB = 1024
_TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 163 * _KB),
        Target("sm_86", "cuda", 99 * _KB),
        Target("sm_87", "cuda", 163 * _KB),
        Target("sm_89", "cuda", 99 * _KB, float8=True),
        Target("sm_90", "cuda", 227 * _KB, float8=True),
        Target("sm_100", "cuda", 227 * _KB, tensor_columns=512, float8=True),
        Target("sm_103", "cuda", 227 * _KB, tensor_columns=512, float8=True),
        Target("sm_120", "cuda", 99 * _KB, float8=True),
        Target("gfx942", "hip", 64 * _KB, warp_size=64),
    )
}
NAMES = tuple(_TARGETS)
# The oldest chip that Triton compiles for, and the chip of our measurements: defaults of builds, and examples
# in messages.
OLDEST, MEASURED = "sm_80", "sm_90"


def named(name: str) -> Target:
    """Returns the kind of chip with this name.

    Raises:
        UnknownTarget: it is not in the table.
    """
    if name not in _TARGETS:
        raise UnknownTarget(name=name, known=", ".join(_TARGETS))
    return _TARGETS[name]


def family_of(name: str) -> Family:
    """Returns the family of a chip, whose instructions its kernels may use."""
    number = int(name.removeprefix("sm_")) if name.startswith("sm_") else 0
    return "nvidia_early" if number >= 90 else "nvidia" if number >= 75 else ""


def target_of(device: torch.device | str) -> Target:
    """Returns the facts of a present device from its driver. Cached per device.

    Raises:
        NotAGpuError: it is not a CUDA or ROCm device.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise NotAGpuError(device=device, example=MEASURED)
    return _read(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _read(index: int) -> Target:
    facts = torch.cuda.get_device_properties(index)
    processors, warp_size = facts.multi_processor_count, getattr(facts, "warp_size", 32)
    if torch.version.hip:
        name = facts.gcnArchName.partition(":")[0]
        known = _TARGETS.get(name, Target(name, "hip", 64 * _KB))
        return replace(known, warp_size=warp_size, processors=processors)
    name = f"sm_{facts.major}{facts.minor}"
    float8 = (facts.major, facts.minor) >= (8, 9)
    other = Target(name, "cuda", facts.shared_memory_per_block, float8=float8)
    known = _TARGETS.get(name, other)
    limit = getattr(facts, "shared_memory_per_block_optin", known.shared_limit)
    return replace(known, shared_limit=limit, warp_size=warp_size, processors=processors)
