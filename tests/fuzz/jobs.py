"""A program by its number, run in a worker process: counts, and calls that fail, made small."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from flexmod.errors import TemplateError
from fuzz.case import Case
from fuzz.check import check
from fuzz.choices import Choices, Drawn, Replayed, Seeded, shrunk
from fuzz.kinds import KINDS, labels
from fuzz.programs import Cases

SHRINKING = 60  # seconds


class Job(NamedTuple):
    """Program number `number` of a seed, of one kind of draw; the first `most` of its cases."""

    backend: str
    seed: int
    number: int
    kind: str = "plain"
    most: int | None = None

    def choices(self) -> Seeded:
        # the older kind keeps its programs
        kind = "" if self.kind == "plain" else f" {self.kind}"
        return Seeded(f"{self.backend} {self.seed} {self.number}{kind}")

    def cases(self) -> Cases:
        return self.replayed(self.choices())

    def replayed(self, choices: Choices) -> Cases:
        return KINDS[self.kind](Drawn(choices), self.backend)[: self.most]


class Found(NamedTuple):
    """Of a program: its calls by how they ended and by what was drawn; those that failed, with why."""

    counts: Counter[str]
    drawn: Counter[str]
    failed: list[tuple[Case, list[str]]]


def run(job: Job) -> Found:
    counts: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    failed = []
    for case in job.cases():
        how, why = judged(case)
        counts[how] += 1
        drawn.update(labels(case))
        drawn[f"{case.kind}: {how.split(',')[0].split(':')[0]}"] += 1
        if how.startswith("clean") and (case.wanted or any(t.learned for t in case.tables)):
            counts["with gradients"] += 1
        if why:
            failed.append((case, why))
    if failed and job.backend in ("cpu", "interpret", "python"):
        failed = [smaller(job, *failed[0]), *failed]
    return Found(counts, drawn, failed)


def judged(case: Case) -> tuple[str, list[str]]:
    """How a call ended, and what was wrong with it."""
    try:
        verdict = check(case)
    except TemplateError as error:  # a shape that spills, mostly
        return "refused: " + str(error).splitlines()[-1][:160], []
    except Exception as error:
        return "failed", [f"{type(error).__name__}: {error}"]
    if verdict.faults:
        return "failed", verdict.faults
    return (f"refused: {verdict.refused}" if verdict.refused else f"clean, {verdict.how}"), []


def smaller(job: Job, case: Case, why: list[str]) -> tuple[Case, list[str]]:
    """A smaller call that fails too."""
    source = job.choices()
    job.replayed(source)
    smallest, end = [(case, why)], time.monotonic() + SHRINKING

    def fails(choices: list[int]) -> bool:
        if time.monotonic() > end:
            return False
        for case in job.replayed(Replayed(choices)):
            wrong = judged(case)[1]
            if wrong:
                smallest[0] = (case, wrong)
                return True
        return False

    shrunk(source.made, fails)
    return smallest[0]
