"""Runs Python's parser in one thread at a time, since two threads may make it fail in CPython 3.11."""

from __future__ import annotations

import ast
from typing import Literal

from flexmod.locks import Lock

_lock = Lock()


def parse(text: str, file: str = "<unknown>", mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """Returns the tree of a Python text. Raises SyntaxError."""
    with _lock:
        return ast.parse(text, file, mode)
