"""Reads the environment switches, once per process.

| variable                  | values     | meaning                                                          |
|---------------------------|------------|------------------------------------------------------------------|
| `FLEXMOD_DEBUG`           | 0, 1, 2, 3 | printed: nothing; timings; graphs too; the source's path too     |
| `FLEXMOD_CACHE_DIR`       | a folder   | of generated kernels; default `flexmod` in the user's cache      |
| `FLEXMOD_CHECK_BOUNDS`    | 0, 1       | kernels check what indexes captured tensors; the host waits      |
| `FLEXMOD_COMPILE_THREADS` | 1, 2, ...  | threads that compile kernels; default by the number of cores     |

An empty value means the default. An invalid one raises `EnvironmentSwitchError` at the first use of a switch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexmod.errors import EnvironmentSwitchError

DEBUG = "FLEXMOD_DEBUG"
CACHE_DIR = "FLEXMOD_CACHE_DIR"
CHECK_BOUNDS = "FLEXMOD_CHECK_BOUNDS"
COMPILE_THREADS = "FLEXMOD_COMPILE_THREADS"


@dataclass(frozen=True)
class Config:
    debug: int
    cache_dir: Path
    check_bounds: bool = False
    compile_threads: int | None = None


def read(environment: Mapping[str, str]) -> Config:
    """Returns the switches from `environment`.

    Raises:
        EnvironmentSwitchError: a value is not in the table above.
    """

    def number(name: str, pattern: str, accepted: str) -> int | None:
        value = environment.get(name)
        if value and not re.fullmatch(pattern, value):
            raise EnvironmentSwitchError(name=name, value=value, accepted=accepted)
        return int(value) if value else None

    debug = number(DEBUG, "[0-3]", "0, 1, 2 or 3") or 0
    check = number(CHECK_BOUNDS, "[01]", "0 or 1") == 1
    threads = number(COMPILE_THREADS, "[1-9][0-9]{0,3}", "a whole number from 1 to 9999")
    return Config(debug, _cache_dir(environment), check, threads)


def _cache_dir(environment: Mapping[str, str]) -> Path:
    folder = environment.get(CACHE_DIR)
    if not folder:
        return _user_cache(environment) / "flexmod"
    expanded = os.path.expanduser(folder)
    if expanded.startswith("~"):
        raise EnvironmentSwitchError(name=CACHE_DIR, value=folder, accepted="a folder; no user has this home")
    # os.path: a path that may not be read, or is too long, fails with a warning where a kernel is written
    if os.path.exists(expanded) and not os.path.isdir(expanded):
        raise EnvironmentSwitchError(name=CACHE_DIR, value=folder, accepted="a folder; this is a file")
    return Path(expanded).absolute()


def _home() -> Path:
    """Returns the user's home, or the root folder for a user without one, as containers do."""
    home = Path(os.path.expanduser("~"))
    return home if home.is_absolute() else Path("/")


def _user_cache(environment: Mapping[str, str]) -> Path:
    if sys.platform == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"])
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches"
    # the XDG rule: a relative path is invalid and counts as not set
    xdg = Path(environment.get("XDG_CACHE_HOME", ""))
    return xdg if xdg.is_absolute() else _home() / ".cache"


@cache
def config() -> Config:
    """Returns the switches of this process; `config.cache_clear()` makes the next call read them again."""
    return read(os.environ)


_moved: Path | None = None


@contextmanager
def cache_dir_at(folder: Path) -> Iterator[None]:
    """Sets FLEXMOD_CACHE_DIR within a block, for all threads of this process."""
    global _moved
    before, _moved = _moved, folder
    try:
        yield
    finally:
        _moved = before


def debug_level() -> int:
    """Returns FLEXMOD_DEBUG, 0 to 3."""
    return config().debug


def cache_dir() -> Path:
    """Returns the absolute path of the folder of generated kernels, which need not exist."""
    return config().cache_dir if _moved is None else _moved


def check_bounds() -> bool:
    """Returns FLEXMOD_CHECK_BOUNDS: whether kernels check each index into a captured tensor."""
    return config().check_bounds


def compile_threads() -> int | None:
    """Returns FLEXMOD_COMPILE_THREADS, or None if it is not set."""
    return config().compile_threads
