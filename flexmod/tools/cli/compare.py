"""flexmod compare: compares results and times with SDPA."""

from __future__ import annotations

from typing import Any

import click

from flexmod.tools.cli.options import POSITIVE, score_option, size_options
from flexmod.tools.comparison import compare as compare_mods


@click.command()
@click.argument("masks", nargs=-1, metavar="[MASK]...")
@score_option
@size_options
@click.option("--seq", type=POSITIVE)
@click.option("--flex", is_flag=True, help="torch's compiled flex_attention too (CUDA).")
def compare(masks: tuple[str, ...], score: str | None, **options: Any) -> int:
    """flexmod beside SDPA: results, times, the picture of the mask. causal, if no MASK is given."""
    agree = True
    for position, mask in enumerate(masks or ("causal",)):
        if position:
            click.echo()
        agree = compare_mods(mask, score_mod=score, **options).agrees and agree
    return 0 if agree else 1
