"""flexmod tune: finds the fastest tiles on this device."""

from __future__ import annotations

import sys
from typing import Any

import click

from flexmod.tools.cli.options import POSITIVE, mask_argument, score_option, setting_of, size_options
from flexmod.tools.mod_names import choose
from flexmod.tools.terminal import hint
from flexmod.tools.tune import check_device
from flexmod.tools.tune import tune as tune_mods

# Steps of the bar for each kernel.
STEPS = 100
KERNELS = 3


@click.command()
@mask_argument
@score_option
@size_options
@click.option("--seq", type=POSITIVE)
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=60.0, show_default=True,
    help="Of the search for each kernel; what is near to flexmod's own choice comes first.",
)  # fmt: skip
def tune(mask: str, score: str | None, seconds: float, device: str | None, **sizes: Any) -> int:
    """Search the tiles of a variant on this device, and keep the fastest in the cache folder.

    Calls use them where they ask for it, with kernel_options={"tuned": True}.
    """
    setting = setting_of(device, **sizes)
    check_device(setting.device)
    mods = choose(mask, setting, score)
    name = f"{mask} with {score}" if score else mask
    done: dict[str, int] = {}
    with click.progressbar(length=STEPS * KERNELS, label="searching", file=sys.stderr) as bar:

        def progress(kernel: str, number: int, count: int) -> None:
            reached = STEPS * number // count
            bar.update(reached - done.get(kernel, 0))
            done[kernel] = reached

        found = tune_mods(mods, setting, name=name, seconds=seconds, progress=progress)
        bar.update(STEPS * (KERNELS - len(done)))
    click.echo(str(found))
    hint('flex_attention(..., kernel_options={"tuned": True})')
    return 0
