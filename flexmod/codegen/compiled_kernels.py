"""Shares compiled kernels: one process or thread compiles, others wait, and a folder can carry them along.

Triton stores compiled kernels in its own cache (TRITON_CACHE_DIR). Processes that start together, such as the
ranks of one host, would all miss it and compile the same kernels in parallel. Here each compile takes a lock
on a file of flexmod's cache folder, and the processes that wait then find the kernel in Triton's cache.

A thread that compiles ahead may leave its compile to a second process, see `runtime/second_process.py`.

`flexmod warm` fills the folder COMPILED of a cache folder. A process whose cache folder contains it finds the
kernels, also after the folder has moved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import triton

from flexmod.runtime import config, second_process
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
PATIENCE = 300.0  # seconds; the slowest kernel of the library takes less than 60


def share_compiles(module: ModuleType, again: CompileAgain) -> None:
    """Makes a generated module compile its kernels in one process at a time.

    `again` compiles a kernel of the module in a process that lacks it, and can be pickled. Its arguments are
    the kernel's name, its facts, and this process's `settings`.
    """
    for function in vars(module).values():
        if isinstance(function, triton.JITFunction):
            around_compiles(function, partial(_compile, function, again))


def _compile(
    function: Any,
    again: CompileAgain,
    key: str,
    facts: Specialized,
    compile_kernel: Compile,
) -> Any:
    folder = config.cache_dir()
    find_compiled(folder)

    def compile_or_find() -> Any:
        if second_process.is_offered():
            tell_written(facts.source(function))  # IR that this process need not write
            second_process.run(partial(again, function.__name__, facts, settings()))
        return compile_kernel()

    with _lock_of(key):
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


def _lock_of(key: str) -> Lock:
    """The lock that makes a second thread wait for the first one's kernel, even without file locks."""
    with _guard:
        return _locks.setdefault(key, Lock())


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
