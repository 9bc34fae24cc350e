"""Imports slow packages at the first call that needs them, not at `import flexmod`.

    with lazy_imports():
        from flexmod.backends import generated

These are Triton, the modules that compile, launch or interpret kernels, and the packages that write kernels'
text and print tables. tests/test_import.py has the list.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flexmod.errors import MissingPackage

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
        before=_one_thread.acquire,
        after_in_parent=_one_thread.release,
        after_in_child=_one_thread.release,
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
    """Pauses Python's garbage collector during imports, which create no garbage.

    A full collection reads all of torch's objects, which takes 0.1 s, and is due soon after `import torch`.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
