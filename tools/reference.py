"""Writes docs/reference: the pages of masks, score mods and the calls around them, from their docstrings.

    python tools/reference.py

A docstring's "Example:" becomes a block of Python, other indented lines a block of text. A line such as
`masks.causal()`, 8 x 8: stands above a picture in characters, which tests hold to what the call makes. Beside
them stand drawings, of the calls in MASKS and MODS.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flexmod  # noqa: E402
from flexmod import create_block_mask, create_mask, masks, mods  # noqa: E402
from flexmod.ir.evaluate import evaluate  # noqa: E402
from flexmod.ir.graph import POSITIONS  # noqa: E402
from flexmod.ir.trace import trace  # noqa: E402

FOLDER = Path("docs/reference")
WRITTEN = "<!-- Written by tools/reference.py. -->"
TYPES = ("MaskMod",)
PICTURE = re.compile(
    r"^`(?P<call>m\w+\..+)`, (?P<rows>\d+) x (?P<columns>\d+)(?:, scores of (?P<scores>.+))?:$"
)
# name -> (call, queries, keys): drawn with tiles of 8 x 8
MASKS = {
    "block_diffusion": ("masks.block_diffusion(32, block=8)", 64, 64),
    "by_head": ("masks.by_head(torch.tensor([1]), masks.causal(), masks.sliding_window(12))", 64, 64),
    "causal": ("masks.causal()", 64, 64),
    "dilated_window": ("masks.dilated_window(6, dilation=3)", 48, 48),
    "document": ("masks.document(lengths=torch.tensor([20, 9, 27, 8]), causal=True)", 64, 64),
    "global_window": ("masks.global_window(12, tokens=5)", 64, 64),
    "jagged": ("masks.jagged(torch.tensor([0, 20, 29, 56, 64]), masks.prefix_lm(6))", 64, 64),
    "natten": ("masks.natten((8, 8), kernel=3)", 64, 64),
    "padding": ("masks.padding(torch.tensor([43]))", 64, 64),
    "prefix_lm": ("masks.prefix_lm(20)", 64, 64),
    "reordered": (
        "masks.reordered(masks.natten((8, 8), kernel=3), masks.tile_order((8, 8), (2, 4)))", 64, 64
    ),
    "segments": (
        "masks.segments((torch.arange(48) + 9) // 20, torch.arange(64) // 20)", 48, 64
    ),
    "shared_prefix": ("masks.shared_prefix(16, torch.arange(64) // 16)", 64, 64),
    "sliding_tiles": ("masks.sliding_tiles(extent=(4, 16), tile=(2, 4), kernel=(1, 3))", 64, 64),
    "sliding_window": ("masks.sliding_window(16)", 64, 64),
    "standalone_window": ("masks.standalone_window(height=8, width=8, window=2)", 64, 64),
    "tree": (
        "masks.tree(torch.tensor([-1, 0, 1, 2, 1, 0, 5, 6, 5, 0, 9, 9, 11, 11, 0, 14]), context=24)", 16, 40
    ),
    "vision_cross": (
        "masks.vision_cross(torch.tensor([[4, 20], [20, 64], [44, 64]]), torch.arange(48) // 16)", 64, 48
    ),
}  # fmt: skip
# name -> (call, positions): what it makes of scores of 0, or with 0 positions of scores from -8 to 8
MODS = {
    "alibi": ("mods.alibi(8)", 32),
    "causal_score": ("mods.causal_score()", 32),
    "chain": ("mods.chain(mods.alibi(8), mods.softcap(3.0))", 32),
    "graphormer_edge": (
        "mods.graphormer_edge(torch.tensor([[[2.0], [-1.0]]]), "
        "(torch.arange(256) // 7 % 3 - 1).view(16, 16, 1))",
        16,
    ),
    "graphormer_spatial": (
        "mods.graphormer_spatial(torch.tensor([[2.0], [1.0], [0.0], [-1.0]]), "
        "(torch.arange(16) // 4 - torch.arange(16)[:, None] // 4).abs())",
        16,
    ),
    "jagged": ("mods.jagged(torch.tensor([0, 10, 16, 32]), mods.relative_position())", 32),
    "mla_rope": (
        "mods.mla_rope((torch.arange(32.0) / 5).sin().view(1, 1, 32, 1), "
        "(torch.arange(32.0) / 5).cos().view(1, 32, 1), 1.0)",
        32,
    ),
    "relative_bias": ("mods.relative_bias((torch.arange(-12.0, 13.0) / 3).sin())", 32),
    "relative_position": ("mods.relative_position()", 32),
    "sandwich": ("mods.sandwich(8, length=32, dim=16)", 32),
    "sink": ("mods.sink(torch.tensor([5.0]))", 32),
    "softcap": ("mods.softcap(2.0)", 0),
    "t5_bias": ("mods.t5_bias(torch.arange(8.0)[:, None], max_distance=32)", 32),
    "temperature": ("mods.temperature(2.0)", 0),
}  # fmt: skip
# what docs/reference/attention.md has: functions, classes, methods of BlockMask
CALLS = (
    "flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks", "compile",
    "varlen_attention", "nested_attention", "apply_sink", "quantize", "tanh_approximate", "explain",
    "compare",
)  # fmt: skip
RESULTS = (flexmod.AuxRequest, flexmod.AuxOutput, flexmod.BlockMask, flexmod.Offset, flexmod.Scales)
METHODS = (
    "from_kv_blocks", "from_dense", "cat", "resize", "refresh", "sparsity", "facts", "to_string", "to_svg",
    "plot", "to_dense", "to", "as_tuple",
)  # fmt: skip
CANVAS = """<svg xmlns="http://www.w3.org/2000/svg" width="320" height="350" viewBox="0 0 320 350"
font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#ffffff"/>"""
SETTING = """```python
import torch
from flexmod import (
    BlockMask, Offset, and_masks, apply_sink, compare, compile, create_block_mask, create_mask, explain,
    flex_attention, masks, mods, nested_attention, or_masks, quantize, tanh_approximate, varlen_attention,
)

query, key, value = (torch.randn(2, 8, 1024, 16) for _ in range(3))
```
"""


# docstrings


class Picture(NamedTuple):
    """A picture in characters: what `call` makes of scores, if there are any, or the pairs that it keeps."""

    call: str
    rows: int
    columns: int
    scores: list[float]
    lines: list[str]


def blocks(documented: Any) -> list[tuple[str, str]]:
    """(kind, text) of the parts of a docstring: "text", "lines", "example" or "picture"."""
    found: list[tuple[str, str]] = []
    indented = "lines"
    for text in inspect.cleandoc(documented.__doc__ or "").split("\n\n"):
        if text == "Example:":
            indented = "example"
        elif not text.startswith("    "):
            indented = "picture" if PICTURE.match(" ".join(text.split())) else "lines"
            found.append(("text", text))
        elif found and found[-1][0] == indented == "example":
            found[-1] = indented, f"{found[-1][1]}\n\n{textwrap.dedent(text)}"
        else:
            found.append((indented, textwrap.dedent(text)))
    return found


def pictures(function: Any) -> Iterator[Picture]:
    for (_, above), (kind, text) in itertools.pairwise([*blocks(function), ("", "")]):
        match = PICTURE.match(" ".join(above.split()))
        if match is not None:
            scores = [float(score) for score in (match["scores"] or "").split()]
            lines = text.splitlines() if kind == "picture" else []
            yield Picture(match["call"], int(match["rows"]), int(match["columns"]), scores, lines)


def characters(picture: Picture) -> list[str]:
    """What the lines of a picture must be."""
    if picture.scores:
        rows = modified(picture.call, picture.rows, picture.columns, picture.scores).tolist()
        return textwrap.dedent("\n".join("".join(f"{x:7.2f}" for x in row) for row in rows)).splitlines()
    kept = create_mask(made(picture.call), None, None, picture.rows, picture.columns, "cpu")[0, 0]
    return ["".join("#" if keeps else "." for keeps in row) for row in kept.tolist()]


def made(call: str) -> Any:
    return eval(call, {"masks": masks, "mods": mods, "torch": torch})


def modified(call: str, rows: int, columns: int, scores: list[float]) -> Tensor:
    """What a score mod makes of scores, in head 0: float64 [rows, columns]."""
    traced = trace(made(call), "score")
    score = torch.tensor(scores, dtype=torch.float64).expand(1, 1, rows, columns)
    places = {
        name: torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(POSITIONS, score.shape, strict=True))
    }
    (result,) = evaluate(traced.graph, traced.tensors, **places, score=score, real=torch.float64)
    return result.expand(score.shape)[0, 0]


# drawings


def mask_drawing(name: str) -> str:
    call, queries, keys = MASKS[name]
    return create_block_mask(made(call), None, None, queries, keys, "cpu", 8).to_svg()


def mod_drawing(name: str) -> str:
    call, length = MODS[name]
    return bias_drawing(modified(call, length, length, [0.0])) if length else curve_drawing(call)


def bias_drawing(bias: Tensor) -> str:
    """Orange where a score grows, blue where it falls, in seven steps each; gray where it becomes -inf."""
    largest = bias[bias.isfinite()].abs().max().clamp(min=1e-9)
    levels = (bias / largest * 7).nan_to_num(neginf=-8).round().int()
    paths: dict[int, list[str]] = {}
    for row, steps in enumerate(levels.tolist()):
        left = 0
        for level, same in itertools.groupby(steps):
            width = len(list(same))
            paths.setdefault(level, []).append(f"M{left} {row}h{width}v1h-{width}z")
            left += width
    drawn = [f'<path fill="{shade(level)}" d="{"".join(paths[level])}"/>' for level in sorted(paths)]
    size, ends = len(bias), f"from {bias.min():.3g} to {bias.max():.3g}"
    parts = (
        CANVAS,
        f'<g transform="translate(10 10) scale({300 / size:.6g})" shape-rendering="crispEdges">',
        *drawn,
        "</g>",
        '<rect x="10" y="10" width="300" height="300" fill="none" stroke="#444"/>',
        f'<text x="10" y="334">{size} queries by {size} keys, {ends}</text>',
        "</svg>\n",
    )
    return "\n".join(parts)


def shade(level: int) -> str:
    if level == -8:
        return "#9a9a9a"
    end, share = ((224, 123, 0), level / 7) if level > 0 else ((35, 61, 101), -level / 7)
    return "#{:02x}{:02x}{:02x}".format(*(round(255 + (x - 255) * share) for x in end))


def curve_drawing(call: str) -> str:
    """New scores above old ones, both from -8 to 8."""
    scores = [x / 4 for x in range(-32, 33)]
    new = modified(call, 1, len(scores), scores)[0].tolist()
    points = " ".join(f"{160 + 18 * x:.1f},{160 - 18 * y:.1f}" for x, y in zip(scores, new, strict=True))
    parts = (
        CANVAS,
        '<path d="M10 160H310M160 10V310" stroke="#bebebe"/>',
        '<path d="M16 304L304 16" stroke="#bebebe" stroke-dasharray="4"/>',
        f'<polyline points="{points}" fill="none" stroke="#e07b00" stroke-width="2"/>',
        '<text x="10" y="334">new score above score, from -8 to 8</text>',
        "</svg>\n",
    )
    return "\n".join(parts)


# pages


def section(prefix: str, name: str, function: Callable[..., Any], drawn: str | None = None) -> str:
    """A function's part of a page."""
    parts = [f"## {name}", fenced(f"{prefix}{name}{signature(function)}")]
    if drawn is not None:
        parts.append(f'<img src="pictures/{drawn}.svg" width="300" alt="{prefix}{name}">')
    return "\n\n".join((*parts, written(function))) + "\n"


def signature(function: Callable[..., Any]) -> str:
    """As written, an argument a line where it is long, without self."""
    whole = inspect.signature(function)
    parameters = [parameter for parameter in whole.parameters.values() if parameter.name != "self"]
    text = re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(whole.replace(parameters=parameters)))
    arguments, _, result = text.removesuffix(" -> None").partition(" -> ")
    if len(arguments) > 90:
        lines = [re.sub(r"""(: )(['"])(.*?)\2""", r"\1\3", str(parameter)) for parameter in parameters]
        keywords = [parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters]
        if any(keywords):
            lines.insert(keywords.index(True), "*")
        arguments = "(\n    " + ",\n    ".join(lines) + ",\n)"
    return f"{arguments} -> {result}" if result else arguments


def written(documented: Any) -> str:
    """A docstring as Markdown."""
    return "\n\n".join(
        text if kind == "text" else fenced(text, "python" if kind == "example" else "")
        for kind, text in blocks(documented)
    )


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def page(title: str, library: ModuleType, drawn: dict[str, Any]) -> str:
    """Of all functions of masks or of mods."""
    prefix = library.__name__.rpartition(".")[2] + "."
    public = {name: getattr(library, name) for name in library.__all__ if name not in TYPES}
    contents = "\n".join(f"- [`{name}`](#{name.lower()})" for name in public)
    sections = (
        section(prefix, name, function, f"{prefix}{name}" if name in drawn else None)
        for name, function in public.items()
    )
    return "\n".join(
        (f"# {title}\n", f"{written(library)}\n", "In the examples:\n", SETTING, f"{contents}\n", *sections)
    )


def calls() -> str:
    """The page of all that is neither a mask nor a score mod."""
    results = [documented.__name__ for documented in RESULTS]
    sections = [section("", name, getattr(flexmod, name)) for name in CALLS]
    sections += [f"## {documented.__name__}\n\n{written(documented)}\n" for documented in RESULTS]
    for name in METHODS:
        owner = "BlockMask." if name in ("from_kv_blocks", "from_dense", "cat") else "block_mask."
        sections.append(section(owner, name, getattr(flexmod.BlockMask, name)))
    contents = "\n".join(f"- [`{name}`](#{name.lower()})" for name in (*CALLS, *results, *METHODS))
    return "\n".join(("# Attention\n", "In the examples:\n", SETTING, f"{contents}\n", *sections))


def files() -> dict[Path, str]:
    """Every file of docs/reference, by its path in the repository, and its text."""
    pages = {
        "masks": page("Masks", masks, MASKS),
        "mods": page("Score mods", mods, MODS),
        "attention": calls(),
    }
    drawn = {f"masks.{name}": mask_drawing(name) for name in MASKS}
    drawn |= {f"mods.{name}": mod_drawing(name) for name in MODS}
    return {
        **{FOLDER / f"{name}.md": f"{WRITTEN}\n\n{text}" for name, text in pages.items()},
        **{FOLDER / "pictures" / f"{name}.svg": text for name, text in drawn.items()},
    }


def main() -> None:
    for path, text in files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
