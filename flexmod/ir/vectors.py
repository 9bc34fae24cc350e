"""Parts of captured tensors, and short vectors inside a mod: rows of these, unrolled into traced scalars.

    (pos[q_idx] - pos[kv_idx]).pow(2).sum(-1)        (tags[q_idx] == tags[kv_idx]).any()

A Vector has at most MOST elements. An elementwise function of vectors is called once for each element, and a
reduction (`vector_calls.py`) joins elements by the table's operations. So the graph has scalars alone, and
nothing after the trace knows of vectors. A scalar can become a vector of one element: `q_idx[None]`,
`q_idx.unsqueeze(-1)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

from flexmod import errors
from flexmod.ir.formulas import BINARY
from flexmod.ir.graph import Node, dtype_name
from flexmod.ir.ops import BY_TORCH_NAME, HALF, Op, category, promote
from flexmod.ir.proxy import Proxy, TracedValue, Tracer, is_wide
from flexmod.ir.source import user_line

MOST = 16
Place = tuple[int, ...]


class CaptureView(TracedValue):
    """A captured tensor, some of its dimensions indexed: `intervals[img[kv_idx]]`. Not a scalar yet.

    `_indices` has one entry for each dimension of the tensor: a Node, or None where it is still free.
    """

    __slots__ = ("_indices", "_number")

    def __init__(self, tracer: Tracer, number: int, indices: tuple[Node | None, ...]) -> None:
        self._tracer = tracer
        self._number = number
        self._indices = indices

    @property
    def shape(self) -> torch.Size:
        sizes = self._tracer.tensors[self._number].shape
        return torch.Size([s for s, i in zip(sizes, self._indices, strict=True) if i is None])

    @property
    def dtype(self) -> torch.dtype:
        return self._tracer.tensors[self._number].dtype

    @property
    def _name(self) -> str:
        return self._tracer.name_of(self._tracer.tensors[self._number])

    def __repr__(self) -> str:
        return f"Proxy(a part of {self._name}: {dtype_name(self.dtype)} {list(self.shape)})"

    def __getitem__(self, index: Any) -> Any:
        """Indexes the free dimensions from the left; with every dimension indexed, returns the element."""
        if _makes_dimensions(index):
            return _with_dimensions(self._tracer, self, index)
        rest = iter(self._expand(index))
        indices = tuple(next(rest) if i is None else i for i in self._indices)
        nodes = tuple(i for i in indices if i is not None)
        if len(nodes) < len(indices):
            return CaptureView(self._tracer, self._number, indices)
        return Proxy(self._tracer, self._tracer.load(self._number, nodes))

    def _expand(self, index: Any) -> list[Node | None]:
        sizes = self.shape
        entries = whole_index(index, len(sizes))
        if len(entries) > len(sizes):
            many = "1 index" if len(entries) == 1 else f"{len(entries)} indices"
            self._refuse(f"with {many}", f"give at most {len(sizes)}.")
        return [self._entry(e, sizes[d]) for d, e in enumerate(entries)]

    def _entry(self, entry: Any, size: int) -> Node | None:
        if isinstance(entry, slice):
            if entry.start is None and entry.stop is None and entry.step is None:
                return None
            self._refuse("with a slice", "index one element at a time, or slice the tensor before the call.")
        # finds the name only when needed, since that takes longer than all other steps here
        own = isinstance(entry, Proxy) and entry._tracer is self._tracer
        node = entry._node if own else self._tracer.node(entry, f"an index of {self._name}")
        dtype = promote(node.dtype)
        if dtype.is_floating_point or dtype == torch.bool:
            raise errors.IndexDtypeError(name=self._name, dtype=dtype_name(dtype), where=user_line())
        if node.is_const and not -size <= node.value < size:
            self._refuse(f"with {node.value}", f"use an index from {-size} to {size - 1}.")
        return node


def entries_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def whole_index(index: Any, rank: int) -> tuple[Any, ...]:
    """The entries of an index, with whole slices for an ellipsis and for dimensions that are left out."""
    entries = entries_of(index)
    dots = next((place for place, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    first, last = entries[:dots], entries[dots + 1 :]
    return (*first, *[slice(None)] * (rank - len(first) - len(last)), *last)


def indexed(tracer: Tracer, target: Any, index: Any) -> Any:
    """An element or a part of a captured tensor or of a traced value."""
    if isinstance(target, torch.Tensor):
        target = CaptureView(tracer, tracer.capture(target), (None,) * target.dim())
    if not isinstance(target, Proxy):
        return target[index]
    if not _makes_dimensions(index):
        target._refuse("like a tensor", "use it as it is: it has no dimensions.")
    return _with_dimensions(tracer, target, index)


def _makes_dimensions(index: Any) -> bool:
    return any(entry is None for entry in entries_of(index))


def _with_dimensions(tracer: Tracer, value: Any, index: Any) -> Any:
    """`value[index]`, in which None makes a dimension of one element."""
    made = sum(entry is None for entry in entries_of(index))
    entries = whole_index(index, value.dim() + made)
    others = tuple([entry for entry in entries if entry is not None])
    chosen = value[others] if others else value
    sizes = iter(chosen.shape)
    free = [entry for entry in entries if entry is None or isinstance(entry, slice)]
    shape = [1 if entry is None else next(sizes) for entry in free]
    return of_elements(tracer, "an index with None", shape, elements(tracer, "[]", chosen)[1])


class Vector(TracedValue):
    """Traced scalars by their places. `refusal` is the error for its use where a scalar is needed."""

    __slots__ = ("_items", "refusal", "shape")
    _name = "a short vector"

    def __init__(
        self, tracer: Tracer, shape: Sequence[int], items: dict[Place, Proxy], refusal: errors.NotScalarError
    ) -> None:
        self._tracer = tracer
        self.shape = torch.Size(shape)
        self._items = items
        self.refusal = refusal

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._items.values())).dtype

    def __getitem__(self, index: Any) -> Any:
        """Selects by numbers, slices and an ellipsis."""
        if _makes_dimensions(index):
            return _with_dimensions(self._tracer, self, index)
        entries = whole_index(index, len(self.shape))
        if len(entries) > len(self.shape) or not all(isinstance(e, (int, slice)) for e in entries):
            self._refuse("with more than numbers and slices", "index the captured tensor itself.")
        sized = [*zip(entries, self.shape, strict=True)]
        if not all(range(n)[e] if isinstance(e, slice) else -n <= e < n for e, n in sized):
            self._refuse("with a number outside of it, or with an empty slice", "select what it has.")
        chosen = [range(size)[e] for e, size in sized]
        ranges = [e if isinstance(e, range) else (e,) for e in chosen]
        kept = [isinstance(e, range) for e in chosen]
        items = [self._items[place] for place in product(*ranges)]
        return self.of([len(e) for e, keep in zip(ranges, kept, strict=True) if keep], items)

    def of(self, shape: Sequence[int], items: Sequence[Proxy]) -> Vector | Proxy:
        """These elements in a shape, the last dimension first; the element itself for no dimension."""
        if not shape:
            return items[0]
        return Vector(self._tracer, shape, dict(zip(places(shape), items, strict=True)), self.refusal)


def places(shape: Sequence[int]) -> Iterator[Place]:
    return product(*map(range, shape))


def as_vector(tracer: Tracer, value: Any, operation: str) -> Vector:
    """A captured tensor or a part of one as a Vector. Raises NotScalarError if it has too many elements."""
    if isinstance(value, Vector):
        return value
    refusal = tracer.not_scalar(value, operation)
    if not 0 < math.prod(value.shape) <= MOST:
        raise refusal
    items = {place: indexed(tracer, value, place) for place in places(value.shape)}
    return Vector(tracer, value.shape, items, refusal)


def unrolled(
    tracer: Tracer,
    operation: str,
    function: Callable[..., Proxy],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Vector:
    """Calls an elementwise function for each element of its arguments, which broadcast as in torch."""
    args = [as_vector(tracer, a, operation) if is_wide(a) else a for a in args]
    kwargs = {name: as_vector(tracer, a, operation) if is_wide(a) else a for name, a in kwargs.items()}
    vectors = [a for a in (*args, *kwargs.values()) if isinstance(a, Vector)]
    shape = _broadcast([v.shape for v in vectors])
    if shape is None:
        raise errors.OperationArgumentError(
            operation=operation, advice="index them down to rows of one length.", where=user_line(),
            problem=f"shapes {', '.join(str(tuple(v.shape)) for v in vectors)}, which do not broadcast",
        )  # fmt: skip
    if math.prod(shape) > MOST:
        raise vectors[0].refusal
    common = _dtype_of_scalars(operation, vectors)
    if common is not None:
        to = torch.float32 if common in HALF else common
        args = [_converted(tracer, a, to) for a in args]
        kwargs = {name: _converted(tracer, a, to) for name, a in kwargs.items()}

    def at(value: Any, place: Place) -> Any:
        if not isinstance(value, Vector):
            return value
        own = zip(place[len(place) - value.dim() :], value.shape, strict=True)
        return value._items[tuple([0 if size == 1 else entry for entry, size in own])]

    items = {
        place: function(*(at(a, place) for a in args), **{name: at(a, place) for name, a in kwargs.items()})
        for place in places(shape)
    }
    if common in HALF:  # rounded once, as all values of half types
        items = {place: tracer.cast(item, common) for place, item in items.items()}
    return Vector(tracer, shape, items, vectors[0].refusal)


def converting_row(name: str) -> Op | None:
    """The row of an operation that converts scalars to the dtype of the vectors beside them.

    `row_of_int8 * q_idx` is int8, as in torch. Comparisons and `where` of torch's flex_attention compute in
    the dtype that holds both.
    """
    bare = name.strip("_")
    row = BY_TORCH_NAME.get(bare)
    if row is None and bare[:1] == "r":
        row = BY_TORCH_NAME.get(BINARY.get(bare[1:], ""))
    return row if row is not None and row.at == "result" and bare != "float_power" else None


def _dtype_of_scalars(name: str, vectors: Sequence[Vector]) -> torch.dtype | None:
    """The dtype to which an operation on vectors converts scalars; None if it converts each by itself."""
    row, common = converting_row(name), promote(*(v.dtype for v in vectors))
    return common if row is not None and (common.is_floating_point or row.dtype is promote) else None


def _converted(tracer: Tracer, value: Any, dtype: torch.dtype) -> Any:
    """Casts a scalar that is no number, unless it is of a higher category than the dtype."""
    if not isinstance(value, (Proxy, torch.Tensor)) or value.dtype == dtype:
        return value
    return tracer.cast(value, dtype) if category(value.dtype) <= category(dtype) else value


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int] | None:
    """The common shape; None where there is none. torch's own function would count as work on tensors."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    sizes = [set(along) - {1} for along in zip(*padded, strict=True)]
    return None if any(len(found) > 1 for found in sizes) else [max(found, default=1) for found in sizes]


def elements(tracer: Tracer, name: str, value: Any) -> tuple[list[int], list[Proxy]]:
    """The shape and the elements of a scalar or of a vector."""
    if not is_wide(value):
        return [], [Proxy(tracer, tracer.node(value, name))]
    vector = as_vector(tracer, value, name)
    return list(vector.shape), list(vector._items.values())


def of_elements(tracer: Tracer, what: str, shape: Sequence[int], items: Sequence[Proxy]) -> Any:
    """These elements in a shape. Raises NotScalarError if they are more than MOST."""
    refusal = errors.NotScalarError(
        what=f"{what} makes a tensor", shape=tuple(shape), example="x.squeeze(-1) or x.any(-1)",
        where=user_line(),
    )  # fmt: skip
    if not 0 < math.prod(shape) <= MOST:
        raise refusal
    if not shape:
        return items[0]
    return Vector(tracer, shape, dict(zip(places(shape), items, strict=True)), refusal)
