"""Runs a user's mod once, on proxies, and builds the graph of its operations.

A Proxy stands for a scalar: its operators, and every torch function called on it, make Nodes through the op
table. A TorchFunctionMode watches the rest (`torch_calls.py`): captured tensors indexed by a Proxy, random
numbers, in-place writes. Code without a Proxy runs eagerly, as in Python.
"""

from __future__ import annotations

import math
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flexmod import errors
from flexmod.errors import Where
from flexmod.errors.base import not_swallowed
from flexmod.ir import advice, torch_calls
from flexmod.ir.graph import (
    ARGUMENTS,
    POSITIONS,
    Capture,
    DType,
    ExpectedSize,
    Graph,
    GraphBuilder,
    Node,
    dtype_name,
    flowing,
    rebuild,
)
from flexmod.ir.ops import BY_TORCH_NAME, CAST, HALF, default_dtype
from flexmod.ir.proxy import CaptureView, Proxy
from flexmod.ir.source import (
    capture_names,
    check_arity,
    is_users,
    leads_to_mods,
    line_of,
    mod_name,
    reached,
    user_line,
)
from flexmod.ir.torch_calls import Watch, WatchOperations
from flexmod.ir.vectors import Vector, is_wide, unrolled
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import enable_torch_function, tree_leaves

VALUE_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
# rows for which torch raises an error if a number exceeds the result's dtype (where, masked_fill, clamp); for
# all others it wraps
CONVERTING = ("where", "minimum", "maximum")
NUMPY_RANDOM = "numpy.random", 0
GENERATORS = {"Generator": "bit_generator", "RandomState": "_bit_generator"}
TRACED_CLASS = re.compile(r"\b(TracedValue|Proxy|CaptureView)\b")


@dataclass(frozen=True, eq=False)
class Traced:
    """A mod's graph and its captured tensors, in order.

    `eager`: torch computed on something else than traced values, so the graph may depend on tensors' values.
    `described`: tensors whose shape, dtype or device the mod read. `read`: tensors whose values the trace
    read.
    """

    graph: Graph
    tensors: tuple[torch.Tensor, ...] = ()
    eager: bool = False
    described: tuple[torch.Tensor, ...] = ()
    read: tuple[torch.Tensor, ...] = ()

    def named(self) -> dict[str, torch.Tensor]:
        """Returns the captured tensors by their names in messages."""
        return dict(zip(self.graph.captured_names, self.tensors, strict=True))


def trace(mod: Callable[..., Any], kind: str, device: torch.device | None = None) -> Traced:
    """Traces a mod: runs it once on proxies that report `device` (cpu if None).

    `kind` is "mask" (b, h, q_idx, kv_idx) or "score" (score, b, h, q_idx, kv_idx). If a kernel cannot do what
    the mod does, raises a class of `flexmod.errors` that names the user's line.
    """
    check_arity(mod, kind)
    tracer = Tracer(mod, device or torch.device("cpu"))
    arguments = [tracer.position(name) for name in ARGUMENTS[kind]]
    before = _random_states(mod)
    with watching(tracer), _translated_errors():
        with not_swallowed():  # `except Exception` in a mod would leave one branch of an `if` in the graph
            returned = mod(*arguments)
        node = tracer.result(returned, kind)
    after = _random_states(mod)
    if NUMPY_RANDOM in after.keys() - before.keys():  # the mod imported it, and perhaps drew
        return trace(mod, kind, device)
    for (name, number), state in after.items():
        if state != before.get((name, number), state):
            line = line_of(mod, f"{name.rpartition('.')[2]}.")
            raise errors.RandomNumberError(operation=name, where=line)
    graph = Graph(kind, (node,), tracer.capture_specs(), expected=tuple(tracer.expected))
    beside = (tuple(tensors.values()) for tensors in (tracer.described, tracer.read))
    return Traced(graph, tuple(tracer.tensors), tracer.eager, *beside)


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raises UnknownOperationError for Python's or torch's own error on the class of a traced value.

    torch.vmap, a scripted function, `divmod` and "%d" take tensors or numbers, and dispatch to no one.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, errors.FlexmodError) or not TRACED_CLASS.search(str(error)):
            raise
        steps = traceback.walk_tb(error.__traceback__)
        lines = [Where(frame.f_code.co_filename, number) for frame, number in steps]
        inside = [line for line in lines if is_users(line.file)]
        raise errors.UnknownOperationError(
            operation="what is called here", where=inside[-1] if inside else user_line(),
            advice=f"use operators and the functions in docs/operations.md ({str(error).splitlines()[0]}).",
        ) from error  # fmt: skip


def _random_states(mod: Callable[..., Any]) -> dict[tuple[str, int], object]:
    """The states of Python's and numpy's random numbers, and of generators that the mod, or one that it
    calls, captures, by name and id.

    No torch function announces that they are drawn from.
    """
    found: dict[tuple[str, int], object] = {("random", 0): random.getstate()}
    if NUMPY_RANDOM[0] in sys.modules:  # torch imports numpy, which imports this part when it is first used
        name, keys, *rest = sys.modules[NUMPY_RANDOM[0]].get_state()
        found[NUMPY_RANDOM] = (name, keys.tobytes(), *rest)
    for name, value in reached(mod, leads_to_mods):
        kind = type(value)  # isinstance would run an object's own code
        if issubclass(kind, random.Random):
            found[name, id(value)] = value.getstate()
        elif kind.__name__ in GENERATORS and str(kind.__module__).startswith("numpy."):
            found[name, id(value)] = repr(getattr(value, GENERATORS[kind.__name__]).state)
    return found


@contextmanager
def watching(tracer: Tracer) -> Iterator[None]:
    """Sends torch functions on traced values to the tracer, in every state of torch.

    A call may come from a __torch_function__ or from an operation of torch.library, where torch functions are
    switched off. A mode of the caller must not see traced values. Gradients are on in
    every state of the caller, so that a mod that turns them off is noticed.
    """
    with enable_torch_function(), torch.enable_grad(), WatchOperations(tracer), Watch(tracer):
        yield


class Tracer:
    """One run of one mod: the graph so far, and the tensors that the mod has used."""

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
        self._without_gradient: dict[Node, Where | None] = {}  # made while the mod had turned gradients off
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
                where=user_line(), accepted="strided bool, integer and floating-point tensors",
            )  # fmt: skip
        if type(tensor) not in tensor_kinds.CLASSES:
            tensor_kinds.check_class(self.name_of(tensor), tensor)

    def name_of(self, tensor: torch.Tensor) -> str:
        return capture_names(self.mod, [tensor])[0] if self.mod else "captured0"

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
            self._without_gradient.setdefault(node, where)
        return node

    def inline(self, graph: Graph, tensors: Sequence[torch.Tensor], inputs: Mapping[str, Proxy]) -> Proxy:
        """Copies a graph into this one, with these tensors as captures and these values as inputs."""

        def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
            if node.op == "input":
                return inputs[str(node.value)]._node
            if node.op == "load":
                number: int = node.value  # type: ignore[assignment]
                self._given_names[id(tensors[number])] = graph.captures[number].name
                return builder.node("load", args, node.dtype, self.capture(tensors[number]), node.where)
            return node if node.is_const else None  # stays unshared, see `GraphBuilder.fresh_const`

        for expected in graph.expected:
            self.expect_size(inputs[expected.axis], *expected[1:])
        return Proxy(self, rebuild(graph, change, self.builder).result)

    def expect_size(self, index: Any, size: Any, owner: str, argument: str, start: int = 0) -> Proxy:
        """Records the size of an axis if the index is a position, from `start` on; see `check_sizes`."""
        node = position = self.node(index, "expect_size")
        axes: tuple[str, ...] = POSITIONS
        if node.op == "add" and type(node.args[1].value) is int and node.args[1].is_const:
            position, start, axes = node.args[0], start + node.args[1].value, POSITIONS[2:]
        if position.op == "input" and position.value in axes:
            axis = str(position.value)
            self.expected[ExpectedSize(axis, int(size), owner, argument, start)] = None
        return Proxy(self, node)

    def index(self, target: Any, index: Any) -> Any:
        if isinstance(target, torch.Tensor):
            target = CaptureView(self, self.capture(target), (None,) * target.dim())
        return target[index]

    # values

    def node(self, value: Any, operation: str) -> Node:
        """Converts any operand to a Node."""
        if isinstance(value, Proxy):
            return value._node
        if isinstance(value, Vector):
            raise value.refusal
        if isinstance(value, (torch.Tensor, CaptureView)):
            if value.dim():
                raise self.not_scalar(value, operation)
            assert isinstance(value, torch.Tensor)
            return self.load(self.capture(value), ())  # each call reads its value; the trace never does
        number = plain_number(value)
        if number is None:
            raise errors.OperationArgumentError(
                operation=operation, problem=f"a {type(value).__name__}", where=user_line(),
                advice=advice.of_operand(value),
            )  # fmt: skip
        # the conversion of an unknown class may have read a tensor
        self.eager |= not isinstance(value, (bool, int, float)) and type(value).__module__ != "numpy"
        if type(number) is int and not -(2**63) <= number < 2**63:
            raise errors.OperationArgumentError(
                operation=operation, problem=f"{number}, which needs more than 64 bits", where=user_line(),
                advice="use a smaller integer, or a float.",
            )  # fmt: skip
        return GraphBuilder.fresh_const(number, where=self.where())

    def not_scalar(self, value: torch.Tensor | CaptureView, operation: str) -> errors.NotScalarError:
        """The error for a captured tensor, or a part of one, used as a scalar."""
        name = value._name if isinstance(value, CaptureView) else self.name_of(value)
        indices = ", ".join(POSITIONS[-value.dim() :])
        indices = f"..., {indices}" if isinstance(value, CaptureView) else indices
        return errors.NotScalarError(
            what=f"{operation} was given {name}", shape=tuple(value.shape), where=user_line(),
            example=f"{name}[{indices}]",
        )  # fmt: skip

    def apply(self, name: str, args: Sequence[Any]) -> Any:
        """Applies an operation of the table to operands: to each element of short vectors."""
        if any(map(is_wide, args)):
            return unrolled(self, name, lambda *elements: self.apply(name, elements), args, {})
        row = BY_TORCH_NAME[name]
        default = default_dtype()
        nodes = [self.node(a, name) for a in args]
        kinds = [n.dtype for n in nodes]
        if float in kinds and not any(isinstance(k, torch.dtype) and k.is_floating_point for k in kinds):
            # record the present default dtype, which may have changed when the graph is read
            nodes = [
                GraphBuilder.fresh_const(n.value, default, n.where) if n.dtype is float else n  # type: ignore[arg-type]
                for n in nodes
            ]
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
        if row.name == "pow" and nodes[1].dtype is int and nodes[1].value < 0 and not dtype.is_floating_point:  # type: ignore[operator]
            raise errors.OperationArgumentError(
                operation=name, problem=f"integers and the negative exponent {nodes[1].value}",
                where=user_line(), advice=f"use a floating-point exponent, {float(nodes[1].value)}.",  # type: ignore[arg-type]
            )  # fmt: skip
        return Proxy(self, self._add(row.name, nodes, dtype))

    def check_fits(self, operation: str, node: Node, dtype: torch.dtype) -> None:
        """Raises OperationArgumentError, as torch does, for a number beyond the limits of a dtype.

        An integer would wrap in the conversion, a float would become infinite.
        """
        number, real = node.value, dtype.is_floating_point
        if not (node.is_const and isinstance(number, (int, float))) or dtype == torch.bool:
            return
        if isinstance(number, bool) or (isinstance(number, float) and not real) or not math.isfinite(number):
            return
        if operation == "where" and dtype in HALF:  # torch makes it infinite
            return
        limits = torch.finfo(dtype) if real else torch.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            wide, instead = ("float64", ", or use math.inf") if real else ("int64", "")
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

    def result(self, value: Any, kind: str) -> Node:
        """Converts the user's result to a Node: bool for a mask, float32 for a score."""
        mod = f"{kind}_mod {mod_name(self.mod)}" if self.mod else f"{kind}_mod"
        if not isinstance(value, (Proxy, Vector, torch.Tensor, CaptureView)) and plain_number(value) is None:
            raise errors.NoResultError(
                mod=mod, result="None" if value is None else f"a {type(value).__name__}",
                expected="one bool" if kind == "mask" else "the changed score",
                where=line_of(self.mod),
            )  # fmt: skip
        node = self.node(value, f"the result of {mod}")
        is_bool = node.dtype in (torch.bool, bool)
        traced = isinstance(value, (Proxy, Vector))
        where = node.where if traced else line_of(self.mod) or node.where  # a constant has the caller's line
        if kind == "mask" and not is_bool:
            raise errors.MaskResultError(dtype=dtype_name(node.dtype), where=where)
        if kind == "score" and is_bool:
            raise errors.ScoreResultError(dtype=dtype_name(node.dtype), where=where)
        if kind == "score" and self._without_gradient:
            self._check_gradient(node)
        if is_bool or node.dtype == torch.float32:
            return node
        return self.builder.node(CAST, (node,), torch.float32, None, node.where)

    def _check_gradient(self, result: Node) -> None:
        """Raises UnknownOperationError if a gradient would flow through what the mod computed without one.

        None flows to a captured tensor without requires_grad. `tensor_key` has that, so a change of it has
        the mod traced again.
        """
        ways = flowing(result)
        for node in self._without_gradient:
            if node in ways and any(map(self._takes_gradient, flowing(node))):
                raise errors.UnknownOperationError(
                    operation="a part without gradient (torch.no_grad, autograd.Function)",
                    where=self._without_gradient[node], advice=advice.WITHOUT_GRADIENT,
                )  # fmt: skip

    def _takes_gradient(self, node: Node) -> bool:
        if node.op == "load":
            return self.tensors[node.value].requires_grad  # type: ignore[call-overload]
        return node.value == "score"

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a torch function or method with a traced value among its arguments."""
        return torch_calls.call(self, func, args, kwargs)


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
