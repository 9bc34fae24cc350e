"""Bounds of masks over tiles: sound on random graphs, sharp on every mask there is, readable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_masks import random_masks

from flexmod.block_mask.spans import Axes
from flexmod.ir.evaluate import evaluate
from flexmod.ir.intervals import analyze
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced

CPU = torch.device("cpu")
Sizes = tuple[int, int, int, int]


def dense(traced: Traced, sizes: Sizes) -> torch.Tensor:
    places = [
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)
    ]
    b, h, q, kv = places
    (mask,) = evaluate(fitted(traced.graph, sizes), traced.tensors, b=b, h=h, q_idx=q, kv_idx=kv)
    return mask.expand(sizes)


def truth(mask: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(all True, any True) of each tile of a mask [B, H, Q, KV]."""
    rows, columns = (-(-n // size) for n, size in zip(mask.shape[2:], block, strict=True))

    def tiles(fill: float) -> torch.Tensor:
        pad = (0, columns * block[1] - mask.shape[3], 0, rows * block[0] - mask.shape[2])
        whole = F.pad(mask.float(), pad, value=fill)
        return whole.unflatten(3, (columns, block[1])).unflatten(2, (rows, block[0]))

    return tiles(1.0).amin((3, 5)).bool(), tiles(0.0).amax((3, 5)).bool()


@settings(max_examples=400, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
@given(random_masks(), st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(1, 9))
def test_no_tile_is_called_empty_or_full_that_is_not(
    traced: Traced, queries: int, keys: int, block_q: int, block_kv: int
) -> None:
    sizes = (2, 3, queries, keys)
    every, some = truth(dense(traced, sizes), (block_q, block_kv))
    analysis = analyze(fitted(traced.graph, sizes), sizes)
    axes = Axes(analysis, traced.tensors, sizes, CPU)
    certain, possible = axes.decide_all(axes.tiles("row", block_q), axes.tiles("column", block_kv))
    assert not (certain & ~every).any(), analysis.bounds
    assert not (~possible & some).any(), analysis.bounds
    assert not (certain & ~possible).any()
