"""How much of a mask is kept where: a mask of any size as a grid of cells, for pictures.

A cell is a rectangle of tiles, or one element where a mask is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmod.block_mask.facts import elements
from flexmod.block_mask.tiles import FULL, PARTIAL, tile_count
from flexmod.ir.evaluate import evaluate

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask

Color = tuple[int, int, int]
# Kept, in full tiles; kept, in partial ones; masked, in partial ones; in no tile.
FULL_COLOR: Color = (35, 61, 101)
KEPT_COLOR: Color = (224, 123, 0)
MASKED_COLOR: Color = (253, 236, 208)
EMPTY_COLOR: Color = (255, 255, 255)
# Elements of partial tiles that are counted at most. Beyond, half of each is taken to be kept.
COUNTED = 1 << 26
ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are


@dataclass(frozen=True, eq=False)
class Cells:
    """Numbers of elements in each cell, float32 [rows, columns].

    area     that there are
    full     in full tiles
    partial  in partial tiles
    kept     in partial tiles, of those that the mask keeps
    step     (queries, keys) of a cell
    """

    area: Tensor
    full: Tensor
    partial: Tensor
    kept: Tensor
    step: tuple[int, int]

    def density(self) -> Tensor:
        """The share of each cell that is kept."""
        return (self.full + self.kept) / self.area

    def colors(self) -> Tensor:
        """uint8 [rows, columns, 3]: the colors of a cell's elements, mixed."""
        masked = self.partial - self.kept
        parts = (self.full, self.kept, masked, self.area - self.full - self.partial)
        colors = (FULL_COLOR, KEPT_COLOR, MASKED_COLOR, EMPTY_COLOR)
        mixed = sum(
            (part / self.area)[..., None] * torch.tensor(color, **ON_CPU)
            for part, color in zip(parts, colors, strict=True)
        )
        assert isinstance(mixed, Tensor)
        return mixed.round().to(torch.uint8)


def cells(mask: BlockMask, grid: tuple[int, int]) -> Cells:
    """The tiles of a mask of one batch and one head in at most `grid` rows and columns. On the CPU."""
    table = mask.table()
    table = table.reshape(table.shape[-2:])
    steps = [max(1, tile_count(n, most)) for n, most in zip(table.shape, grid, strict=True)]
    heights, widths = (_sizes(n, size) for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    rows, columns = (tile_count(n, step) for n, step in zip(table.shape, steps, strict=True))
    area = _pooled(heights[:, None], steps[0], 0) @ _pooled(widths[None], steps[1], 1)
    full, partial = (torch.zeros(rows, columns, **ON_CPU) for _ in range(2))
    for row, band in enumerate(table.split(steps[0])):
        height = heights[row * steps[0] :][: len(band)]
        for kind, counts in ((FULL, full), (PARTIAL, partial)):
            listed = (band == kind).cpu().float()
            counts[row] = _pooled((height @ listed * widths)[None], steps[1], 1)[0]
    size = mask.BLOCK_SIZE
    kept = _kept(mask, table, steps, partial)
    return Cells(area, full, partial, kept, (steps[0] * size[0], steps[1] * size[1]))


def tokens(mask: BlockMask) -> Cells:
    """Each element of a mask of one batch and one head. On the CPU."""
    queries, keys = mask.seq_lengths
    q, kv = (torch.arange(n, dtype=torch.int32, device=mask.device) for n in (queries, keys))
    zero = torch.zeros((), dtype=torch.int32, device=mask.device)
    traced = mask.traced
    (kept,) = evaluate(traced.graph, traced.tensors, b=zero, h=zero, q_idx=q[:, None], kv_idx=kv)
    table = mask.table()
    rows, columns = (n // size for n, size in zip((q, kv), mask.BLOCK_SIZE, strict=True))
    kinds = table.reshape(table.shape[-2:])[rows][:, columns].cpu()
    partial = (kinds == PARTIAL).float()
    ones = torch.ones(queries, keys, **ON_CPU)
    return Cells(ones, (kinds == FULL).float(), partial, partial * kept.cpu().expand(queries, keys), (1, 1))


def _sizes(length: int, block: int) -> Tensor:
    """How many positions each tile has, float32."""
    return (length - torch.arange(0, length, block, device="cpu")).clamp(max=block).float()


def _pooled(counts: Tensor, step: int, axis: int) -> Tensor:
    """The sums of `step` entries each along an axis."""
    return torch.stack([part.sum(axis) for part in counts.split(step, axis)], axis)


def _kept(mask: BlockMask, table: Tensor, steps: list[int], partial: Tensor) -> Tensor:
    """How many elements of partial tiles the mask keeps, by cell; half of them where they are too many."""
    if float(partial.sum()) > COUNTED:
        return partial / 2
    lengths, block = mask.seq_lengths, mask.BLOCK_SIZE
    sides = min(block[0], lengths[0]), min(block[1], lengths[1])
    counts = torch.zeros(math.prod(partial.shape), **ON_CPU)
    for places, kept in elements(table[None, None], lengths, block, sides, mask.traced):
        _, _, row, column = places.cpu().unbind(1)
        cell = row // steps[0] * partial.shape[1] + column // steps[1]
        counts.index_add_(0, cell, kept.sum((1, 2)).cpu().float())
    return counts.view(partial.shape)
