"""The Python of README.md and of the pages in docs runs, from top to bottom of each page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexmod import config
from flexmod.kernel_options import OPTIONS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_blocks_run(page: Path) -> None:
    text = page.read_text()
    names: dict[str, object] = {"__name__": page.stem}
    for match in BLOCK.finditer(text):
        # Blank lines above give a block its own line numbers in a traceback.
        lines_above = text.count("\n", 0, match.start(1))
        exec(compile("\n" * lines_above + match[1], str(page), "exec"), names)


def first_column(page: str) -> set[str]:
    """What stands in backquotes in the first column of the tables of a page in docs."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    return {name for cell in cells for name in re.findall("`(.+?)`", cell)}


def test_every_kernel_option_is_documented() -> None:
    assert first_column("kernel_options.md") == set(OPTIONS)


def test_every_switch_is_documented() -> None:
    assert first_column("environment.md") == {config.DEBUG, config.CACHE_DIR}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
