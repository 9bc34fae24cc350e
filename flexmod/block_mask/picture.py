"""The picture of a block mask as text: one character pair a cell, one grid a (batch, head).

At the default it is torch's: solid where all tiles are listed, shaded where some are, blank where none is.
Asked for density, a cell is as dark, or has the color, as what the mask keeps of its elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmod.block_mask.cells import Cells
from flexmod.block_mask.tiles import tile_count
from flexmod.errors import GridSizeError

SOLID, SHADED, BLANK = "█", "░", " "
# from the density given on, until the next: nothing, up to a third, two thirds, less than all, all
SHADES = ((1.0, "█"), (2 / 3, "▓"), (1 / 3, "▒"), (0.0, "░"))
RESET = "\x1b[0m"


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
    rows, columns = grid_of(tables[0].shape, grid_size)
    steps = tile_count(tables[0].shape[0], rows), tile_count(tables[0].shape[1], columns)
    return titled([_grid(table, steps) for table in tables], batch_shape, limit)


def titled(grids: Sequence[str], batch_shape: Sequence[int], limit: int) -> str:
    """Grids under the names of their (batch, head), and a word on how to see the others."""
    names = itertools.product(*map(range, batch_shape))
    parts = [f"{name}\n{grid}" for name, grid in zip(names, grids, strict=False)]
    if len(parts) < torch.Size(batch_shape).numel():
        parts.append(f"...\nThe first {limit} are shown; to_string(limit=N) draws N, mask[b, h] picks one.")
    return "\n".join(parts)


def by_density(cells: Cells, color: bool) -> str:
    """Cells as shades, or as colors of a terminal that has 24 bits of them."""
    if not color:
        return "".join("".join(_shade(x) * 2 for x in row) + "\n" for row in cells.density().tolist())
    lines = []
    for row in cells.colors().tolist():
        runs = ((rgb, len(list(same))) for rgb, same in itertools.groupby(row))
        lines.append("".join(f"\x1b[48;2;{r};{g};{b}m{'  ' * n}" for (r, g, b), n in runs) + RESET + "\n")
    return "".join(lines)


def grid_of(shape: Sequence[int], grid_size: int | tuple[int, int]) -> tuple[int, int]:
    """The largest numbers of rows and columns to draw. Raises GridSizeError."""
    wanted = grid_size if isinstance(grid_size, tuple) else (grid_size, grid_size)
    if len(wanted) != 2 or not all(isinstance(n, int) and (n > 0 or n == -1) for n in wanted):
        raise GridSizeError(grid_size=grid_size)
    rows, columns = (size if n == -1 else n for size, n in zip(shape, wanted, strict=True))
    return rows, columns


def _shade(density: float) -> str:
    if density == 0:
        return BLANK
    return next(shade for least, shade in SHADES if density >= least)


def _grid(table: Tensor, steps: tuple[int, int]) -> str:
    rows, columns = table.shape
    padding = (0, -columns % steps[1], 0, -rows % steps[0])
    present = F.max_pool2d(F.pad(table.float(), padding)[None], steps)[0]
    # the padding counts as present here: a cell at the edge is solid when all the tiles that exist are
    missing = F.max_pool2d(F.pad(1.0 - table.float(), padding)[None], steps)[0]
    cells = (present - missing).tolist()
    symbols = {1.0: SOLID, 0.0: SHADED, -1.0: BLANK}
    return "".join("".join(symbols[cell] * 2 for cell in row) + "\n" for row in cells)
