"""A second process compiles what this one then finds, without torch; and what happens where it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import spawn
from pathlib import Path

import pytest

from flexmod.codegen import cache, compiled_kernels
from flexmod.codegen.compiled_kernels import offered, run_in_second, second_waits, start_second, stop_second
from flexmod.runtime.private_triton import (
    GPUTarget,
    Specialized,
    cache_folder,
    compile_same,
    knobs,
    settings,
)  # fmt: skip

TEXT = '''
import triton
import triton.language as tl


@triton.jit
def add_one(X, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(X + i, tl.load(X + i, mask=i < N) + 1, mask=i < N)
'''
FACTS = Specialized(
    {"X": "*fp32", "N": "i32", "BLOCK": "constexpr"}, {"BLOCK": 64}, {(0,): [["tt.divisibility", 16]]}, {},
    GPUTarget("cuda", 90, 32),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _stop() -> Iterator[None]:
    stop_second()
    yield
    stop_second()


def compiled(name: str, path: Path) -> bool:
    """Compiles the kernel of TEXT here; was it in Triton's cache?"""
    module, found = cache.load(TEXT, name), list[bool]()
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        with cache_folder(path):
            compile_same(module.add_one, FACTS)
    finally:
        knobs.compilation.listener = None
    return found == [True]


def test_it_compiles_what_this_process_finds(tmp_path: Path) -> None:
    module = cache.load(TEXT, "apart")
    path = Path(str(module.__file__))
    start_second()
    with cache_folder(tmp_path):
        job = partial(cache._compile, TEXT, path, module.__name__, "add_one", FACTS, settings())
        assert run_in_second(job)
    assert not second_waits()
    assert compiled("apart", tmp_path)
    assert not compiled("here", tmp_path / "other")


def test_it_has_triton_and_no_torch(tmp_path: Path) -> None:
    start_second()
    names = partial(exec, f"import sys; open({str(tmp_path / 'names')!r}, 'w').write(' '.join(sys.modules))")
    assert run_in_second(names)
    found = (tmp_path / "names").read_text().split()
    assert "triton" in found and "torch" not in found


def test_no_process_no_job() -> None:
    assert not run_in_second(stop_second)


def test_a_job_that_fails() -> None:
    start_second()
    assert not run_in_second(partial(int, "no number"))


def test_a_process_that_was_killed_runs_nothing() -> None:
    start_second()
    compiled_kernels._waiting[0].process.kill()
    assert not run_in_second(stop_second)
    start_second()
    assert run_in_second(partial(int, "1")), "a second one can be started"


def test_a_job_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernels, "PATIENCE", 0.01)
    start_second()
    process = compiled_kernels._waiting[0].process
    assert not run_in_second(partial(time.sleep, 100))
    assert process.poll() is not None


def test_one_process_waits_at_a_time() -> None:
    start_second()
    (process,) = compiled_kernels._waiting
    start_second()
    assert compiled_kernels._waiting == [process]


def test_one_that_has_ended_is_replaced() -> None:
    start_second()
    (second,) = compiled_kernels._waiting
    second.process.kill()
    second.process.wait()
    assert not second_waits()
    start_second()
    assert compiled_kernels._waiting != [second]


def test_it_ends_without_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a program that never compiles a backward has no further process."""
    monkeypatch.setattr(compiled_kernels, "START", compiled_kernels.START.replace("main()", "main(1)"))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        start_second()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert compiled_kernels._waiting[0].process.wait(60) == 1
    assert not second_waits() and not run_in_second(stop_second)


@pytest.mark.parametrize("executable", ["", None, "/no/such/python"])
def test_where_no_python_can_be_started(executable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "get_executable", lambda: executable)
    start_second()
    assert not second_waits()


def test_an_application_without_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    start_second()
    assert not second_waits()


def test_only_the_thread_to_which_it_is_offered_uses_it() -> None:
    start_second()
    assert not compiled_kernels.is_offered()
    with offered():
        assert compiled_kernels.is_offered()
        others: list[bool] = []
        thread = threading.Thread(target=lambda: others.append(compiled_kernels.is_offered()))
        thread.start()
        thread.join()
        assert others == [False]
    assert not compiled_kernels.is_offered()


@pytest.mark.parametrize("entry", [Path("/tmp"), None, b"/tmp", "", "/no 'such\"\udcff folder"])
def test_odd_entries_of_the_path(entry: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    start_second()
    assert run_in_second(partial(int, "1"))


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("name", ["select", "flexmod", "triton"])
@pytest.mark.parametrize("through", ["sys.path", "PYTHONPATH"])
def test_a_module_of_the_user_with_the_name_of_another(
    name: str, through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process imported the other one before, as where a program adds a folder of its own."""
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if through == "sys.path":
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start_second()
    assert run_in_second(partial(int, "1"))
    assert not (tmp_path / "ran").exists()


def plain_python(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    imports = "import os, signal; from functools import partial; import flexmod.codegen.compiled_kernels as s"
    command = [sys.executable, *flags, "-c", f"{imports}\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ["process.kill(); process.wait()", "pass"])
def test_a_program_that_a_closed_pipe_would_end(end: str) -> None:
    """The process ends before it has read its job, and before it has got it."""
    script = f"""
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
s.START = "import sys; sys.stdin.buffer.read(1); sys.exit(1)"
s.start_second()
process = s._waiting[0].process
{end}
print(s.run_in_second(partial(len, "1" * 3_000_000)))
"""
    done = plain_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_warns_of_nothing() -> None:
    child = "s.start_second()\nif not os.fork(): os._exit(s.second_waits())"
    script = f"{child}\nprint(os.wait()[1], s.run_in_second(partial(int, '1')))"
    done = plain_python(script, "-W", "error")
    assert (done.stdout, done.stderr) == ("0 True\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_none() -> None:
    start_second()
    child = os.fork()
    if not child:
        os._exit(second_waits())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run_in_second(partial(int, "1"))


def test_it_ends_with_the_first_process() -> None:
    imports = "from flexmod.codegen import compiled_kernels as s"
    script = f"{imports}; s.start_second(); print(s._waiting[0].process.pid)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert done.stderr == ""
