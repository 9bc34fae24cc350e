"""Gives Gluon one set of names, so that generated Hopper kernels run with any installed Triton.

Triton 3.9 renamed the TMA unit's copies, and exports the sum into memory that 3.6 has only in its builder.

    load_tile(descriptor, [b, h, row, column], barrier, tile)    memory to shared memory; zeros past an end
    store_tile(descriptor, [b, h, row, column], tile)            shared memory to memory, clipped at the ends
    add_tile(descriptor, [b, h, row, column], tile)              the same, as a sum with what is there
    stores_read()                                                waits until stores have read shared memory
    opaque(number)                                               the int32 or float32, opaque to the compiler
    pack_float8(numbers, dtype)                                  each four neighbors in a row as one int32
    unpack_float8(packed, layout, dtype)                         the float8 numbers, an operand of this layout
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from flexmod.runtime.private_triton import add_tile as add_tile

if hasattr(tma, "async_load"):
    load_tile = tma.async_load
    store_tile = tma.async_store
else:
    load_tile = tma.async_copy_global_to_shared
    store_tile = tma.async_copy_shared_to_global


@gluon.jit
def stores_read():  # type: ignore[no-untyped-def]
    tma.store_wait(0)


@gluon.jit
def opaque(number):  # type: ignore[no-untyped-def]
    # so the compiler computes dependent values at their use, and does not keep them in registers
    kind: gl.constexpr = "=f,f" if number.dtype == gl.float32 else "=r,r"
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", kind, [number], number.dtype, is_pure=False, pack=1)


@gluon.jit
def pack_float8(numbers, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    even, odd = gl.split(numbers.reshape([numbers.shape[0], numbers.shape[1] // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    cvt: gl.constexpr = "cvt.rn.satfinite." + ("e4m3x2" if dtype == gl.float8e4nv else "e5m2x2") + ".f32 "
    text: gl.constexpr = "{.reg .b16 a, b; " + cvt + "a, $2, $1; " + cvt + "b, $4, $3; mov.b32 $0, {a, b};}"
    four = [first, second, third, fourth]
    return gl.inline_asm_elementwise(text, "=r,r,r,r,r", four, gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_float8(packed, layout: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    pair = gl.join(packed, packed)
    four = gl.convert_layout(gl.join(pair, pair).reshape([packed.shape[0], packed.shape[1] * 4]), layout)
    move: gl.constexpr = "mov.b32 $0, $1;"
    if dtype == gl.float8e4nv:
        made = gl.inline_asm_elementwise(move, "=r,r,r,r,r", [four], gl.float8e4nv, is_pure=True, pack=4)
    else:
        made = gl.inline_asm_elementwise(move, "=r,r,r,r,r", [four], gl.float8e5, is_pure=True, pack=4)
    return made


_DTYPES = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
}  # fmt: skip


def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> NVMMASharedLayout:
    """Returns a tile's layout in shared memory, as the TMA unit writes it and the matrix unit reads it."""
    return NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


def descriptor_type(block: tuple[int, ...], dtype: torch.dtype) -> str:
    """Returns Triton's type of a descriptor, for an offline compile."""
    return f"tensordesc<{_DTYPES[dtype]}{list(block)},{layout_of(block, dtype)!r}>"
