"""The cost of a node's value for the threads that need it."""

from __future__ import annotations

import torch

from flexmod.ir.graph import Node
from flexmod.ir.ops import CAST, OPS, strong


def costly(node: Node) -> bool:
    """Does storing a value take a register? A position as a float is recomputed, and a bool is a bit."""
    return node.op != CAST and strong(node.dtype) != torch.bool


def expensive(node: Node) -> bool:
    """Does a value need a load, or more than a few instructions?"""
    if node.op not in OPS:
        return node.op == "load"
    if not divides(node):
        return OPS[node.op].cost != "low"
    divisor = node.args[1].value if node.args[1].is_const else None
    return not isinstance(divisor, int) or divisor.bit_count() != 1


def divides(node: Node) -> bool:
    """Is it a quotient or a remainder of integers?"""
    return node.op in OPS and OPS[node.op].cost == "division" and not strong(node.dtype).is_floating_point
