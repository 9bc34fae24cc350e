"""The commands about kernels: explain, source, build, warm and tune."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from shlex import quote
from typing import Any, get_args

import click
import torch

from flexmod.backends.options import PORTABLE, family_names
from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.codegen.spec import Direction
from flexmod.codegen.variant import variant
from flexmod.errors.base import NoSourceError, counted
from flexmod.ir.graph import dtype_name
from flexmod.runtime import config
from flexmod.runtime.target import MEASURED, NAMES, OLDEST
from flexmod.tools.ahead import Built, checked_folder, jobs
from flexmod.tools.ahead import warm as fill
from flexmod.tools.cli import options
from flexmod.tools.cli.options import KERNEL_DTYPES, POSITIVE
from flexmod.tools.inspection import explain as explain_mods
from flexmod.tools.mod_names import choose, usual_setting
from flexmod.tools.standalone import standalone as standalone_text
from flexmod.tools.terminal import hint, show, table
from flexmod.tools.tune import check_device
from flexmod.tools.tune import tune as tune_mods


@click.command()
@options.variant
def explain(mask: str, score: str | None, **sizes: Any) -> int:
    """The graphs that a mask and a score mod are traced to, and on which template their kernels stand."""
    setting, mods = options.chosen(mask, score, **sizes)
    click.echo(str(explain_mods(mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype)))
    hint(f"flexmod source {quote(mask)}{options.with_score(score)}")
    return 0


# by what the command calls a module, its key in `Explanation.sources`
TEMPLATES = {
    f"{name}-{direction}": f"{name} {direction}"
    for name in family_names()
    if name != PORTABLE
    for direction in get_args(Direction)
}


@click.command()
@options.variant
@click.option("--template", type=click.Choice([PORTABLE, *TEMPLATES]), default=PORTABLE, show_default=True)
@click.option(
    "--standalone", is_flag=True, help="A file that needs torch and triton alone and checks itself."
)
@click.option(
    "--target", type=click.Choice(NAMES), show_default=OLDEST,
    help="The chip that the tiles of --standalone are chosen for.",
)  # fmt: skip
@click.option("--output", "-o", type=options.FileToWrite(), help="A file, not the screen.")
def source(
    mask: str,
    score: str | None,
    template: str,
    standalone: bool,
    target: str | None,
    output: Path | None,
    **sizes: Any,
) -> int:
    """The module of kernels, forward and backward, as it runs; or a file of its own."""
    setting, mods = options.chosen(mask, score, **sizes)
    of_kernels: dict[str, Any] = {"head_dim": setting.dim, "dtype": setting.dtype}
    if standalone:
        if template != PORTABLE:
            raise click.UsageError(f"--standalone writes the {PORTABLE} kernels; leave --template out.")
        text = standalone_text(mods.score, mods.mask, **of_kernels, target=target or OLDEST)
    elif target is not None:
        raise click.UsageError("--target is for --standalone; a launch chooses the tiles of other kernels.")
    else:
        explanation = explain_mods(mods.score, mods.mask, **of_kernels)
        text = explanation.source
        if template != PORTABLE:
            if TEMPLATES[template] not in explanation.sources:
                direction = template.rpartition("-")[2]
                why = next(line for line in explanation.templates if line.startswith(direction))
                raise NoSourceError(template=template, why=why)
            text = explanation.sources[TEMPLATES[template]]
    if output is None:
        click.echo(text, nl=False)
    else:
        new = not os.path.lexists(output)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError:  # the disk is full
            if new:
                output.unlink(missing_ok=True)
            raise
        click.echo(f"{output}: {counted(len(text.splitlines()), 'line')}")
        if standalone:
            hint(f"python {quote(str(output))} on a GPU, or TRITON_INTERPRET=1 python {quote(str(output))}")
    return 0


REPORTED = ("target", "kernel", "template", "tile", "registers", "spills", "shared", "matrix", "")


@click.command()
@options.variant
@options.targets(OLDEST, MEASURED)
@options.as_json
def build(mask: str, score: str | None, targets: tuple[str, ...], as_json: bool, **sizes: Any) -> int:
    """Compile the kernels for chips, and report registers, spills and shared memory. No GPU is needed.

    Spills and shared memory are in bytes. The exit status is 1 if a kernel does not fit a chip.
    """
    setting, mods = options.chosen(mask, score, **sizes)
    made = variant(mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype)
    work = [job for target in targets for job in jobs(made, target)]
    with click.progressbar(work, label="compiling", file=sys.stderr) as bar:
        built = [(job.target, job.compile()) for job in bar]
    facts = [dict(zip(REPORTED, _row(target, each), strict=True)) for target, each in built]
    if as_json:
        named = [{name or "problem": value for name, value in row.items()} for row in facts]
        click.echo(json.dumps(named, indent=1))
    else:
        title = f"{mask}{f' with {score}' if score else ''}, D={setting.dim} {dtype_name(setting.dtype)}\n"
        rows = [[*map(_cell, row.values())] for row in facts]
        show(title, table(REPORTED, rows, words=(0, 1, 2, 3, 7, 8)))
        hint(f"flexmod warm {quote(mask)}{options.with_score(score)} --into kernels")
    return 0 if all(each.fits for _, each in built) else 1


def _row(target: str, built: Built) -> list[Any]:
    first = [target, *_kernel_cells(built)]
    report = built.report
    if report is None:
        return [*first, None, None, None, {}, built.problem]
    matrix = dict(sorted(report.matrix_instructions.items()))
    said = "; ".join([built.problem or "fits", *report.losses])
    return [*first, report.registers, report.spills, report.shared, matrix, said]


def _kernel_cells(built: Built) -> list[str]:
    """The kernel, its template and its tile."""
    return [built.kernel, built.template, "-" if built.tile is None else str(built.tile)]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in value.items())
    return "-" if value is None else str(value)


FILLED = ("target", "D", "dtype", "kernel", "template", "tile", "")


@click.command()
@options.mask
@options.score
@click.option(
    "--into", type=options.NamedPath(path_type=Path), metavar="FOLDER",
    help="The folder; else the cache folder of flexmod.",
)  # fmt: skip
@options.targets(MEASURED)
@click.option(
    "--dim", "--head-dim", "dims", type=options.DIM, multiple=True,
    help="Head dimension; may be given several times.",
)  # fmt: skip
@click.option(
    "--dtype", "dtypes", type=click.Choice(KERNEL_DTYPES), multiple=True, help="May be given several times."
)
@click.option(
    "--seq", type=POSITIVE,
    help="Length of the calls. Short ones have kernels of their own, and parameters may follow from it.",
)  # fmt: skip
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
    kinds: tuple[torch.dtype | None, ...] = tuple(options.DTYPES[name] for name in dtypes) or (None,)
    for dim, dtype in [(dim, dtype) for dim in dims or (None,) for dtype in kinds]:
        setting, mods = options.chosen(mask, score, dim=dim, dtype=dtype, seq=seq)
        work = fill(
            folder, mods.score, mods.mask,
            head_dim=setting.dim, dtype=setting.dtype, targets=targets, length=seq,
        )  # fmt: skip
        for target, built in work:
            click.echo(f"{target} {built.kernel}", file=sys.stderr)
            sizes = [setting.dim, dtype_name(setting.dtype)]
            rows.append([target, *sizes, *_kernel_cells(built), built.problem or "fits"])
            fits &= built.fits
    show(table(FILLED, rows, words=(0, 2, 3, 4, 5, 6)))
    count = sum(1 for path in (folder / COMPILED).iterdir() if any(path.glob("*.json")))
    found = counted(count, "compiled kernel")
    click.echo(f"\n{folder}: {found}. To use them: {config.CACHE_DIR}={quote(str(folder))}")
    return 0 if fits else 1


# Steps of the bar for each kernel that tune searches.
STEPS = 100
KERNELS = 3


@click.command()
@options.mask
@options.score
@options.sizes
@click.option("--seq", type=POSITIVE)
@click.option(
    "--seconds", type=options.Seconds(min=0), default=60.0, show_default=True,
    help="Of the search for each kernel; what is near to flexmod's own choice comes first.",
)  # fmt: skip
def tune(mask: str, score: str | None, seconds: float, device: str | None, **sizes: Any) -> int:
    """Search the tiles of a variant on this device, and keep the fastest in the cache folder.

    Calls use them where they ask for it, with kernel_options={"tuned": True}.
    """
    setting = usual_setting(device, **sizes)
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
