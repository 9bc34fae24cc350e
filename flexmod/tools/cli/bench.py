"""flexmod bench: times masks at several lengths."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from flexmod.tools.bench import bench as bench_mods
from flexmod.tools.bench import count
from flexmod.tools.cli.options import IMAGE, POSITIVE, score_option, setting_of, size_options
from flexmod.tools.terminal import hint, show

ON_GPU = (1024, 2048, 4096, 8192, 16384)
ON_CPU = (512, 1024)


@click.command()
@click.argument("masks", nargs=-1, required=True, metavar="MASK...")
@score_option
@size_options
@click.option("--seq", "lengths", type=POSITIVE, multiple=True, help="A length; may be given several times.")
@click.option("--masked", is_flag=True, help="SDPA with the materialized mask too.")
@click.option("--flex", is_flag=True, help="torch's compiled flex_attention too (CUDA).")
@click.option("--json", "as_json", is_flag=True, help="JSON, not a table.")
@click.option("--plot", type=IMAGE, metavar="FILE", help="Draw times over lengths to an image.")
def bench(
    masks: tuple[str, ...],
    score: str | None,
    lengths: tuple[int, ...],
    masked: bool,
    flex: bool,
    as_json: bool,
    plot: str | None,
    device: str | None,
    **sizes: Any,
) -> int:
    """Times of flexmod beside SDPA, forward and backward, over lengths; several masks side by side."""
    setting = setting_of(device, **sizes)
    lengths = lengths or (ON_GPU if setting.device.type == "cuda" else ON_CPU)
    steps = count(masks, lengths, masked, flex)
    options: dict[str, Any] = {"score": score, "masked": masked, "flex": flex}
    with click.progressbar(length=steps, label="timing", file=sys.stderr) as bar:
        found = bench_mods(masks, setting, lengths, **options, progress=lambda step: bar.update(1))
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
    else:
        show(*found.parts())
    if plot:
        found.plot(plot)
        hint(f"open {plot}")
    elif not as_json:
        hint("the same command with --plot chart.png draws these times")
    return 0
