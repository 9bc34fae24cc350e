"""Runs all selected accuracy cases at once, in worker processes that compile side by side.

With OUT set to a folder, all errors and limits are written there as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tabulate import tabulate

from benchmarks import workers
from flexmod.runtime.direct import Direct
from gpu.accuracy import Case, measure, summary

HEADER = ["mask", "dtype", "cases", "faults", "out", "lse", "dq", "dk", "dv"]
RESULTS = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By case: "errors" {name: [rms, max, rms_limit, max_limit]} or None, "fault", and "seconds"."""
    groups: dict[Any, list[Case]] = {}
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, Case):
            groups.setdefault(case.kernels, []).append(case)
    # The largest kernels compile longest: they go first.
    ordered = sorted(groups.values(), key=lambda cases: (-cases[0].head_dim, cases[0].dtype != "float32"))
    found: dict[str, Any] = {}
    request.config.stash[RESULTS] = found
    count = min(14, os.cpu_count() or 1)
    for outcome in workers.run(measure, ordered, workers=count, case_seconds=120, total_seconds=420):
        seconds = round(outcome.seconds, 3)
        found[str(outcome.case)] = {"errors": outcome.value, "fault": outcome.error, "seconds": seconds}
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "accuracy.json").write_text(json.dumps(found, indent=1))
    return found


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The launches of recorded calls that are played, not through Triton's launcher."""
    launches: list[Any] = []
    call = Direct.__call__

    def watch(self: Direct, tensors: Any) -> None:
        launches.append(self)
        call(self, tensors)

    monkeypatch.setattr(Direct, "__call__", watch)
    yield launches


def pytest_unconfigure(config: pytest.Config) -> None:
    """Last of all, the largest share of its limit that each result used, by mask and dtype."""
    found = config.stash.get(RESULTS, None)
    if found:
        print(tabulate(summary(found), HEADER, floatfmt=".2f"))
