"""Writes docs/reference/errors.md from the tests' tables of mistakes and messages.

    python tools/error_pages.py

A class shows its first mistake in the tables: the code, the whole message, and the class that torch or Python
would raise.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "ir")]

import call_error_rows  # noqa: E402
import other_error_rows  # noqa: E402
import test_trace_errors  # noqa: E402

from flexmod import errors  # noqa: E402

PAGE = Path("docs/reference/errors.md")
PARTS = {
    "calls": "Calls and block masks",
    "mods": "Mods",
    "kernels": "Kernels, options and tools",
}
LOCATION = re.compile(r"(?<=at )\S+\.py:\d+|\S+/\S+\.py:\d+")
TOP = """<!-- Written by tools/error_pages.py. -->

# Errors

Each mistake is a class of `flexmod.errors`, raised before any kernel starts. A message has the fact, your
line where a mod is at fault, and after "Instead" what to write. All classes are FlexmodError, and also the
built-in class in parentheses, so code that catches ValueError keeps working. `error.facts` has the facts of
the message by name, `error.where` the file and the line.

```python
import torch
from flexmod import errors, flex_attention

query = torch.zeros(2, 4, 32, 16)
try:
    flex_attention(query, query, query, kernel_options={"BLOCK_M": 24})
except errors.OptionValueError as error:
    print(error.facts)
```

The examples are from the tests. In them `x(2, 4, 32, 16)` is a tensor of zeros, and of this shape if none is
given; `call(query, key, value, ...)` is `flex_attention` on such tensors; `mask(...)` is `create_block_mask`
of the causal mask for 32 positions; `options(...)` is a call with these `kernel_options`. A mod's four
positions are called b, h, q and k.
"""


class Mistake(NamedTuple):
    """A class, code that raises it (empty: none is short enough), and the message."""

    error: type[errors.FlexmodError]
    code: str
    message: str


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def code_of(function: Callable[..., Any]) -> str:
    """What a function of the tables does: the expression of a lambda, or the lines of a function."""
    file, line = inspect.getsourcefile(function), function.__code__.co_firstlineno
    assert file is not None
    kinds = (ast.Lambda, ast.FunctionDef)
    found = [node for node in ast.walk(tree(file)) if isinstance(node, kinds) and first_line(node) == line]
    (node, *_) = found
    parts = [node.body] if isinstance(node, ast.Lambda) else node.body
    return "\n".join(segment(file, part) for part in parts if not documents(part))


def first_line(node: ast.Lambda | ast.FunctionDef) -> int:
    decorators = getattr(node, "decorator_list", [])
    return decorators[0].lineno if decorators else node.lineno


@cache
def lines(file: str) -> list[bytes]:
    return Path(file).read_bytes().splitlines()


def segment(file: str, node: ast.expr | ast.stmt) -> str:
    """The text of a node, indented as if it stood alone."""
    found = lines(file)[node.lineno - 1 : node.end_lineno]
    found[-1] = found[-1][: node.end_col_offset]
    found[0] = found[0][node.col_offset :]
    first, *rest = (line.decode() for line in found)
    if not rest:
        return first
    margin = min(len(line) - len(line.lstrip()) for line in rest if line)
    if isinstance(node, ast.expr) and rest[-1].lstrip()[0] not in ")]}":
        margin -= 4
    elif isinstance(node, ast.stmt):
        margin = node.col_offset
    return "\n".join([first, *(line[margin:] for line in rest)])


def documents(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mistakes() -> Iterator[Mistake]:
    """All rows of the tables, in their order."""
    for error, function, message in [*call_error_rows.ROWS, *other_error_rows.ROWS]:
        yield Mistake(error, code_of(function), LOCATION.sub("my_model.py:7", message))
    for row in test_trace_errors.ROWS.values():
        if not inspect.isfunction(row.mod):
            continue
        source = textwrap.dedent(inspect.getsource(row.mod))
        code = re.sub(r"\s*# <-", "", source[source.index("def ") :]).strip()
        (line,) = re.findall(r"^\s*(.*?)\s*# <-", source, re.MULTILINE) or [""]
        where = f"\n  at my_model.py:7: {line}" if row.line and line else ""
        yield Mistake(row.error, code, f"{row.what}{where}\n  Instead: {row.instead}")


def section(mistake: Mistake) -> str:
    name = mistake.error.__name__
    builtin = next(
        (base.__name__ for base in mistake.error.__mro__[1:] if base.__module__ == "builtins"), "Exception"
    )
    also = f" ({builtin})" if builtin != "Exception" else ""
    code = f"```py\n{mistake.code}\n```\n\n" if mistake.code else ""
    return f"### {name}\n\n`errors.{name}`{also}\n\n{code}```\n{mistake.message}\n```\n"


def page() -> str:
    first: dict[str, Mistake] = {}
    for mistake in mistakes():
        first.setdefault(mistake.error.__name__, mistake)
    for name in sorted(set(errors.__all__) - set(first) - {"FlexmodError", "Where"}):
        error = getattr(errors, name)  # tested outside of the tables
        first[name] = Mistake(error, "", f"{error.what}\n  Instead: {error.instead}")
    parts = [TOP]
    files = {name: defined_in(name) for name in first}
    for file in dict.fromkeys([*PARTS, *files.values()]):
        names = [name for name in first if files[name] == file]
        title = PARTS.get(file, file)
        contents = ", ".join(f"[{name}](#{name.lower()})" for name in names)
        parts += [f"## {title}\n\n{contents}\n", *(section(first[name]) for name in names)]
    return "\n".join(parts)


def defined_in(name: str) -> str:
    """The file of flexmod/errors that defines a class."""
    sources = (ROOT / "flexmod" / "errors").glob("*.py")
    return next(path.stem for path in sources if f"class {name}(" in path.read_text())


def main() -> None:
    (ROOT / PAGE).write_text(page())


if __name__ == "__main__":
    main()
