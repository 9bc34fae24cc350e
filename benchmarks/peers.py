"""flexmod beside torch's compiled flex_attention and SDPA (cuDNN, flash), all in one run.

    python -m benchmarks.peers                              all sets but "written", overheads: under 9 minutes
    python -m benchmarks.peers --set D64 shapes             some sets of rows
    python -m benchmarks.peers --rows causal "D64 no-op"    single rows, and nothing else
    python -m benchmarks.peers --cpu-smoke                  tiny sizes without a GPU: does the script work

First several processes side by side compile what the rows need; "first" is what a call took there. Then, one
row at a time, out and gradients of one batch and key head are checked against float64, and the peers take
turns for some rounds. A time is the median of the rounds' medians: of the GPU alone, each call with a cold
L2 (`gpu_time.py`). The card drifts: compare within one run, by the ratios. The rows of memory check out
alone, at some queries. What a peer cannot do is reported, with its first line. All results go to
OUT/peers.json (--out), after every row; the last table holds the ratios beside what they are aimed at
(`targets.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import overheads, targets, workers
from benchmarks.measure_row import PEERS, RowCase, measure_memory, measure_row, prepare, speed_of_a_matmul
from benchmarks.rows import SETS, find


def main() -> None:
    options = arguments()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    names = options.rows or list(dict.fromkeys(row.name for name in options.set for row in SETS[name]))
    rounds = 1 if options.cpu_smoke else options.rounds
    cases = [RowCase(name, rounds, options.cpu_smoke) for name in names]
    around = [] if options.rows or options.no_overheads else overheads.PARTS
    parts: list[Any] = ["matmul", *cases, *around, "matmul"]
    if options.cpu_smoke:
        parts = [part for part in parts if part != "matmul"]
    end = time.monotonic() + options.total_seconds
    first = compiled_beforehand(cases, options, end)
    results: list[dict[str, Any]] = []
    outcomes = workers.run(
        measure,
        [parts],
        workers=1,
        case_seconds=options.case_seconds,
        total_seconds=end - time.monotonic(),
        patience=len(parts),
    )
    for outcome in outcomes:
        case = asdict(outcome.case) if isinstance(outcome.case, RowCase) else outcome.case
        if isinstance(outcome.case, RowCase) and outcome.value and outcome.case.row in first:
            outcome.value["first_call_s"] = first[outcome.case.row]
        results.append({**asdict(outcome), "case": case})
        (out / "peers.json").write_text(json.dumps({"versions": versions(), "results": results}, indent=1))
        print(f"[{outcome.seconds:5.1f} s] {case} {outcome.error[-400:]}", file=sys.stderr, flush=True)
    report = "\n\n".join(tables(results))
    (out / "peers.md").write_text(report + "\n")
    print(report)


def compiled_beforehand(
    cases: list[RowCase], options: argparse.Namespace, end: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of the first calls, by row, peer and way, from processes side by side."""
    if options.prepare < 2:
        return {}
    outcomes = workers.run(
        prepare,
        [[case] for case in cases],
        workers=options.prepare,
        case_seconds=options.case_seconds,
        total_seconds=(end - time.monotonic()) / 2,
    )
    return {outcome.case.row: outcome.value for outcome in outcomes if outcome.value}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in SETS if name != "written"]
    parser.add_argument("--set", nargs="+", choices=sorted(SETS), default=usual)
    every = [row.name for rows in SETS.values() for row in rows]
    parser.add_argument("--rows", nargs="+", metavar="NAME", choices=every, help="single rows, of any set")
    parser.add_argument("--rounds", type=int, default=2, help="turns that each peer takes at each row")
    parser.add_argument("--no-overheads", action="store_true", help="leave out the cost around the kernels")
    parser.add_argument("--prepare", type=int, default=6, help="processes that compile beforehand; 0: none")
    parser.add_argument("--case-seconds", type=float, default=90, help="limit for one row")
    parser.add_argument("--total-seconds", type=float, default=540, help="limit for the whole run")
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "."), help="folder for results (default: OUT or .)"
    )
    return parser.parse_args()


def measure(part: RowCase | str) -> Any:
    """One part of the run, in the worker process."""
    if isinstance(part, RowCase):
        return measure_memory(part) if find(part.row).memory else measure_row(part)
    return speed_of_a_matmul() if part == "matmul" else overheads.measure(part)


def versions() -> dict[str, str]:
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": device}


def tables(results: list[dict[str, Any]]) -> list[str]:
    rows = [(x["case"]["row"], x["value"], x["error"]) for x in results if isinstance(x["case"], dict)]
    found = [(name, value) for name, value, _ in rows if value]
    faults = [f"{x['case']}: {x['error'].strip().splitlines()[-1]}" for x in results if x["error"]]
    faults += [
        f"{name}, {peer}: {fault.splitlines()[0]}"
        for name, value in found
        for peer, fault in value["faults"].items()
    ]
    matmuls = [f"{x['value']:.0f}" for x in results if x["case"] == "matmul" and x["value"]]
    timed = [(name, value) for name, value in found if not find(name).memory]
    sections = [times_table(timed), speeds_table(timed), learned_table(dict(timed))]
    sections.append(memory_table([(name, value) for name, value in found if find(name).memory]))
    sections = [section for section in sections if section]
    singles = {x["case"]: x["value"] for x in results if isinstance(x["case"], str) and x["value"]}
    sections += overheads.tables(singles)
    sections += [section for section in [targets.table(timed)] if section]
    if matmuls:
        sections.append(f"bf16 matmul of 8192^3 before and after: {', '.join(matmuls)} TFLOP/s; {versions()}")
    if faults:
        sections.append("Faults:\n" + "\n".join(f"- {fault[:300]}" for fault in faults))
    return sections


def times_table(found: list[tuple[str, dict[str, Any]]]) -> str:
    if not found:
        return ""
    header = ["forward / backward, ms", *PEERS, "fwd to flex", "bwd to flex", "fwd to cuDNN", "bwd to cuDNN"]
    lines = [
        [name, *(_pair(value["ms"].get(peer)) for peer in PEERS), *_ratios(value)] for name, value in found
    ]
    return tabulate(lines, header, tablefmt="github", disable_numparse=True)


def speeds_table(found: list[tuple[str, dict[str, Any]]]) -> str:
    """TFLOP/s, and flexmod's and flex's first calls (compiling) and errors."""
    if not found:
        return ""
    both = ("flexmod", "flex")
    header = ["TFLOP/s", "density", *PEERS, *(f"{peer} first, s" for peer in both)]
    header += [*(f"{peer} error" for peer in both), "verdict"]
    lines = []
    for name, value in found:
        line = [name, f"{value['density']:.4f}", *(_pair(value["tflops"].get(peer), ".0f") for peer in PEERS)]
        line += [_pair(value["first_call_s"].get(peer), ".1f") for peer in both]
        line += [_worst(value, peer) for peer in both]
        lines.append([*line, value["verdict"]])
    return tabulate(lines, header, tablefmt="github", disable_numparse=True)


def learned_table(found: dict[str, dict[str, Any]]) -> str:
    """Shows the cost of captured tensors' gradients: the ratio of a backward with to one without them."""
    peers = ("flexmod", "flex")
    header = ["backward with learned tensors", *(f"{peer}, over its constant" for peer in peers)]
    header += ["flexmod, over flex with constants", "error of what is learned, flexmod", "flex"]
    lines = []
    for name, value in found.items():
        constant = found.get(find(name).constant)
        if constant is None:
            continue
        learned = {peer: value["ms"].get(peer, {}).get("backward") for peer in peers}
        without = {peer: constant["ms"].get(peer, {}).get("backward") for peer in peers}
        line = [name, *(_ratio(learned[peer], without[peer]) for peer in peers)]
        line.append(_ratio(learned["flexmod"], without["flex"]))
        wrong = [value["errors"].get(peer, {}).get("learned 0") for peer in peers]
        lines.append([*line, *("-" if error is None else f"{error:.1e}" for error in wrong)])
    return tabulate(lines, header, tablefmt="github", disable_numparse=True) if lines else ""


def memory_table(found: list[tuple[str, dict[str, Any]]]) -> str:
    peers = ("flexmod", "flex")
    header = ["peak of forward and backward, MiB", "inputs", *peers]
    header += [*(f"{peer} error" for peer in peers), "verdict"]
    lines = []
    for name, value in found:
        line = [name, f"{value['input_mib']:.0f}"]
        line += [f"{value['mib'][peer]:.0f}" if peer in value["mib"] else "-" for peer in peers]
        line += [_worst(value, peer) for peer in peers]
        lines.append([*line, value["verdict"]])
    return tabulate(lines, header, tablefmt="github", disable_numparse=True) if lines else ""


def _worst(value: dict[str, Any], peer: str) -> str:
    return f"{value['errors'][peer]['worst']:.1e}" if peer in value["errors"] else "-"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def _pair(times: dict[str, float] | None, form: str = ".3g") -> str:
    if not times:
        return "-"
    return " / ".join(format(times[way], form) if way in times else "-" for way in ("forward", "backward"))


def _ratios(value: dict[str, Any]) -> list[str]:
    cells = []
    for peer in ("flex", "cuDNN"):
        for way in ("forward", "backward"):
            ours, theirs = (value["ms"].get(name, {}).get(way) for name in ("flexmod", peer))
            cells.append(_ratio(ours, theirs))
    return cells


if __name__ == "__main__":
    main()
