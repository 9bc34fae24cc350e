"""Finds the kind of each tile of a mask in torch, from coarse to fine: the builder's path for the CPU.

        squares     decides squares of SIDE x SIDE tiles by the bounds of the mask
        tiles       decides the tiles of open squares by their bounds
        samples     evaluates a few elements of each open tile: with kept and masked ones it is partial
        pieces      cuts each open tile where the mask's inputs jump, and decides by the pieces' bounds
        elements    evaluates some more elements of each open tile, then all of them

So the work grows with the boundary of the mask. No step stores more than AT_ONCE numbers of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.block_mask.spans import Axes, Spans
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, keep_padding_partial
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS
from flexmod.ir.intervals import analyze
from flexmod.ir.trace import Traced

OPEN = 3
# Side of a square, in tiles; sides of a tile's samples, in elements: first, and before all elements.
SIDE = 32
SAMPLES = 4, 16
AT_ONCE = 1 << 20
# Most pairs of pieces in a tile: with many more, its elements are as cheap.
PIECES = 64


def classify(traced: Traced, sizes: Sequence[int], block: tuple[int, int], device: torch.device) -> Tensor:
    """The kind of each tile, EMPTY, PARTIAL or FULL: int8 [B or 1, H or 1, Qb, KVb].

    `sizes` is (B, H, Q_LEN, KV_LEN), and `traced` is fitted to them. A dimension is 1 if the graph does not
    read b, or h.
    """
    refined = Refined(traced, (sizes[0], sizes[1], sizes[2], sizes[3]), block, device)
    refined.run()
    return keep_padding_partial(refined.table, (sizes[2], sizes[3]), block)


def finish(traced: Traced, sizes: Sequence[int], block: tuple[int, int], table: Tensor) -> Tensor:
    """Decides the OPEN tiles of a table, int8 [B or 1, H or 1, Qb, KVb]. Arguments as for `classify`.

    If most tiles are open, it decides all tiles again, from coarse to fine.
    """
    is_open = table == OPEN
    if 2 * int(is_open.sum()) > table.numel():
        return classify(traced, sizes, block, table.device)
    refined = Refined(traced, (sizes[0], sizes[1], sizes[2], sizes[3]), block, table.device)
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
        self, traced: Traced, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
    ) -> None:
        self.traced = traced
        self.block = min(block[0], sizes[2]), min(block[1], sizes[3])
        self.axes = Axes(analyze(traced.graph, sizes), traced.tensors, sizes, device)
        self.rows = self.axes.tiles("row", self.block[0])
        self.columns = self.axes.tiles("column", self.block[1])
        batch, heads = (
            size if name in traced.graph.reads else 1
            for name, size in zip(POSITIONS, sizes[:2], strict=False)
        )
        self.shape = batch, heads, len(self.rows), len(self.columns)
        self.open = torch.empty(0, 4, dtype=torch.int64, device=device)

    def run(self) -> None:
        self.by_bounds()
        self.by_closer_looks()

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
            pieces = torch.stack(
                [
                    b[of],
                    h[of],
                    first_row[row[of]] + pair // across[of],
                    first_column[column[of]] + pair % across[of],
                ],
                1,
            )
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
