"""Names the orders of dimensions that query, key, value and output may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flexmod.errors import LayoutError

LayoutName = Literal["bhsd", "bshd"]


class Layout(NamedTuple):
    """An order of dimensions: `heads` and `length` are dimension numbers; errors use `shape` and `named`."""

    heads: int
    length: int
    shape: str
    named: str = ""


LAYOUTS: Mapping[str, Layout] = {
    "bhsd": Layout(1, 2, "[batch, heads, length, head_dim]"),
    "bshd": Layout(2, 1, "[batch, length, heads, head_dim] in layout 'bshd'", " of layout 'bshd'"),
}
USUAL = LAYOUTS["bhsd"]


def layout_of(name: Any) -> Layout:
    """Returns the layout with this name. Raises LayoutError."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise LayoutError(layout=name)
    return LAYOUTS[name]
