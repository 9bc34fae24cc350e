"""What programs are drawn from: Hypothesis, a seed, or choices that were written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    """`whole` is from `low` to `high`, both included. The rest follows from it; simple options come first."""

    def whole(self, low: int, high: int) -> int: ...


class Drawn:
    """Choices with their conveniences."""

    def __init__(self, source: Choices) -> None:
        self.whole = source.whole

    def one(self, options: Sequence[T]) -> T:
        return options[self.whole(0, len(options) - 1)]

    def flag(self) -> bool:
        return self.whole(0, 1) == 1

    def rarely(self, of: int) -> bool:
        """Once in `of` times."""
        return self.whole(1, of) == of


class Seeded:
    """Choices at random, written down."""

    def __init__(self, seed: str) -> None:
        self.random, self.made = Random(seed), list[int]()

    def whole(self, low: int, high: int) -> int:
        self.made.append(self.random.randint(low, high) - low)
        return low + self.made[-1]


class Replayed:
    """Choices again, what is missing as 0. Of too many options the first: so that lists can be cut."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.left = list(choices)[::-1]

    def whole(self, low: int, high: int) -> int:
        made = self.left.pop() if self.left else 0
        return low + made if low + made <= high else low


class Hypothesis:
    """Hypothesis' own `draw`, which shrinks."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw

    def whole(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))


def strategy(make: Callable[..., T], *arguments: Any) -> st.SearchStrategy[T]:
    """A strategy of what `make(drawn, *arguments)` makes."""

    @st.composite
    def drawn(draw: Callable[[Any], Any]) -> T:
        return make(Drawn(Hypothesis(draw)), *arguments)

    return drawn()


def shrunk(choices: Sequence[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """Fewer and smaller choices that still fail: pieces are cut out, then numbers are made smaller."""
    best = list(choices)
    size = max(1, len(best) // 2)
    while size:
        start = 0
        while start < len(best):
            shorter = best[:start] + best[start + size :]
            if fails(shorter):
                best = shorter
            else:
                start += size
        size //= 2
    for place in range(len(best)):
        step = best[place]
        while step:
            smaller = [*best[:place], best[place] - step, *best[place + 1 :]]
            if best[place] >= step and fails(smaller):
                best = smaller
            else:
                step //= 2
    return best
