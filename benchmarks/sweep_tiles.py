"""Times tile sizes of the forward, dQ and dK/dV kernels on this GPU, to choose the ladder of tile sizes from.

    python -m benchmarks.sweep_tiles                        D 64 and 128; no-op, causal, soft-cap
    python -m benchmarks.sweep_tiles --dims 256 --kernels dq dkdv --tiles 64x32x4x2 32x32x4x1
    python -m benchmarks.sweep_tiles --cpu-smoke            tiny sizes without a GPU

A tile is BLOCK_M x BLOCK_N x warps x stages; "default" is flexmod's own choice. First worker processes
compile all of them side by side and check them against the default's results; then one process times them in
turn. The dQ and dK/dV times are backward calls that ask for those gradients alone; delta is counted in.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import flexmod
from benchmarks import workers
from benchmarks.gpu_time import milliseconds
from benchmarks.rows import Row, find

MASKS = {
    "no-op": "no-op",
    "causal": "causal",
    "softcap": "soft-cap + causal",
    "documents": "8 documents + causal",
    "window": "window 1024 + causal",
}
TILES = {
    "forward": [
        "128x128x8x2", "128x128x8x3", "128x64x8x2", "128x64x8x3", "128x64x8x4", "128x64x4x2", "128x64x4x3",
        "128x64x4x4", "64x128x4x2", "64x64x4x2", "64x64x4x3", "64x64x4x4", "128x32x4x3", "128x32x4x4",
    ],
    "dq": [
        "128x128x8x2", "128x64x8x2", "128x64x8x3", "128x64x4x2", "64x128x4x2", "64x64x4x2", "64x64x4x3",
        "64x64x8x2", "128x32x4x2", "128x32x8x3", "64x32x4x3",
    ],
    "dkdv": [
        "128x128x8x2", "64x128x8x2", "64x128x8x3", "64x128x4x2", "128x64x4x2", "64x64x4x2", "64x64x4x3",
        "64x64x8x2", "32x128x4x2", "32x128x8x2", "32x128x8x3", "32x64x4x3",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    kernel: str
    head_dim: int
    mask: str
    tile: str
    timed: bool
    smoke: bool


def main() -> None:
    options = arguments()
    trials = [
        Trial(kernel, head_dim, mask, tile, timed=False, smoke=options.cpu_smoke)
        for head_dim in options.dims
        for kernel in options.kernels
        for mask in options.masks
        for tile in ["default", *(options.tiles or TILES[kernel])]
    ]
    count = min(14, os.cpu_count() or 1)
    groups = [trials[start : start + 4] for start in range(0, len(trials), 4)]
    compiled = list(
        workers.run(run, groups, workers=count, case_seconds=60, total_seconds=options.compile_seconds)
    )
    good = [replace(x.case, timed=True) for x in compiled if not x.error]
    results = [{**asdict(x.case), "error": x.error} for x in compiled if x.error]
    timed = workers.run(
        run, [good], workers=1, case_seconds=20, total_seconds=options.time_seconds, patience=len(good)
    )
    results += [{**asdict(x.case), "ms": x.value, "error": x.error} for x in timed]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep_tiles.json").write_text(json.dumps(results, indent=1))
    for head_dim in options.dims:
        for kernel in options.kernels:
            part = [x for x in results if (x["head_dim"], x["kernel"]) == (head_dim, kernel)]
            print(table(part, options.masks), end="\n\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--kernels", nargs="+", choices=sorted(TILES), default=list(TILES))
    parser.add_argument("--masks", nargs="+", choices=sorted(MASKS), default=["no-op", "causal", "softcap"])
    parser.add_argument("--tiles", nargs="+", help="instead of the built-in lists, e.g. 128x64x8x3")
    parser.add_argument("--compile-seconds", type=float, default=90)
    parser.add_argument("--time-seconds", type=float, default=90)
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "."), help="folder for results (default: OUT or .)"
    )
    return parser.parse_args()


def run(trial: Trial) -> float | None:
    """Milliseconds, or None after a check of the results against the default's."""
    row = find(MASKS[trial.mask])
    batch, length = (2, 8192) if trial.timed and not trial.smoke else (1, 512)
    row = replace(row, batch=batch, length=length, head_dim=trial.head_dim, value_dim=trial.head_dim)
    call = prepared(row, trial, options_of(trial))
    if trial.timed:
        return milliseconds(call)
    expected = prepared(row, trial, {})()
    for ours, default in zip(call(), expected, strict=True):
        relative = ((ours.double() - default.double()).norm() / default.double().norm()).item()
        if not relative < 1e-2:
            raise ArithmeticError(f"WRONG: {relative:.1e} from the default's result")
    return None


def options_of(trial: Trial) -> dict[str, int]:
    if trial.tile == "default":
        return {}
    block_m, block_n, warps, stages = (int(part) for part in trial.tile.split("x"))
    suffix = {"forward": "", "dkdv": "1", "dq": "2"}[trial.kernel]
    way = "fwd_" if trial.kernel == "forward" else "bwd_"
    return {
        f"{way}BLOCK_M{suffix}": block_m,
        f"{way}BLOCK_N{suffix}": block_n,
        f"{way}num_warps": warps,
        f"{way}num_stages": stages,
    }


def prepared(row: Row, trial: Trial, options: dict[str, int]) -> Callable[[], tuple[Tensor, ...]]:
    """The call to time: a forward, or the part of a backward."""
    device = torch.device("cpu" if trial.smoke else "cuda")
    torch.manual_seed(0)
    shape = (row.batch, 1 if trial.smoke else row.heads, row.length, row.head_dim)
    query, key, value, grad_out = (torch.randn(shape, device=device, dtype=row.dtype) for _ in range(4))
    mods = row.mods(row, device)
    mask = None
    if mods.mask_mod is not None:
        mask = flexmod.create_block_mask(mods.mask_mod, None, None, row.length, row.length, device=device)
    wanted = {"forward": (), "dq": (query,), "dkdv": (key, value)}[trial.kernel]
    for x in wanted:
        x.requires_grad_()

    def forward() -> Tensor:
        out = flexmod.flex_attention(
            query, key, value, score_mod=mods.score_mod, block_mask=mask, kernel_options=options or None
        )
        assert isinstance(out, Tensor)
        return out

    if trial.kernel == "forward":
        return lambda: (forward(),)
    out = forward()
    return lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True)


def table(results: list[dict[str, Any]], masks: list[str]) -> str:
    """Tiles in the order of their mean time over the default's; the best of each mask is starred."""
    if not results:
        return ""
    times = {(x["tile"], x["mask"]): x["ms"] for x in results if x.get("ms")}
    faults = {(x["tile"], x["mask"]): x["error"].strip().splitlines()[-1][:28] for x in results if x["error"]}
    best = {mask: min((ms for (_, of), ms in times.items() if of == mask), default=0.0) for mask in masks}

    def rank(tile: str) -> float:
        return sum(times.get((tile, mask), 1e3) / (best[mask] or 1.0) for mask in masks)

    def cell(tile: str, mask: str) -> str:
        ms = times.get((tile, mask))
        return faults.get((tile, mask), "-") if ms is None else f"{ms:.3f}{'*' if ms == best[mask] else ''}"

    tiles = sorted({x["tile"] for x in results}, key=rank)
    title = f"{results[0]['kernel']} D{results[0]['head_dim']}, ms"
    return tabulate([[tile, *(cell(tile, mask) for mask in masks)] for tile in tiles], [title, *masks])


if __name__ == "__main__":
    main()
