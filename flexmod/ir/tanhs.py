"""Decides which tanh of a mod needs a small relative error.

Kernels compute `tanh` as 1 - 2 / (1 + 2^x), with an absolute error near 2e-7. That is enough for factors up
to `SMALL`, for example a soft-cap of 50. With a larger factor, `cap * tanh(score / cap)` uses values of tanh
near 0, so that tanh becomes `tanh_relative`. So does a tanh whose factor is a tensor's element, of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flexmod.ir.graph import Graph, GraphBuilder, Node, rebuild
from flexmod.ir.ops import CAST

# Scores up to this size may be computed in any order: their float32 error stays below 2^-12.
SMALL = 2048.0
# Operations that do not increase an argument's error.
_STEADY = {"add", "sub", "neg", "abs", "minimum", "maximum", "where", CAST, "tanh", "sigmoid", "sin", "cos"}


def choose_tanhs(graph: Graph, numbers: Mapping[int, int | float]) -> Graph:
    """Replaces each tanh of a score graph that needs it by `tanh_relative`.

    `numbers` are the values of its parameters, by place. Another value may need the other tanh, and so
    another graph.
    """
    gains = _gains(graph, numbers)

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op != "tanh" or node.dtype == torch.float64 or gains[node] <= SMALL:
            return None
        return builder.node("tanh_relative", args, node.dtype, None, node.where)

    return rebuild(graph, change)


def _gains(graph: Graph, numbers: Mapping[int, int | float]) -> dict[Node, float]:
    """By node, the largest factor from its error to the result's error; infinite if unknown."""
    gains = dict.fromkeys(graph.nodes, 0.0) | dict.fromkeys(graph.results, 1.0)
    for node in reversed(graph.nodes):
        for place, argument in enumerate(node.args):
            gain = gains[node] * _gain(node, place, numbers) if gains[node] else 0.0
            gains[argument] = max(gains[argument], gain)
    return gains


def _gain(node: Node, place: int, numbers: Mapping[int, int | float]) -> float:
    if node.op in _STEADY and not (node.op == "where" and place == 0):
        return 1.0
    if node.op == "mul" or node.op == "div" and place == 0:
        factor = _number(node.args[1 - place], numbers)
        if node.op == "div":
            factor = 1.0 / factor if factor else math.inf
        return math.inf if math.isnan(factor) else abs(factor)
    return math.inf


def _number(node: Node, numbers: Mapping[int, int | float]) -> float:
    if node.op == CAST:
        return _number(node.args[0], numbers)
    if node.op == "param":
        return float(numbers.get(node.value, math.nan))  # type: ignore[call-overload]
    return float(node.value) if node.is_const else math.nan  # type: ignore[arg-type]
