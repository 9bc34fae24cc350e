"""Compiles in threads: who compiles what, when, and that a launch finds it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from tiers import long_but
from torch import Tensor
from triton.runtime import build

from flexmod.runtime import config, private_triton, side_by_side
from flexmod.runtime.plan import Place, Size
from flexmod.runtime.private_triton import after_writing
from flexmod.runtime.side_by_side import beside, in_threads, later, stand_in, stand_in_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(side_by_side, "threads", lambda: count)


# how many threads


@pytest.mark.parametrize(
    ("cores", "asked", "expected"),
    [(1, "", 1), (3, "", 1), (4, "", 4), (16, "", 16), (1, "2", 2), (9, "1", 1)],
)
def test_the_number_of_threads(
    cores: int, asked: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    switches = config.read({config.COMPILE_THREADS: asked})
    monkeypatch.setattr(config, "config", lambda: switches)
    monkeypatch.setattr(side_by_side, "PARSER_IS_UNSAFE", False)
    assert side_by_side.threads() == expected
    monkeypatch.setattr(side_by_side, "PARSER_IS_UNSAFE", True)
    assert side_by_side.threads() == (expected if asked else 1)


# jobs


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_results_come_in_order(count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    seen: set[int] = set()

    def job(number: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.02 * (number % 2))
        return number

    assert in_threads([lambda number=number: job(number) for number in range(5)]) == [0, 1, 2, 3, 4]
    assert len(seen) <= count and (count == 1 or len(seen) > 1)
    assert threading.get_ident() in seen
    assert in_threads([]) == []


def test_this_thread_takes_the_first_job(threads: Callable[[int], None]) -> None:
    threads(3)
    ran = in_threads([threading.get_ident] + [lambda: time.sleep(0.05)] * 4)
    assert ran[0] == threading.get_ident()


def test_jobs_run_at_the_same_time(threads: Callable[[int], None]) -> None:
    threads(3)
    together = threading.Barrier(3, timeout=30)
    assert sorted(in_threads([together.wait] * 3)) == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_error_is_raised(count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    ended: list[int] = []

    def fails(error: Exception, seconds: float) -> None:
        time.sleep(seconds)
        ended.append(1)
        raise error

    late, soon = ValueError("the first one"), KeyError("the second one")
    with pytest.raises(ValueError, match="the first one"):
        in_threads([lambda: None, lambda: fails(late, 0.1), lambda: fails(soon, 0)])
    assert len(ended) == (1 if count == 1 else 2), "in turn nothing runs after an error"
    assert not [t for t in threading.enumerate() if t.name == "flexmod compiles"]


def test_ctrl_c_begins_no_further_job(threads: Callable[[int], None]) -> None:
    threads(2)
    began: list[int] = []

    def interrupted() -> None:
        time.sleep(0.1)
        raise KeyboardInterrupt

    def job() -> None:
        began.append(1)
        time.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        in_threads([interrupted, *[job] * 5])
    assert len(began) == 1
    assert not [t for t in threading.enumerate() if t.name == "flexmod compiles"]


def test_errors_of_a_background_job_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ValueError

    later(fails).join()
    assert capsys.readouterr().err == ""


def test_a_job_is_freed_before_the_job_that_it_returns_runs() -> None:
    class Tensors: ...

    started, alive = threading.Event(), list[object]()

    def job(tensors: Tensors) -> Callable[[], None]:
        seen = weakref.ref(tensors)

        def second() -> None:
            assert started.wait(30)
            alive.append(seen())

        return second

    thread = later(partial(job, Tensors()))
    started.set()
    thread.join()
    assert alive == [None]


def test_a_kernel_waits_for_its_launcher(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its load would build it a second time."""
    threads(4)
    built: list[object] = []
    monkeypatch.setattr(
        side_by_side, "build_launcher_of", lambda source: (time.sleep(0.1), built.append(source))
    )
    source = SimpleNamespace(make_ir=lambda: None)
    with beside() as launchers:
        private_triton._written_in_turn(source).make_ir()
    assert built == [source] and len(launchers) == 1
    with beside() as launchers:
        pass
    assert built == [source] and launchers == []


LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""
HEADER = Path(sysconfig.get_path("include"), "Python.h")
HAS_COMPILER = HEADER.exists() and any(map(shutil.which, ("gcc", "clang")))


@pytest.mark.skipif(not hasattr(build, "_load_module_from_path"), reason="Triton writes no launchers in C")
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a compiler of C, and the headers of Python")
def test_a_launcher_that_is_loaded_again_changes_no_other(tmp_path: Path) -> None:
    """All have one name. Once when it is built, and once when its kernel is loaded."""
    with private_triton.cache_folder(tmp_path):
        first, second, again = (
            build.compile_module_from_src(LAUNCHER.format(number=number), "__triton_launcher")
            for number in (1, 2, 1)
        )
    assert [module.launch() for module in (first, second, again)] == [1, 2, 1]


def test_where_no_thread_can_be_started(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran: list[int] = []
    later(lambda: ran.append(1))
    assert ran == []
    threads(4)
    assert in_threads([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_what_a_job_returns_waits_for_the_written_kernel(error: type[Exception] | None) -> None:
    """Or for the end, where nothing is compiled. It does not run after an error."""
    planned, began = threading.Event(), threading.Event()

    def job() -> Callable[[], None]:
        planned.set()
        return began.set

    with pytest.raises(error) if error else nullcontext(), beside(job):
        assert planned.wait(10)
        assert not began.wait(0.01)
        if error:
            raise error
    assert began.wait(0.05 if error else 10) is (error is None)


def test_threads_take_short_turns_while_one_compiles() -> None:
    """Blocks of several threads overlap; a child that is forked meanwhile is as Python starts."""
    before, collecting = sys.getswitchinterval(), gc.isenabled()
    entered, leave = threading.Event(), threading.Event()

    def seen() -> tuple[bool, bool]:
        return sys.getswitchinterval() == pytest.approx(side_by_side.TURN), gc.isenabled()

    def beside_it() -> None:
        with side_by_side.short_turns():
            entered.set()
            leave.wait(10)

    thread = later(beside_it)
    assert entered.wait(10)
    with side_by_side.short_turns(), side_by_side.short_turns():
        assert seen() == (True, False)
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                os._exit(sys.getswitchinterval() == before and gc.isenabled() is collecting)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert seen() == (True, False), "another thread is in such a block"
    leave.set()
    thread.join()
    assert (sys.getswitchinterval(), gc.isenabled()) == (before, collecting)


def test_a_job_does_not_begin_after_an_error() -> None:
    began: list[int] = []
    with pytest.raises(ZeroDivisionError), after_writing(lambda source: began.append(1)):
        1 / 0  # noqa: B018  raises
    with after_writing(lambda source: None):
        pass
    assert began == []


# stand-ins


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4), torch.zeros(8, 8, dtype=torch.bfloat16).T, torch.zeros(64)[1:],
        torch.zeros(64, dtype=torch.int8)[3:], torch.zeros(()), torch.zeros(0, 4),
        torch.zeros(5).expand(4, 5), torch.zeros(9, dtype=torch.float16)[1:].view(2, 4).T,
    ],
)  # fmt: skip
def test_a_stand_in_is_of_the_same_kind(tensor: Tensor) -> None:
    made = stand_in(tensor)
    assert made.device.type == "meta"
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert made.data_ptr() % 16 == tensor.data_ptr() % 16
    again = stand_in(made)
    assert again.data_ptr() % 16 == made.data_ptr() % 16


def test_a_stand_in_of_what_a_plan_makes() -> None:
    made = stand_in_of(Place("x", (Size("B"), 3), (Size("S"), 1), torch.float16), {"B": 2, "S": 8})
    assert (made.device.type, made.shape, made.stride(), made.dtype) == (
        "meta",
        (2, 3),
        (8, 1),
        torch.float16,
    )
    assert stand_in_of(Place("x", (2, 3), (), torch.int8), {}).stride() == (3, 1)


# a call as on an H200, whose launches compile and run nothing

CALL = """
import contextlib, hashlib, json, sys, threading
sys.path[:0] = [{root!r}, {tests!r}]
from unittest import mock
import torch, triton, stand_in_driver
from benchmarks.host_path import _compiled, on_an_h200
import flexmod
from flexmod import masks, mods
from flexmod.runtime import direct, launch, side_by_side
from flexmod.runtime.direct import COUNTER

kernels, compiled, launchers, launched, real = [], [], [], [], direct.compiled

def filled(arguments):
    counter = torch.zeros(1, dtype=torch.int32)
    return {{name: counter if value is COUNTER else value for name, value in arguments.items()}}

def verdict(made, kernel, device, arguments):
    kernels.append(real(getattr(made.module, kernel + "_kernel"), device, filled(arguments)))
    return launch.Verdict()

def listen(*, src, metadata, metadata_group, cache_hit, **_):
    text = open(next(path for name, path in metadata_group.items() if name.endswith(".cubin")), "rb").read()
    where = threading.current_thread()
    name = "main" if where is threading.main_thread() else where.name
    compiled.append((src.name, name, hashlib.sha256(text).hexdigest(), cache_hit))

def compile_only(function, grid, device, arguments):
    launched.append(function.__name__)
    function.warmup(grid=grid, **{{**direct.options_of(function), **filled(arguments)}})
    return _compiled()

stand_in_driver.install()
stand_in_driver.Driver.launcher_cls = staticmethod(lambda src, metadata: launchers.append(src.name))
triton.knobs.compilation.listener = listen
mask = flexmod.create_block_mask(masks.causal(), None, None, 256, 256, device="cpu")
with contextlib.ExitStack() as stack:
    threads = side_by_side.threads
    stack.enter_context(on_an_h200())
    for place, name, value in [
        (direct, "start", compile_only), (direct, "compiled", real), (side_by_side, "threads", threads),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()), (launch, "verdict", verdict),
    ]:
        stack.enter_context(mock.patch.object(place, name, value))
    made = lambda: torch.randn(1, 2, 256, 64, dtype=torch.float16, requires_grad=True)
    q, k, v = made(), made(), made()
    slopes = torch.rand(2, requires_grad=True)
    attend = lambda: flexmod.flex_attention(q, k, v, {score}, mask, kernel_options={options})
    {body}
    [thread.join() for thread in threading.enumerate() if thread.name == "flexmod compiles ahead"]
print(json.dumps([compiled, launchers, launched]))
"""
STEP = """
    out = attend()
    before = len(compiled)
    for thread in threading.enumerate():
        if thread.name == "flexmod compiles ahead":
            thread.join()
    {then}
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
"""
HOPPER = ["backward_kernel", "forward_kernel", "round_kernel", "statistics_kernel"]
PORTABLE = ["dkdv_kernel", "dq_kernel", "forward_kernel", "statistics_kernel"]


def python(
    folder: Path, body: str, threads: int = 4, score: str = "None", options: str = "None"
) -> list[Any]:
    """What was compiled, launchers in C, and launches. Each number of threads has its own cache."""
    environment = {
        **os.environ,
        config.CACHE_DIR: str(folder / "flexmod"),
        config.COMPILE_THREADS: str(threads),
        "TRITON_CACHE_DIR": str(folder / f"triton{threads}"),
        "OMP_NUM_THREADS": "1",
    }
    facts = {"root": str(ROOT), "tests": str(ROOT / "tests"), "score": score, "options": options}
    done = forked.python(CALL.format(body=body, **facts), env=environment)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("score", "options", "kernels", "longest"),
    [
        ("mods.softcap(30.0)", "None", HOPPER, "backward_kernel"),
        ("mods.alibi(slopes.detach())", "{'TEMPLATE': 'portable'}", PORTABLE, "dkdv_kernel"),
    ],
)
def test_a_backward_is_compiled_beside_its_forward(
    score: str, options: str, kernels: list[str], longest: str, tmp_path: Path
) -> None:
    """Its launches find every kernel, also in a second call; compiles in turn give the same code.

    The longest kernel comes from a second process.
    """
    ready = "assert len(compiled) == len({name for name, *_ in compiled}) == 4, compiled"
    body = f"{STEP.format(then=ready)}\n{STEP.format(then='')}"
    found, launchers, _ = python(tmp_path, body, score=score, options=options)
    assert sorted(name for name, *_ in found) == kernels, "each once"
    by_thread = {name: thread for name, thread, *_ in found}
    assert by_thread["forward_kernel"] == "main"
    assert [name for name, *_, was_found in found if was_found] == [longest]
    assert {by_thread[name] for name in kernels if name != "forward_kernel"} <= {
        "flexmod compiles", "flexmod compiles ahead"
    }  # fmt: skip
    assert sorted(launchers) == kernels
    in_turn, launchers, _ = python(tmp_path, STEP.format(then=""), 1, score=score, options=options)
    assert {thread for _, thread, *_ in in_turn} == {"main"} and launchers == []
    assert {name: code for name, _, code, _ in found} == {name: code for name, _, code, _ in in_turn}


@pytest.mark.long
def test_gradients_of_captured_tensors_are_known_beforehand(tmp_path: Path) -> None:
    body = STEP.format(then="").replace("(q, k, v), ", "(q, k, v, slopes), ")
    found, _, launched = python(tmp_path, body, score="mods.alibi(slopes)")
    assert {name for name, thread, *_ in found if thread == "main"} == {"forward_kernel"}
    assert sorted({*launched}) == sorted(name for name, *_ in found)


@pytest.mark.long
def test_no_backward_is_compiled_where_none_will_come(tmp_path: Path) -> None:
    body = """
    with torch.no_grad(): attend()
    given = q, k, v
    q, k, v = (x.detach() for x in given)
    attend()
    q, k, v = given
    mock.patch.object(flexmod.runtime.config, "debug_level", lambda: 1).start()
    attend()
"""
    found, *_ = python(tmp_path, body)
    assert {name for name, *_ in found} == {"forward_kernel"}


@pytest.mark.long
def test_a_fault_of_the_backward_is_raised_by_the_backward(tmp_path: Path) -> None:
    body = STEP.format(then="print('forward', file=sys.stderr)").replace(
        "out = attend()",
        "from flexmod.backends import families\n"
        "    fault = mock.patch.object(families.HopperFamily, 'backward', side_effect=ZeroDivisionError)\n"
        "    fault.start(); out = attend(); assert len(compiled) == 1",
    )
    with pytest.raises(AssertionError, match=r"^forward\n(.|\n)*ZeroDivisionError"):
        python(tmp_path, body)


@pytest.mark.long
def test_a_process_may_end_before_the_background_does(tmp_path: Path) -> None:
    """What it compiles is whole: the next process finds it."""
    assert len(python(tmp_path, "attend()")[0]) in range(1, 5)
    found, *_ = python(tmp_path, STEP.format(then=""))
    assert [hit for *_, hit in found] == [True] * 4


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_that_is_forked_meanwhile_compiles_by_itself(tmp_path: Path) -> None:
    body = """
    import os, signal, warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    out = attend()
    child = os.fork()
    if not child:
        signal.alarm(120)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
"""
    found, *_ = python(tmp_path, body)
    assert sorted(name for name, *_ in found) == HOPPER


@pytest.mark.long
def test_no_process_waits_after_a_forward_that_was_compiled_before(tmp_path: Path) -> None:
    body = """
    from flexmod.codegen import compiled_kernels
    started, start = [], compiled_kernels.start_second
    compiled_kernels.start_second = lambda: started.append(start())
    with torch.no_grad():
        attend()
    q, k, v = made(), made(), made()
    attend()
    assert started and not compiled_kernels.second_waits()
"""
    found, *_ = python(tmp_path, body)
    assert {name for name, *_ in found} == {"forward_kernel"}


@pytest.mark.long
def test_one_thread_at_a_time_writes_ir(tmp_path: Path) -> None:
    """The backward is planned at once. Its compile begins when the forward's IR is written."""
    body = """
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from flexmod.codegen import compiled_kernels
    import time
    compiled_kernels.start_second = lambda: None
    inside, most, begun, later = [], [], [], side_by_side.later
    def watched(make):
        def make_ir(*given):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.1)
            inside.pop()
            return make(*given)
        return make_ir
    for kind in (ASTSource, GluonASTSource):
        kind.make_ir = watched(kind.make_ir)
    def begin(job, *ready):
        begun.append((getattr(job, "func", job).__name__, len(most), len(compiled)))
        return later(job, *ready)
    side_by_side.later = begin
    attend()
    [thread.join() for thread in threading.enumerate() if thread.name == "flexmod compiles ahead"]
    assert most == [1] * 4, most
    launchers = [name for name, *_ in begun[2:]]
    assert begun[:3] == [("_start_compiler", 0, 0), ("compiler", 0, 0), ("build_launcher_of", 1, 0)], begun
    assert launchers == ["build_launcher_of"] * 4, begun  # of the forward's kernel, and the backward's
"""
    assert len(python(tmp_path, body)[0]) == 4


@pytest.mark.long
@pytest.mark.skipif(version("triton") > "3.6.9", reason="this version of Triton writes no launcher in C")
@pytest.mark.parametrize("options", long_but({"None"}, ["None", "{'TEMPLATE': 'portable'}"]))
def test_a_launcher_is_built_before_its_kernel_is_known(options: str, tmp_path: Path) -> None:
    """Its C text is what Triton writes for the compiled kernel."""
    body = """
    from types import SimpleNamespace
    from flexmod.runtime.private_triton import build_launcher
    from triton.backends.nvidia import driver
    texts = []
    def built(src, **_):
        texts.append(src)
        return SimpleNamespace(launch=None)
    driver.compile_module_from_src, driver.library_dirs = built, lambda: []
    stand_in_driver.Driver.launcher_cls = staticmethod(driver.CudaLauncher)
    with torch.no_grad(): attend()
    [thread.join() for thread in threading.enumerate() if thread.name == "flexmod compiles ahead"]
    assert len(texts) == len(kernels) == 1, (texts, kernels)
    build_launcher(*kernels)
    assert texts[0] == texts[1] and "PyObject" in texts[0]
"""
    python(tmp_path, body, options=options)


@pytest.mark.parametrize("grad", long_but({False}, [False, True]))
def test_threads_that_want_the_same_kernel_compile_it_once(grad: bool, tmp_path: Path) -> None:
    """That of a forward; with gradients those of a backward too."""
    body = f"""
    from triton.compiler import compiler
    from triton.experimental.gluon import _runtime
    import time
    make = _runtime.GluonASTSource.make_ir
    _runtime.GluonASTSource.make_ir = lambda *given: (time.sleep(0.5), make(*given))[1]
    def call():
        with torch.set_grad_enabled({grad}): attend()
    work = [threading.Thread(target=call) for _ in range(4)]
    [thread.start() for thread in work]
    [thread.join() for thread in work]
"""
    found, *_ = python(tmp_path, body)
    assert sorted(name for name, *_ in found) == (HOPPER if grad else ["forward_kernel"])


BUILD = """
    from benchmarks.host_path import H200
    from flexmod.block_mask import generated
    from flexmod.block_mask.parts import trace_mask
    from flexmod.block_mask.tiles import MaskLayout
    ids = torch.arange(256, dtype=torch.int32) // 50
    traced = trace_mask({mask}, torch.device("cpu"))
    with mock.patch.object(generated, "target_of", lambda device: H200):
        generated.build(traced, MaskLayout((1, 1, 256, 256), (128, 128), torch.device("cpu"), True))
"""


@pytest.mark.parametrize(
    ("mask", "kernels"),
    [
        pytest.param("masks.causal()", ["elements", "runs", "squares"], marks=pytest.mark.every),
        pytest.param(
            "masks.document(ids, causal=True)", ["elements", "order", "runs", "squares", "terms"],
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_kernels_that_build_a_mask(mask: str, kernels: list[str], tmp_path: Path) -> None:
    """Before the first is launched; their launches find them all."""
    found, launchers, launched = python(tmp_path, BUILD.format(mask=mask))
    names = [f"{name}_kernel" for name in kernels]
    assert sorted(name for name, *_ in found) == sorted(launchers) == names
    assert {*launched} == {*names} and len({thread for _, thread, *_ in found}) > 1
    in_turn, launchers, _ = python(tmp_path, BUILD.format(mask=mask), 1)
    assert launchers == [] and {thread for _, thread, *_ in in_turn} == {"main"}
    assert {name: code for name, _, code, _ in found} == {name: code for name, _, code, _ in in_turn}
