"""The files of device functions are ordinary modules, and what a generated module takes of them is whole."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from pathlib import Path

import pytest

from device_functions.applied import text_of
from flexmod.codegen import cache, device_functions
from flexmod.runtime import offline

ROOT = Path(__file__).parents[2]
FILES = sorted(path.stem for path in device_functions.FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_a_module(file: str) -> None:
    """Its functions are Triton's objects, of which each says its text."""
    module = importlib.import_module(f"flexmod.codegen.device_functions.{file}")
    for name, text in device_functions.functions(file).items():
        function = getattr(module, name)
        assert function.fn.__name__ == name
        assert text.endswith(function.src.strip("\n"))
        assert text.startswith(("@triton.jit", "@gluon.jit"))


@pytest.mark.parametrize("file", FILES)
def test_a_function_reads_what_its_file_has(file: str) -> None:
    """The names that it takes from outside are its file's, so that it can be used where it stands."""
    module = importlib.import_module(f"flexmod.codegen.device_functions.{file}")
    for function in ast.parse(device_functions.module_text(file)).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        own = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        own |= {argument.arg for argument in function.args.args}
        used = {node.id for node in nodes} - own - set(dir(builtins))
        assert [name for name in sorted(used) if not hasattr(module, name)] == []


def test_every_function_is_used() -> None:
    """By a template, by the table of operations, or by another of its file."""
    places = [*(ROOT / "templates").glob("*.jinja"), *(ROOT / "flexmod/codegen").glob("*.py")]
    places.append(ROOT / "flexmod/ir/ops.py")
    texts = "\n".join(path.read_text() for path in places)
    unused = []
    for file in FILES:
        known = {} if file == "runs" else device_functions.functions(file)
        for name in known:
            others = "\n".join(text for other, text in known.items() if other != name)
            if not re.search(rf"\b{name}\b", texts) and not re.search(rf"\b{name}\(", others):
                unused.append(f"{file}.{name}")
    assert unused == []


def test_names_of_special_forms_are_those_of_plain_ones() -> None:
    for file in FILES:
        if file.endswith("_arithmetic"):
            assert set(device_functions.functions(file)) <= device_functions.names(), file


IMPORTED = """
import triton
import triton.language as tl

from flexmod.codegen.device_functions.{file} import {name}


@triton.jit
def run(OUT, X, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(OUT + place, {name}(tl.load(X + place)))
"""


@pytest.mark.parametrize(
    ("file", "name", "instruction"),
    [
        ("arithmetic", "tanh_relative", "ex2.approx"),
        ("float32_arithmetic", "tanh", "ex2.approx"),
        ("chip_arithmetic", "tanh_approximate", "tanh.approx"),
        ("chip_arithmetic", "logistic", "rcp.approx"),
        ("attention", "exponential", "ex2.approx"),
    ],
)
def test_an_imported_function_compiles_as_its_text_does(file: str, name: str, instruction: str) -> None:
    text = IMPORTED.format(file=file, name=name)
    body = text[text.index("\n\n@triton") :]
    found = []
    for source in (text, text_of(file) + body):
        kernel = cache.load(source, "imported").run
        report = offline.compile(kernel, {"OUT": "*fp32", "X": "*fp32"}, {"BLOCK": 256}, "sm_90")
        found.append(instructions(report.asm["ptx"]))
    assert any(line.startswith(instruction) for line in found[0])
    assert found[0] == found[1]


def instructions(ptx: str) -> list[str]:
    """The lines of a kernel's body, without what a debugger needs."""
    body = ptx[ptx.index(".entry") : ptx.index("\n}")].splitlines()
    lines = [line.partition("//")[0].strip() for line in body]
    return [line for line in lines if line and not line.startswith(("$L__tmp", "$L__func", ".loc"))]
