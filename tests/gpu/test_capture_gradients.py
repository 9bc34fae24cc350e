"""Gradients of captured tensors on the GPU, beside float64 and eager attention in the same dtype."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks import workers
from gpu.learned import CASES, HOPPER_CASES, Case, measure

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def learned(request: pytest.FixtureRequest) -> dict[str, workers.Outcome]:
    """All selected cases at once, in worker processes that compile side by side."""
    items = [item for item in request.session.items if item.module is request.module]
    cases = [item.callspec.params["case"] for item in items]
    count = min(14, os.cpu_count() or 1)
    outcomes = workers.run(
        measure, [[case] for case in cases], workers=count, case_seconds=120, total_seconds=420
    )
    return {str(outcome.case): outcome for outcome in outcomes}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error(case: Case, learned: dict[str, Any]) -> None:
    check(case, learned)


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_error_on_hopper(case: Case, learned: dict[str, Any]) -> None:
    check(case, learned)


def check(case: Case, learned: dict[str, Any]) -> None:
    outcome = learned[str(case)]
    assert not outcome.error, outcome.error
    # NaN is no error within a limit
    over = {name: error for name, error in outcome.value["errors"].items() if not error[0] <= error[1]}
    assert not over
    assert outcome.value["equal"]
