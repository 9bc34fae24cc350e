"""Writes a graph as a plain torch function on positions that broadcast, for people and for dense checks.

    def score_mod_in_torch(score, b, h, q_idx, kv_idx, slopes):
        return score + slopes[h] * (kv_idx.float() - q_idx.float())

It computes the same as the device functions of `triton_text`. Positions are int32 tensors of one dimension or
more; the result has their broadcast shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexmod.codegen.expressions import ARGUMENTS, WIDTH, Function, count_users, fill, fresh, literal, tidy
from flexmod.ir.graph import Graph, Node, used_captures
from flexmod.ir.ops import CAST, OPS, strong

# for numbers, which torch.minimum and torch.maximum do not take
CLAMPS = {"minimum": "torch.clamp({0}, max={1})", "maximum": "torch.clamp({0}, min={1})"}
METHODS = {torch.float32: "float()", torch.int64: "long()", torch.int32: "int()", torch.bool: "bool()"}


@dataclass(frozen=True)
class TorchText:
    """A function's text, its name, and the numbers of the captures that it takes after the positions."""

    name: str
    text: str
    captures: tuple[int, ...] = ()


def write_torch(graph: Graph, name: str, names: tuple[str, ...]) -> TorchText:
    """Writes a function `name` of the graph's inputs and of its captures, with the names `names`.

    It returns the graph's result, or a tuple of its results. The graph's constants must not be promoted.
    """
    return _TorchWriter(graph, name, names).write()


class _TorchWriter:
    def __init__(self, graph: Graph, name: str, captures: tuple[str, ...]) -> None:
        self.graph = graph
        self.captures = captures
        self.used = used_captures(graph.nodes)
        given = [*ARGUMENTS[graph.kind], *(captures[number] for number in self.used)]
        self.function = Function(name, given)
        self.taken = {*given, "torch"}
        self.users = count_users(graph)

    def write(self) -> TorchText:
        self.function.give_back(*map(self._result, self.graph.results))
        return TorchText(self.function.name, self.function.source(), self.used)

    def _result(self, node: Node) -> str:
        """Turns a constant into a tensor, so that it has a shape and a device."""
        text = self._value(node)
        if node.is_const:
            like = "score" if self.graph.kind == "score" else "kv_idx"
            return f"torch.full_like({like}, {text}, dtype={strong(node.dtype)})"
        return text

    def _value(self, node: Node) -> str:
        if node.is_const:
            return literal(node.value, strong(node.dtype))
        if node.op == "input":
            return f"{node.value}.long()" if node.dtype == torch.int64 else str(node.value)
        names = self.function.names
        if node not in names:
            text = self._expression(node)
            self.function.quote(node)
            if self.users.get(node, 0) <= 1 and len(text) <= WIDTH:
                names[node] = text
            else:
                name = fresh(f"{node.op}_{len(names)}", self.taken)
                names[node] = self.function.bind(name, text)
        return names[node]

    def _expression(self, node: Node) -> str:
        if node.op == "load":
            capture = self.captures[node.value]  # type: ignore[call-overload]
            indices = [self._value(a) for a in node.args]
            return f"{capture}[{', '.join(indices)}]" if indices else capture
        if node.op == CAST:
            return fill(f"{{0}}.{_to(node.dtype)}", [self._value(node.args[0])])  # type: ignore[arg-type]
        row = OPS[node.op]
        at = row.argument_dtypes([a.dtype for a in node.args], node.dtype)
        # a 0-d tensor promotes other tensors less than a mod's scalars promote each other
        said = any(not a.home and (not a.is_const or isinstance(a.dtype, torch.dtype)) for a in node.args)
        clamps = node.op in CLAMPS and at[0] != torch.bool and any(a.is_const for a in node.args)
        template = CLAMPS[node.op] if clamps else row.python
        values = []
        for argument, dtype in zip(node.args, at, strict=True):
            if argument.is_const:
                wanted = row.number_dtype(dtype)
                number = literal(argument.value, wanted)
                values.append(number if template else f"torch.tensor({number}, dtype={wanted}, device='cpu')")
                continue
            value = self._value(argument)
            cast = strong(argument.dtype) != dtype and (said or row.at == "bool")
            values.append(fill(f"{{0}}.{_to(dtype)}", [value]) if cast else value)
        if clamps and node.args[0].is_const:
            values.reverse()
        if template is None:
            return f"torch.{row.torch_names[0]}({', '.join(map(tidy, values))})"
        return fill(template, values)


def _to(dtype: torch.dtype) -> str:
    return METHODS.get(dtype, f"to({dtype})")
