"""What benchmarks make of their numbers."""

from __future__ import annotations

import json
import math
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import (
    block_masks,
    checkouts,
    cold_start,
    float8_accuracy,
    gpu_time,
    host_path,
    overheads,
    targets,
    timeline,
)
from benchmarks.measure_row import PEERS, take_turns
from benchmarks.rows import SETS, find
from flexmod.runtime.direct import Direct


def test_targets_are_those_of_rows():
    for name, target in targets.TARGETS.items():
        assert find(name).name == name
        assert target.peer in PEERS
        assert target.floor is None or all(goal < floor for goal, floor in zip(*target[1:], strict=True))


def test_rows_have_names_of_their_own():
    names = [row.name for rows in SETS.values() for row in rows]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"ALiBi + causal"}  # the learned one is compared with it, in its own set too


def test_table_of_targets():
    flex = {"forward": 10.0, "backward": 10.0}
    measured = {"ms": {"flexmod": {"forward": 7.0, "backward": 7.9}, "flex": flex}}
    short = {"ms": {"flexmod": {"forward": 6.3}, "flex": flex}}
    rows = [("window 1024 + causal", measured), ("D64 window 1024 + causal", short), ("D80", measured)]
    _, _, *lines = targets.table(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[:2] for line in cells] == [[name, "flex"] for name, _ in rows[:2]]
    assert [line[2:6] for line in cells] == [
        ["0.70", "0.70", "0.63", "floor"],
        ["0.63", "0.70", "0.63", "goal"],
    ]
    assert [line[6:] for line in cells] == [
        ["0.79", "0.78", "0.68", "missed"],
        ["-", "0.78", "0.68", "not measured"],
    ]


@pytest.mark.parametrize("template", ["hopper", "portable"])
def test_calls_of_the_host_path_are_known(template, monkeypatch):
    """What it times are launches without Triton's launcher: one of a forward, three of a backward."""
    launches = []
    call = Direct.__call__
    monkeypatch.setattr(
        Direct, "__call__", lambda launch, tensors: launches.append(launch) or call(launch, tensors)
    )
    with host_path.on_an_h200():
        for name, run in host_path.cases({"TEMPLATE": template}).items():
            for _ in range(4):
                launches.clear()
                run()
            kernels = 0 if name.startswith("one ") else 4 if name.endswith("backward") else 1
            assert len(launches) == kernels, name
            counts = [len(launch._counters) for launch in launches]
            assert sum(counts) == (template == "hopper" and kernels > 0)


def test_masks_of_the_host_path_are_known(monkeypatch):
    """A mask has three kernels, and two more if it captures tensors."""
    launches = []
    call = Direct.__call__
    monkeypatch.setattr(Direct, "__call__", lambda self, room: launches.append(self) or call(self, room))
    with host_path.on_an_h200():
        for name, run in host_path.mask_cases().items():
            for _ in range(4):
                launches.clear()
                run()
            assert len(launches) == (5 if "tensor" in name else 3), name


def test_a_peer_that_fails_is_dropped():
    calls = []

    def fails():
        calls.append("fails")
        raise RuntimeError("no more")

    runs = {"flexmod": {"forward": lambda: None, "backward": lambda: None}, "flex": {"forward": fails}}
    result = {"faults": {}, "rounds_ms": {}, "ms": {}}
    take_turns(runs, 2, result)
    assert set(result["ms"]) == {"flexmod"} and set(result["ms"]["flexmod"]) == {"forward", "backward"}
    assert result["faults"] == {"flex": "RuntimeError: no more"} and calls == ["fails"]


def test_variants_of_a_call_take_turns(monkeypatch):
    monkeypatch.setattr(overheads, "CALLS", 2)
    order = []
    times = overheads.in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 3)
    assert order == list("aabb") * 5
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}


def test_table_of_calls(monkeypatch, device):
    monkeypatch.setattr(overheads, "CALLS", 1)
    monkeypatch.setattr(overheads, "ROUNDS", 10)
    found = overheads.call(device)
    ways = ("forward", "forward + sum + backward")
    for times in found.values():
        assert all(0 < times[f"{way}, best"] <= times[way] for way in ways)
    (table,) = overheads.tables({"call": found})
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert head[1:] == [column for way in ways for column in (way, f"{way}, best")]
    assert [line[0] for line in lines] == list(found)
    assert {"flexmod, no mask", "flexmod, handle, no mask"} < set(found)


def test_why_there_is_no_number():
    case = {"mask": "causal", "length": 8192}

    def result(builder, error):
        return {"case": {**case, "builder": builder}, "value": None, "error": error}

    text = block_masks.table(
        [
            result("flexmod", "Traceback\nValueError: so it is"),
            result("torch", "Traceback\ntorch.OutOfMemoryError: CUDA out of memory"),
            result("torch, compiled", "no answer within 60 s"),
        ]
    )
    line, *rest = text.splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["causal", "8192", "fails", "-", "-", "-", "-", "memory", "-", "late", "-", "-"]
    assert rest == [
        "",
        "late: no answer within the limit for one case",
        "memory: what it holds does not fit",
        "fails: it raises; see below",
        "causal, 8192, flexmod: ValueError: so it is",
    ]


def test_time_without_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_time.torch.cuda, "is_available", lambda: False)
    calls = []
    assert gpu_time.milliseconds(lambda: calls.append(1)) >= 0 and calls == [1]
    assert gpu_time.wait_for(lambda: calls.append(2)) == 0 and calls == [1]


def test_rows_of_the_cold_start_are_there():
    assert {find(name).name for name in cold_start.ROWS} == {*cold_start.ROWS}


def test_table_of_the_cold_start():
    def found(mode, seconds, **kernels):
        stages = dict.fromkeys(cold_start.STAGES, seconds)
        return {"row": "causal", "mode": mode, **stages, "kernels": kernels, "found": 0}

    rounds = [found("in turn", s, forward=1.0 + s, backward=2.0) for s in (1, 0.5, 2)]
    rounds += [found("in threads", s, forward=3.0, backward=3.0) for s in (0.25, 0.5, 9)]
    head, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in cold_start.table(rounds).splitlines()
    ]
    assert head == ["seconds", "", *cold_start.STAGES, "step", "floor", "slowest kernel"]
    assert lines[0][1:] == ["in turn", *["1.00"] * 5, "4.00", "2.70", "backward"]
    assert lines[1][1:] == ["in threads", *["0.50"] * 5, "2.00", "2.70", "backward"]


@pytest.mark.long
def test_a_cold_start_without_a_gpu(tmp_path):
    runner = CliRunner()
    done = runner.invoke(
        cold_start.main,
        ["--cpu-smoke", "--rows", "causal", "--rounds", "1", "--timeline", "--out", str(tmp_path)],
    )
    assert done.exit_code == 0, done.output
    assert "causal, by thread" in done.output
    results = json.loads((tmp_path / "cold_start.json").read_text())
    assert [(found["row"], found["mode"]) for found in results] == [("causal", m) for m in cold_start.MODES]
    assert all(found[stage] > 0 for found in results for stage in cold_start.STAGES)


@pytest.mark.long
def test_checkouts_take_turns_without_a_gpu(tmp_path):
    """What fails in one checkout, here a row that it does not know, leaves the other rows."""
    here = str(Path(__file__).parents[1])
    options = ["--rows", "nothing", "--rows", "causal", "--rounds", "2", "--prepare", "1", "--cpu-smoke"]
    done = CliRunner().invoke(checkouts.main, [here, here, *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "nothing: ['--worker'" in done.output and "StopIteration" in done.output
    results = json.loads((tmp_path / "checkouts.json").read_text())
    assert list(results) == ["causal"] and [len(rounds) for rounds in results["causal"]] == [2, 2]
    assert all(times[way] > 0 for rounds in results["causal"] for times in rounds for way in checkouts.WAYS)


def test_table_of_checkouts():
    first, second = ([{"forward": 2.0 * t, "backward": t} for t in times] for times in ((1, 2, 9), (1, 1, 7)))
    assert checkouts.table_row("causal", [first, second]) == [
        "causal", "4.000", "2.000", "0.500", "2.000", "1.000", "0.500"
    ]  # fmt: skip
    assert len(checkouts.header(2)) == 7


@pytest.mark.skipif(version("triton") > "3.6.9", reason="later versions have other names")
@pytest.mark.parametrize("place", [place for place, _ in timeline.WATCHED])
def test_watched_functions_are_there(place):
    assert timeline.find(place)[2] is not None


def test_rows_of_a_timeline():
    found = timeline.Timeline()
    thread = threading.Thread(target=found.note, args=("waits", lambda: time.sleep(0.03)))
    found.note("starts", lambda: (thread.start(), thread.join()))
    first, second = [line.split("|")[1:] for line in timeline.table(found.rows).splitlines()[2:]]
    assert [cell.strip() for cell in first[:3]] == ["0", "starts", ""]
    assert [cell.strip() for cell in second[:3]] == ["1", "waits", ""]
    assert float(second[5]) >= 0.03 > float(second[6])


def test_a_cold_start_that_fails(monkeypatch):
    monkeypatch.setattr(cold_start.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(cold_start.main, [])
    assert done.exit_code == 1 and "there is no CUDA device" in done.output
    done = CliRunner().invoke(cold_start.main, ["--rows", "nothing"])
    assert done.exit_code == 2


def numbers(table):
    """The lines of a table: name, numbers; nan for a missing one."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: [float(cell) if cell != "-" else math.nan for cell in cells] for name, *cells in lines}


def test_accuracy_of_float8():
    """More operands in float8 and fewer bits give larger errors, and so do weights in float8."""
    found = numbers(float8_accuracy.table("Normal", 1, 200, 32, "cpu"))
    assert set(found) == set(float8_accuracy.FORMS)
    order = ["bfloat16", "values e4m3 by head", "keys and values e4m3 by head", "e4m3 by head"]
    order.append("e5m2 by head, rotated")
    for column in (0, 4):  # without a mask, causal
        errors = [found[name][column] for name in order]
        assert errors == sorted(errors) and 0 < errors[0] < 0.005 and errors[-1] < 0.15
        assert found["e4m3 by head"][column] < found["e4m3 by head"][column + 1] < 0.08
        assert math.isnan(found["bfloat16"][column + 1]) and found["bfloat16"][column + 3] > 0.9999


def test_rotation_lowers_errors_of_outliers():
    found = numbers(float8_accuracy.table("Outliers of deviation 10", 1, 300, 128, "cpu"))
    assert found["e4m3 by head, rotated"][0] < 0.8 * found["e4m3 by tensor"][0]


def test_recall_of_needles():
    found = numbers(float8_accuracy.needles(3000, 32, "cpu"))
    assert found["bfloat16"][0] == pytest.approx(1 / (1 + math.exp(-float8_accuracy.LOG_ODDS)), abs=0.02)
    assert all(recall == pytest.approx(found["bfloat16"][0], abs=0.03) for recall, *_ in found.values())


def test_chart_of_float8_is_that_of_its_tables():
    """If the tables of docs/float8.md are right: python -m benchmarks.float8_accuracy --chart."""
    page = float8_accuracy.PAGE.read_text()
    assert f"(images/{float8_accuracy.CHART.name})" in page
    assert [set(rows) for rows in float8_accuracy.read(page).values()] == [set(float8_accuracy.FORMS)] * 3
    assert float8_accuracy.CHART.read_text() == float8_accuracy.chart(page)
