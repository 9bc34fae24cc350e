"""Private names of Triton, each behind a name of flexmod's: the one file to look at when Triton changes.

Triton's documentation has `triton`, `triton.language`, `triton.testing` and `triton.experimental.gluon`; all
else of it is private. This file holds for Triton 3.6 to 3.9.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget as GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin as builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.errors import OutOfResources as OutOfResources

# compiles without a launch


def compile_for(
    target: GPUTarget,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    divisible: Collection[str],
    options: Mapping[str, object],
) -> Any:
    """What Triton compiles of a kernel: `asm` has every stage by name, `metadata.shared` bytes.

    `signature` has Triton's types of the run-time parameters. It may take those of `divisible` for multiples
    of 16.
    """
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: signature.get(name, "constexpr") for name in kernel.arg_names},
        dict(constexprs),
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    return triton.compile(source, target=target, options=dict(options))


def assembler(target: GPUTarget) -> list[str]:
    """The ptxas that Triton runs for a chip, with those of its flags that change how registers are used."""
    from triton.backends.nvidia.compiler import get_ptxas

    return [get_ptxas(target.arch).path, *_assembler_flags()]


@cache
def _assembler_flags() -> list[str]:
    """Later versions have such a flag."""
    from triton.backends.nvidia.compiler import CUDABackend

    found = re.search(r"--regAllocOptLevel=\d", inspect.getsource(CUDABackend.make_cubin))
    return [found[0]] if found else []


def disassembler() -> Path | None:
    """cuobjdump; None where Triton came without it."""
    tool = Path(triton.knobs.nvidia.cuobjdump.path)
    return tool if tool.exists() else None


# Gluon

if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def add_tile(descriptor, coord, tile, _semantic=None):  # type: ignore[no-untyped-def]
        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, tile.handle)
