"""Counts the elements that a block mask keeps: for its facts, and for the cells of its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask.data import MaskData
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, both_sizes, tile_count
from flexmod.errors import ArgumentTypeError
from flexmod.ir.evaluate import evaluate
from flexmod.runtime.tensor_kinds import no_autocast

# Elements of partial tiles to evaluate at a time.
AT_ONCE = 1 << 22
# A printed mask or a picture counts up to this many elements of partial tiles. Beyond, the density is two
# bounds, and a picture assumes that the mask keeps half of each partial tile.
COUNTED = 1 << 26
ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # independent of torch's defaults


@dataclass(frozen=True)
class Facts:
    """Facts of a mask, over all its batches and heads.

        density         share of pairs of query and key that the mask keeps: (at least, at most).
                        Both are equal if the elements of partial tiles were counted.
        area            share of tiles that are listed
        every_query     every query has a key to attend to; None if not counted
        one_run         the tiles of each row are consecutive
        same            dimensions larger than 1, "B" and "H", along which the mask is the same
        longest         tiles in the longest row, divided by the mean

    `str(facts)` is one line of text.
    """

    density: tuple[float, float]
    area: float
    every_query: bool | None
    one_run: bool
    same: tuple[str, ...]
    longest: float

    def __str__(self) -> str:
        """The facts in one line."""
        low, high = self.density
        kept = f"{low:.2%}" if low == high else f"{low:.2%} to {high:.2%}"
        queries = {True: "every query has keys", False: "some queries have no keys", None: ""}
        dims = {"B": "batches", "H": "heads"}
        parts = [
            f"{kept} of all pairs, in {self.area:.2%} of the tiles",
            queries[self.every_query],
            "one run of tiles a row" if self.one_run else "",
            f"the longest row {self.longest:.2f} times the mean",
            f"the same for all {' and '.join(dims[name] for name in self.same)}" if self.same else "",
        ]
        return "; ".join(part for part in parts if part)


@dataclass(frozen=True, eq=False)
class Cells:
    """Numbers of elements in each cell, float32 [rows, columns].

        area        all elements
        full        elements in full tiles
        partial     elements in partial tiles
        kept        elements in partial tiles that the mask keeps

    `step` is the size of a cell, (queries, keys).
    """

    area: Tensor
    full: Tensor
    partial: Tensor
    kept: Tensor
    step: tuple[int, int]

    def density(self) -> Tensor:
        """The share of each cell that the mask keeps."""
        return (self.full + self.kept) / self.area


def sparsity(mask: MaskData) -> float:
    """The share of the score matrix outside of the listed tiles, in per cent, as torch counts it.

    The padding of tiles at the edges counts as listed; the share is 0 where that makes it negative.
    """
    return max(0.0, 100 * (1 - mask.storage.listed() * math.prod(mask.BLOCK_SIZE) / mask.numel()))


def facts(mask: MaskData, budget: float = math.inf) -> Facts:
    """The facts of a mask. Counts the elements of partial tiles if there are at most `budget`.

    Raises ArgumentTypeError.
    """
    advice = "give a number of elements, e.g. 2**20"
    ArgumentTypeError.check(isinstance(budget, (int, float)), "budget", budget, advice)
    table, traced = mask.table(), mask.traced
    lengths, block = mask.seq_lengths, mask.BLOCK_SIZE
    while table.dim() < 4:
        table = table[None]
    sizes = both_sizes(mask.storage.batch)
    told_apart = [*map(max, table.shape[:2], traced.graph.groups(sizes))]
    table = table.expand(*told_apart, -1, -1)
    heights, widths = (_sizes(n, size, table.device) for n, size in zip(lengths, block, strict=True))
    side = min(block[0], lengths[0])
    pairs = math.prod(told_apart) * lengths[0] * lengths[1]
    full = int((((table == FULL) * widths).sum(-1) * heights).sum())
    partial = int((((table == PARTIAL) * widths).sum(-1) * heights).sum())
    # for each query, the number of tiles in which it has a key
    some = (table == FULL).sum(-1)[..., None].expand(*table.shape[:3], side).contiguous()
    counted = partial <= budget
    if counted:
        partial = 0
        for places, kept in elements(mask, table):
            partial += int(kept.sum())
            b, h, row, _ = places.unbind(1)
            line = (b * table.shape[1] + h) * table.shape[2] + row
            some.view(-1, side).index_add_(0, line, kept.any(2).to(some.dtype))
    beyond = torch.arange(side, device=table.device) >= heights[:, None]
    all_some = bool(((some > 0) | beyond).all())
    listed = table != EMPTY
    counts = listed.sum(-1)
    edges = listed[..., :1].sum(-1) + (listed[..., 1:] & ~listed[..., :-1]).sum(-1)
    least = full + (partial if counted else 0)
    return Facts(
        density=(least / pairs, (full + partial) / pairs),
        area=int(counts.sum()) / listed.numel(),
        every_query=all_some if counted or all_some else None,
        one_run=bool((edges <= 1).all()),
        same=tuple(
            name for name, size, apart in zip("BH", sizes, told_apart, strict=True) if size > 1 and apart == 1
        ),
        longest=float(counts.max() / counts.float().mean()) if bool(listed.any()) else 0.0,
    )


def elements(mask: MaskData, table: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Partial tiles of a table [B, H, Qb, KVb] of the mask, int64 [n, 4], and whether the mask keeps each of
    their elements, bool [n, queries, keys]. A tile larger than the mask has only the mask's elements.
    """
    lengths, block, traced = mask.seq_lengths, mask.BLOCK_SIZE, mask.traced
    sides = tuple(map(min, block, lengths))
    steps = [torch.arange(size, dtype=torch.int32, device=table.device) for size in sides]
    for places in (table == PARTIAL).nonzero().split(max(1, AT_ONCE // math.prod(sides))):
        b, h, row, column = (index.int()[:, None, None] for index in places.unbind(1))
        q_idx = row * block[0] + steps[0][:, None]
        kv_idx = column * block[1] + steps[1]
        inside = (q_idx < lengths[0]) & (kv_idx < lengths[1])
        (kept,) = evaluate(
            traced.graph, traced.tensors, b=b, h=h,
            q_idx=q_idx.clamp(max=lengths[0] - 1), kv_idx=kv_idx.clamp(max=lengths[1] - 1),
        )  # fmt: skip
        yield places, kept & inside


def cells(mask: MaskData, grid: tuple[int, int]) -> Cells:
    """Counts for a mask of one batch and one head, in at most `grid` rows and columns. On the CPU."""
    table = mask.table()
    table = table.reshape(table.shape[-2:])
    steps = [max(1, tile_count(n, most)) for n, most in zip(table.shape, grid, strict=True)]
    sides = zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)
    heights, widths = (_sizes(n, size, "cpu").float() for n, size in sides)
    rows, columns = (tile_count(n, step) for n, step in zip(table.shape, steps, strict=True))
    full, partial = (torch.zeros(rows, columns, **ON_CPU) for _ in range(2))
    with no_autocast("cpu"):  # whose products are rounded to a half type
        area = _pooled(heights[:, None], steps[0], 0) @ _pooled(widths[None], steps[1], 1)
        for row, band in enumerate(table.split(steps[0])):
            height = heights[row * steps[0] :][: len(band)]
            for kind, counts in ((FULL, full), (PARTIAL, partial)):
                listed = (band == kind).cpu().float()
                counts[row] = _pooled((height @ listed * widths)[None], steps[1], 1)[0]
    size = mask.BLOCK_SIZE
    kept = _kept(mask, table, steps, partial)
    return Cells(area, full, partial, kept, (steps[0] * size[0], steps[1] * size[1]))


def tokens(mask: MaskData) -> Cells:
    """Counts for each element of a mask of one batch and one head. On the CPU."""
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


def _sizes(length: int, block: int, device: torch.device | str) -> Tensor:
    """The number of positions in each tile."""
    return (length - torch.arange(0, length, block, device=device)).clamp(max=block)


def _pooled(counts: Tensor, step: int, axis: int) -> Tensor:
    """The sums of `step` entries each along an axis."""
    return torch.stack([part.sum(axis) for part in counts.split(step, axis)], axis)


def _kept(mask: MaskData, table: Tensor, steps: list[int], partial: Tensor) -> Tensor:
    """How many elements of partial tiles the mask keeps, by cell; assumes half if there are too many."""
    if float(partial.sum()) > COUNTED:
        return partial / 2
    counts = torch.zeros(math.prod(partial.shape), **ON_CPU)
    for places, kept in elements(mask, table[None, None]):
        _, _, row, column = places.cpu().unbind(1)
        cell = row // steps[0] * partial.shape[1] + column // steps[1]
        counts.index_add_(0, cell, kept.sum((1, 2)).cpu().float())
    return counts.view(partial.shape)
