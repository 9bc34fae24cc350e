"""The pictures of docs/design.md are what tools/pictures.py draws from the page's tables."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from flexmod.codegen import compiler
from tools import pictures
from tools.pictures import groups

FILES = pictures.files()
PAGE = (pictures.ROOT / pictures.PAGE).read_text()
SVG = "{http://www.w3.org/2000/svg}"
Rectangle = tuple[float, float, float, float]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_what_the_tool_writes(path: Path) -> None:
    """If the tables of docs/design.md are right: python tools/pictures.py."""
    assert (pictures.ROOT / path).read_text() == FILES[path]
    assert f"({path.relative_to('docs')})" in PAGE, "the page shows it"


def test_no_file_is_left_over() -> None:
    folder = pictures.ROOT / pictures.FOLDER
    assert {path.relative_to(pictures.ROOT) for path in folder.iterdir()} == set(FILES)


def test_steps_are_those_of_the_compiler() -> None:
    """The compiler's docstring names each step; the plan and the launch come after it."""
    steps = re.findall(r"^    (\w+)  ", compiler.__doc__ or "", re.MULTILINE)
    drawn = [row[0] for thing in groups(PAGE, "The pipeline") for row in thing.rows]
    assert drawn == [*steps, "plan", "launch"]


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in xml.fromstring(FILES[path]).iter(f"{SVG}text")]


def test_the_house_shows_every_room() -> None:
    drawn = texts(pictures.FOLDER / "house.svg")
    for floor in groups(PAGE, "The house"):
        assert floor.title in drawn
        for room in pictures.rooms(floor):
            assert re.sub(r"^.*/(?=.)", "", room) in drawn


def inside(inner: Rectangle, outer: Rectangle) -> bool:
    x, y, w, h = inner
    left, top, wide, high = outer
    return left <= x and top <= y and x + w <= left + wide and y + h <= top + high


def apart(one: Rectangle, other: Rectangle) -> bool:
    (x, y, w, h), (left, top, wide, high) = one, other
    return x + w <= left or left + wide <= x or y + h <= top or top + high <= y


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_boxes_do_not_overlap(path: Path) -> None:
    """Two boxes are apart, or one contains the other."""
    boxes: list[Rectangle] = [
        (float(e.get("x")), float(e.get("y")), float(e.get("width")), float(e.get("height")))
        for e in xml.fromstring(FILES[path]).iter(f"{SVG}rect")
    ]
    assert len(boxes) > 8
    for one, other in itertools.combinations(boxes, 2):
        assert apart(one, other) or inside(one, other) or inside(other, one), (one, other)


def test_a_table_is_read_by_groups() -> None:
    page = """
## Other

| `c.py` | z |

## Here

| a | b |
|---|---|
| **One** | two |
| `a.py`, `d/e.py` | x |
| `b/` | y |

## Last
"""
    (one,) = groups(page, "Here")
    assert (one.title, one.text, [row[1] for row in one.rows]) == ("One", "two", ["x", "y"])
    assert pictures.rooms(one) == ["a", "d/e", "b/"]
