"""The first mask of a mask_mod on a GPU: torch finds its tiles while its kernels compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.host_path import on_an_h200
from flexmod import BlockMask, create_block_mask, masks
from flexmod.block_mask import generated
from flexmod.block_mask.parts import trace_mask
from flexmod.block_mask.tiles import MaskLayout

CPU = torch.device("cpu")
IDS = torch.arange(1000, dtype=torch.int32) // 300


class Steps:
    """What happened: "compiled" in a thread, "launched" for a mask that kernels found."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.compiling = self.most = 0
        self.may_compile = threading.Event()

    def compile(self, *_: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.compiling += 1
        self.most = max(self.most, self.compiling)
        assert self.may_compile.wait(20)
        self.compiling -= 1
        self.seen.append("compiled")

    def build(self, build: Any, *given: Any) -> Any:
        self.seen.append("launched")
        return build(*given)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    found, build = Steps(), generated.build
    with on_an_h200():
        monkeypatch.setattr(generated, "_known", type(generated._known)())
        monkeypatch.setattr(generated, "threads", lambda: 4)
        monkeypatch.setattr(generated, "start_compiler", lambda: None)
        monkeypatch.setattr(generated, "DELAY", 0.0)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        monkeypatch.setattr(generated, "compile_ahead", found.compile)
        monkeypatch.setattr(generated, "build", lambda *given: found.build(build, *given))
        yield found
        found.may_compile.set()
        for ahead in generated._known.values():
            if ahead is not None:
                ahead.finish()


def window(size: int) -> Any:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= size)


def mask(mask_mod: Any, length: int = 1000, **given: Any) -> BlockMask:
    return create_block_mask(mask_mod, None, None, length, length, CPU, **given)


CASES = [
    (mask_mod, separate) for mask_mod in (masks.causal(), masks.document(IDS)) for separate in (True, False)
]


@pytest.fixture(params=CASES)
def by_kernels(request: pytest.FixtureRequest) -> tuple[Any, bool, Any]:
    """A mask_mod, whether full tiles are apart, and the runs that the interpreted kernels find."""
    mask_mod, separate = request.param
    sizes = (1, 1, 1000, 1000)
    layout = MaskLayout(sizes, (128, 128), CPU, separate)
    runs = generated.build(trace_mask(mask_mod, CPU), layout, interpreted=True)
    return mask_mod, separate, runs


def test_it_has_the_runs_of_the_kernels(by_kernels: tuple[Any, bool, Any], steps: Steps) -> None:
    mask_mod, separate, expected = by_kernels
    found = mask(mask_mod, separate_full_blocks=separate)
    assert steps.seen == []
    for axis in ("kv", "q"):
        runs, others = found.storage.runs(axis), expected[axis]
        assert torch.equal(runs.table(8), others.table(8))
        assert torch.equal(runs.rows[..., :2], others.rows[..., :2])
        assert (runs.order is None) == (others.order is None)
        assert runs.order is None or torch.equal(runs.order, others.order)


def test_the_next_mask_waits_for_its_kernels(steps: Steps) -> None:
    mask(window(100))
    threading.Timer(0.05, steps.may_compile.set).start()
    mask(window(200), 900)  # another number, another length
    assert steps.seen == ["compiled", "launched"]
    mask(window(100))
    assert steps.seen == ["compiled", "launched", "launched"]


def test_one_mask_mod_compiles_at_a_time_unless_it_is_needed(steps: Steps) -> None:
    for mask_mod in (masks.causal(), masks.prefix_lm(100), window(100)):
        mask(mask_mod)
    threading.Timer(0.3, steps.may_compile.set).start()
    mask(window(100))
    assert 1 <= steps.seen.index("launched") <= 3, "others may end before it, or while it runs"
    for ahead in generated._known.values():
        if ahead is not None:
            ahead.thread.join(10)
    assert steps.seen.count("compiled") == 3 and steps.most == 2


def test_each_mask_mod_has_a_first_mask(steps: Steps) -> None:
    steps.may_compile.set()
    for mask_mod in (masks.causal(), masks.document(IDS), masks.prefix_lm(100)):
        mask(mask_mod)
    for ahead in generated._known.values():
        ahead.finish()
    assert steps.seen == ["compiled"] * 3


@pytest.mark.parametrize("why", ["one thread", "checks", "captured", "no synchronization", "many tiles"])
def test_kernels_find_what_torch_cannot(why: str, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "one thread":
        monkeypatch.setattr(generated, "threads", lambda: 1)
    if why == "checks":
        monkeypatch.setattr(generated, "config", SimpleNamespace(check_bounds=lambda: True))
    if why == "captured":
        monkeypatch.setattr(generated, "is_captured", lambda device: True)
    if why == "no synchronization":
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    if why == "many tiles":
        monkeypatch.setattr(generated, "MOST_TILES", 63)
    mask(masks.causal())
    assert steps.seen == ["launched"]
    mask(masks.causal())
    assert steps.seen == ["launched"] * 2


def test_a_compile_that_fails_is_left_to_the_launch(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(generated, "compile_ahead", fail)
    mask(masks.causal())
    mask(masks.causal())
    assert steps.seen == ["launched"]


def test_a_process_that_ends_compiles_nothing(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "DELAY", 30.0)
    ended = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(generated.threading, "main_thread", lambda: ended)
    mask(masks.causal())
    (ahead,) = generated._known.values()
    assert ahead is not None
    ahead.thread.join(10)
    assert not ahead.thread.is_alive() and steps.seen == []


def test_a_system_without_more_threads(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    mask(masks.causal())
    mask(masks.causal())
    assert steps.seen == ["launched"]
