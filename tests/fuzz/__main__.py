"""The long run: `python -m fuzz --backend cpu --seconds 600 --seed 1 --kinds numbers copies`.

With the repository and its tests/ in PYTHONPATH. Programs are drawn from the seed by kind and number, the
kinds in turn, in worker processes; all calls of one are judged in one process. `--cases` ends the run when so
many are judged. The counts come last, in all and by kind of draw, also as JSON in OUT, if that names a
folder. Failing calls are written there as scripts, in one file; without a GPU they are made small first. Ends
with 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import workers
from fuzz.case import Case
from fuzz.jobs import SHRINKING, Job, run
from fuzz.kinds import KINDS
from fuzz.programs import SIZES
from fuzz.script import script

PROGRAMS = 64  # of a group that one worker takes
# seconds of one program before its process is ended
LIMITS = {"cpu": 60, "interpret": 240, "python": 240, "triton": 180, "hopper": 240}
MOST_SCRIPTS = 20


def outcomes(
    backend: str, seed: int, seconds: float, processes: int, kinds: Sequence[str]
) -> Iterator[workers.Outcome]:
    """Programs from number 0 on, as many as the time allows; what had no time is left out."""
    end, first = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        groups = [
            [job(backend, seed, kinds, first + PROGRAMS * group + n) for n in range(PROGRAMS)]
            for group in range(max(4, 4 * processes))
        ]
        first += sum(map(len, groups))
        for outcome in workers.run(
            run, groups, workers=processes, case_seconds=LIMITS[backend] + SHRINKING,
            total_seconds=end - time.monotonic(), patience=10,
        ):  # fmt: skip
            if not outcome.error.startswith("not run"):
                yield outcome


def job(backend: str, seed: int, kinds: Sequence[str], number: int) -> Job:
    """The kinds take turns; each has its programs from number 0 on."""
    return Job(backend, seed, number // len(kinds), kinds[number % len(kinds)])


def main() -> int:
    many = 5 if is_hopper() else 4 if torch.cuda.is_available() else 3
    here = ("cpu", "interpret", "python", "triton", "hopper")[:many]
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--backend", choices=sorted(SIZES), nargs="+", default=here, help="in turn")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each backend")
    parser.add_argument("--cases", type=int, help="of each backend; ends the run before its seconds")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="of draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    given = parser.parse_args()
    return max(one(backend, given) for backend in given.backend)


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def one(backend: str, given: argparse.Namespace) -> int:
    """The run of one backend; 1 if any call failed."""
    counts: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    failed: list[tuple[Case, list[str]]] = []
    started = last = time.monotonic()
    for outcome in outcomes(backend, given.seed, given.seconds, given.workers, given.kinds):
        counts["programs"] += 1
        if outcome.error:  # the process ended, or the time: any of the calls may be at fault
            counts["failed"] += 1
            drawn[f"{outcome.case.kind}: failed"] += 1
            failed.append((outcome.case.cases()[0], [f"{outcome.case}: {outcome.error}"]))
        else:
            counts += outcome.value.counts
            drawn += outcome.value.drawn
            failed += outcome.value.failed
        if given.cases and sum(drawn[kind] for kind in given.kinds) >= given.cases:
            break
        if time.monotonic() > last + 30:
            last = time.monotonic()
            print(f"{backend}, {last - started:.0f} s: {dict(counts)}", flush=True)
    seconds = round(time.monotonic() - started, 1)
    facts = {"backend": backend, "seed": given.seed, "seconds": seconds, "workers": given.workers}
    facts["cases"] = sum(drawn[kind] for kind in given.kinds)
    return finish(facts, counts, drawn, failed)


def finish(
    given: dict[str, Any], counts: Counter[str], drawn: Counter[str], failed: list[tuple[Case, list[str]]]
) -> int:
    clean = sum(count for how, count in counts.items() if how.startswith("clean"))
    summary = {**given, "clean": clean, **dict(sorted(counts.items()))}
    summary["drawn"] = dict(sorted(drawn.items()))
    print(json.dumps(summary, indent=1))
    for _, why in failed[:MOST_SCRIPTS]:
        print("\n".join(why), file=sys.stderr)
    name = f"fuzz_{given['backend']}_{given['seed']}"
    if "OUT" in os.environ:
        folder = Path(os.environ["OUT"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(summary, indent=1))
        if failed:
            line = "#" * 100
            scripts = (script(case, why) for case, why in failed[:MOST_SCRIPTS])
            (folder / f"{name}_failed.txt").write_text(f"\n{line}\n\n".join(scripts))
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
