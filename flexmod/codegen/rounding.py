"""Finds the products of a mod that the compiler must not fuse into a multiply-add."""

from __future__ import annotations

from flexmod.ir.graph import Graph, Node
from flexmod.ir.ops import CAST, COMPARISONS, HALF, OPS, strong


def products_that_decide(graph: Graph) -> frozenset[Node]:
    """Products of floats, independent of the score, that decide a truth value or an integer.

    A fused multiply-add rounds once where torch rounds twice. With it, `q_idx * 0.01 + kv_idx * 0.1 > 0.6`
    may be true where torch gives false. A product that is only compared is never fused, and a half-precision
    product is rounded by a cast.
    """
    decides: set[Node] = set()
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if not (_jumps(node) or node in decides):
            continue
        decides.update(node.args)
        if node.op not in COMPARISONS:
            found.update(filter(_may_be_fused, node.args))
    return frozenset(found)


def _jumps(node: Node) -> bool:
    """May the last digit of an argument decide the result?"""
    if node.op == CAST:
        return not strong(node.dtype).is_floating_point
    return node.op in OPS and OPS[node.op].jumps


def _may_be_fused(node: Node) -> bool:
    dtype = strong(node.dtype)
    if node.op != "mul" or not dtype.is_floating_point or dtype in HALF:
        return False
    return not {"score", "grad"} & node.home
