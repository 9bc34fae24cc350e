"""Private names of torch and Triton stand in runtime/private_torch.py and private_triton.py alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_rooms import MODULES

# Packages whose parts count as private although no underscore says so: their documentation has none of them.
UNDOCUMENTED = ("triton.backends", "triton.compiler", "triton.knobs", "triton.runtime")
PACKAGES = ("torch", "triton")
# Of Python's own: named tuples and frames.
PYTHONS = {"_replace", "_fields", "_asdict", "_getframe"}

MOVED = {"runtime.private_torch", "runtime.private_triton"}
INTERPRETER = {
    # They load Triton's interpreter a second time and replace its methods: private names are what they are
    # about, and apart from them none of these lines would be left.
    "runtime.interpreter",
    "runtime.interpreter_corrections",
    "runtime.quick_interpreter",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@cache
def own_names() -> set[str]:
    """Private names that flexmod gives to its own functions, classes, attributes and slots."""
    found = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                # other objects may be torch's
                if ast.unparse(node.value) == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return {name for name in found if is_private(name)}


def private_names(text: str, own: set[str]) -> Iterator[str]:
    """`line: name` of each private name that is neither Python's nor one of `own`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in own | PYTHONS:
                yield f"{node.lineno}: {ast.unparse(node)}"
            names = [ast.unparse(node)] if node.attr in ("knobs", "backends", "compiler", "runtime") else []
            names = [name for name in names if name.startswith("triton.")]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "attrgetter")
            and any(isinstance(a, ast.Constant) and is_private(str(a.value)) for a in node.args)
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"
            names = []
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] not in PACKAGES:
                continue
            if any(map(is_private, parts)) or any(f"{name}.".startswith(f"{p}.") for p in UNDOCUMENTED):
                yield f"{node.lineno}: {name}"


def found_in(module: str) -> list[str]:
    return [*private_names(MODULES[module].read_text(), own_names())]


@pytest.mark.parametrize("module", sorted({*MODULES} - MOVED - INTERPRETER))
def test_no_private_name(module: str) -> None:
    found = found_in(module)
    assert not found, f"{MODULES[module]}: give these names in a file for private names: {'; '.join(found)}"


@pytest.mark.parametrize("module", sorted(MOVED | INTERPRETER))
def test_an_exception_is_still_one(module: str) -> None:
    """Whoever moves the last private name of a file takes the file off the list."""
    assert found_in(module), f"{module} has no private name any more: take it off the list"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch._C", "torch._C"),
        ("from torch._dynamo import symbolic_convert", "torch._dynamo.symbolic_convert"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("def f(x):\n    from triton._C.libtriton import ir", "triton._C.libtriton.ir"),
        ("from triton.runtime.errors import OutOfResources", "triton.runtime.errors.OutOfResources"),
        ("from triton import knobs", "triton.knobs"),
        ("torch._C._get_tracing_state()", "torch._C._get_tracing_state"),
        ("triton.knobs.cache.dir", "triton.knobs"),
        ("tensor._version", "tensor._version"),
        ("function._dynamo_marked_constant = True", "function._dynamo_marked_constant"),
        ("getattr(tensor, '_version')", "getattr(tensor, '_version')"),
    ],
)
def test_a_planted_name_is_found(line: str, name: str, tmp_path: Path) -> None:
    assert name in [entry.partition(": ")[2] for entry in private_names(line, own_names())]


@pytest.mark.parametrize(
    "line",
    [
        "import torch.nn.functional",
        "from triton.testing import do_bench",
        "from torch.utils.weak import WeakIdKeyDictionary",
        "self._storage",
        "row._replace(a=1)",
        "sys._getframe(1)",
        "x.__dict__",
        "getattr(x, '__name__', '')",
    ],
)
def test_public_names_pass(line: str) -> None:
    assert not [*private_names(line, own_names())]
