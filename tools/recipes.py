"""Draws the pictures of docs/recipes and writes their index, from what the pages' code makes.

    python tools/recipes.py

The code of a recipe makes these names:

    attend, dense   the recipe and its dense twin: functions of the same arguments
    inputs          arguments of both; tensors that require grad get gradients
    picture         the block mask to draw, or a bias [queries, keys] of the scores
    cost            the block mask at a real length; the index shows its facts
    calls           how many calls with such a mask the recipe makes, if not one
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flexmod import BlockMask  # noqa: E402
from tools.reference import bias_drawing  # noqa: E402

FOLDER = Path("docs/recipes")
INDEX = FOLDER / "index.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = 4
TOP = """<!-- Written by tools/recipes.py. -->

# Recipes

Variants of attention from papers, one page each: the formula, the source, the code, a picture, the cost,
and the same attention in dense torch. A test compares both in float64, with gradients.

Blue tiles are full: computed without the mask. In partial tiles, orange pairs count and pale pairs are
masked. White tiles are skipped. A bias is blue where it lowers a score.

"""
COSTS = """
## Costs

Dense attention computes all pairs and all tiles. A kernel's time follows the tiles: it computes each
listed tile whole, and tests pairs only in partial tiles. Each page states its lengths and block sizes,
and may print more cases than the one in this table.

| recipe | lengths | share of the pairs | share of the tiles |
|---|---|---|---|
"""


def recipes() -> list[Path]:
    """The pages, without the index."""
    return [path for path in sorted((ROOT / FOLDER).glob("*.md")) if path != ROOT / INDEX]


def run(page: Path) -> dict[str, Any]:
    """Executes the Python of a page from top to bottom. Returns the names that it makes."""
    names: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text()
    for match in CODE.finditer(text):
        lines_above = text.count("\n", 0, match.start(1))
        with redirect_stdout(io.StringIO()):
            exec(compile("\n" * lines_above + match[1], str(page), "exec"), names)
    return names


def title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def drawing(names: dict[str, Any]) -> str:
    picture = names["picture"]
    return picture.to_svg() if isinstance(picture, BlockMask) else bias_drawing(picture)


def gallery(pages: list[Path]) -> str:
    """A table of pictures and titles."""
    rows = ["| " * COLUMNS + "|", "|---" * COLUMNS + "|"]
    for first in range(0, len(pages), COLUMNS):
        row = pages[first : first + COLUMNS]
        cells = (f"![](pictures/{page.stem}.svg)<br>[{title(page)}]({page.name})" for page in row)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def cost_row(page: Path, cost: BlockMask, calls: int = 1) -> str:
    queries, keys = cost.seq_lengths
    times = f"{calls} x " if calls > 1 else ""
    lengths = f"{queries}" if queries == keys else f"{queries} x {keys}"
    facts = cost.facts()
    shares = f"{times}{facts.density[0]:.1%} | {times}{facts.area:.1%}"
    return f"| [{title(page)}]({page.name}) | {lengths} | {shares} |\n"


def files(made: dict[Path, dict[str, Any]]) -> dict[Path, str]:
    """Every file that this tool writes, by its path in the repository, and its text."""
    pages = list(made)
    rows = (cost_row(page, names["cost"], names.get("calls", 1)) for page, names in made.items())
    return {
        **{FOLDER / "pictures" / f"{page.stem}.svg": drawing(names) for page, names in made.items()},
        INDEX: TOP + gallery(pages) + COSTS + "".join(rows),
    }


def main() -> None:
    (ROOT / FOLDER / "pictures").mkdir(exist_ok=True)
    for path, text in files({page: run(page) for page in recipes()}).items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
