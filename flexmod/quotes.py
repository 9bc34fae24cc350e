"""What a user wrote and captured, as text for a file of its own."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Elements of a captured tensor that are written out; runs of equal ones count as one.
WRITTEN_OUT = 64


def quotes(mods: Sequence[Callable[..., Any]]) -> list[list[str]]:
    """The source of the mods and of the functions in their closures, with the numbers there."""
    found: dict[object, list[str]] = {}
    queue = list(mods)
    while queue:
        mod = queue.pop(0)
        code = getattr(mod, "__code__", None)
        if code is None or code in found:
            continue
        try:
            lines = textwrap.dedent(inspect.getsource(mod)).rstrip().splitlines()
        except (OSError, TypeError):
            lines = [f"{mod.__qualname__}: its source is not at hand"]
        cells = [cell.cell_contents for cell in mod.__closure__ or ()]
        numbers = [
            f"{name} = {value!r}"
            for name, value in zip(code.co_freevars, cells, strict=True)
            if isinstance(value, (bool, int, float, str))
        ]
        found[code] = [*lines, *([f"where {', '.join(numbers)}"] if numbers else [])]
        held = [item for value in cells for item in (value if isinstance(value, (tuple, list)) else [value])]
        queue += [value for value in held if inspect.isfunction(value)]
    return list(found.values())


def example(tensor: torch.Tensor) -> str:
    """Python for a captured tensor: its values where these are few, else random ones of their range."""
    values = tensor.detach().cpu()
    if values.numel() <= WRITTEN_OUT:
        numbers = values.tolist() if not tensor.is_floating_point() else _short(values.tolist())
        return _folded(f"torch.tensor({numbers}, dtype={tensor.dtype}, device=device)")
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
    """Numbers of nested lists with the digits that float32 has."""
    return [_short(x) for x in numbers] if isinstance(numbers, list) else float(f"{numbers:.8g}")


def _folded(expression: str) -> str:
    """Lines of an expression that stands in main()."""
    return "\n".join(textwrap.wrap(expression, 90, subsequent_indent="        ", break_long_words=False))
