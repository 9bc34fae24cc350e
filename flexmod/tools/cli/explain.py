"""flexmod explain: shows the graphs of mods."""

from __future__ import annotations

from shlex import quote

import click
import torch

from flexmod.tools.cli.options import (
    KERNEL_DTYPES,
    dim_option,
    dtype_option,
    kernel_setting,
    mask_argument,
    score_option,
)
from flexmod.tools.explanation import explain as explain_mods
from flexmod.tools.mod_names import choose
from flexmod.tools.terminal import hint


@click.command()
@mask_argument
@score_option
@dim_option
@dtype_option(KERNEL_DTYPES)
def explain(mask: str, score: str | None, dim: int | None, dtype: torch.dtype | None) -> int:
    """The graphs that a mask and a score mod are traced to, and on which template their kernels stand."""
    setting = kernel_setting(dim, dtype)
    mods = choose(mask, setting, score)
    click.echo(str(explain_mods(mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype)))
    more = f" --score {quote(score)}" if score else ""
    hint(f"flexmod source {quote(mask)}{more}")
    return 0
