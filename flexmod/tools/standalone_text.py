"""Writes the parts of a file that needs torch and Triton only: plans, graphs, mods, captured tensors, sizes.

    out = torch.empty((B, HQ, M, 64), dtype=q.dtype, device=q.device)
    forward_kernel[lambda meta: (B * HQ * triton.cdiv(M, meta["BLOCK_M"]),)](
        Q=q, stride_qb=(q.stride(0) if B > 1 else 0), ...
        **TILES["forward"],
    )

Extents are names of the file; `B`, `HQ`, `M`, `N`, `KV_B` and `HKV` are variables there.

The file's dense attention has graphs as plain torch functions, which compute the same as the device functions
of `triton_text`. Positions are int32 tensors of one dimension or more; the result has their broadcast shape.

    def score_mod_in_torch(score, b, h, q_idx, kv_idx, slopes):
        return score + slopes[h] * (kv_idx.float() - q_idx.float())

The file checks the sizes of captured tensors: `least_shapes` finds what they need in a call.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexmod.codegen.expressions import (
    WIDTH,
    Function,
    fill,
    fresh,
    literal,
    printable,
    tidy,
)
from flexmod.ir import bounds
from flexmod.ir.graph import ARGUMENTS, POSITIONS, Graph, Node, used_captures
from flexmod.ir.integers import integer_bounds
from flexmod.ir.linear import Forms, Linear
from flexmod.ir.offsets import MaskAt, ScoreAt
from flexmod.ir.ops import CAST, HALF, OPS, strong
from flexmod.ir.passes import Extents
from flexmod.ir.replay import Replay
from flexmod.ir.source import mod_name
from flexmod.runtime.plan import Allocate, Extent, Launch, Place, Plan, Size, View

COLUMNS = 110
# a plan's names for the sides of a tile that the file chooses
SIDES = ("BLOCK_M", "BLOCK_N")
# functions in expressions
FUNCTIONS = {"cdiv": "triton.cdiv", "bits": "int.bit_length"}
_PLAIN = (bool, int, float, str)
_WORD = re.compile(r"[A-Za-z_]\w*")
_OF_TENSOR = re.compile(r"(\w+)_(size|stride)(\d+)")


class PlanText:
    """Writes a plan's steps. `names` has the file's expressions for places and parameters, if they differ."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names, self._like = names, names["query"]

    def statements(self, plan: Plan, indent: int = 0) -> str:
        """Writes all steps; a plan for a file only allocates, views and launches."""
        lines = []
        for step in plan.steps:
            if isinstance(step, Allocate):
                lines.append(self._allocated(step))
            elif isinstance(step, View):
                like = f"{self._tuple(step.place.shape)}, {self._tuple(step.place.strides)}"
                start = self.expression(step.offset)
                lines.append(f"{step.place.name} = {step.of.name}.as_strided({like}, {start})")
            else:
                assert isinstance(step, Launch), f"no statement for {step}"
                lines.append(self._launched(step, indent))
        return textwrap.indent("\n".join(lines), " " * indent)

    def _allocated(self, step: Allocate) -> str:
        place = step.place
        dtype = f"{self._like}.dtype" if place.dtype in HALF else str(place.dtype)
        kind, device = "zeros" if step.zeros else "empty", f"{self._like}.device"
        made = f"torch.{kind}({self._tuple(place.shape)}, dtype={dtype}, device={device})"
        return f"{self.expression(place)} = {made}"

    def _tuple(self, extents: Sequence[Extent]) -> str:
        return f"({', '.join(map(self.expression, extents))}{',' if len(extents) == 1 else ''})"

    def _launched(self, step: Launch, indent: int) -> str:
        given = [f"{name}={self._given(name, value)}" for name, value in step.arguments.items()]
        wrapped = textwrap.wrap(
            ", ".join(each.replace(" ", "\0") for each in given), COLUMNS - indent - 4, break_long_words=False
        )
        grid = self.expression(step.grid)
        sides = [side for side in SIDES if side in _WORD.findall(grid)]
        for side in sides:
            grid = re.sub(rf"\b{side}\b", f'meta["{side}"]', grid)
        grid = f"lambda meta: ({grid},)" if sides else f"({grid},)"
        options = "enable_fp_fusion=True" if step.rung is None else f'**TILES["{step.kernel}"]'
        lines = [f"    {line}".replace("\0", " ").rstrip() for line in wrapped]
        return "\n".join([f"{step.name}[{grid}](", *lines[:-1], f"{lines[-1]},", f"    {options},", ")"])

    def _given(self, parameter: str, value: Any) -> str:
        return self._names[parameter] if parameter in self._names else self.expression(value)

    def expression(self, value: Any) -> str:
        if isinstance(value, Place):
            return self._names.get(value.name, value.name)
        if not isinstance(value, Size):
            return repr(value)
        return _WORD.sub(lambda word: self._word(word[0]), value.text)

    def _word(self, word: str) -> str:
        of_tensor = _OF_TENSOR.fullmatch(word)
        if of_tensor is None:
            return FUNCTIONS.get(word, word)
        tensor, what, dim = of_tensor.groups()
        tensor = self._names.get(tensor, tensor)
        return f"{tensor}.shape[{dim}]" if what == "size" else f"{tensor}.stride({dim})"


# The most elements of a captured tensor that a file writes out; a run of equal ones counts as one.
WRITTEN_OUT = 64


def quotes(mods: Sequence[Callable[..., Any]], numbers: bool = True) -> list[list[str]]:
    """Returns the source of the mods and of the functions in their closures, with the closures' `numbers`.

    The lines suit comments: none has a line break inside.
    """
    found: dict[object, list[str]] = {}
    seen: set[int] = set()
    queue: list[Any] = list(mods)
    while queue:
        mod = queue.pop(0)
        if isinstance(mod, (tuple, list)):
            queue += mod
            continue
        if id(mod) in seen or isinstance(mod, type) or not callable(mod):
            continue
        seen.add(id(mod))
        if isinstance(mod, Replay):
            found[mod] = [f"{printable(mod.__name__)}: it was pickled, and its source is not at hand"]
            continue
        if isinstance(mod, partial):
            queue += [mod.func, *mod.args, *mod.keywords.values()]
            plain = [f"{name} = {x!r}" for name, x in mod.keywords.items() if isinstance(x, _PLAIN)]
            if plain and numbers:
                found[mod] = [f"{printable(mod_name(mod))} with {', '.join(plain)}"]
            continue
        code = getattr(mod, "__code__", None)
        if code is None:  # a callable object, such as a mask that combines others
            queue += getattr(mod, "__dict__", {}).values()
            if isinstance(mod, (MaskAt, ScoreAt)):
                found[mod.positions] = [f"at the positions of {mod.positions}"]
            continue
        cells = dict(zip(code.co_freevars, (c.cell_contents for c in mod.__closure__ or ()), strict=True))
        plain = [f"{name} = {x!r}" for name, x in cells.items() if isinstance(x, _PLAIN)]
        where = [f"where {', '.join(plain)}"] if plain and numbers else []
        found.setdefault(code, list(map(printable, [*_source(mod), *where])))
        queue += cells.values()
    return list(found.values())


def _source(function: Callable[..., Any]) -> list[str]:
    try:
        lines = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()
    except (OSError, TypeError, ValueError, tokenize.TokenError):  # not at hand, or not text
        lines = []
    return lines or [f"{function.__qualname__}: its source is not at hand"]


def example(tensor: torch.Tensor) -> str:
    """Returns Python for a captured tensor: its values if they are few, else random ones in their range."""
    values = tensor.detach().cpu()
    if values.numel() <= WRITTEN_OUT:
        numbers = values.tolist() if not tensor.is_floating_point() else _short(values.tolist())
        written = re.sub(r"\b(inf|nan)\b", r'float("\1")', str(numbers))
        return _folded(f"torch.tensor({written}, dtype={tensor.dtype}, device=device)")
    if not tensor.is_floating_point() and values.dim() == 1:
        runs, counts = values.unique_consecutive(return_counts=True)
        if len(runs) <= WRITTEN_OUT:
            of_runs = f"torch.tensor({runs.tolist()}, dtype={tensor.dtype}, device=device)"
            of_counts = f"torch.tensor({counts.tolist()}, device=device)"
            return _folded(f"torch.repeat_interleave({of_runs}, {of_counts})")
    if tensor.is_floating_point():
        return f"torch.randn({tuple(values.shape)}, device=device).to({tensor.dtype})"
    low, high = int(values.min()), int(values.max()) + 1
    return f"torch.randint({low}, {high}, {tuple(values.shape)}, device=device).to({tensor.dtype})"


def _short(numbers: Any) -> Any:
    """Rounds the numbers in nested lists to float32's digits."""
    return [_short(x) for x in numbers] if isinstance(numbers, list) else float(f"{numbers:.8g}")


def _folded(expression: str) -> str:
    """Folds an expression into lines for main()."""
    return "\n".join(textwrap.wrap(expression, 90, subsequent_indent="        ", break_long_words=False))


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
            if self.graph.users[node] <= 1 and len(text) <= WIDTH:
                names[node] = text
            else:
                name = fresh(f"{node.op}_{len(names)}", self.taken)
                names[node] = self.function.bind(name, text)
        return names[node]

    def _expression(self, node: Node) -> str:
        if node.op == "load":
            capture = self.captures[node.value]
            indices = [self._value(a) for a in node.args]
            return f"{capture}[{', '.join(indices)}]" if indices else capture
        if node.op == CAST:
            return fill(f"{{0}}.{_to(node.dtype)}", [self._value(node.args[0])])  # type: ignore[arg-type]
        row = OPS[node.op]
        arguments = row.arguments(node)
        # a 0-d tensor promotes other tensors less than a mod's scalars promote each other
        said = any(not a.home and (not a.is_const or isinstance(a.dtype, torch.dtype)) for a in node.args)
        clamps = node.op in CLAMPS and arguments[0][1] != torch.bool and any(a.is_const for a in node.args)
        template = CLAMPS[node.op] if clamps else row.python
        values = []
        for argument, dtype in arguments:
            if argument.is_const:
                number = literal(argument.value, dtype)
                values.append(number if template else f"torch.tensor({number}, dtype={dtype}, device='cpu')")
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


def least_shapes(
    graph: Graph | None, tensors: Sequence[Tensor], extents: Extents, names: Mapping[str, str]
) -> dict[int, list[str]]:
    """Returns by capture what the size of each dimension must reach: an expression of the call's sizes, with
    their `names` by position, "max(M + 50, 4)". It is "0" where nothing is known of an index.

    Known are sums of positions and of their quotients by a number, and other indices if their bounds in the
    largest call, `extents`, lie within the tensor.
    """
    used = used_captures(graph.nodes) if graph else ()
    found: dict[int, list[set[str]]] = {number: [set() for _ in tensors[number].shape] for number in used}
    for number, dimension, form, (low, high) in _indices(graph, extents):
        size = tensors[number].shape[dimension]
        sizes = set() if form is None else _reach(form, names)
        if not sizes and -size <= low and high < size:
            sizes = {str(max(int(high) + 1, -int(low)))}
        found[number][dimension] |= sizes
    return {number: [*map(_largest, shape)] for number, shape in found.items()}


def positions_in(graph: Graph | None, tensors: Sequence[Tensor], extents: Extents) -> dict[str, int]:
    """Returns by position how many of its values have elements, in tensors that it indexes, also shifted."""
    limits: dict[str, int] = {}
    for number, dimension, form, _ in _indices(graph, extents):
        parts = [] if form is None else [*form.parts.items()]
        if form is not None and len(parts) == 1 and parts[0][0].op == "input" and parts[0][1] == 1:
            name, size = str(parts[0][0].value), tensors[number].shape[dimension] - form.constant
            limits[name] = max(1, min(size, limits.get(name, size)))
    return limits


def fit(graph: Graph | None, tensors: Sequence[Tensor], sizes: Extents) -> bool:
    """Returns whether a call of these sizes stays within the tensors, as far as bounds of indices tell."""
    for number, dimension, _, found in _indices(graph, sizes):
        size = tensors[number].shape[dimension]
        if found != bounds.UNKNOWN and (found[0] < -size or found[1] >= size):
            return False
    return True


def _indices(
    graph: Graph | None, extents: Extents
) -> Iterator[tuple[int, int, Linear | None, bounds.Bounds]]:
    """Yields each index of a load: the capture, the dimension, the index's linear form and its bounds."""
    if graph is None:
        return
    known = integer_bounds(graph, dict(zip(POSITIONS, extents, strict=True)), may_wrap=True)
    forms = Forms(known)
    for node in graph.nodes:
        if node.op == "load" and isinstance(node.value, int):
            for dimension, index in enumerate(node.args):
                yield node.value, dimension, forms.of(index), known.get(index, bounds.UNKNOWN)


def _reach(form: Linear, names: Mapping[str, str]) -> set[str]:
    """Writes one more than the largest value of an index, and its smallest value negated, if it is negative.
    Empty if the form has other parts than positions and their quotients.
    """
    sides: tuple[list[str], list[str]] = [], []
    constants = [form.constant + 1, -form.constant]
    for node, coefficient in form.parts.items():
        side, times = coefficient < 0, abs(coefficient)
        if node.op == "input":
            text = names[str(node.value)]
            constants[side] -= times
        elif node.op == "floor_divide" and node.args[0].op == "input" and _is_positive(node.args[1]):
            text = f"(({names[str(node.args[0].value)]} - 1) // {node.args[1].value})"
        else:
            return set()
        sides[side].append(text if times == 1 else f"{times} * {text}")
    found = set()
    for terms, constant in zip(sides, constants, strict=True):
        if terms:
            rest = f" {'+' if constant > 0 else '-'} {abs(constant)}" if constant else ""
            found.add(" + ".join(terms) + rest)
        elif constant > 0:
            found.add(str(constant))
    return found


def _is_positive(node: Node) -> bool:
    return node.is_const and isinstance(node.value, int) and node.value > 0


def _largest(sizes: set[str]) -> str:
    """Writes the largest of these sizes; 0 if there are none."""
    return f"max({', '.join(sorted(sizes))})" if len(sizes) > 1 else "".join(sizes) or "0"
