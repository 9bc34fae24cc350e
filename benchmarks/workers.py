"""Runs cases in worker processes, side by side, each with a time limit; a crash takes no other case along.

A group of cases runs in order in one process, so cases that share compiled kernels belong into one group. A
case that hangs or that kills its process is recorded as failed; the rest of its group goes on in a fresh one.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch


@dataclass(frozen=True)
class Outcome:
    """What became of one case: a value, or the text of what went wrong."""

    case: Any
    value: Any = None
    error: str = ""
    seconds: float = 0.0


@dataclass
class _Group:
    cases: deque[Any]
    patience: int


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    group: _Group
    since: float

    def take(self, group: _Group) -> None:
        self.group, self.since = group, time.monotonic()
        self.pipe.send(list(group.cases))

    def stop(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def run(
    function: Callable[[Any], Any],
    groups: Sequence[Sequence[Any]],
    *,
    workers: int,
    case_seconds: float,
    total_seconds: float,
    patience: int = 2,
) -> Iterator[Outcome]:
    """Yield one Outcome a case, as they come.

    `function` and the cases travel by pickle: a function of a module, and plain data. `case_seconds` holds
    for each case (a process start counts to its first case), `total_seconds` for everything. The rest of a
    group that has lost `patience` processes is given up.
    """
    todo = deque(_Group(deque(group), patience) for group in groups if group)
    busy: list[_Worker] = []
    end = time.monotonic() + total_seconds
    try:
        while (todo or busy) and time.monotonic() < end:
            while todo and len(busy) < workers:
                busy.append(_start(function, todo.popleft()))
            limit = min([end, *(worker.since + case_seconds for worker in busy)])
            ready = wait([worker.pipe for worker in busy], timeout=max(0.0, limit - time.monotonic()))
            for worker in [worker for worker in busy if worker.pipe in ready]:
                yield from _read(worker, busy, todo)
            late = [worker for worker in busy if time.monotonic() >= worker.since + case_seconds]
            for worker in late:
                yield from _lose(worker, busy, todo, f"no answer within {case_seconds:.0f} s")
        for group in [*(worker.group for worker in busy), *todo]:
            why = f"not run: {total_seconds:.0f} s were over"
            yield from (Outcome(case, error=why) for case in group.cases)
    finally:
        for worker in busy:
            worker.stop()


def _start(function: Callable[[Any], Any], group: _Group) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()
    worker = _Worker(process, ours, group, time.monotonic())
    worker.take(group)
    return worker


def _read(worker: _Worker, busy: list[_Worker], todo: deque[_Group]) -> Iterator[Outcome]:
    try:
        value, error, seconds, goes_on = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(5)
        yield from _lose(worker, busy, todo, f"its process ended with exit code {worker.process.exitcode}")
        return
    yield Outcome(worker.group.cases.popleft(), value, error, seconds)
    worker.since = time.monotonic()
    if not goes_on:
        yield from _replace(worker, busy, todo)
    elif not worker.group.cases and todo:
        worker.take(todo.popleft())
    elif not worker.group.cases:
        busy.remove(worker)
        worker.stop()


def _lose(worker: _Worker, busy: list[_Worker], todo: deque[_Group], why: str) -> Iterator[Outcome]:
    yield Outcome(worker.group.cases.popleft(), error=why, seconds=time.monotonic() - worker.since)
    yield from _replace(worker, busy, todo)


def _replace(worker: _Worker, busy: list[_Worker], todo: deque[_Group]) -> Iterator[Outcome]:
    """End a worker, and queue the rest of its group for a fresh one."""
    busy.remove(worker)
    worker.stop()
    group = worker.group
    group.patience -= 1
    if group.patience > 0 and group.cases:
        todo.appendleft(group)
    else:
        why = "not run: too many cases of its group ended their process"
        yield from (Outcome(case, error=why) for case in group.cases)


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        for case in pipe.recv():
            started = time.perf_counter()
            value, error = None, ""
            try:
                value = function(case)
            except Exception:
                error = traceback.format_exc(limit=-6)
            goes_on = not _device_is_lost()
            pipe.send((value, error, time.perf_counter() - started, goes_on))
            if not goes_on:
                return


def _device_is_lost() -> bool:
    """After an illegal access every later call of the process fails too: a fresh process must go on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
