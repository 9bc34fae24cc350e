"""How the gradients of captured elements are summed, read off the indices of each load.

    row         no index depends on kv_idx: a sum over a row's keys
    column      none depends on q_idx: a sum over a column's queries
    diagonal    q_idx and kv_idx matter through their difference alone: a sum along the diagonals
    element     anything else, an index that depends on the score too: every element goes to its own place

What a sum leaves is O(length), and the load's index follows from the position that is left. Where no index
depends on either, as with slopes of heads and scalars, a row's keys or a column's queries may be summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from flexmod.ir.derivative import CaptureGrad
from flexmod.ir.graph import COLUMN, ROW, UNIFORM, DType, Graph, Node
from flexmod.ir.ops import CAST, COMPARISONS, OPS, strong

Along = Literal["row", "column", "diagonal", "element"]
Uniform = Literal["row", "column"]
"""How terms are summed whose indices read b and h alone."""


@dataclass(frozen=True, eq=False)
class GradientTerm:
    """What one load adds to the gradient of a captured tensor.

    `capture` is the tensor's number, `gradient` the gradient of the loaded element for each score, `indices`
    say which element it is.
    """

    capture: int
    gradient: Node
    indices: tuple[Node, ...]
    along: Along


def terms_of(found: CaptureGrad, uniform: Uniform = "row") -> tuple[GradientTerm, ...]:
    """The terms of a CaptureGrad in the order of its loads, each with the sum that its indices allow."""
    known = _Differences(found.graph)
    results = iter(found.graph.results[1:])
    terms = []
    for number in found.loads:
        gradient = next(results)
        indices = tuple(next(results) for _ in range(found.graph.captures[number].rank))
        terms.append(GradientTerm(number, gradient, indices, _along(indices, known, uniform)))
    return tuple(terms)


def _along(indices: tuple[Node, ...], known: _Differences, uniform: Uniform) -> Along:
    if all(index.home <= UNIFORM for index in indices):
        return uniform
    if all(index.home <= ROW for index in indices):
        return "row"
    if all(index.home <= COLUMN for index in indices):
        return "column"
    return "diagonal" if all(index in known.diagonal for index in indices) else "element"


class _AffineIndex(NamedTuple):
    """An integer q * q_idx + kv * kv_idx + (something that only b and h decide), modulo the dtype's range.

    `exact`: made of positions and numbers in 32 bits or more, where nothing wraps (see `passes.fitted`).
    """

    q: int
    kv: int
    exact: bool


class _Differences:
    """`diagonal`: the nodes of a graph that are the same all along a diagonal, b and h given."""

    def __init__(self, graph: Graph) -> None:
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
        """q_idx > kv_idx: the sign of a difference."""
        if node.op not in COMPARISONS:
            return False
        found = _combined("sub", node.args, self._arguments(node))
        return found is not None and found.exact and found.q == -found.kv

    def _affine_of(self, node: Node) -> _AffineIndex | None:
        dtype = strong(node.dtype)
        if dtype.is_floating_point or dtype == torch.bool:
            return None
        if node.op == "input":
            return _AffineIndex(int(node.value == "q_idx"), int(node.value == "kv_idx"), True)
        if node.op in ("const", "param"):
            return _AffineIndex(0, 0, True)
        if node.op == CAST:
            found = self._brought(node.args[0], dtype)
            # a cast to int32 that `passes.fitted` left says that values wrap from there on
            return found._replace(exact=found.exact and dtype != torch.int32) if found else None
        if node.op in ("add", "sub", "mul", "neg"):
            found = _combined(node.op, node.args, self._arguments(node))
            if found is not None:
                return found._replace(exact=found.exact and dtype.itemsize >= 4)
        return _AffineIndex(0, 0, False) if node.home <= UNIFORM else None

    def _arguments(self, node: Node) -> list[_AffineIndex | None]:
        at = OPS[node.op].argument_dtypes([a.dtype for a in node.args], node.dtype)
        return [self._brought(a, d) for a, d in zip(node.args, at, strict=True)]

    def _brought(self, node: Node, dtype: DType) -> _AffineIndex | None:
        """The node as an argument of this dtype. A wider one keeps only what has not wrapped before."""
        affine, source, target = self._affine.get(node), strong(node.dtype), strong(dtype)
        if affine is None or target.is_floating_point or target == torch.bool:
            return None
        if target.itemsize < source.itemsize:
            return affine._replace(exact=isinstance(node.dtype, type) and target.itemsize >= 4)
        same = target.itemsize == source.itemsize
        return affine if same or affine.exact or affine.q == affine.kv == 0 else None


def _combined(op: str, nodes: tuple[Node, ...], found: list[_AffineIndex | None]) -> _AffineIndex | None:
    """The result of a sum, a difference, a negation, or a product with a number."""
    arguments = [a for a in found if a is not None]
    if len(arguments) < len(nodes):
        return None
    exact = all(a.exact for a in arguments)
    if op == "neg":
        return _AffineIndex(-arguments[0].q, -arguments[0].kv, exact)
    first, second = arguments
    if op == "mul":
        if first.q == first.kv == second.q == second.kv == 0:
            return _AffineIndex(0, 0, exact)
        for number, other in ((nodes[0], second), (nodes[1], first)):
            if number.is_const:
                factor = int(number.value)  # type: ignore[call-overload]
                return _AffineIndex(factor * other.q, factor * other.kv, exact)
        return None
    sign = 1 if op == "add" else -1
    return _AffineIndex(first.q + sign * second.q, first.kv + sign * second.kv, exact)
