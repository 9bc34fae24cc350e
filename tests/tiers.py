"""Which cases of a test `make test` runs, which of the others `make test-all`, and which no pytest-xdist."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import combinations
from typing import Any

import pytest

ALONE = (
    "{count} of the selected tests are marked `alone`: they start processes of their own, or fill the GPU. "
    "Run them without -n, or leave them out with `-m \"not alone\"`."
)


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Sorts the cases of each test marked `covering(n, long=n + 1, costly=())` into tiers.

    A small set with all combinations of n parameters gets no further mark. The cases added for `long`
    parameters become `long`, the rest `every`. Values in `costly` take long: few cases have them.
    """
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        marker = group[0].get_closest_marker("covering")
        assert marker is not None
        (strength,) = marker.args
        costly = {id(value) for value in marker.kwargs.get("costly", ())}
        cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in group]
        short = covering(cases, strength, costly=costly)
        longer = covering(cases, marker.kwargs.get("long", strength + 1), short, costly)
        for number, item in enumerate(group):
            if number not in short:
                item.add_marker(pytest.mark.long if number in longer else pytest.mark.every)


def refuse_alone(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist that has tests marked `alone`: no test runs, and one error says why."""
    alone = [item for item in items if item.get_closest_marker("alone")]
    if alone and hasattr(config, "workerinput"):
        items.clear()
        path, why = alone[0].location[0], ALONE.format(count=len(alone))
        config.hook.pytest_collectreport(report=pytest.CollectReport(path, "failed", why, []))


def covering(
    cases: Sequence[dict[str, int]],
    strength: int,
    kept: Set[int] = frozenset(),
    costly: Set[int] = frozenset(),
) -> set[int]:
    """`kept` and few more cases, which together have every combination of values of `strength` parameters.

    A case has a number for each parameter's value. Greedy: the next case adds the most combinations; of
    several the one with the fewest values in `costly`, and of these the one whose values occur least so far,
    so that the other values occur about equally often.
    """
    left = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    used: Counter[tuple[str, int]] = Counter()
    found: set[int] = set()
    given = sorted(kept)
    while given or any(left):
        if given:
            best = given.pop()
        else:
            most = max(map(len, left))
            best = min(
                (number for number, its in enumerate(left) if len(its) == most),
                key=lambda number: (
                    sum(value in costly for value in cases[number].values()),
                    sum(used[value] for value in cases[number].items()),
                ),
            )
        found.add(best)
        used.update(cases[best].items())
        new = left[best]
        left = [its - new for its in left]
    return found


def long_but(
    kept: Collection[Any], values: Iterable[Any], longer: Collection[Any] | None = None
) -> list[Any]:
    """Values for `parametrize`; all but `kept` are marked `long`, or `every` if `longer` lacks them."""

    def tier(value: Any) -> pytest.MarkDecorator:
        return pytest.mark.long if longer is None or value in longer else pytest.mark.every

    return [value if value in kept else pytest.param(value, marks=tier(value)) for value in values]
