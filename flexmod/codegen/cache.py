"""Source text -> a readable file in the user's cache folder -> a module.

The file's name is the kernel's name and a hash of the text. So an existing file has the right content, and
two processes that write it at once write the same text. No code runs from the folder: the module, `inspect`
and `triton.jit` use the text in memory, and the file is for people.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import sys
import tempfile
import threading
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flexmod.runtime import config
from flexmod.runtime.locks import Lock, lazy_imports

if TYPE_CHECKING:
    from flexmod.runtime.private_triton import Specialized

KEPT = 256  # unused modules that stay in memory

_lock = Lock(threading.RLock)
_modules: OrderedDict[str, _LazyModule] = OrderedDict()  # the one used last is the last
_users: Counter[str] = Counter()  # of each path: modules that live
# Paths of deleted modules, for the next load to handle: the collector runs in any thread, under any lock.
_dead: deque[str] = deque()


def load(text: str, name: str) -> ModuleType:
    """Returns the module with this source, which runs when one of its names is first read.

    The interpreter runs the text by itself, and inspection only shows it: both spare the time of Triton's
    jit, which reads each function of the text.

    Args:
        text: complete Python source.
        name: begins the file's name; characters that are not letters, digits or `_` become `_`.

    Returns:
        the module; the same object for the same text and name among the last KEPT. `module.__file__` is the
        path of the source, `<name>_<first 12 hex digits of the hash>.py`. The first load writes it into its
        cache folder, and each later load into its own.

    Raises:
        where a name is read: every error that the text raises when it runs.

    Warns:
        RuntimeWarning: once, if the cache folder cannot be written and a temporary one replaces it. If that
            cannot be written either, there is no file.
    """
    stem = f"{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with _lock:
        module = _modules.get(stem)
        if module is None:
            path = _write(stem + ".py", text)
            module = _modules[stem] = _LazyModule(text, path, _module_name(stem))
            # users of the module may read its lines until it is deleted
            _users[str(path)] += 1
            weakref.finalize(module, _dead.append, str(path)).atexit = False
        elif Path(str(module.__file__)).parent != config.cache_dir():
            _write(stem + ".py", text)  # `flexmod warm` fills another folder
        _modules.move_to_end(stem)
        while len(_modules) > KEPT:  # the users of the oldest one keep it alive
            sys.modules.pop(_module_name(_modules.popitem(last=False)[0]), None)
        while _dead:
            _forget_lines(_dead.popleft())
        return module


def _forget_lines(path: str) -> None:
    _users[path] -= 1
    if not _users[path]:
        del _users[path]
        linecache.cache.pop(path, None)


def _module_name(stem: str) -> str:
    return f"flexmod_generated.{stem}"


def _write(file_name: str, text: str) -> Path:
    folder = config.cache_dir()
    try:
        return _write_in(folder, file_name, text)
    except OSError as error:
        _warn_once(folder, error.strerror or str(error))
    try:
        return _write_in(Path(_temporary_directory().name), file_name, text)
    except OSError:  # the module works without its file, which nothing reads
        return folder / file_name


def _write_in(folder: Path, file_name: str, text: str) -> Path:
    """Writes the file unless it has this text already."""
    path, data = folder / file_name, text.encode()
    if not path.is_file() or path.read_bytes() != data:
        write_file(path, data)
    return path


def write_file(path: Path, data: bytes) -> None:
    """Writes a file and makes its folder, both readable as the umask says.

    Another process sees the old or the new file, never a mix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # mkstemp's files are private
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _warn_once(folder: Path, reason: str) -> None:
    warnings.warn(
        f"flexmod cannot write to its cache folder {folder} ({reason}); generated kernels go to a temporary "
        f"folder of this process. Set {config.CACHE_DIR} to a folder that can be written.",
        RuntimeWarning,
        stacklevel=4,
    )


@cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flexmod-")


class _LazyModule(ModuleType):
    """A module that runs its text when one of its names is first read."""

    def __init__(self, text: str, path: Path, name: str) -> None:
        super().__init__(name)
        self.__file__ = str(path)
        self._execute = partial(_execute, text, path, name)
        self._executed: ModuleType | None = None
        # without a time stamp linecache keeps these lines when the file changes
        linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
        # `inspect` finds the module of a function here, before it searches all modules
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `inspect` asks of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _lock:
            if self._executed is None:
                self._executed = self._execute()
        return getattr(self._executed, name)


def _execute(text: str, path: Path, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    with lazy_imports():
        from flexmod.codegen.compiled_kernels import share_compiles
    share_compiles(module, partial(_compile, text, path, name))
    return module


def _compile(
    text: str, path: Path, name: str, kernel: str, facts: Specialized, settings: tuple[str, str]
) -> None:
    """Compiles a kernel of a module for another process, with that one's `settings` of Triton."""
    with lazy_imports():
        from flexmod.runtime.private_triton import compile_same, take_settings
    take_settings(settings)
    compile_same(getattr(_LazyModule(text, path, name), kernel), facts)
