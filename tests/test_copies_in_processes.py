"""What workers make and are given: DataLoaders of each start method, saved programs, numbers of graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from copied_objects import EVERY, LENGTH, WAYS, block_mask, ids, inputs, made, near, results
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flexmod
from flexmod import errors, flex_attention, masks, mods
from flexmod.ir import fingerprint
from flexmod.runtime.locks import _LOCKS

ROOT = Path(__file__).parents[1]
SECONDS = 200
SENT = [("handle", "closure"), ("handle", "bshd"), ("block mask", "sliced"), ("mask", "combined")]
SENT += [("score", "chain"), ("score", "computed")]


class Objects(Dataset[Any]):
    """Each object of `EVERY`, made in a worker; then the results there of objects that were sent to it."""

    def __init__(self) -> None:
        self.sent = [(kind, made(kind, name)) for kind, name in SENT]

    def __len__(self) -> int:
        return len(EVERY) + len(SENT)

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        if index < len(EVERY):
            return made(*EVERY[index])
        with torch.random.fork_rng():
            return results(*self.sent[index - len(EVERY)])


@pytest.mark.parametrize(
    ("start", "workers"),
    [
        ("spawn", 1),
        pytest.param("fork", 2, marks=pytest.mark.long),
        pytest.param("forkserver", 1, marks=pytest.mark.long),
    ],
)
def test_a_data_loader(start: str, workers: int) -> None:
    """A worker that hangs, or that loses an item, ends the wait with an error."""
    block_mask(masks.causal())  # torch's threads and flexmod's caches are there
    loader = DataLoader(
        Objects(), batch_size=None, num_workers=workers, multiprocessing_context=start, timeout=SECONDS
    )
    found = [*loader]
    assert len(found) == len(EVERY) + len(SENT)
    for (kind, name), value in zip(EVERY, found, strict=False):
        wanted = results(kind, made(kind, name))
        assert all(map(torch.equal, results(kind, value), wanted)), (kind, name)
        if kind == "block mask":
            assert value.graph_number == made(kind, name).graph_number
    for (kind, name), value in zip(SENT, found[len(EVERY) :], strict=True):
        assert all(map(torch.equal, value, results(kind, made(kind, name)))), (kind, name)


class Wrong(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return masks.natten((8, 8), kernel=4)


def test_a_mistake_in_a_worker_has_its_class() -> None:
    with pytest.raises(errors.LibraryArgumentError, match="natten: kernel is 4"):
        [*DataLoader(Wrong(), batch_size=None, num_workers=1, timeout=SECONDS)]


def test_a_child_finds_no_lock_held() -> None:
    """A fork while another thread holds every lock: the child traces, builds, compiles and interprets."""
    locks, forked, held = [*_LOCKS], threading.Event(), threading.Event()
    assert len(locks) >= 7 and fingerprint._lock in locks

    def hold() -> None:
        for lock in locks:
            lock._lock.acquire()
        held.set()
        forked.wait()
        for lock in locks:
            lock._lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            reach = 17
            attend = flexmod.compile(
                mods.softcap(3.5), lambda b, h, q, k: (q - k).abs() < reach,
                kernel_options={"BACKEND": "INTERPRET"},
            )  # fmt: skip
            attend(*[x.detach() for x in inputs()])
            os._exit(0)
        finally:
            os._exit(1)
    forked.set()
    thread.join()
    assert ended(child) == 0


def ended(child: int) -> int:
    """The exit status of a child, which is ended where it hangs."""
    timer = threading.Timer(SECONDS, os.kill, (child, 9))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return os.waitstatus_to_exitcode(status)


# compiled graphs


class Model(nn.Module):
    """A block mask from outside, which is an attribute, and a mask and a score mod that are made inside."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask
        self.bias = nn.Parameter(torch.linspace(0.1, 0.5, 3))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + self.bias[h] * (q_idx - kv_idx)

        inside = flexmod.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, "cpu")
        return flex_attention(q, k, v, score_mod, self.mask), flex_attention(q, k, v, None, inside)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_masks_of_other_graphs_in_one_compiled_model(backend: str, dynamic: bool | None) -> None:
    """Their numbers take 62 bits, and are inputs of the graph once there was another one."""
    call = torch.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), backend=backend, dynamic=dynamic,
        fullgraph=True,
    )  # fmt: skip
    tensors = inputs()
    for reach in (1, 5, 9):
        mask = WAYS["pickle"](block_mask(near(reach)))
        found = torch.autograd.grad(call(*tensors, mask).square().sum(), tensors)
        wanted = torch.autograd.grad(
            flex_attention(*tensors, block_mask=block_mask(near(reach))).square().sum(), tensors
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_copies_of_a_compiled_model(way: str) -> None:
    model = Model(block_mask(near(5)))
    tensors = inputs()
    wanted = [x.detach() for x in model(*tensors)]
    for value in (model, WAYS[way](model)):
        compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
        again = WAYS["deepcopy"](compiled) if way == "deepcopy" else compiled
        for found in (compiled(*tensors), again(*tensors)):
            torch.testing.assert_close([*found], wanted)
        again(*tensors)[0].sum().backward()


def test_a_module_with_a_handle_compiles_and_is_copied() -> None:
    model = nn.Sequential()
    model.attend = flexmod.compile(mods.softcap(2.0), masks.causal(), layout="bshd")
    model.forward = lambda q, k, v: model.attend(q, k, v) * 2  # type: ignore[method-assign]
    tensors = [x.detach().transpose(1, 2) for x in inputs()]
    copied = WAYS["deepcopy"](model.attend)
    compiled = torch.compile(lambda q, k, v: copied(q, k, v) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), model(*tensors))


LOADED = """
import sys
import torch
import flexmod

program = torch.export.load(sys.argv[1] + "/model.pt2")
mask, tensors, wanted = torch.load(sys.argv[1] + "/rest.pt", weights_only=False)
for ours, theirs in zip(program.module()(*tensors), wanted, strict=True):
    torch.testing.assert_close(ours, theirs)
print(mask.graph_number)
"""


@pytest.mark.long
def test_another_process_runs_an_exported_program(tmp_path: Path) -> None:
    class Inside(Model):
        def forward(self, q: Any, k: Any, v: Any, table: Any) -> Any:
            def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return torch.tanh(score / 3) * 3 + self.bias[h] * (q_idx - kv_idx).to(torch.float32)

            def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return (table[q_idx] == table[kv_idx]) & (q_idx >= kv_idx)

            inside = flexmod.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu")
            return flex_attention(q, k, v, score_mod, inside), flex_attention(q, k, v, mods.softcap(2.0))

    mask = block_mask(masks.document(ids()))
    tensors = [*(x.detach() for x in inputs()), ids()]
    model = Inside(None)
    torch.export.save(torch.export.export(model, tuple(tensors)), tmp_path / "model.pt2")
    torch.save((mask, tensors, [x.detach() for x in model(*tensors)]), tmp_path / "rest.pt")
    run = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == mask.graph_number


def test_a_program_names_only_what_a_trace_knows() -> None:
    from flexmod.ir.record import Recorded, encoded

    for name in ("load", "save", "compile", "system", "_C", "classes"):
        steps = ((name, ("tuple", (("value", 0),)), (), False),)
        recorded = Recorded(encoded(("score", steps, ("value", 5), (), torch.float32)), (), (), ())
        with pytest.raises(errors.UnknownOperationError, match=f"torch.{name}"):
            recorded.traced(torch.device("cpu"))
