"""Finds the sizes that captured tensors need in a call: what a standalone file checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from flexmod.ir import bounds
from flexmod.ir.graph import POSITIONS, Graph, Node, used_captures
from flexmod.ir.integers import integer_bounds
from flexmod.ir.linear import Forms, Linear
from flexmod.ir.passes import Extents


def least_shapes(
    graph: Graph | None, tensors: Sequence[Tensor], extents: Extents, names: Mapping[str, str]
) -> dict[int, list[str]]:
    """Returns by capture what the size of each dimension must reach: an expression of the call's sizes, with
    their `names` by position, "max(M + 50, 4)". It is "0" where nothing is known of an index.

    Known are sums of positions and of their quotients by a number, and other indices if their bounds in the
    largest call, `extents`, lie within the tensor.
    """
    used = used_captures(graph.nodes) if graph else ()
    found: dict[int, list[set[str]]] = {number: [set() for _ in tensors[number].shape] for number in used}
    for number, dimension, form, (low, high) in _indices(graph, extents):
        size = tensors[number].shape[dimension]
        sizes = set() if form is None else _reach(form, names)
        if not sizes and -size <= low and high < size:
            sizes = {str(max(int(high) + 1, -int(low)))}
        found[number][dimension] |= sizes
    return {number: [*map(_largest, shape)] for number, shape in found.items()}


def positions_in(graph: Graph | None, tensors: Sequence[Tensor], extents: Extents) -> dict[str, int]:
    """Returns by position how many of its values have elements, in tensors that it indexes, also shifted."""
    limits: dict[str, int] = {}
    for number, dimension, form, _ in _indices(graph, extents):
        parts = [] if form is None else [*form.parts.items()]
        if form is not None and len(parts) == 1 and parts[0][0].op == "input" and parts[0][1] == 1:
            name, size = str(parts[0][0].value), tensors[number].shape[dimension] - form.constant
            limits[name] = max(1, min(size, limits.get(name, size)))
    return limits


def fit(graph: Graph | None, tensors: Sequence[Tensor], sizes: Extents) -> bool:
    """Returns whether a call of these sizes stays within the tensors, as far as bounds of indices tell."""
    for number, dimension, _, found in _indices(graph, sizes):
        size = tensors[number].shape[dimension]
        if found != bounds.UNKNOWN and (found[0] < -size or found[1] >= size):
            return False
    return True


def _indices(
    graph: Graph | None, extents: Extents
) -> Iterator[tuple[int, int, Linear | None, bounds.Bounds]]:
    """Yields each index of a load: the capture, the dimension, the index's linear form and its bounds."""
    if graph is None:
        return
    known = integer_bounds(graph, dict(zip(POSITIONS, extents, strict=True)), may_wrap=True)
    forms = Forms(known)
    for node in graph.nodes:
        if node.op == "load" and isinstance(node.value, int):
            for dimension, index in enumerate(node.args):
                yield node.value, dimension, forms.of(index), known.get(index, bounds.UNKNOWN)


def _reach(form: Linear, names: Mapping[str, str]) -> set[str]:
    """Writes one more than the largest value of an index, and its smallest value negated, if it is negative.
    Empty if the form has other parts than positions and their quotients.
    """
    sides: tuple[list[str], list[str]] = [], []
    constants = [form.constant + 1, -form.constant]
    for node, coefficient in form.parts.items():
        side, times = coefficient < 0, abs(coefficient)
        if node.op == "input":
            text = names[str(node.value)]
            constants[side] -= times
        elif node.op == "floor_divide" and node.args[0].op == "input" and _is_positive(node.args[1]):
            text = f"(({names[str(node.args[0].value)]} - 1) // {node.args[1].value})"
        else:
            return set()
        sides[side].append(text if times == 1 else f"{times} * {text}")
    found = set()
    for terms, constant in zip(sides, constants, strict=True):
        if terms:
            rest = f" {'+' if constant > 0 else '-'} {abs(constant)}" if constant else ""
            found.add(" + ".join(terms) + rest)
        elif constant > 0:
            found.add(str(constant))
    return found


def _is_positive(node: Node) -> bool:
    return node.is_const and isinstance(node.value, int) and node.value > 0


def _largest(sizes: set[str]) -> str:
    """Writes the largest of these sizes; 0 if there are none."""
    return f"max({', '.join(sorted(sizes))})" if len(sizes) > 1 else "".join(sizes) or "0"
