"""Locks that are free in a forked child, whichever thread of its parent held them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet


class Lock:
    """threading.Lock, or another one that `make` makes, as a context manager.

    A forked process has one thread, the one that forked: a lock that another thread held would never be
    released there. What these locks guard is whole after each of its steps.
    """

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._lock = make()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = self._make()


_LOCKS: WeakSet[Lock] = WeakSet()


def _renew() -> None:
    for lock in [*_LOCKS]:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
