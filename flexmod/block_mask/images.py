"""The picture of a block mask as an image: SVG of its own making, or matplotlib's.

One color is what full tiles keep, which no kernel looks at twice, another what partial tiles keep; pale is
what partial tiles compute and then mask. Where there are few positions each element is drawn.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from flexmod.block_mask.cells import (
    EMPTY_COLOR,
    FULL_COLOR,
    KEPT_COLOR,
    MASKED_COLOR,
    Cells,
    Color,
    cells,
    tokens,
)
from flexmod.errors import MissingMatplotlib

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask

# Positions on the longer axis up to which elements are drawn; cells on an axis beyond.
ELEMENTS = {"svg": 128, "plot": 1024}
CELLS = {"svg": 96, "plot": 768}
LEGEND = (
    ("kept, full tile", FULL_COLOR),
    ("kept, partial tile", KEPT_COLOR),
    ("masked, partial tile", MASKED_COLOR),
)
GRID_COLOR: Color = (190, 190, 190)
# of an SVG, in its own units
SIDE, LEFT, TOP, FONT = 480.0, 64.0, 40.0, 12


def svg(mask: BlockMask) -> str:
    """A mask of one batch and one head as the text of an SVG file."""
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


def plot(mask: BlockMask, target: Any = None) -> Any:
    """Draws a mask of one batch and one head with matplotlib, into `target`: the name of a file, axes, or
    None for a new figure. Returns the axes. Raises MissingMatplotlib.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingMatplotlib() from error
    to_file = isinstance(target, (str, os.PathLike))
    figure: Any = None
    if target is None or to_file:  # a figure for a file is none of pyplot's, which would keep and show it
        height = 1.4 + 5.2 * mask.seq_lengths[0] / mask.seq_lengths[1]
        inches = (6.0, min(max(height, 2.8), 9.0))
        figure = (Figure if to_file else pyplot.figure)(figsize=inches, layout="constrained")
    axes = target if figure is None else figure.subplots()
    drawn = _drawn(mask, "plot")
    queries, keys = mask.seq_lengths
    rows, columns = drawn.area.shape
    # the last cells reach over the end; the axes end with the lengths
    extent = (-0.5, columns * drawn.step[1] - 0.5, rows * drawn.step[0] - 0.5, -0.5)
    axes.imshow(drawn.colors().numpy(), extent=extent, interpolation="nearest", aspect="equal")
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


def title(mask: BlockMask) -> str:
    """The name of the mask_mod, the lengths, and how much is not looked at."""
    name = getattr(mask.mask_mod, "__name__", type(mask.mask_mod).__name__)
    lengths, block = mask.seq_lengths, mask.BLOCK_SIZE
    return (
        f"{name}, {lengths[0]} x {lengths[1]}, tiles {block[0]} x {block[1]}, sparsity {mask.sparsity():.2f}%"
    )


def _drawn(mask: BlockMask, kind: str) -> Cells:
    if max(mask.seq_lengths) <= ELEMENTS[kind]:
        return tokens(mask)
    return cells(mask, (CELLS[kind], CELLS[kind]))


def _rectangles(drawn: Cells, lengths: tuple[int, int]) -> list[str]:
    """Stretches of a row that have one color, as one rectangle each, a path for each color; in positions. The
    ground is white.
    """
    paths: dict[Color, list[str]] = {}
    for row, colors in enumerate(drawn.colors().tolist()):
        column, top = 0, row * drawn.step[0]
        height = min(drawn.step[0], lengths[0] - top)
        for color, same in itertools.groupby(map(tuple, colors)):
            left = column * drawn.step[1]
            column += len(list(same))
            width = min(column * drawn.step[1], lengths[1]) - left
            if color != EMPTY_COLOR:
                paths.setdefault(color, []).append(f"M{left} {top}h{width}v{height}h-{width}z")
    return [f'<path fill="{_hex(color)}" d="{"".join(path)}"/>' for color, path in paths.items()]


def _lines(mask: BlockMask, scale: float) -> list[str]:
    """The edges of tiles."""
    (queries, keys), (rows, columns) = mask.seq_lengths, mask.BLOCK_SIZE
    down = [f"M0 {edge * scale:.2f}H{keys * scale:.2f}" for edge in range(rows, queries, rows)]
    across = [f"M{edge * scale:.2f} 0V{queries * scale:.2f}" for edge in range(columns, keys, columns)]
    return [f'<path d="{"".join(down + across)}" stroke="{_hex(GRID_COLOR)}" fill="none"/>']


def _labels(mask: BlockMask, height: float, width: float) -> list[str]:
    """The ends of both axes, their names, and what the colors mean."""
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
