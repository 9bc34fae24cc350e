"""Prints reports with rich: in colors on a terminal, as plain text in a pipe and in `str`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.pictures import FULL_TEXT, PARTIAL_TEXT

UNLIMITED = 10_000  # columns: plain text is never wrapped


def in_color(color: bool | None = None) -> bool:
    """Returns whether stdout takes colors; `color` overrides it."""
    console = Console(force_terminal=color)
    return console.is_terminal and not (color is None and console.no_color)


def show(*parts: RenderableType, color: bool | None = None) -> None:
    """Prints to stdout, on a terminal in its width."""
    if not in_color(color):
        print(plain(*parts))
        return
    console = Console(force_terminal=color, highlight=False)
    for part in parts:
        console.print(part, crop=False)


def plain(*parts: RenderableType) -> str:
    """Returns text without colors, and without blanks at the ends of lines."""
    file = StringIO()
    console = Console(file=file, width=UNLIMITED, force_terminal=False, force_jupyter=False, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def hint(command: str) -> None:
    """Prints the next command to try, to stderr: what a pipe receives stays clean."""
    Console(stderr=True, highlight=False).print(Text(f"\nnext: {command}", "dim"), soft_wrap=True)


def complain(message: str) -> None:
    """Prints an error to stderr: its fact in red, what to write instead in green."""
    text = Text(message)
    text.highlight_regex(r"\A.*", "red")
    text.highlight_regex(r"Instead:", "bold green")
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], words: Sequence[int] = (0,)) -> Table:
    """Returns a table. The columns numbered in `words` wrap; the others are numbers."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(header):
        wraps = number in words
        made.add_column(name, justify="left" if wraps else "right", no_wrap=not wraps)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def times_faster(theirs: float, ours: float) -> Text:
    """Returns how many times faster `ours` is, e.g. "2.50x"."""
    ratio = theirs / ours
    return Text(f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.1g}x", "green" if ratio > 1 else "yellow")


def verdict(agrees: bool) -> Text:
    return Text("agrees", "green") if agrees else Text("DIFFERS", "bold red")


def picture(block_mask: BlockMask, size: int = 20, color: bool = False) -> tuple[Text, Text, Text]:
    """Returns a mask's picture, its legend and its facts."""
    drawn = block_mask.to_string((size, size), density=True, color=color)
    legend = Text("█ all pairs are kept, ▓ from 2/3 on, ▒ from 1/3 on, ░ fewer; blank tiles are skipped")
    if color:
        legend.append("\n").append("██ full tiles", f"rgb{FULL_TEXT}".replace(" ", ""))
        legend.append("  ").append("██ the mask decides pair by pair", f"rgb{PARTIAL_TEXT}".replace(" ", ""))
    # rich 13 drops a newline at the end
    text = Text.from_ansi(drawn.removesuffix("\n"), no_wrap=True).append("\n")
    return text, legend, Text(f"{block_mask.facts()}")
