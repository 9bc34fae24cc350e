"""Of processes that want the same kernel one compiles it; a folder of compiled kernels serves others."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest

from flexmod.codegen import cache
from flexmod.runtime.locks import file_lock
from flexmod.runtime.private_triton import settle_key

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch, stand_in_driver
from flexmod.codegen import cache, compiled_kernels

TEXT = '''
import triton
import triton.language as tl


@triton.jit
def add_one(X, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(X + i, tl.load(X + i, mask=i < N) + 1, mask=i < N)
'''
stand_in_driver.install()
kernel = cache.load(TEXT, "kernel").add_one
{before}
{wait}
kernel.warmup(torch.zeros(64), 64, BLOCK=64, grid=(1,))
print(stand_in_driver.count())
"""


WAIT = 'print("ready", flush=True)\nsys.stdin.readline()'


def script_and_environment(folder: Path, before: str, wait: str) -> tuple[str, dict[str, str]]:
    script = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), before=before, wait=wait)
    folders = {"FLEXMOD_CACHE_DIR": str(folder / "flexmod"), "TRITON_CACHE_DIR": str(folder / "triton")}
    return script, {**os.environ, **folders}


def start(folder: Path, before: str = "") -> subprocess.Popen[str]:
    """A process that compiles a kernel when it gets a line, and prints how many it compiled."""
    script, environment = script_and_environment(folder, before, WAIT)
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How many kernels the process compiled, and what it complained of."""
    out, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    return int(out), complaints


def alone(folder: Path, before: str = "") -> tuple[int, str]:
    """How many kernels a process compiles that no other waits for, and what it complains of."""
    script, environment = script_and_environment(folder, before, "")
    done = forked.python(script, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


def compiles(folder: Path, count: int, before: str) -> list[int]:
    processes = [start(folder, before) for _ in range(count)]
    for process in processes:
        go(process)
    return sorted(finish(process)[0] for process in processes)


# Slow enough that all of them would miss the cache.
SLOW = """
import time
from triton.compiler import compiler
make = compiler.ASTSource.make_ir
compiler.ASTSource.make_ir = lambda *args, **options: (time.sleep(1), make(*args, **options))[1]
"""


@pytest.mark.long
def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    assert compiles(tmp_path, 2, SLOW) == [0, 1]


@pytest.mark.long
def test_the_slow_compiles_would_all_miss(tmp_path: Path) -> None:
    """What the test above stands on: without the lock each process compiles."""
    alone = "compiled_kernels.file_lock = lambda path, seconds: __import__('contextlib').nullcontext('held')"
    assert compiles(tmp_path, 2, f"{SLOW}\n{alone}") == [1, 1]


@pytest.mark.long
def test_a_folder_that_takes_no_locks(tmp_path: Path) -> None:
    """Each goes on alone, without a word: the lock saves work and nothing else."""
    (tmp_path / "flexmod").mkdir()
    (tmp_path / "flexmod" / "locks").touch()
    assert alone(tmp_path) == (1, "")


@pytest.mark.long
@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks(error: str, tmp_path: Path) -> None:
    refuse = f"import errno, fcntl\ndef refuse(*_): raise OSError(errno.{error}, '')\nfcntl.flock = refuse"
    assert alone(tmp_path, refuse) == (1, "")


@pytest.mark.long
def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    killed, waiting = start(tmp_path, SLOW.replace("sleep(1)", "sleep(99)")), start(tmp_path)
    go(killed)
    locks = tmp_path / "flexmod" / "locks"
    wait_for(lambda: locks.is_dir() and any(map(is_locked, locks.iterdir())))
    go(waiting)
    time.sleep(0.3)
    assert waiting.poll() is None
    killed.send_signal(signal.SIGKILL)
    assert finish(waiting) == (1, "")
    killed.communicate()


@pytest.mark.long
def test_who_waits_too_long_goes_on_alone(tmp_path: Path) -> None:
    locks = tmp_path / "flexmod" / "locks"
    locks.mkdir(parents=True)
    held = [os.open(locks / f"{number:02x}", os.O_RDWR | os.O_CREAT) for number in range(256)]
    try:
        for file in held:
            fcntl.flock(file, fcntl.LOCK_EX)
        count, complaints = alone(tmp_path, "compiled_kernels.PATIENCE = 0.1")
    finally:
        for file in held:
            os.close(file)
    assert count == 1
    assert (
        "RuntimeWarning: flexmod waited 0 s for another process that compiles a kernel, and compiles it too. "
        f"If that process hangs, end it: it holds the lock {locks}"
    ) in complaints


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_locked(path: Path) -> bool:
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


# the lock itself


def test_threads_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []

    def work() -> None:
        with file_lock(tmp_path / "lock", 60) as lock:
            assert lock == "held"
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not is_locked(tmp_path / "lock")


def test_an_error_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "lock", 1):
        1 / 0  # noqa: B018  raises
    assert not is_locked(tmp_path / "lock")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", ["in the body", "in another thread"])
def test_a_forked_child_keeps_no_lock(where: str, tmp_path: Path) -> None:
    path, (read, write) = tmp_path / "lock", os.pipe()

    def fork() -> int:
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # lives on until its parent is done
            os._exit(0)
        return child

    with file_lock(path, 1) as lock:
        assert lock == "held"
        if where == "in the body":
            child = fork()
        else:
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(fork()))
            thread.start()
            thread.join()
            (child,) = found
        assert is_locked(path)
    try:
        assert not is_locked(path)
    finally:
        os.close(write)
        os.close(read)
        assert os.waitpid(child, 0)[1] == 0


# a folder that brings kernels along


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `flexmod warm` leaves of one kernel, copied from where it was compiled; that folder is gone."""
    folder = tmp_path_factory.mktemp("shipped")
    assert alone(folder / "here")[0] == 1
    shutil.copytree(folder / "here" / "triton", folder / "flexmod" / "compiled")
    shutil.rmtree(folder / "here")
    return folder / "flexmod"


@pytest.fixture
def moved(shipped: Path, tmp_path: Path) -> Path:
    """A folder for `start`, with what was shipped."""
    shutil.copytree(shipped, tmp_path / "there" / "flexmod")
    return tmp_path / "there"


@pytest.mark.long
def test_a_folder_that_was_moved_serves(moved: Path) -> None:
    assert [alone(moved)[0] for _ in range(2)] == [0, 0]


@pytest.mark.long
def test_a_moved_cache_of_tritons_own_does_not(moved: Path) -> None:
    """Why the folder is not simply Triton's own: its notes have absolute paths."""
    (moved / "flexmod" / "compiled").rename(moved / "triton")
    assert alone(moved)[0] == 1


@pytest.mark.long
def test_a_folder_is_moved_again(moved: Path, tmp_path: Path) -> None:
    assert alone(moved)[0] == 0
    (moved / "flexmod" / "compiled").rename(tmp_path / "away")
    assert alone(moved)[0] == 1  # Triton's notes lead nowhere
    shutil.rmtree(moved / "triton")
    (tmp_path / "away").rename(moved / "flexmod" / "compiled")
    assert alone(moved)[0] == 0


@pytest.mark.long
def test_a_damaged_folder_is_compiled_again(moved: Path) -> None:
    for path in (moved / "flexmod" / "compiled").rglob("*.json"):
        path.unlink()
    (moved / "flexmod" / "compiled" / "stray").touch()
    assert alone(moved)[0] == 1


@pytest.mark.long
def test_a_cache_of_tritons_that_cannot_be_written(moved: Path) -> None:
    blocked = (
        "import errno\ndef refuse(*_): raise PermissionError(errno.EACCES, 'Permission denied')\n"
        "compiled_kernels.add_compiled = refuse"
    )
    count, complaints = alone(moved, blocked)
    assert count == 1
    assert (
        f"RuntimeWarning: flexmod cannot use the compiled kernels of {moved / 'flexmod' / 'compiled'} "
        "(Permission denied): they are compiled again. Set TRITON_CACHE_DIR to a folder that can be written."
    ) in complaints


CALLED = '''
import triton
import triton.language as tl

FIVE = tl.constexpr(5)


@triton.jit
def five():
    return FIVE


@triton.jit
def doubled(x):
    return x * 2 + five()


@triton.jit
def kernel(X):
    tl.store(X, doubled(tl.load(X)))
'''


def test_a_kernels_key_depends_on_no_other_kernel() -> None:
    """Nor on which of the functions that it calls were compiled before: other processes find it."""
    keys = set()
    for name, before in (("first", ()), ("second", ("five",)), ("third", ("doubled",))):
        module = cache.load(CALLED, f"of the {name}")
        for called in before:
            settle_key(getattr(module, called))
        settle_key(module.kernel)
        keys.add(module.kernel.cache_key)
    assert len(keys) == 1
