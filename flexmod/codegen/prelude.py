"""Reads the device functions in `flexmod/codegen/device_functions` as text, for generated modules.

It reads these files and does not import them: a module contains the functions that it uses, and only kernels
need Triton.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

# families of chips: NVIDIA's from sm_75 on, or any chip and the interpreter
Family = Literal["nvidia", ""]

FOLDER = Path(__file__).resolve().parent / "device_functions"
PACKAGE = "flexmod.codegen.device_functions."


@cache
def module_text(file: str) -> str:
    """The text of a whole file, by its name without the suffix."""
    return (FOLDER / f"{file}.py").read_text(encoding="utf-8")


@cache
def functions(file: str) -> Mapping[str, str]:
    """The texts of a file's own and imported functions, by name, each from its decorator on."""
    text = module_text(file)
    lines = text.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            others = functions(str(node.module).removeprefix(PACKAGE))
            found |= {alias.name: others[alias.name] for alias in node.names if alias.name in others}
    return found


def texts(file: str, *names: str) -> str:
    """The texts of some functions of a file, ready for a module."""
    return "\n\n\n".join(functions(file)[name] for name in names)


def names() -> frozenset[str]:
    """The functions that the table of operations may call."""
    return frozenset(functions("arithmetic"))


def used_by(*texts: str, single: bool = False, target: str = "") -> str:
    """The functions that the texts call, directly or indirectly, in the order of `arithmetic`.

    `single`: for kernels on float32. `target`: for kernels for these chips only, "nvidia" or "hopper".
    """
    known = {
        **functions("arithmetic"),
        **(functions("float32_arithmetic") if single else {}),
        **_made_for(target),
    }
    wanted: set[str] = set()
    found = _called("\n".join(texts))
    while found - wanted:
        wanted |= found
        found = _called("\n".join(known[name] for name in wanted))
    return "\n\n".join(known[name] + "\n" for name in known if name in wanted)


def in_pairs(text: str, target: str) -> bool:
    """Does the text call a function that, on these chips, may corrupt an element by its neighbor in a row?"""
    return any("pack=2" in _made_for(target).get(name, "") for name in _called(text))


def _made_for(target: str) -> Mapping[str, str]:
    """The functions of `arithmetic` in these chips' versions."""
    return functions(f"{target}_arithmetic") if target else {}


def _called(text: str) -> set[str]:
    return set(_calls().findall(text))


@cache
def _calls() -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.])({'|'.join(functions('arithmetic'))})\(")
