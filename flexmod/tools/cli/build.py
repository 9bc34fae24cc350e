"""flexmod build: compiles kernels ahead of time, for chips that need not be present."""

from __future__ import annotations

import json
import sys
from shlex import quote
from typing import Any

import click
import torch

from flexmod.codegen.variant import variant
from flexmod.runtime.target import MEASURED, NAMES, OLDEST
from flexmod.tools.ahead import Built, jobs
from flexmod.tools.cli.options import (
    KERNEL_DTYPES,
    POSITIVE,
    dim_option,
    dtype_option,
    kernel_setting,
    mask_argument,
    score_option,
)
from flexmod.tools.mod_names import choose
from flexmod.tools.terminal import hint, show, table

COLUMNS = ("target", "kernel", "template", "tile", "registers", "spills", "shared", "matrix", "")


@click.command()
@mask_argument
@score_option
@click.option(
    "--target",
    "targets",
    type=click.Choice(NAMES),
    multiple=True,
    default=[OLDEST, MEASURED],
    show_default=True,
    help="A chip; may be given several times.",
)
@dim_option
@dtype_option(KERNEL_DTYPES)
@click.option("--seq", type=POSITIVE, help="Length, for parameters that follow from it.")
@click.option("--json", "as_json", is_flag=True, help="JSON, not a table.")
def build(
    mask: str,
    score: str | None,
    targets: tuple[str, ...],
    dim: int | None,
    dtype: torch.dtype | None,
    seq: int | None,
    as_json: bool,
) -> int:
    """Compile the kernels for chips, and report registers, spills and shared memory. No GPU is needed.

    Spills and shared memory are in bytes. The exit status is 1 if a kernel does not fit a chip.
    """
    setting = kernel_setting(dim, dtype, seq)
    mods = choose(mask, setting, score)
    made = variant(mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype)
    work = [job for target in targets for job in jobs(made, target)]
    with click.progressbar(work, label="compiling", file=sys.stderr) as bar:
        built = [(job.target, job.compile()) for job in bar]
    facts = [dict(zip(COLUMNS, _row(target, each), strict=True)) for target, each in built]
    if as_json:
        click.echo(json.dumps([{**row, "problem": row.pop("")} for row in facts], indent=1))
    else:
        title = f"{mask}{f' with {score}' if score else ''}, D={setting.dim} {str(setting.dtype)[6:]}\n"
        rows = [[*map(_cell, row.values())] for row in facts]
        show(title, table(COLUMNS, rows, words=(0, 1, 2, 3, 7, 8)))
        hint(f"flexmod warm {quote(mask)} --into kernels")
    return 0 if all(each.fits for _, each in built) else 1


def _row(target: str, built: Built) -> list[Any]:
    tile = "-" if built.tile is None else str(built.tile)
    first = [target, built.kernel, built.template, tile]
    report = built.report
    if report is None:
        return [*first, None, None, None, {}, built.problem]
    matrix = dict(sorted(report.matrix_instructions.items()))
    said = "; ".join([built.problem or "fits", *report.losses])
    return [*first, report.registers, report.spills, report.shared, matrix, said]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in value.items())
    return "-" if value is None else str(value)
