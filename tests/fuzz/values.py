"""Typed values of a mod's text, and the pool that a mod grows from, statement by statement.

What is known of a value keeps programs away from what no one could judge: numbers that overflow, and jumps
(floor, comparisons) at places that any other rounding would move. A jump is drawn of what is exact in every
precision (`grain`), or of what reads the score; the judge allows for the edges of the latter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fuzz.choices import Drawn

LONGEST = 1024  # no length of a call is larger
LARGEST = {"float": 32.0, "int": 2.0**18, "bool": 1.0}
BITS = {"float16": 11, "bfloat16": 8}


@dataclass(frozen=True)
class Value:
    """A name or a literal.

    `kind`: bool, int or float. `size`: no absolute value is larger. `grain`: it is a multiple of 2^-grain,
    computed without a rounding; None: it was rounded. `half`: its dtype where that is a half type. `rough`:
    it was rounded to one on its way. `weak`: a Python number.
    """

    text: str
    kind: str
    size: float
    grain: int | None = 0
    score: bool = False
    half: str = ""
    rough: bool = False
    weak: bool = False
    reads: frozenset[str] = frozenset()

    @property
    def may_jump(self) -> bool:
        return self.grain is not None or (self.score and not self.rough)


def settled(value: Value) -> Value:
    """Without a grain where its dtype has no room for the bits."""
    if value.kind != "float" or value.grain is None:
        return replace(value, rough=value.rough or bool(value.half)) if value.kind == "float" else value
    bits = value.grain + math.log2(max(value.size, 1.0))
    if bits <= BITS.get(value.half, 22):
        return value
    return replace(value, grain=None, rough=value.rough or bool(value.half))


def half_of(values: Sequence[Value]) -> str:
    """The half type that floats promote to, "" where it is none."""
    halves = {v.half for v in values if v.kind == "float" and not v.weak}
    return halves.pop() if len(halves) == 1 else ""


FLOATS = [Value(x, "float", abs(float(x)), 3, weak=True) for x in ("0.5", "2.0", "-1.25", "0.0", "1.0")]
INTEGERS = [Value(x, "int", abs(int(x)), weak=True) for x in ("0", "1", "2", "3", "7", "-4", "16")]


@dataclass
class Pool:
    """Values so far, and the statements that made them: name -> (text, the names that it reads)."""

    values: list[Value]
    statements: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def add(self, text: str, uses: Sequence[Value], **facts: Any) -> Value:
        """A statement. What it reads of the score and of the positions follows from `uses`."""
        name = f"x{len(self.statements)}"
        self.statements[name] = (text, tuple(v.text for v in uses))
        value = Value(
            name, score=any(v.score for v in uses), reads=frozenset().union(*(v.reads for v in uses)),
            **{"rough": any(v.rough for v in uses), **facts},
        )  # fmt: skip
        value = settled(value)
        if value.size > LARGEST[value.kind]:
            return self._smaller(value)
        self.values.append(value)
        return value

    def _smaller(self, value: Value) -> Value:
        if value.kind == "int":
            return self.add(f"{value.text} % 97", [value], kind="int", size=96, grain=0)
        shrink = math.ceil(math.log2(value.size / LARGEST["float"])) + 2
        grain = None if value.grain is None else value.grain + shrink
        return self.add(
            f"{value.text} * {2.0**-shrink}", [value], kind="float", size=value.size * 2.0**-shrink,
            grain=grain, half=value.half,
        )  # fmt: skip

    def text(self, name: str, arguments: str, result: Value) -> str:
        """The function that returns `result`, of the statements that it needs."""
        needed: set[str] = set()
        open_ = [result.text]
        while open_:
            found = open_.pop()
            if found in self.statements and found not in needed:
                needed.add(found)
                open_ += self.statements[found][1]
        lines = [f"    {n} = {text}" for n, (text, _) in self.statements.items() if n in needed]
        return "\n".join([f"def {name}({arguments}):", *lines, f"    return {result.text}", ""])


def pick(draw: Drawn, fitting: Sequence[Value]) -> Value | None:
    """One of the values that fit, of the latest more often; None where there is none."""
    if not fitting:
        return None
    return draw.one(fitting if draw.rarely(3) else fitting[-4:])
