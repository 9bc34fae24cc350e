"""bench(): times masks and SDPA at several lengths; gives a table, JSON or a chart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flexmod.errors import FlexOnCpuError
from flexmod.errors.base import MissingPlots
from flexmod.ir.graph import dtype_name
from flexmod.tools import comparison
from flexmod.tools.comparison import Timing
from flexmod.tools.mod_names import Setting, choose, device_name, fitting
from flexmod.tools.terminal import plain, table, times_faster

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
    """The result of `bench`; `str` gives the table. The first row of each length is causal SDPA."""

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
            name, forward, rate, backward, backward_rate = row.timing.cells()
            base = self.baseline(row.seq)
            gain = times_faster(base.forward_ms, row.timing.forward_ms)
            backward_gain = times_faster(base.backward_ms, row.timing.backward_ms)
            sizes = (row.seq if row.mask == "" else "", row.mask, f"{row.sparsity:.1f}%", name)
            rows.append((*sizes, forward, rate, gain, backward, backward_rate, backward_gain))
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


def bench(
    mods: Sequence[str],
    setting: Setting,
    lengths: Sequence[int],
    *,
    score: str | None = None,
    masked: bool = False,
    flex: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Benchmark:
    """Times masks and SDPA at several lengths, forward and backward. Times are medians.

        mods, score names, see `mod_names.choose`
        setting     all sizes except the lengths
        masked      also times SDPA with the materialized mask, a length x length boolean tensor
        flex        also times torch's compiled flex_attention (CUDA only)
        progress    called with the name of each attention after its measurement

    Raises the errors of `choose`, and FlexOnCpuError.
    """
    if flex and setting.device.type != "cuda":
        raise FlexOnCpuError(device=setting.device.type)
    rows: list[Row] = []
    for seq, mod in itertools.product(lengths, mods):
        sized = fitting(mod, replace(setting, seq=seq))
        inputs = comparison.random_inputs(sized)
        if sized.seq not in (row.seq for row in rows):
            causal = comparison.timed(comparison.sdpa_causal(sized), inputs, sized, comparison.CAUSAL)
            rows.append(Row(sized.seq, "", comparison.CAUSAL, causal))
            progress(f"causal SDPA at {sized.seq}")
        for sparsity, attention in _attentions(mod, sized, score, masked, flex):
            rows.append(Row(sized.seq, mod, sparsity, comparison.timed(attention, inputs, sized, sparsity)))
            progress(f"{attention.name} of {mod} at {sized.seq}")
    names = ", ".join(mods)
    name = f"{names} with {score}" if score else names
    return Benchmark(name, setting, device_name(setting.device), tuple(rows))


def count(mods: Sequence[str], lengths: Sequence[int], masked: bool, flex: bool) -> int:
    """Returns the number of attentions that a bench times."""
    return len(lengths) * (1 + len(mods) * (1 + masked + flex))


def _attentions(
    mod: str, setting: Setting, score: str | None, masked: bool, flex: bool
) -> Iterator[tuple[float, comparison.Implementation]]:
    chosen = choose(mod, setting, score)
    block_mask = comparison.block_mask_of(chosen.mask, setting)
    sparsity = comparison.skipped(block_mask)
    if masked:
        yield sparsity, comparison.sdpa_masked(chosen.mask, setting)
    if flex:
        yield sparsity, comparison.compiled_flex(chosen, setting)
    yield sparsity, comparison.flexmod_attention("flexmod", chosen.score, block_mask)
