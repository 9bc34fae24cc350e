"""Tests that need a GPU replace names of the library: each of these names must be there.

Such a test cannot be run without a GPU, so a name that moved would show on the next card alone.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "gpu"


def replaced(text: str) -> list[tuple[str, str]]:
    """The object, as it is written, and the name of each `setattr(object, name, …)` and `patch.object(…)`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        if ast.unparse(node.func).endswith(("patch.object", "monkeypatch.setattr")):
            holder, name = node.args[:2]
            assert isinstance(name, ast.Constant), f"line {node.lineno}: the name is not a string"
            found.append((ast.unparse(holder), str(name.value)))
    return found


def imported(text: str) -> dict[str, Any]:
    """What the imports at the top of a file bind."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict[str, Any] = {}
    exec(compile(tree, "<imports>", "exec"), names)
    return names


PLACES = [
    pytest.param(path, holder, name, id=f"{path.stem}-{holder}.{name}")
    for path in sorted(FOLDER.glob("*.py"))
    for holder, name in replaced(path.read_text())
]


@pytest.mark.parametrize(("path", "holder", "name"), PLACES)
def test_names_are_there(path: Path, holder: str, name: str) -> None:
    assert hasattr(eval(holder, imported(path.read_text())), name)


def test_names_are_found() -> None:
    text = "with mock.patch.object(launch, 'choose_tile', None):\n    monkeypatch.setattr(a.b, 'c', 1)\n"
    assert replaced(text) == [("launch", "choose_tile"), ("a.b", "c")]
