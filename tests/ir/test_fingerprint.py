"""What a mod can see: which changes around it are noticed, and which mods are never taken for known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexmod import and_masks, masks, mods, or_masks
from flexmod.ir import fingerprint as traces
from flexmod.ir import trace
from flexmod.ir.fingerprint import fingerprint, remembered

CPU = torch.device("cpu")
TABLE = torch.arange(8.0)
LIMIT = 3
HOLDER = SimpleNamespace(limit=3)
LIMITS = [3]


def key(mod: Any) -> Any:
    seen = fingerprint(mod)
    return None if seen is None else seen.key


def shifted(by: Any) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + by


def loaded(table: torch.Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + table[h]


def of_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LIMIT


def helped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return helper(score)


def helper(score: Any) -> Any:
    return torch.tanh(score / LIMIT)


def cosine(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * math.cos(1.0)


# What is the same


@pytest.mark.parametrize(
    "make",
    [
        lambda: shifted(1.0),
        lambda: shifted(2),
        lambda: loaded(torch.zeros(8)),
        lambda: mods.softcap(20.0),
        lambda: mods.alibi(8),
        lambda: and_masks(masks.causal(), masks.sliding_window(64)),
        lambda: or_masks(masks.prefix_lm(3), masks.dilated_window(2, 3)),
        lambda: masks.document(torch.zeros(8, dtype=torch.int32), causal=True),
        lambda: masks.natten((4, 4), 3),
        lambda: ~masks.causal() & masks.padding(torch.zeros(8, dtype=torch.int32)) | masks.prefix_lm(3),
        lambda: functools.partial(lambda score, b, h, q_idx, kv_idx, by: score + by, by=2.0),
    ],
)
def test_a_mod_made_again_is_the_same(make: Callable[[], Any]) -> None:
    assert key(make()) is not None and key(make()) == key(make())


def test_values_of_tensors_do_not_count() -> None:
    table = torch.zeros(8)
    before = key(loaded(table))
    table += 1
    assert key(loaded(table)) == before == key(loaded(torch.ones(8)))


# What is not


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2), (1, 1.0), (1, True), (0.0, -0.0), (None, 0), ((1, 2), (1, 3)), (torch.float32, torch.float16),
        (shifted(1), shifted(2)), (masks.causal(), masks.prefix_lm(2)), (masks.causal(), ~masks.causal()),
        (masks.causal() & masks.prefix_lm(2), masks.causal() | masks.prefix_lm(2)),
    ],
)  # fmt: skip
def test_other_captures(one: Any, other: Any) -> None:
    assert key(shifted(one)) is not None and key(shifted(one)) != key(shifted(other))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(9),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, 1),
        torch.zeros(16)[::2],
        torch.zeros(9)[1:],
        torch.zeros(8, device="meta"),
        torch.zeros(8, requires_grad=True),
    ],
    ids=["length", "dtype", "rank", "stride", "alignment", "device", "gradient"],
)
def test_other_tensors(other: torch.Tensor) -> None:
    assert key(loaded(torch.zeros(8))) != key(loaded(other)) is not None


def test_a_tensor_captured_twice_is_not_two() -> None:
    def both(one: Any, other: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + one[h] * other[h]

    assert key(both(TABLE, TABLE)) != key(both(TABLE, TABLE.clone()))


@pytest.mark.parametrize("mod", [of_global, helped])
def test_a_global_that_changed(mod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(mod)
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert key(mod) != before is not None


def test_a_function_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(helped)
    monkeypatch.setitem(globals(), "helper", lambda score: score)
    assert key(helped) != before is not None


def test_a_function_of_a_module_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(cosine)
    monkeypatch.setattr(math, "cos", math.sin)
    assert key(cosine) != before is not None


def of_module(score: Any, module: Any) -> Any:
    return score * module.cos(1.0)


def test_a_function_of_a_module_that_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return of_module(score, math)

    before = key(mod)
    monkeypatch.setattr(math, "cos", math.sin)
    assert before is not None is not key(mod) != before


def test_a_default_that_changed() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: Any = 1, *, more: Any = 2) -> Any:
        return score + by + more

    before = key(mod)
    mod.__defaults__ = (3,)
    middle = key(mod)
    mod.__kwdefaults__ = {"more": 3}
    assert len({before, middle, key(mod)}) == 3


def test_a_cell_that_changed() -> None:
    by = 1

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + by

    before = key(mod)
    by = 2
    assert key(mod) != before is not None


def test_two_threads_that_read_a_code_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys compare what they read by identity."""
    mod, study, keys = shifted(1), traces._study, list[Any]()

    def studied(code: Any) -> Any:
        if not keys:
            keys.append(None)
            keys.append(key(mod))  # as another thread that is quicker
        return study(code)

    monkeypatch.setattr(traces, "_codes", {})
    monkeypatch.setattr(traces, "_study", studied)
    assert key(mod) == keys[1]


def test_code_that_changed() -> None:
    one, other = shifted(1), loaded(TABLE)
    before = key(one)
    one.__code__ = (lambda by: lambda score, b, h, q_idx, kv_idx: score - by)(1).__code__
    assert key(one) != before and key(other) is not None


# What is never known


def counting() -> Any:
    calls = 0

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        nonlocal calls
        calls += 1
        return score + calls

    return mod


def importing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    import random

    return score + random.random()


class Callee:
    def __init__(self) -> None:
        self.by = 1

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.by

    method = __call__


def wrapped() -> Any:
    @functools.wraps(of_global)
    def mod(*args: Any) -> Any:
        return of_global(*args)

    return mod


def writing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    global WRITTEN
    WRITTEN = 1
    return score


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q_idx, kv_idx: score + HOLDER.limit,
        lambda score, b, h, q_idx, kv_idx: score + LIMITS[0],
        lambda score, b, h, q_idx, kv_idx: score + getattr(HOLDER, "limit"),  # noqa: B009
        # an attribute with the name of a global
        lambda score, b, h, q_idx, kv_idx: score + LIMIT + TABLE.LIMIT,  # type: ignore[attr-defined]
        lambda score, b, h, q_idx, kv_idx: score + LIMIT + torch.nn.LIMIT,  # type: ignore[attr-defined]
        lambda score, b, h, q_idx, kv_idx: score + torch.get_num_threads(),
        lambda score, b, h, q_idx, kv_idx: print() or score,
        lambda score, b, h, q_idx, kv_idx: score + NOWHERE,  # type: ignore[name-defined]  # noqa: F821
        shifted([1]),
        shifted({1: 2}),
        shifted(SimpleNamespace()),
        shifted(Callee()),
        shifted(torch.nn.Parameter),
        shifted(torch.zeros(2).to_sparse()),
        counting(),
        importing,
        writing,
        wrapped(),
        Callee(),
        Callee().method,
        torch.nn.Identity(),
    ],
)
def test_no_fingerprint(mod: Any) -> None:
    assert fingerprint(mod) is None


def test_an_empty_cell() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + late

    assert fingerprint(mod) is None
    late = 1
    assert fingerprint(mod) is not None


# Traces


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mods that are run on proxies."""
    mods: list[Any] = []

    def watch(mod: Any, kind: str, device: Any) -> Any:
        mods.append(mod)
        return trace.trace(mod, kind, device)

    monkeypatch.setattr(traces, "trace", watch)
    monkeypatch.setattr(traces, "_known", {})
    return mods


def test_a_known_mod_does_not_run(ran: list[Any]) -> None:
    one, other = torch.zeros(8), torch.ones(8)
    first, second = (remembered(loaded(table), "score", CPU) for table in (one, other))
    assert len(ran) == 1 and first.graph is second.graph
    assert first.tensors[0] is one and second.tensors[0] is other


def test_a_number_that_another_thread_assigns_during_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    by = 1

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + by

    def assign_and_trace(mod: Any, kind: str, device: Any) -> Any:
        nonlocal by
        by = 2
        return trace.trace(mod, kind, device)

    monkeypatch.setattr(traces, "_known", {})
    with monkeypatch.context() as patch:
        patch.setattr(traces, "trace", assign_and_trace)
        remembered(mod, "score", CPU)
    by = 1
    assert remembered(mod, "score", CPU).graph == remembered(shifted(1), "score", CPU).graph


def test_the_default_dtype_counts(ran: list[Any]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        remembered(shifted(0.5), "score", CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    remembered(shifted(0.5), "score", CPU)
    assert len(ran) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda table: float(table[0]),
        lambda table: table.max(),
        lambda table: table[0],
        lambda table: sum(table),
        lambda table: 1.0 if table[0] else 2.0,
        lambda table: torch.tensor(1.0) + table[0],
    ],
)
def test_a_mod_that_reads_values_runs_each_time(read: Any, ran: list[Any]) -> None:
    table = torch.zeros(8)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * read(table)

    found = []
    for _ in range(2):
        traced = remembered(mod, "score", CPU)
        found.append((traced.graph.key, [tensor.tolist() for tensor in traced.tensors]))
        table += 1
    assert len(ran) == 2 and found[0] != found[1]


def test_a_mod_that_reads_sizes_is_known(ran: list[Any]) -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * TABLE.shape[0] + TABLE.dim() + len(TABLE)

    assert remembered(mod, "score", CPU).graph is remembered(mod, "score", CPU).graph
    assert len(ran) == 1


def test_the_oldest_is_forgotten(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "REMEMBERED", 2)
    for number in (1, 2, 3, 3, 2, 1):
        remembered(shifted(number), "score", CPU)
    assert len(ran) == 4
