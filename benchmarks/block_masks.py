"""create_block_mask beside torch's own, eager and compiled, all in one run.

    python -m benchmarks.block_masks                        8192 to 2^20 tokens, on a GPU
    python -m benchmarks.block_masks --cpu                  32768 and 131072 tokens, on the CPU
    python -m benchmarks.block_masks --masks causal tree --lengths 8192
    python -m benchmarks.block_masks --every-compiled --compiling 8 --total-seconds 580

The first call compiles; the table gives its time in seconds. Other times are medians in milliseconds of calls
that wait for the device. Memory is a call's peak above its start, in the device's allocator or the process.
"open" is the share of tiles that bounds do not decide; the next number is the share that is empty or full but
needed all of its elements to decide. Each builder runs in its own process, so a crash or a timeout
(--case-seconds) ends one case only. The table gives the reason for each missing number.

The compiled builder of torch takes 2 to 40 s to compile for each mask and length: without --every-compiled
only three masks run. With --compiling N, N processes compile first in parallel; "first" is then their time,
and measured calls find the kernels in Inductor's cache. All results go to OUT/block_masks.json (--out), after
every case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from tabulate import tabulate

import flexmod
from benchmarks import workers
from benchmarks.mask_rows import MASKS
from benchmarks.peers import versions
from flexmod.block_mask.refine import Refined
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced, trace

BUILDERS = ("flexmod", "torch", "torch, compiled")
# The masks for torch's compiled builder by default.
COMPILED = ("causal", "documents, causal", "NATTEN 7x7")
# On the CPU torch takes many seconds and gigabytes a mask, and does not end at the larger length.
EAGER_ON_CPU = ("causal", "documents, causal")
CPU_BYTES = 16 << 30
# A call that takes longer is not repeated.
LONG_S = 5

# Why there is no number: what the error says of it, and the word in the table, for which it stands.
REASONS = {
    "no answer within": ("late", "no answer within the limit for one case"),
    "not run": ("not run", "the limit for the whole run was over, or the process died too often"),
    "memory": ("memory", "what it holds does not fit"),
    "": ("fails", "it raises; see below"),
}
NOT_ASKED = "left out", "this run did not ask for it, see `wanted`"


@dataclass(frozen=True)
class Case:
    builder: str
    mask: str
    length: int
    device: str
    calls: int


def main() -> None:
    options = arguments()
    device = "cpu" if options.cpu else "cuda"
    lengths = options.lengths or ([1 << 15, 1 << 17] if options.cpu else [1 << 13, 1 << 15, 1 << 17, 1 << 20])
    cases = [
        Case(builder, mask, length, device, options.calls)
        for builder in options.builders
        for length in lengths
        for mask in options.masks
        if wanted(builder, mask, length, device, options.every_compiled)
    ]
    start = time.monotonic()
    compiled = [replace(case, calls=0) for case in cases if case.builder == BUILDERS[2]]
    first = first_seconds(compiled, options) if options.compiling else {}
    groups = [[case for case in cases if case.builder == builder] for builder in options.builders]
    results: list[dict[str, Any]] = []
    outcomes = workers.run(
        measure,
        groups,
        workers=1,
        case_seconds=options.case_seconds,
        total_seconds=options.total_seconds - (time.monotonic() - start),
        patience=len(cases),
    )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        if outcome.value:
            outcome.value["first_s"] = first.get(replace(outcome.case, calls=0), outcome.value["first_s"])
        results.append({**asdict(outcome), "case": asdict(outcome.case)})
        (out / "block_masks.json").write_text(
            json.dumps({"versions": versions(), "results": results}, indent=1)
        )
        last = outcome.error.strip().splitlines()[-1:]
        print(f"[{outcome.seconds:5.1f} s] {outcome.case} {last}", file=sys.stderr, flush=True)
    report = table(results)
    (out / "block_masks.md").write_text(report + "\n")
    print(report)


def first_seconds(cases: list[Case], options: argparse.Namespace) -> dict[Case, float]:
    """Of the first call of each case, in processes side by side."""
    found = workers.run(
        measure,
        [[case] for case in cases],
        workers=options.compiling,
        case_seconds=options.case_seconds,
        total_seconds=options.total_seconds / 2,
    )
    return {outcome.case: outcome.value["first_s"] for outcome in found if outcome.value}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS), metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--builders", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--every-compiled", action="store_true", help="compile torch's for every mask")
    parser.add_argument("--compiling", type=int, default=0, help="processes to compile torch's beforehand")
    parser.add_argument("--calls", type=int, default=10, help="calls that a median is taken of")
    parser.add_argument("--case-seconds", type=float, default=60, help="limit for one case")
    parser.add_argument("--total-seconds", type=float, default=230, help="limit for the whole run")
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "."), help="folder for results (default: OUT or .)"
    )
    return parser.parse_args()


def wanted(builder: str, mask: str, length: int, device: str, every_compiled: bool) -> bool:
    if builder == "flexmod":
        return True
    if device == "cpu":
        return builder == "torch" and mask in EAGER_ON_CPU and length <= 1 << 15
    return builder == "torch" or every_compiled or mask in COMPILED


def measure(case: Case) -> dict[str, Any]:
    """One case, in the worker process."""
    if case.device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (CPU_BYTES, CPU_BYTES))
    device = torch.device(case.device)
    make, heads = MASKS[case.mask]
    mask_mod = make(case.length, device)
    create: Callable[..., Any] = flexmod.create_block_mask
    if case.builder != "flexmod":
        create = torch_flex.create_block_mask
    if case.builder == "torch, compiled":
        torch.compiler.reset()
        create = torch.compile(create)

    def build() -> float:
        start = time.perf_counter()
        create(mask_mod, None, heads, case.length, case.length, device=case.device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first, memory = peak_bytes(build, device)
    if not case.calls:
        return {"first_s": first}
    again = first
    if first < LONG_S or case.builder == "torch, compiled":
        again, memory = peak_bytes(build, device)
    times = [build() for _ in range(case.calls)] if again < LONG_S else [again]
    found = {"first_s": first, "ms": statistics.median(times) * 1e3, "bytes": memory}
    return found | (open_tiles(mask_mod, heads, case, device) if case.builder == "flexmod" else {})


def peak_bytes(build: Callable[[], float], device: torch.device) -> tuple[float, int]:
    """The seconds of a call, and what it holds at its peak above what was held before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return build(), torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is no room for this call
    Path("/proc/self/clear_refs").write_text("5")  # the process's peak counts from here
    before = _status("VmRSS")
    return build(), _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def open_tiles(mask_mod: Any, heads: int | None, case: Case, device: torch.device) -> dict[str, float]:
    """Returns shares of all tiles: tiles that bounds do not decide, and the empty or full ones among them."""
    sizes = (1, heads or 1, case.length, case.length)
    found = trace(mask_mod, "mask", device)
    refined = Refined(Traced(fitted(found.graph, sizes), found.tensors), sizes, (128, 128), device)
    refined.by_bounds()
    left, total = len(refined.open), refined.table.numel()
    refined.by_samples(4)
    at = refined.open
    refined.by_pieces()
    refined.by_elements()
    kinds = refined.table[at.unbind(1)]
    return {"open": left / total, "in vain": int((kinds != 1).sum()) / total}


def table(results: list[dict[str, Any]]) -> str:
    by_case = {(r["case"]["mask"], r["case"]["length"], r["case"]["builder"]): r for r in results}
    header = ["mask", "tokens", "flexmod, ms", "MiB", "first, s", "open", "in vain", "torch, ms", "MiB"]
    header += ["compiled, ms", "MiB", "first, s"]
    lines = []
    for mask in MASKS:
        for length in sorted({key[1] for key in by_case if key[0] == mask}):
            ours, eager, compiled = (by_case.get((mask, length, builder)) for builder in BUILDERS)
            value = (ours and ours["value"]) or {}
            shares = [f"{value[name]:.2%}" if name in value else "-" for name in ("open", "in vain")]
            cells = [*_cells(ours, first=True), *shares, *_cells(eager), *_cells(compiled, first=True)]
            lines.append([mask, length, *cells])
    words = {cell for line in lines for cell in line}
    legend = [f"{word}: {meaning}" for word, meaning in (*REASONS.values(), NOT_ASKED) if word in words]
    faults = [
        f"{mask}, {length}, {builder}: {result['error'].strip().splitlines()[-1][:200]}"
        for (mask, length, builder), result in by_case.items()
        if result["error"] and _reason(result) == "fails"
    ]
    found = tabulate(lines, header, tablefmt="github", disable_numparse=True)
    return "\n".join([found, "", *legend, *faults])


def _cells(result: dict[str, Any] | None, first: bool = False) -> list[str]:
    """Milliseconds, MiB, and where asked for the seconds of the first call; or why there are none."""
    if result is None or not result["value"]:
        return [_reason(result), *["-"] * (1 + first)]
    value = result["value"]
    cells = [_short(value["ms"]), _short(value["bytes"] / 2**20)]
    return [*cells, f"{value['first_s']:.2f}"] if first else cells


def _reason(result: dict[str, Any] | None) -> str:
    if result is None:
        return NOT_ASKED[0]
    return next(word for said, (word, _) in REASONS.items() if said in result["error"].lower())


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.2g}" if x < 10 else f"{x:.3g}"


if __name__ == "__main__":
    main()
