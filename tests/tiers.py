"""Which cases of a test `make test` runs; the others are `long`, and `make test-all` runs them too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Marks the cases of each test marked `covering(n)` that `covering` leaves out."""
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        marker = group[0].get_closest_marker("covering")
        assert marker is not None
        cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in group]
        kept = covering(cases, *marker.args)
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.long)


def covering(cases: Sequence[dict[str, int]], strength: int) -> set[int]:
    """Few cases that together have every combination of values of any `strength` parameters.

    A case has a number for each parameter's value. Greedy: the next case adds the most combinations, and of
    several the one whose values occur least so far, so that all values occur about equally often.
    """
    left = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    used: Counter[tuple[str, int]] = Counter()
    kept: set[int] = set()
    while any(left):
        best = max(
            range(len(cases)),
            key=lambda number: (len(left[number]), -sum(used[value] for value in cases[number].items())),
        )
        kept.add(best)
        used.update(cases[best].items())
        new = left[best]
        left = [its - new for its in left]
    return kept
