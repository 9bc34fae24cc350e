"""Compiles kernels in parallel threads, if the machine has spare cores.

Most of a compile is not Python, so threads run in parallel. Jobs compile for stand-ins of the same kinds and
alignment as the tensors, so that a later launch finds the compiled kernel.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexmod.block_mask.storage import is_captured
from flexmod.codegen import compiled_kernels
from flexmod.runtime import config, direct
from flexmod.runtime.bound import NO_EXTENTS
from flexmod.runtime.launch import sample
from flexmod.runtime.locks import Lock, paused_collections
from flexmod.runtime.plan import Extents, Place, Plan, contiguous, extents_of, value_of
from flexmod.runtime.private_triton import (
    after_writing,
    build_launcher,
    build_launcher_of,
    has_compiled,
    start_compiler,
)

# ast.parse raises SystemError where two threads run it: https://github.com/python/cpython/issues/106905.
# Compiles take turns at it; the user's own threads cannot.
PARSER_IS_UNSAFE = (3, 11) <= sys.version_info < (3, 11, 8)
PLENTY = 4  # cores: on fewer, the threads of one process would slow down others, such as ranks
TURN = 50e-6  # seconds that a thread may run Python while others wait for it

Result = TypeVar("Result")
Job = Callable[[], object]


def threads() -> int:
    """Returns how many threads compile kernels at a time; 1 means no parallel compiles."""
    asked = config.compile_threads()
    if asked is not None:
        return asked
    if PARSER_IS_UNSAFE:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores >= PLENTY else 1


def start_ahead() -> None:
    """Has a thread start Triton, which takes half a second, while this one imports and traces."""
    if threads() > 1:
        later(_start_compiler)


@cache
def start_second_process() -> None:
    """Has the first training step of this process compile in two processes."""
    if threads() > 1:
        compiled_kernels.start_second()


def _start_compiler() -> None:
    with short_turns():
        start_compiler()


def in_threads(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs jobs in threads and returns their results in order. This thread runs the first job.

    After all jobs end, raises the error of the first failed one, in the jobs' order.
    """
    if threads() == 1 or len(jobs) < 2:
        return [job() for job in jobs]
    tasks = [_Task(job) for job in jobs]
    left = deque(tasks[1:])
    others: list[threading.Thread] = []
    with short_turns():
        with suppress(RuntimeError):  # the system starts no more threads
            while len(others) + 1 < min(threads(), len(jobs)):
                thread = threading.Thread(target=_work, args=(left,), name="flexmod compiles")
                thread.start()
                others.append(thread)
        try:
            tasks[0].run()
            _work(left)
        finally:
            left.clear()  # after Ctrl-C no thread starts another job
            for thread in others:
                thread.join()
    return [task.outcome.result() for task in tasks]


class _Task:
    def __init__(self, job: Callable[[], Any]) -> None:
        self.job, self.outcome = job, Future[Any]()

    def run(self) -> None:
        try:
            self.outcome.set_result(self.job())
        except BaseException as error:
            self.outcome.set_exception(error)
            if not isinstance(error, Exception):
                raise


def _work(left: deque[_Task]) -> None:
    with suppress(IndexError):  # no job is left
        while True:
            left.popleft().run()


@contextmanager
def beside(job: Job | None = None) -> Iterator[list[threading.Thread]]:
    """Runs a job in a thread while this one compiles a kernel inside, and builds its launcher in another.

    The job that `job` returns, and the launcher, start once they do not slow this thread down. The former is
    dropped where the body raises. Waits for the launcher, since the load of the kernel would build it a
    second time. Yields a list that has the launcher's thread at the end, if the kernel was not in Triton's
    cache.
    """
    launchers: list[threading.Thread] = []
    written = Future[bool]()

    def begin(source: Any) -> None:
        if source is not None:
            launchers.append(later(partial(build_launcher_of, source)))
        written.set_result(True)

    if job is not None:
        later(job, written)
    try:
        with ExitStack() as compiling:
            if job is not None or threads() > 1:
                compiling.enter_context(short_turns())
                compiling.enter_context(after_writing(begin))
            yield launchers
    finally:
        if not written.done():
            written.set_result(False)
    for launcher in launchers:
        if launcher.is_alive():
            launcher.join()


def later(job: Job, ready: Future[bool] | None = None) -> threading.Thread:
    """Runs a job in its own thread, and then the job that it returns, if any; the first one is freed before.

    The second job waits for `ready` and runs if that is true. Drops their errors, since a caller that needs
    a result repeats the job. A process waits for the thread before it ends, since the thread may be inside
    the compiler.
    """
    jobs: list[Callable[[], Any]] = [job]

    def quietly() -> None:
        with suppress(Exception):
            following = jobs.pop()()
            if following is not None and (ready is None or ready.result()):
                following()

    thread = threading.Thread(target=quietly, name="flexmod compiles ahead")
    with suppress(RuntimeError):  # no thread can be started, as when the process ends
        thread.start()
    return thread


class _Turns:
    """How many blocks of `short_turns` run, and what restores Python's settings after them."""

    def __init__(self) -> None:
        self.blocks, self._after = 0, ExitStack()

    def begin(self) -> None:
        if not self.blocks:
            interval = sys.getswitchinterval()
            self._after.callback(sys.setswitchinterval, interval)
            sys.setswitchinterval(min(TURN, interval))
            self._after.enter_context(paused_collections())
        self.blocks += 1

    def end(self) -> None:
        self.blocks -= 1
        if not self.blocks:
            self._after.close()

    def forget(self) -> None:
        """Ends all blocks in a forked child, which has none of their threads."""
        self.blocks = 0
        self._after.close()


_turns, _counting = _Turns(), Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.forget)


@contextmanager
def short_turns() -> Iterator[None]:
    """Has threads take turns in Python each 50 µs, not each 5 ms, until the block ends.

    A compile leaves Python and comes back some hundred times, and waits each time for the turn of a thread
    that runs Python. A full collection of garbage takes 0.1 s, so there is none meanwhile.
    """
    with _counting:
        _turns.begin()
    try:
        yield
    finally:
        with _counting:
            _turns.end()


def compiles(
    plan: Plan,
    tensors: Sequence[Tensor | None],
    device: torch.device,
    extents: Extents = NO_EXTENTS,
    *,
    apart: bool = False,
) -> Sequence[Job]:
    """Returns jobs that each compile one kernel of a plan, for kernels that this process lacks.

    `tensors` are a run's tensors or stand-ins; the jobs do not keep them alive. A job drops its error, which
    the launch raises again. There are no jobs without parallel compiles, or while a CUDA graph is captured.

    `apart`: the longest kernel compiles in a second process at once, if one waits, and is not among the jobs.
    """
    if threads() == 1 or is_captured(device):
        return []
    missing: dict[tuple[int, str], tuple[Any, list[Any]]] = {}
    for step in plan.launches():
        function = None if step.source.interpreted else getattr(step.source.module, step.name)
        if function is not None and not has_compiled(function, device.index):
            missing.setdefault((id(function), step.name), (function, []))[1].append(step)
    if not missing:
        return []
    start_compiler()
    inputs = zip(plan.inputs, tensors, strict=True)
    named = {place.name: stand_in(tensor) for place, tensor in inputs if place and tensor is not None}
    known = {**extents_of(plan.inputs, tensors), **extents}
    jobs = [
        partial(_compile, function, device, [sample(step, named, known) for step in steps])
        for function, steps in missing.values()
    ]
    if apart and compiled_kernels.second_waits():
        longest = max(jobs, key=lambda job: len(job.args[0].src))
        jobs.remove(longest)
        later(partial(_apart, longest))
    return jobs


def _apart(job: Job) -> None:
    with compiled_kernels.offered():
        job()


def _compile(function: Any, device: torch.device, launches: Sequence[Mapping[str, Any]]) -> None:
    """Compiles a kernel's launches one after another, since they mostly share one compiled kernel.

    Builds their launchers in C too. Loads nothing, and allocates nothing: the tensors are stand-ins.
    """
    with suppress(Exception):
        for arguments in launches:
            with beside() as launchers:
                compiled = direct.compiled(function, device, direct.with_counters(arguments))
            if not launchers:
                build_launcher(compiled)


def stand_in(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same kind and alignment without memory."""
    shape, strides, past = tensor.shape, tensor.stride(), tensor.data_ptr() % 16
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    if not past:
        return made
    count, offset = made.untyped_storage().nbytes() // made.element_size(), past // made.element_size()
    larger = torch.empty(count + offset, dtype=tensor.dtype, device="meta")
    return larger.as_strided(shape, strides, offset)


def stand_in_of(place: Place, extents: Extents) -> Tensor:
    """Returns a tensor without memory for a place of a plan."""
    shape = [value_of(size, extents) for size in place.shape]
    strides = [value_of(stride, extents) for stride in place.strides or contiguous(shape)]
    return torch.empty_strided(shape, strides, dtype=place.dtype, device="meta")
