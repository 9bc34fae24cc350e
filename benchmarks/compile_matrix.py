"""Compiles every mask and mod of the library for every chip, head dimension and dtype: no GPU is needed.

    python -m benchmarks.compile_matrix
    python -m benchmarks.compile_matrix --seconds 3600 --processes 4
    python -m benchmarks.compile_matrix --only "sm_90 masks causal"
    python -m benchmarks.compile_matrix --seconds 0

All builds take hours on one processor. So the command stores one line for each build and continues where it
stopped. It repeats a build only if its text, its tiles or Triton changed. At the end, or at once with
0 seconds, it prints all results. The exit status is 1 if a kernel does not fit its chip, spills more than 256
bytes, or has no matrix instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import workers
from benchmarks.matrix_builds import Build, builds, compile_build, faults

RESULTS = Path("build/matrix.jsonl")
HEADER = ("chip", "builds", "of", "kernels", "without spills", "up to 256 bytes", "more", "most", "faults")


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    wanted = [build for build in builds() if options.only in str(build)]
    known = read(options.results)
    compile_all(wanted, known, options.results, options.seconds, options.processes)
    return report(wanted, known)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="builds whose name has this text")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"file (default: {RESULTS})")
    return parser.parse_args(arguments)


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Lines by the names of their builds; a later one counts. One that was cut off does not."""
    known = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        known[found["build"]] = found
    return known


def compile_all(
    wanted: list[Build], known: dict[str, dict[str, Any]], file: Path, seconds: float, processes: int
) -> None:
    """Compiles what is new, then looks at what is known; brings `known` and the file up to date."""
    if seconds <= 0:
        return
    new = [[build] for build in wanted if str(build) not in known]
    old = [
        [replace(build, known=known[str(build)].get("digest", ""))] for build in wanted if str(build) in known
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.read_text().endswith("\n"):  # cut off
        file.write_text(file.read_text() + "\n")
    with tempfile.TemporaryDirectory() as folder, file.open("a") as lines:
        os.environ["FLEXMOD_CACHE_DIR"] = folder
        found = workers.run(
            compile_build, new + old, workers=processes, case_seconds=900, total_seconds=seconds
        )
        for outcome in found:
            if outcome.error.startswith("not run"):
                continue
            if outcome.value is None and not outcome.error:  # as it was
                continue
            line = {"build": str(outcome.case), "seconds": round(outcome.seconds, 1)}
            line |= outcome.value or {"error": outcome.error}
            known[line["build"]] = line
            lines.write(json.dumps(line) + "\n")
            lines.flush()


def report(wanted: list[Build], known: dict[str, dict[str, Any]]) -> int:
    """Prints a line a chip and every fault; 1 if there is one."""
    rows: list[list[Any]] = []
    told: list[str] = []
    for target in dict.fromkeys(build.target for build in wanted):
        of_target = [build for build in wanted if build.target == target]
        done = [build for build in of_target if str(build) in known]
        wrong, spills = [], []
        for build in done:
            line = known[str(build)]
            if "error" in line:
                wrong.append(f"{build}: {line['error'].strip().splitlines()[-1]}")
            for kernel in line.get("kernels", ()):
                spills.append(kernel.get("spills", 0))
                wrong += [f"{build}, {kernel['kernel']} {kernel['tile']}: {x}" for x in faults(build, kernel)]
        kinds = [sum(low <= n <= high for n in spills) for low, high in ((0, 0), (1, 256), (257, 1 << 30))]
        rows.append(
            [target, len(done), len(of_target), len(spills), *kinds, max(spills, default=0), len(wrong)]
        )
        told += wrong
    print(tabulate(rows, HEADER))
    if told:
        print("", *told, sep="\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
