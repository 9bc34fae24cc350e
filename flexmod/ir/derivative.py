"""Graph -> Graph of derivatives, by the table's rules, in reverse."""

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
    """Derivatives by the score and by what a score_mod loads.

    `graph`, of kind "grad", has as results grad * d(score_mod)/d(score), then for each load one term,
    grad * d(score_mod)/d(loaded element), and the load's indices. `loads` are the loads' capture numbers.
    A pass may change the graph: what belongs to which load is told by the order of the results alone.
    """

    graph: Graph
    loads: tuple[int, ...]


def differentiate(graph: Graph) -> Graph:
    """grad * d(score_mod)/d(score): a graph of kind "grad" with one more input, "grad".

    Raises NoDerivativeError, with the user's line, for an operation whose row has no derivative.
    """
    whole = differentiate_captures(graph, ()).graph
    return whole.of(whole.results[:1])


def differentiate_captures(graph: Graph, grad_captures: Sequence[int]) -> CaptureGrad:
    """`differentiate`, and in the same pass the derivatives by the elements of the captures `grad_captures`.

    A load that the result does not depend on differentiably has no term. A term is of the dtype in which it
    comes about: rounding it to the capture's is left for when the terms of an element are summed.
    """
    tracer = Tracer(None, torch.device("cpu"))
    # the primal, made again in the new graph's builder, so that what both need is shared
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
    """Adds to the arguments' gradients what `node`'s gradient gives them."""
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
