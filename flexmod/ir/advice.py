"""What to write instead: the user's own expression, as a mod can have it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import _lru_cache_wrapper, reduce
from inspect import getattr_static
from numbers import Real
from types import FrameType
from typing import Any, TypeGuard

from torch import Tensor

from flexmod.errors import ForeignCaptureError, Where
from flexmod.errors.base import a_type
from flexmod.ir.formulas import COMPOSED
from flexmod.ir.ops import BY_TORCH_NAME
from flexmod.ir.source import place_of, user_frame

TRUTH = "use torch.where(condition, a, b), and & | ~ in place of and, or, not."
SYMBOLIC = "keep it symbolic: use it in arithmetic, comparisons, torch.where, or as an index of a tensor."
ELEMENTWISE = "write it with elementwise operations; docs/operations.md lists those there are."
WITHOUT_GRADIENT = (
    "leave it out, since gradients flow through all of a mod; for a constant, capture tensor.detach()."
)
TANH = "call torch.tanh, or flexmod.tanh_approximate for the chip's own; gradients flow through both."
FIXED_COUNT = (
    "loop a fixed number of times, e.g. for i in range(8), and choose by torch.where(i < count, new, old)."
)
LARGEST = {"max": ("torch.maximum", "min"), "min": ("torch.minimum", "max")}
ALL = {"all": ("&", "and_"), "any": ("|", "or_")}
LOGICAL = {ast.BitAnd: "&", ast.BitOr: "|", ast.And: "&", ast.Or: "|"}
NUMERIC_MODULES = ("math", "np", "numpy")
EXTREMES = {"maximum": "max", "minimum": "min", "fmax": "max", "fmin": "min"}
RENAMED = {"fabs": "abs", "absolute": "abs", "power": "pow", "mod": "remainder"}
CONVERSIONS = {"int": "torch.int32", "float": "torch.float32", "bool": "torch.bool"}
LAMBDA = re.compile(r"\blambda\b")


def of_truth(where: Where | None, is_bool: bool) -> str:
    """For a line that asks for the truth of a traced value: `0 <= x < y`, `a and b`, `max(x, 0)`.

    `is_bool`: the value is a truth value, not a number.
    """
    for node in _nodes(where):
        text = _without_truth(node, is_bool)
        if text is not None:
            return f"write {text}."
    return TRUTH


class _Rewriter(ast.NodeTransformer):
    """Rewrites operands that ask for a truth value themselves: `min(max(s, 0), 1)`."""

    def visit(self, node: ast.AST) -> ast.AST:
        text = _without_truth(node) if isinstance(node, ast.expr) else None
        return self.generic_visit(node) if text is None else ast.parse(text, mode="eval").body


def _text(node: ast.AST) -> str:
    return ast.unparse(_Rewriter().visit(node))


def _without_truth(node: ast.AST, is_bool: bool = False) -> str | None:
    """An expression that asks for no truth value; None where `node` does not ask for one.

    `is_bool`: what it asks is a truth value in any case.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = node.args[0].elts if len(node.args) == 1 and _is_sequence(node.args[0]) else node.args  # type: ignore[attr-defined]
        if node.func.id in LARGEST:
            return None if node.keywords else _largest(arguments, *LARGEST[node.func.id])
        if node.func.id in ALL and len(node.args) == 1:
            if _is_sequence(node.args[0]):
                return f" {ALL[node.func.id][0]} ".join(f"({_truth(each)})" for each in arguments)
            return f"functools.reduce(operator.{ALL[node.func.id][1]}, {ast.unparse(node.args[0])})"
        if node.func.id == "bool" and len(node.args) == 1:
            return _truth(node.args[0], is_bool)
    if isinstance(node, ast.Compare):
        return _compared(node)
    if isinstance(node, ast.BoolOp):
        return f" {LOGICAL[type(node.op)]} ".join(f"({_truth(value)})" for value in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        text = _text(node.operand)
        return f"~({text})" if is_bool or _is_truth(node.operand) else f"{text} == 0"
    if isinstance(node, ast.Assert):
        return "no assertion: it looks at values before there are any"
    if isinstance(node, ast.IfExp):
        return f"torch.where({_truth(node.test, is_bool)}, {_text(node.body)}, {_text(node.orelse)})"
    return None


def _truth(node: ast.expr, is_bool: bool = False) -> str:
    """An expression for the truth of `node`: `~` and `&` of numbers are other numbers."""
    return _text(node) if is_bool or _is_truth(node) else f"{_text(node)} != 0"


def _is_truth(node: ast.expr) -> bool:
    """Does the text show that the value is a truth value? A name or a call may be one, or a number."""
    if isinstance(node, ast.BinOp) and type(node.op) in LOGICAL:
        return _is_truth(node.left) and _is_truth(node.right)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not) or (isinstance(node.op, ast.Invert) and _is_truth(node.operand))
    if isinstance(node, ast.BoolOp):
        return all(map(_is_truth, node.values))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", *ALL)
    return isinstance(node, ast.Compare)


def _is_sequence(node: ast.AST) -> bool:
    return isinstance(node, (ast.Tuple, ast.List, ast.Set))


def _largest(arguments: Sequence[ast.expr], function: str, bound: str) -> str | None:
    numbers = [ast.unparse(argument) for argument in arguments if _is_number(argument)]
    others = [_text(argument) for argument in arguments if not _is_number(argument)]
    if not others or len(arguments) < 2 or len(numbers) > 1:
        return None
    text = reduce(lambda one, other: f"{function}({one}, {other})", others)
    return f"torch.clamp({text}, {bound}={numbers[0]})" if numbers else text


def _in_range(value: ast.expr, container: ast.expr) -> str | None:
    """Comparisons for `value in range(...)`; None for anything else, and for a step that has a name."""
    if not _is_range(container) or container.keywords or not 1 <= len(container.args) <= 3:
        return None
    start, stop, *step = container.args if len(container.args) > 1 else (ast.Constant(0), *container.args)
    if step and not isinstance(step[0], ast.Constant):
        return None
    text = f"({_comparison(start, ast.LtE(), value)}) & ({_comparison(value, ast.Lt(), stop)})"
    distance = ast.unparse(ast.BinOp(value, ast.Sub(), start))
    return f"{text} & (({distance}) % {step[0].value} == 0)" if step else text  # type: ignore[attr-defined]


def _is_range(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _is_number(node: ast.expr) -> bool:
    """Is it a number of Python's, which torch.maximum does not take? `_nodes` has marked names of numbers."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) or hasattr(node, "is_number")


def _compared(node: ast.Compare) -> str | None:
    """A chain of comparisons as several; `a >= b & c < d` with the brackets that were meant."""
    operands = [node.left, *node.comparators]
    if len(node.ops) == 1:
        items = operands[1].elts if _is_sequence(operands[1]) else ()  # type: ignore[attr-defined]
        equal = " | ".join(f"({ast.unparse(operands[0])} == {ast.unparse(item)})" for item in items)
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            each = f"[{ast.unparse(operands[0])} == item for item in {ast.unparse(operands[1])}]"
            equal = equal or _in_range(*operands) or f"functools.reduce(operator.or_, {each})"
            return equal if isinstance(node.ops[0], ast.In) else f"~({equal})"
        return None
    text, left = "", operands[0]
    for number, (op, right) in enumerate(zip(node.ops, operands[1:], strict=True)):
        last = number == len(node.ops) - 1
        if not last and isinstance(right, ast.BinOp) and type(right.op) in LOGICAL:
            text += f"({_comparison(left, op, right.left)}) {LOGICAL[type(right.op)]} "
            left = right.right
            if isinstance(left, ast.BinOp) and type(left.op) in LOGICAL:
                text += f"({ast.unparse(left.left)}) {LOGICAL[type(left.op)]} "
                left = left.right
        else:
            text += f"({_comparison(left, op, right)}){'' if last else ' & '}"
            left = right
    return text


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
    return ast.unparse(ast.Compare(left, [op], [right]))


def of_value(where: Where | None) -> str:
    """For a line that asks for the value of a traced scalar: `math.tanh(score)`."""
    for node in _nodes(where):
        if isinstance(node, ast.Compare):
            text = _compared(node)
        elif _is_range(node) and not all(map(_is_number, node.args)):
            return FIXED_COUNT
        else:
            text = _in_torch(node) if isinstance(node, ast.Call) else _chosen(node)
        if text is not None:
            return f"write {text}."
    return SYMBOLIC


def _chosen(node: ast.AST) -> str | None:
    """torch.where for `(no, yes)[condition]`; None for anything else."""
    if not isinstance(node, ast.Subscript) or not _is_sequence(node.value) or not _is_truth(node.slice):
        return None
    entries = [ast.unparse(entry) for entry in node.value.elts]  # type: ignore[attr-defined]
    if len(entries) != 2:
        return None
    return f"torch.where({ast.unparse(node.slice)}, {entries[1]}, {entries[0]})"


def _in_torch(node: ast.Call) -> str | None:
    """A call of a function of Python's or numpy's as one of torch's."""
    function, arguments = ast.unparse(node.func), ", ".join(map(ast.unparse, node.args))
    if function == "divmod" and len(node.args) == 2:
        first, second = node.args
        parts = [ast.BinOp(first, operator, second) for operator in (ast.FloorDiv(), ast.Mod())]
        return f"({', '.join(map(ast.unparse, parts))})"
    if function in CONVERSIONS and len(node.args) == 1:
        value = arguments if arguments.isidentifier() else f"({arguments})"
        return f"{value}.to({CONVERSIONS[function]})"
    module, _, name = function.rpartition(".")
    if module not in NUMERIC_MODULES and function != "round":
        return None
    if name in EXTREMES:
        return _largest(node.args, *LARGEST[EXTREMES[name]])
    name = RENAMED.get(name, name)
    if (name in ("round", "log") and len(node.args) > 1) or not node.args or _is_number(node.args[0]):
        return None  # torch's function takes other arguments
    if function == "math.remainder":
        return None  # it rounds the quotient to the nearest
    return f"torch.{name}({arguments})" if name in {*BY_TORCH_NAME, *COMPOSED} else None


def is_cached(frame: FrameType) -> bool:
    """Does the line call a function of functools.lru_cache? It keeps results by the values themselves."""
    calls = (node.func for node in _nodes(place_of(frame)) if isinstance(node, ast.Call))
    return any(isinstance(_found(frame, function), _lru_cache_wrapper) for function in calls)


def _found(frame: FrameType, node: ast.AST) -> object:
    """What a name, an attribute or an entry of one, or a literal is in a frame; None where not known."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr_static(_found(frame, node.value), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        table = _found(frame, node.value)
        with suppress(LookupError, TypeError):
            return table[node.slice.value] if type(table) in (dict, list, tuple) else None  # type: ignore[index]
    if isinstance(node, (ast.List, ast.Dict, ast.Tuple)):
        with suppress(ValueError, TypeError):
            return ast.literal_eval(node)
    return None


# of lookups and of searches in sets: the places of the table and of the traced index among the arguments
LOOKUPS = {
    "gather": (0, 2), "index_select": (0, 2), "select": (0, 2), "embedding": (1, 0), "take": (0, 1),
    "take_along_dim": (0, 1),
}  # fmt: skip
OF_SETS = {
    "isin": ("keep", "torch.isin(torch.arange(LENGTH), {table})", (1, 0)),
    "contains": ("keep", "torch.isin(torch.arange(LENGTH), {table})", (0, 1)),  # `position in table`
    "bucketize": ("buckets", "torch.bucketize(torch.arange(LENGTH), {table})", (1, 0)),
    "searchsorted": ("at", "torch.searchsorted({table}, torch.arange(LENGTH))", (0, 1)),
}
SHAPES = (
    "view_as", "reshape_as", "expand_as", "repeat", "tile", "permute", "transpose", "movedim", "swapaxes",
    "t",
)  # fmt: skip
MODULES = ("torch", "F", "torch.nn.functional", "nn.functional")


def of_operation(name: str, where: Where | None, table: str = "table") -> str:
    """For a torch function that no kernel has; `table` names the captured tensor that it was given.

    Quotes the table and the index as the user's line has them.
    """
    if name in LOOKUPS:
        table, index = _operands_in(where, name, LOOKUPS[name]) or (table, "q_idx")
        return f"index it: {table}[{index}]."
    if name in OF_SETS:
        result, call, places = OF_SETS[name]
        table, index = _operands_in(where, name, places) or (table, "q_idx")
        made = f"{result} = {call.format(table=table)}"
        return f"make a table before the call, {made}, and index that: {result}[{index}]."
    if name in SHAPES:
        return "leave it out for a scalar, which has no dimensions; shape a captured tensor before the call."
    if name == "detach":
        return WITHOUT_GRADIENT
    if name in ("cuda", "cpu"):
        return "leave it out: a mod computes on the device of the call."
    return ELEMENTWISE


def of_arguments(name: str, where: Where | None, frame: FrameType | None) -> str:
    """For a call of a torch function with arguments of classes that it does not take, in a frame."""
    for node in _nodes(where, frame) if name in EXTREMES else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            text = _largest(node.args, *LARGEST[EXTREMES[name]])
            if text is not None:
                return f"write {text}."
    return f"give it what torch.{name} takes; a number in the place of a tensor is torch.tensor(number)."


def _operands_in(where: Where | None, name: str, places: tuple[int, int]) -> list[str] | None:
    """The texts of two arguments of a call; of a method's, the object is the first."""
    for node in _nodes(where):
        if isinstance(node, ast.Compare) and name == "contains" and type(node.ops[0]) in (ast.In, ast.NotIn):
            return [ast.unparse(node.comparators[0]), ast.unparse(node.left)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            owner = [] if ast.unparse(node.func.value) in MODULES else [node.func.value]
            arguments = [*owner, *node.args]
            if len(arguments) > max(places) and _along_first(name, arguments):
                return [ast.unparse(arguments[place]) for place in places]
    return None


def _along_first(name: str, arguments: Sequence[ast.expr]) -> bool:
    """Does a lookup that takes a dimension take the first one?"""
    return LOOKUPS.get(name) != (0, 2) or (
        isinstance(arguments[1], ast.Constant) and arguments[1].value == 0
    )


def check_container(*kinds: type) -> None:
    """Raises ForeignCaptureError if the user's line indexes an object of these kinds, or one of numpy's."""
    frame = user_frame()
    where = place_of(frame)
    for node in _nodes(where):
        table = _table_of(node)
        if frame is None or table is None:
            continue
        name, found = ast.unparse(table), _found(frame, table)
        if isinstance(found, kinds) or _is_numpys(found):
            where_of_two = _chosen(node)
            advice = f"write {where_of_two}" if where_of_two else _of_container(name, found)
            raise ForeignCaptureError(where=where, name=name, type=_kind(found), advice=advice)


def _of_container(name: str, found: Any) -> str:
    if not _is_numpys(found) and any(map(callable, _elements(found))):
        return "call each of them, and choose between the results with torch.where, as masks.by_head does"
    tensor = _as_tensor(name, found)
    return f"make a tensor of it before the call, table = {tensor}, and capture that: table[...]"


def _table_of(node: ast.AST) -> ast.expr | None:
    """What `table[index]` or `table.get(index)` looks up in."""
    if isinstance(node, ast.Subscript):
        return None if isinstance(node.slice, ast.Constant) else node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return node.func.value
    return None


def of_operand(value: object) -> str:
    """For a value that is no scalar, among the operands of an operation."""
    numbers = isinstance(value, (list, tuple)) and all(isinstance(each, (int, float)) for each in value)
    if numbers or _is_numpys(value):
        tensor = _as_tensor("values", value)
        return f"make a tensor of it before the call, table = {tensor}, and index that: table[q_idx]."
    if callable(value):
        return "call it with the positions, e.g. other_mask(b, h, q_idx, kv_idx)."
    return "give it traced scalars, numbers or elements of captured tensors."


def _is_numpys(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _kind(value: object) -> str:
    return "a numpy array" if _is_numpys(value) else a_type(value)


def _as_tensor(name: str, value: Any) -> str:
    if _is_numpys(value):
        return f"torch.from_numpy({name})"
    text = name
    if isinstance(value, dict):
        text = f"[{name}[key] for key in sorted({name})]"
        if any(type(key) is int and key >= len(value) for key in value):  # keys with gaps, or from 1
            text = f"[{name}.get(key, 0) for key in range(max({name}) + 1)]"
    tensors = any(isinstance(each, Tensor) for each in _elements(value))
    return f"torch.{'stack' if tensors else 'tensor'}({text})"


def _elements(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _nodes(where: Where | None, frame: FrameType | None = None) -> Iterator[ast.AST]:
    """The syntax of the user's line, from the outside in; none where the line is no whole statement."""
    tree = _parsed(linecache.getline(where.file, where.line).strip()) if where is not None else None
    frame = frame or user_frame()
    for node in ast.walk(tree) if tree is not None else ():
        if frame is not None and isinstance(_found(frame, node), Real):
            node.is_number = True  # type: ignore[attr-defined]
    return ast.walk(tree) if tree is not None else iter(())


def _parsed(line: str) -> ast.AST | None:
    line = line.removeprefix("el") if line.startswith("elif ") else line
    texts = [line, f"{line}\n pass"]
    # a lambda that is an argument of a call, which goes on in other lines
    ends = [len(line), *(at for at in range(len(line) - 1, 0, -1) if line[at] in ",)")]
    starts = [found.start() for found in LAMBDA.finditer(line)]
    texts += [line[start:end] for start in starts for end in ends if end > start]
    return next(filter(None, map(_syntax, texts)), None)


def _syntax(text: str) -> ast.AST | None:
    with suppress(SyntaxError):
        return ast.parse(text)
    return None
