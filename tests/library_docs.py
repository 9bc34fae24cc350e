"""What the docstrings of the library hold: examples, and pictures drawn in characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flexmod
from flexmod import create_mask, masks, mods

PICTURE = re.compile(r"^`(?P<call>m\w+\..+)`, (?P<rows>\d+) x (?P<columns>\d+)(?P<rest>.*):$")


class Picture(NamedTuple):
    call: str
    rows: int
    columns: int
    rest: str
    lines: list[str]


def example(function: Callable[..., Any]) -> str:
    """The code under "Example:"."""
    _, found, rest = (function.__doc__ or "").partition("Example:\n\n")
    assert found, f"{function.__name__} has no example"
    block = re.match(r"((?: {8}.*)?\n)+", rest)
    assert block is not None
    return textwrap.dedent(block[0]).strip()


def pictures(function: Callable[..., Any]) -> list[Picture]:
    blocks = textwrap.dedent("    " + (function.__doc__ or "")).split("\n\n")
    found = []
    for number, block in enumerate(blocks):
        match = PICTURE.match(block.strip())
        if match is not None:
            drawn = blocks[number + 1] if number + 1 < len(blocks) else ""
            lines = drawn.rstrip().splitlines() if drawn.startswith("    ") else []
            found.append(
                Picture(match["call"], int(match["rows"]), int(match["columns"]), match["rest"], lines)
            )
    return found


def made(call: str) -> Any:
    """The mod that a picture's call makes."""
    return eval(call, {"masks": masks, "mods": mods, "torch": torch})


def drawn(picture: Picture) -> list[str]:
    """What the picture of a mask must look like."""
    kept = create_mask(made(picture.call), None, None, picture.rows, picture.columns, "cpu")[0, 0]
    return ["    " + "".join("#" if keeps else "." for keeps in row) for row in kept.tolist()]


def names(device: torch.device) -> dict[str, Any]:
    """What an example finds: query, key and value [2, 8, 1024, 64], torch, and flexmod's names."""
    tensors = {name: torch.randn(2, 8, 1024, 64, device=device) for name in ("query", "key", "value")}
    public = {name: getattr(flexmod, name) for name in flexmod.__all__}
    return {"torch": torch, "flexmod": flexmod, **public, **tensors}
