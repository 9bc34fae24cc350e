"""The traced scalar that a mod sees, a Proxy, and the Tracer, which builds the graph of what the mod does.

All traced values pass every operation to their tracer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NoReturn

import torch

from flexmod import errors
from flexmod.errors import Where
from flexmod.errors.base import a_type, did_you_mean
from flexmod.ir import advice
from flexmod.ir.formulas import BINARY, COMMUTATIVE
from flexmod.ir.graph import (
    POSITIONS,
    Capture,
    DType,
    ExpectedSize,
    Graph,
    GraphBuilder,
    Node,
    dtype_name,
    rebuild,
)
from flexmod.ir.ops import BY_TORCH_NAME, CAST, HALF, default_dtype, promote
from flexmod.ir.source import capture_names, is_users, user_line
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import tree_leaves

VALUE_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
# rows for which torch raises an error if a number exceeds the result's dtype (where, masked_fill, clamp); for
# all others it wraps
CONVERTING = ("where", "minimum", "maximum")
NUMPY_OPERATORS = {  # where numpy's name is not the table's
    **{name: name for name in BINARY.values()},
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "power": "pow", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "equal": "eq", "not_equal": "ne", "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
}  # fmt: skip


class TracedValue:
    """Base of traced values: passes torch functions and methods to the tracer."""

    __slots__ = ("_overwritten", "_tracer")  # a class's first slot has its content
    _tracer: Tracer
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

    def numel(self) -> int:
        return math.prod(self.shape)

    nelement = numel

    def is_floating_point(self) -> bool:
        return bool(self.dtype.is_floating_point)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        """Yields the entries of the first dimension. Python's own iteration ends at an IndexError."""
        return (self[n] for n in range(self.shape[0] if self.shape else 1))  # type: ignore[index]

    def __bool__(self) -> bool:
        where = user_line()
        raise errors.ControlFlowError(where=where, advice=advice.of_truth(where, self.dtype == torch.bool))

    def __hash__(self) -> int:
        """Refuses a lookup by the user: `q_idx in {1, 2}` would be False, whatever q_idx is."""
        frame = sys._getframe(1)
        if is_users(frame.f_code.co_filename) and not advice.is_cached(frame):
            advice.check_container(dict)
            raise needs_value("a lookup in a dict or set")
        return object.__hash__(self)

    def __array__(self, *args: Any, **options: Any) -> Any:
        advice.check_container()
        raise needs_value("a numpy array of it")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """A number of numpy's leaves its operators to ours; the functions of numpy are refused."""
        name = NUMPY_OPERATORS.get(ufunc.__name__)
        if name is None or method != "__call__" or len(inputs) != 2 or options:
            raise needs_value(f"numpy.{ufunc.__name__}")
        return self._tracer.apply(name, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise needs_value(f"numpy.{func.__name__}")

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
        if name == type(self).__slots__[0]:  # deleted, see `augmented` in torch_calls.py
            operator, where = self._overwritten
            raise errors.MutationError(operation=f"{operator} on a value that is read later", where=where)
        if name.startswith("_"):
            raise AttributeError(f"a traced value has no attribute {name!r}")
        if not hasattr(torch.Tensor, name):
            close = did_you_mean(name, BY_TORCH_NAME)
            raise errors.UnknownAttributeError(name=name, close=close, where=user_line())
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

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self._tracer = tracer
        self._node = node

    @property
    def dtype(self) -> torch.dtype:
        return promote(self._node.dtype)

    shape = property(lambda self: torch.Size(()))
    requires_grad = property(lambda self: False)

    def __pos__(self) -> Proxy:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._tracer.call(torch.Tensor.__getitem__, (self, index), {})

    def __repr__(self) -> str:
        name = self._node.value if self._node.op == "input" else self._node.op
        return f"Proxy({name}: {dtype_name(self._node.dtype)})"

    def __format__(self, spec: str) -> str:
        if spec:
            raise needs_value(f"the format {spec!r}")
        return repr(self)


def needs_value(operation: str) -> errors.ConcreteValueError:
    where = user_line()
    return errors.ConcreteValueError(operation=operation, where=where, advice=advice.of_value(where))


def is_wide(value: Any) -> bool:
    """Has it dimensions, unlike a scalar?"""
    may_be = isinstance(value, (TracedValue, torch.Tensor)) and not isinstance(value, Proxy)
    return may_be and value.dim() > 0


def mentions_traced(values: Iterable[Any]) -> bool:
    """Is there a traced value among arguments?"""
    return _first_traced(values) is not None


def _first_traced(values: Iterable[Any]) -> TracedValue | None:
    for value in values:
        if isinstance(value, TracedValue):
            return value
        if isinstance(value, (tuple, list)):
            inner = _first_traced(value)
        elif isinstance(value, slice):
            inner = _first_traced((value.start, value.stop, value.step))
        else:
            continue
        if inner is not None:
            return inner
    return None


class Tracer:
    """One run of one mod: the graph so far, and the tensors that the mod has used.

    `eager`, `described` and `computed` record torch's work outside of the graph; see `torch_calls.py`, whose
    function `call` registers itself here.
    """

    # (function, args, kwargs) -> the result of a torch function with a traced value among its arguments
    call: ClassVar[Callable[..., Any]]

    def __init__(self, mod: Callable[..., Any] | None, device: torch.device) -> None:
        self.mod = mod
        self.device = device
        self.builder = GraphBuilder()
        self.line: Where | None = None  # if set, nodes get this line, not the stack's
        self.tensors: list[torch.Tensor] = []
        self.eager = False
        self.described: dict[int, torch.Tensor] = {}  # by id
        self.read: dict[int, torch.Tensor] = {}
        self.computed: dict[int, object] = {}  # results that torch computed from tensors during the trace
        self.expected: dict[ExpectedSize, None] = {}
        self.sequences: dict[Node, int] = {}  # numbers of packed sequences, and how many there are
        self.without_gradient: dict[Node, Where | None] = {}  # made while the mod had turned gradients off
        self._numbers: dict[int, int] = {}
        self._given_names: dict[int, str] = {}

    def where(self) -> Where | None:
        return self.line or user_line()

    def position(self, name: str) -> Proxy:
        dtype = torch.float32 if name in ("score", "grad") else torch.int32
        return Proxy(self, self.builder.input(name, dtype))

    def read_values(self, *values: Any) -> list[torch.Tensor]:
        """Records and returns the tensors among the arguments of torch's own work."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        self.read.update((id(tensor), tensor) for tensor in tensors if id(tensor) not in self.computed)
        return tensors

    # captured tensors

    def capture(self, tensor: torch.Tensor) -> int:
        """The number of a captured tensor, by identity."""
        if id(tensor) not in self._numbers:
            self._check_capture(tensor)
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def _check_capture(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in VALUE_DTYPES or tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise errors.ModDtypeError(
                name=self.name_of(tensor), dtype=f"{dtype_name(tensor.dtype)}, {layout}",
                where=self.where(), accepted="strided bool, integer and floating-point tensors",
            )  # fmt: skip
        if type(tensor) not in tensor_kinds.CLASSES:
            tensor_kinds.check_class(self.name_of(tensor), tensor)

    def name_of(self, tensor: torch.Tensor) -> str:
        return capture_names(self.mod, [tensor])[0] if self.mod is not None else "captured0"

    def capture_specs(self) -> tuple[Capture, ...]:
        if not self.tensors or self.mod is None:
            return ()
        names = capture_names(self.mod, self.tensors, self._given_names)
        return tuple(map(capture_of, names, self.tensors))

    def load(self, number: int, indices: Sequence[Node]) -> Node:
        return self._add("load", indices, self.tensors[number].dtype, number)

    def _add(self, op: str, args: Sequence[Node], dtype: DType, value: object = None) -> Node:
        where = self.where()
        node = self.builder.node(op, args, dtype, value, where)
        if not torch.is_grad_enabled():
            self.without_gradient.setdefault(node, where)
        return node

    def inline(self, graph: Graph, tensors: Sequence[torch.Tensor], inputs: Mapping[str, Proxy]) -> Proxy:
        """Copies a graph into this one, with these tensors as captures and these values as inputs."""

        def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
            if node.op == "input":
                return inputs[str(node.value)]._node
            if node.op == "load":
                number: int = node.value
                self._given_names[id(tensors[number])] = graph.captures[number].name
                return builder.node("load", args, node.dtype, self.capture(tensors[number]), node.where)
            return node if node.is_const else None  # stays unshared, see `GraphBuilder.fresh_const`

        for expected in graph.expected:
            self.expect_size(inputs[expected.axis], *expected[1:])
        return Proxy(self, rebuild(graph, change, self.builder).result)

    def expect_size(
        self, index: Any, size: Any, owner: str, argument: str, start: int = 0, sequences: bool = False
    ) -> Proxy:
        """Records the size of an axis if the index is a position, from `start` on; see `check_sizes`.

        Raises CallSizeError if the index is the number of a packed sequence, and there are more or fewer
        sequences. Positions after the last one may form one more.
        """
        node = position = self.node(index, "expect_size")
        if sequences:
            self.sequences[node] = int(size)
        elif (count := self.sequences.get(node)) is not None and int(size) not in (count, count + 1):
            raise errors.CallSizeError.of_sequences(int(size), count, owner, argument)
        axes: tuple[str, ...] = POSITIONS
        if node.op == "add" and type(node.args[1].value) is int and node.args[1].is_const:
            position, start, axes = node.args[0], start + node.args[1].value, POSITIONS[2:]
        if position.op == "input" and position.value in axes:
            axis = str(position.value)
            self.expected[ExpectedSize(axis, int(size), owner, argument, start)] = None
        return Proxy(self, node)

    # values

    def node(self, value: Any, operation: str) -> Node:
        """Converts any operand to a Node."""
        if isinstance(value, Proxy):
            if value._tracer is not self:  # its graph numbers captured tensors in another way
                raise errors.OperationArgumentError(
                    operation=operation, problem="a traced value of another run of a mod", where=self.where(),
                    advice="compute it again from the arguments: a mod keeps no traced value between runs.",
                )  # fmt: skip
            return value._node
        if isinstance(value, (torch.Tensor, TracedValue)):
            if value.dim():
                raise self.not_scalar(value, operation)
            assert isinstance(value, torch.Tensor)
            return self.load(self.capture(value), ())  # each call reads its value; the trace never does
        number = plain_number(value)
        if number is None:
            raise errors.OperationArgumentError(
                operation=operation, problem=a_type(value), where=self.where(),
                advice=advice.of_operand(value),
            )  # fmt: skip
        # the conversion of an unknown class may have read a tensor
        self.eager |= not isinstance(value, (bool, int, float)) and type(value).__module__ != "numpy"
        if type(number) is int and not -(2**63) <= number < 2**63:
            raise errors.OperationArgumentError(
                operation=operation, problem=f"{number}, which needs more than 64 bits", where=self.where(),
                advice="use a smaller integer, or a float.",
            )  # fmt: skip
        return GraphBuilder.fresh_const(number, where=self.where())

    def not_scalar(self, value: torch.Tensor | TracedValue, operation: str) -> errors.NotScalarError:
        """The error for a captured tensor, a part of one, or a short vector, used as a scalar."""
        refusal: errors.NotScalarError | None = getattr(value, "refusal", None)  # of a short vector
        if refusal is not None:
            return refusal
        if isinstance(value, torch.Tensor):
            self._check_capture(value)
        name = self.name_of(value) if isinstance(value, torch.Tensor) else value._name
        indices = ", ".join(POSITIONS[-value.dim() :])
        indices = indices if isinstance(value, torch.Tensor) else f"..., {indices}"
        return errors.NotScalarError(
            what=f"{operation} was given {name}", shape=tuple(value.shape), where=self.where(),
            example=f"{name}[{indices}]",
        )  # fmt: skip

    def apply(self, name: str, args: Sequence[Any]) -> Any:
        """Applies an operation of the table to operands: to each element of short vectors."""
        if any(map(is_wide, args)):
            return self.call(getattr(torch, name), tuple(args), {})
        row = BY_TORCH_NAME[name]
        default = default_dtype()
        nodes = [self.node(a, name) for a in args]
        if row.name in COMMUTATIVE and nodes[0].is_const and not nodes[1].is_const:
            nodes.reverse()  # as torch's `__rmul__` does: a mod that torch.compile records has the same graph
        kinds = [n.dtype for n in nodes]
        if float in kinds and not any(isinstance(k, torch.dtype) and k.is_floating_point for k in kinds):
            # record the present default dtype, which may have changed when the graph is read
            nodes = [self._of_default(n, default) if n.dtype is float else n for n in nodes]
        dtype, refused = _dtypes(name, tuple([n.dtype for n in nodes]), default)
        if refused is not None:
            whole = torch.int32 if "int" in row.triton else torch.float32
            target = torch.bool if row.name == "where" else whole
            raise errors.OperationArgumentError(
                operation=name, problem=f"{dtype_name(refused)} operands", where=user_line(),
                advice=f"cast them first, e.g. with .to({target}).",
            )  # fmt: skip
        for node in nodes if row.name in CONVERTING else ():
            self.check_fits(name, node, dtype)
        if row.name == "pow" and nodes[1].dtype is int and nodes[1].value < 0 and not dtype.is_floating_point:
            raise errors.OperationArgumentError(
                operation=name, problem=f"integers and the negative exponent {nodes[1].value}",
                where=user_line(), advice=f"use a floating-point exponent, {float(nodes[1].value)}.",
            )  # fmt: skip
        return Proxy(self, self._add(row.name, nodes, dtype))

    def _of_default(self, number: Node, default: torch.dtype) -> Node:
        """A Python float in the default dtype: a constant, or a parameter of a graph to differentiate."""
        if number.is_const:
            return GraphBuilder.fresh_const(number.value, default, number.where)
        return self._add(CAST, (number,), default)

    def check_fits(self, operation: str, node: Node, dtype: torch.dtype) -> None:
        """Raises OperationArgumentError, as torch does, for a number beyond the limits of a dtype.

        An integer would wrap in the conversion, a float would become infinite.
        """
        number, real = node.value, dtype.is_floating_point
        if not (node.is_const and isinstance(number, (int, float))) or dtype == torch.bool:
            return
        if isinstance(number, bool) or (real and not math.isfinite(number)):
            return
        if operation == "where" and dtype in HALF:  # torch makes it infinite
            return
        limits = torch.finfo(dtype) if real else torch.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            wide = "float64" if isinstance(number, float) or real else "int64"
            instead = ", or use math.inf" if real else ""
            raise errors.OperationArgumentError(
                operation=operation, problem=f"{number}, which {dtype_name(dtype)} does not hold",
                where=user_line(),
                advice=f"cast the other operand first, e.g. with .to(torch.{wide}){instead}.",
            )  # fmt: skip

    def cast(self, value: Any, dtype: Any) -> Proxy:
        node = self.node(value, "a cast")
        if dtype not in VALUE_DTYPES:
            raise errors.ModDtypeError(
                name="the target of a cast", dtype=str(dtype),
                accepted="bool, integer and floating-point dtypes", where=user_line(),
            )  # fmt: skip
        # arithmetic on positions may be widened to int64, but it must wrap where the user wrote int32
        wraps = dtype == torch.int32 and node.op not in ("load", CAST)
        if node.dtype == dtype and not wraps:
            return value if isinstance(value, Proxy) else Proxy(self, node)  # torch returns the same tensor
        return Proxy(self, self._add(CAST, (node,), dtype))


def plain_number(value: Any) -> bool | int | float | None:
    """Converts a number of Python, numpy, an enum or sympy to a plain Python number; None for the rest."""
    if type(value).__module__ == "numpy" and hasattr(value, "ndim"):
        if value.ndim:
            return None
        value = value.item()
    for plain in (bool, int, float):
        if isinstance(value, plain):
            return plain(value)
    if hasattr(value, "__index__"):
        return int(value.__index__())
    return float(value) if hasattr(value, "__float__") else None


@cache
def _dtypes(name: str, dtypes: tuple[DType, ...], default: torch.dtype) -> tuple[torch.dtype, DType | None]:
    """The dtype of an operation's result, and the first argument dtype that torch does not take, or None.

    `default` is the present default floating-point dtype.
    """
    row = BY_TORCH_NAME[name]
    dtype = row.dtype(*dtypes)
    return dtype, row.refused(dtypes, dtype)


def capture_of(name: str, tensor: torch.Tensor) -> Capture:
    """Describes a captured tensor for a graph."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Capture(name, tensor.dtype, tensor.dim(), bool(reach >= 2**31))
