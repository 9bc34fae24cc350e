"""Runs a user's mod once, on proxies, and builds the graph of its operations.

A Proxy stands for a scalar: its operators, and every torch function called on it, make Nodes through the op
table. A TorchFunctionMode watches the rest (`torch_calls.py`): captured tensors indexed by a Proxy, random
numbers, in-place writes. Code without a Proxy runs eagerly, as in Python.
"""

from __future__ import annotations

import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flexmod import errors
from flexmod.errors.base import a_type, not_swallowed
from flexmod.ir import advice
from flexmod.ir.graph import ARGUMENTS, Graph, Node, dtype_name, flowing
from flexmod.ir.ops import CAST
from flexmod.ir.proxy import Proxy, TracedValue, Tracer, plain_number
from flexmod.ir.source import (
    check_arity,
    is_users,
    leads_to_mods,
    line_in,
    line_of,
    mod_name,
    reached,
    user_line,
)
from flexmod.ir.torch_calls import Watch, WatchOperations
from flexmod.ir.vectors import Vector
from flexmod.runtime.private_torch import enable_torch_function
from flexmod.runtime.tensor_kinds import no_autocast

NUMPY_RANDOM = "numpy.random", 0
GENERATORS = {"Generator": "bit_generator", "RandomState": "_bit_generator"}
# the context of a torch.autograd.Function does not name the class
TRACED_CLASS = re.compile(r"\b(TracedValue|Proxy|CaptureView)\b|accepts? variable")
# torch checks the classes of arguments before it dispatches
WRONG_ARGUMENTS = re.compile(
    r"(?P<name>\w+)\(\) received an invalid combination of arguments - got (?P<given>\(.*\)), but expected"
    r"|(?:(?P<function>\w+)\(\): argument '\w+' \(position \d+\) must be Tensor, not "
    r"|expected Tensor as element \d+ in argument \d+, but got )(?P<type>[\w.]+)$"
)


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
        node = _result(tracer, returned, kind)
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
    """Raises an error of flexmod for Python's or torch's own error on the class of a traced value.

    torch.vmap, a scripted function and "%d" take tensors or numbers, and dispatch to no one. A torch function
    that is given a number for a tensor dispatches to no one either.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        wrong = WRONG_ARGUMENTS.match(text)
        if isinstance(error, errors.FlexmodError) or not (wrong or TRACED_CLASS.search(str(error))):
            raise
        steps = traceback.walk_tb(error.__traceback__)
        inside = [step for step in steps if is_users(step[0].f_code.co_filename)]
        where = line_in(*inside[-1]) if inside else user_line()
        if wrong:
            name = wrong["name"] or wrong["function"] or "stack"
            given = wrong["given"] or f"an argument of class {wrong['type']} in the place of a tensor"
            raise errors.OperationArgumentError(
                operation=f"torch.{name}", problem=TRACED_CLASS.sub("traced value", given), where=where,
                advice=advice.of_arguments(name, where, inside[-1][0] if inside else None),
            ) from error  # fmt: skip
        raise errors.UnknownOperationError(
            operation="what is called here", where=where,
            advice=f"use operators and the functions in docs/operations.md ({text}).",
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
    every state of the caller, so that a mod that turns them off is noticed. Autocast is off, also for what a
    mod computes from captured tensors: a trace may serve calls in another state.
    """
    with (
        enable_torch_function(), torch.enable_grad(), no_autocast("cpu"), no_autocast("cuda"),
        WatchOperations(tracer), Watch(tracer),
    ):  # fmt: skip
        yield


def _result(tracer: Tracer, value: Any, kind: str) -> Node:
    """Converts the user's result to a Node: bool for a mask, float32 for a score."""
    mod = f"{kind}_mod {mod_name(tracer.mod)}" if tracer.mod is not None else f"{kind}_mod"
    if not isinstance(value, (TracedValue, torch.Tensor)) and plain_number(value) is None:
        raise errors.NoResultError(
            mod=mod, result="None" if value is None else a_type(value),
            expected="one bool" if kind == "mask" else "the changed score",
            where=line_of(tracer.mod),
        )  # fmt: skip
    if not isinstance(value, (Proxy, Vector)):  # a constant; the mod has returned
        tracer.line = line_of(tracer.mod)
    node = tracer.node(value, f"the result of {mod}")
    is_bool = node.dtype in (torch.bool, bool)
    if kind == "mask" and not is_bool:
        raise errors.MaskResultError(dtype=dtype_name(node.dtype), where=node.where)
    if kind == "score" and is_bool:
        raise errors.ScoreResultError(dtype=dtype_name(node.dtype), where=node.where)
    if kind == "score" and tracer.without_gradient:
        _check_gradient(tracer, node)
    if is_bool or node.dtype == torch.float32:
        return node
    return tracer.builder.node(CAST, (node,), torch.float32, None, node.where)


def _check_gradient(tracer: Tracer, result: Node) -> None:
    """Raises UnknownOperationError if a gradient would flow through what the mod computed without one.

    None flows to a captured tensor without requires_grad. `tensor_key` has that, so a change of it has
    the mod traced again.
    """
    ways = flowing(result)
    for node in tracer.without_gradient:
        if node in ways and any(_takes_gradient(tracer, each) for each in flowing(node)):
            raise errors.UnknownOperationError(
                operation="a part without gradient (torch.no_grad, autograd.Function)",
                where=tracer.without_gradient[node],
                advice=advice.TANH if node.op == "tanh" else advice.WITHOUT_GRADIENT,
            )  # fmt: skip


def _takes_gradient(tracer: Tracer, node: Node) -> bool:
    if node.op == "load":
        return tracer.tensors[node.value].requires_grad
    return node.value == "score"
