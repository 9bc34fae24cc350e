"""What all tests share: the device, the gpu marker, a kernel cache of their own, nothing known of calls."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: the threads of all workers would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import forked
import torch
from _pytest.runner import runtestprotocol
from tiers import mark_long, refuse_alone

from flexmod.calls import prepared
from flexmod.runtime import config as switches

hypothesis.settings.register_profile("flexmod", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flexmod")

CACHE_FOLDER = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden afresh, do not compare")


def pytest_configure(config: pytest.Config) -> None:
    if "FLEXMOD_CACHE_DIR" not in os.environ:
        config.stash[CACHE_FOLDER] = folder = tempfile.mkdtemp(prefix="flexmod-tests-")
        # Hypothesis would parse every generated module for its numbers, but none below a folder of this name
        os.environ["FLEXMOD_CACHE_DIR"] = str(Path(folder, "tests"))


def pytest_unconfigure(config: pytest.Config) -> None:
    forked.end()
    folder = config.stash.get(CACHE_FOLDER, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Before `-m` chooses: which tests run here, and which cases are long. After it: may workers run them?

    4,000 skipped tests would each be set up and reported to xdist.
    """
    if not torch.cuda.is_available():
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    mark_long(items)
    yield
    refuse_alone(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker reports no setup and no teardown that went well: a third of what a small test costs.

    Unless their times are asked for.
    """
    option = item.config.option
    if "PYTEST_XDIST_WORKER" not in os.environ or option.xmlpath or option.durations is not None:
        return None
    facts = {"nodeid": item.nodeid, "location": item.location}
    item.ihook.pytest_runtest_logstart(**facts)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(**facts)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("Tests marked gpu need a CUDA device: deselected.")


def pytest_collectstart() -> None:
    gc.disable()  # what collection makes stays


def pytest_collection_finish() -> None:
    """The modules and 20,000 test items stay to the end: no garbage collection looks at them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture
def device() -> torch.device:
    """Where a test runs: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """No test meets a call that another has made known: one that watches what runs would see it played."""
    prepared.forget()


@pytest.fixture
def switch() -> Iterator[Callable[[str, object], None]]:
    """`switch(config.DEBUG, 1)` sets a switch of flexmod's for this process and its children.

    All are forgotten when the environment is as before: a thread that compiles may read them at any time.
    """
    with pytest.MonkeyPatch.context() as patch:

        def set_to(name: str, value: object) -> None:
            patch.setenv(name, str(value))
            switches.config.cache_clear()

        yield set_to
    switches.config.cache_clear()


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compare` and `bench` run what they time once, not up to 50 times."""

    def milliseconds(call: Callable[[], object], device: torch.device) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    monkeypatch.setattr("flexmod.tools.comparison.median_ms", milliseconds)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(text, name)` holds a text to the file of that name in tests/golden."""

    def check(text: str, name: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; if the new text is right: pytest --update-golden"

    return check
