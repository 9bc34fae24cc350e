"""Computes matrix products on the CPU, and with the product of scores the first steps of a score mod.

torch's products are MKL's, which uses AVX-512 on Intel's processors only. On AMD's, large products of a head
go to oneDNN, which takes half the time. It also applies a function to each element before it writes it, or
multiplies it by another tensor's.
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
from flexmod.runtime.private_torch import linear_on_cpu, sigmoid_backward, tanh_backward

# Rows, columns and scores of a head from which oneDNN saves time: a call of it takes 10 us, and the first one
# of each shape 300 us.
LEAST_ROWS, LEAST_COLUMNS, LEAST_SCORES = 64, 512, 1 << 18
# Threads up to which that holds: each operation on a head is short, and its threads wait for each other.
FEW_THREADS = 4
# Terms of a sum. oneDNN adds them up one after the other, and MKL some 400 at a time.
DEPTH = 1024
# Functions that oneDNN applies, and their derivatives.
FUNCTIONS = {"tanh": tanh_backward, "sigmoid": sigmoid_backward}
# Factors of scores that may multiply the queries instead: none that makes a rounding of theirs large.
SMALLEST, LARGEST = 2.0**-32, 1.0
# Factors of a result that may multiply it later.
LARGEST_LATE = 2.0**32


def is_large(rows: int, columns: int) -> bool:
    """Returns whether one head's scores are as many as `product` needs to save time."""
    return rows >= LEAST_ROWS and columns >= LEAST_COLUMNS and rows * columns >= LEAST_SCORES


def is_quick(real: torch.dtype) -> bool:
    """Returns whether `product` saves time for large scores of this dtype."""
    return real == torch.float32 and torch.get_num_threads() <= FEW_THREADS and _has_quick_product()


@cache
def _has_quick_product() -> bool:
    """Returns whether oneDNN is there, and the processor is AMD's and has AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or linear_on_cpu() is None:
        return False
    try:
        names = Path("/proc/cpuinfo").read_bytes()
    except OSError:  # Windows has the variable; a sandbox may hide the file
        names = os.environ.get("PROCESSOR_IDENTIFIER", "").encode()
    return b"AuthenticAMD" in names


def product(
    x: Tensor, y: Tensor, function: str = "", depth: int = DEPTH, times: Tensor | None = None
) -> Tensor:
    """Returns function(x @ y.mT) * times for x [M, K], y [N, K] and times [M, N].

    It has one of `function` and `times`, or none. Sums have at most `depth` terms.
    """
    linear = linear_on_cpu()
    assert linear is not None
    if x.shape[1] <= depth:
        if times is not None:
            return linear.binary(x, times, _dense(y), None, "mul")
        return linear.default(x, _dense(y), None, function or "none", [], None)
    total, *more = (
        linear.default(x[:, span], _dense(y[:, span]), None, "none", [], None)
        for span in (slice(start, start + depth) for start in range(0, x.shape[1], depth))
    )
    for part in more:
        total += part
    if function:
        apply(function, total)
    return total if times is None else total.mul_(times)


def _dense(y: Tensor) -> Tensor:
    """Returns y, or a copy, row by row or column by column in memory."""
    return y if y.is_contiguous() or y.mT.is_contiguous() else y.contiguous()


def apply(function: str, x: Tensor) -> None:
    """Replaces the elements of x by their values of a function of FUNCTIONS."""
    of_torch = OPS[function].torch
    QUICKER.get(of_torch, of_torch)(x, out=x)


def multiply_by_derivative(function: str, grad: Tensor, value: Tensor) -> None:
    """Multiplies gradients by the derivative of a function of FUNCTIONS, of which `value` has the values."""
    FUNCTIONS[function](grad, value, grad_input=grad)


class Rest(NamedTuple):
    """A graph without its first steps, and without the last ones of a gradient.

    Its result is factor * f'(score) * the first result of `graph`, where f is `function` if there is one. The
    graph None has the score for its result, or the gradient. Takes the value after the first steps for the
    input "score".
    """

    graph: Graph | None = None
    factor: float = 1.0
    function: str = ""


class FirstSteps(NamedTuple):
    """What a product of queries and keys can compute of a score mod: function(factor * score).

    `rest` has what is left of the score mod, its derivative, and that with terms of captures.
    """

    factor: float
    function: str
    rest: tuple[Rest, ...]


@lru_cache(256)
def first_steps(*graphs: Graph | None) -> FirstSteps:
    """Returns the first steps that all graphs have in common which read the score."""
    chains = [_first_nodes(graph) for graph in graphs if graph is not None and "score" in graph.reads]
    shared = [nodes for nodes in zip(*chains, strict=False) if len({_key(node) for node in nodes}) == 1]
    factor, function = 1.0, ""
    for node, *_ in shared:
        if node.op == "mul":
            factor = _factor(node) or 1.0
        else:
            function = _function(node)
    ends = frozenset(shared[-1]) if shared else frozenset()
    return FirstSteps(factor, function, tuple(_rest(graph, ends, function) for graph in graphs))


def _first_nodes(graph: Graph) -> list[Node]:
    """Returns the score, a product with a number, and a function, as far as nothing else reads the others."""
    nodes = [node for node in graph.nodes if node.is_input("score")]
    while True:
        users = [node for node in graph.nodes if nodes[-1] in node.args]
        if len(users) != 1 or nodes[-1] in graph.results or users[0].dtype != torch.float32:
            return nodes
        is_factor = len(nodes) == 1 and _factor(users[0]) is not None
        if not is_factor and not _function(users[0]):
            return nodes
        nodes.append(users[0])
        if not is_factor:
            return nodes


def _factor(node: Node) -> float | None:
    """Returns the number of a product with one, if it may multiply the queries instead."""
    number = _multiplier(node)
    return number if number is not None and SMALLEST <= abs(number) <= LARGEST else None


def _multiplier(node: Node) -> float | None:
    found = [_number(a) for a in node.args if a.is_const]
    return found[0] if node.op == "mul" and len(found) == 1 else None


def _number(const: Node) -> float:
    return float(const.value)


def _function(node: Node) -> str:
    """Returns which of FUNCTIONS a node is in torch: all kinds of tanh are one, see `exponents.py`."""
    row = OPS.get(node.op)
    return next((name for name in FUNCTIONS if row is not None and row.torch is OPS[name].torch), "")


def _key(node: Node) -> tuple[str, float | None]:
    return _function(node), _factor(node)


def _rest(graph: Graph | None, ends: frozenset[Node], function: str) -> Rest:
    if graph is None:
        return Rest()

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        return builder.input("score", strong(node.dtype)) if node in ends else None

    builder = GraphBuilder()
    graph = rebuild(graph, change, builder)
    number, factors = _product(graph, graph.result) if graph.kind == "grad" else _last_factor(graph.result)
    derivative = _derivative(builder, function) if graph.kind == "grad" else []
    if not all(node in factors for node in derivative):
        derivative = []
    for node in derivative:
        factors.remove(node)
    if not factors or not SMALLEST <= abs(number) <= LARGEST_LATE:
        return Rest(graph)
    left = factors[0]
    for node in factors[1:]:
        left = builder.node("mul", (left, node), left.dtype)
    same = builder.input("grad" if graph.kind == "grad" else "score", torch.float32)
    graph = graph.of((left, *graph.results[1:]))
    return Rest(None if graph.results == (same,) else graph, number, function if derivative else "")


def _last_factor(score: Node) -> tuple[float, list[Node]]:
    """Returns the number by which a score was multiplied last, and what it was multiplied with.

    A large score differs visibly from one with other roundings, so no other factors come together.
    """
    number, others = _multiplier(score), [a for a in score.args if not a.is_const]
    if number is None or others[0].dtype != torch.float32:
        return 1.0, [score]
    return number, others


def _product(graph: Graph, node: Node) -> tuple[float, list[Node]]:
    """Returns the number and the other factors of a product in float32 of which nothing else has a part."""
    number, factors, stack = 1.0, list[Node](), [node]
    while stack:
        part = stack.pop()
        others = [a for a in part.args if not a.is_const]
        if part.op != "mul" or graph.users[part] > 1 or any(a.dtype != torch.float32 for a in others):
            factors.append(part)
            continue
        for a in part.args:
            number *= _number(a) if a.is_const else 1.0
        stack += reversed(others)
    return number, factors


def _derivative(builder: GraphBuilder, function: str) -> list[Node]:
    """Returns the factors of the derivative of a function of FUNCTIONS whose value is the score."""
    value, one = builder.input("score", torch.float32), builder.const(1.0)
    if function == "tanh":
        return [builder.node("sub", (one, builder.node("mul", (value, value), value.dtype)), value.dtype)]
    if function == "sigmoid":
        return [value, builder.node("sub", (one, value), value.dtype)]
    return []
