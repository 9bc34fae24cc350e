"""flexmod compare: compares results and times with SDPA."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from flexmod.tools.cli.options import POSITIVE, score_option, size_options
from flexmod.tools.comparison import Comparison
from flexmod.tools.comparison import compare as compare_mods
from flexmod.tools.mod_names import device_name
from flexmod.tools.terminal import hint, in_color, show, table, times_faster, verdict

# The percentage of skipped tiles below which a CPU shows no gain from skipping.
SHOWCASE = 60


@click.command()
@click.argument("masks", nargs=-1, metavar="[MASK]...")
@score_option
@size_options
@click.option("--seq", type=POSITIVE)
@click.option("--flex", is_flag=True, help="torch's compiled flex_attention too (CUDA).")
def compare(masks: tuple[str, ...], score: str | None, **options: Any) -> int:
    """flexmod beside SDPA: results, times, the picture of the mask. causal, if no MASK is given."""
    found: list[Comparison] = []
    for mask in masks or ("causal",):
        click.echo(f"{mask}: results, then times ...", err=True)
        found.append(compare_mods(mask, score_mod=score, show=False, **options))
        show(*[""] * (len(found) > 1), *found[-1].parts(in_color()))
    if len(found) > 1:
        show("", *_summary(found))
    agree = all(each.agrees for each in found)
    if agree:
        hint(f"flexmod bench {' '.join(map(quote, masks or ('causal',)))} --plot chart.png")
    return 0 if agree else 1


def _summary(found: list[Comparison]) -> Iterator[RenderableType]:
    """The masks side by side, and what the table shows."""
    rows = []
    for each in found:
        *others, ours = each.timings
        gains = (
            Text.assemble(
                times_faster(other.forward_ms, ours.forward_ms), " / ",
                times_faster(other.backward_ms, ours.backward_ms),
            )
            for other in others
        )  # fmt: skip
        rows.append((each.name, verdict(each.agrees), f"{_skipped(each):.0f}%", *gains))
    names = [f"faster than\n{timing.attention}" for timing in found[0].timings[:-1]]
    yield table(("mask", "results", "tiles\nskipped", *names), rows, words=(0, 1))
    yield "\nforward / backward; below 1x, SDPA is the faster one"
    setting = found[0].setting
    dense = [each.name for each in found if _skipped(each) < SHOWCASE]
    if dense and setting.device.type == "cpu":
        yield (
            f"A dense mask ({', '.join(dense)}) is no showcase on a CPU: there is little to skip, SDPA has a "
            "fused kernel there, and flexmod's own kernels need a GPU."
        )
    agreeing = sum(each.agrees for each in found)
    verdicts = "It works" if agreeing == len(found) else "Something is wrong"
    yield (
        f"\n{verdicts}: outputs and gradients agree with the reference for {agreeing} of {len(found)} masks, "
        f"on {device_name(setting.device)}."
    )
    best = max(found, key=lambda each: each.timings[-2].forward_ms / each.timings[-1].forward_ms)
    *_, peer, ours = best.timings
    yield (
        f"Best beside {peer.attention}: {best.name}, forward "
        f"{times_faster(peer.forward_ms, ours.forward_ms)} as fast, backward "
        f"{times_faster(peer.backward_ms, ours.backward_ms)}."
    )


def _skipped(comparison: Comparison) -> float:
    return 0.0 if comparison.block_mask is None else comparison.block_mask.sparsity()
