"""Quotes the user's mods and captured tensors as text, for a standalone file."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexmod.codegen.expressions import printable
from flexmod.ir.offsets import MaskAt, ScoreAt
from flexmod.ir.replay import Replay

# The most elements of a captured tensor that a file writes out; a run of equal ones counts as one.
WRITTEN_OUT = 64


def quotes(mods: Sequence[Callable[..., Any]], numbers: bool = True) -> list[list[str]]:
    """Returns the source of the mods and of the functions in their closures, with the closures' `numbers`.

    The lines suit comments: none has a line break inside.
    """
    found: dict[object, list[str]] = {}
    seen: set[int] = set()
    queue: list[Any] = list(mods)
    while queue:
        mod = queue.pop(0)
        if isinstance(mod, (tuple, list)):
            queue += mod
            continue
        if id(mod) in seen or isinstance(mod, type) or not callable(mod):
            continue
        seen.add(id(mod))
        if isinstance(mod, Replay):
            found[mod] = [f"{printable(mod.__name__)}: it was pickled, and its source is not at hand"]
            continue
        code = getattr(mod, "__code__", None)
        if code is None:  # a callable object, such as a mask that combines others
            queue += getattr(mod, "__dict__", {}).values()
            if isinstance(mod, (MaskAt, ScoreAt)):
                found[mod.positions] = [f"at the positions of {mod.positions}"]
            continue
        cells = dict(zip(code.co_freevars, (c.cell_contents for c in mod.__closure__ or ()), strict=True))
        plain = [f"{name} = {x!r}" for name, x in cells.items() if isinstance(x, (bool, int, float, str))]
        where = [f"where {', '.join(plain)}"] if plain and numbers else []
        found.setdefault(code, list(map(printable, [*_source(mod), *where])))
        queue += cells.values()
    return list(found.values())


def _source(function: Callable[..., Any]) -> list[str]:
    try:
        lines = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()
    except (OSError, TypeError):
        lines = []
    return lines or [f"{function.__qualname__}: its source is not at hand"]


def example(tensor: torch.Tensor) -> str:
    """Returns Python for a captured tensor: its values if they are few, else random ones in their range."""
    values = tensor.detach().cpu()
    if values.numel() <= WRITTEN_OUT:
        numbers = values.tolist() if not tensor.is_floating_point() else _short(values.tolist())
        written = re.sub(r"\b(inf|nan)\b", r'float("\1")', str(numbers))
        return _folded(f"torch.tensor({written}, dtype={tensor.dtype}, device=device)")
    if not tensor.is_floating_point() and values.dim() == 1:
        runs, counts = values.unique_consecutive(return_counts=True)
        if len(runs) <= WRITTEN_OUT:
            of_runs = f"torch.tensor({runs.tolist()}, dtype={tensor.dtype}, device=device)"
            of_counts = f"torch.tensor({counts.tolist()}, device=device)"
            return _folded(f"torch.repeat_interleave({of_runs}, {of_counts})")
    if tensor.is_floating_point():
        return f"torch.randn({tuple(values.shape)}, device=device).to({tensor.dtype})"
    low, high = int(values.min()), int(values.max()) + 1
    return f"torch.randint({low}, {high}, {tuple(values.shape)}, device=device).to({tensor.dtype})"


def _short(numbers: Any) -> Any:
    """Rounds the numbers in nested lists to float32's digits."""
    return [_short(x) for x in numbers] if isinstance(numbers, list) else float(f"{numbers:.8g}")


def _folded(expression: str) -> str:
    """Folds an expression into lines for main()."""
    return "\n".join(textwrap.wrap(expression, 90, subsequent_indent="        ", break_long_words=False))
