"""Computes differences of positions in float32 where that is exact.

`slope * (kv_idx - q_idx)` subtracts integers and converts each difference to a float. GPUs convert much more
slowly than they add, and every score needs a conversion. float32 represents each integer below 2^24, so there
`float(kv_idx) - float(q_idx)` is the same number, bit for bit. Only rows and columns need conversions then.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexmod.ir.bounds import Bounds
from flexmod.ir.graph import COLUMN, ROW, Graph, GraphBuilder, Node, rebuild
from flexmod.ir.ops import CAST, OPS, strong

# float32 represents every integer up to here.
EXACT = 2**24

# Operations that are as exact on these floats as on integers, and never return -0.0.
AS_FLOATS = ("add", "sub", "neg", "abs", "minimum", "maximum")


def convert_terms(graph: Graph, known: Mapping[Node, Bounds]) -> Graph:
    """Computes integers that read rows and columns, and that become float32, in floats from the start.

    `known` are the bounds of the graph's nodes in the present call. Integers inside an index do not change:
    their differences decide how gradients of the loaded tensor are summed.
    """
    new: dict[Node, Node] = {}
    of_indices = _made_of([a for node in graph.nodes if node.op == "load" for a in node.args])

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        new.update(zip(node.args, args, strict=True))
        if node in of_indices:
            return None
        if node.op == CAST:
            same = node.dtype == torch.float32 and _converts(node.args[0], known)
            return _as_floats(builder, node.args[0], new) if same else None
        row = OPS.get(node.op)
        if row is None:
            return None
        at = row.argument_dtypes([a.dtype for a in node.args], node.dtype)
        changed = tuple(
            _as_floats(builder, old, new) if dtype == torch.float32 and _converts(old, known) else arg
            for old, arg, dtype in zip(node.args, args, at, strict=True)
        )
        return None if changed == args else builder.node(node.op, changed, node.dtype, node.value, node.where)

    return rebuild(graph, change)


def _made_of(nodes: list[Node]) -> set[Node]:
    """The nodes and all that they depend on."""
    found: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes.extend(node.args)
    return found


def _converts(node: Node, known: Mapping[Node, Bounds]) -> bool:
    """Is it an integer that reads rows and columns, and that floats compute exactly at every step?"""
    return _mixed(node) and _exact(node, known)


def _mixed(node: Node) -> bool:
    return not (node.home <= ROW or node.home <= COLUMN)


def _exact(node: Node, known: Mapping[Node, Bounds]) -> bool:
    low, high = known[node]
    if strong(node.dtype) not in (torch.int32, torch.int64) or low < -EXACT or high > EXACT:
        return False
    return not _mixed(node) or (node.op in (*AS_FLOATS, CAST) and all(_exact(a, known) for a in node.args))


def _as_floats(builder: GraphBuilder, node: Node, new: Mapping[Node, Node]) -> Node:
    if node.is_const:
        return builder.const(float(node.value), torch.float32, node.where)  # type: ignore[arg-type]
    if not _mixed(node):
        return builder.node(CAST, (new[node],), torch.float32, torch.float32, node.where)
    args = tuple(_as_floats(builder, a, new) for a in node.args)
    if node.op == CAST:  # to an integer dtype that holds it
        return args[0]
    if node.op == "neg":  # -(0.0) would be -0.0
        zero = builder.const(0.0, torch.float32, node.where)
        return builder.node("sub", (zero, *args), torch.float32, None, node.where)
    return builder.node(node.op, args, torch.float32, None, node.where)
