"""Moves what a score_mod computes from q_idx - kv_idx alone to a kernel that computes it once a distance.

T5's buckets, for example, take a logarithm and a division for each pair of positions. Yet they have only
M + N - 1 different values for each head. `distance_kernel` fills a table of these:

    [B, HQ, length]     by kv_idx - q_idx; without B or HQ if the values read no b or no h

The other kernels load from it as from a captured tensor, from the place of distance 0 on. They check no
index: a table also has places for positions in the padding of tiles and of the mask's blocks.

For distance d the kernel evaluates the score_mod's own nodes, at kv_idx = max(d, 0) and q_idx = max(-d, 0).
So the bounds of positions hold there too, and results have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from flexmod.codegen.expressions import Function, expensive, register_dtype
from flexmod.codegen.kernels import ByDistance, Captured, Kernels
from flexmod.codegen.triton_text import TritonWriter
from flexmod.ir.derivative import diagonal_forms, differentiate_captures, terms_of
from flexmod.ir.graph import (
    ELEMENT,
    POSITIONS,
    UNIFORM,
    Capture,
    Graph,
    GraphBuilder,
    Node,
    arguments_first,
    home_of,
    rebuild,
)
from flexmod.ir.ops import strong
from flexmod.runtime.plan import Extent, PlanWriter, cdiv

# At least the largest side of a tile, and a multiple of which the sizes of tables are: pointers and strides
# keep their alignment, for which Triton compiles.
PAD, ALIGNED = 256, 16
BLOCK = 256  # places that a program computes
# Costs of operations, in loads; of those in no row here, by `expressions.expensive`.
COSTS = {"load": 1, "exp": 1, "exp2": 1, "sin": 6, "cos": 6, "tan": 6}
EXPENSIVE = 2
# The least cost of a value that is worth one load, or two: a backward whose derivative reads it, too.
ONCE, TWICE = 2, 4


class Split(NamedTuple):
    """A score_mod's `graph`, which loads the values of `functions`; None if no function is worth it.

    It has one more capture for each result of `functions`. `derived` is the graph to differentiate.
    """

    graph: Graph
    functions: Graph | None
    derived: Graph


def split(graph: Graph, largest: int, learned: Collection[int] = (), *, backward: bool = False) -> Split:
    """Splits costly functions of the distance off. q_idx and kv_idx are less than `largest`.

    In a backward, functions load from the captures `learned`, which get gradients, only if the derivative
    computes nothing costly by itself. Then it does not need the functions' values either.
    """
    least: int = ONCE
    fixed: Collection[int] = ()
    if backward and _derivative_is_costly(graph, learned):
        least, fixed = TWICE, learned
    roots = [root for root in _roots(graph, largest, fixed) if _cost(arguments_first([root])) >= least]
    if not roots:
        return Split(graph, None, graph)
    functions, rest = graph.of(roots), _loading(graph, roots)
    loads = [node for node in graph.nodes if node.op == "load" and node.value in learned]
    of_loads = {*loads, *arguments_first([index for load in loads for index in load.args])}
    of_functions = {*functions.nodes}
    # the sums of gradients follow the indices as they were
    as_it_was = any(load in of_functions for load in loads) or any(root in of_loads for root in roots)
    return Split(rest, functions, graph if as_it_was else rest)


def _derivative_is_costly(graph: Graph, learned: Collection[int]) -> bool:
    """Does a derivative compute costly values from positions alone?"""
    found = differentiate_captures(graph, tuple(learned))
    nodes = arguments_first([found.graph.result, *(term.gradient for term in terms_of(found))])
    return _cost([node for node in nodes if node.home <= ELEMENT]) > 0


def _roots(graph: Graph, largest: int, fixed: Collection[int]) -> list[Node]:
    """Returns the nodes that read q_idx and kv_idx through their difference, and are no part of another.

    They do not load from the captures `fixed`.
    """
    forms = diagonal_forms(graph, largest)
    staying: set[Node] = set()
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "load" and node.value in fixed or any(a in staying for a in node.args):
            staying.add(node)
        elif home_of(node) == "element" and node.home <= ELEMENT and forms.is_diagonal(node):
            found.add(node)
    outside = {a for node in graph.nodes if node not in found for a in node.args} | {*graph.results}
    return [n for n in graph.nodes if n in found and n in outside and isinstance(n.dtype, torch.dtype)]


def _cost(nodes: Sequence[Node]) -> int:
    costly = [node for node in nodes if home_of(node) == "element" and expensive(node)]
    return sum(1 if _is_power(node) else COSTS.get(node.op, EXPENSIVE) for node in costly)


def _is_power(node: Node) -> bool:
    """Is it a power of a number, which takes as long as exp2?"""
    return node.op == "pow" and node.args[0].is_const


def _loading(graph: Graph, roots: Sequence[Node]) -> Graph:
    """Returns the graph that loads the values of `roots`."""
    reads = _reads(roots)
    inputs = {str(node.value): node for node in graph.nodes if node.op == "input"}
    numbers = {root: number for number, root in enumerate(roots, len(graph.captures))}

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node not in numbers:
            return None
        kv_idx, q_idx, *entry = (builder.keep(inputs[name], ()) for name in ("kv_idx", "q_idx", *reads))
        distance = builder.node("sub", (kv_idx, q_idx), kv_idx.dtype, None, node.where)
        return builder.node("load", (*entry, distance), node.dtype, numbers[node], node.where)

    made = [
        Capture("by_distance", dtype, len(reads) + 1, wide="b" in reads, by_distance=True)
        for dtype in _dtypes(roots)
    ]
    return replace(rebuild(graph, change), captures=(*graph.captures, *made))


def _reads(roots: Sequence[Node]) -> tuple[str, ...]:
    """Returns which of b and h the values read."""
    home = frozenset().union(*(root.home for root in roots))
    return tuple(name for name in POSITIONS if name in home & UNIFORM)


def _dtypes(roots: Sequence[Node]) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the tables, that of registers for half types."""
    return tuple(register_dtype(strong(root.dtype)) for root in roots)


def write(graph: Graph) -> ByDistance:
    """Writes the functions of `split`."""
    writer = _Writer(graph, "by_distance", POSITIONS)
    writer.owner = "score_mod"
    return ByDistance(writer.write(), _dtypes(graph.results), _reads(graph.results))


class _Writer(TritonWriter):
    def returned(self, main: Function) -> list[str]:
        return [self.value(main, root) for root in self.graph.results]


def table_names(made: ByDistance | None) -> list[tuple[str, str]]:
    """Returns the names of the tables in a plan, and of their views."""
    numbers = range(len(made.dtypes) if made else 0)
    return [(f"by_distance_{number}", f"by_distance_{number}_from_0") for number in numbers]


def with_tables(
    writer: PlanWriter, kernels: Kernels, captured: Captured, extents: Sequence[Extent]
) -> Captured:
    """Writes the launch of `distance_kernel`; adds its tables to a score_mod's captures.

    `extents` are B, HQ, M and N of the call.
    """
    made = kernels.by_distance
    assert made is not None
    batch, heads, length, keys = extents
    sides = [value for name, value in kernels.options.items() if "BLOCK" in name]
    pad = max([PAD, *sides, *(kernels.spec.mask_block or ())])  # kernels walk each block to its end
    middle = cdiv(length, ALIGNED) * ALIGNED + pad
    size = middle + cdiv(keys, ALIGNED) * ALIGNED + pad
    entries = [extent for name, extent in (("b", batch), ("h", heads)) if name in made.reads]
    names = table_names(made)
    tables = [
        writer.empty(whole, (*entries, size), dtype)
        for (whole, _), dtype in zip(names, made.dtypes, strict=True)
    ]
    arguments = {
        **{table.name.upper(): table for table in tables},
        **captured.arguments(made.text),
        "HQ": heads if "h" in made.reads else 1,
        "M": length,
        "N": keys,
        "middle": middle,
        "length": size,
        "BLOCK": BLOCK,
    }
    writer.launch(kernels, "distance", math.prod(entries) * cdiv(size, BLOCK), arguments)
    views = [
        writer.view(name, table, (*entries, size - middle), table.strides, middle)
        for (_, name), table in zip(names, tables, strict=True)
    ]
    return captured._replace(tensors=(*captured.tensors, *views))
