"""Expressions of the Triton text, and the device function that they go into.

Expressions have numbers, casts, and only the necessary parentheses. A function under construction has lines,
names, and the user's lines above them.
"""

from __future__ import annotations

import ast
import math
import os
import re
import textwrap
from dataclasses import dataclass, field

import torch

from flexmod.codegen import device_functions
from flexmod.errors import Where
from flexmod.ir.graph import Node, dtype_name
from flexmod.ir.ops import CAST, HALF, OPS, number, strong
from flexmod.ir.proxy import VALUE_DTYPES
from flexmod.runtime.locks import parse

TRITON_DTYPES = {
    **{dtype: f"tl.{dtype_name(dtype)}" for dtype in VALUE_DTYPES},
    torch.bool: "tl.int1", torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5",
}  # fmt: skip

WIDTH = 96  # columns of a line in a function


def printable(text: str) -> str:
    """A user's text for a comment: replaces characters that end the line or hide text by blanks."""
    return "".join(character if character.isprintable() else " " for character in text)


def _comment(text: str) -> str:
    line = "# " + " ".join(printable(text).split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def tidy(text: str) -> str:
    """The expression without unnecessary parentheses."""
    return ast.unparse(parse(text, mode="eval")).replace("'", '"')


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a value in registers: halves are float32, rounded to the half type."""
    return torch.float32 if dtype in HALF else dtype


def rounded(text: str, dtype: torch.dtype) -> str:
    return f"{group(text)}.to({TRITON_DTYPES[dtype]}).to(tl.float32)" if dtype in HALF else text


def cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    if source == target:
        return text
    if target == torch.bool:
        return f"{group(text)} != 0"
    if target in HALF:
        return rounded(text, target)
    if register_dtype(source) == target:
        return text
    if source.is_floating_point and target.itemsize < 4:
        text = f"{group(text)}.to(tl.int32)"  # so that large values wrap, as on the CPU
    return f"{group(text)}.to({TRITON_DTYPES[target]})"


def asks_for_dtype(template: str, at: torch.dtype) -> bool:
    """Is it a prelude function that needs its arguments' dtypes, and so takes no bare number?"""
    called = re.match(r"(\w+)\(\{0\}", template)
    if called is None or called[1] not in device_functions.names():
        return False
    return at.is_floating_point or called[1].startswith(("shift", "safe"))


def literal(value: object, dtype: torch.dtype) -> str:
    """A Python number as the argument of an operation in this dtype."""
    found = number(value, dtype).item()  # type: ignore[arg-type]
    if dtype == torch.float32 and math.isfinite(found):
        found = float(value)  # type: ignore[arg-type]  # the user's own digits: the kernel rounds them
    return repr(found) if not isinstance(found, float) or math.isfinite(found) else f'float("{found}")'


def typed(text: str, dtype: torch.dtype) -> str:
    """A literal with its dtype."""
    return f"tl.cast({text}, {TRITON_DTYPES[register_dtype(dtype)]})"


def triton_literal(value: object, dtype: torch.dtype, *, has_dtype: bool = False) -> str:
    """A Python number as Triton text. Triton reads a denormal number as float64, and -0.0 as 0.0.

    In float64 arithmetic, Triton would round the number to float32 first.
    """
    text = literal(value, dtype)
    rounded = number(value, dtype)  # type: ignore[arg-type]
    if dtype == torch.float64 and rounded.isfinite() and not _in_float32(rounded):
        return f"tl.cast({rounded.view(torch.int64).item()}, tl.int64).to(tl.float64, bitcast=True)"
    if text == "-0.0" or (dtype.is_floating_point and rounded == 0 and rounded.signbit()):
        return f"tl.cast({-(2**31)}, tl.int32).to(tl.float32, bitcast=True)"
    denormal = (
        register_dtype(dtype) == torch.float32
        and 0 < rounded.abs() < torch.finfo(torch.float32).smallest_normal
    )
    return typed(text, dtype) if denormal or has_dtype else text


def _in_float32(rounded: torch.Tensor) -> bool:
    """Can float32 represent the number, and is it not -0.0?"""
    return bool(rounded.float().double() == rounded and not (rounded == 0 and rounded.signbit()))


ATOM = re.compile(r"[\w.]+(\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)(\.to\([\w.]+\))*)?$")


def group(text: str) -> str:
    """The text in parentheses, unless it is a name, a number or one call."""
    return text if ATOM.match(text) else f"({text})"


def fill(template: str, values: list[str]) -> str:
    """Puts the arguments into a template; one that is a call's own argument needs no parentheses."""

    def put(match: re.Match[str]) -> str:
        before, after = template[: match.start()].rstrip(), template[match.end() :]
        value = values[int(match.group(1))]
        return value if before[-1:] in ("(", ",") and after[:1] in (")", ",") else group(value)

    return re.sub(r"\{(\d)\}", put, template)


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


# how a kernel writes operations on numbers that are not negative
OF_PLACES = {"add": "+", "mul": "*", "floor_divide": "//", "remainder": "%"}


def reads_pair(node: Node) -> bool:
    """Does it load one element for each pair of positions, at [.., q_idx, kv_idx] of one head?"""
    if node.op != "load" or len(node.args) < 2:
        return False
    *outer, row, column = node.args
    return row.is_input("q_idx") and column.is_input("kv_idx") and all(map(text_of_place, outer))


def text_of_place(node: Node, depth: int = 3) -> str | None:
    """A kernel's text for an index of b, h and numbers, e.g. "head // 4".

    None if it may be negative, and for operations that are nested more than `depth` times.
    """
    if node.is_const:
        return str(node.value) if type(node.value) is int and node.value >= 0 else None
    if node.op not in OF_PLACES:
        return next((name for of, name in (("b", "batch"), ("h", "head")) if node.is_input(of)), None)
    left, right = (text_of_place(a, depth - 1) if depth else None for a in node.args)
    if not (left and right) or divides(node) and not (node.args[1].is_const and node.args[1].value):
        return None
    return f"{group(left)} {OF_PLACES[node.op]} {group(right)}"


def divides(node: Node) -> bool:
    """Is it a quotient or a remainder of integers?"""
    return node.op in OPS and OPS[node.op].cost == "division" and not strong(node.dtype).is_floating_point


@dataclass
class Function:
    """`uses`: the further parameters that it takes, in order, with the endings of their names in a kernel if
    these are not the text's own; `bound`: the names of some expressions.

    `quoted`: the user's lines as comments, each above the first statement that comes from it.
    """

    name: str
    arguments: list[str]
    home: str = "element"
    lines: list[str] = field(default_factory=list)
    names: dict[Node, str] = field(default_factory=dict)
    uses: dict[str, str | None] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    quoted: dict[Where, str] = field(default_factory=dict)

    def quote(self, node: Node) -> None:
        """Writes the user's line that made a node, as a comment, unless it is quoted already."""
        if node.where is None or node.where in self.quoted:
            return
        line = _comment(node.where.text)
        if node.where.text and line not in self.quoted.values():
            self.lines.append(line)
        self.quoted[node.where] = line

    def bind(self, name: str, text: str) -> str:
        """Writes a line that gives an expression a name."""
        self.lines.append(f"{name} = {tidy(text)}")
        return name

    def give_back(self, *values: str) -> None:
        """Writes the return statement; a value that the line before names is returned without its name."""
        text = ", ".join(map(tidy, values))
        last = self.lines[-1] if self.lines else ""
        if last.startswith(f"{text} = "):
            self.lines.pop()
            text = last.removeprefix(f"{text} = ")
        self.lines.append(f"return {text}")

    def source(self, decorator: str = "") -> str:
        """The whole function, with the places of the user's lines above it."""
        given = [*self.arguments, *self.uses]
        head = f"def {self.name}({', '.join(given)}):"
        if len(head) > WIDTH + 14:
            head = "\n".join([f"def {self.name}(", *(f"    {name}," for name in given), "):"])
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"{self._places()}{decorator}{head}\n{body}\n"

    def _places(self) -> str:
        """The line above the function, with its end: file:line, line; file:line.

        Triton's cache ignores it, so moving a mod in its file, or to another file, compiles nothing.
        """
        files: dict[str, list[int]] = {}
        for where in self.quoted:
            files.setdefault(os.path.basename(where.file), []).append(where.line)
        places = [f"{file}:{', '.join(map(str, sorted(lines)))}" for file, lines in files.items()]
        return _comment("; ".join(places)) + "\n" if places else ""


def fresh(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken; adds it to `taken`."""
    candidate, n = name, 0
    while candidate in taken:
        n += 1
        candidate = f"{name}_{n}"
    taken.add(candidate)
    return candidate


def filled(text: str, width: int) -> str:
    """Words in indented lines of at most this width; a longer word has a line of its own."""
    lines = textwrap.fill(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(lines, "    ")
