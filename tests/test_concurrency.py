"""Many threads, many processes: the same mods and different ones, compiled and called at once."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from concurrent_calls import WORKERS, of_threads, results
from tiers import long_but
from torch import Tensor

from flexmod.runtime import config

CPU, INTERPRET = "cpu", "INTERPRET"


@pytest.fixture(scope="module")
def truth() -> list[list[Tensor]]:
    return [results(number, CPU, "AUTO") for number in range(8)]


def held_to(truth: list[list[Tensor]], number: int, found: list[Tensor]) -> None:
    for ours, expected in zip(found, truth[number % 8], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", long_but({"AUTO"}, ["AUTO", INTERPRET]))
def test_threads(truth: list[list[Tensor]], backend: str) -> None:
    """Three calls each, all let go together: mods are traced, compiled, known, recorded and played."""
    found = of_threads(lambda number: [results(number, CPU, backend) for _ in range(3)])
    for number, calls in found.items():
        for call in calls:
            held_to(truth, number, call)
            assert all(torch.equal(a, b) for a, b in zip(call, found[number % 8][0], strict=True))


def work(number: int, folder: str, together: Any, found: Any) -> None:
    os.environ[config.CACHE_DIR] = folder
    config.config.cache_clear()
    torch.set_num_threads(1)
    together.wait()
    found.put((number, [x.numpy() for x in results(number, CPU, INTERPRET)]))


@pytest.mark.long
def test_processes(truth: list[list[Tensor]], tmp_path: Path) -> None:
    """One folder of kernels; what a worker leaves there serves the others, and nothing is left half done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])
    together, queue = context.Barrier(WORKERS), context.Queue()
    processes = [
        context.Process(target=work, args=(number, str(tmp_path), together, queue))
        for number in range(WORKERS)
    ]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=240) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for number, arrays in found.items():
        call = list(map(torch.from_numpy, arrays))
        held_to(truth, number, call)
        assert all(torch.equal(x, torch.from_numpy(y)) for x, y in zip(call, found[number % 8], strict=True))
    left = [path for path in tmp_path.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert left and {path.suffix for path in left} == {".py"}
