"""The picture of a block mask: one character pair a cell, one grid a (batch, head)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmod.block_mask.tiles import tile_count
from flexmod.errors import GridSizeError

SOLID, SHADED, BLANK = "█", "░", " "


def picture(
    tables: Sequence[Tensor],
    batch_shape: Sequence[int],
    grid_size: int | tuple[int, int] = (20, 20),
    limit: int = 4,
) -> str:
    """Draws tables, bool [Qb, KVb] each: the first n <= limit of the (batch, head) pairs of `batch_shape`.

    A cell stands for a rectangle of tiles, so that at most `grid_size` rows and columns are drawn (-1: one
    cell a tile). It is solid where every tile is present, blank where none is, shaded otherwise.
    """
    steps = _steps(tables[0].shape, grid_size)
    names = itertools.product(*map(range, batch_shape))
    grids = [f"{name}\n{_grid(table, steps)}" for name, table in zip(names, tables, strict=False)]
    if len(grids) < torch.Size(batch_shape).numel():
        grids.append(f"...\nThe first {limit} are shown; to_string(limit=N) draws N, mask[b, h] picks one.")
    return "\n".join(grids)


def _steps(shape: Sequence[int], grid_size: int | tuple[int, int]) -> tuple[int, int]:
    wanted = grid_size if isinstance(grid_size, tuple) else (grid_size, grid_size)
    if len(wanted) != 2 or not all(isinstance(n, int) and (n > 0 or n == -1) for n in wanted):
        raise GridSizeError(grid_size=grid_size)
    rows, columns = (
        1 if n == -1 else max(1, tile_count(size, n)) for size, n in zip(shape, wanted, strict=True)
    )
    return rows, columns


def _grid(table: Tensor, steps: tuple[int, int]) -> str:
    rows, columns = table.shape
    padding = (0, -columns % steps[1], 0, -rows % steps[0])
    present = F.max_pool2d(F.pad(table.float(), padding)[None], steps)[0]
    # the padding counts as present here: a cell at the edge is solid when all the tiles that exist are
    missing = F.max_pool2d(F.pad(1.0 - table.float(), padding)[None], steps)[0]
    cells = (present - missing).tolist()
    symbols = {1.0: SOLID, 0.0: SHADED, -1.0: BLANK}
    return "".join("".join(symbols[cell] * 2 for cell in row) + "\n" for row in cells)
