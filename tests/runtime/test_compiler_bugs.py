"""Each workaround of a compiler's bug stands in one table, with what ends it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
from test_rooms import MODULES, ROOT, longest_module

from flexmod.runtime.compiler_bugs import BUGS, NO_TRACKER, CompilerBug

ISSUE = re.compile(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+")
# A compiler with a version, as whoever writes about a bug of it does.
VERSION = re.compile(r"\b(ptxas of|Triton|triton|CUDA|cuda|TorchDynamo of|torch|LLVM) (CUDA )?\d+\.\d+\b")
# They name versions for what these call otherwise, or tell a user which one to install.
OTHERS = {"runtime.private_triton", "runtime.gluon", "runtime.direct", "errors.kernels"}


def place(name: str) -> tuple[str, object]:
    """The module that a workaround stands in, and the workaround."""
    parts = name.split(".")
    module = longest_module(parts, MODULES)
    found: object = importlib.import_module(f"flexmod.{module}")
    for part in parts[len(module.split(".")) :]:
        found = inspect.getattr_static(found, part)
    return module, found


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what[:30])
def test_a_row_is_whole(bug: CompilerBug) -> None:
    assert all(bug)
    assert re.search(r"\d+\.\d+", bug.since)
    assert re.search(r"\d+\.\d+|^none: |^not known: ", bug.until)
    assert ISSUE.fullmatch(bug.issue) or bug.issue in (NO_TRACKER, "not reported")
    for name in bug.workarounds:
        module, found = place(name)
        assert module != "__init__" and (callable(found) or isinstance(found, property))


def test_workarounds_elsewhere_refer_to_the_table() -> None:
    modules = {place(name)[0] for bug in BUGS for name in bug.workarounds}
    for module in modules - {"runtime.compiler_bugs", "runtime.interpreter_corrections"}:
        assert "compiler_bugs" in MODULES[module].read_text(), module


def test_no_other_file_writes_of_a_version_of_a_compiler() -> None:
    known = {place(name)[0] for bug in BUGS for name in bug.workarounds} | OTHERS
    files = [path for name, path in MODULES.items() if name not in known]
    files += [*(ROOT / "templates").rglob("*.jinja")]
    found = [f"{path}: {hit[0]}" for path in files for hit in VERSION.finditer(Path(path).read_text())]
    assert not found, f"a bug belongs into flexmod/runtime/compiler_bugs.py: {'; '.join(found)}"
