"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from flexmod.tools.mod_names import ON_GPU, Setting, usual_setting

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
KERNEL_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype is not torch.float64)
POSITIVE = click.IntRange(min=1)
IMAGES = (".png", ".svg", ".pdf", ".jpg")


class FileToWrite(click.Path):
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

mask_argument = click.argument("mask", metavar="MASK")
score_option = click.option("--score", metavar="SCORE", help="A score mod beside the mask, such as alibi:16.")
device_option = click.option("--device", help="cuda if there is one, else cpu.")
dim_option = click.option("--dim", "--head-dim", "dim", type=POSITIVE, help="Head dimension.")


def dtype_option(names: tuple[str, ...] = tuple(DTYPES)) -> Callable[[Command], Command]:
    """`--dtype`, as a torch.dtype or None."""

    def parsed(context: click.Context, parameter: click.Parameter, value: str | None) -> torch.dtype | None:
        return DTYPES[value] if value else None

    return click.option("--dtype", type=click.Choice(names), callback=parsed)


def size_options(command: Command) -> Command:
    """`--batch`, `--heads`, `--dim`, `--dtype` and `--device`; lengths are each command's own."""
    for decorate in (
        device_option, dtype_option(), dim_option,
        click.option("--heads", type=POSITIVE), click.option("--batch", type=POSITIVE),
    ):  # fmt: skip
        command = decorate(command)
    return command


def setting_of(device: str | None, **given: Any) -> Setting:
    """The usual setting of the device, with what was given in place of its own."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(usual_setting(device), **chosen)


def kernel_setting(dim: int | None, dtype: torch.dtype | None, seq: int | None = None) -> Setting:
    """A setting for what compiles and does not run: on the CPU, with sizes as on a GPU."""
    usual = replace(ON_GPU, device=torch.device("cpu"))
    return replace(usual, dim=dim or usual.dim, dtype=dtype or usual.dtype, seq=seq or usual.seq)
