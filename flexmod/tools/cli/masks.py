"""The commands about masks, which need no Triton: show, compare and bench."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import click
import torch
from rich.console import RenderableType
from rich.text import Text

from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.parts import length_pair
from flexmod.block_mask.tiles import tile_count
from flexmod.errors import FlexOnCpuError
from flexmod.errors.base import MissingPlots, counted
from flexmod.ir.graph import dtype_name
from flexmod.tools import comparison, terminal
from flexmod.tools.cli import options
from flexmod.tools.cli.options import IMAGE, POSITIVE
from flexmod.tools.comparison import Comparison, Timing, skipped
from flexmod.tools.mod_names import Mods, Setting, choose, choose_mask, device_name, fitting, usual_setting
from flexmod.tools.terminal import hint, in_color, plain, table, verdict

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
        found.append(comparison.compare(mask, score_mod=score, show=False, **sizes))
        terminal.show(*[""] * (len(found) > 1), *found[-1].parts(in_color()))
    if len(found) > 1:
        terminal.show("", *_summary(found))
    agree = all(each.agrees for each in found)
    if agree:
        named = " ".join(map(quote, masks or ("causal",)))
        hint(f"flexmod bench {named}{options.with_score(score)} --plot chart.png")
    return 0 if agree else 1


def _summary(found: list[Comparison]) -> Iterator[RenderableType]:
    """The masks side by side, and what the table shows."""
    rows = []
    for each in found:
        *others, ours = each.timings
        gains = (Text(" / ").join(other.gains(ours)) for other in others)
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
    forward, backward = peer.gains(ours)
    yield f"Best beside {peer.attention}: {best.name}, forward {forward} as fast, backward {backward}."


# A chart's line style for each attention, and the color of SDPA causal; each mask has a color of its own.
STYLES = {"flexmod": "-", "SDPA + mask": ":", "SDPA": ":"}
BASELINE = "#7f7f7f"


@dataclass(frozen=True)
class Row:
    """One attention at one length; `sparsity` is the percentage of scores whose tiles the mask skips.

    `mask` is "" for causal SDPA, which has no other mask.
    """

    seq: int
    mask: str
    sparsity: float
    timing: Timing


@dataclass(frozen=True)
class Benchmark:
    """The times that `bench` prints; `str` gives the table. The first row of each length is causal SDPA."""

    name: str
    setting: Setting
    device: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        s = self.setting
        return f"{self.name}, B={s.batch} H={s.heads} D={s.dim} {dtype_name(s.dtype)} on {self.device}"

    def __str__(self) -> str:
        return plain(*self.parts())

    def parts(self) -> tuple[Any, ...]:
        """Returns the title and the table as renderables of rich."""
        rows = []
        for row in self.rows:
            sizes = (row.seq if row.mask == "" else "", row.mask, f"{row.sparsity:.1f}%")
            speed_ups = self.baseline(row.seq).gains(row.timing)
            rows.append((*sizes, *row.timing.cells(speed_ups)))
        of_each = ("TFLOP/s", "speed-up")
        header = ("seq", "mask", "skipped", "attention", "forward\nms", *of_each, "backward\nms", *of_each)
        note = f"\nspeed-up: over {self.rows[0].timing.attention} of the same length" if self.rows else ""
        return self.title, "", table(header, rows, words=(1, 3)), note

    def baseline(self, seq: int) -> Timing:
        """Returns the times of causal SDPA at a length."""
        return next(row.timing for row in self.rows if row.seq == seq)

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict for JSON: times in milliseconds, rates in TFLOP/s of the mask's tiles."""
        setting = {**asdict(self.setting), "dtype": str(self.setting.dtype), "device": self.device}
        del setting["seq"]
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            name, *numbers = row.timing
            timing = zip(Timing._fields, [name, *(float(f"{x:.4g}") for x in numbers)], strict=True)
            rows.append({"seq": row.seq, "mask": row.mask, "sparsity": row.sparsity, **dict(timing)})
        return {"name": self.name, **setting, "rows": rows}

    def plot(self, path: str | Path) -> None:
        """Draws times over lengths, forward and backward, with each mask's speed-up. Raises MissingPlots."""
        try:
            from matplotlib import colormaps
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPlots() from error
        figure = Figure(figsize=(11.0, 5.2), layout="constrained")
        names = list(dict.fromkeys((row.mask, row.timing.attention) for row in self.rows))
        masks = [mask for mask in dict.fromkeys(mask for mask, _ in names) if mask]
        colors = {"": BASELINE, **dict(zip(masks, colormaps["tab10"].colors, strict=False))}  # type: ignore[attr-defined]
        lengths = sorted({row.seq for row in self.rows})
        for direction, axis in zip(("forward", "backward"), figure.subplots(1, 2), strict=True):
            for mask, attention in names:
                own = [row for row in self.rows if (row.mask, row.timing.attention) == (mask, attention)]
                times = [getattr(row.timing, f"{direction}_ms") for row in own]
                label = f"{mask}: {attention}" if mask else attention
                style = {"color": colors[mask], "linestyle": STYLES.get(attention, "--")}
                axis.plot([row.seq for row in own], times, marker="o", markersize=4, label=label, **style)
                if attention == "flexmod":
                    gain = getattr(self.baseline(own[-1].seq), f"{direction}_ms") / times[-1]
                    axis.annotate(
                        f"{gain:.2g}x", (own[-1].seq, times[-1]), (6, 0), textcoords="offset points",
                        va="center", color=colors[mask],
                    )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(lengths, [str(length) for length in lengths])
            axis.minorticks_off()
            axis.margins(x=0.2)
            axis.set_title(direction, fontsize="medium")
            axis.set_xlabel("length")
            axis.set_ylabel("milliseconds")
            axis.grid(alpha=0.3)
        figure.suptitle(f"{self.title}\nnumbers: speed-up over {names[0][1]}", fontsize="medium")
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
        figure.savefig(path, dpi=150)


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
    if flex and setting.device.type != "cuda":
        raise FlexOnCpuError(device=setting.device.type)
    lengths = lengths or (ON_GPU if setting.device.type == "cuda" else ON_CPU)
    steps = len(lengths) * (1 + len(masks) * (1 + masked + flex))
    timing = _rows(masks, setting, lengths, score, masked, flex)
    with click.progressbar(timing, steps, "timing", file=sys.stderr) as bar:
        rows = tuple(bar)
    names = ", ".join(masks)
    name = f"{names} with {score}" if score else names
    found = Benchmark(name, setting, device_name(setting.device), rows)
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


def _rows(
    mods: Sequence[str], setting: Setting, lengths: Sequence[int], score: str | None, masked: bool, flex: bool
) -> Iterator[Row]:
    """Times masks and SDPA at several lengths, forward and backward. Times are medians."""
    known: set[int] = set()
    for seq, mod in itertools.product(lengths, mods):
        sized = fitting(mod, replace(setting, seq=seq))
        inputs = comparison.random_inputs(sized)
        if sized.seq not in known:
            known.add(sized.seq)
            causal = comparison.timed(comparison.sdpa_causal(sized), inputs, sized, comparison.CAUSAL)
            yield Row(sized.seq, "", comparison.CAUSAL, causal)
        chosen = choose(mod, sized, score)
        block_mask = comparison.block_mask_of(chosen.mask, sized)
        sparsity = skipped(block_mask)
        for attention in _attentions(chosen, block_mask, sized, masked, flex):
            yield Row(sized.seq, mod, sparsity, comparison.timed(attention, inputs, sized, sparsity))


def _attentions(
    chosen: Mods, block_mask: BlockMask | None, setting: Setting, masked: bool, flex: bool
) -> Iterator[comparison.Implementation]:
    """Yields what bench times; each has its memory to itself."""
    if masked:
        yield comparison.sdpa_masked(chosen.mask, setting)
    if flex:
        yield comparison.compiled_flex(chosen, setting)
    yield comparison.flexmod_attention("flexmod", chosen.score, block_mask)
