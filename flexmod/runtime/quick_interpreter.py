"""Makes a private copy of Triton's interpreter (`interpreter.py`) quicker.

Its types and checks take more time than numpy's arithmetic: with `quicken` a kernel takes 0.15 of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Method = Callable[..., Any]
Function = Callable[[Array, Array], Array]
COMPARISONS: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal,
}  # fmt: skip
ARITHMETIC: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
LOGIC: dict[str, Function] = {"and": np.bitwise_and, "or": np.bitwise_or}
OPERATORS = {**COMPARISONS, **ARITHMETIC, **LOGIC}
MEMO = 4096
ALL = slice(None)


def quicken(interpreter: Any, tl: Any) -> None:
    """Shortens the checks of an operation, before the language is patched.

    Most operations have operands of one dtype, and there are few dtypes, block types and numbers.
    """
    _quicken_types(interpreter, tl.core)
    semantic = type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    make_tensor, convert = semantic.to_tensor, semantic.cast
    # A division converts the other floating types, and a pointer is no operand of most operations.
    kept = {*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, "fp32", "fp64"}

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and lhs.dtype.name in kept:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *flags, **named)

    common: dict[Any, Any] = {}  # types of two operands of one shape

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type:
            return lhs, rhs
        pair = lhs.type, rhs.type
        if pair not in common:
            found = broadcast(self, lhs, rhs)
            common[pair] = found[0].type, found[1].type
            return found
        return tuple(map(spread, (lhs, rhs), common[pair]))

    def spread(x: Any, kind: Any) -> Any:
        if x.type is kind:
            return x
        data = np.empty(sizes(kind), x.handle.data.dtype)
        data[...] = x.handle.data
        return tl.tensor(interpreter.TensorHandle(data, x.dtype), kind)

    @lru_cache(MEMO)
    def sizes(block: Any) -> tuple[int, ...]:
        return tuple(map(int, block.shape))

    def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        return input if input.dtype is dst_ty.scalar else convert(self, input, dst_ty, *rounding, **named)

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else make_tensor(self, x, check_type)

    for function in (binary_op_type_checking_impl, broadcast_impl_value, cast, to_tensor):
        setattr(semantic, function.__name__, function)
    semantic.computation_type_impl = lru_cache(MEMO, typed=True)(semantic.computation_type_impl)
    constant = semantic.scalar_constant
    known_constant = lru_cache(MEMO, typed=True)(constant)  # no operation writes to an operand

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        is_zero = type(value) is float and not value  # 0.0 is equal to -0.0
        return (constant if is_zero else known_constant)(self, value, dtype)

    semantic.scalar_constant = scalar_constant

    def patch_attr(owner: Any, name: str, member: Any, *context: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that _semantic is given

        def run(*args: Any, _semantic: Any = None, **options: Any) -> Any:
            return function(*args, _semantic=interpreter.interpreter_semantic, **options)

        setattr(owner, name, quick[name](run) if owner is tl.core.tensor and name in quick else run)

    quick = _quick_methods(interpreter, tl, kept)
    interpreter._patch_attr = patch_attr


def _quicken_types(interpreter: Any, core: Any) -> None:
    """Makes equal types one object, and remembers the shapes of blocks.

    Each operation makes several of these. All types are kept, since they are compared as objects: kernels
    have few dtypes and sizes of tiles.
    """
    equal, equal_tuples = core.dtype.__eq__, core.tuple.__eq__

    def one_object(kind: Any, key_of: Callable[..., Any], known: dict[Any, Any]) -> None:
        make = kind.__init__

        def new(cls: Any, *args: Any, **named: Any) -> Any:
            key = key_of(*args, **named)
            if key not in known:
                made = object.__new__(cls)
                make(made, *args, **named)
                known[key] = made
            return known[key]

        kind.__new__, kind.__init__, kind.__hash__ = new, lambda self, *args, **named: None, object.__hash__

    def number(size: Any) -> Any:
        return getattr(size, "value", size)

    def pointed(element_ty: Any, address_space: int = 1, const: bool = False) -> Any:
        return number(element_ty), address_space, const

    dtypes = [value for value in vars(core).values() if type(value) is core.dtype]
    one_object(core.dtype, number, {dtype.name: dtype for dtype in dtypes})
    one_object(core.pointer_type, pointed, {})
    one_object(core.block_type, lambda element_ty, shape: (element_ty, *map(number, shape)), {})

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

    @lru_cache(MEMO)
    def most_bytes(dtype: Any) -> float:
        return math.inf if dtype.is_ptr() else dtype.primitive_bitwidth // 8

    def handle(self: Any, data: Array, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and data.itemsize > most_bytes(dtype):
            self.__post_init__()  # raises

    core.dtype.__eq__, core.tuple.__eq__, core.tensor.__init__ = same_dtype, same_tuple, tensor
    interpreter.TensorHandle.__init__ = handle
    block = core.block_type
    block.__eq__ = object.__eq__
    for name in ("with_element_ty", "to_ir"):
        setattr(block, name, lru_cache(MEMO)(getattr(block, name)))
    interpreter._get_np_dtype = lru_cache(MEMO)(interpreter._get_np_dtype)


def _quick_methods(interpreter: Any, tl: Any, dtypes: set[str]) -> dict[str, Callable[[Method], Method]]:
    """Makes quicker methods of tensors from Triton's, by name: numpy computes where no operand is converted.

    The first call for each pair of types goes Triton's way, which finds the type of the result. An
    operand whose dtype is named in `dtypes` stays as it is beside one of the same dtype.
    """
    semantic, tensor, handle = interpreter.interpreter_semantic, tl.core.tensor, interpreter.TensorHandle
    signed = {*tl.dtype.SINT_TYPES}

    @lru_cache(MEMO, typed=True)
    def constant(dtype: str, number: Any) -> Any:
        """A number beside values of a dtype; itself where Triton would convert those."""
        like = semantic.scalar_constant(0, tl.dtype(dtype))
        beside, made = semantic.binary_op_type_checking_impl(like, number)
        return made if beside is like else number

    def operand(name: str, beside: Any, value: Any) -> Any:
        if type(value) is int or type(value) is float and value:  # 0.0 is equal to -0.0
            if beside.is_ptr() or name in COMPARISONS:
                return semantic.to_tensor(value)
            if beside.name in dtypes:
                return constant(beside.name, value)
        return value

    def function_of(name: str, first: Any, second: Any) -> Function | None:
        """The function of numpy for operands of these dtypes, or None."""
        if first.is_ptr():
            step = first.element_ty.primitive_bitwidth // 8 or 1
            moves = name == "add" and second.name in signed
            return (lambda x, y: x + step * y.astype(np.uint64)) if moves else None
        if first.name == "int1" and name in ARITHMETIC:  # numpy's 1 + 1 is 1
            return None
        alike = first is second and first.name in dtypes or signed.issuperset((first.name, second.name))
        return OPERATORS[name] if alike else None

    def quick_operator(name: str, turned: bool, plain: Method) -> Method:
        known: dict[Any, Any] = {}

        def operator(self: Any, other: Any, **options: Any) -> Any:
            if type(other) is tl.constexpr:
                other = other.value
            second = other if type(other) is tensor else operand(name, self.dtype, other)
            pair = self.type, getattr(second, "type", None)
            if pair not in known:
                found = plain(self, other, **options)
                function = None if pair[1] is None else function_of(name, self.dtype, second.dtype)
                known[pair] = function and (function, found.dtype, found.type)
                return found
            if known[pair] is None:
                return plain(self, other, **options)
            function, dtype, kind = known[pair]
            operands = self.handle.data, second.handle.data
            return tensor(handle(function(*(operands[::-1] if turned else operands)), dtype), kind)

        return operator

    def quick_index(plain: Method) -> Method:
        kinds: dict[Any, Any] = {}

        def with_axes(self: Any, places: Any, **options: Any) -> Any:
            """x[:, None]"""
            known = type(places) is tuple and all(place is None or place == ALL for place in places)
            if not known or not self.type.is_block():
                return plain(self, places, **options)
            key = self.type, *[place is None for place in places]
            if key not in kinds:
                found = plain(self, places, **options)
                kinds[key] = found.type
                return found
            return tensor(handle(self.handle.data[places], self.dtype), kinds[key])

        return with_axes

    straight = {f"__{name}__": partial(quick_operator, name, False) for name in OPERATORS}
    turned = {f"__r{name}__": partial(quick_operator, name, True) for name in OPERATORS}
    return {**straight, **turned, "__getitem__": quick_index}
