"""What mkdocs calls while it builds the site of `mkdocs.yml`.

Pages are written for GitHub: they link to files outside of docs, and to titles by GitHub's anchors. Here the
examples and CONTRIBUTING.md become pages too, links follow them, and a page that loads anything from another
host fails the build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import notebooks  # noqa: E402

EXAMPLES = "examples/index.md"
NOTEBOOKS = {f"examples/{name}.md": f"examples/{name}.ipynb" for name in notebooks.NAMES}
# pages of the site that are not files of docs -> their files
GENERATED = {EXAMPLES: "examples", "contributing.md": "CONTRIBUTING.md", **NOTEBOOKS}
OUTSIDE = {"README.md": "index.md", **{file: page for page, file in GENERATED.items()}}
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
WIDE = re.compile(r"^```output$(?=[^`]*% of all pairs)", re.MULTILINE)  # facts of a mask, one long line
REMOTE = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//|<link[^>]+rel=\"(?:stylesheet|preconnect)\"[^>]+//"
)


def anchor(title: str, separator: str = "-") -> str:
    """The anchor that GitHub gives a title."""
    return re.sub(r"[^\w\- ]", "", title).lower().replace(" ", separator)


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page in GENERATED:
        files.append(File.generated(config, page, content=text_of(page)))
    for picture, text in pictures().items():
        files.append(File.generated(config, picture, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return for_site(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    found = REMOTE.search(output)
    if found is not None:
        raise ValueError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


def text_of(page: str) -> str:
    """A generated page."""
    if page == EXAMPLES:
        return examples()
    file = ROOT / GENERATED[page]
    return notebooks.page(file.stem)[0] if page in NOTEBOOKS else file.read_text()


def pictures() -> dict[str, str]:
    """The pictures of the notebooks' pages, by path."""
    made = [notebooks.page(name)[1] for name in notebooks.NAMES]
    return {f"examples/{name}": text for each in made for name, text in each.items()}


def for_site(markdown: str, page: str) -> str:
    """A page, by its path below docs, as mkdocs reads it."""
    source = GENERATED.get(page)
    folder = dirname(source or f"docs/{page}") or "."
    markdown = LINK.sub(lambda match: match[1] + target(match[2], folder, page), markdown)
    markdown = WIDE.sub("``` { .text .wrap }", markdown)
    markdown = re.sub(r"^```(?:python )?output$", "```text", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```(\w+) \w+$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace(r"\|", "|"), markdown)


def target(link: str, folder: str, page: str) -> str:
    """A link of a page in `folder` of the repository, as a link between pages of the site."""
    path = normpath(f"{folder}/{link}")
    if path in OUTSIDE:
        path = OUTSIDE[path]
    elif path.endswith(".py"):
        return f"{relpath(EXAMPLES, dirname(page) or '.')}#{anchor(path.removeprefix('examples/'))}"
    else:
        path = path.removeprefix("docs/")
    return relpath(path, dirname(page) or ".")


def examples() -> str:
    """The page of all examples."""
    parts = [
        "---\nsearch:\n  boost: 0.5\n---",  # pages that explain come first
        "# Examples",
        "Files of the folder `examples`: run one with `python examples/NAME.py`. Two notebooks are there "
        "too: [attention variants in pictures](examples/attention_variants.ipynb), "
        "[from a mod to a kernel](examples/mod_to_kernel.ipynb).",
    ]
    files = sorted((ROOT / "examples").glob("*.py"))
    parts += [f"## {path.name}\n\n```py\n{path.read_text()}```" for path in files]
    return "\n\n".join(parts) + "\n"
