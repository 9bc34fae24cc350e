"""Chooses a kernel's tile from a ladder: the same search for every family, in launches and ahead of time.

Each rung is compiled and judged, and none runs. The search takes the first rung that passes, or else the best
acceptable one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Rung = TypeVar("Rung", bound=Hashable)


class Verdict(NamedTuple):
    """The result of compiling a rung."""

    spills: int = 0
    """Registers that a thread spills to memory."""
    losses: tuple[str, ...] = ()
    """Reasons why it is slow, in words, see `machine_code`. Its results are correct."""
    refusal: object = None
    """Why it cannot run: an error, or a class of errors; None if it can."""

    def __str__(self) -> str:
        return ", ".join([f"a thread spills {self.spills} registers", *self.losses])


class Limits(NamedTuple):
    """The limits for a family's kernels."""

    passing: int
    """A rung that spills up to this many registers of a thread passes."""
    endured: float = math.inf
    """A rung that spills more than this is never taken."""
    by_code: bool = False
    """Does slow machine code keep a rung from passing?"""
    gives_way: bool = False
    """If no rung is acceptable, another family's kernels run; rungs that do not compile are skipped."""

    def passed(self, verdict: Verdict) -> bool:
        return verdict.refusal is None and verdict.spills <= self.passing and not verdict.losses


@dataclass(frozen=True)
class Chosen(Generic[Rung]):
    """`rung` is None if each rung fails or spills more than `endured`; `verdicts`: in order."""

    rung: Rung | None
    verdicts: dict[Rung, Verdict]

    @property
    def runnable(self) -> dict[Rung, Verdict]:
        return {rung: verdict for rung, verdict in self.verdicts.items() if verdict.refusal is None}

    @property
    def refusals(self) -> dict[Rung, object]:
        return {r: verdict.refusal for r, verdict in self.verdicts.items() if verdict.refusal is not None}


def choose(ladder: Sequence[Rung], judge: Callable[[Rung], Verdict], limits: Limits) -> Chosen[Rung]:
    """Chooses the first rung that passes.

    If none passes, chooses the acceptable rung that spills least, and prefers rungs that are not slow.
    """
    chosen = Chosen[Rung](None, {})
    for rung in ladder:
        verdict = chosen.verdicts[rung] = judge(rung)
        if limits.passed(verdict):
            return Chosen(rung, chosen.verdicts)
    endured = {r: v for r, v in chosen.runnable.items() if v.spills <= limits.endured}
    best = min(endured, key=lambda r: (bool(endured[r].losses), endured[r].spills), default=None)
    return Chosen(best, chosen.verdicts)
