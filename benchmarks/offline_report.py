"""Compiles the kernels of some rows for chips that need not be present: registers, spills, shared memory.

    python -m benchmarks.offline_report
    python -m benchmarks.offline_report --targets sm_90 --rows "soft-cap + causal" --dims 128
    python -m benchmarks.offline_report --targets sm_90 --kernels dkdv --tiles 64x64x4x2 64x128x8x2

By default each kernel has the first tile of its ladder that fits the chip's shared memory, as in a launch.
With --tiles it has your tiles, BLOCK_M x BLOCK_N x warps x stages.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import workers
from benchmarks.rows import find
from flexmod.codegen.spec import KernelName, Tile
from flexmod.codegen.variant import variant
from flexmod.tools.ahead import VariantCall, compiled


@dataclass(frozen=True)
class Part:
    row: str
    head_dim: int
    dtype: str
    kernel: KernelName
    target: str
    tile: str


def main() -> None:
    options = arguments()
    groups = [
        [
            Part(row, dim, options.dtype, kernel, target, tile)
            for kernel in options.kernels
            for tile in options.tiles
        ]
        for target in options.targets
        for row in options.rows
        for dim in options.dims
    ]
    count = min(len(groups), os.cpu_count() or 1)
    outcomes = list(workers.run(measure, groups, workers=count, case_seconds=180, total_seconds=1800))
    order = {part: number for number, part in enumerate(part for group in groups for part in group)}
    outcomes.sort(key=lambda outcome: order[outcome.case])
    lines = [
        {**asdict(x.case), **(x.value or {"warnings": x.error.strip().splitlines()[-1:]})} for x in outcomes
    ]
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        (Path(options.out) / "offline_report.json").write_text(json.dumps(lines, indent=1))
    columns = (
        "target",
        "row",
        "head_dim",
        "kernel",
        "tile",
        "registers",
        "spills",
        "shared",
        "matrix",
        "warnings",
    )
    print(tabulate([[_cell(line.get(column, "-")) for column in columns] for line in lines], columns))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("forward", "dq", "dkdv")
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
    parser.add_argument("--rows", nargs="+", default=["causal", "soft-cap + causal"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    more = (*names, "diagonal", "scatter")
    parser.add_argument("--kernels", nargs="+", choices=more, default=names)
    parser.add_argument("--tiles", nargs="+", default=["ladder"])
    parser.add_argument(
        "--out", default=os.environ.get("OUT"), help="folder for results (default: OUT, or none)"
    )
    return parser.parse_args()


def measure(part: Part) -> dict[str, Any]:
    """Numbers of the first tile that fits, or of the last one tried."""
    dtype = getattr(torch, part.dtype)
    row = replace(find(part.row), head_dim=part.head_dim, value_dim=part.head_dim, dtype=dtype)
    mods = row.mods(row, torch.device("cpu"))
    extents = (row.batch, row.heads, row.length, row.length)
    made = variant(mods.score_mod, mods.mask_mod, head_dim=part.head_dim, dtype=dtype, extents=extents)
    kernels = made.kernels("forward" if part.kernel == "forward" else "backward")
    call = VariantCall(made)
    if not call.plan(kernels.spec.direction, kernels).launches(part.kernel):
        raise ValueError(f"{part.row} has no {part.kernel} kernel")
    own = () if part.tile == "ladder" else (Tile(*map(int, part.tile.split("x"))),)
    for tile in own or kernels.ladder(part.kernel):
        report = compiled(call, kernels, part.kernel, part.target, {part.kernel: tile})
        if report.fits:
            break
    return {
        "tile": str(tile),
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        "matrix": dict(report.matrix_instructions),
        "warnings": [*([] if report.fits else ["does not fit"]), *report.warnings],
    }


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in sorted(value.items()))
    return "; ".join(x[:60] for x in value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
