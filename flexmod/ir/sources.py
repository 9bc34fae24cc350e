"""Makes the nodes that a mask's terms evaluate: sums of its nodes, and functions of the difference."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexmod.ir import bounds
from flexmod.ir.graph import UNIFORM, Graph, GraphBuilder, Node, keep
from flexmod.ir.linear import Forms, Linear
from flexmod.ir.ops import CAST, COMPARISONS, strong


class Sources:
    """Makes further nodes for a graph. `known` are its nodes' bounds over all positions."""

    def __init__(self, graph: Graph, forms: Forms, known: Mapping[Node, bounds.Bounds]) -> None:
        self.graph = graph
        self.forms = forms
        self.known = known
        self.builder = GraphBuilder()
        self.builder.adopt(graph.nodes)
        self._along: dict[Node, Node] = {}

    def along_diagonal(self, node: Node) -> Node:
        """Rewrites a diagonal node into a function of the difference; q_idx stands for the difference."""
        if node.home <= UNIFORM:
            return node
        if node not in self._along:
            self._along[node] = self._made_along(node)
        return self._along[node]

    def _made_along(self, node: Node) -> Node:
        form = self.forms.of(node)
        if form is not None and node not in form.parts:
            return self._cast(self._sum_along(form), strong(node.dtype))
        if node.op in COMPARISONS and not all(map(self.forms.is_diagonal, node.args)):
            form = self.forms.difference(node)
            assert form is not None
            sides = self._sum_along(form), self.builder.const(0)
            return self.builder.node(node.op, sides, torch.bool, None, node.where)
        return keep(self.builder, node, tuple(map(self.along_diagonal, node.args)))

    def _sum_along(self, form: Linear) -> Node:
        index = next(n for n in self.graph.nodes if n.op == "input" and n.value == "q_idx")
        along = Linear({index: form.of("q_idx")}, form.constant)
        for node in form.others:
            along = along.plus(Linear({self.along_diagonal(node): form.parts[node]}))
        return self._sum(along, self._width(form))

    def sum(self, form: Linear) -> Node:
        """Writes a linear form as one node, which does not wrap."""
        return self._sum(form, self._width(form))

    def _width(self, form: Linear) -> torch.dtype:
        """int32 if it holds all partial sums, in any order; else int64."""
        sizes = [abs(c) * max(map(abs, self.known[n])) for n, c in form.parts.items()]
        return torch.int32 if sum(sizes) + abs(form.constant) < 2**31 else torch.int64

    def _sum(self, form: Linear, dtype: torch.dtype) -> Node:
        total: Node | None = None
        for node, coefficient in form.parts.items():
            part = self._cast(node, dtype)
            if coefficient != 1:
                part = self.builder.node("mul", (part, self.builder.const(coefficient, dtype)), dtype)
            total = part if total is None else self.builder.node("add", (total, part), dtype)
        constant = self.builder.const(form.constant, dtype)
        if total is None:
            return constant
        return self.builder.node("add", (total, constant), dtype) if form.constant else total

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if strong(node.dtype) == dtype else self.builder.node(CAST, (node,), dtype, dtype)
