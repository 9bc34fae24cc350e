"""Attention on float8 beside bfloat16, in one run.

    python -m benchmarks.float8                     both sizes, all rows and ways: about two minutes
    python -m benchmarks.float8 --rows no-op causal --ways bfloat16 float8
    python -m benchmarks.float8 --cpu-smoke         tiny sizes without a GPU: does the script work

Several processes compile first. Then the ways of a row take turns for some rounds; a time is the median of
the rounds' medians, of the GPU alone with a cold L2 (`gpu_time.py`). It includes all that a call does: the
conversion or transposition of values, and the product of the output with their scale. The tensors are
quantized beforehand, by head. "error" is the relative root mean square error against bfloat16's output.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import flexmod
from benchmarks import workers
from benchmarks.gpu_time import milliseconds, wait_for
from benchmarks.rows import D128, Row
from flexmod import Scales, create_block_mask, flex_attention

OTHERS = ("prefix 2048", "NATTEN 7x7", "image window 8", "relative position", "causal as score mod")
ROWS = {row.name: row for row in D128 if row.name not in OTHERS}
SIZES = ((1, 16384, 128), (4, 8192, 128), (4, 8192, 64), (2, 8192, 256))  # batch, length, head dimension
WAYS = (
    "bfloat16", "float8", "float8, half values", "keys and values", "portable bfloat16", "portable float8",
    "portable float8, half values",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", default=[*ROWS])
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prepare", type=int, default=14, help="processes that compile side by side")
    parser.add_argument("--out", default=".")
    parser.add_argument("--cpu-smoke", action="store_true")
    options = parser.parse_args()
    sizes = [(1, 256, 32)] if options.cpu_smoke else [SIZES[number] for number in options.sizes]
    if not options.cpu_smoke:
        compile_all(options, dict.fromkeys(size[2] for size in sizes))
    found = [measure(name, options.ways, size, options.rounds) for size in sizes for name in options.rows]
    (Path(options.out) / "float8.json").write_text(json.dumps(found, indent=1))
    print(tabulate([table_row(row) for row in found], headers="keys", tablefmt="github"))


def compile_all(options: argparse.Namespace, dims: Iterable[int]) -> None:
    cases = [[(name, way, (1, 1024, dim))] for dim in dims for name in options.rows for way in options.ways]
    limits = {"workers": options.prepare, "case_seconds": 100, "total_seconds": 200}
    for outcome in workers.run(prepare, cases, **limits):
        if outcome.error:
            print(f"{outcome.case}: {outcome.error[-300:]}", flush=True)


def prepare(case: tuple[str, str, tuple[int, int, int]]) -> None:
    """Compiles the kernels of a row."""
    name, way, size = case
    call_of(ROWS[name], way, size)()
    torch.cuda.synchronize()


def call_of(row: Row, way: str, size: tuple[int, int, int]) -> Callable[[], Tensor]:
    """Returns a call of one way, on operands that are the same for all ways."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, length, dim = size
    row = replace(row, batch=batch, length=length, head_dim=dim, value_dim=dim)
    variant = row.mods(row, device)
    mask = None
    if variant.mask_mod is not None:
        mask = create_block_mask(variant.mask_mod, None, None, length, length, device=device)
    torch.manual_seed(0)
    given = [torch.randn(batch, row.heads, length, dim, device=device) for _ in range(3)]
    options: dict[str, Any] = {"score_mod": variant.score_mod, "block_mask": mask}
    if "portable" in way:
        options["kernel_options"] = {"TEMPLATE": "portable"}
    scales: list[Tensor | None] = [None, None, None]
    float8 = (1, 2) if way.startswith("keys") else () if "bfloat16" in way else (0, 1, 2)
    for place, x in enumerate(given):
        if place in float8:
            # a kernel gets values by block in a half type
            by = "block" if place == 2 and "half" in way else "head"
            given[place], scales[place] = flexmod.quantize(x, torch.float8_e4m3fn, by)
        else:
            given[place] = x.to(torch.bfloat16)
    options["scales"] = Scales(*scales) if float8 else None
    return lambda: flex_attention(*given, **options)


@torch.no_grad()
def measure(name: str, ways: list[str], size: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Measures the ways of a row."""
    row = ROWS[name]
    reference = call_of(row, "bfloat16", size)().float()
    calls = {way: call_of(row, way, size) for way in ways}
    size_of_all = reference.norm()
    errors = {way: float((call().float() - reference).norm() / size_of_all) for way, call in calls.items()}
    found = {"row": name, "size": size, "ms": in_turns(calls, rounds), "error": errors}
    print(json.dumps(found), flush=True)
    return found


def in_turns(calls: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Returns the time of each call, ms."""
    waits = max((wait_for(call) for call in calls.values()), default=0.0)
    measured: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(rounds):
        for way, call in calls.items():
            measured[way].append(milliseconds(call, waits))
    return {way: statistics.median(found) for way, found in measured.items()}


def table_row(found: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the printed table: milliseconds, and the share of bfloat16's time."""
    cells = {"row": found["row"], "batch, length, D": found["size"]}
    for way, ms in found["ms"].items():
        base = found["ms"].get("portable bfloat16" if "portable" in way else "bfloat16", ms)
        cells[way] = f"{ms:.3f} ({ms / base:.2f})"
    return cells


if __name__ == "__main__":
    main()
