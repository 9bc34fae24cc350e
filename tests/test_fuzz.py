"""A fixed budget of the fuzzer, the seeds of past failures, and faults that it must find.

`make fuzz` is the long run.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from fuzz import operations
from fuzz.case import Case, Table
from fuzz.check import check
from fuzz.choices import Drawn, Seeded, shrunk, strategy
from fuzz.faults import FAULTS, find
from fuzz.jobs import Job, judged, run
from fuzz.programs import SIZES, Cases, program
from fuzz.script import script
from fuzz.seeds import SEEDS

from benchmarks import workers
from flexmod.ir import formulas, ops

ON_GPU = ("triton", "hopper")


@pytest.mark.parametrize(("backend", "programs"), [("cpu", 120), ("interpret", 5), ("python", 3)])
def test_a_fixed_budget(backend: str, programs: int) -> None:
    failed = []
    for number in range(programs):
        failed += run(Job(backend, 0, number)).failed
    assert not failed, script(*failed[0])


@pytest.mark.parametrize(("backend", "examples"), [("cpu", 60), ("interpret", 4)])
def test_what_hypothesis_draws(backend: str, examples: int) -> None:
    """It looks for small and odd programs, and makes those that fail smaller."""

    every = list(hypothesis.HealthCheck)

    @hypothesis.settings(max_examples=examples, database=None, suppress_health_check=every)
    @hypothesis.seed(0)
    @hypothesis.given(strategy(program, backend))
    def holds(cases: Cases) -> None:
        why = judged(cases[0])[1]
        assert not why, script(cases[0], why)

    holds()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ON_GPU)
def test_a_fixed_budget_on_a_gpu(backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    groups = [[Job(backend, 0, number)] for number in range(24)]
    for outcome in workers.run(run, groups, workers=12, case_seconds=240, total_seconds=400):
        assert not outcome.error, outcome
        assert not outcome.value.failed, script(*outcome.value.failed[0])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.gpu] if case.backend in ON_GPU else [])
        for name, case in SEEDS.items()
    ],
)
def test_seeds_of_past_failures(case: Case) -> None:
    assert check(case).faults == []


# the fuzzer itself


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """By fault, the results that were wrong; in another process, whose kernels no other test meets."""
    outcomes = workers.run(find, [list(FAULTS)], workers=1, case_seconds=200, total_seconds=250)
    return {outcome.case: outcome.value or [outcome.error] for outcome in outcomes}


def test_a_wrong_derivative_is_found(found: dict[str, list[str]]) -> None:
    wrong = set(found["derivative of tanh"])
    assert "dq" in wrong and wrong <= {"dq", "dk"} | {f"dt{number}" for number in range(20)}


def test_a_wrong_interval_rule_is_found(found: dict[str, list[str]]) -> None:
    """Tiles at the edge of a mask are lost."""
    assert set(found["interval of <="]) & {"out", "lse"}


def test_a_wrong_text_is_found(found: dict[str, list[str]]) -> None:
    """An error of a thousandth, in the kernels alone."""
    assert "out" in found["text of *"]


def test_every_operation_is_drawn() -> None:
    """But the one that may be off by more than a rounding."""
    named = {name for name, row in ops.OPS.items() if row.torch_names and row.name != "tanh_approximate"}
    assert operations.FORMS.keys() == named | formulas.COMPOSED.keys()


def test_all_kinds_are_drawn() -> None:
    drawn: Counter[Any] = Counter()
    for backend in SIZES:
        for number in range(400):
            for case in Job(backend, 0, number).cases():
                drawn.update([case.dtype, *case.layouts])
                drawn["heads share keys"] += case.heads[0] > case.heads[1]
                drawn["batch shares keys"] += case.batch[0] > case.batch[1]
                drawn.update((t.dtype, len(t.shape)) for t in case.tables)
                drawn.update(t.layout for t in case.tables if t.learned)
    floats = ["float16", "bfloat16", "float32", "float64"]
    layouts = ["plain", "bshd", "reversed", "sliced", "packed", "expanded", "alike"]
    captured = [("float32", rank) for rank in range(5)]
    captured += [(dtype, rank) for dtype in (*floats, "int32", "int8", "uint8", "bool") for rank in (1, 2)]
    expected = [*floats, *layouts, "heads share keys", "batch shares keys", *captured]
    assert [kind for kind in expected if not drawn[kind]] == []


def test_programs_follow_from_their_number() -> None:
    assert Job("cpu", 3, 7).cases() == Job("cpu", 3, 7).cases() != Job("cpu", 4, 7).cases()


def test_choices_become_fewer() -> None:
    source = Seeded("any")
    drawn = Drawn(source)
    numbers = [drawn.whole(0, 99) for _ in range(40)]
    assert max(numbers) > 60
    assert shrunk(source.made, lambda choices: any(n > 60 for n in choices)) == [61]


def test_a_failing_case_is_a_script(tmp_path: Path) -> None:
    """Without the fuzzer, and the interpreter, at hand."""
    table = Table("t0", (5,), "float16", -24, 24, layout="sliced", learned=True)
    text = "def score_mod(score, b, h, q_idx, kv_idx):\n    return score * t0[kv_idx]\n"
    case = Case("cpu", text, tables=(table,), lengths=(7, 5), dims=(3, 4), layouts=("sliced",) * 4)
    path = tmp_path / "failed.py"
    path.write_text(script(case, ["dq: too large"]))
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, path], env={"PYTHONPATH": str(root)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "within its limits (beside eager)"
