"""The names of the families of kernels, by which options and commands ask for one.

`backends/families.py` has the families themselves; its `insert` adds a name here.
"""

from __future__ import annotations

from collections.abc import Sequence

PORTABLE = "portable"  # of the kernels that every chip runs, the last family
_names: tuple[str, ...] = ("hopper", PORTABLE)


def names() -> tuple[str, ...]:
    """All, in the order in which the families are asked."""
    return _names


def set_names(known: Sequence[str]) -> None:
    global _names
    _names = tuple(known)


def accepted() -> tuple[str, ...]:
    """What kernel option TEMPLATE may be."""
    return ("auto", *_names)
