"""Python's parser, one thread at a time: two that build trees at once may fail in CPython 3.11."""

from __future__ import annotations

import ast
from typing import Literal

from flexmod.locks import Lock

_lock = Lock()


def parse(text: str, file: str = "<unknown>", mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """The tree of a Python text. Raises SyntaxError."""
    with _lock:
        return ast.parse(text, file, mode)
