"""The base class of all errors: it builds the message, with the line of the user's code."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
        lines = [self.what.format(**facts)]
        if where is not None:
            lines.append(f"  at {where}")
            if _noticed.made is not None:
                _noticed.made.append(self)
        lines.append(f"  Instead: {self.instead.format(**facts)}")
        self.message = "\n".join(lines)
        self.args = (self.message,)  # TorchDynamo supports this, but not super().__init__
