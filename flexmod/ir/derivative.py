"""Graph -> Graph of derivatives, by the table's rules, in reverse."""

from __future__ import annotations

import torch

from flexmod import errors
from flexmod.ir.graph import Graph, Node, rebuild
from flexmod.ir.ops import CAST, OPS, strong
from flexmod.ir.proxy import Proxy
from flexmod.ir.trace import Tracer


def differentiate(graph: Graph) -> Graph:
    """grad * d(score_mod)/d(score): a graph of kind "grad" with one more input, "grad".

    Raises NoDerivativeError, with the user's line, for an operation whose row has no derivative.
    """
    tracer = Tracer(None, torch.device("cpu"))
    # the primal, made again in the new graph's builder, so that what both need is shared
    primal = rebuild(graph, lambda b, n, a: None)
    tracer.builder.adopt(primal.nodes)
    grads: dict[Node, Proxy] = {primal.result: tracer.position("grad")}
    for node in reversed(primal.nodes):
        if node in grads and node.args and "score" in node.home:
            tracer.line = node.where
            _backward(tracer, node, grads)
    reached = [grads[n] for n in primal.nodes if n.op == "input" and n.value == "score" and n in grads]
    result = reached[0] if reached else tracer.cast(0.0, torch.float32)
    return Graph("grad", (result._node,), graph.captures)


def _backward(tracer: Tracer, node: Node, grads: dict[Node, Proxy]) -> None:
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
        if part is None or "score" not in argument.home or not strong(argument.dtype).is_floating_point:
            continue
        part = tracer.cast(part, strong(argument.dtype))
        grads[argument] = tracer.apply("add", (grads[argument], part)) if argument in grads else part
