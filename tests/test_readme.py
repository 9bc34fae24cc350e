"""The pages say what is so: their Python runs, from top to bottom of each, and their lists are the code's.

A block "output" right below a block of Python is what that prints, with paths from the repository's root.
`--update-golden` writes these; twice, where lines that an output quotes have moved.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from table_walk import DIFFERENCES

from flexmod import masks
from flexmod.backends.options import OPTIONS
from flexmod.ir.formulas import CASTS, COMPOSED, FILLS
from flexmod.ir.ops import OPS, Op
from flexmod.runtime import config

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n\n```(?:python )?output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [
    pytest.param(page, marks=[pytest.mark.long] * (page.parent.name == "recipes"), id=page.name)
    for page in PAGES
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_blocks_run(page: Path, request: pytest.FixtureRequest) -> None:
    """tests/test_recipes.py runs the code of recipes too, in the quick tests."""
    text = page.read_text()
    names: dict[str, object] = {"__name__": page.stem}
    outputs = []
    for match in BLOCK.finditer(text):
        # Blank lines above give a block its own line numbers in a traceback.
        lines_above = text.count("\n", 0, match.start(1))
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * lines_above + match[1], str(page), "exec"), names)
        shown = OUTPUT.match(text, match.end())
        if shown is not None:
            lines = printed.getvalue().replace(f"{ROOT}/", "").splitlines()
            outputs.append((shown, "".join(line.rstrip() + "\n" for line in lines)))
    if request.config.getoption("--update-golden"):
        for shown, output in reversed(outputs):
            text = text[: shown.start(1)] + output + text[shown.end(1) :]
        page.write_text(text)
        return
    for shown, output in outputs:
        assert output == shown[1], f"{page} differs; if the new text is right: pytest --update-golden"


def test_the_picture_of_the_readme_shows_its_example(request: pytest.FixtureRequest) -> None:
    """`pytest tests/test_readme.py --update-golden` draws it."""
    names: dict[str, object] = {}
    example = BLOCK.search((ROOT / "README.md").read_text())
    assert example is not None
    exec(example[1], names)
    drawn = names["block_mask"].to_svg()  # type: ignore[attr-defined]
    picture = ROOT / "docs" / "images" / "readme_mask.svg"
    if request.config.getoption("--update-golden"):
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(drawn)
    assert picture.read_text() == drawn


def first_column(page: str) -> set[str]:
    """What stands in backquotes in the first column of the tables of a page in docs, or of a section."""
    page, _, section = page.partition("#")
    text = (ROOT / "docs" / page).read_text()
    lines = text[text.index(f"## {section}") if section else 0 :].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    return {name for cell in cells for name in re.findall("`(.+?)`", cell)}


def test_every_kernel_option_is_documented() -> None:
    assert first_column("kernel_options.md") == set(OPTIONS)


def test_every_switch_is_documented() -> None:
    switches = {config.DEBUG, config.CACHE_DIR, config.CHECK_BOUNDS, config.COMPILE_THREADS}
    assert first_column("debugging.md#Settings") == switches


def test_every_mask_is_documented() -> None:
    assert first_column("masks.md") == set(masks.__all__) - {"Mask", "MaskMod"}


def line_of(row: Op) -> str:
    """An operation as docs/operations.md shows it."""
    kinds = [kind for kind in ("bool", "int", "float") if isinstance(row.triton, str) or kind in row.triton]
    return f"| `{row.name}` | {in_backquotes(row.torch_names)} | {', '.join(kinds)} |"


def in_backquotes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_every_operation_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("## Made of these")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    assert lines == [line_of(row) for row in OPS.values()]
    for names in (COMPOSED, CASTS, FILLS):
        assert in_backquotes(names) in text
    assert all(row.derivative for row in OPS.values()), "the page says that each has one"


def test_every_difference_from_torch_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for difference in DIFFERENCES:
        assert f"| {in_backquotes(difference.rows)} | {difference.reason} | {difference.place} |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)|<img src=\"([^\"]+)", prose):
        assert (page.parent / "".join(target)).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        target = page.parent / file if file else page
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
        assert anchor in anchors, (page, file, anchor)


def test_times_are_those_that_were_measured() -> None:
    """Each row of times in the README begins one of docs/measurements.md."""
    measured = (ROOT / "docs" / "measurements.md").read_text().splitlines()
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(r"\d / \d", line)]
    assert rows and all(any(line.startswith(row) for line in measured) for row in rows)
