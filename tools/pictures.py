"""Writes docs/pictures: the house and the pipeline as SVG, from the tables of docs/design.md.

    python tools/pictures.py

In these tables a row with a bold first cell is a group: a floor of the house, or a thing that the pipeline
makes. The rows below it are its rooms, or the steps that follow.
"""

from __future__ import annotations

import colorsys
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/design.md")
FOLDER = Path("docs/pictures")

SANS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MONO = "Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"
PAPER, FRAME, INK, GREY = "#fcfbf8", "#d8d4cb", "#22252b", "#5d636e"
# A generous average advance of a character in the fonts above, in parts of the font size.
ADVANCE = {"sans": 0.56, "mono": 0.61}


@dataclass
class Group:
    """A bold row of a table, and the rows below it up to the next one, as cells."""

    title: str
    text: str
    rows: list[list[str]] = field(default_factory=list)


def groups(page: str, section: str) -> list[Group]:
    """The table of a section: each bold row with the rows below it."""
    found: list[Group] = []
    text = page[page.index(f"\n## {section}\n") + 1 :].partition("\n## ")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0].startswith("**"):
            found.append(Group(cells[0].strip("*"), cells[1].replace("`", "")))
        elif cells and found:
            found[-1].rows.append(cells)
    return found


def rooms(group: Group) -> list[str]:
    """The rooms of a floor in order: "ir/graph" for a module, "errors/" for a folder."""
    return [name for row in group.rows for name in re.findall(r"`(.+?)(?:\.py)?`", row[0])]


def width(text: str, size: float, font: str) -> float:
    return len(text) * size * ADVANCE[font]


def wrapped(text: str, size: float, limit: float) -> list[str]:
    """Lines of sans-serif text that are at most `limit` pixels wide."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size, "sans") > limit:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def write(x: float, y: float, text: str, size: float = 12, color: str = INK, style: str = "") -> str:
    """Text with its baseline at y; `style`: "bold", "mono", "centered" (mono, about x) or none."""
    family = MONO if style in ("mono", "centered") else SANS
    more = {"bold": ' font-weight="bold"', "centered": ' text-anchor="middle"'}.get(style, "")
    place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}"'
    return f'<text {place} font-family="{family}"{more}>{escape(text)}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str, radius: float = 6) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"/>'


def arrow(*points: tuple[float, float]) -> list[str]:
    """A line with a head at its last point; its last part is horizontal or vertical."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    corners = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)]
    head = " ".join(f"{a:g},{b:g}" for a, b in corners)
    path = " ".join(f"{a:g},{b:g}" for a, b in (*points[:-1], (x - 7 * dx, y - 7 * dy)))
    return [
        f'<polyline points="{path}" fill="none" stroke="{GREY}" stroke-width="1.5"/>',
        f'<polygon points="{head}" fill="{GREY}"/>',
    ]


def tints(count: int) -> list[tuple[str, str]]:
    """A pale and a strong color for each of `count` groups, from blue to red."""

    def color(hue: float, lightness: float, saturation: float) -> str:
        return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, saturation))

    hues = [(0.6 - 0.62 * n / max(count - 1, 1)) % 1 for n in range(count)]
    return [(color(hue, 0.93, 0.5), color(hue, 0.34, 0.42)) for hue in hues]


def svg(w: float, h: float, title: str, parts: list[str]) -> str:
    """A whole file, on a background of its own, so that it can be read on light and dark pages."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" width="{w:g}" height="{h:g}">'
    paper = box(0.5, 0.5, w - 1, h - 1, PAPER, FRAME, 10)
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


# --- The house ---

HOUSE_WIDTH, EDGE, ROOMS_AT, GAP = 980, 24, 270, 22


def house(page: str) -> str:
    """Floors from top to bottom, with the rooms of each."""
    floors = groups(page, "The house")
    parts = [
        write(EDGE, 38, "The house", 20, style="bold"),
        write(
            EDGE,
            60,
            "Each box is a module or a folder. It imports only from boxes above it or before it.",
            13,
            GREY,
        ),
    ]
    y = 78.0
    for number, (floor, (pale, strong)) in enumerate(zip(floors, tints(len(floors)), strict=True)):
        duty = wrapped(floor.text, 12, ROOMS_AT - EDGE - 30)
        boxes, rows = room_boxes(rooms(floor), y + 12, strong)
        high = max(44 + 16 * len(duty), 18 + 28 * rows)
        if number:
            parts += arrow((EDGE + 30, y - GAP), (EDGE + 30, y))
        parts.append(box(EDGE, y, HOUSE_WIDTH - 2 * EDGE, high, pale, strong))
        parts.append(write(EDGE + 14, y + 26, floor.title, 15, strong, "bold"))
        parts += [write(EDGE + 14, y + 46 + 16 * n, text, 12, GREY) for n, text in enumerate(duty)]
        parts += boxes
        y += high + GAP
    return svg(HOUSE_WIDTH, y - GAP + EDGE, "The rooms of flexmod, in floors", parts)


def room_boxes(names: list[str], top: float, stroke: str) -> tuple[list[str], int]:
    """Boxes of rooms from left to right, a folder's name before the first of its rooms; how many rows."""
    parts, x, row, folder = [], float(ROOMS_AT), 0, ""
    for name in names:
        before, _, room = name.rstrip("/").rpartition("/")
        prefix = f"{before}/" if before and before != folder else ""
        label = f"{room}/" if name.endswith("/") else room
        wide = width(label, 11.5, "mono") + 14
        space = width(prefix, 11.5, "mono") + 5 if prefix else 0
        if x + space + wide > HOUSE_WIDTH - EDGE - 10:
            x, row = float(ROOMS_AT), row + 1
        y = top + 28 * row
        if prefix:
            parts.append(write(x, y + 15, prefix, 11.5, GREY, "mono"))
        parts.append(box(x + space, y, wide, 22, "#ffffff", stroke, 4))
        parts.append(write(x + space + wide / 2, y + 15, label, 11.5, INK, "centered"))
        x, folder = x + space + wide + 6, before
    return parts, row + 1


# --- The pipeline ---

PIPELINE_WIDTH, MAIN, SIDE_AT, SIDE = 1060, 722, 792, 244
STEP_TEXT_AT, STEP_FILE_AT = 132, 556


@dataclass
class Side:
    """A box at the right of a thing or a step: it feeds that one, or is fed by it."""

    beside: str
    title: str
    text: str
    feeds: bool = False


BUILDER = Side("write", "Mask builder", "bounds decide most tiles; kernels test the other ones")
BLOCK_MASK = Side("launch", "BlockMask", "ranges of tiles by row and column", feeds=True)
SIDES = (
    Side("Score, derivative and mask", "Torch evaluator", "CPU and reference backends, create_mask"),
    BUILDER,
    Side("render", "Templates, KernelSpec", "loops; dtypes, head dimensions", feeds=True),
    BLOCK_MASK,
)


def pipeline(page: str) -> str:
    """Things from top to bottom, the steps between them, and what joins them at the right."""
    parts = [
        write(EDGE, 38, "The pipeline", 20, style="bold"),
        write(
            EDGE,
            60,
            "From a Python function to a launch: boxes are things, names beside the line are steps.",
            13,
            GREY,
        ),
    ]
    ends: dict[str, tuple[float, float]] = {}  # of each thing and step: where an arrow joins it at the right
    things = groups(page, "The pipeline")
    y = 78.0
    for thing, (pale, strong) in zip(things, tints(len(things)), strict=True):
        parts.append(box(EDGE, y, MAIN - EDGE, 44, pale, strong))
        parts.append(write(EDGE + 14, y + 27, thing.title, 15, strong, "bold"))
        parts.append(write(EDGE + 22 + width(thing.title, 15, "sans") * 1.08, y + 27, thing.text, 12, GREY))
        ends[thing.title] = (MAIN, y + 22)
        y += 44
        if thing.rows:
            end = y + 20 + 28 * len(thing.rows)
            parts += arrow((EDGE + 20, y), (EDGE + 20, end))
            for number, (name, text, file) in enumerate(thing.rows):
                file = file.strip("`")
                below = y + 24 + 28 * number
                parts += step(name, text, file, below, strong)
                ends[name] = (STEP_FILE_AT + width(file, 11, "mono") + 8, below - 4)
            y = end
    return svg(PIPELINE_WIDTH, y + EDGE, "From a Python function to a launch", parts + side_boxes(ends))


def step(name: str, text: str, file: str, y: float, color: str) -> list[str]:
    text = text.replace("`", "")
    assert len(wrapped(text, 12, STEP_FILE_AT - STEP_TEXT_AT)) == 1, f"too long for a line: {text}"
    return [
        f'<circle cx="{EDGE + 20}" cy="{y - 4:g}" r="4" fill="{color}"/>',
        write(EDGE + 36, y, name, 13, INK, "bold"),
        write(STEP_TEXT_AT, y, text, 12, INK),
        write(STEP_FILE_AT, y, file, 11, GREY, "mono"),
    ]


def side_boxes(ends: dict[str, tuple[float, float]]) -> list[str]:
    parts = []
    for side in SIDES:
        x, y = ends[side.beside]
        wide = SIDE if side in (BUILDER, BLOCK_MASK) else SIDE - 30  # one arrow goes down at the right
        lines = wrapped(side.text, 11.5, wide - 16)
        high = 30 + 15 * len(lines)
        parts.append(box(SIDE_AT, y - 22, wide, high, "#ffffff", GREY))
        parts.append(write(SIDE_AT + 10, y - 2, side.title, 13, INK, "bold"))
        parts += [write(SIDE_AT + 10, y + 15 + 15 * n, text, 11.5, GREY) for n, text in enumerate(lines)]
        parts += arrow((SIDE_AT, y), (x, y)) if side.feeds else arrow((x, y), (SIDE_AT, y))
        if side is BUILDER:
            down = SIDE_AT + SIDE - 14
            parts += arrow((down, y - 22 + high), (down, ends[BLOCK_MASK.beside][1] - 22))
    return parts


def files() -> dict[Path, str]:
    page = (ROOT / PAGE).read_text()
    return {FOLDER / "house.svg": house(page), FOLDER / "pipeline.svg": pipeline(page)}


def main() -> None:
    for path, text in files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
