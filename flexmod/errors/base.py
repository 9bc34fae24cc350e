"""The base class of all errors, and the errors of the command line and of mods named by text.

The base class builds the message, with the line of the user's code. Those below it are not public names of
`flexmod.errors`.
"""

from __future__ import annotations

import difflib
import linecache
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["FlexmodError", "Where"]


@dataclass(frozen=True)
class Where:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        text = self.text
        return f"{self.file}:{self.line}" + (f": {text}" if text else "")

    @property
    def text(self) -> str:
        """Returns the user's line of code; shortens a very long one."""
        text = linecache.getline(self.file, self.line).strip()
        return text if len(text) <= 120 else text[:117] + "..."


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 head", "2 heads", "2 queries"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{_without_symbols(number)} {noun if number == 1 else plural}"


def a_type(value: object) -> str:
    """Returns the name of a value's type with its article: "an int", "an ndarray"."""
    name = type(value).__name__
    return f"{'an' if name.startswith((*'aeioAEIO', 'nd')) else 'a'} {name}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Asks for the known name that a misspelled one is close to, after a space; "" if there is none.

    A name of the same letters is likelier than a closer one: `tahn` is `tanh`, not `tan`.
    """
    by_lower, letters = {each.lower(): each for each in known}, sorted(name.lower())
    near = difflib.get_close_matches(name.lower(), by_lower)
    near.sort(key=lambda each: sorted(each) != letters)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def is_flag(value: object) -> bool:
    """Is a value True or False? numpy's bool, 0 and 1 are flags too, as in torch; a tensor is none."""
    return (isinstance(value, int) and value in (0, 1)) or type(value).__name__ in ("bool", "bool_")


def is_size(value: object) -> bool:
    """Is a value an int above 0? True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shown(value: object) -> str:
    """Returns an argument as an error quotes it: its repr, or its kind where that says no more in a line."""
    text = repr(value)
    if len(text) <= 100 and "\n" not in text and " at 0x" not in text:
        return text
    shape = getattr(value, "shape", None)
    return a_type(value) if shape is None else f"{a_type(value)} of shape {list(shape)}"


class _Noticed(threading.local):
    made: list[FlexmodError] | None = None  # errors with a user's line, while this thread traces a mod


_noticed = _Noticed()


@contextmanager
def not_swallowed() -> Iterator[None]:
    """Raises the first error with a user's line that the block raised and caught itself."""
    outer, made = _noticed.made, list[FlexmodError]()
    _noticed.made = made
    try:
        yield
    finally:
        _noticed.made = outer
    for error in made:
        if error.__traceback__ is not None:  # else it was made and never raised
            raise error


class FlexmodError(Exception):
    """Base of all errors that flexmod raises on purpose."""

    what = "{problem}."
    instead = "{advice}."

    def __init__(self, message: str | None = None, /, *, where: Where | None = None, **facts: object) -> None:
        """`message` is complete: pickle, copy and torch's DataLoader build an exception from it alone."""
        self.where = where
        self.facts = facts
        if message is not None:
            self.message = message
            self.args = (message,)
            return
        facts = {name: _without_symbols(fact) for name, fact in facts.items()}
        lines = [self.what.format(**facts)]
        if where is not None:
            lines.append(f"  at {where}")
            if _noticed.made is not None and not isinstance(self, AttributeError):  # hasattr() swallows that
                _noticed.made.append(self)
        lines.append(f"  Instead: {self.instead.format(**facts)}")
        self.message = "\n".join(lines)
        self.args = (self.message,)  # TorchDynamo supports this, but not super().__init__


def _without_symbols(fact: Any) -> Any:
    """Makes symbols of a graph numbers, since TorchDynamo writes no symbol into a text."""
    # not by type alone: TorchDynamo knows no type of some texts
    if isinstance(fact, int) and type(fact) is int:
        return range(fact).stop
    if isinstance(fact, (list, tuple)) and type(fact) in (list, tuple):
        return type(fact)([_without_symbols(part) for part in fact])
    return fact


class UnknownModName(FlexmodError, ValueError):
    what = "there is no mask or score mod named {name!r}.{close}"
    instead = "use one of: {known}; or file.py:function for one of your own."


class ModExpressionError(FlexmodError, ValueError):
    what = "{text!r} names no mask or score mod: {problem}."
    instead = (
        "write a name, a name with parameters (sliding_window:1024 or 'sliding_window(1024)'), masks joined "
        "by & and |, ~ of one, or file.py:function."
    )


class ModParametersError(FlexmodError, TypeError):
    what = "{name}{signature} does not take the parameters {given}: {problem}."
    instead = "give numbers, tuples, and lists for tensors, as in {name}(...)."


class ModFileError(FlexmodError, ValueError):
    what = "{text!r}: {problem}.{close}"
    instead = "write path/to/file.py:function, with a function of the file's own."


class ModPlaceError(FlexmodError, TypeError):
    what = "{text!r} is a {kind}_mod, and a {wanted}_mod is wanted here."


class MissingPlots(FlexmodError, RuntimeError):
    what = "--plot draws with matplotlib, which is not installed."
    instead = "pip install matplotlib, or take the numbers from --json."


class TuneDeviceError(FlexmodError, ValueError):
    what = "tune times kernels on a GPU, and {device} is none."
    instead = "run it on a machine with CUDA; flexmod build compiles for chips that are not here."


class WarmFolderError(FlexmodError, OSError):
    what = "compiled kernels cannot be kept in {folder}: {problem}."


class NoSourceError(FlexmodError, ValueError):
    what = "there is no {template} for this variant: {why}."
    instead = "ask for the portable template, which every chip runs."
