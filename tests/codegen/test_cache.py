"""Generated source: files, modules, and what can go wrong between them."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import triton

from flexmod.codegen import cache
from flexmod.runtime import config

ROOT = Path(__file__).parents[2]

KERNEL = '''"""A kernel."""

import triton
import triton.language as tl


@triton.jit
def add_one(X, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < N)
    tl.store(X + i, x + 1, mask=i < N)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, switch: Callable[[str, object], None]) -> Iterator[Path]:
    """A cache folder of the test's own, and a process that has loaded nothing."""
    path = tmp_path / "kernels"
    switch(config.CACHE_DIR, path)
    forget()
    yield path
    forget()


def forget() -> None:
    cache._modules.clear()
    cache._warn_once.cache_clear()


def file_of(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def test_a_readable_file_is_written(folder: Path) -> None:
    module = cache.load(KERNEL, "add one")
    path = file_of(module)
    assert path.parent == folder
    assert path.read_text() == KERNEL
    stem, digest = path.stem.rsplit("_", 1)
    assert stem == "add_one"
    assert len(digest) == 12
    assert [entry.name for entry in folder.iterdir()] == [path.name]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_others_may_read_it_if_the_umask_lets_them(umask: int, mode: int) -> None:
    """As in an image that root fills and another user runs."""
    before = os.umask(umask)
    try:
        path = file_of(cache.load(KERNEL, "kernel"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_it_is_written_into_the_folder_of_each_load(
    folder: Path, tmp_path: Path, switch: Callable[[str, object], None]
) -> None:
    """`flexmod warm` fills another folder in a process that has the module."""
    module = cache.load(KERNEL, "kernel")
    switch(config.CACHE_DIR, tmp_path / "others")
    assert cache.load(KERNEL, "kernel") is module and file_of(module).parent == folder
    assert (tmp_path / "others" / file_of(module).name).read_text() == KERNEL


def test_source_is_found() -> None:
    module = cache.load(KERNEL, "kernel")
    assert isinstance(module.add_one, triton.JITFunction)
    assert inspect.getsource(module.add_one.fn) == KERNEL[KERNEL.index("@triton") :]
    assert inspect.getsource(module) == KERNEL


def test_one_module_for_one_text() -> None:
    first = cache.load(KERNEL, "kernel")
    assert cache.load(KERNEL, "kernel") is first
    assert cache.load(KERNEL + "\n", "kernel") is not first


def test_a_file_that_is_right_is_left_alone() -> None:
    path = file_of(cache.load(KERNEL, "kernel"))
    os.utime(path, (1, 1))
    cache._modules.clear()
    cache.load(KERNEL, "kernel")
    assert path.stat().st_mtime == 1


@pytest.mark.parametrize("damaged", ["", KERNEL[:60], "raise RuntimeError('stale')\n"])
def test_a_damaged_file_is_rewritten(damaged: str) -> None:
    path = file_of(cache.load(KERNEL, "kernel"))
    path.write_text(damaged)
    cache._modules.clear()
    module = cache.load(KERNEL, "kernel")
    assert path.read_text() == KERNEL
    assert "x + 1" in inspect.getsource(module.add_one.fn)


def test_source_outlives_the_file() -> None:
    module = cache.load(KERNEL, "kernel")
    file_of(module).unlink()
    assert "x + 1" in inspect.getsource(module.add_one.fn)


def test_text_that_raises_does_so_where_a_name_is_read() -> None:
    module = cache.load("kernel = 1\n1 / 0\n", "broken")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _ = module.kernel
    assert inspect.getsource(module).startswith("kernel")


def test_a_folder_that_cannot_be_written(tmp_path: Path, switch: Callable[[str, object], None]) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    switch(config.CACHE_DIR, blocker / "kernels")
    with pytest.warns(RuntimeWarning, match="cannot write to its cache folder .*Not a directory") as caught:
        module = cache.load(KERNEL, "kernel")
        cache.load(KERNEL + "\n", "kernel")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert file_of(module).read_text() == KERNEL


def test_a_read_only_folder_is_used_for_what_it_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(cache.load(KERNEL, "kernel"))
    cache._modules.clear()
    forbid_writing(folder, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert file_of(cache.load(KERNEL, "kernel")) == path
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert file_of(cache.load(KERNEL + "\n", "kernel")).parent != folder


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder takes anything: the module works without a file, and its source is found."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        module = cache.load(KERNEL, "kernel of a full disk")
    assert not file_of(module).exists()
    assert not list(folder.iterdir())
    assert "x + 1" in inspect.getsource(module.add_one.fn)


KILLED = """
import os, signal
from flexmod.codegen import cache

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Half:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        kill()

{how}
cache.load({text!r}, "kernel")
"""
HALF_WRITTEN = "open_ = os.fdopen\nos.fdopen = lambda handle, mode: Half(open_(handle, mode))"
NOT_RENAMED = "os.replace = kill"


@pytest.mark.parametrize("how", [HALF_WRITTEN, NOT_RENAMED], ids=["half written", "not renamed"])
def test_killed_while_it_writes(folder: Path, how: str) -> None:
    script = KILLED.format(how=how, text=KERNEL)
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]
    path = file_of(cache.load(KERNEL, "kernel"))
    assert path.parent == folder and path.read_text() == KERNEL


def test_another_text_is_another_file(folder: Path) -> None:
    """As after an update of flexmod: what an older one left is never executed."""
    older = file_of(cache.load(KERNEL, "kernel"))
    newer = cache.load(KERNEL.replace("x + 1", "x + 2"), "kernel")
    assert file_of(newer) != older
    assert "x + 2" in inspect.getsource(newer.add_one.fn)


def forbid_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the folder's permissions would, which do not bind a test that root runs."""
    make = os.open

    def refuse(path: Path, *options: int) -> int:
        if Path(path).parent == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return make(path, *options)

    monkeypatch.setattr(os, "open", refuse)


def test_threads_get_one_module() -> None:
    found: list[ModuleType] = []
    threads = [threading.Thread(target=lambda: found.append(cache.load(KERNEL, "kernel"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_processes_write_at_once(folder: Path) -> None:
    script = (
        "import sys; from flexmod.codegen import cache\n"
        "sys.stdin.readline()\n"
        "for n in range(100): print(cache.load(f'value = {n}\\n', 'shared').value)\n"
    )
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    outputs = []
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        out, err = process.communicate(timeout=60)
        assert not err
        outputs.append(out.split())
    assert outputs == [list(map(str, range(100)))] * 2
    assert len(list(folder.iterdir())) == 100
