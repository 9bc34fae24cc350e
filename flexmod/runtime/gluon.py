"""Gives Gluon one set of names, so that generated Hopper kernels run with any installed Triton.

Triton 3.9 renamed the TMA unit's copies and the barrier of a group of warps, and exports the sum into memory
that 3.6 has only in its builder.

    load_tile(descriptor, [b, h, row, column], barrier, tile)    memory to shared memory; zeros past an end
    store_tile(descriptor, [b, h, row, column], tile)            shared memory to memory, clipped at the ends
    add_tile(descriptor, [b, h, row, column], tile)              the same, as a sum with what is there
    stores_read()                                                waits until stores have read shared memory
    tile_read()                                                  waits until all threads have read a tile, and
                                                                 lets the TMA unit write there
    opaque(number)                                               the int32 or float32, opaque to the compiler
    pack_float8(numbers, dtype)                                  each four neighbors in a row as one int32
    unpack_float8(packed, layout, dtype)                         the float8 numbers, an operand of this layout
    running_max(before, tile)                                    by row, the largest of `before` and the tile
    by_row_of(tile, numbers)                                     a number for each row of a tile, as a column
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from flexmod.runtime.private_triton import add_tile as add_tile
from flexmod.runtime.private_triton import canonicalize_dtype

if TYPE_CHECKING:  # a second process compiles without torch
    import torch

if hasattr(tma, "async_load"):
    load_tile = tma.async_load
    store_tile = tma.async_store
else:
    load_tile = tma.async_copy_global_to_shared
    store_tile = tma.async_copy_shared_to_global
threads_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def stores_read():  # type: ignore[no-untyped-def]
    tma.store_wait(0)


@gluon.jit
def tile_read():  # type: ignore[no-untyped-def]
    threads_meet()
    fence_async_shared()


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


@triton.constexpr_function
def _larger_of_two_rows(columns: int) -> str:
    """Returns PTX for the largest number in a quarter of a row of `columns` numbers, for two rows.

    Operands: the results $0 and $1; numbers of the two rows, in turn; the rows' largest numbers until then.

    The chip compares two floats at a time, or three integers. Floats without a sign are ordered like signed
    integers. If all numbers have a sign, the one with the least unsigned integer is the largest. It counts
    only if the largest number until then has a sign too.
    """

    def compared(operation: str, first: str, second: str) -> str:
        lines = [f"mov.b32 {first}, $2; mov.b32 {second}, $3;"]
        for place in range(4, before, 2):
            for row, number in ((first, place), (second, place + 1)):
                lines.append(f"{operation} {row}, {row}, ${number};")
        return " ".join(lines)

    before = 2 + columns // 2
    signed = "setp.lt.s32 {0}, ${1}, 0; setp.lt.and.s32 {0}, ${2}, 0, {0};"
    return (
        f"{{.reg .pred p, q, r; .reg .b32 a, b; {compared('max.s32', '$0', '$1')} "
        f"{signed.format('p', 0, before)} {signed.format('q', 1, before + 1)} "
        "or.pred r, p, q; @!r bra KNOWN; "
        f"{compared('min.u32', 'a', 'b')} @p mov.b32 $0, a; @q mov.b32 $1, b; KNOWN: }}"
    )


@gluon.jit
def by_row_of(tile, numbers):  # type: ignore[no-untyped-def]
    return gl.convert_layout(numbers, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def _columns_of(tile):  # type: ignore[no-untyped-def]
    rows: gl.constexpr = tile.shape[0]
    count: gl.constexpr = tile.shape[2] // 2
    even, odd = gl.split(tile.reshape([rows, tile.shape[1], count, 2]))
    if count == 1:
        columns = (even.reshape([rows, tile.shape[1]]), odd.reshape([rows, tile.shape[1]]))
    else:
        columns = _columns_of(even) + _columns_of(odd)
    return columns


@gluon.jit
def running_max(before, tile):  # type: ignore[no-untyped-def]
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    # of eight columns a thread has two
    pairs = tile.to(gl.int32, bitcast=True).reshape([rows, columns // 8, 4, 2])
    own = _columns_of(gl.permute(pairs, (0, 2, 1, 3)).reshape([rows, 4, columns // 4]))
    given = own + (by_row_of(own[0], before).to(gl.int32, bitcast=True),)
    text: gl.constexpr = _larger_of_two_rows(columns)
    kinds: gl.constexpr = "=&r,=&r" + ",r" * (columns // 2 + 2)
    largest = gl.inline_asm_elementwise(text, kinds, given, gl.int32, is_pure=True, pack=2)
    largest = gl.max(largest.to(gl.float32, bitcast=True), 1)
    return gl.maximum(before, gl.convert_layout(largest, before.type.layout))


def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> NVMMASharedLayout:
    """Returns a tile's layout in shared memory, as the TMA unit writes it and the matrix unit reads it."""
    return NVMMASharedLayout.get_default_for(list(block), tl.dtype(canonicalize_dtype(dtype)))
