"""Compiles the kernels of some rows for chips that need not be present: registers, spills, shared memory.

    python -m benchmarks.offline_report
    python -m benchmarks.offline_report --targets sm_90 --rows "soft-cap + causal" --dims 128
    python -m benchmarks.offline_report --targets sm_90 --kernels dkdv --tiles 64x64x4x2 64x128x8x2

Each kernel is shown with the first tile of its ladder that fits the chip's shared memory, as a launch finds
it; or with tiles of your own, BLOCK_M x BLOCK_N x warps x stages.
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
from flexmod.ahead import TYPES, captured_types, signature_of
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelName, KernelSpec, Tile
from flexmod.compiler import compile_mod, kernels_for
from flexmod.ir.trace import trace
from flexmod.runtime import offline


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
    kernels, types = compiled(part, dtype)
    kernel = getattr(kernels.module, f"{part.kernel}_kernel")
    signature, constexprs = signature_of(kernel.arg_names, types, TYPES[dtype])
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name.startswith("stride_")]
    own = () if part.tile == "ladder" else (Tile(*map(int, part.tile.split("x"))),)
    for tile in own or kernels.ladder(part.kernel):
        sides = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        report = offline.compile(
            kernel,
            signature,
            constexprs | sides,
            part.target,
            num_warps=tile.warps,
            num_stages=tile.stages,
            divisible=aligned,
        )
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


def compiled(part: Part, dtype: torch.dtype) -> tuple[Kernels, dict[str, str]]:
    """The kernels of a row, and Triton's types of the parameters that its mods brought along."""
    row = replace(find(part.row), head_dim=part.head_dim, value_dim=part.head_dim, dtype=dtype)
    mods = row.mods(row, torch.device("cpu"))
    extents = (row.batch, row.heads, row.length, row.length)
    score = trace(mods.score_mod, "score") if mods.score_mod else None
    mask = trace(mods.mask_mod, "mask") if mods.mask_mod else None
    spec = KernelSpec(
        q_dtype=dtype,
        k_dtype=dtype,
        v_dtype=dtype,
        head_dim=part.head_dim,
        value_dim=part.head_dim,
        mask_block=(128, 128) if mask else None,
        backward=part.kernel != "forward",
    )
    lowered = [compile_mod(mod.graph, extents).lowered if mod else None for mod in (score, mask)]
    wanted = tuple(n for n, tensor in enumerate(score.tensors) if tensor.requires_grad) if score else ()
    kernels = kernels_for(spec, *lowered, wanted=wanted if spec.backward else ())
    grads = kernels.captures.by_kernel(kernels.grad)
    if part.kernel in ("diagonal", "scatter") and grads[part.kernel] is None:
        raise ValueError(f"{part.row} has no {part.kernel} kernel")
    types: dict[str, str] = {}
    for text, mod in ((kernels.score, score), (grads.get(part.kernel), score), (kernels.mask, mask)):
        types |= captured_types(text, mod.tensors if mod else ())
    return kernels, types


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in sorted(value.items()))
    return "; ".join(x[:60] for x in value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
