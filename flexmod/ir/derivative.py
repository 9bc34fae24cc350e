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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from flexmod import errors
from flexmod.ir.graph import COLUMN, ROW, UNIFORM, DType, Graph, Node, rebuild
from flexmod.ir.ops import CAST, COMPARISONS, HALF, OPS, strong
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
    # in the new graph's builder, so that both share their nodes
    primal = rebuild(graph, builder=tracer.builder)
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
    known = _Differences(found.graph)
    results = iter(found.graph.results[1:])
    terms = []
    for number in found.loads:
        gradient = next(results)
        indices = tuple(next(results) for _ in range(found.graph.captures[number].rank))
        terms.append(GradientTerm(number, gradient, indices, _along(indices, known, uniform)))
    return tuple(terms)


def is_diagonal(graph: Graph) -> bool:
    """Do the graph's results depend on q_idx and kv_idx only through their difference?

    Positions are less than 2^24, so that they are exact in float32.
    """
    known = _Differences(graph, floats=True)
    return all(result in known.diagonal for result in graph.results)


def _along(indices: tuple[Node, ...], known: _Differences, uniform: Uniform) -> Along:
    if all(index.home <= UNIFORM for index in indices):
        return uniform
    if all(index.home <= ROW for index in indices):
        return "row"
    if all(index.home <= COLUMN for index in indices):
        return "column"
    return "diagonal" if all(index in known.diagonal for index in indices) else "element"


class _AffineIndex(NamedTuple):
    """An integer q * q_idx + kv * kv_idx + (a value of b and h only), modulo the dtype's range.

    `exact`: computed from positions and numbers in 32 bits or more, where nothing wraps (see
    `passes.fitted`).
    """

    q: int
    kv: int
    exact: bool

    def plus(self, other: _AffineIndex, factor: int = 1) -> _AffineIndex:
        exact = self.exact and other.exact
        return _AffineIndex(self.q + factor * other.q, self.kv + factor * other.kv, exact)


NUMBER = _AffineIndex(0, 0, True)


class _Differences:
    """Finds `diagonal`, the nodes of a graph that are constant along each diagonal for a given b and h.

    `floats`: positions are exact as floats.
    """

    def __init__(self, graph: Graph, floats: bool = False) -> None:
        self._floats = floats
        self._affine: dict[Node, _AffineIndex] = {}
        self.diagonal: set[Node] = set()
        for node in graph.nodes:
            affine = self._affine_of(node)
            if affine is not None:
                self._affine[node] = affine
            opposite = affine is not None and affine.q == -affine.kv
            if node.home <= UNIFORM or opposite or self._of_diagonals(node) or self._compares(node):
                self.diagonal.add(node)

    def _of_diagonals(self, node: Node) -> bool:
        return bool(node.args) and all(a in self.diagonal for a in node.args)

    def _compares(self, node: Node) -> bool:
        """Is it a comparison like q_idx > kv_idx, which depends on the difference only?"""
        if node.op not in COMPARISONS:
            return False
        found = _combined("sub", node.args, self._arguments(node))
        return found is not None and found.exact and found.q == -found.kv

    def _affine_of(self, node: Node) -> _AffineIndex | None:
        dtype = strong(node.dtype)
        if dtype.is_floating_point and self._floats:
            return self._float(node)
        if dtype.is_floating_point or dtype == torch.bool:
            return None
        if node.op == "input":
            return _AffineIndex(int(node.value == "q_idx"), int(node.value == "kv_idx"), True)
        if node.op in ("const", "param"):
            return NUMBER
        if node.op == CAST:
            found = self._brought(node.args[0], dtype)
            # values may wrap after a cast to int32 that `passes.fitted` kept
            return found._replace(exact=found.exact and dtype != torch.int32) if found else None
        if node.op in ("add", "sub", "mul", "neg"):
            found = _combined(node.op, node.args, self._arguments(node))
            if found is not None:
                return found._replace(exact=found.exact and dtype.itemsize >= 4)
        return _AffineIndex(0, 0, False) if node.home <= UNIFORM else None

    def _float(self, node: Node) -> _AffineIndex | None:
        """A position as a float, or a difference of two."""
        if strong(node.dtype) in HALF:
            return None
        found = [self._affine.get(argument) for argument in node.args]
        if node.op == CAST:
            position = found[0] in ((1, 0, True), (0, 1, True))
            return found[0] if position else None
        return _combined("sub", node.args, found) if node.op == "sub" else None

    def _arguments(self, node: Node) -> list[_AffineIndex | None]:
        return [self._brought(a, d) for a, d in OPS[node.op].arguments(node)]

    def _brought(self, node: Node, dtype: DType) -> _AffineIndex | None:
        """The node as an argument of this dtype. A wider dtype needs a value that has not wrapped."""
        affine, source, target = self._affine.get(node), strong(node.dtype), strong(dtype)
        if affine is None or target.is_floating_point or target == torch.bool:
            return None
        if target.itemsize < source.itemsize:
            return affine._replace(exact=isinstance(node.dtype, type) and target.itemsize >= 4)
        same = target.itemsize == source.itemsize
        return affine if same or affine.exact or affine.q == affine.kv == 0 else None


def _combined(op: str, nodes: tuple[Node, ...], found: list[_AffineIndex | None]) -> _AffineIndex | None:
    """The affine index of a sum, a difference, a negation, or a product with a number."""
    arguments = [a for a in found if a is not None]
    if len(arguments) < len(nodes):
        return None
    first, second = arguments if len(arguments) == 2 else (NUMBER, *arguments)  # -x is 0 - x
    if op != "mul":
        return first.plus(second, 1 if op == "add" else -1)
    for number, other in ((nodes[0], second), (nodes[1], first)):
        if number.is_const:
            return NUMBER.plus(other, int(number.value))  # type: ignore[call-overload]
    return first.plus(second) if first.q == first.kv == second.q == second.kv == 0 else None
