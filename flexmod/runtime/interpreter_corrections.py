"""Corrects a private copy of Triton's interpreter (`interpreter.py`), and makes it quicker.

Triton 3.6 to 3.9 have these faults of arithmetic, which `correct` corrects in the private copy only:

- Operations on bfloat16 work on its raw 16 bits: a dot is wrong by orders of magnitude, a sum gives NaN.
- The cast from float32 to bfloat16 truncates, but a chip rounds to nearest even.
- A cast from float64 or an integer to bfloat16 gives a 16-bit integer.
- A dot and the dot of its transposes may differ in their last bits, so a backward would see other scores.
- A comparison keeps its operands' type, so a later operation with a block sees floats.
- An index comes from a one-element array, which newer numpy refuses.
- The operator `~` on an unsigned number asks numpy for -1 of that type.
- The maximum of a row of NaN alone makes numpy warn.

Its types and checks take more time than numpy's arithmetic: with `quicken` a kernel takes 0.3 of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexmod.errors import InterpreterOperationError

Array = NDArray[Any]
MEMO = 4096
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


def quicken(interpreter: Any, tl: Any) -> None:
    """Shortens the checks of an operation, before the language is patched.

    Most operations have operands of one dtype, and there are few dtypes, block types and numbers.
    """
    _quicken_types(interpreter, tl.core)
    semantic = type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    make_tensor = semantic.to_tensor
    # A division converts the other floating types, and a pointer is no operand of most operations.
    kept = {*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, "fp32", "fp64"}

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and lhs.dtype.name in kept:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *flags, **named)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else make_tensor(self, x, check_type)

    for function in (binary_op_type_checking_impl, broadcast_impl_value, to_tensor):
        setattr(semantic, function.__name__, function)
    for name in ("computation_type_impl", "scalar_constant"):  # no operation writes to an operand
        setattr(semantic, name, lru_cache(MEMO, typed=True)(getattr(semantic, name)))

    def patch_attr(owner: Any, name: str, member: Any, *context: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that _semantic is given

        def run(*args: Any, _semantic: Any = None, **options: Any) -> Any:
            return function(*args, _semantic=interpreter.interpreter_semantic, **options)

        setattr(owner, name, run)

    interpreter._patch_attr = patch_attr


def _quicken_types(interpreter: Any, core: Any) -> None:
    """Makes equal block types one object, and remembers their shapes.

    Each operation makes several of these. All block types are kept, since they are compared as objects:
    kernels have few dtypes and sizes of tiles.
    """
    make_block, equal, equal_tuples = core.block_type.__init__, core.dtype.__eq__, core.tuple.__eq__
    known: dict[Any, Any] = {}

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = element_ty, *[getattr(size, "value", size) for size in shape]
        if key not in known:
            made = object.__new__(cls)
            make_block(made, element_ty, shape)
            known[key] = made
        return known[key]

    def same_dtype(self: Any, other: Any) -> bool:
        if self is other:
            return True
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    def same_tuple(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        if isinstance(values, list):  # no unwrapping: a number and its constexpr are equal
            return core.constexpr(self.values == values)
        return equal_tuples(self, other)

    @lru_cache(MEMO)
    def shape_of(type: Any) -> tuple[Any, Any]:
        sizes = type.shape if type.is_block() else ()
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type)

    core.dtype.__eq__, core.tuple.__eq__, core.tensor.__init__ = same_dtype, same_tuple, tensor
    core.pointer_type.__hash__ = core.dtype.__hash__  # Triton leaves it without one
    block = core.block_type
    block.__new__, block.__init__ = new_block, lambda self, element_ty, shape: None
    block.__eq__, block.__hash__ = object.__eq__, object.__hash__
    for name in ("with_element_ty", "to_ir"):
        setattr(block, name, lru_cache(MEMO)(getattr(block, name)))
    interpreter._get_np_dtype = lru_cache(MEMO)(interpreter._get_np_dtype)
