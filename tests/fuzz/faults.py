"""Faults in the table of operations that the fuzzer must find. They stay in the process that makes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from flexmod.ir import bounds, ops
from fuzz.jobs import Job, judged

PROGRAMS = {"cpu": 4, "interpret": 1}


class Fault(NamedTuple):
    """Columns of rows, wrong; the backend on which it shows, and a text of the mods that have it."""

    rows: tuple[str, ...]
    columns: dict[str, Any]
    backend: str
    text: str


FAULTS = {
    "derivative of tanh": Fault(
        ("tanh", "tanh_relative"),
        {"derivative": lambda grad, y, x: (grad * (1.0 - y),)},
        "cpu",
        "= torch.tanh(score)",
    ),
    "interval of <=": Fault(("le",), {"interval": bounds.lt}, "cpu", "kv_idx <= q_idx + N - M"),
    "text of *": Fault(
        ("mul",), {"triton": {"int": "{0} * {1}", "float": "{0} * {1} * 1.001"}}, "interpret", "= score * "
    ),
}


def find(name: str) -> list[str]:
    """The results that are wrong, in the first programs whose mods have the text."""
    fault = FAULTS[name]
    rows = [ops.OPS[name] for name in fault.rows]
    for row in rows:
        _set(replace(row, **fault.columns))
    try:
        drawn = (Job(fault.backend, 1, number).cases() for number in range(3000))
        having = (cases for cases in drawn if fault.text in cases[0].score + cases[0].mask)
        tried = [case for cases in islice(having, PROGRAMS[fault.backend]) for case in cases]
        return sorted({why.split(":")[0] for case in tried for why in judged(case)[1]})
    finally:
        for row in rows:
            _set(row)


def _set(row: ops.Op) -> None:
    ops.OPS[row.name] = row
    for name in row.torch_names:
        ops.BY_TORCH_NAME[name] = row
