"""Shares compiled kernels: one process or thread compiles, others wait, and a folder can carry them along.

Triton stores compiled kernels in its own cache (TRITON_CACHE_DIR). Processes that start together, such as the
ranks of one host, would all miss it and compile the same kernels in parallel. Here each compile takes a lock
on a file of flexmod's cache folder, and the processes that wait then find the kernel in Triton's cache.

A thread that compiles ahead may leave its compile to a second process. Triton writes a kernel's IR in Python,
0.4 s for a large one, and one thread at a time runs Python. So the two large kernels of a training step, of
its forward and of its backward, would wait for each other. The second process imports Triton, but not torch,
which would take a second. It gets a job and ends with it. What it compiles lies in Triton's cache then, where
this process finds it.

    start_second()        starts it. There will be a job: the imports take 0.3 s.
    with offered():       this thread's next compile may be the job.
    run_in_second(job)    runs the job there.

The second process only saves time: whoever needs the kernel compiles it, if the cache lacks it.

`flexmod warm` fills the folder COMPILED of a cache folder. A process whose cache folder contains it finds the
kernels, also after the folder has moved.
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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import triton

from flexmod.runtime import config
from flexmod.runtime.locks import Lock, file_lock
from flexmod.runtime.private_triton import (
    Compile,
    Specialized,
    add_compiled,
    around_compiles,
    compiles_always,
    settings,
    tell_written,
)

CompileAgain = Callable[[str, Specialized, tuple[str, str]], object]

_locks: WeakValueDictionary[str, Lock] = WeakValueDictionary()  # by key, for compiles in progress
_guard = Lock()

COMPILED, LOCKS = "compiled", "locks"
# Seconds: for another process's compile (the slowest kernel of the library takes less than 60); of a second
# process without a job, and for its end.
PATIENCE, UNUSED, ENDING = 300.0, 60, 5.0


def share_compiles(module: ModuleType, again: CompileAgain) -> None:
    """Makes a generated module compile its kernels in one process at a time.

    `again` compiles a kernel of the module in a process that lacks it, and can be pickled. Its arguments are
    the kernel's name, its facts, and this process's `settings`.
    """
    for function in vars(module).values():
        if isinstance(function, triton.JITFunction):
            around_compiles(function, partial(_compile, function, again))


def _compile(
    function: Any, again: CompileAgain, key: str, facts: Specialized, compile_kernel: Compile
) -> Any:
    folder = config.cache_dir()
    find_compiled(folder)

    def compile_or_find() -> Any:
        if is_offered():
            tell_written(facts.source(function))  # IR that this process need not write
            run_in_second(partial(again, function.__name__, facts, settings()))
        return compile_kernel()

    with _guard:  # a second thread waits for the first one's kernel, even without file locks
        lock = _locks.setdefault(key, Lock())
    with lock:
        return compile_kernel() if compiles_always() else _compile_alone(folder, key, compile_or_find)


def _compile_alone(folder: Path, key: str, compile_kernel: Compile) -> Any:
    # few files serve all kernels, so unrelated kernels sometimes wait for each other
    with file_lock(folder / LOCKS / key[:2], PATIENCE) as lock:
        if lock == "waited":
            warnings.warn(
                f"flexmod waited {PATIENCE:.0f} s for another process that compiles a kernel, and compiles "
                f"it too. If that process hangs, end it: it holds the lock {folder / LOCKS / key[:2]}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return compile_kernel()


@cache
def find_compiled(folder: Path) -> int:
    """Lets Triton find the compiled kernels in a cache folder, and returns how many. Looks once a process."""
    try:
        return add_compiled(folder / COMPILED)
    except OSError as error:
        warnings.warn(
            f"flexmod cannot use the compiled kernels of {folder / COMPILED} ({error.strerror or error}): "
            f"they are compiled again. Set TRITON_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )
        return 0


# The standard library is first, then flexmod and Triton. A user's file may have the name of a module.
START = """\
import sys; sys.path[:] = [*filter(None, sys.path), *{path!r}]
from flexmod.codegen.compiled_kernels import main; main()
"""


class Second(NamedTuple):
    """A second process, and a socket to its standard input, since a closed pipe would raise SIGPIPE."""

    process: subprocess.Popen[bytes]
    input: socket.socket


_second_guard = Lock()
_waiting: list[Second] = []  # at most one, without a job
_of_thread = threading.local()  # `may_use`: see `offered`


def start_second() -> None:
    """Starts a process that waits for a job, unless one waits. Does nothing where that is impossible."""
    # an application that contains Python tells multiprocessing where an interpreter is
    python = os.fsdecode(spawn.get_executable() or "")
    if not python or getattr(sys, "frozen", False):
        return
    with _second_guard:
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


def second_waits() -> bool:
    """Returns whether a process waits for a job."""
    with _second_guard:
        return _alive()


def _alive() -> bool:
    return any(second.process.poll() is None for second in _waiting)


def is_offered() -> bool:
    return getattr(_of_thread, "may_use", False) and second_waits()


def run_in_second(job: Callable[[], object]) -> bool:
    """Runs a job in the process that waits, if one does. Returns whether it ended without an error.

    The job is pickled. It is a function of a module that imports no torch.
    """
    with _second_guard:
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
def stop_second() -> None:
    """Ends the process that waits."""
    with _second_guard:
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
