"""flexmod source: prints the kernels' text."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click
import torch

from flexmod.backends.options import PORTABLE, family_names
from flexmod.codegen.spec import Direction
from flexmod.errors.commands import NoSourceError
from flexmod.runtime.target import NAMES, OLDEST
from flexmod.tools.cli.options import (
    KERNEL_DTYPES,
    POSITIVE,
    dim_option,
    dtype_option,
    kernel_setting,
    mask_argument,
    score_option,
)
from flexmod.tools.explanation import explain
from flexmod.tools.mod_names import choose
from flexmod.tools.standalone import standalone as standalone_text
from flexmod.tools.terminal import hint

# by what the command calls a module, its family and direction
TEMPLATES = {
    f"{name}-{direction}": (name, direction)
    for name in family_names()
    if name != PORTABLE
    for direction in get_args(Direction)
}


@click.command()
@mask_argument
@score_option
@dim_option
@dtype_option(KERNEL_DTYPES)
@click.option("--seq", type=POSITIVE, help="Length, for parameters that follow from it.")
@click.option("--template", type=click.Choice([PORTABLE, *TEMPLATES]), default=PORTABLE, show_default=True)
@click.option(
    "--standalone", is_flag=True, help="A file that needs torch and triton alone and checks itself."
)
@click.option(
    "--target", type=click.Choice(NAMES), default=OLDEST, show_default=True,
    help="The chip that the tiles of --standalone are chosen for.",
)  # fmt: skip
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="A file, not the screen."
)
def source(
    mask: str,
    score: str | None,
    dim: int | None,
    dtype: torch.dtype | None,
    seq: int | None,
    template: str,
    standalone: bool,
    target: str,
    output: Path | None,
) -> int:
    """The module of kernels, forward and backward, as it runs; or a file of its own."""
    setting = kernel_setting(dim, dtype, seq)
    mods = choose(mask, setting, score)
    if standalone:
        text = standalone_text(
            mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype, target=target
        )
    else:
        explanation = explain(mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype)
        text = explanation.source
        if template != PORTABLE:
            family, direction = TEMPLATES[template]
            if f"{family} {direction}" not in explanation.sources:
                why = next(line for line in explanation.templates if line.startswith(direction))
                raise NoSourceError(template=template, why=why)
            text = explanation.sources[f"{family} {direction}"]
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        click.echo(f"{output}: {len(text.splitlines())} lines")
        if standalone:
            hint(f"python {output} on a GPU, or TRITON_INTERPRET=1 python {output}")
    return 0
