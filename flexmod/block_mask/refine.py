"""Finds the kind of each tile of a mask in torch, from coarse to fine: the builder's path for the CPU.

        squares     decides squares of SIDE x SIDE tiles by the bounds of the mask
        tiles       decides the tiles of open squares by their bounds
        samples     evaluates a few elements of each open tile: with kept and masked ones it is partial
        pieces      cuts each open tile where the mask's inputs jump, and decides by the pieces' bounds
        elements    evaluates some more elements of each open tile, then all of them

So the work grows with the boundary of the mask. No step stores more than AT_ONCE numbers of a kind.

`Axes` decides tiles by the bounds of their mask:

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

from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, keep_padding_partial
from flexmod.ir.evaluate import evaluate
from flexmod.ir.intervals import Analysis, BoundsTerm, analyze
from flexmod.ir.trace import Traced
from flexmod.runtime.tensor_kinds import no_autocast

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
        queries, keys = self.sizes[2:]
        ranges = {
            "row": ((0, queries), (0, 1)),
            "column": ((0, 1), (0, keys)),
            "diagonal": ((1 - keys, queries), (0, 1)),
        }
        q, kv = (torch.arange(*r, dtype=torch.int32, device=self.device) for r in ranges[term.axis])
        b, h = map(self._numbers, term.graph.groups(self.sizes))
        (values,) = evaluate(term.graph, self.tensors, b=b[:, None, None], h=h[:, None], q_idx=q, kv_idx=kv)
        values = values.expand(len(b), len(h), max(len(q), len(kv)))
        return F.pad(values.cumsum(-1, dtype=torch.int32), (1, 0)) if term.axis == "diagonal" else values

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def tiles(self, axis: str, block: int) -> Spans:
        """The spans of a row's or a column's tiles. The last one ends where the length does."""
        length = self.sizes[2 if axis == "row" else 3]
        low = torch.arange(0, length, block, dtype=torch.int32, device=self.device)
        bounds = {name: _pooled(values, block, name) for name, values in self._values_of(axis)}
        return Spans(low, (low + block - 1).clamp_(max=length - 1), bounds)

    def _values_of(self, axis: str) -> list[tuple[str, Tensor]]:
        """The values of an axis's terms, by the name of each lower and each upper bound."""
        terms = self.analysis.of_axis(axis)
        return [(name, self.values[term.low]) for term in terms for name in (term.low, term.high)]

    def pieces(self, axis: str, block: int) -> tuple[Spans, Tensor]:
        """Cuts tiles at each jump of a term. Also returns the number of each tile's first piece, int64
        [tiles + 1].

        Between two cuts the rules' bounds are tight. One synchronization.
        """
        length = self.sizes[2 if axis == "row" else 3]
        cut = torch.zeros(length, dtype=torch.bool, device=self.device)
        for term in self.analysis.of_axis(axis):
            cut |= _jumps(self.values[term.low])
        cut[::block] = True
        low = cut.nonzero().flatten().to(torch.int32)
        high = torch.cat([low[1:] - 1, low.new_tensor([length - 1])])
        number = (cut.cumsum(0) - 1).expand(1, 1, -1)
        bounds = {name: _reduced(values, number, len(low), name) for name, values in self._values_of(axis)}
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
            self.analysis.bounds, self.tensors,
            b=b, h=h, q_idx=rows.low, kv_idx=columns.low, **others,  # type: ignore[arg-type]
        )  # fmt: skip
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


OPEN = 3
# Side of a square, in tiles; sides of a tile's samples, in elements: first, and before all elements.
SIDE = 32
SAMPLES = 4, 16
AT_ONCE = 1 << 20
# Most pairs of pieces in a tile: with many more, its elements are as cheap.
PIECES = 64


def classify(traced: Traced, sizes: Sizes, block: tuple[int, int], device: torch.device) -> Tensor:
    """The kind of each tile, EMPTY, PARTIAL or FULL: int8 [B or 1, H or 1, Qb, KVb].

    `sizes` is (B, H, Q_LEN, KV_LEN), and `traced` is fitted to them. A dimension is 1 if the graph does not
    read b, or h.
    """
    with no_autocast(device.type):
        refined = Refined(traced, sizes, block, device)
        refined.by_bounds()
        refined.by_closer_looks()
    return keep_padding_partial(refined.table, sizes[2:], block)


def finish(traced: Traced, sizes: Sizes, block: tuple[int, int], table: Tensor) -> Tensor:
    """Decides the OPEN tiles of a table, int8 [B or 1, H or 1, Qb, KVb]. Arguments as for `classify`.

    If most tiles are open, it decides all tiles again, from coarse to fine.
    """
    is_open = table == OPEN
    if 2 * int(is_open.sum()) > table.numel():
        return classify(traced, sizes, block, table.device)
    with no_autocast(table.device.type):
        refined = Refined(traced, sizes, block, table.device)
        apart = [max(pair) for pair in zip(table.shape, refined.shape, strict=True)]
        refined.table = table.expand(apart).clone()
        refined.open = (refined.table == OPEN).nonzero()
        refined.run_on_open()
    return refined.table


class Refined:
    """The state between steps: `table` int8 [B or 1, H or 1, Qb, KVb] is the kind of each tile so far.

    `open` int64 [n, 4] has b, h, row and column of the OPEN tiles.
    """

    def __init__(
        self, traced: Traced, sizes: Sizes, block: tuple[int, int], device: torch.device
    ) -> None:
        self.traced = traced
        self.block = min(block[0], sizes[2]), min(block[1], sizes[3])
        self.axes = Axes(analyze(traced.graph, sizes), traced.tensors, sizes, device)
        self.rows = self.axes.tiles("row", self.block[0])
        self.columns = self.axes.tiles("column", self.block[1])
        self.shape = *traced.graph.groups(sizes), len(self.rows), len(self.columns)
        self.open = torch.empty(0, 4, dtype=torch.int64, device=device)

    def run_on_open(self) -> None:
        """Runs the steps for tiles on the open tiles."""
        portions = self.open.split(AT_ONCE)
        left = [self._settle(at, self._decided(self.rows, self.columns, at)) for at in portions]
        self.open = torch.cat(left)
        self.by_closer_looks()

    def by_closer_looks(self) -> None:
        self.by_samples(SAMPLES[0])
        self.by_pieces()
        self.by_samples(SAMPLES[1])
        self.by_elements()

    def by_bounds(self) -> None:
        """Decides squares of tiles, then the tiles of open squares."""
        down, across = self.rows.coarser(SIDE), self.columns.coarser(SIDE)
        shape = (*self.shape[:2], len(down), len(across))
        places = torch.cartesian_prod(*(torch.arange(n, device=self.axes.device) for n in shape))
        squares = torch.cat([self._decided(down, across, at) for at in places.split(AT_ONCE)])
        self.table = _spread(squares.view(shape), self.shape)
        inside = torch.cartesian_prod(*(torch.arange(SIDE, device=self.axes.device),) * 2)
        left = []
        for at in places[squares == OPEN].split(max(1, AT_ONCE // SIDE**2)):
            tile = at[:, 2:, None] * SIDE + inside.T  # [n, 2, SIDE * SIDE]
            at = torch.cat([at[:, :2, None].expand(-1, -1, SIDE**2), tile], 1).movedim(1, 2).flatten(0, 1)
            at = at[(at[:, 2] < self.shape[2]) & (at[:, 3] < self.shape[3])]
            left.append(self._settle(at, self._decided(self.rows, self.columns, at)))
        self.open = torch.cat([self.open, *left])

    def by_samples(self, side: int) -> None:
        """Evaluates `side` x `side` elements of each open tile. They can only prove that it is partial."""
        left = [self.open[:0]]
        for at in self.open.split(max(1, AT_ONCE // side**2)):
            kept = self._kept(at, side, side)
            mixed = kept.any(-1) & ~kept.all(-1)
            left.append(self._settle(at, torch.where(mixed, PARTIAL, OPEN)))
        self.open = torch.cat(left)

    def by_pieces(self) -> None:
        """Decides open tiles by each pair of their pieces."""
        if not len(self.open) or not self.axes.analysis.terms:
            return
        rows, first_row = self.axes.pieces("row", self.block[0])
        columns, first_column = self.axes.pieces("column", self.block[1])
        _, _, row, column = self.open.unbind(1)
        across = first_column.diff()[column]
        number = first_row.diff()[row] * across
        few = number <= PIECES
        left = [self.open[~few]]
        for at in self.open[few].split(max(1, AT_ONCE // PIECES)):
            b, h, row, column = at.unbind(1)
            across = first_column.diff()[column]
            number = first_row.diff()[row] * across
            of = torch.repeat_interleave(torch.arange(len(at), device=at.device), number)
            pair = torch.arange(len(of), device=at.device) - (number.cumsum(0) - number)[of]
            piece_row = first_row[row[of]] + pair // across[of]
            piece_column = first_column[column[of]] + pair % across[of]
            pieces = torch.stack([b[of], h[of], piece_row, piece_column], 1)
            kinds = self._decided(rows, columns, pieces)
            counts = [
                at.new_zeros(len(at)).index_add_(0, of, (kinds == kind).long()) for kind in (EMPTY, FULL)
            ]
            mixed = torch.where((counts[0] > 0) & (counts[1] > 0), PARTIAL, OPEN)
            known = torch.where(counts[1] == number, FULL, mixed)
            left.append(self._settle(at, torch.where(counts[0] == number, EMPTY, known)))
        self.open = torch.cat(left)

    def by_elements(self) -> None:
        """Decides open tiles by each of their elements."""
        rows, columns = self.block
        height, width = max(1, min(rows, AT_ONCE // columns)), min(columns, AT_ONCE)
        for at in self.open.split(max(1, AT_ONCE // (rows * columns))):
            some = torch.zeros(len(at), dtype=torch.bool, device=at.device)
            every = ~some
            for row in range(0, rows, height):
                for column in range(0, columns, width):
                    kept = self._kept(at, height, width, (row, column))
                    some |= kept.any(-1)
                    every &= kept.all(-1)
            self._settle(at, torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)))
        self.open = self.open[:0]

    def _decided(self, rows: Spans, columns: Spans, at: Tensor) -> Tensor:
        """EMPTY, FULL or OPEN, int64 [n], for places `at` [n, 4] among rows and columns."""
        b, h, row, column = at.unbind(1)
        certain, possible = self.axes.decide(rows.at(b, h, row), columns.at(b, h, column), b, h)
        return torch.where(certain, FULL, torch.where(possible, OPEN, EMPTY)).expand(len(at))

    def _settle(self, at: Tensor, kinds: Tensor) -> Tensor:
        """Writes the kinds of the tiles `at`, and returns the open tiles among them."""
        b, h, row, column = at.unbind(1)
        self.table[b, h, row, column] = kinds.to(torch.int8)
        return at[kinds == OPEN]

    def _kept(self, at: Tensor, height: int, width: int, start: tuple[int, int] | None = None) -> Tensor:
        """bool [n, height * width]: elements of the tiles `at`, from `start` on, or spread over each tile."""
        b, h, row, column = (index[:, None, None] for index in at.unbind(1))
        q_idx = self._positions(self.rows, row, height, start and start[0])
        kv_idx = self._positions(self.columns, column, width, start and start[1]).mT
        (kept,) = evaluate(
            self.traced.graph, self.traced.tensors, b=b.int(), h=h.int(), q_idx=q_idx, kv_idx=kv_idx
        )
        return kept.expand(len(at), height, width).flatten(1)

    def _positions(self, spans: Spans, tile: Tensor, count: int, start: int | None) -> Tensor:
        """Positions in tiles, int32 [n, count, 1]. Past a tile's end, its last position repeats."""
        low, high = spans.low[tile], spans.high[tile]
        steps = torch.arange(count, dtype=torch.int32, device=low.device)[:, None]
        if start is None:
            return low + (high - low) * steps // max(1, count - 1)
        return torch.minimum(low + start + steps, high)


def _spread(squares: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """int8 of `shape`: gives each tile the kind of its square [B, H, squares down, across]."""
    rows = squares.to(torch.int8).repeat_interleave(SIDE, 2)[:, :, : shape[2]]
    return rows.repeat_interleave(SIDE, 3)[..., : shape[3]].contiguous()
