"""The reference says what is so: pages as tools/reference.py writes them, pictures as the calls make them.

tests/test_readme.py runs the examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexmod import apply_sink, masks, mods, nested_attention, varlen_attention
from tools import reference

LIBRARY: list[Callable[..., Any]] = [
    function
    for library in (masks, mods)
    for function in (getattr(library, name) for name in library.__all__)
    if inspect.isfunction(function)
]
CALLS = [apply_sink, nested_attention, varlen_attention]
WITHOUT_A_PICTURE = {"alibi_slopes", "morton_order", "tile_order"}
FILES = reference.files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_what_the_tool_writes(path: Path) -> None:
    """If the docstrings are right: python tools/reference.py."""
    assert (reference.ROOT / path).read_text() == FILES[path]
    assert path.suffix == ".md" or len(FILES[path]) < 10_000


def test_no_file_is_left_over() -> None:
    folder = reference.ROOT / reference.FOLDER
    assert {path.relative_to(reference.ROOT) for path in folder.rglob("*.*")} == set(FILES)


@pytest.mark.parametrize("function", LIBRARY, ids=lambda function: function.__name__)
def test_pictures_are_true(function: Callable[..., Any]) -> None:
    pictures = list(reference.pictures(function))
    assert bool(pictures) == (function.__name__ not in WITHOUT_A_PICTURE)
    for picture in pictures:
        assert f".{function.__name__}(" in picture.call or function is masks.reordered
        assert picture.lines == reference.characters(picture), picture.call


@pytest.mark.parametrize("function", [*LIBRARY, *CALLS], ids=lambda function: function.__name__)
def test_docstrings_are_whole(function: Callable[..., Any]) -> None:
    """A source, and an example of a few lines."""
    kinds = dict(reference.blocks(function))
    assert len(kinds["example"].splitlines()) <= 5
    assert "Source: " in inspect.getdoc(function) or function is varlen_attention
    assert not function.__annotations__ or function.__annotations__["return"]
