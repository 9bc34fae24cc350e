"""Corrects a private copy of Triton's interpreter (`interpreter.py`).

Triton 3.6 to 3.9 have these faults of arithmetic, which `correct` corrects in the private copy only:

- Operations on bfloat16 work on its raw 16 bits: a dot is wrong by orders of magnitude, a sum gives NaN.
- The cast from float32 to bfloat16 truncates, but a chip rounds to nearest even.
- A cast from float64 or an integer to bfloat16 gives a 16-bit integer.
- A dot and the dot of its transposes may differ in their last bits, so a backward would see other scores.
- A comparison keeps its operands' type, so a later operation with a block sees floats.
- An index comes from a one-element array, which newer numpy refuses.
- The operator `~` on an unsigned number asks numpy for -1 of that type.
- The maximum of a row of NaN alone makes numpy warn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexmod.errors import InterpreterOperationError

Array = NDArray[Any]
WITHOUT_WARNING = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}


def widen(bits: Array) -> Array:
    """Converts bfloat16, as uint16 bits, to float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Array) -> Array:
    """Converts numbers to bfloat16 bits (uint16) through float32, to nearest even; NaN stays NaN."""
    single = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = single.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def correct(interpreter: Any, tl: Any) -> None:
    """Replaces the faulty methods of the interpreter's builder and the language's tensor class."""
    builder = interpreter.InterpreterBuilder
    handle, numpy_dtype = interpreter.TensorHandle, interpreter._get_np_dtype
    bfloat16 = tl.bfloat16

    def numbers(x: Any) -> Array:
        return widen(x.data) if x.dtype.scalar == bfloat16 else x.data

    def pack(data: Array, dtype: Any) -> Any:
        # a comparison is a bool array whatever the operands are
        return handle(narrow(data) if dtype == bfloat16 and data.dtype != np.bool_ else data, dtype)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if lhs.dtype.scalar == bfloat16:
            result = pack(op(numbers(lhs), numbers(rhs)), bfloat16)
        else:
            result = plain_binary(self, lhs, rhs, op)
        return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    def unary_op(self: Any, arg: Any, op: Callable[..., Array]) -> Any:
        return pack(op(numbers(arg)), arg.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar == bfloat16:
            return pack(numbers(x) * numbers(y) + numbers(z), bfloat16)
        if z.dtype.scalar in (tl.float16, tl.float32):  # Triton 3.6 would round the product too
            exact = x.data.astype(np.float64) * y.data + z.data
            return handle(exact.astype(z.data.dtype), z.dtype.scalar)
        return plain_fma(self, x, y, z)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if target == src.dtype.scalar:
            return handle(src.data, target)
        if target == bfloat16:
            return handle(narrow(numbers(src)), bfloat16)
        return handle(numbers(src).astype(numpy_dtype(dst_type)), target)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        to_nearest = rounding is None or rounding == interpreter._ir.ROUNDING_MODE.RTNE
        if to_nearest and min(src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth) >= 16:
            return cast_impl(self, src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if min(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) < 16:
            return plain_dot(self, a, b, d, *options)
        # numpy may sum a product and its transpose in different orders; a chip gives both the same bits
        dtype = np.result_type(d.data.dtype, np.float64)
        product = np.matmul(numbers(a).astype(dtype, copy=False), numbers(b).astype(dtype, copy=False))
        return handle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def get_bf16(self: Any, value: float) -> Any:
        return handle(narrow(np.array([value])), bfloat16)

    def get_all_ones_value(self: Any, type: Any) -> Any:
        if type.scalar.is_int_unsigned():
            return handle(np.invert(np.zeros(1, numpy_dtype(type))), type.scalar)
        return plain_ones(self, type)

    def min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return plain_min_max(self, input, WITHOUT_WARNING.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    plain_min_max = interpreter.ReduceOps.min_max
    interpreter.ReduceOps.min_max = min_max
    plain_ones = builder.get_all_ones_value
    plain_binary, plain_fma = builder.binary_op, builder.create_fma
    plain_fp_to_fp, plain_dot = builder.create_fp_to_fp, builder.create_dot
    mended = (binary_op, unary_op, create_fma, cast_impl, create_fp_to_fp, create_dot, get_bf16)
    for function in (*mended, get_all_ones_value):
        setattr(builder, function.__name__, function)
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    _correct_reductions(tl)


def _correct_reductions(tl: Any) -> None:
    """Makes reductions and scans raise that would work on the bits of bfloat16."""

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(input: Any, *args: Any, **options: Any) -> Any:
            for x in input if isinstance(input, tuple) else (input,):
                if x.dtype.scalar == tl.bfloat16:
                    raise InterpreterOperationError(operation="a reduction or scan of bfloat16")
            return function(input, *args, **options)

        return run

    for name in ("reduce", "associative_scan"):
        replacement = checked(getattr(tl.core, name))
        for module in (tl, tl.core):
            setattr(module, name, replacement)
