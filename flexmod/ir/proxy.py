"""The traced values that a mod sees: a Proxy for a scalar, a CaptureView for a partly indexed tensor.

Both pass every operation to their tracer, an AbstractTracer, which builds the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from flexmod import errors
from flexmod.errors import Where
from flexmod.ir import advice
from flexmod.ir.formulas import BINARY
from flexmod.ir.graph import Graph, Node, dtype_name
from flexmod.ir.ops import category, promote
from flexmod.ir.source import is_users, user_line


class AbstractTracer(Protocol):
    """The interface of a tracer for traced values and torch's calls on them. `trace.Tracer` implements it.

    `eager`, `described` and `computed` record torch's work outside of the graph; see `torch_calls.py`.
    """

    device: torch.device
    tensors: list[torch.Tensor]
    eager: bool
    described: dict[int, torch.Tensor]
    computed: dict[int, object]

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def apply(self, name: str, args: Sequence[Any]) -> Proxy: ...

    def cast(self, value: Any, dtype: Any) -> Proxy: ...

    def load(self, number: int, indices: Sequence[Node]) -> Node: ...

    def inline(self, graph: Graph, tensors: Sequence[torch.Tensor], inputs: Mapping[str, Proxy]) -> Proxy: ...

    def index(self, target: Any, index: Any) -> Any: ...

    def expect_size(
        self, index: Any, size: Any, owner: str, argument: str, start: int = 0
    ) -> Proxy: ...

    def node(self, value: Any, operation: str) -> Node: ...

    def not_scalar(self, value: Any, operation: str) -> errors.NotScalarError: ...

    def check_fits(self, operation: str, node: Node, dtype: torch.dtype) -> None: ...

    def read_values(self, *values: Any) -> list[torch.Tensor]: ...

    def name_of(self, tensor: torch.Tensor) -> str: ...


class TracedValue:
    """Base of traced values: passes torch functions and methods to the tracer."""

    __slots__ = ("_overwritten", "_tracer")  # a class's first slot has its content
    _tracer: AbstractTracer
    _overwritten: tuple[str, Where | None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _first_traced([*args, *(kwargs or {}).values()])
        assert found is not None, "torch dispatches here only for a traced argument"
        return found._tracer.call(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return self._tracer.device

    ndim = property(lambda self: len(self.shape))

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __bool__(self) -> bool:
        where = user_line()
        raise errors.ControlFlowError(where=where, advice=advice.of_truth(where, self.dtype == torch.bool))

    def __hash__(self) -> int:
        """Refuses a lookup by the user: `q_idx in {1, 2}` would be False, whatever q_idx is."""
        frame = sys._getframe(1)
        if is_users(frame.f_code.co_filename) and not advice.is_cached(frame):
            advice.check_container(dict)
            raise _needs_value("a lookup in a dict or set")
        return object.__hash__(self)

    def __array__(self, *args: Any, **options: Any) -> Any:
        advice.check_container()
        raise _needs_value("a numpy array of it")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """A number of numpy's leaves its operators to ours; the functions of numpy are refused."""
        name = NUMPY_OPERATORS.get(ufunc.__name__)
        if name is None or method != "__call__" or len(inputs) != 2 or options:
            raise _needs_value(f"numpy.{ufunc.__name__}")
        return self._tracer.apply(name, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise _needs_value(f"numpy.{func.__name__}")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise errors.MutationError(operation="__setitem__", where=user_line())

    def _refuse(self, problem: str, advice: str) -> NoReturn:
        """Raises an error for an index."""
        raise errors.CaptureIndexError(
            name=self._name, shape=tuple(self.shape), problem=problem, advice=advice, where=user_line()
        )

    def __matmul__(self, other: Any) -> Any:
        return self._tracer.call(torch.matmul, (self, other), {})

    def __rmatmul__(self, other: Any) -> Any:
        return self._tracer.call(torch.matmul, (other, self), {})

    def __getattr__(self, name: str) -> Any:
        """Tensor methods: score.tanh(), q_idx.to(...), row.sum()."""
        if name == type(self).__slots__[0]:  # deleted, see `augmented`
            operator, where = self._overwritten
            raise errors.MutationError(operation=f"{operator} on a value that is read later", where=where)
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a traced value has no attribute {name!r}")
        method = getattr(torch.Tensor, name)
        if not callable(method):
            raise errors.UnknownOperationError(
                operation=f"the attribute .{name}",
                where=user_line(),
                advice="use the value in torch functions.",
            )
        return lambda *args, **kwargs: self._tracer.call(method, (self, *args), kwargs)


class Proxy(TracedValue):
    """A traced scalar: behaves like a 0-d tensor whose value is not known yet."""

    __slots__ = ("_node",)
    _name = "a traced scalar"

    def __init__(self, tracer: AbstractTracer, node: Node) -> None:
        self._tracer = tracer
        self._node = node

    @property
    def dtype(self) -> torch.dtype:
        return promote(self._node.dtype)

    shape = property(lambda self: torch.Size(()))
    requires_grad = property(lambda self: False)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __pos__(self) -> Proxy:
        return self

    def __getitem__(self, index: Any) -> Any:
        self._refuse("like a tensor", "use it as it is: it has no dimensions.")

    def __repr__(self) -> str:
        name = self._node.value if self._node.op == "input" else self._node.op
        return f"Proxy({name}: {dtype_name(self._node.dtype)})"

    def __format__(self, spec: str) -> str:
        if spec:
            raise _needs_value(f"the format {spec!r}")
        return repr(self)


def _needs_value(operation: str) -> errors.ConcreteValueError:
    where = user_line()
    return errors.ConcreteValueError(operation=operation, where=where, advice=advice.of_value(where))


UNARY = {"neg": "neg", "abs": "abs", "invert": "bitwise_not"}
NUMPY_OPERATORS = {  # where numpy's name is not the table's
    **{name: name for name in BINARY.values()},
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "power": "pow", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "equal": "eq", "not_equal": "ne", "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
}  # fmt: skip
AUGMENTED = {
    "add": "+=", "sub": "-=", "mul": "*=", "truediv": "/=", "floordiv": "//=", "pow": "**=", "mod": "%=",
    "and": "&=", "or": "|=", "xor": "^=", "lshift": "<<=", "rshift": ">>=",
}  # fmt: skip
CONCRETE = ("round", "int", "float", "index", "complex", "len", "iter", "contains")


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
            raise _needs_value(f"{name}()")

        return refuse

    for dunder, name in BINARY.items():
        setattr(TracedValue, f"__{dunder}__", binary(name))
        setattr(TracedValue, f"__r{dunder}__", reflected(name))
    for dunder, operator in AUGMENTED.items():
        setattr(TracedValue, f"__i{dunder}__", augmented(BINARY[dunder], operator))
    for dunder, name in UNARY.items():
        setattr(TracedValue, f"__{dunder}__", unary(name))
    for name in CONCRETE:
        setattr(Proxy, f"__{name}__", concrete(name))


_install_operators()


class CaptureView(TracedValue):
    """A captured tensor, some of its dimensions indexed: `intervals[img[kv_idx]]`. Not a scalar yet.

    `_indices` has one entry for each dimension of the tensor: a Node, or None where it is still free.
    """

    __slots__ = ("_indices", "_number")

    def __init__(self, tracer: AbstractTracer, number: int, indices: tuple[Node | None, ...]) -> None:
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

    def __getitem__(self, index: Any) -> Proxy | CaptureView:
        """Indexes the free dimensions from the left; with every dimension indexed, returns the element."""
        entries = self._expand(index if isinstance(index, tuple) else (index,))
        rest = iter(entries)
        indices = tuple(next(rest, None) if i is None else i for i in self._indices)
        nodes = tuple(i for i in indices if i is not None)
        if len(nodes) < len(indices):
            return CaptureView(self._tracer, self._number, indices)
        return Proxy(self._tracer, self._tracer.load(self._number, nodes))

    def _expand(self, entries: tuple[Any, ...]) -> list[Node | None]:
        sizes = self.shape
        if any(e is None for e in entries):
            self._refuse("with None", "leave the new dimension out: a mod works on scalars.")
        dots = [i for i, e in enumerate(entries) if e is Ellipsis]
        if dots:
            missing = len(sizes) - (len(entries) - 1)
            entries = (*entries[: dots[0]], *(slice(None),) * missing, *entries[dots[0] + 1 :])
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
        node = (
            entry._node if isinstance(entry, Proxy) else self._tracer.node(entry, f"an index of {self._name}")
        )
        dtype = promote(node.dtype)
        if dtype.is_floating_point or dtype == torch.bool:
            raise errors.IndexDtypeError(name=self._name, dtype=dtype_name(dtype), where=user_line())
        if node.is_const and not -size <= node.value < size:  # type: ignore[operator]
            self._refuse(f"with {node.value}", f"use an index from {-size} to {size - 1}.")
        return node


def mentions_traced(values: Iterable[Any]) -> bool:
    """Is there a Proxy or a CaptureView among arguments?"""
    return _first_traced(values) is not None


def _first_traced(values: Iterable[Any]) -> Proxy | CaptureView | None:
    for value in values:
        if isinstance(value, TracedValue):
            return value  # type: ignore[return-value]
        if isinstance(value, (tuple, list)):
            inner = _first_traced(value)
        elif isinstance(value, slice):
            inner = _first_traced((value.start, value.stop, value.step))
        else:
            continue
        if inner is not None:
            return inner
    return None
