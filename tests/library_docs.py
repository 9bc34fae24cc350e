"""What the docstrings of the library hold: examples, and pictures drawn in characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmod
from flexmod import create_mask, masks, mods
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS
from flexmod.ir.trace import trace

PICTURE = re.compile(
    r"^`(?P<call>m\w+\..+)`, (?P<rows>\d+) x (?P<columns>\d+)(?:, scores of (?P<scores>.+))?:$"
)


class Picture(NamedTuple):
    call: str
    rows: int
    columns: int
    scores: list[float]
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
        match = PICTURE.match(" ".join(block.split()))
        if match is not None:
            drawn = blocks[number + 1] if number + 1 < len(blocks) else ""
            lines = drawn.rstrip().splitlines() if drawn.startswith("    ") else []
            scores = [float(x) for x in (match["scores"] or "").split()]
            found.append(Picture(match["call"], int(match["rows"]), int(match["columns"]), scores, lines))
    return found


def made(call: str) -> Any:
    """The mod that a picture's call makes."""
    return eval(call, {"masks": masks, "mods": mods, "torch": torch})


def drawn(picture: Picture) -> list[str]:
    """What the picture must look like: of a mask the pairs that it keeps, of a score mod what it makes of
    scores, all of one or a row of them.
    """
    if picture.scores:
        return ["    " + "".join(f"{x:7.2f}" for x in row) for row in modified(picture).tolist()]
    kept = create_mask(made(picture.call), None, None, picture.rows, picture.columns, "cpu")[0, 0]
    return ["    " + "".join("#" if keeps else "." for keeps in row) for row in kept.tolist()]


def modified(picture: Picture) -> Tensor:
    """What the score mod of a picture makes of its scores, in head 0: float64 [rows, columns]."""
    traced = trace(made(picture.call), "score")
    score = torch.tensor(picture.scores, dtype=torch.float64).expand(1, 1, picture.rows, picture.columns)
    places = {
        name: torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(POSITIONS, score.shape, strict=True))
    }
    (result,) = evaluate(traced.graph, traced.tensors, **places, score=score, real=torch.float64)
    return result.expand(score.shape)[0, 0]


def names(device: torch.device) -> dict[str, Any]:
    """What an example finds: query, key and value [2, 8, 1024, 64], torch, and flexmod's names."""
    tensors = {name: torch.randn(2, 8, 1024, 64, device=device) for name in ("query", "key", "value")}
    public = {name: getattr(flexmod, name) for name in flexmod.__all__}
    return {"torch": torch, "flexmod": flexmod, **public, **tensors}
