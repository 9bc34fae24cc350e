"""A second process that compiles one kernel, while this one compiles another.

Triton writes a kernel's IR in Python, 0.4 s for a large one, and one thread at a time runs Python. So the
two large kernels of a training step, of its forward and of its backward, would wait for each other. The
second process imports Triton, but not torch, which would take a second. It gets a job and ends with it.
What it compiles lies in Triton's cache then, where this process finds it.

    start()            starts it. There will be a job: the imports take 0.3 s.
    with offered():    this thread's next compile may be the job.
    run(job)           runs the job there.

The second process only saves time: whoever needs the kernel compiles it, if the cache lacks it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from pathlib import Path

import triton

from flexmod.runtime.locks import Lock

UNUSED = 60  # seconds that a process waits for a job
PATIENCE = 300.0  # seconds for a job; the slowest kernel of the library takes less than 60
START = "import sys; sys.path[:] = {path!r}; from flexmod.runtime.second_process import main; main()"

_guard = Lock()
_waiting: list[subprocess.Popen[bytes]] = []  # at most one, without a job
_of_thread = threading.local()  # `may_use`: see `offered`


def start() -> None:
    """Starts a process that waits for a job, unless one waits. Does nothing where that is impossible."""
    # an application that contains Python tells multiprocessing where an interpreter is
    python = os.fsdecode(spawn.get_executable() or "")
    if not python or getattr(sys, "frozen", False):
        return
    with _guard, suppress(OSError):
        if not _waiting or _waiting[0].poll() is not None:
            command = [python, "-S", "-c", START.format(path=_path())]
            _waiting[:] = [
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            ]


def _path() -> list[str]:
    """Returns `sys.path`, and the folders of packages that an editable install finds in another way."""
    return [*sys.path, str(Path(__file__).parents[2]), str(Path(triton.__file__).parents[1])]


@contextmanager
def offered() -> Iterator[None]:
    """Lets this thread use the second process, in the block."""
    _of_thread.may_use = True
    try:
        yield
    finally:
        _of_thread.may_use = False


def waits() -> bool:
    """Returns whether a process waits for a job."""
    return bool(_waiting)


def is_offered() -> bool:
    return waits() and getattr(_of_thread, "may_use", False)


def run(job: Callable[[], object]) -> bool:
    """Runs a job in the process that waits, if one does. Returns whether it ended without an error.

    The job is pickled. It is a function of a module that imports no torch.
    """
    with _guard:
        process = _waiting.pop() if _waiting else None
    if process is None:
        return False
    try:
        process.communicate(pickle.dumps(job), PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    finally:
        _kill(process)
    return process.returncode == 0


@atexit.register
def stop() -> None:
    """Ends the process that waits."""
    with _guard:
        while _waiting:
            _kill(_waiting.pop())


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # if it has not ended
    process.communicate()


def main(patience: int = UNUSED) -> None:
    """What the second process does. It waits for a job for `patience` seconds."""
    signal.alarm(patience)
    from flexmod.runtime import private_triton as private_triton

    try:
        job = pickle.load(sys.stdin.buffer)
    except EOFError:  # the first process has ended
        return
    signal.alarm(0)
    job()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)
