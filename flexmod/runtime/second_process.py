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
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NamedTuple

import triton

from flexmod.runtime.locks import Lock

# Seconds: without a job, for a job, and for its end. The slowest kernel of the library takes less than 60.
UNUSED, PATIENCE, ENDING = 60, 300.0, 5.0

# The standard library is first, then flexmod and Triton. A user's file may have the name of a module.
START = """\
import sys; sys.path[:] = [*filter(None, sys.path), *{path!r}]
from flexmod.runtime.second_process import main; main()
"""


class Second(NamedTuple):
    """A second process, and a socket to its standard input, since a closed pipe would raise SIGPIPE."""

    process: subprocess.Popen[bytes]
    input: socket.socket


_guard = Lock()
_waiting: list[Second] = []  # at most one, without a job
_of_thread = threading.local()  # `may_use`: see `offered`


def start() -> None:
    """Starts a process that waits for a job, unless one waits. Does nothing where that is impossible."""
    # an application that contains Python tells multiprocessing where an interpreter is
    python = os.fsdecode(spawn.get_executable() or "")
    if not python or getattr(sys, "frozen", False):
        return
    with _guard:
        if not _alive():
            _end()
            with suppress(OSError):
                _waiting.append(_started([python, "-S", "-c", START.format(path=_path())]))


def _started(command: list[str]) -> Second:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours, theirs = socket.socketpair()
    no_output: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with theirs:
        try:
            process = subprocess.Popen(command, env=environment, stdin=theirs.fileno(), **no_output)
        except OSError:
            ours.close()
            raise
    return Second(process, ours)


def _path() -> list[str]:
    """Returns the folders of flexmod and Triton, which may have been found in another way, and `sys.path`."""
    folders = [str(Path(file).parents[up]) for file, up in ((__file__, 2), (triton.__file__, 1))]
    return folders + [str(folder) for folder in sys.path if isinstance(folder, str)]


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
    with _guard:
        return _alive()


def _alive() -> bool:
    return any(second.process.poll() is None for second in _waiting)


def is_offered() -> bool:
    return getattr(_of_thread, "may_use", False) and waits()


def run(job: Callable[[], object]) -> bool:
    """Runs a job in the process that waits, if one does. Returns whether it ended without an error.

    The job is pickled. It is a function of a module that imports no torch.
    """
    with _guard:
        second = _waiting.pop() if _waiting else None
    if second is None:
        return False
    second.input.settimeout(PATIENCE)
    try:
        with suppress(OSError, subprocess.TimeoutExpired):
            second.input.sendall(pickle.dumps(job), socket.MSG_NOSIGNAL)
            second.input.recv(1)  # nothing, once the process has ended
            second.process.wait(ENDING)
    finally:
        _kill(second)
    return second.process.returncode == 0


@atexit.register
def stop() -> None:
    """Ends the process that waits."""
    with _guard:
        _end()


def _end() -> None:
    while _waiting:
        _kill(_waiting.pop())


def _kill(second: Second) -> None:
    second.process.kill()  # if it has not ended
    second.process.wait()
    second.input.close()


def main(patience: int = UNUSED) -> None:
    """What the second process does. It waits for a job for `patience` seconds."""
    from flexmod.runtime import private_triton as private_triton  # and Triton's compilers with it

    if not select.select([sys.stdin], [], [], patience)[0]:
        sys.exit("no job came")
    pickle.load(sys.stdin.buffer)()


def _leave() -> None:
    """Leaves the process to the parent of a forked child, without a warning that it runs."""
    for second in _waiting:
        second.process.returncode = 0
        second.input.close()
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)
