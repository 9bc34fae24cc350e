"""The first training step of a process that finds nothing compiled: seconds by stage, in turn and in threads.

    python -m benchmarks.cold_start [--rows causal] [--rounds 3] [--timeline] [--out DIR] [--cpu-smoke]

Each step has a process of its own, with empty caches of flexmod and Triton. A process first imports torch,
starts CUDA and runs a backward of torch's own, for which torch imports sympy; this is not counted. "floor" is
the slowest kernel's own compile in turn, and 0.7 s. With `--timeline`, one more process of each row
prints which thread did what when; it imports the compiler before the step.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate

from benchmarks.timeline import Timeline
from benchmarks.timeline import table as of_threads

ROOT = Path(__file__).parents[1]
ROWS = (
    "causal", "soft-cap + causal", "ALiBi + causal", "window 1024 + causal", "8 documents + causal"
)  # fmt: skip
MODES = ("in turn", "in threads")
STAGES = ("import", "triton", "mask", "forward", "backward")
STEP = STAGES[1:]  # a first step imports Triton
BEYOND = 0.7  # seconds that a step may take besides its slowest kernel
SECONDS = 300  # for one process

Found = dict[str, Any]


def measure(name: str, small: bool, watched: bool = False) -> Found:
    """The first step of this process: seconds by stage, and of each kernel's own compile.

    `watched`: also the rows of a Timeline.
    """
    device = torch.device("cpu" if small else "cuda")
    leaf = torch.ones(1, device=device, requires_grad=True)
    (leaf * leaf).backward(torch.ones_like(leaf))
    leaf.sum().item()
    found: Found = {}
    timeline = Timeline()

    def stage(name: str, run: Callable[[], Any]) -> Any:
        return timeline.note(name, lambda: _stage(found, name, run))

    stage("import", lambda: importlib.import_module("flexmod"))
    from benchmarks.rows import find
    from flexmod import create_block_mask, flex_attention

    row = find(name)
    if small:
        row = replace(row, batch=1, heads=2, length=256)
    batch, heads, length = row.batch, row.heads, row.length
    given = row.mods(row, device)
    query, key, value = (
        torch.randn(batch, heads, length, dim, dtype=row.dtype, device=device).requires_grad_()
        for dim in (row.head_dim, row.head_dim, row.value_dim)
    )
    stage("triton", lambda: importlib.import_module("triton"))
    _listen(found)
    if watched:
        timeline.watch()

    def mask() -> Any:
        return create_block_mask(given.mask_mod, None, None, length, length, device=device)

    block_mask = stage("mask", mask)
    out = stage("forward", lambda: flex_attention(query, key, value, given.score_mod, block_mask))
    grad_out = torch.randn_like(out)
    stage("backward", lambda: out.backward(grad_out))
    return {**found, "timeline": timeline.rows} if watched else found


def _stage(found: Found, name: str, run: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found[name] = time.perf_counter() - started
    return result


def _listen(found: Found) -> None:
    """Has Triton note its stages of each compile; the build of a launcher is none of them."""

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        stages = [times.ir_initialization, *(spent for _, spent in times.lowering_stages)]
        kernels[src.name] = max(kernels.get(src.name, 0.0), sum(stages) / 1e6)
        found["found"] += cache_hit

    kernels: dict[str, float] = {}
    found |= {"kernels": kernels, "found": 0}

    triton: Any = importlib.import_module("triton")
    triton.knobs.compilation.listener = note


def started(name: str, mode: str, small: bool, watched: bool = False) -> Found:
    """What `measure` finds in a new process with empty caches."""
    call = f"measure({name!r}, {small}, {watched})"
    script = f"import json; from benchmarks.cold_start import measure; print(json.dumps({call}))"
    count = "1" if mode == "in turn" else str(max(4, os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "FLEXMOD_CACHE_DIR": f"{folder}/flexmod",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "FLEXMOD_COMPILE_THREADS": count,
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"{name}, {mode}: {done.stderr}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return {"row": name, "mode": mode, **found}


def table(results: Sequence[Found]) -> str:
    """Medians over the rounds, a line for each row and mode."""
    lines = []
    for name, mode in dict.fromkeys((found["row"], found["mode"]) for found in results):
        of_row = [found for found in results if found["row"] == name]
        rounds = [found for found in of_row if found["mode"] == mode]
        stages = [statistics.median(found[stage] for found in rounds) for stage in STAGES]
        step = statistics.median(sum(found[stage] for stage in STEP) for found in rounds)
        kernel, floor = _slowest([found for found in of_row if found["mode"] == MODES[0]])
        lines.append([name, mode, *stages, step, floor, kernel])
    head = ["seconds", "", *STAGES, "step", "floor", "slowest kernel"]
    return tabulate(lines, head, tablefmt="github", floatfmt=".2f", missingval="-")


def _slowest(in_turn: Sequence[Found]) -> tuple[str | None, float | None]:
    """The kernel whose compile takes longest, by the medians of compiles in turn, and the floor of a step."""
    names = sorted({name for found in in_turn for name in found["kernels"]})
    times = {name: statistics.median(found["kernels"][name] for found in in_turn) for name in names}
    if not times:
        return None, None
    slowest = max(times, key=times.__getitem__)
    return slowest, times[slowest] + BEYOND


@click.command(help=__doc__)
@click.option("--rows", multiple=True, type=click.Choice(ROWS), default=ROWS)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--timeline", is_flag=True, help="Also prints a step of each row by thread.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for cold_start.json.")
@click.option("--cpu-smoke", is_flag=True, help="Tries the script on small CPU tensors.")
def main(rows: tuple[str, ...], rounds: int, timeline: bool, out: Path | None, cpu_smoke: bool) -> None:
    if not (cpu_smoke or torch.cuda.is_available()):
        raise click.ClickException("there is no CUDA device; --cpu-smoke tries the script without")
    results = []
    for _ in range(rounds):  # the modes take turns: what disturbs a round disturbs both
        for name in rows:
            for mode in MODES:
                results.append(started(name, mode, cpu_smoke))
                print(f"{name}, {mode}", file=sys.stderr)
    for name in rows if timeline else ():
        found = started(name, MODES[-1], cpu_smoke, watched=True)
        print(f"{name}, by thread\n\n{of_threads(found['timeline'])}\n")
    print(table(results))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "cold_start.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
