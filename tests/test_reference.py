"""The reference says what is so: pages as tools/reference.py writes them, pictures as the calls make them.

tests/test_readme.py runs the examples.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flexmod
from flexmod import errors, masks, mods
from flexmod.errors import base
from tools import reference

LIBRARY: list[Callable[..., Any]] = [
    function
    for library in (masks, mods)
    for function in (getattr(library, name) for name in library.__all__)
    if inspect.isfunction(function)
]
CALLS = [getattr(flexmod, name) for name in reference.CALLS]
WITHOUT_A_PICTURE = {"alibi_slopes", "morton_order", "tile_order"}
WITHOUT_A_SOURCE = {"compile", "explain", "varlen_attention"}  # flexmod's own
FILES = reference.files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_what_the_tool_writes(path: Path) -> None:
    """If the docstrings are right: python tools/reference.py."""
    assert (reference.ROOT / path).read_text() == FILES[path]
    assert path.suffix == ".md" or len(FILES[path]) < 10_000


def test_no_file_is_left_over() -> None:
    """Only these pages are written elsewhere: errors by tools/error_pages.py, handles by hand."""
    folder = reference.ROOT / reference.FOLDER
    left = {path.relative_to(reference.ROOT) for path in folder.rglob("*.*")} - set(FILES)
    assert left == {reference.FOLDER / "errors.md", reference.FOLDER / "handles.md"}


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
    assert "Source: " in inspect.getdoc(function) or function.__name__ in WITHOUT_A_SOURCE
    assert not function.__annotations__ or function.__annotations__["return"]


@pytest.mark.parametrize("function", LIBRARY, ids=lambda function: function.__name__)
def test_arguments_are_refused_by_name(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    first = next((p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY), None)
    if first is not None:
        needed = [p for p in parameters if p.default is inspect.Parameter.empty and p is not first]
        with pytest.raises(errors.LibraryArgumentError, match=f"^{function.__name__}: "):
            function(*(object() for _ in (first, *needed)))


PUBLIC = [
    *(getattr(flexmod, name) for name in flexmod.__all__),
    *(getattr(library, name) for library in (masks, mods) for name in library.__all__),
]
CLASSES = (flexmod.BlockMask, flexmod.CompiledAttention, masks.Mask)
METHODS = [
    member
    for owner in CLASSES
    for base in owner.__mro__
    for name, member in vars(base).items()
    if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
]


def test_everything_public_says_what_it_is() -> None:
    """Each public name has a docstring, and each public method of what is public."""
    for documented in (*PUBLIC, *METHODS):
        if documented is not masks.MaskMod:
            assert documented.__doc__, documented


def test_errors_that_are_named_exist() -> None:
    """What docstrings and pages say is raised can be caught."""
    known = {name for module in (errors, base) for name in vars(module)}
    pages = [
        path.read_text()
        for path in (reference.ROOT / "docs").rglob("*.md")
        if path.name != "measurements.md"  # quotes what others raise
    ]
    docstrings = [inspect.getdoc(documented) or "" for documented in (*PUBLIC, *METHODS)]
    raised = re.compile(r"\b[A-Z]\w+(?:Error|Mismatch)\b")
    named = {name for text in (*docstrings, *pages) for name in raised.findall(text)}
    assert {"ReductionError", "HeadDimMismatch"} <= named
    assert named - known - set(dir(builtins)) == set()
