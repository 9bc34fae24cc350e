"""Nothing in the package executes text, unpickles or starts a program but where docs/security.md says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flexmod"
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
METHODS = {"exec_module", "load_module", "run_path", "run_module", "system", "popen", "from_string"}
MODULES = {"pickle", "marshal", "shelve", "dill", "ctypes", "subprocess", "runpy", "code", "imp", "yaml"}
LOADERS = {
    ("torch", "load"),
    ("torch", "save"),
    ("numpy", "load"),
    ("np", "load"),
    ("builtins", "__import__"),
}

EXPECTED = {
    ("codegen/cache.py", "compile"), ("codegen/cache.py", "exec"),
    ("runtime/interpreter.py", "compile"), ("runtime/interpreter.py", "exec"),
    ("runtime/interpreter.py", "builtins.__import__"),
    ("runtime/offline.py", "subprocess"),
    ("codegen/compiled_kernels.py", "subprocess"), ("codegen/compiled_kernels.py", "pickle"),
    ("tools/mod_names.py", "exec_module"),
    ("errors/mods.py", "pickle"),
}  # fmt: skip


def found(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id
        elif isinstance(node, ast.Attribute):
            if node.attr in METHODS:
                yield node.attr
            elif isinstance(node.value, ast.Name) and (node.value.id, node.attr) in LOADERS:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""


def test_what_executes_is_what_is_stated() -> None:
    seen = {
        (str(file.relative_to(PACKAGE)), what)
        for file in PACKAGE.rglob("*.py")
        for what in found(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert seen == EXPECTED


def test_the_page_names_each_place() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    for file, _ in EXPECTED:
        assert f"`{file}`" in page
