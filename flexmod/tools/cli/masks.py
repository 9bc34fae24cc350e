"""The commands about masks, which need no Triton: show, compare and bench."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from shlex import quote
from typing import Any

import click
import torch
from rich.console import RenderableType
from rich.text import Text

from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.parts import length_pair
from flexmod.block_mask.tiles import tile_count
from flexmod.errors.base import counted
from flexmod.tools import terminal
from flexmod.tools.bench import bench as bench_mods
from flexmod.tools.bench import count
from flexmod.tools.cli import options
from flexmod.tools.cli.options import IMAGE, POSITIVE
from flexmod.tools.comparison import Comparison, skipped
from flexmod.tools.comparison import compare as compare_mods
from flexmod.tools.mod_names import Setting, choose_mask, device_name, fitting, usual_setting
from flexmod.tools.terminal import hint, in_color, table, times_faster, verdict

MOST_TILES = 1 << 28  # that show draws: they take 5 GB


@click.command()
@options.mask
@click.option("--seq", type=POSITIVE, default=8192, show_default=True, help="Queries, and keys.")
@click.option("--keys", type=POSITIVE, help="Keys, where there are more or fewer of them.")
@click.option("--batch", type=POSITIVE, help="For a mask that depends on b.")
@click.option("--heads", type=POSITIVE, help="For a mask that depends on h.")
@click.option("--block", type=POSITIVE, default=128, show_default=True, help="Queries and keys of a tile.")
@click.option("--size", type=POSITIVE, default=20, show_default=True, help="Rows of the picture, at most.")
@click.option("--color/--no-color", default=None, help="Colors; by default, on a terminal.")
@click.option("--plot", type=IMAGE, metavar="FILE", help="Draw it to an image, .png or .svg, as well.")
def show(
    mask: str,
    seq: int,
    keys: int | None,
    batch: int | None,
    heads: int | None,
    block: int,
    size: int,
    color: bool | None,
    plot: str | None,
) -> int:
    """The picture of a mask, its sparsity, and facts that are counted."""
    setting = Setting(batch or 1, heads or 1, seq, 64, torch.bfloat16, torch.device("cpu"))
    length = fitting(mask, setting).seq
    queries, keys = length_pair((length, keys or length))
    larger = block
    while tile_count(queries, larger) * tile_count(keys, larger) > MOST_TILES:
        larger *= 2
    if larger > block:
        raise click.UsageError(f"{queries} x {keys} positions have too many tiles. Add --block {larger}.")
    block_mask = create_block_mask(
        choose_mask(mask, setting), batch, heads, queries, keys, device="cpu", BLOCK_SIZE=block
    )
    lengths = f"{counted(queries, 'query')} x {counted(keys, 'key')}"
    title = f"{mask}, {lengths}, tiles of {block} x {block}: {block_mask.sparsity():.2f}% are skipped\n"
    terminal.show(title, *terminal.picture(block_mask, size, in_color(color)), color=color)
    if plot and plot.lower().endswith(".svg"):
        with open(plot, "w", encoding="utf-8") as file:
            file.write(block_mask.to_svg())
    elif plot:
        block_mask.plot(plot)
    hint(f"open {quote(plot)}" if plot else f"flexmod compare {quote(mask)}")
    return 0


# The percentage of skipped tiles below which a CPU shows no gain from skipping.
SHOWCASE = 60


@click.command()
@click.argument("masks", nargs=-1, metavar="[MASK]...")
@options.score
@options.sizes
@click.option("--seq", type=POSITIVE)
@options.flex
def compare(masks: tuple[str, ...], score: str | None, **sizes: Any) -> int:
    """flexmod beside SDPA: results, times, the picture of the mask. causal, if no MASK is given."""
    found: list[Comparison] = []
    for mask in masks or ("causal",):
        click.echo(f"{mask}: results, then times ...", err=True)
        found.append(compare_mods(mask, score_mod=score, show=False, **sizes))
        terminal.show(*[""] * (len(found) > 1), *found[-1].parts(in_color()))
    if len(found) > 1:
        terminal.show("", *_summary(found))
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
        rows.append((each.name, verdict(each.agrees), f"{skipped(each.block_mask):.0f}%", *gains))
    names = [f"faster than\n{timing.attention}" for timing in found[0].timings[:-1]]
    yield table(("mask", "results", "tiles\nskipped", *names), rows, words=(0, 1))
    yield "\nforward / backward; below 1x, SDPA is the faster one"
    setting = found[0].setting
    dense = [each.name for each in found if skipped(each.block_mask) < SHOWCASE]
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


# lengths of bench
ON_GPU = (1024, 2048, 4096, 8192, 16384)
ON_CPU = (512, 1024)


@click.command()
@click.argument("masks", nargs=-1, required=True, metavar="MASK...")
@options.score
@options.sizes
@click.option("--seq", "lengths", type=POSITIVE, multiple=True, help="A length; may be given several times.")
@click.option("--masked", is_flag=True, help="SDPA with the materialized mask too.")
@options.flex
@options.as_json
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
    setting = usual_setting(device, **sizes)
    lengths = lengths or (ON_GPU if setting.device.type == "cuda" else ON_CPU)
    steps = count(masks, lengths, masked, flex)
    with click.progressbar(length=steps, label="timing", file=sys.stderr) as bar:
        found = bench_mods(
            masks, setting, lengths, score=score, masked=masked, flex=flex, progress=lambda _: bar.update(1)
        )
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
    else:
        terminal.show(*found.parts())
    if plot:
        found.plot(plot)
        hint(f"open {quote(plot)}")
    elif not as_json:
        hint("the same command with --plot chart.png draws these times")
    return 0
