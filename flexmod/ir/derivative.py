"""Turns a score_mod's graph into the graph of its derivatives, by the table's rules, in reverse.

`reductions` decides how to sum the gradients of captured elements, by the indices of each load.

        row         no index depends on kv_idx: a sum over a row's keys
        column      no index depends on q_idx: a sum over a column's queries
        diagonal    indices depend on q_idx and kv_idx only through their difference: a sum along diagonals
        element     anything else, also indices that depend on the score: each element has its own place

Each sum leaves O(length) numbers, and the remaining position decides the load's index. If no index depends on
either position, as for slopes of heads and scalars, the sum may run over a row's keys or a column's queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flexmod import errors
from flexmod.ir.graph import POSITIONS, Graph, Node, home_of, rebuild
from flexmod.ir.integers import integer_bounds
from flexmod.ir.linear import Forms, Linear, taken_apart
from flexmod.ir.ops import CAST, HALF, OPS, strong, with_default
from flexmod.ir.passes import EXACT
from flexmod.ir.proxy import Proxy, Tracer
from flexmod.ir.trace import watching


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
    # in the new graph's builder, so that both share their nodes
    primal = rebuild(graph, builder=tracer.builder)
    loads = [n for n in primal.nodes if n.op == "load" and n.value in grad_captures]
    active = _active(primal, loads)
    grads: dict[Node, Proxy] = {primal.result: tracer.position("grad")}
    # the rules' numbers, such as n - 1.0 of x ** n, whatever the dtype of the mod's
    with watching(tracer), with_default(torch.float32):
        for node in reversed(primal.nodes):
            if node in grads and node in active and node.op not in ("input", "load"):
                tracer.line = node.where
                _backward(tracer, node, grads, active)
    loads = [n for n in loads if n in grads]
    reached = [grads[n] for n in primal.nodes if n.is_input("score") and n in grads]
    by_score = reached[0] if reached else tracer.cast(0.0, torch.float32)
    terms = [node for load in loads for node in (grads[load]._node, *load.args)]
    numbers = tuple(load.value for load in loads)
    return CaptureGrad(graph.of([by_score._node, *terms], "grad"), numbers)


def _active(graph: Graph, loads: Sequence[Node]) -> set[Node]:
    """The nodes through which the score or one of the loads may reach the result."""
    active: set[Node] = set(loads)
    for node in graph.nodes:
        if node.is_input("score") or (node.op != "load" and any(a in active for a in node.args)):
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
            dtype = strong(argument.dtype)
            if home_of(argument) != "element":  # torch, too, sums the terms before it rounds them
                dtype = torch.promote_types(dtype, torch.float32)
            part = tracer.cast(part, dtype)
        grads[argument] = tracer.apply("add", (grads[argument], part)) if argument in grads else part


# Up to here float32 has all differences of two positions, and of positions plus small numbers.
LARGEST_ON_LINE = EXACT // 2
Along = Literal["row", "column", "diagonal", "element"]
Uniform = Literal["row", "column"]
"""How to sum terms whose indices read only b and h."""


@dataclass(frozen=True, eq=False)
class GradientTerm:
    """One load's contribution to the gradient of a captured tensor.

    `capture` is the tensor's number, `gradient` the loaded element's gradient for each score, and `indices`
    select the element.
    """

    capture: int
    gradient: Node
    indices: tuple[Node, ...]
    along: Along


def terms_of(found: CaptureGrad, uniform: Uniform = "row") -> tuple[GradientTerm, ...]:
    """The terms of a CaptureGrad in the order of its loads, each with the sum that its indices permit."""
    forms = _Modular(found.graph, 2**31)
    results = iter(found.graph.results[1:])
    terms = []
    for number in found.loads:
        gradient = next(results)
        indices = tuple(next(results) for _ in range(found.graph.captures[number].rank))
        terms.append(GradientTerm(number, gradient, indices, _along(indices, forms, uniform)))
    return tuple(terms)


def is_diagonal(graph: Graph) -> bool:
    """Do the graph's results depend on q_idx and kv_idx only through their difference?

    q_idx and kv_idx are less than LARGEST_ON_LINE.
    """
    return all(map(diagonal_forms(graph, LARGEST_ON_LINE).is_diagonal, graph.results))


def diagonal_forms(graph: Graph, largest: int) -> Forms:
    """The forms of a graph's nodes, whose `is_diagonal` also sees wrapped differences and exact floats.

    q_idx and kv_idx are less than `largest`.
    """
    return _Modular(graph, largest, floats=True)


def _along(indices: tuple[Node, ...], forms: Forms, uniform: Uniform) -> Along:
    home = home_of(*indices)
    if home == "element":
        return "diagonal" if all(map(forms.is_diagonal, indices)) else "element"
    return uniform if home == "program" else home


class _Modular(Forms):
    """Linear forms modulo the range of a node's dtype: a difference of positions that wraps is constant along
    diagonals too. Comparisons, and casts to wider integers, need forms that do not wrap.

    `floats`: also forms of floats that are exact integers.
    """

    def __init__(self, graph: Graph, largest: int, floats: bool = False) -> None:
        super().__init__(integer_bounds(graph, dict.fromkeys(POSITIONS, largest)))
        self._exact = Forms(self.known)
        self._floats = floats

    def difference(self, comparison: Node) -> Linear | None:
        return self._exact.difference(comparison)

    def _form(self, node: Node) -> Linear | None:
        dtype = strong(node.dtype)
        if dtype == torch.bool or dtype.is_floating_point and not (self._floats and dtype not in HALF):
            return None
        if node.is_const and type(node.value) is int:
            return Linear({}, node.value)
        linear = node.op in ("add", "sub", "mul", "neg", CAST)
        found = taken_apart(node.op, [self._argument(a, dtype) for a in node.args]) if linear else None
        if dtype.is_floating_point:
            fits = found is not None and all(abs(end) <= EXACT for end in found.between(self.known))
            return found if fits else None
        return found or Linear({node: 1})

    def _argument(self, node: Node, dtype: torch.dtype) -> Linear:
        """The form of an argument after a cast. A wider dtype needs a value that has not wrapped."""
        form, source = self.of(node), strong(node.dtype)
        exact = self._exact.of(node) is not None and all(map(math.isfinite, self.known[node]))
        alike = dtype.is_floating_point == source.is_floating_point
        narrows = alike and (dtype.is_floating_point or dtype.itemsize <= source.itemsize)
        return form if form is not None and (exact or narrows) else Linear({node: 1})
