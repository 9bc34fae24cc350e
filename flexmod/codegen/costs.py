"""What the value of a node costs the threads that need it."""

from __future__ import annotations

import torch

from flexmod.ir.graph import Node
from flexmod.ir.ops import CAST, strong

# operations of many instructions
DEAR = {
    "load", "div", "pow", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos",
    "tan", "tanh", "sigmoid", "erf",
}  # fmt: skip
DIVISIONS = {"floor_divide", "remainder", "trunc_divide", "fmod"}


def costly(node: Node) -> bool:
    """Does a value cost a register where it is held? A position as a float is made again, a bool is a bit."""
    return node.op != CAST and strong(node.dtype) != torch.bool


def dear(node: Node) -> bool:
    """Is a value loaded, or made in more than a few instructions? A division by a power of two is one."""
    if node.op not in DIVISIONS:
        return node.op in DEAR
    divisor = node.args[1].value if node.args[1].is_const else None
    return not isinstance(divisor, int) or divisor.bit_count() != 1
