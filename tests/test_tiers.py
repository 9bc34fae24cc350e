"""The cases that `make test` runs have all values, or pairs of values, of a test's parameters.

Tests that need the machine for themselves do not run in workers of pytest-xdist.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from tiers import ALONE, covering

SIZES = (4, 3, 2, 2)


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 16), (3, 36), (4, 48)])
def test_every_combination_is_covered(strength: int, most: int) -> None:
    cases = [dict(zip("abcd", values, strict=True)) for values in product(*map(range, SIZES))]
    kept = covering(cases, strength)
    assert len(kept) <= most
    for names in combinations("abcd", strength):
        wanted = {tuple(case[name] for name in names) for case in cases}
        assert {tuple(cases[number][name] for name in names) for number in kept} == wanted


def test_cases_that_are_left_out_of_a_product() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 1, "b": 1}]
    assert covering(cases, 1) == {0, 2}
    assert covering(cases, 2) == {0, 1, 2}
    assert covering(cases, 3) == {0, 1, 2}


def test_values_occur_equally_often() -> None:
    cases = [{"name": name, "backend": backend} for name, backend in product(range(12), range(3))]
    kept = [cases[number] for number in covering(cases, 1)]
    assert [sum(case["backend"] == backend for case in kept) for backend in range(3)] == [4, 4, 4]


def test_costly_values_occur_no_more_than_they_must() -> None:
    cases = [{"name": name, "backend": backend} for name, backend in product(range(12), range(20, 23))]
    kept = [cases[number]["backend"] for number in covering(cases, 1, costly={21})]
    assert len(kept) == 12 and kept.count(21) == 1 and abs(kept.count(20) - kept.count(22)) <= 1


def test_a_larger_set_has_the_smaller_one() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in product(range(4), range(3), range(3))]
    pairs = covering(cases, 2)
    triples = covering(cases, 3, pairs)
    assert len(pairs) == 12 and pairs < triples and len(triples) == 36


POOLS = """
import pytest

@pytest.mark.alone
@pytest.mark.parametrize("case", range(20))
def test_in_processes(case):
    pass

def test_other():
    pass
"""
HOOK = """
import pytest
import tiers

pytest_collection_modifyitems = pytest.hookimpl(trylast=True)(tiers.refuse_alone)
"""


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        (["-n2", "--dist=worksteal"], "1 error"),
        (["-n2", "-m", "not alone"], "1 passed"),
        (["-n0"], "21 passed"),
    ],
)
def test_workers_refuse_tests_that_run_alone(arguments: list[str], ends: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone")
    (tmp_path / "test_pools.py").write_text(POOLS)
    (tmp_path / "conftest.py").write_text(HOOK)
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *arguments],
        cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1]
    assert last.startswith(ends + " in "), done.stdout
    assert (f"\n{ALONE.format(count=20)}\n" in done.stdout) == (ends == "1 error") == (done.returncode == 1)
