"""Score mods whose results are large and finite, and what attention is with them, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADS, ROWS, COLUMNS, DIM = 2, 130, 141, 64


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def made(device: torch.device | str = "cpu") -> dict[str, Callable[..., Any]]:
    """Score mods by name. Rows of one large number, rows that are large in part, and such as grow large."""
    pairs = torch.where(_random(ROWS, COLUMNS) > 1, -1e9, _random(ROWS, COLUMNS))
    pairs[::3] = -1e9
    pairs, rows, columns, temperatures, slopes, caps = (
        x.to(device)
        for x in (
            pairs,
            torch.where(torch.arange(ROWS) % 3 == 0, -1e9, 1e6),
            torch.where(torch.arange(COLUMNS) > 60, -1e20, 0.0),
            torch.tensor([1e9, -1e8]),
            torch.tensor([1000.0, -1e5]),
            torch.tensor([1e8, 30.0]),
        )
    )
    found: dict[str, Callable[..., Any]] = {
        "half a row": lambda s, b, h, q, k: torch.where(k > 60, -1e9, s),
        "half a row far below": lambda s, b, h, q, k: torch.where(k > 60, -1e30, s),
        "half a row above": lambda s, b, h, q, k: torch.where(k % 3 == 0, 1e15, s),
        "all of -1e9": lambda s, b, h, q, k: s * 0.0 - 1e9,
        "added": lambda s, b, h, q, k: s - 1e9,
        "added and taken": lambda s, b, h, q, k: (s + 1e9) - 1e9,
        "added to rows": lambda s, b, h, q, k: s + torch.where(q % 2 == 0, -1e9, 0.0),
        "of pairs": lambda s, b, h, q, k: s + pairs[q, k],
        "of rows": lambda s, b, h, q, k: s + rows[q],
        "of columns": lambda s, b, h, q, k: s + columns[k],
        "times a number": lambda s, b, h, q, k: s * 1e9,
        "times a tensor": lambda s, b, h, q, k: s * temperatures[h],
        "larger of two": lambda s, b, h, q, k: torch.maximum(s, torch.where(q % 2 == 0, 1e15, -1e15)),
        "a slope": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "a small slope": lambda s, b, h, q, k: s + 3.0 * (k - q),
        "a small cap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0) + slopes[h] * (k - q) / 1000.0,
        "a slope of a number": lambda s, b, h, q, k: s + 1e5 * (k - q),
        "a slope beside -1e9": lambda s, b, h, q, k: torch.where(k > 60, -1e9, s) + slopes[h] * (k - q),
        "a large cap": lambda s, b, h, q, k: 1e8 * torch.tanh(s / 1e8),
        "caps of a tensor": lambda s, b, h, q, k: caps[h] * torch.tanh(s / caps[h]),
        "moderate": lambda s, b, h, q, k: torch.where(q % 2 == 0, s - 1e4, s - 1e5),
    }
    for value in (-1e9, -1e20, -1e30, 1e15, 1e30):
        found[f"rows of {value:g}"] = _rows_of(value)
    return found


def _rows_of(value: float) -> Callable[..., Any]:
    return lambda s, b, h, q, k: torch.where(q % 2 == 0, value, s)


NAMES = tuple(made())
# what gradients of queries and keys are multiplied by, and their errors
FACTORS = {"times a number": 1e9, "times a tensor": 1e9}


@dataclass
class Call:
    """Operands of attention; queries and keys are multiplied by `size`."""

    dtype: torch.dtype
    device: str = "cpu"
    size: float = 1.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (ROWS, COLUMNS, COLUMNS, ROWS)
        # multiples of 1/4: products of queries and keys are exact, in any order
        operands = [(torch.randn(1, HEADS, n, DIM, generator=generator) * 4).round() / 4 for n in shapes]
        for n in (0, 1):
            operands[n] *= self.size
        self.q, self.k, self.v, self.grad_out = (x.to(self.device, self.dtype) for x in operands)

    def truth(self, score_mod: Callable[..., Any] | None, scale: float, keep: Any = None) -> list[Tensor]:
        """out, lse, max_scores and the gradients of q, k and v, of scores that are rounded to float32."""
        q, k, v, grad_out = (x.double() for x in (self.q, self.k, self.v, self.grad_out))
        scores = ((q @ k.mT).float() * scale).requires_grad_()
        places = [torch.arange(n, device=self.device) for n in (1, HEADS, ROWS, COLUMNS)]
        b, h, q_idx = places[0][:, None, None, None], places[1][:, None, None], places[2][:, None]
        modified = scores if score_mod is None else score_mod(scores, b, h, q_idx, places[3]).float()
        modified = modified.expand(scores.shape)
        seen = modified.detach().double()
        if keep is not None:
            seen = seen.masked_fill(~keep(b, h, q_idx, places[3]), -torch.inf)
        weights = torch.softmax(seen, -1)
        out = weights @ v
        grad = grad_out @ v.mT
        grad = weights * (grad - (grad_out * out).sum(-1, keepdim=True))
        if modified.requires_grad:
            (grad,) = torch.autograd.grad(modified, scores, grad.float(), allow_unused=True)
        grad = torch.zeros_like(scores) if grad is None else grad
        grad = grad.double() * scale
        grads = [grad @ k, grad.mT @ q, weights.mT @ grad_out]
        return [out, torch.logsumexp(seen, -1), seen.amax(-1), *grads]


def faults(found: list[Tensor], truth: list[Tensor], dtype: torch.dtype, size: float = 1.0) -> list[str]:
    """Results that are wrong: by the largest difference, relative to numbers near 1 or to the largest one."""
    limit = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float32: 1e-4}[dtype]
    wrong = []
    for name, own, right in zip(("out", "lse", "max", "dq", "dk", "dv"), found, truth, strict=True):
        overflows = size != 1.0 and name in ("dq", "dk") and dtype == torch.float16
        if overflows:
            continue
        if not own.isfinite().all():
            wrong.append(f"{name} is not finite")
        elif name in ("lse", "max"):
            if not torch.allclose(own.double(), right, rtol=1e-6, atol=1e-4):
                wrong.append(f"{name}: {float((own.double() - right).abs().max()):.3g}")
        else:
            error = float((own.detach().double() - right).abs().max())
            allowed = limit * max(1.0, float(right.abs().max())) * (size if name in ("dq", "dk") else 1.0)
            if not error <= allowed:
                wrong.append(f"{name}: {error:.3g}, {allowed:.3g} allowed")
    return wrong
