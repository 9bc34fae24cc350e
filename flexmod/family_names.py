"""Names the kernel families, for options and commands that select one.

`backends/families.py` has the families themselves; its `insert` adds a name here.
"""

from __future__ import annotations

from collections.abc import Sequence

PORTABLE = "portable"  # the last family, whose kernels run on every chip
_names: tuple[str, ...] = ("hopper", PORTABLE)


def names() -> tuple[str, ...]:
    """Returns all names, in the order in which flexmod tries the families."""
    return _names


def set_names(known: Sequence[str]) -> None:
    global _names
    _names = tuple(known)


def accepted() -> tuple[str, ...]:
    """Returns the values that kernel option TEMPLATE accepts."""
    return ("auto", *_names)
