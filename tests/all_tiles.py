"""The bounds of a mask over each row of tiles with each column, as tests want them."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.block_mask.refine import Axes, Spans


def decide_all(axes: Axes, rows: Spans, columns: Spans) -> tuple[Tensor, Tensor]:
    """(certain, possible), bool [B, H, rows, columns]."""
    shape = (*axes.sizes[:2], len(rows), len(columns))
    b, h, row, column = (
        torch.arange(size, device=axes.device).view([-1 if dim == own else 1 for dim in range(4)])
        for own, size in enumerate(shape)
    )
    certain, possible = axes.decide(rows.at(b, h, row), columns.at(b, h, column), b, h)
    return certain.expand(shape), possible.expand(shape)
