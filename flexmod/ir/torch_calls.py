"""Translates functions and operators on traced values into operations of the table, or raises an error.

A function is a cast, a constant, an operation of the table, or a combination of these (`formulas.py`).

`Watch` and `WatchOperations` notice torch's own work on tensors while a mod is traced. Such work may read a
captured tensor's values: `t.item()`, `if t > 3`, `t * 2`. Its result becomes part of the graph, so the graph
is right for these values only, and the next call must trace the mod again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flexmod import errors
from flexmod.errors.base import a_type, counted
from flexmod.ir import advice, vector_calls, vectors
from flexmod.ir.formulas import (
    BINARY,
    CASTS,
    COMPOSED,
    FILLS,
    METADATA,
    OTHER_NAMES,
    REDUCTIONS,
    draws,
    writes,
)
from flexmod.ir.ops import BY_TORCH_NAME, category, promote, strong
from flexmod.ir.proxy import Proxy, TracedValue, Tracer, is_wide, mentions_traced, needs_value, plain_number
from flexmod.ir.source import user_line
from flexmod.runtime.private_torch import TorchDispatchMode, tree_leaves
from flexmod.runtime.tensor_kinds import check_storage, ends_the_process

CONCRETE = {"item", "tolist", "numpy"}
ROUNDINGS = {"floor": "floor_divide", "trunc": "trunc_divide"}
# torch's names of operands, in its order
OPERANDS = ("condition", "input", "self", "other", "exponent", "end", "weight", "tensor1", "tensor2")


def call(tracer: Tracer, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Translates a call of a torch function or method with a traced value among its arguments."""
    name = getattr(func, "__name__", str(func))
    refuse_impure(name, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("inplace", "out")}
    if name == "__getitem__":
        return vectors.indexed(tracer, *args)
    bare = name.strip("_")
    if name.startswith("__"):
        reverse = bare not in BINARY and bare[1:] in BINARY
        bare = BINARY.get(bare[1:] if reverse else bare, bare)
        args = args[::-1] if reverse else args
    if func is torch.Tensor.where:  # x.where(condition, y) is torch.where(condition, x, y)
        kwargs = {"input": args[0], **dict(zip(("condition", "other"), args[1:], strict=False)), **kwargs}
        args = ()
    bare = OTHER_NAMES.get(bare, bare)
    if not args and (bare in FILLS or bare in SPECIAL or bare in FACTS):
        args = tuple([kwargs.pop(each) for each in ("input", "self", "data") if each in kwargs][:1])
    if bare in FACTS:
        return getattr(args[0], bare)()
    wide = any(map(is_wide, (*args, *kwargs.values())))
    if bare in vector_calls.MAKES or (wide and vector_calls.reduces(bare, args, kwargs)):
        return vector_calls.call(tracer, bare, args, kwargs)
    if wide and bare in OF_SCALARS:
        return vectors.unrolled(tracer, bare, lambda *a, **k: call(tracer, func, a, k), args, kwargs)
    if bare in CASTS:
        return tracer.cast(args[0], CASTS[bare])
    if bare in FILLS:
        return _fill(tracer, bare, *args, **kwargs)
    if bare in SPECIAL:
        return SPECIAL[bare](tracer, *args, **kwargs)
    if bare in BY_TORCH_NAME:
        return _table_row(tracer, bare, args, kwargs)
    if bare in COMPOSED:
        return _composed(tracer, bare, args, kwargs)
    if bare in REDUCTIONS:
        raise vector_calls.reduction_error(bare, user_line())
    if bare in CONCRETE:
        raise errors.ConcreteValueError(operation=f".{bare}()", where=user_line(), advice=advice.SYMBOLIC)
    tables = [tracer.name_of(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()]
    where = user_line()
    raise errors.UnknownOperationError(
        operation=f"torch.{bare}", where=where, advice=advice.of_operation(bare, where, *tables[:1])
    )


Tracer.call = call


def refuse_impure(name: str, kwargs: dict[str, Any]) -> None:
    """Raises an error for random numbers and in-place writes, with or without a traced value."""
    if draws(name):
        raise errors.RandomNumberError(operation=f"torch.{name.strip('_')}", where=user_line())
    if writes(name):
        raise errors.MutationError(operation=name, where=user_line())
    for option in ("out", "inplace") if kwargs else ():
        if kwargs.get(option) is not None and kwargs[option] is not False:
            raise errors.MutationError(operation=f"{name}({option}=...)", where=user_line())


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands, also those given by name, and the other keywords."""
    operands = (*args, *(kwargs[name] for name in OPERANDS if name in kwargs))
    return operands, {name: value for name, value in kwargs.items() if name not in OPERANDS}


def _operand(tracer: Tracer, value: Any, name: str) -> Any:
    """A 0-d tensor as a traced value, a number of numpy as one of Python; other values as they are."""
    if isinstance(value, torch.Tensor) and not value.dim():
        return Proxy(tracer, tracer.node(value, name))
    number = plain_number(value) if type(value).__module__ == "numpy" else None
    return value if number is None else number


def _composed(tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Translates a torch call into several operations of the table."""
    operands, options = _named(args, kwargs)
    first = Proxy(tracer, tracer.node(operands[0], name))
    try:
        return COMPOSED[name](first, *(_operand(tracer, x, name) for x in operands[1:]), **options)
    except errors.FlexmodError:
        raise
    except TypeError as error:
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem="arguments that it does not take here", where=user_line(),
            advice=f"give it what torch takes, without what is not elementwise ({error}).",
        ) from error  # fmt: skip


def _table_row(tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
    """Translates a torch call with its keywords into an operation of the table."""
    operands, options = _named(args, kwargs)
    rounding = options.pop("rounding_mode", None)
    if rounding in ROUNDINGS:
        name = ROUNDINGS[rounding]
    elif rounding is not None:
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem=f"rounding_mode={rounding!r}", where=user_line(),
            advice='give rounding_mode="floor" or "trunc", or leave it out.',
        )  # fmt: skip
    if "alpha" in options and len(operands) == 2:
        operands = _times(tracer, name, operands, options.pop("alpha"))
    if name == "float_power":
        operands = tuple(tracer.cast(a, torch.float64) for a in operands)
    arity = BY_TORCH_NAME[name].arity
    if name in ("min", "max") and (len(operands) == 1 or isinstance(operands[1], int)):
        raise vector_calls.reduction_error(name, user_line())
    if len(operands) != arity or any(v is not None for v in options.values()):
        problem = f"the argument {min(options)!r}" if options else counted(len(operands), "operand")
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem=problem, where=user_line(),
            advice=f"give it {counted(arity, 'scalar operand')} and nothing else.",
        )  # fmt: skip
    return tracer.apply(name, operands)


def _times(tracer: Tracer, name: str, operands: tuple[Any, ...], alpha: Any) -> tuple[Any, ...]:
    """Multiplies the second of two operands by alpha, in the dtype of both, as torch does."""
    if type(alpha) in (int, float) and alpha == 1:  # not a tensor: its value is unknown
        return operands
    nodes = [tracer.node(operand, name) for operand in operands]
    common, factor = strong(promote(*(node.dtype for node in nodes))), tracer.node(alpha, name)
    if strong(factor.dtype).is_floating_point and not common.is_floating_point:
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem="integers and a floating-point alpha", where=user_line(),
            advice=f"multiply the operand yourself, e.g. torch.{name}(x, 0.5 * y).",
        )  # fmt: skip
    if factor.dtype in (bool, torch.bool) and common is not torch.bool:
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem="numbers and a Boolean alpha", where=user_line(),
            advice="give it a number, e.g. alpha=1.",
        )  # fmt: skip
    tracer.check_fits(name, factor, common)
    if nodes[1].dtype is float:
        return operands[0], tracer.apply("mul", (operands[1], alpha))
    product = tracer.apply("mul", (tracer.cast(operands[1], common), alpha))
    return operands[0], tracer.cast(product, common) if common == torch.bool else product


def _fill(tracer: Tracer, name: str, like: Any, *args: Any, dtype: Any = None, **options: Any) -> Proxy:
    """full_like and similar functions: a constant with the dtype of `like`, or `dtype`."""
    rest = list(args)
    if name.startswith("new_"):
        shape = options.pop("size", None) or (rest.pop(0) if rest else ())
        if shape not in ((), [], torch.Size(())):
            raise errors.NotScalarError(
                what=f"{name} makes a tensor", shape=shape, example=f"x.{name}(())", where=user_line()
            )
    value = FILLS[name]
    if value is None:
        value = options.pop("fill_value") if "fill_value" in options else rest.pop(0)
    target = dtype or promote(tracer.node(like, name).dtype)
    tracer.check_fits(name, tracer.node(value, name), target)
    return tracer.cast(value, target)


def _to(tracer: Tracer, value: Any, *targets: Any, dtype: Any = None, **options: Any) -> Proxy:
    """Tensor.to: casts to a dtype, and ignores the scalar's own device."""
    for target in targets:
        if isinstance(target, torch.dtype):
            dtype = target
        elif isinstance(target, (torch.Tensor, TracedValue)):
            dtype = target.dtype
        elif isinstance(target, str):
            _check_device(target)
    return tracer.cast(value, dtype) if dtype is not None else Proxy(tracer, tracer.node(value, "to"))


def _check_device(name: str) -> None:
    """Raises OperationArgumentError for a text that is no device, such as a dtype's name."""
    try:
        torch.device(name)
    except RuntimeError:
        raise errors.OperationArgumentError(
            operation="to", problem=f"{name!r}, which is no device", where=user_line(),
            advice="give a dtype, e.g. .to(torch.float32).",
        ) from None  # fmt: skip


def _tensor(tracer: Tracer, value: Any, dtype: Any = None, *, name: str, **options: Any) -> Proxy:
    """torch.tensor and similar functions, of one value."""
    if isinstance(value, (list, tuple)):
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem=f"{a_type(value)} of traced values", where=user_line(),
            advice="stack several, e.g. torch.stack([q_idx, kv_idx]), and use a single one as it is.",
        )  # fmt: skip
    return _to(tracer, value, dtype=dtype)


def _new_tensor(tracer: Tracer, like: Any, data: Any, *, dtype: Any = None, **options: Any) -> Proxy:
    return tracer.cast(data, dtype or promote(tracer.node(like, "new_tensor").dtype))


def _type(tracer: Tracer, value: Any, dtype: Any = None, **options: Any) -> Proxy:
    return tracer.cast(value, dtype)


SPECIAL: dict[str, Callable[..., Proxy]] = {
    "to": _to,
    "type": _type,
    "type_as": _to,
    "new_tensor": _new_tensor,
    **{name: partial(_tensor, name=name) for name in ("tensor", "as_tensor", "scalar_tensor")},
    "expect_size": lambda tracer, *args: tracer.expect_size(*args[:4], sequences=args[4]),
}
# the names of functions that say what a method says
FACTS = ("numel", "is_floating_point")
# the names of functions of scalars
OF_SCALARS = frozenset({*CASTS, *FILLS, *SPECIAL, *BY_TORCH_NAME, *COMPOSED, *OTHER_NAMES})


UNARY = {"neg": "neg", "abs": "abs", "invert": "bitwise_not"}
AUGMENTED = {
    "add": "+=", "sub": "-=", "mul": "*=", "truediv": "/=", "floordiv": "//=", "pow": "**=", "mod": "%=",
    "and": "&=", "or": "|=", "xor": "^=", "lshift": "<<=", "rshift": ">>=",
}  # fmt: skip
CONVERSIONS = ("round", "int", "float", "index", "complex", "len", "iter", "contains", "trunc", "divmod")


def _install_operators() -> None:
    def binary(name: str) -> Any:
        # pow() gives a modulus too
        return lambda self, other, *rest: NotImplemented if rest else self._tracer.apply(name, (self, other))

    def augmented(name: str, operator: str) -> Any:
        """`x += y` makes a new value of x's dtype. torch writes in place, so other names of x may not be read
        later."""

        def write(self: Any, other: Any) -> Any:
            found = self._tracer.apply(name, (self, other))
            if found.dtype != self.dtype and category(found.dtype) <= category(self.dtype):
                found = found.to(self.dtype)
            self._overwritten = operator, user_line()
            delattr(self, type(self).__slots__[0])
            return found

        return write

    def reflected(name: str) -> Any:
        return lambda self, other: self._tracer.apply(name, (other, self))

    def unary(name: str) -> Any:
        return lambda self: self._tracer.apply(name, (self,))

    def concrete(name: str) -> Any:
        def refuse(self: Proxy, *args: Any) -> Any:
            if name == "index":
                advice.check_container(list, tuple, str, range)
            if name == "contains":  # the line's `in` asks for the traced value's own elements
                where = user_line()
                raise errors.ConcreteValueError(operation=f"{name}()", where=where, advice=advice.SYMBOLIC)
            raise needs_value(f"{name}()")

        return refuse

    for dunder, name in BINARY.items():
        setattr(TracedValue, f"__{dunder}__", binary(name))
        setattr(TracedValue, f"__r{dunder}__", reflected(name))
    for dunder, operator in AUGMENTED.items():
        setattr(TracedValue, f"__i{dunder}__", augmented(BINARY[dunder], operator))
    for dunder, name in UNARY.items():
        setattr(TracedValue, f"__{dunder}__", unary(name))
    for name in CONVERSIONS:
        setattr(Proxy, f"__{name}__", concrete(name))


_install_operators()


class Watch(TorchFunctionMode):
    """Sees every torch function that a mod calls; those with a traced value go to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if mentions_traced(args) or (kwargs and mentions_traced(kwargs.values())):
            return self.tracer.call(func, args, kwargs)
        refuse_impure(getattr(func, "__name__", ""), kwargs)
        if func not in METADATA:
            self.tracer.eager = True
            self.tracer.read_values(args, kwargs)
        elif args and isinstance(args[0], torch.Tensor):
            self.tracer.described[id(args[0])] = args[0]
        return func(*args, **kwargs)


class WatchOperations(TorchDispatchMode):
    """Sees operations on tensors that reach torch without a torch function.

    They come from scripted functions, extensions, code under DisableTorchFunction, and the tracer itself.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Stops torch from importing TorchDynamo and Triton at the first operation, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = self.tracer.read_values(args, kwargs)
        self.tracer.eager |= bool(tensors)
        for tensor in () if getattr(func, "is_view", False) else tensors:
            if ends_the_process(tensor):
                check_storage(self.tracer.name_of(tensor), tensor)
        result = func(*args, **(kwargs or {}))
        self.tracer.computed |= {id(leaf): leaf for leaf in tree_leaves(result)}
        return result
