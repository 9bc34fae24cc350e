"""Functions of whole vectors inside a mod: reductions, products, stack and cat, and other shapes.

    (tags[q_idx] == tags[kv_idx]).any()        (selected[q_idx] == (kv_idx // 64).unsqueeze(-1)).any(-1)

`vectors.py` has the vectors, and the functions that are called once for each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from flexmod import errors
from flexmod.ir.ops import HALF, promote
from flexmod.ir.proxy import Proxy, Tracer, is_wide
from flexmod.ir.source import user_line
from flexmod.ir.vectors import MOST, Place, Vector, as_vector, elements, of_elements, places


def _whole(x: Any) -> Any:
    return x if x.is_floating_point() else x.to(torch.int64)


def _rounded_once(reduction: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Reduces half types in float32, as torch does: a partial result may be larger than float16's numbers."""

    def rounded(items: Sequence[Any]) -> Any:
        dtype = items[0].dtype
        return reduction([x.float() for x in items]).to(dtype) if dtype in HALF else reduction(items)

    return rounded


@_rounded_once
def _sum(items: Sequence[Any]) -> Any:
    return reduce(lambda x, y: x + y, map(_whole, items))


@_rounded_once
def _mean(items: Sequence[Any]) -> Any:
    return _sum(items) / len(items)


@_rounded_once
def _product(items: Sequence[Any]) -> Any:
    return reduce(lambda x, y: x * y, map(_whole, items))


@_rounded_once
def _norm(items: Sequence[Any]) -> Any:
    """The root of the sum of squares; its derivative at 0 is 0, as in torch."""
    square = _sum([x * x for x in items])
    return torch.where(square == 0, 0.0, torch.sqrt(torch.where(square == 0, 1.0, square)))


_greatest, _least = partial(reduce, torch.maximum), partial(reduce, torch.minimum)
REDUCED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": _sum,
    "mean": _mean,
    "prod": _product,
    "any": lambda items: reduce(torch.logical_or, [x.to(torch.bool) for x in items]),
    "all": lambda items: reduce(torch.logical_and, [x.to(torch.bool) for x in items]),
    "amax": _greatest,
    "max": _greatest,
    "amin": _least,
    "min": _least,
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "count_nonzero": lambda items: _sum([x != 0 for x in items]),
}
PRODUCTS = ("dot", "inner", "vdot", "mv", "matmul")
MADE = ("stack", "cat", "concat")
SHAPED = ("unsqueeze", "squeeze", "reshape", "view", "flatten", "ravel", "expand", "broadcast_to")
MAKES = frozenset({*MADE, *SHAPED})  # also of scalars alone
NAMES = MAKES | {*REDUCED, *PRODUCTS}


def reduces(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Is it a function of whole vectors? torch.max of two is not."""
    of_two = "other" in kwargs or (len(args) > 1 and not isinstance(args[1], int))
    return name in NAMES and not (of_two and name in ("max", "min"))


def reduction_error(name: str, where: errors.Where | None = None) -> errors.ReductionError:
    """Returns the error for a reduction that a mod cannot make."""
    return errors.ReductionError(operation="@" if name == "matmul" else f"torch.{name}", where=where)


def call(tracer: Tracer, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Reduces, multiplies, makes or shapes vectors. Raises ReductionError for more than MOST elements."""
    named = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    keys = ("input", "self", "tensors", "other", "tensor", "vec")
    first, *rest = [*args, *(named.pop(key) for key in keys if key in named)]
    if name in SHAPED:
        return _shaped(tracer, name, first, [*rest, *named.values()])
    if name in MADE:
        return _made(tracer, name, first, *rest, **named)
    refusal = reduction_error(name, user_line())
    operands = [first, *rest] if name in PRODUCTS else [first]
    if not all(is_wide(x) and 0 < math.prod(x.shape) <= MOST for x in operands):
        raise refusal
    if name in PRODUCTS:
        if len(operands) != 2 or operands[1].dim() != 1 or operands[0].shape[-1] != len(operands[1]):
            raise refusal
        x, y = (as_vector(tracer, operand, name) for operand in operands)
        return _product_of(x, y)
    order: Any = None
    if REDUCED[name] is _norm:
        order = rest.pop(0) if rest else named.pop("p", named.pop("ord", None))
    if order not in (None, 2, "fro"):
        raise refusal
    named |= dict(zip(("dim", "keepdim"), rest, strict=False))
    dims, keepdim = named.pop("dim", None), named.pop("keepdim", False)
    dtype = named.pop("dtype", None)
    if name in ("max", "min") and dims is not None:
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem="a dimension, along which it gives indices too",
            advice=f"write x.a{name}({dims}), which gives the values alone.", where=user_line(),
        )  # fmt: skip
    if named or len(rest) > 2:
        raise refusal
    vector = as_vector(tracer, first if dtype is None else first.to(dtype), name)
    dims = range(vector.dim()) if dims in (None, (), []) else (dims,) if isinstance(dims, int) else dims
    for beyond in (dim for dim in dims if not -vector.dim() <= dim < vector.dim()):
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem=f"dimension {beyond}", where=user_line(),
            advice=f"use one that the shape {tuple(vector.shape)} has, or leave it out.",
        )  # fmt: skip
    if name == "linalg_norm" and order == 2 and len(dims) > 1:  # a matrix's largest singular value
        raise refusal
    found = _reduced(vector, REDUCED[name], tuple(dims), keepdim)
    return found if dtype is None else found.to(dtype)


def _reduced(
    vector: Vector, function: Callable[[Sequence[Any]], Any], dims: Sequence[int], keepdim: bool
) -> Vector | Proxy:
    away = {d % vector.dim() for d in dims}
    groups: dict[Place, list[Proxy]] = {}
    for place in places(vector.shape):
        rest = tuple([0 if d in away else entry for d, entry in enumerate(place)])
        groups.setdefault(rest, []).append(vector._items[place])
    shape = [1 if d in away else size for d, size in enumerate(vector.shape)]
    shape = shape if keepdim else [size for d, size in enumerate(vector.shape) if d not in away]
    return vector.of(shape, [function(items) for items in groups.values()])


def _product_of(x: Any, y: Any) -> Vector | Proxy:
    """The sums of products along the last dimension, in the dtype of both, as in torch."""
    dtype = promote(x.dtype, y.dtype)
    products = x.float() * y.float() if dtype in HALF else x * y
    found = _reduced(products, _sum, (-1,), False)
    return found if found.dtype == dtype else found.to(dtype)


def _made(tracer: Tracer, name: str, parts: Sequence[Any], dim: int = 0) -> Vector:
    """stack and cat, of scalars and vectors of at most one dimension."""
    items: list[Proxy] = []
    rows = [elements(tracer, name, x) for x in parts]
    shapes = [tuple(shape) for shape, _ in rows]
    first = shapes[0] if shapes else ()
    refusal = errors.NotScalarError(
        what=f"torch.{name} makes a tensor", shape=(len(rows), *first), example=f"torch.{name}(...).sum(-1)",
        where=user_line(),
    )  # fmt: skip
    same = len({*shapes}) == 1 or name != "stack"
    fits = all(len(shape) <= (name != "stack") for shape in shapes) and dim in (0, -1)
    for _, own in rows if same and fits else ():
        items += own
    if not 0 < len(items) <= MOST:
        raise refusal
    dtype = promote(*(x.dtype for x in items))
    items = [x if x.dtype == dtype else tracer.cast(x, dtype) for x in items]
    return Vector(tracer, (len(items),), dict(zip(places((len(items),)), items, strict=True)), refusal)


def _shaped(tracer: Tracer, name: str, value: Any, given: Sequence[Any]) -> Any:
    """The same elements with other dimensions; expand and broadcast_to repeat them."""
    shape, items = elements(tracer, f"torch.{name}", value)
    numbers = [*given[0]] if given and isinstance(given[0], (tuple, list)) else [*given]
    known = all(type(number) is int for number in numbers)
    wanted = _new_shape(name, shape, numbers) if known else None
    if wanted is None:
        raise errors.OperationArgumentError(
            operation=f"torch.{name}", problem=f"{given} for the shape {tuple(shape)}", where=user_line(),
            advice="give sizes or dimensions that this shape allows, or leave it out.",
        )  # fmt: skip
    if name in ("expand", "broadcast_to") and math.prod(wanted) <= MOST:
        before = dict(zip(places(shape), items, strict=True))
        last = len(wanted) - len(shape)
        items = [
            before[tuple([0 if size == 1 else at for at, size in zip(place[last:], shape, strict=True)])]
            for place in places(wanted)
        ]
    return of_elements(tracer, f"torch.{name}", wanted, items)


def _new_shape(name: str, shape: list[int], numbers: list[int]) -> list[int] | None:
    """The shape that a function makes of another one; None if it takes no such numbers."""
    rank, count = len(shape), math.prod(shape)
    if name == "unsqueeze":
        fits = len(numbers) == 1 and -rank - 1 <= numbers[0] <= rank
        at = numbers[0] % (rank + 1) if fits else 0
        return [*shape[:at], 1, *shape[at:]] if fits else None
    if name == "squeeze":
        if not all(-max(rank, 1) <= dim < max(rank, 1) for dim in numbers):
            return None
        away = {dim % max(rank, 1) for dim in numbers or range(rank)}
        return [size for dim, size in enumerate(shape) if size != 1 or dim not in away]
    if name in ("flatten", "ravel"):
        return None if numbers else [count]
    if name in ("reshape", "view"):
        rest = math.prod(number for number in numbers if number != -1)
        found = [count // max(rest, 1) if number == -1 else number for number in numbers]
        return found if numbers.count(-1) <= 1 and math.prod(found) == count else None
    padded = [1] * (len(numbers) - rank) + shape
    pairs = [*zip(numbers, padded, strict=False)]
    fits = len(numbers) >= rank and all(size in (number, 1) or number == -1 for number, size in pairs)
    return [size if number == -1 else number for number, size in pairs] if fits else None
