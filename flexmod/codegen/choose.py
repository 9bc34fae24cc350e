"""Which rung of a ladder of tiles a kernel takes: one walk for every family, in launches and ahead of time.

A rung is compiled and judged; none runs. The first that passes is taken, or else the best that is endured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Rung = TypeVar("Rung", bound=Hashable)


class Verdict(NamedTuple):
    """What is known of a compiled rung."""

    spills: int = 0
    """Registers of a thread that are kept in memory."""
    losses: tuple[str, ...] = ()
    """What makes it slow, in words, see `machine_code`. A kernel is right with them."""
    refusal: object = None
    """Why it cannot run: an error, or a class of errors; None where it can."""

    def __str__(self) -> str:
        return ", ".join([f"a thread spills {self.spills} registers", *self.losses])


class Limits(NamedTuple):
    """What the kernels of a family may be like."""

    passing: int
    """Registers that a thread may spill: with up to so many no other rung need be tried."""
    endured: float = math.inf
    """With more than so many a rung is not taken at all."""
    by_code: bool = False
    """Does machine code that makes a rung slow count too?"""
    gives_way: bool = False
    """Where no rung does, another family's kernels run. A rung that does not compile is refused then."""

    def passed(self, verdict: Verdict) -> bool:
        return verdict.refusal is None and verdict.spills <= self.passing and not verdict.losses


@dataclass(frozen=True)
class Chosen(Generic[Rung]):
    """`rung` is None where each is refused or spills more than is endured; `verdicts`: in order."""

    rung: Rung | None
    verdicts: dict[Rung, Verdict]

    @property
    def runnable(self) -> dict[Rung, Verdict]:
        return {rung: verdict for rung, verdict in self.verdicts.items() if verdict.refusal is None}

    @property
    def refusals(self) -> dict[Rung, object]:
        return {r: verdict.refusal for r, verdict in self.verdicts.items() if verdict.refusal is not None}


def choose(ladder: Sequence[Rung], judge: Callable[[Rung], Verdict], limits: Limits) -> Chosen[Rung]:
    """The first rung that passes.

    Where none does, of those that are endured one that is not slow goes before one that is, and then the one
    that spills least.
    """
    chosen = Chosen[Rung](None, {})
    for rung in ladder:
        verdict = chosen.verdicts[rung] = judge(rung)
        if limits.passed(verdict):
            return Chosen(rung, chosen.verdicts)
    endured = {r: v for r, v in chosen.runnable.items() if v.spills <= limits.endured}
    best = min(endured, key=lambda r: (bool(endured[r].losses), endured[r].spills), default=None)
    return Chosen(best, chosen.verdicts)
