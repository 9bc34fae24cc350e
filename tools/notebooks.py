"""Executes the notebooks of examples, and turns them into pages of the site.

`pytest tests/test_examples.py --update-golden` writes their outputs.
"""

from __future__ import annotations

import ast
import io
import json
import linecache
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def write(name: str, notebook: dict[str, Any]) -> None:
    (FOLDER / f"{name}.ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, run from top to bottom as Jupyter does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = outputs_of("".join(cell["source"]), names, count)
            cell = cell | {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def outputs_of(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line if that is an expression."""
    file = f"cell {count}"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    text = printed.getvalue().replace(f"{FOLDER.parent}/", "")
    if text:
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_svg_"):
            data["image/svg+xml"] = lines(value._repr_svg_())
        outputs.append(
            {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def page(name: str) -> tuple[str, dict[str, str]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, str] = {}
    for cell in read(name)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```py\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/svg+xml" in data:
                file = f"{name}_{len(pictures) + 1}.svg"
                pictures[file] = "".join(data["image/svg+xml"])
                parts.append(f"![]({file})")
            else:
                parts.append(f"```output\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
