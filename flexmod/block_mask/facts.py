"""What a block mask turns out to be: facts that are counted, never given by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL
from flexmod.ir.evaluate import evaluate
from flexmod.ir.trace import Traced

# Elements of partial tiles that are evaluated at a time.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Facts:
    """Facts of a mask, over all its batches and heads.

    density         share of pairs of query and key that are attended to: (at least, at most), one number
                    twice where the elements of the partial tiles were counted
    area            share of pairs in the tiles that are listed, the padding of tiles at the edge counted in
    every_query     every query has a key to attend to; None where that was not counted
    one_run         the tiles of each row follow each other without a gap
    same            dimensions of more than 1, "B" and "H", along which the mask is the same
    longest         tiles in the longest row, over the mean
    """

    density: tuple[float, float]
    area: float
    every_query: bool | None
    one_run: bool
    same: tuple[str, ...]
    longest: float

    def __str__(self) -> str:
        """One line."""
        low, high = self.density
        kept = f"{low:.2%}" if low == high else f"{low:.2%} to {high:.2%}"
        queries = {True: "every query has keys", False: "some queries have no keys", None: ""}
        dims = {"B": "batches", "H": "heads"}
        parts = [
            f"{kept} of all pairs, in {self.area:.2%} of the area",
            queries[self.every_query],
            "one run of tiles a row" if self.one_run else "",
            f"the longest row {self.longest:.2f} times the mean",
            f"the same for all {' and '.join(dims[name] for name in self.same)}" if self.same else "",
        ]
        return "; ".join(part for part in parts if part)


def facts(
    table: Tensor,
    batch: tuple[int, ...],
    lengths: tuple[int, int],
    block: tuple[int, int],
    traced: Traced,
    budget: float = math.inf,
) -> Facts:
    """The facts of a mask of tiles `table`, int8 [..., Qb, KVb], whose batch dimensions are `batch` or 1.

    The elements of partial tiles are evaluated where there are no more than `budget`.
    """
    while table.dim() < 4:
        table = table[None]
    sizes = (*(1,) * (2 - len(batch)), *batch[-2:])
    told_apart = [
        max(known, size if name in traced.graph.reads else 1)
        for name, known, size in zip(("b", "h"), table.shape[:2], sizes, strict=True)
    ]
    table = table.expand(*told_apart, -1, -1)
    heights, widths = (
        (length - torch.arange(count, device=table.device) * size).clamp(0, size)
        for length, count, size in zip(lengths, table.shape[2:], block, strict=True)
    )
    sides = min(block[0], lengths[0]), min(block[1], lengths[1])
    pairs = math.prod(told_apart) * lengths[0] * lengths[1]
    full = int((((table == FULL) * widths).sum(-1) * heights).sum())
    partial = int((((table == PARTIAL) * widths).sum(-1) * heights).sum())
    # for each query, how many tiles there are in which it has a key
    some = (table == FULL).sum(-1)[..., None].expand(*table.shape[:3], sides[0]).contiguous()
    counted = partial <= budget
    if counted:
        partial = 0
        for places, kept in elements(table, lengths, block, sides, traced):
            partial += int(kept.sum())
            b, h, row, _ = places.unbind(1)
            line = (b * table.shape[1] + h) * table.shape[2] + row
            some.view(-1, sides[0]).index_add_(0, line, kept.any(2).to(some.dtype))
    beyond = torch.arange(sides[0], device=table.device) >= heights[:, None]
    all_some = bool(((some > 0) | beyond).all())
    listed = table != EMPTY
    counts = listed.sum(-1)
    edges = listed[..., :1].sum(-1) + (listed[..., 1:] & ~listed[..., :-1]).sum(-1)
    least = full + (partial if counted else 0)
    return Facts(
        density=(least / pairs, (full + partial) / pairs),
        area=int(counts.sum()) * math.prod(block) / pairs,
        every_query=all_some if counted or all_some else None,
        one_run=bool((edges <= 1).all()),
        same=tuple(
            name for name, size, apart in zip("BH", sizes, told_apart, strict=True) if size > 1 and apart == 1
        ),
        longest=float(counts.max() / counts.float().mean()) if bool(listed.any()) else 0.0,
    )


def elements(
    table: Tensor, lengths: tuple[int, int], block: tuple[int, int], sides: tuple[int, int], traced: Traced
) -> Iterator[tuple[Tensor, Tensor]]:
    """Partial tiles, int64 [n, 4], and what the mask keeps of their elements, bool [n, *sides]."""
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
