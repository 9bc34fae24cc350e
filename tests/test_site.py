"""The site: its navigation has every page, its links lead somewhere, its generated pages are up to date.

`make docs` builds it strictly, with mkdocs. These tests do not need mkdocs.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

import pytest
import yaml

from flexmod import errors
from tools import error_pages, recipes, site_hooks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)")


def named(entries: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            (value,) = entry.values()
            yield from named(value if isinstance(value, list) else [value])


def text_of(page: str) -> str:
    """A page as mkdocs reads it."""
    generated = page in site_hooks.GENERATED
    return site_hooks.for_site(site_hooks.text_of(page) if generated else (DOCS / page).read_text(), page)


def anchors(page: str) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return {site_hooks.anchor(title) for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def test_the_navigation_names_every_page_once() -> None:
    assert sorted(named(SITE["nav"])) == sorted([*PAGES, *site_hooks.GENERATED])


@pytest.mark.parametrize("page", [*PAGES, *site_hooks.GENERATED])
def test_links_lead_to_pages_of_the_site(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for linked, shown in LINK.findall(prose):
        link = linked or shown
        if re.match(r"https?:", link):
            assert linked, f"{page} shows a picture of another host"
            continue
        file, _, anchor = link.partition("#")
        target = normpath(f"{dirname(page) or '.'}/{file}") if file else page
        made = target in site_hooks.GENERATED or target in site_hooks.pictures()
        assert made or (DOCS / target).is_file(), (page, link)
        assert not anchor or anchor in anchors(target), (page, link)


def test_docstrings_that_pages_show_exist() -> None:
    shown = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", text_of(page), re.MULTILINE)]
    assert shown and all(pkgutil.resolve_name(name).__doc__ for name in shown)


def test_nothing_comes_from_another_host() -> None:
    assert SITE["theme"]["font"] is False
    assert not re.search(r"https?://|//cdn", (ROOT / "mkdocs.yml").read_text())
    assert "url(" not in (DOCS / "stylesheets" / "site.css").read_text()
    polyfills = SITE["extra"]["polyfills"]
    assert "offline" in SITE["plugins"] and all((DOCS / script).is_file() for script in polyfills)
    assert any("iframe-worker" in script for script in polyfills)  # or the offline plugin adds a remote one


def test_errors_are_those_of_the_tables() -> None:
    """If the tables are right: python tools/error_pages.py."""
    page = (ROOT / error_pages.PAGE).read_text()
    assert page == error_pages.page()
    classes = set(errors.__all__) - {"FlexmodError", "Where"}
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == classes


@pytest.mark.parametrize("page", ["index", "quickstart"])
def test_the_picture_of_a_page_shows_its_mask(page: str, request: pytest.FixtureRequest) -> None:
    """`pytest tests/test_site.py --update-golden` draws it."""
    drawn = recipes.run(DOCS / f"{page}.md")["block_mask"].to_svg()
    picture = DOCS / "images" / f"{page}.svg"
    if request.config.getoption("--update-golden"):
        picture.write_text(drawn)
    assert picture.read_text() == drawn


@pytest.mark.parametrize(
    ("written", "page", "read"),
    [
        ("[a](../examples/causal.py)", "concepts.md", "[a](examples/index.md#causalpy)"),
        ("[a](../examples/mod_to_kernel.ipynb)", "concepts.md", "[a](examples/mod_to_kernel.md)"),
        ("[a](docs/design.md#rooms)", "contributing.md", "[a](design.md#rooms)"),
        ("[a](../CONTRIBUTING.md)", "testing.md", "[a](contributing.md)"),
        ("[a](../masks.md)", "reference/masks.md", "[a](../masks.md)"),
        ("[a](https://a.org/b)", "masks.md", "[a](https://a.org/b)"),
        ("```python output", "masks.md", "```text"),
        ("```output\n9.00% of all pairs\n```", "masks.md", "``` { .text .wrap }\n9.00% of all pairs\n```"),
        ("```console numbers", "masks.md", "```console"),
        (r"| `a \| b` |", "masks.md", "| `a | b` |"),
    ],
)
def test_a_page_is_rewritten_for_the_site(written: str, page: str, read: str) -> None:
    assert site_hooks.for_site(written, page) == read
