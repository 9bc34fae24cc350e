"""Functions that run on a device, and their text for generated modules.

The files of this folder are ordinary modules, which tests import. Generated modules contain the text of the
functions that they use. So flexmod reads these files and does not import them: only kernels need Triton.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

# Families of chips: NVIDIA's from sm_75 on; of these, the ones that may start a kernel before the kernels of
# earlier launches have ended; or any chip and the interpreter.
Family = Literal["nvidia", "nvidia_early", ""]
# for each name in `target`, the functions of `arithmetic` that these chips have instructions for
CHIP_FUNCTIONS = {
    **dict.fromkeys(("nvidia", "nvidia_early"), ("tanh_approximate", "exp", "divide")),
    "hopper": ("tanh_approximate", "exp", "divide", "log", "log2", "logistic"),
}
# The first statement of kernels for the chips in EARLY: they start early, and wait until the kernels of
# earlier launches have ended.
EARLY = ("nvidia_early", "hopper")
WAIT = "gdc_wait()"

FOLDER = Path(__file__).resolve().parent
PACKAGE = f"{__name__}."


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


def called_by(text: str, *files: str) -> str:
    """The functions of these files that a module's text calls, directly or indirectly, in their order."""
    known = {name: own for file in files for name, own in functions(file).items()}
    return "\n\n\n".join(_with_called(known, text))


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
    return "\n\n".join(own + "\n" for own in _with_called(known, "\n".join(texts)))


def _with_called(known: Mapping[str, str], text: str) -> list[str]:
    wanted: set[str] = set()
    found = called(tuple(known), text)
    while found - wanted:
        wanted |= found
        found = called(tuple(known), "\n".join(known[name] for name in wanted))
    return [own for name, own in known.items() if name in wanted]


def in_pairs(text: str, target: str) -> bool:
    """Does the text call a function that, on these chips, may corrupt an element by its neighbor in a row?"""
    return any("pack=2" in _made_for(target)[name] for name in called(tuple(_made_for(target)), text))


def _made_for(target: str) -> Mapping[str, str]:
    """The functions of `arithmetic` in these chips' versions."""
    return {name: functions("chip_arithmetic")[name] for name in CHIP_FUNCTIONS[target]} if target else {}


def called(names: tuple[str, ...], text: str) -> set[str]:
    """Which of these functions a text calls."""
    return {name for name in names if f"{name}(" in text and _call(name).search(text)}


@cache
def _call(name: str) -> re.Pattern[str]:
    # a pattern that begins with letters is found in a sixth of the time
    call = rf"{name}\("
    return re.compile(rf"{call}(?<![\w.]{call})(?<!def {call})")
