"""Calls one device function by itself: in the interpreter, or compiled where there is a GPU."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.codegen import cache, device_functions
from flexmod.runtime.interpreter import interpreted

KERNEL = """

@triton.jit
def run({outs}, {given}, COUNT, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < COUNT
    {loads}
    {results} = {call}
    {stores}
"""
IMPORT = re.compile(r"from flexmod\.codegen\.device_functions\.(\w+) import (?:\([^)]*\)|.*)\n")
BLOCK = 256


def text_of(file: str) -> str:
    """A file of device functions, with those that it imports in it: what the interpreter takes."""
    text = IMPORT.sub(lambda found: text_of(found[1]), device_functions.module_text(file))
    return text if "import triton.language" in text else f"import triton.language as tl\n{text}"


def loaded(file: str, kernels: str) -> ModuleType:
    """A module of the file's functions and of kernels that call them."""
    return cache.load(text_of(file) + kernels, file)


def kernel(module: ModuleType, name: str, on: Tensor) -> Any:
    """A kernel of a module for tensors of this device."""
    return getattr(module if on.is_cuda else interpreted(module), name)


def applied(file: str, call: str, *given: Tensor, dtypes: tuple[torch.dtype, ...] = ()) -> Any:
    """What a call makes of each element of a, b, ..: one result, or one for each of several `dtypes`."""
    given = torch.broadcast_tensors(*given)
    dtypes = dtypes or (given[0].dtype,)
    names = "abcdefgh"[: len(given)]
    source = KERNEL.format(
        outs=", ".join(f"OUT{n}" for n in range(len(dtypes))),
        given=", ".join(name.upper() for name in names),
        loads="\n    ".join(
            f"{name} = tl.load({name.upper()} + place, mask=inside, other=1)" for name in names
        ),
        results=", ".join(f"result{n}" for n in range(len(dtypes))),
        call=call,
        stores="\n    ".join(f"tl.store(OUT{n} + place, result{n}, mask=inside)" for n in range(len(dtypes))),
    )
    flat = [tensor.contiguous().view(-1) for tensor in given]
    outs = [torch.empty_like(flat[0], dtype=dtype) for dtype in dtypes]
    count = len(flat[0])
    run = kernel(loaded(file, source), "run", flat[0])
    run[(-(-count // BLOCK),)](*outs, *flat, count, BLOCK=BLOCK, enable_fp_fusion=True)
    shaped = [out.view(given[0].shape).cpu() for out in outs]
    return shaped[0] if len(shaped) == 1 else tuple(shaped)
