"""Decides whether a mask's bounds stay as tight when its numbers become parameters of the kernels.

Terms are evaluated, parameters included. Rules use a constant's sign and size, and split products with it.
For a parameter they have its bounds at most.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flexmod.ir.graph import UNIFORM, Graph, Node
from flexmod.ir.linear import Forms
from flexmod.ir.ops import COMPARISONS, strong

# Integer operations whose rules stay exact when an argument depends on parameters; so do all comparisons.
KEEP_BOUNDS = frozenset({"add", "sub", "neg", "minimum", "maximum"})


def serves(graph: Graph, forms: Forms, by_rules: Iterable[Node]) -> bool:
    """Are the bounds as tight with the graph's parameters as with its numbers?

    `by_rules`: the nodes with bounds by a rule, and not from a term or from b and h only.
    """
    uniform, opaque, products = _made_of_parameters(graph)
    for node in by_rules:
        if any(a in uniform for a in node.args) and not _keeps_bounds(node):
            return False
        hidden = [a for a in node.args if a in opaque]
        if not hidden:
            continue
        of_one_axis = all(forms.kind(a) in ("uniform", "row", "column") for a in node.args)
        if node.op not in COMPARISONS or not of_one_axis:
            return False
        if len(hidden) > 1 and not products.isdisjoint(hidden):  # with numbers, they might form a difference
            return False
    return True


def _keeps_bounds(node: Node) -> bool:
    if node.op in COMPARISONS:
        return True
    return node.op in KEEP_BOUNDS and not any(strong(a.dtype).is_floating_point for a in node.args)


def _made_of_parameters(graph: Graph) -> tuple[set[Node], set[Node], set[Node]]:
    """Three sets: nodes of b, h and parameters only; nodes that hide a parameter from the rules; and the
    hiding nodes with products."""
    uniform: set[Node] = set()
    opaque: set[Node] = set()
    products: set[Node] = set()
    for node in graph.nodes:
        given = any(a in uniform for a in node.args)
        if node.op == "param" or given and node.home <= UNIFORM:
            uniform.add(node)
        elif strong(node.dtype) != torch.bool:
            if any(a in opaque for a in node.args) or given and not _keeps_bounds(node):
                opaque.add(node)
            if any(a in products for a in node.args) or given and node.op == "mul":
                products.add(node)
    return uniform, opaque, products
