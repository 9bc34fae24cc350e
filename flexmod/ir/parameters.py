"""Whether the bounds of a mask lose anything where its numbers are parameters of the kernels.

Terms evaluate all that they read, parameters too. Rules know a constant's sign and size, and take products
with one apart; of a parameter they know its bounds at most.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flexmod.ir.graph import UNIFORM, Graph, Node
from flexmod.ir.linear import Forms
from flexmod.ir.ops import COMPARISONS, strong

# Of integers, what rules lose nothing on where an argument is made of parameters; of all, comparisons.
KEEP_BOUNDS = frozenset({"add", "sub", "neg", "minimum", "maximum"})


def serves(graph: Graph, forms: Forms, by_rules: Iterable[Node]) -> bool:
    """Are the bounds as close with the graph's parameters as with its numbers?

    `by_rules`: the nodes whose bounds come neither from terms nor from b and h alone.
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
        if len(hidden) > 1 and not products.isdisjoint(hidden):  # numbers might make a difference of them
            return False
    return True


def _keeps_bounds(node: Node) -> bool:
    if node.op in COMPARISONS:
        return True
    return node.op in KEEP_BOUNDS and not any(strong(a.dtype).is_floating_point for a in node.args)


def _made_of_parameters(graph: Graph) -> tuple[set[Node], set[Node], set[Node]]:
    """What b, h and parameters make; what rules would not see through; those of the latter with products."""
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
