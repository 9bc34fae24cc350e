"""flexmod bench: times a variant at several lengths."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from flexmod.tools.bench import bench as bench_mods
from flexmod.tools.bench import count
from flexmod.tools.cli.options import POSITIVE, mask_argument, score_option, setting_of, size_options

ON_GPU = (1024, 2048, 4096, 8192, 16384)
ON_CPU = (512, 1024)


@click.command()
@mask_argument
@score_option
@size_options
@click.option("--seq", "lengths", type=POSITIVE, multiple=True, help="A length; may be given several times.")
@click.option("--masked", is_flag=True, help="SDPA with the materialized mask too.")
@click.option("--flex", is_flag=True, help="torch's compiled flex_attention too (CUDA).")
@click.option("--json", "as_json", is_flag=True, help="JSON, not a table.")
@click.option("--plot", metavar="FILE", help="Draw TFLOP/s over lengths to an image.")
def bench(
    mask: str,
    score: str | None,
    lengths: tuple[int, ...],
    masked: bool,
    flex: bool,
    as_json: bool,
    plot: str | None,
    device: str | None,
    **sizes: Any,
) -> int:
    """Times of flexmod beside SDPA, forward and backward, over lengths."""
    setting = setting_of(device, **sizes)
    lengths = lengths or (ON_GPU if setting.device.type == "cuda" else ON_CPU)
    with click.progressbar(length=count(lengths, masked, flex), label="timing", file=sys.stderr) as bar:
        found = bench_mods(
            mask, setting, lengths, score=score, masked=masked, flex=flex, progress=lambda step: bar.update(1)
        )
    click.echo(json.dumps(found.as_dict(), indent=1) if as_json else str(found))
    if plot:
        found.plot(plot)
    return 0
