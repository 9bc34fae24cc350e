"""Python's parser, one thread at a time: two that build trees at once may fail in CPython 3.11."""

from __future__ import annotations

import ast
import threading
from typing import Literal

_lock = threading.Lock()


def parse(text: str, file: str = "<unknown>", mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """The tree of a Python text. Raises SyntaxError."""
    with _lock:
        return ast.parse(text, file, mode)
