"""bench(): times a variant and SDPA at several lengths; gives a table, JSON or a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from flexmod.errors import FlexOnCpuError
from flexmod.errors.commands import MissingPlots
from flexmod.tools.mod_names import Setting, choose, fitting
from flexmod.tools.peers import (
    Implementation,
    Timing,
    block_mask_of,
    compiled_flex,
    flexmod_attention,
    random_inputs,
    sdpa_causal,
    sdpa_masked,
    timed,
)

# A plot's line for flexmod, and the colors of the others.
OURS = {"color": "#1d5fa8", "linewidth": 2.2, "zorder": 3}
OTHERS = ("#7f7f7f", "#c4722a", "#3c8d5a")


@dataclass(frozen=True)
class Row:
    """One attention at one length; `sparsity` is the percentage of scores whose tiles the mask skips."""

    seq: int
    sparsity: float
    timing: Timing


@dataclass(frozen=True)
class Benchmark:
    """The result of `bench`; `str` gives the table."""

    name: str
    setting: Setting
    device: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        s = self.setting
        dtype = str(s.dtype).removeprefix("torch.")
        title = f"{self.name}, B={s.batch} H={s.heads} D={s.dim} {dtype} on {self.device}"
        header = ("seq", "skipped", "attention", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s")
        rows = [(row.seq, f"{row.sparsity:.1f}%", *row.timing) for row in self.rows]
        table = tabulate(rows, header, floatfmt=("", "", "", ".3f", ".3g", ".3f", ".3g"))
        return f"{title}\n\n{table}"

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict for JSON: times in milliseconds, rates in TFLOP/s of the mask's tiles."""
        setting = {**asdict(self.setting), "dtype": str(self.setting.dtype), "device": self.device}
        del setting["seq"]
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            name, *numbers = row.timing
            timing = zip(Timing._fields, [name, *(float(f"{x:.4g}") for x in numbers)], strict=True)
            rows.append({"seq": row.seq, "sparsity": row.sparsity, **dict(timing)})
        return {"name": self.name, **setting, "rows": rows}

    def plot(self, path: str | Path) -> None:
        """Draw TFLOP/s over lengths, forward and backward, to a file. Raises MissingPlots."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPlots() from error
        figure = Figure(figsize=(9.0, 4.0), layout="constrained")
        axes = figure.subplots(1, 2, sharex=True)
        names = list(dict.fromkeys(row.timing.attention for row in self.rows))
        lengths = sorted({row.seq for row in self.rows})
        colors = iter(OTHERS)
        styles = {n: OURS if n == "flexmod" else {"color": next(colors), "linewidth": 1.4} for n in names}
        for direction, axis in zip(("forward", "backward"), axes, strict=True):
            for name in names:
                own = [row for row in self.rows if row.timing.attention == name]
                rates = [getattr(row.timing, f"{direction}_tflops") for row in own]
                axis.plot([row.seq for row in own], rates, label=name, marker="o", **styles[name])
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [str(length) for length in lengths])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_title(direction, fontsize="medium")
            axis.set_xlabel("length")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("TFLOP/s of the tiles that are kept")
        figure.suptitle(str(self).partition("\n")[0], fontsize="medium")
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
        )
        figure.savefig(path, dpi=150)


def bench(
    mod: str,
    setting: Setting,
    lengths: Sequence[int],
    *,
    score: str | None = None,
    masked: bool = False,
    flex: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Benchmark:
    """Times a variant and SDPA at several lengths, forward and backward. Times are medians.

        mod, score  names, see `mod_names.choose`
        setting     all sizes except the lengths
        masked      also times SDPA with the materialized mask, a length x length boolean tensor
        flex        also times torch's compiled flex_attention (CUDA only)
        progress    called with the name of each attention after its measurement

    Raises the errors of `choose`, and FlexOnCpuError.
    """
    if flex and setting.device.type != "cuda":
        raise FlexOnCpuError(device=setting.device.type)
    rows = []
    for seq in lengths:
        sized = replace(setting, seq=seq)
        sized = replace(sized, seq=fitting(mod, sized))
        inputs = random_inputs(sized)
        for sparsity, attention in _attentions(mod, sized, score, masked, flex):
            rows.append(Row(sized.seq, sparsity, timed(attention, inputs, sized)))
            progress(f"{attention.name} at {sized.seq}")
    kind = setting.device.type
    device = torch.cuda.get_device_name(setting.device) if kind == "cuda" else kind
    return Benchmark(f"{mod} with {score}" if score else mod, setting, device, tuple(rows))


def count(lengths: Sequence[int], masked: bool, flex: bool) -> int:
    """Returns the number of attentions that a bench times."""
    return len(lengths) * (2 + masked + flex)


def _attentions(
    mod: str, setting: Setting, score: str | None, masked: bool, flex: bool
) -> Iterator[tuple[float, Implementation]]:
    chosen = choose(mod, setting, score)
    block_mask = block_mask_of(chosen.mask, setting)
    sparsity = 0.0 if block_mask is None else block_mask.sparsity()
    density = 1 - sparsity / 100
    yield 50.0, sdpa_causal(setting)
    if masked:
        yield sparsity, sdpa_masked(chosen.mask, setting, density)
    if flex:
        yield sparsity, compiled_flex(chosen, setting, density)
    yield sparsity, flexmod_attention("flexmod", chosen.score, block_mask, density)
