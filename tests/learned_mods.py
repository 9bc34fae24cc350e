"""Score mods that learn what they capture, for lengths of any size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod import mods


class Learned(NamedTuple):
    """`make` makes a score_mod of the tensors that it learns; `shapes` are theirs."""

    make: Callable[..., Any]
    shapes: list[tuple[int, ...]]


def learned_mods(
    batch: int, heads: int, rows: int, columns: int, device: torch.device | str = "cpu"
) -> dict[str, Learned]:
    thirds = torch.arange(columns, device=device) % 3
    distances = rows + columns - 1
    buckets = (torch.arange(distances, device=device) - columns + 1).abs().float().log1p().int()
    return {
        "slopes": Learned(lambda t: lambda s, b, h, q, k: s + t[h] * (k - q), [(heads,)]),
        "slopes of distances as floats": Learned(
            lambda t: lambda s, b, h, q, k: s + t[h] * (k * 0.5 - q).abs(), [(heads,)]
        ),
        "alibi of the library": Learned(mods.alibi, [(heads,)]),
        "relative table": Learned(
            lambda t: lambda s, b, h, q, k: s + t[h, q - k + columns - 1], [(heads, distances)]
        ),
        "relative table, from its end": Learned(
            lambda t: lambda s, b, h, q, k: s + t[q - k], [(2 * max(rows, columns),)]
        ),
        "buckets of distances": Learned(
            lambda t: lambda s, b, h, q, k: s + t[buckets[q - k + columns - 1], h], [(12, heads)]
        ),
        "buckets computed for each pair": Learned(
            lambda t: lambda s, b, h, q, k: s + t[(q - k).abs().float().log1p().int(), h], [(12, heads)]
        ),
        "logarithms of distances": Learned(
            lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).abs().float().log1p(), [(heads,)]
        ),
        "roots of distances": Learned(
            lambda t: lambda s, b, h, q, k: (
                s * torch.sqrt((q - k).abs() / 700) + t[b, h] * torch.sqrt((k - q).abs() / 90)
            ),
            [(batch, heads)],
        ),
        "clamped distances": Learned(
            lambda t: lambda s, b, h, q, k: s * t[b, (q - k).clamp(-5, 5) + 5], [(batch, 11)]
        ),
        "bias of pairs": Learned(lambda t: lambda s, b, h, q, k: s + t[q, k], [(rows, columns)]),
        "bias of pairs and heads": Learned(
            lambda t: lambda s, b, h, q, k: s + t[h, q, k], [(heads, rows, columns)]
        ),
        "bias of everything": Learned(
            lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], [(batch, heads, rows, columns)]
        ),
        "bias of rows": Learned(lambda t: lambda s, b, h, q, k: s * t[q], [(rows,)]),
        "bias of keys": Learned(lambda t: lambda s, b, h, q, k: s + t[b, k], [(batch, columns)]),
        "temperature": Learned(lambda t: lambda s, b, h, q, k: s * torch.exp(t[b]), [(batch,)]),
        "scalar": Learned(lambda t: lambda s, b, h, q, k: torch.tanh(s * t) / t, [()]),
        "one element": Learned(lambda t: lambda s, b, h, q, k: s * t[0] + t[-1], [(3,)]),
        "indexed twice": Learned(
            lambda t: lambda s, b, h, q, k: s + t[q] * torch.sin(t[k]), [(max(rows, columns),)]
        ),
        "in two places": Learned(
            lambda t: lambda s, b, h, q, k: torch.where(q > k, s * t[h], s + t[h] ** 2) + t[h - 1],
            [(heads,)],
        ),
        "by a load": Learned(lambda t: lambda s, b, h, q, k: s + t[thirds[k]], [(3,)]),
        "by the score": Learned(
            lambda t: lambda s, b, h, q, k: s * t[s.clamp(-1, 1).round().int() + 1], [(3,)]
        ),
        "several": Learned(
            lambda t, u, v: lambda s, b, h, q, k: v * torch.tanh(s * u[h]) + t[q - k + columns - 1],
            [(distances,), (heads,), ()],
        ),
        "with -inf": Learned(
            lambda t: lambda s, b, h, q, k: torch.where(q + 2 >= k, s + t[h, q], -math.inf), [(heads, rows)]
        ),
        "with -inf that a table decides": Learned(
            lambda t: lambda s, b, h, q, k: torch.where(t[k] > 0, s + t[k], -math.inf), [(columns,)]
        ),
    }


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def every_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Two rows of three attend to nothing."""
    return (q_idx % 3 == 1) & (q_idx >= kv_idx)
