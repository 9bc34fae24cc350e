"""out, lse and gradients of the masks on the GPU, beside float64 and eager attention in the same dtype."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.accuracy import CASES, Case, Error

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error(case: Case, results: dict[str, Any]) -> None:
    result = results[str(case)]
    assert not result["fault"], result["fault"]
    errors = {name: Error(*error) for name, error in result["errors"].items()}
    faults = [f"{name}: {error}" for name, error in errors.items() if not error.ok()]
    assert not faults, "\n".join(faults)
