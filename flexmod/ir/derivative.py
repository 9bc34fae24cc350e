"""Turns a score_mod's graph into the graph of its derivatives, by the table's rules, in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexmod import errors
from flexmod.ir.graph import Graph, Node, rebuild
from flexmod.ir.ops import CAST, OPS, strong
from flexmod.ir.proxy import Proxy
from flexmod.ir.trace import Tracer, watching


@dataclass(frozen=True)
class CaptureGrad:
    """A score_mod's derivatives by the score and by the elements that it loads.

    `graph`, of kind "grad", has as first result grad * d(score_mod)/d(score). For each load follow one term,
    grad * d(score_mod)/d(loaded element), and the load's indices. `loads` are the loads' capture numbers.
    Passes may change the graph, so the order of the results alone says which term belongs to which load.
    """

    graph: Graph
    loads: tuple[int, ...]


def differentiate(graph: Graph) -> Graph:
    """The graph of grad * d(score_mod)/d(score), of kind "grad", with one more input, "grad".

    Raises NoDerivativeError, with the user's line, for an operation whose row has no derivative.
    """
    whole = differentiate_captures(graph, ()).graph
    return whole.of(whole.results[:1])


def differentiate_captures(graph: Graph, grad_captures: Sequence[int]) -> CaptureGrad:
    """Like `differentiate`, and also differentiates by the elements of the captures `grad_captures`.

    A load has no term if the result does not depend on it differentiably. A term keeps the dtype in which it
    was computed; only the sum of an element's terms is rounded to the capture's dtype.
    """
    tracer = Tracer(None, torch.device("cpu"))
    # rebuild the primal in the new graph's builder, so that both share their nodes
    primal = rebuild(graph, lambda b, n, a: None)
    tracer.builder.adopt(primal.nodes)
    loads = [n for n in primal.nodes if n.op == "load" and n.value in grad_captures]
    active = _active(primal, loads)
    grads: dict[Node, Proxy] = {primal.result: tracer.position("grad")}
    with watching(tracer):
        for node in reversed(primal.nodes):
            if node in grads and node in active and node.op not in ("input", "load"):
                tracer.line = node.where
                _backward(tracer, node, grads, active)
    loads = [n for n in loads if n in grads]
    reached = [grads[n] for n in primal.nodes if n.op == "input" and n.value == "score" and n in grads]
    by_score = reached[0] if reached else tracer.cast(0.0, torch.float32)
    terms = [node for load in loads for node in (grads[load]._node, *load.args)]
    numbers = tuple(load.value for load in loads)
    return CaptureGrad(graph.of([by_score._node, *terms], "grad"), numbers)  # type: ignore[arg-type]


def _active(graph: Graph, loads: Sequence[Node]) -> set[Node]:
    """The nodes through which the score or one of the loads may reach the result."""
    active: set[Node] = set(loads)
    for node in graph.nodes:
        is_score = node.op == "input" and node.value == "score"
        if is_score or (node.op != "load" and any(a in active for a in node.args)):
            active.add(node)
    return active


def _backward(tracer: Tracer, node: Node, grads: dict[Node, Proxy], active: set[Node]) -> None:
    """Adds the contribution of `node`'s gradient to its arguments' gradients."""
    grad = grads[node]
    if node.op == CAST:
        parts: tuple[Proxy | None, ...] = (grad if strong(node.dtype).is_floating_point else None,)
    else:
        rule = OPS[node.op].derivative
        if rule is None:
            raise errors.NoDerivativeError(operation=node.op, where=node.where)
        parts = rule(grad, Proxy(tracer, node), *(Proxy(tracer, a) for a in node.args))
    for argument, part in zip(node.args, parts, strict=True):
        if part is None or argument not in active or not strong(argument.dtype).is_floating_point:
            continue
        if argument.op != "load":
            part = tracer.cast(part, strong(argument.dtype))
        grads[argument] = tracer.apply("add", (grads[argument], part)) if argument in grads else part
