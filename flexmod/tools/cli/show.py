"""flexmod show: prints a mask's picture."""

from __future__ import annotations

from shlex import quote

import click
import torch

from flexmod.block_mask.build import create_block_mask
from flexmod.tools import terminal
from flexmod.tools.cli.options import IMAGE, POSITIVE, mask_argument
from flexmod.tools.mod_names import Setting, choose_mask, fitting
from flexmod.tools.terminal import hint


@click.command()
@mask_argument
@click.option("--seq", type=POSITIVE, default=8192, show_default=True, help="Queries, and keys.")
@click.option("--keys", type=POSITIVE, help="Keys, where there are more or fewer of them.")
@click.option("--batch", type=POSITIVE, help="For a mask that depends on b.")
@click.option("--heads", type=POSITIVE, help="For a mask that depends on h.")
@click.option("--block", type=POSITIVE, default=128, show_default=True, help="Queries and keys of a tile.")
@click.option("--size", type=POSITIVE, default=20, show_default=True, help="Rows of the picture, at most.")
@click.option("--color/--no-color", default=None, help="Colors; by default, on a terminal.")
@click.option("--plot", type=IMAGE, metavar="FILE", help="Draw it to an image, .png or .svg, as well.")
def show(
    mask: str,
    seq: int,
    keys: int | None,
    batch: int | None,
    heads: int | None,
    block: int,
    size: int,
    color: bool | None,
    plot: str | None,
) -> int:
    """The picture of a mask, its sparsity, and facts that are counted."""
    setting = Setting(batch or 1, heads or 1, seq, 64, torch.bfloat16, torch.device("cpu"))
    length = fitting(mask, setting)
    block_mask = create_block_mask(
        choose_mask(mask, setting), batch, heads, length, keys or length, device="cpu", BLOCK_SIZE=block
    )
    lengths = f"{length} queries x {keys or length} keys"
    title = f"{mask}, {lengths}, tiles of {block} x {block}: {block_mask.sparsity():.2f}% are skipped\n"
    terminal.show(title, *terminal.picture(block_mask, size, terminal.in_color(color)), color=color)
    if plot and plot.endswith(".svg"):
        with open(plot, "w", encoding="utf-8") as file:
            file.write(block_mask.to_svg())
    elif plot:
        block_mask.plot(plot)
    hint(f"open {plot}" if plot else f"flexmod compare {quote(mask)}")
    return 0
