"""Tiles as runs: in each row the stretches of tiles that follow each other, partial ones and full ones apart.

    rows     int32 [..., R, 2, 3]   for the partial tiles of a row, then for its full ones: how many tiles, in
                                    how many runs, and the number of the first of these runs in `spans`
    spans    int32 [N, 2]           the first tile of a run, and the one after its last

The runs of a row follow each other in ascending order. In `spans` come the partial runs of all rows, then the
full ones, rows ascending; between those of two rows there may be places that nothing uses.

What a mask costs grows with its boundary: a causal one has two runs a row, whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, row_groups


@dataclass(frozen=True, eq=False)
class Runs:
    """The tiles of a mask in one direction: row by row, or column by column. See the head of this file."""

    rows: Tensor
    spans: Tensor

    def counts(self) -> Tensor:
        """int32 [2, ..., R]: how many partial and how many full tiles a row has."""
        return self.rows[..., 0].movedim(-1, 0)

    def table(self, columns: int) -> Tensor:
        """int8 [..., R, columns]: EMPTY, PARTIAL or FULL for each tile."""
        *lead, _, _ = self.rows.shape
        _, number, first = self.rows.reshape(-1, 2, 3).movedim(1, 0).flatten(0, 1).unbind(-1)
        rows = len(first) // 2
        here = torch.arange(len(self.spans), dtype=torch.int32, device=self.spans.device)
        # of several with the same first run, the last is the one that has runs
        owner = torch.searchsorted(first.contiguous(), here, right=True).sub_(1).clamp_(min=0)
        used = here < (first + number)[owner]
        kind = torch.where(used, owner // rows + PARTIAL, EMPTY).to(torch.int8)
        place = (owner % rows * (columns + 1))[:, None] + self.spans
        place = place.where(used[:, None], 0)
        edges = torch.zeros(rows * (columns + 1), dtype=torch.int8, device=self.spans.device)
        edges.index_add_(0, place[:, 0], kind)
        edges.index_add_(0, place[:, 1], -kind)
        table = edges.view(rows, columns + 1)
        for group in row_groups(table):
            table[group] = table[group].cumsum(-1, dtype=torch.int8)
        return table[:, :columns].view(*lead, columns)

    def to(self, device: torch.device | str) -> Runs:
        return Runs(self.rows.to(device), self.spans.to(device))


def of_table(table: Tensor) -> Runs:
    """The runs of a table int8 [..., R, C].

    Two synchronizations with its device for each four million tiles.
    """
    *lead, columns = table.shape
    flat = table.reshape(-1, columns)
    rows = torch.zeros(len(flat), 2, 3, dtype=torch.int32, device=table.device)
    spans = []
    for kind in (PARTIAL, FULL):
        for group in row_groups(flat):
            active = F.pad((flat[group] == kind).to(torch.int8), (1, 1))
            step = active[:, 1:] - active[:, :-1]
            starts, ends = (step == 1).nonzero(), (step == -1).nonzero()[:, 1]
            spans.append(torch.stack([starts[:, 1], ends], 1).to(torch.int32))
            rows[group, kind - 1, 0] = active.sum(-1, dtype=torch.int32)
            rows[group, kind - 1, 1] = (step == 1).sum(-1, dtype=torch.int32)
    number = rows[..., 1].T.flatten()
    rows[..., 2] = (number.cumsum(0) - number).view(2, -1).T
    return Runs(rows.view(*lead, 2, 3), torch.cat(spans))
