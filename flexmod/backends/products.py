"""Computes matrix products on the CPU, and with the product of scores the first steps of a score mod.

torch's products are MKL's, which uses AVX-512 on Intel's processors only. On AMD's, large products of a head
go to oneDNN, which takes half the time. It also applies a function to each element before it writes it.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.ir.evaluate import QUICKER
from flexmod.ir.graph import Graph, GraphBuilder, Node, rebuild
from flexmod.ir.ops import OPS, strong
from flexmod.runtime.private_torch import linear_on_cpu

# Rows, columns and scores of a head from which oneDNN saves time: a call of it takes 10 us, and the first one
# of each shape 300 us.
LEAST_ROWS, LEAST_COLUMNS, LEAST_SCORES = 64, 512, 3 << 16
# Threads up to which that holds: each operation on a head is short, and its threads wait for each other.
FEW_THREADS = 4
# Terms of a sum. oneDNN adds them up one after the other, and MKL some 400 at a time.
DEPTH = 1024
# Functions that oneDNN applies.
FUNCTIONS = ("tanh", "sigmoid")
# Factors of scores that may multiply the queries instead: none that makes a rounding of theirs large.
SMALLEST, LARGEST = 2.0**-32, 1.0


def is_large(real: torch.dtype, rows: int, columns: int) -> bool:
    """Returns whether `product` is for one head's scores of this size."""
    if real != torch.float32 or rows < LEAST_ROWS or columns < LEAST_COLUMNS:
        return False
    return rows * columns >= LEAST_SCORES and torch.get_num_threads() <= FEW_THREADS and _has_quick_product()


@cache
def _has_quick_product() -> bool:
    """Returns whether oneDNN is there, and the processor is AMD's and has AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or linear_on_cpu() is None:
        return False
    about = Path("/proc/cpuinfo")  # Linux; Windows has the variable
    names = about.read_text() if about.exists() else os.environ.get("PROCESSOR_IDENTIFIER", "")
    return "AuthenticAMD" in names


def product(x: Tensor, y: Tensor, function: str = "", depth: int = DEPTH) -> Tensor:
    """Returns function(x @ y.mT) for x [M, K] and y [N, K], from sums of at most `depth` terms."""
    linear = linear_on_cpu()
    assert linear is not None
    if x.shape[1] <= depth:
        return linear(x, _dense(y), None, function or "none", [], None)
    total, *more = (
        linear(x[:, start : start + depth], _dense(y[:, start : start + depth]), None, "none", [], None)
        for start in range(0, x.shape[1], depth)
    )
    for part in more:
        total += part
    if function:
        apply(function, total)
    return total


def _dense(y: Tensor) -> Tensor:
    """Returns y, or a copy, row by row or column by column in memory."""
    return y if y.is_contiguous() or y.mT.is_contiguous() else y.contiguous()


def apply(function: str, x: Tensor) -> None:
    """Replaces the elements of x by their values of a function of FUNCTIONS."""
    of_torch = OPS[function].torch
    QUICKER.get(of_torch, of_torch)(x, out=x)


class FirstSteps(NamedTuple):
    """What a product of queries and keys can compute of a score mod: function(factor * score).

    `rest` has the graphs after these steps. They take the value for their input "score".
    """

    factor: float
    function: str
    rest: tuple[Graph | None, ...]


@lru_cache(256)
def first_steps(*graphs: Graph | None) -> FirstSteps:
    """Returns the first steps that all graphs have in common which read the score."""
    chains = [_first_nodes(graph) for graph in graphs if graph is not None and "score" in graph.reads]
    shared = [nodes for nodes in zip(*chains, strict=False) if len({_key(node) for node in nodes}) == 1]
    factor, function = 1.0, ""
    for node, *_ in shared:
        if node.op == "mul":
            factor = _factor(node) or 1.0
        elif node.op in FUNCTIONS:
            function = node.op
    ends = frozenset(shared[-1]) if shared else frozenset()
    return FirstSteps(factor, function, tuple(graph and _after(graph, ends) for graph in graphs))


def _first_nodes(graph: Graph) -> list[Node]:
    """Returns the score, a product with a number, and a function, as far as nothing else reads the others."""
    nodes = [node for node in graph.nodes if node.op == "input" and node.value == "score"]
    while True:
        users = [node for node in graph.nodes if nodes[-1] in node.args]
        if len(users) != 1 or nodes[-1] in graph.results or users[0].dtype != torch.float32:
            return nodes
        is_factor = len(nodes) == 1 and _factor(users[0]) is not None
        if not is_factor and users[0].op not in FUNCTIONS:
            return nodes
        nodes.append(users[0])
        if not is_factor:
            return nodes


def _factor(node: Node) -> float | None:
    """Returns the number of a product with a number."""
    found = [float(a.value) for a in node.args if a.is_const]  # type: ignore[arg-type]
    if node.op != "mul" or len(found) != 1 or not SMALLEST <= abs(found[0]) <= LARGEST:
        return None
    return found[0]


def _key(node: Node) -> tuple[str, float | None]:
    return node.op, _factor(node)


def _after(graph: Graph, ends: frozenset[Node]) -> Graph:
    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        return builder.input("score", strong(node.dtype)) if node in ends else None

    return rebuild(graph, change)
