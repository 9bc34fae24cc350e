"""What all mistakes share: the message, and the line of the user's code in it."""

from __future__ import annotations

import linecache
from dataclasses import dataclass


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
        """The line as the user wrote it, cut where it is very long."""
        text = linecache.getline(self.file, self.line).strip()
        return text if len(text) <= 120 else text[:117] + "..."


class FlexmodError(Exception):
    """Base of all errors that flexmod raises on purpose."""

    what = "{what}"
    instead = "{instead}"

    def __init__(self, message: str | None = None, /, *, where: Where | None = None, **facts: object) -> None:
        """`message` is a finished one: pickle, copy and torch's DataLoader make an exception of it alone."""
        self.where = where
        self.facts = facts
        if message is not None:
            self.message = message
            self.args = (message,)
            return
        lines = [self.what.format(**facts)]
        if where is not None:
            lines.append(f"  at {where}")
        lines.append(f"  Instead: {self.instead.format(**facts)}")
        self.message = "\n".join(lines)
        self.args = (self.message,)  # TorchDynamo follows this, and no super().__init__
