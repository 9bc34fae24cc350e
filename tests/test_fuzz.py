"""A fixed budget of the fuzzer, the seeds of past failures, and faults that it must find.

`make fuzz` is the long run.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from fuzz import hostile, operations, session
from fuzz.case import Case, Step, Table
from fuzz.check import DRAWS, check
from fuzz.choices import Drawn, Seeded, shrunk, strategy
from fuzz.events import COPIES, LIST_WRITES, WRITES
from fuzz.faults import FAULTS, find
from fuzz.jobs import Job, judged, run
from fuzz.kinds import KINDS, labels
from fuzz.objects import PLACES, ROUTES
from fuzz.programs import SIZES, Cases, program
from fuzz.script import script
from fuzz.seeds import SEEDS

from benchmarks import workers
from flexmod.ir import formulas, ops

ON_GPU = ("triton", "hopper")
NEW_KINDS = [kind for kind in KINDS if kind != "plain"]
BUDGETS = (("cpu", 60), ("interpret", 4), ("python", 2))
COPIED = ("score_mod", "mask_mod", "mask", "handle", "all")


@pytest.mark.parametrize(
    ("backend", "programs"),
    [("cpu", 12), *(pytest.param(*budget, marks=pytest.mark.long) for budget in BUDGETS)],
)
def test_a_fixed_budget(backend: str, programs: int) -> None:
    failed = []
    for number in range(programs):
        failed += run(Job(backend, 0, number)).failed
    assert not failed, script(*failed[0])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "programs", "most"), [("cpu", 6, None), ("interpret", 1, 1)])
def test_a_fixed_budget_of_each_kind(backend: str, programs: int, most: int | None) -> None:
    """In another process, which a tensor that is not plain might end."""
    groups = [[Job(backend, 0, number, kind, most) for number in range(programs)] for kind in NEW_KINDS]
    for outcome in workers.run(run, groups, workers=1, case_seconds=200, total_seconds=500):
        assert not outcome.error, outcome
        assert not outcome.value.failed, script(*outcome.value.failed[0])


def test_a_few_of_each_kind() -> None:
    group = [Job("cpu", 0, number, kind) for kind in NEW_KINDS for number in range(2)]
    for outcome in workers.run(run, [group], workers=1, case_seconds=200, total_seconds=250):
        assert not outcome.error, outcome
        assert not outcome.value.failed, script(*outcome.value.failed[0])


@pytest.mark.parametrize(
    ("backend", "examples"), [("cpu", 12), pytest.param("interpret", 3, marks=pytest.mark.long)]
)
def test_what_hypothesis_draws(backend: str, examples: int) -> None:
    """It looks for small and odd programs, and makes failing ones smaller."""

    every = list(hypothesis.HealthCheck)

    @hypothesis.settings(max_examples=examples, database=None, suppress_health_check=every)
    @hypothesis.seed(0)
    @hypothesis.given(strategy(program, backend))
    def holds(cases: Cases) -> None:
        why = judged(cases[0])[1]
        assert not why, script(cases[0], why)

    holds()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", [["plain"], NEW_KINDS], ids=["plain", "others"])
@pytest.mark.parametrize("backend", ON_GPU)
def test_a_fixed_budget_on_a_gpu(backend: str, kinds: list[str]) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    groups = [[Job(backend, 0, number, kind)] for number in range(24 // len(kinds)) for kind in kinds]
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
    named = {outcome.case: outcome.value or [outcome.error] for outcome in outcomes}
    return {fault: [str(name).split(", ")[-1] for name in names] for fault, names in named.items()}


@pytest.mark.long
def test_a_wrong_derivative_is_found(found: dict[str, list[str]]) -> None:
    wrong = set(found["derivative of tanh"])
    assert "dq" in wrong and wrong <= {"dq", "dk"} | {f"dt{number}" for number in range(20)}


@pytest.mark.long
def test_a_wrong_interval_rule_is_found(found: dict[str, list[str]]) -> None:
    """Tiles at the edge of a mask are lost."""
    assert set(found["interval of <="]) & {"out", "lse"}


@pytest.mark.long
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


@pytest.mark.long
def test_what_happens_to_objects_is_drawn() -> None:
    """Each way to copy, to write and to disguise, each route, each way to reach a number."""
    drawn: Counter[Any] = Counter()
    for kind in KINDS:
        for number in range(1200):
            for case in Job("cpu", 0, number, kind, 1).cases():
                drawn.update(labels(case))
                numbers = [t for t in case.tables if t.values]
                drawn.update((kind, t.reach, bool(t.shape)) for t in numbers)
                drawn.update(f"learned number of a {case.route} call" for t in numbers if t.learned)
    routes = {"eager", "handle"}
    expected = [*KINDS, *(f"numbers, {route}" for route in routes)]
    expected += [f"{kind}, {route}" for kind in ("copies", "writes", "hostile") for route in ROUTES]
    expected += [f"copies, copy {what} {how}" for what in COPIED for how in COPIES]
    expected += [f"writes, write {what}" for what in WRITES]
    expected += [f"writes, write list {how}" for how in LIST_WRITES]
    others = ("assign mask_mod", "another call", "another forward", "backward twice", "forget")
    expected += [f"writes, {what}" for what in others]
    hostile_kinds = hostile.KINDS.keys() - {"float8"}
    expected += [f"hostile, {place}, {kind}" for place in PLACES for kind in hostile_kinds]
    formats = ("float8_e4m3fn", "float8_e5m2")
    expected += [f"float8, {tensors}, {name}" for tensors in ("qkv", "kv", "v") for name in formats]
    expected += [f"float8, {route}" for route in ROUTES]
    expected += [("numbers", reach, False) for reach in ("closure", "default", "global", "buffer")]
    expected += [("numbers", "global", True), *(f"learned number of a {route} call" for route in routes)]
    assert [label for label in expected if not drawn[label]] == []


SCORE = "def score_mod(score, b, h, q_idx, kv_idx):\n    return "
MASK = "def mask_mod(b, h, q_idx, kv_idx):\n    return "
SHAPES: dict[str, Any] = {"backend": "cpu", "lengths": (9, 11), "dims": (4, 4)}
NUMBER = Table("n0", (), "float32", 0, 0, values=(0.5, 2.0), reach="closure", on_cpu=True, learned=True)
STEP = Table("n0", (), "int32", 0, 0, values=(1, 5), on_cpu=True)
HASHED = "((kv_idx.long() + 3 * q_idx) * 2654435761){} % 1000 < 500\n"
# a case, what would be wrong with it, and a result that shows it
WRONG: dict[str, tuple[Case, dict[str, Any], str]] = {
    "a number that is kept": (
        Case(score=SCORE + "n0 * score\n", tables=(NUMBER,), kind="numbers", steps=(Step(),) * 2, **SHAPES),
        {"tables": (replace(NUMBER, values=(0.5, 0.5)),)},
        "out",
    ),
    "a number of a mask that is kept": (
        Case(mask=MASK + "n0 >= (q_idx - kv_idx).abs()\n", tables=(STEP,), kind="numbers",
             steps=(Step(),) * 2, **SHAPES),
        {"tables": (replace(STEP, values=(1, 1)),)},
        "out",
    ),
    "the tanh of a large cap": (
        Case(score=SCORE + "cap * torch.tanh(score / cap)\n", numbers=(("cap", 1e8),), kind="huge", **SHAPES),
        {"score": SCORE + "cap * (torch.tanh(score / cap) + 1e-7 * (kv_idx % 2))\n"},
        "out",
    ),
    "a row of low scores that differ": (
        Case(score=SCORE + "torch.where(kv_idx < 5, score - 1e9, score - 2e9)\n", kind="huge", **SHAPES),
        {"score": SCORE + "score - 1e9\n"},
        "out",
    ),
    "a cast that is dropped": (
        Case(mask=MASK + HASHED.format(".to(torch.int32)"), kind="integers", **SHAPES),
        {"mask": MASK + HASHED.format("")},
        "out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a wrong call, judged as if it were the right call."""
    case, wrong, shows = WRONG[name]
    other = replace(case, **wrong)
    run_of_it = session.run
    calls = {draw: run_of_it(case, draw) for draw in range(DRAWS + 1)}

    def mistaken(case: Case, draw: int = 0) -> list[session.Made]:
        made = run_of_it(other, draw)
        return [each._replace(call=call.call) for each, call in zip(made, calls[draw], strict=True)]

    monkeypatch.setattr(session, "run", mistaken)
    assert any(f"{shows}:" in fault for fault in check(case).faults)


def test_programs_follow_from_their_number() -> None:
    assert Job("cpu", 3, 7).cases() == Job("cpu", 3, 7).cases() != Job("cpu", 4, 7).cases()


def test_choices_become_fewer() -> None:
    source = Seeded("any")
    drawn = Drawn(source)
    numbers = [drawn.whole(0, 99) for _ in range(40)]
    assert max(numbers) > 60
    assert shrunk(source.made, lambda choices: any(n > 60 for n in choices)) == [61]


@pytest.mark.long
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
