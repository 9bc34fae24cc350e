"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import click
import torch

from flexmod.runtime.target import NAMES
from flexmod.tools.mod_names import ON_GPU, Mods, Setting, choose

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
KERNEL_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype is not torch.float64)
POSITIVE = click.IntRange(min=1)
WIDEST = 2**16  # a tile of 16 rows then has the 2^20 elements that Triton allows
DIM = click.IntRange(1, WIDEST)
IMAGES = (".png", ".svg", ".pdf", ".jpg")


class Seconds(click.FloatRange):
    """A time limit. No clock ever exceeds NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is no number.", param, ctx) if seconds != seconds else seconds


class NamedPath(click.Path):
    """A path of at least one character: Path("") is the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("the name is empty.", param, ctx)
        return super().convert(value, param, ctx)


class FileToWrite(NamedPath):
    """A file in a folder that exists, checked before a command works for minutes."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        folder = Path(value).parent
        if not folder.is_dir():
            self.fail(f"{str(value)!r}: there is no folder {str(folder)!r}.", param, ctx)
        return super().convert(value, param, ctx)


class ImageFile(FileToWrite):
    """A file that can be drawn to."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if Path(value).suffix.lower() not in IMAGES:
            self.fail(f"{value!r} is no image; name one that ends in {', '.join(IMAGES)}.", param, ctx)
        super().convert(value, param, ctx)
        return str(value)


IMAGE = ImageFile()

mask = click.argument("mask", metavar="MASK")
score = click.option("--score", metavar="SCORE", help="A score mod beside the mask, such as alibi:16.")
as_json = click.option("--json", "as_json", is_flag=True, help="JSON, not a table.")
flex = click.option("--flex", is_flag=True, help="torch's compiled flex_attention too (CUDA).")


def targets(*default: str) -> Callable[[Command], Command]:
    """`--target`, several times."""
    return click.option(
        "--target", "targets", type=click.Choice(NAMES), multiple=True, default=default, show_default=True,
        help="A chip; may be given several times.",
    )  # fmt: skip


def _parsed(context: click.Context, parameter: click.Parameter, value: str | None) -> torch.dtype | None:
    return DTYPES[value] if value else None


_dim = click.option("--dim", "--head-dim", "dim", type=DIM, help="Head dimension.")


def variant(command: Command) -> Command:
    """What `chosen` takes: MASK, `--score`, `--dim`, `--dtype` of kernels and `--seq`."""
    dtype = click.option("--dtype", type=click.Choice(KERNEL_DTYPES), callback=_parsed)
    seq = click.option("--seq", type=POSITIVE, help="Length, for parameters that follow from it.")
    for decorate in (seq, dtype, _dim, score, mask):
        command = decorate(command)
    return command


def sizes(command: Command) -> Command:
    """`--batch`, `--heads`, `--dim`, `--dtype` and `--device`; lengths are each command's own."""
    for decorate in (
        click.option("--device", help="cuda if there is one, else cpu."),
        click.option("--dtype", type=click.Choice(tuple(DTYPES)), callback=_parsed), _dim,
        click.option("--heads", type=POSITIVE), click.option("--batch", type=POSITIVE),
    ):  # fmt: skip
        command = decorate(command)
    return command


def with_score(score: str | None) -> str:
    """`--score` for the next command."""
    return f" --score {quote(score)}" if score else ""


def chosen(mask: str, score: str | None, **given: Any) -> tuple[Setting, Mods]:
    """The mods, and a setting for what compiles and does not run: on the CPU, with sizes as on a GPU."""
    setting = ON_GPU.sized(**given, device=torch.device("cpu"))
    return setting, choose(mask, setting, score)
