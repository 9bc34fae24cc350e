"""flexmod warm: fills a folder with compiled kernels to ship."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.runtime import config
from flexmod.runtime.target import MEASURED, NAMES
from flexmod.tools.ahead import Built, checked_folder
from flexmod.tools.ahead import warm as fill
from flexmod.tools.cli.options import (
    DTYPES,
    KERNEL_DTYPES,
    POSITIVE,
    kernel_setting,
    mask_argument,
    score_option,
)
from flexmod.tools.mod_names import choose
from flexmod.tools.terminal import show, table

COLUMNS = ("target", "D", "dtype", "kernel", "template", "tile", "")


@click.command()
@mask_argument
@score_option
@click.option(
    "--into", type=click.Path(path_type=Path), metavar="FOLDER",
    help="The folder; else the cache folder of flexmod.",
)  # fmt: skip
@click.option(
    "--target", "targets", type=click.Choice(NAMES), multiple=True, default=[MEASURED], show_default=True,
    help="A chip; may be given several times.",
)  # fmt: skip
@click.option(
    "--dim", "--head-dim", "dims", type=POSITIVE, multiple=True,
    help="Head dimension; may be given several times.",
)  # fmt: skip
@click.option(
    "--dtype", "dtypes", type=click.Choice(KERNEL_DTYPES), multiple=True, help="May be given several times."
)
@click.option("--seq", type=POSITIVE, help="Length, for parameters that follow from it.")
def warm(
    mask: str,
    score: str | None,
    into: Path | None,
    targets: tuple[str, ...],
    dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    seq: int | None,
) -> int:
    """Compile kernels, forward and backward, into a folder that can be shipped. No GPU is needed.

    A process with FLEXMOD_CACHE_DIR at the folder compiles none of them. Further kernels are added. The exit
    status is 1 if a kernel does not fit a chip.
    """
    folder = checked_folder(config.cache_dir() if into is None else into)
    rows, fits = [], True
    kinds: tuple[torch.dtype | None, ...] = tuple(DTYPES[name] for name in dtypes) or (None,)
    for dim, dtype in [(dim, dtype) for dim in dims or (None,) for dtype in kinds]:
        setting = kernel_setting(dim, dtype, seq)
        mods = choose(mask, setting, score)
        work = fill(folder, mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype, targets=targets)
        for target, built in work:
            click.echo(f"{target} {built.kernel}", file=sys.stderr)
            rows.append([target, setting.dim, str(setting.dtype)[6:], *_cells(built)])
            fits &= built.fits
    show(table(COLUMNS, rows, words=(0, 2, 3, 4, 5, 6)))
    count = sum(1 for path in (folder / COMPILED).iterdir() if any(path.glob("*.json")))
    click.echo(f"\n{folder}: {count} compiled kernels. To use them: {config.CACHE_DIR}={folder}")
    return 0 if fits else 1


def _cells(built: Built) -> list[str]:
    tile = "-" if built.tile is None else str(built.tile)
    return [built.kernel, built.template, tile, built.problem or "fits"]
