"""Draws a block mask: as text, as SVG, or with matplotlib.

The text has a character pair for each cell, and a grid for each (batch, head). By default it is torch's:
a cell is solid if all its tiles are listed, shaded if some are, and blank if none is. By density, a cell's
shade or color shows how many of its elements the mask keeps.

An image has one color for elements that full tiles keep, another for elements that partial tiles keep, and a
pale one for elements that partial tiles compute and then mask. With few positions, it shows each element.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmod.block_mask.combine import sliced
from flexmod.block_mask.data import MaskData
from flexmod.block_mask.facts import ON_CPU, Cells, cells, sparsity, tokens
from flexmod.block_mask.tiles import EMPTY, tile_count
from flexmod.errors import ArgumentTypeError, GridSizeError, MissingMatplotlib
from flexmod.ir.graph import as_int
from flexmod.runtime.locks import lazy_imports

SOLID, SHADED, BLANK = "█", "░", " "
# (least density, shade), the densest first
SHADES = ((1.0, "█"), (2 / 3, "▓"), (1 / 3, "▒"), (0.0, "░"))
Color = tuple[int, int, int]
# Colors of elements: kept in full tiles, kept in partial tiles, masked in partial tiles, outside of tiles.
FULL_COLOR: Color = (35, 61, 101)
KEPT_COLOR: Color = (224, 123, 0)
MASKED_COLOR: Color = (253, 236, 208)
EMPTY_COLOR: Color = (255, 255, 255)
# In a terminal, on dark and light backgrounds: full and partial tiles.
FULL_TEXT: Color = (70, 130, 210)
PARTIAL_TEXT: Color = (224, 123, 0)
# Up to this many positions on the longer axis, each element is drawn; beyond, this many cells on an axis.
ELEMENTS = {"svg": 128, "plot": 1024}
CELLS = {"svg": 96, "plot": 768}
LEGEND = (
    ("kept, full tile", FULL_COLOR),
    ("kept, partial tile", KEPT_COLOR),
    ("masked, partial tile", MASKED_COLOR),
)
GRID_COLOR: Color = (190, 190, 190)
# sizes in an SVG, in its own units
SIDE, LEFT, TOP, FONT = 480.0, 64.0, 40.0, 12


def text(
    mask: MaskData, grid_size: int | tuple[int, int], limit: int, density: bool = False, color: bool = False
) -> str:
    """Draws a mask as text; see `BlockMask.to_string`. Raises GridSizeError and ArgumentTypeError."""
    ArgumentTypeError.check_flags(density=density, color=color)
    advice = "give a number of pairs (b, h), or -1 for all"
    ArgumentTypeError.check(as_int(limit) is not None, "limit", limit, advice)
    batch_shape = mask.storage.batch
    count = math.prod(batch_shape)
    all_places = itertools.product(*map(range, batch_shape))
    places = list(itertools.islice(all_places, count if limit < 0 else limit))
    listed = (mask.table() != EMPTY).expand(*batch_shape, -1, -1)
    shape = listed.shape[-2:]
    grid = _grid_of(shape, grid_size)
    if density or color:
        grids = [_by_density(cells(sliced(mask, place) if place else mask, grid), color) for place in places]
    else:
        steps = tile_count(shape[0], grid[0]), tile_count(shape[1], grid[1])
        grids = [_grid(listed[place], steps) for place in places]
    parts = [f"{place}\n{grid}" for place, grid in zip(places, grids, strict=True)]
    if len(parts) < count:
        parts.append(f"...\nThe first {limit} are shown; to_string(limit=N) draws N, mask[b, h] picks one.")
    return "\n".join(parts)


def svg(mask: MaskData) -> str:
    """Draws a mask of one batch and one head as the text of an SVG file."""
    drawn = _drawn(mask, "svg")
    scale = SIDE / max(mask.seq_lengths)
    height, width = (n * scale for n in mask.seq_lengths)
    across, down = f"{LEFT + width + 16:.0f}", f"{TOP + height + 72:.0f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" '
        f'viewBox="0 0 {across} {down}" font-family="sans-serif" font-size="{FONT}">',
        f'<rect width="100%" height="100%" fill="{_hex(EMPTY_COLOR)}"/>',
        f'<text x="{LEFT}" y="{TOP / 2 + 4}">{escape(title(mask))}</text>',
        f'<g transform="translate({LEFT} {TOP})" shape-rendering="crispEdges">',
        f'<g transform="scale({scale:.6g})">',
        *_rectangles(drawn, mask.seq_lengths),
        "</g>",
        *(_lines(mask, scale) if drawn.step == (1, 1) else ()),
        f'<rect width="{width:.2f}" height="{height:.2f}" fill="none" stroke="#444"/>',
        "</g>",
        *_labels(mask, height, width),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def plot(mask: MaskData, target: Any = None) -> Any:
    """Draws a mask of one batch and one head with matplotlib, into `target`: the name of a file, axes, or
    None for a new figure. Returns the axes. Raises MissingMatplotlib and ArgumentTypeError.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingMatplotlib() from error
    to_file = isinstance(target, (str, os.PathLike))
    figure: Any = None
    if target is None or to_file:  # not pyplot for a file: it would keep and show the figure
        height = 1.4 + 5.2 * mask.seq_lengths[0] / mask.seq_lengths[1]
        inches = (6.0, min(max(height, 2.8), 9.0))
        figure = (Figure if to_file else pyplot.figure)(figsize=inches, layout="constrained")
    else:
        advice = "give a file's name, axes of matplotlib, or nothing for a new figure"
        ArgumentTypeError.check(hasattr(target, "imshow"), "target", target, advice)
    axes = target if figure is None else figure.subplots()
    drawn = _drawn(mask, "plot")
    queries, keys = mask.seq_lengths
    rows, columns = drawn.area.shape
    # the last cells reach past the end; the axes end with the lengths
    extent = (-0.5, columns * drawn.step[1] - 0.5, rows * drawn.step[0] - 0.5, -0.5)
    axes.imshow(colors(drawn).numpy(), extent=extent, interpolation="nearest", aspect="equal")
    axes.set_xlim(-0.5, keys - 0.5)
    axes.set_ylim(queries - 0.5, -0.5)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(title(mask), fontsize="medium")
    if drawn.step == (1, 1):
        for size, length, line in (
            (mask.BLOCK_SIZE[0], queries, axes.axhline), (mask.BLOCK_SIZE[1], keys, axes.axvline)
        ):  # fmt: skip
            for edge in range(size, length, size):
                line(edge - 0.5, color=_hex(GRID_COLOR), linewidth=0.6)
    patches = [Patch(facecolor=_hex(color), edgecolor="#444", label=label) for label, color in LEGEND]
    if figure is None:
        axes.legend(handles=patches, loc="upper right", fontsize="small")
    else:
        figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    if to_file:
        figure.savefig(target, dpi=150)
    return axes


def title(mask: MaskData) -> str:
    """The name of the mask_mod, the lengths, and the sparsity."""
    name = getattr(mask.mask_mod, "__name__", type(mask.mask_mod).__name__)
    lengths, block = mask.seq_lengths, mask.BLOCK_SIZE
    return (
        f"{name}, {lengths[0]} x {lengths[1]}, tiles {block[0]} x {block[1]}, sparsity {sparsity(mask):.2f}%"
    )


def colors(cells: Cells) -> Tensor:
    """uint8 [rows, columns, 3]: the mean color of each cell's elements."""
    masked = cells.partial - cells.kept
    parts = (cells.full, cells.kept, masked, cells.area - cells.full - cells.partial)
    mixed = torch.zeros(*cells.area.shape, 3, **ON_CPU)
    for part, color in zip(parts, (FULL_COLOR, KEPT_COLOR, MASKED_COLOR, EMPTY_COLOR), strict=True):
        mixed += (part / cells.area)[..., None] * torch.tensor(color, **ON_CPU)
    return mixed.round().to(torch.uint8)


def _by_density(cells: Cells, color: bool) -> str:
    """Cells as shades. `color` writes codes of a terminal: one for full tiles, one for cells with others."""
    shades = [[_shade(x) * 2 for x in row] for row in cells.density().tolist()]
    if not color:
        return "".join("".join(row) + "\n" for row in shades)
    with lazy_imports():
        from rich.color import Color as TextColor
        from rich.style import Style
    styles = [Style(color=TextColor.from_rgb(*rgb)) for rgb in (FULL_TEXT, PARTIAL_TEXT)]
    lines = []
    for row, partial in zip(shades, (cells.partial > 0).tolist(), strict=True):
        for (shade, which), same in itertools.groupby(zip(row, partial, strict=True)):
            text = shade * len(list(same))
            lines.append(text if text.isspace() else styles[which].render(text))
        lines.append("\n")
    return "".join(lines)


def _grid_of(shape: Sequence[int], grid_size: int | tuple[int, int]) -> tuple[int, int]:
    """The largest numbers of rows and columns to draw. Raises GridSizeError."""
    given = grid_size if isinstance(grid_size, tuple) else (grid_size, grid_size)
    wanted = [n for n in map(as_int, given) if n is not None and (n > 0 or n == -1)]
    if len(given) != 2 or len(wanted) != 2:
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
    # padding counts as listed, so that a cell at the edge is solid if all its real tiles are listed
    missing = F.max_pool2d(F.pad(1.0 - table.float(), padding)[None], steps)[0]
    cells = (present - missing).tolist()
    symbols = {1.0: SOLID, 0.0: SHADED, -1.0: BLANK}
    return "".join("".join(symbols[cell] * 2 for cell in row) + "\n" for row in cells)


def _drawn(mask: MaskData, kind: str) -> Cells:
    if max(mask.seq_lengths) <= ELEMENTS[kind]:
        return tokens(mask)
    return cells(mask, (CELLS[kind], CELLS[kind]))


def _rectangles(drawn: Cells, lengths: tuple[int, int]) -> list[str]:
    """Rectangles for stretches of one color in a row, in positions; one path for each color. The background
    is white.
    """
    paths: dict[Color, list[str]] = {}
    for row, line in enumerate(colors(drawn).tolist()):
        column, top = 0, row * drawn.step[0]
        height = min(drawn.step[0], lengths[0] - top)
        for color, same in itertools.groupby(map(tuple, line)):
            left = column * drawn.step[1]
            column += len(list(same))
            width = min(column * drawn.step[1], lengths[1]) - left
            if color != EMPTY_COLOR:
                paths.setdefault(color, []).append(f"M{left} {top}h{width}v{height}h-{width}z")
    return [f'<path fill="{_hex(color)}" d="{"".join(path)}"/>' for color, path in paths.items()]


def _lines(mask: MaskData, scale: float) -> list[str]:
    """The edges of tiles."""
    (queries, keys), (rows, columns) = mask.seq_lengths, mask.BLOCK_SIZE
    down = [f"M0 {edge * scale:.2f}H{keys * scale:.2f}" for edge in range(rows, queries, rows)]
    across = [f"M{edge * scale:.2f} 0V{queries * scale:.2f}" for edge in range(columns, keys, columns)]
    return [f'<path d="{"".join(down + across)}" stroke="{_hex(GRID_COLOR)}" fill="none"/>']


def _labels(mask: MaskData, height: float, width: float) -> list[str]:
    """The ends of both axes, their names, and a legend of the colors."""
    queries, keys = mask.seq_lengths
    middle = TOP + height / 2
    parts = [
        f'<text x="{LEFT - 6}" y="{TOP + FONT}" text-anchor="end">0</text>',
        f'<text x="{LEFT - 6}" y="{TOP + height:.0f}" text-anchor="end">{queries - 1}</text>',
        f'<text x="16" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {middle:.0f})">query</text>',
        f'<text x="{LEFT}" y="{TOP + height + 16:.0f}">0</text>',
        f'<text x="{LEFT + width:.0f}" y="{TOP + height + 16:.0f}" text-anchor="end">{keys - 1}</text>',
        f'<text x="{LEFT + width / 2:.0f}" y="{TOP + height + 16:.0f}" text-anchor="middle">key</text>',
    ]
    left = LEFT
    for label, color in LEGEND:
        top = TOP + height + 36
        parts.append(
            f'<rect x="{left}" y="{top:.0f}" width="12" height="12" fill="{_hex(color)}" stroke="#444"/>'
            f'<text x="{left + 18}" y="{top + 10:.0f}">{label}</text>'
        )
        left += 30 + 6.2 * len(label)
    return parts


def _hex(color: Color) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
