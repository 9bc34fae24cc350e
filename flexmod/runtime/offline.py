"""Compiles a kernel for a chip that need not be present, and reports registers, spills and shared memory.

The numbers come from ptxas (registers, spills) and the disassembler (instructions), or on AMD from the
assembly's metadata. Triton's package includes these tools.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from triton import JITFunction

from flexmod.errors import EnvironmentSwitchError
from flexmod.runtime import compiler_bugs, private_triton
from flexmod.runtime.direct import options_of, with_counters
from flexmod.runtime.private_triton import OutOfResources, assembler, compile_for, disassembler
from flexmod.runtime.target import MEASURED, Target, named

STAGES = 3  # the default of a launch

_MATRIX_SASS = re.compile(r"\b((?:[A-Z]GMMA|[A-Z]MMA|UTC[A-Z]*MMA))\b")
_MATRIX_PTX = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
_MATRIX_AMD = re.compile(r"\b(v_s?mfma)_")


@dataclass(frozen=True)
class Report:
    """One kernel compiled for one target."""

    target: Target
    shared: int
    """Bytes of shared memory of a block."""
    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes that a thread stores to and loads from local memory for want of registers."""
    local: int
    """Bytes of local memory of a thread. Triton calls four of them a spilled register."""
    warnings: tuple[str, ...] = ()
    """What the assembler warned of, e.g. serialized matrix instructions (C7510)."""
    size: int = 0
    """Bytes of its instructions, where `compiler_bugs` counts them; otherwise 0."""
    losses: tuple[str, ...] = ()
    """What the machine code lacks of what its text asks for: see `compiler_bugs`."""
    tensor_columns: int = 0
    """Columns of tensor memory of a block, on chips with such memory."""
    asm: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Every stage by name: ttir, ttgir, llir, ptx, cubin; amdgcn, hsaco."""

    @cached_property
    def sass(self) -> str:
        """The disassembled cubin, or "" without one or without the tool."""
        return _disassemble(self.asm["cubin"]) if "cubin" in self.asm else ""

    @cached_property
    def matrix_instructions(self) -> Mapping[str, int]:
        """Count in the final code by mnemonic: HMMA, HGMMA, UTCHMMA; v_mfma on AMD."""
        if "amdgcn" in self.asm:
            return Counter(_MATRIX_AMD.findall(self.asm["amdgcn"]))
        found = _MATRIX_SASS.findall(self.sass) if self.sass else _MATRIX_PTX.findall(self.asm.get("ptx", ""))
        return Counter(found)

    @property
    def too_large(self) -> OutOfResources | None:
        """The error of Triton's loader if a block needs more memory than the target has."""
        if self.shared > self.target.shared_limit:
            return OutOfResources(self.shared, self.target.shared_limit, "shared memory")
        if self.tensor_columns > self.target.tensor_columns:
            return OutOfResources(self.tensor_columns, self.target.tensor_columns, "tensor memory")
        return None

    @property
    def fits(self) -> bool:
        """Whether a block of the target has enough memory for it."""
        return self.too_large is None

    def __str__(self) -> str:
        matrix = " ".join(f"{name}={count}" for name, count in sorted(self.matrix_instructions.items()))
        head = (
            f"{self.target.name}: shared {self.shared} of {self.target.shared_limit} bytes, "
            f"{self.registers} registers, {self.spills} bytes of spills, {matrix or 'no matrix instructions'}"
        )
        return "\n  ".join([head, *self.warnings])


def compile(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    target: str | Target = MEASURED,
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    divisible: Mapping[str, bool] | None = None,
    **options: object,
) -> Report:
    """Compiles one `@triton.jit` or `@gluon.jit` kernel.

        signature   Triton's type of each run-time parameter: "*bf16", "i32", "i64", "fp32", ...
        constexprs  values of the other parameters; None for an absent pointer
        target      a name of `target.NAMES`, or a Target
        divisible   whether Triton may take a parameter for a multiple of 16 (pointers: of 16 bytes); None
                    means every pointer
        options     further options of Triton's backend, e.g. maxnreg

    Raises:
        UnknownTarget: the name is not known.
        triton.CompilationError: the kernel does not compile.
    """
    chip = named(target) if isinstance(target, str) else target
    if divisible is None:
        divisible = {name: True for name, kind in signature.items() if kind.startswith("*")}
    options = {"num_warps": num_warps, "num_stages": num_stages, **options_of(kernel), **options}
    compiled = compile_for(chip.triton, kernel, signature, constexprs, divisible, options)
    if chip.backend == "hip":
        return _read_amd(chip, compiled.metadata.shared, dict(compiled.asm))
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return _read_nvidia(chip, compiled.metadata.shared, columns, dict(compiled.asm))


def specialized(
    kernel: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, object], dict[str, Any]]:
    """Returns what Triton specializes a kernel on for a launch with these arguments, see `compile`: the
    signature, the constants, and `divisible` with all options.

    Raises EnvironmentSwitchError where TRITON_INTERPRET=1: such a process compiles no kernel.
    """
    if not isinstance(kernel, JITFunction):
        raise EnvironmentSwitchError(
            name="TRITON_INTERPRET", value=os.environ.get("TRITON_INTERPRET"),
            accepted="0 to compile kernels; kernel_options={'BACKEND': 'INTERPRET'} interprets without it",
        )  # fmt: skip
    signature, constants, divisible, options = private_triton.specialized(kernel, with_counters(arguments))
    return signature, constants, {"num_warps": 4, "num_stages": STAGES, "divisible": divisible, **options}


def _read_nvidia(target: Target, shared: int, columns: int, asm: dict[str, Any]) -> Report:
    log = _ptxas(target, asm["ptx"])
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    lines = {line.strip() for line in log.splitlines() if "warning" in line.lower() or "Potential" in line}
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    stack = max(map(int, re.findall(r"(\d+) bytes stack frame", log)), default=0)
    size, losses = compiler_bugs.size(asm["cubin"]), compiler_bugs.losses(asm["ptx"], asm["cubin"])
    warnings = tuple(sorted(lines))
    spilled = sum(map(int, spills))
    return Report(target, shared, registers, spilled, stack, warnings, size, losses, columns, asm)


def _read_amd(target: Target, shared: int, asm: dict[str, Any]) -> Report:
    text = asm["amdgcn"]

    def fact(name: str) -> int:
        return max(map(int, re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)

    spilled = 4 * (fact("vgpr_spill_count") + fact("sgpr_spill_count"))
    stack = fact("private_segment_fixed_size")
    return Report(target, shared, fact("vgpr_count"), spilled, stack, asm=asm)


def _ptxas(target: Target, ptx: str) -> str:
    """Runs the assembler again for its verbose log, which Triton does not keep."""
    match = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert match is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        files = [str(source), "-o", str(source.with_suffix(".cubin"))]
        command = [*assembler(target.triton), "-v", f"--gpu-name={match[1]}", *files]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _disassemble(cubin: bytes) -> str:
    """Returns SASS, or "" if Triton's package lacks the tool."""
    tool = disassembler()
    if tool is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True).stdout
