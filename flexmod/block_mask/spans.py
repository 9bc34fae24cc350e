"""Decides tiles by the bounds of their mask, in torch.

    axes = Axes(analysis, tensors, (B, H, Q_LEN, KV_LEN), device)
    rows, columns = axes.tiles("row", 128), axes.tiles("column", 128)
    certain, possible = axes.decide(rows.at(b, h, i), columns.at(b, h, j), b, h)     # a list of tiles

A span is a range of positions in a row or a column of tiles. It may have any length: a tile, a square of many
tiles, or a piece of a tile between two jumps of a term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmod.ir.evaluate import evaluate
from flexmod.ir.intervals import Analysis, BoundsTerm

Sizes = tuple[int, int, int, int]
# the bounds of terms by the names of their inputs
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Spans:
    """Ranges of positions of one axis, `low` to `high`, int32 [n], both ends included.

    `bounds`: the bounds of the axis's terms in each range, [B or 1, H or 1, n].
    """

    low: Tensor
    high: Tensor
    bounds: Named

    def __len__(self) -> int:
        return len(self.low)

    def at(self, b: Tensor, h: Tensor, index: Tensor) -> Spans:
        """The spans at these batches, heads and numbers, which broadcast; the result has their shape."""
        bounds = {name: _picked(bound, b, h, index) for name, bound in self.bounds.items()}
        return Spans(self.low[index], self.high[index], bounds)

    def coarser(self, factor: int) -> Spans:
        """Merges each `factor` consecutive spans."""
        bounds = {name: _pooled(bound, factor, name) for name, bound in self.bounds.items()}
        last = torch.arange(factor - 1, len(self) + factor - 1, factor, device=self.low.device)
        return Spans(self.low[::factor], self.high[last.clamp_(max=len(self) - 1)], bounds)


class Axes:
    """The terms of an analysis, evaluated at every position of their axis.

    `values` has each term's values, [B or 1, H or 1, length], by the name of its lower bound. For a diagonal
    term it has counts, int32 [.., Q_LEN + KV_LEN]: entry i is the number of True values among the first i
    differences, which begin at 1 - KV_LEN.
    """

    def __init__(
        self, analysis: Analysis, tensors: Sequence[Tensor], sizes: Sizes, device: torch.device
    ) -> None:
        self.analysis = analysis
        self.tensors = tensors
        self.sizes = sizes
        self.device = device
        self.values = {term.low: self._evaluated(term) for term in analysis.terms}

    def _evaluated(self, term: BoundsTerm) -> Tensor:
        batch, heads, queries, keys = self.sizes
        ranges = {
            "row": ((0, queries), (0, 1)),
            "column": ((0, 1), (0, keys)),
            "diagonal": ((1 - keys, queries), (0, 1)),
        }
        q, kv = (torch.arange(*r, dtype=torch.int32, device=self.device) for r in ranges[term.axis])
        b = self._numbers(batch if "b" in term.reads else 1)[:, None, None]
        h = self._numbers(heads if "h" in term.reads else 1)[:, None]
        (values,) = evaluate(term.graph, self.tensors, b=b, h=h, q_idx=q, kv_idx=kv)
        values = values.expand(len(b), len(h), max(len(q), len(kv)))
        return F.pad(values.cumsum(-1, dtype=torch.int32), (1, 0)) if term.axis == "diagonal" else values

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def tiles(self, axis: str, block: int) -> Spans:
        """The spans of a row's or a column's tiles. The last one ends where the length does."""
        length = self.sizes[2 if axis == "row" else 3]
        low = torch.arange(0, length, block, dtype=torch.int32, device=self.device)
        bounds: Named = {}
        for term in self.analysis.of_axis(axis):
            for name in (term.low, term.high):
                bounds[name] = _pooled(self.values[term.low], block, name)
        return Spans(low, (low + block - 1).clamp_(max=length - 1), bounds)

    def pieces(self, axis: str, block: int) -> tuple[Spans, Tensor]:
        """Cuts tiles at each jump of a term. Also returns the number of each tile's first piece, int64
        [tiles + 1].

        Between two cuts the rules' bounds are tight. One synchronization.
        """
        length = self.sizes[2 if axis == "row" else 3]
        cut = torch.zeros(length, dtype=torch.bool, device=self.device)
        terms = self.analysis.of_axis(axis)
        for term in terms:
            cut |= _jumps(self.values[term.low])
        cut[::block] = True
        low = cut.nonzero().flatten().to(torch.int32)
        high = torch.cat([low[1:] - 1, low.new_tensor([length - 1])])
        number = (cut.cumsum(0) - 1).expand(1, 1, -1)
        bounds: Named = {}
        for term in terms:
            for name in (term.low, term.high):
                bounds[name] = _reduced(self.values[term.low], number, len(low), name)
        starts = torch.cat([number[0, 0, ::block], number.new_tensor([len(low)])])
        return Spans(low, high, bounds), starts

    def decide(self, rows: Spans, columns: Spans, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """(certain, possible), bool, for the tiles at these rows and columns.

        `rows` and `columns` come from `Spans.at`. All shapes broadcast, also with b and h (integers).
        """
        others = {"q_low": rows.low, "q_high": rows.high, "kv_low": columns.low, "kv_high": columns.high}
        for term in self.analysis.of_axis("diagonal"):
            first = rows.low - columns.high + self.sizes[3] - 1
            beyond = rows.high - columns.low + self.sizes[3]
            counts = self.values[term.low]
            count = _picked(counts, b, h, beyond) - _picked(counts, b, h, first)
            others |= {term.low: count == beyond - first, term.high: count > 0}
        others |= rows.bounds | columns.bounds
        certain, possible = evaluate(
            self.analysis.bounds, self.tensors, b=b, h=h, q_idx=rows.low, kv_idx=columns.low, others=others
        )
        return certain, possible


def _picked(bound: Tensor, b: Tensor, h: Tensor, index: Tensor) -> Tensor:
    """bound[b, h, index]; a dimension of 1 serves every b, or h."""
    batch, heads = bound.shape[:2]
    return bound[b if batch > 1 else 0, h if heads > 1 else 0, index]


def _pooled(bound: Tensor, factor: int, name: str) -> Tensor:
    """The lowest or highest of each `factor` entries in the last dimension."""
    missing = bound[..., -1:].expand(*bound.shape[:-1], -bound.shape[-1] % factor)
    runs = torch.cat([bound, missing], dim=-1).unflatten(-1, (-1, factor))
    return runs.amin(-1) if name.endswith("_low") else runs.amax(-1)


def _reduced(value: Tensor, number: Tensor, count: int, name: str) -> Tensor:
    """The lowest or highest entry of each range: `number` [1, 1, length] is an entry's range."""
    as_numbers = value.to(torch.uint8) if value.dtype == torch.bool else value
    found = as_numbers.new_zeros(*value.shape[:2], count)
    reduce = "amin" if name.endswith("_low") else "amax"
    found.scatter_reduce_(-1, number.expand(value.shape), as_numbers, reduce, include_self=False)
    return found.to(value.dtype)


def _jumps(value: Tensor) -> Tensor:
    """bool [length]: where a value [B, H, length] jumps. A jump is a step of more than 1, which leaves a gap,
    or a step that differs from the steps before and after it."""
    step = value[..., 1:].to(torch.float64) - value[..., :-1].to(torch.float64)
    changes = F.pad(step[..., 1:] != step[..., :-1], (1, 1), value=True)
    jumps = (step.abs() > 1) | ((step != 0) & changes[..., 1:] & changes[..., :-1])
    return F.pad(jumps.flatten(0, 1).any(0), (1, 0))
