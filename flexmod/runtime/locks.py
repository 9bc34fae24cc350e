"""What one thread, or one process, does at a time: locks that are free in a forked child, and lazy imports.

`parse` runs Python's parser in one thread at a time, since two threads may make it fail in CPython 3.11.

`lazy_imports` surrounds imports at the first call that needs a package, not at `import flexmod`:

    with lazy_imports():
        from flexmod.backends import families

These are Triton, the modules that compile, launch or interpret kernels, and the packages that write kernels'
text and print tables. tests/test_import.py has the list.
"""

from __future__ import annotations

import ast
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from weakref import WeakSet

from flexmod.errors import MissingPackage


class Lock:
    """A threading.Lock, or the lock that `make` returns, as a context manager that survives a fork.

    A forked child has only the thread that forked, so it could never release another thread's lock. It
    therefore starts with free locks. The data under these locks must be valid after each step.
    """

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._lock = make()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def take(self) -> bool:
        """Takes the lock if it is free; leave it with `release`."""
        return bool(self._lock.acquire(blocking=False))

    def release(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = self._make()


_LOCKS: WeakSet[Lock] = WeakSet()

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAUSE = 0.02  # seconds between two attempts to take another process's lock
_open_files: set[int] = set()  # of locks that threads of this process hold or wait for


@contextmanager
def file_lock(path: Path, seconds: float) -> Iterator[Literal["held", "waited", "none"]]:
    """Lets one process or thread at a time into the block, by a lock on a file; creates the file.

    The system releases the lock when a process ends. The block runs without the lock after `seconds` of
    waiting ("waited"), and on a file system without locks or a folder without write access ("none"). So the
    lock may save work but must not protect data.
    """
    file = _opened(path)
    if file is None:
        yield "none"
        return
    process = os.getpid()
    try:
        yield _acquired(file, seconds)
    finally:
        if os.getpid() == process:  # a child forked in the meantime has closed it
            _open_files.discard(file)
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that has not closed it yet would keep the lock
            os.close(file)


def _opened(path: Path) -> int | None:
    if fcntl is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    _open_files.add(file)
    return file


def _acquired(file: int, seconds: float) -> Literal["held", "waited", "none"]:
    deadline = time.monotonic() + seconds
    try:
        while not _taken(file):
            if time.monotonic() >= deadline:
                return "waited"
            time.sleep(PAUSE)
    except OSError:  # a file system without locks
        return "none"
    return "held"


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _renew() -> None:
    for lock in [*_LOCKS]:
        lock.renew()
    while _open_files:
        with suppress(OSError):
            os.close(_open_files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


_lock = Lock()


def parse(text: str, file: str = "<unknown>", mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """Returns the tree of a Python text. Raises SyntaxError."""
    with _lock:
        return ast.parse(text, file, mode)


# as in pyproject.toml
REQUIREMENTS = {
    "triton": "triton>=3.6", "jinja2": "jinja2>=3.1", "rich": "rich>=13.7", "numpy": "numpy<2.4"
}  # fmt: skip

NO_TRITON = (
    "Triton has wheels for Linux alone. On Windows use WSL; or run the CPU backend, which serves CPU tensors "
    'by default, or the dense one, kernel_options={"BACKEND": "REFERENCE"}'
)

# One thread at a time: Python may fail if one thread imports a package while another imports a part of it. A
# fork waits too: otherwise a child would keep a module that another thread had imported only half.
_one_thread = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_one_thread.acquire, after_in_parent=_one_thread.release, after_in_child=_one_thread.release
    )


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Surrounds import statements inside a function. Raises MissingPackage for an absent package."""
    with _one_thread, interrupts_afterwards(), paused_collections():
        try:
            yield
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package not in REQUIREMENTS:
                raise
            advice = f'pip install "{REQUIREMENTS[package]}"'
            if package == "triton" and sys.platform != "linux":
                advice = NO_TRITON
            raise MissingPackage(package=package, problem=error, advice=advice) from error


@contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Delays Ctrl-C until the imports in the block end.

    In the middle it would leave half of Triton in `sys.modules`, and no later call could import the rest.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[-1])


@contextmanager
def paused_collections() -> Iterator[None]:
    """Pauses Python's garbage collector during imports and compiles, which create no garbage.

    A full collection reads all of torch's objects, which takes 0.1 s, and is due soon after `import torch`.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
