"""Loads a second, private instance of Triton's language, which interprets instead of compiling.

Triton decides at import, by TRITON_INTERPRET, whether `tl.max`, `tl.zeros`, `tl.cdiv` and the rest of its
standard functions are compiled or interpreted, and its interpreter patches `triton.language` in place while a
kernel runs. An ordinary process imports the compiled kind and must keep it. So this module loads
`triton.language` and `triton.runtime.interpreter` a second time, under their own names but outside
`sys.modules`, and patches these copies once. The originals never change, so one thread may compile while
another interprets.

`Copies.import_module` is `__import__` in the copies' builtins. `interpreter_corrections` corrects the copies.

The source of `@triton.jit` functions is rewritten, so that plain Python runs it like Triton's compiler. The
compiler turns each assigned number and each run-time loop variable into a tensor. It applies `and`, `or`,
`not` and `if` to a block element by element, or raises. Python makes no tensors, and any block is true. The
rewritten source calls functions that make the tensors, and raises where it would test a block's truth. File
and line numbers do not change, so that tracebacks and debuggers show text that the user can open.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from flexmod.errors import InterpreterOperationError
from flexmod.runtime.interpreter_corrections import correct, quicken
from flexmod.runtime.locks import Lock, parse

TO_TENSOR = "__flexmod_to_tensor__"
TRUTH = "__flexmod_truth__"


def compile_for_interpreter(text: str, file: str) -> CodeType:
    """Compiles the whole module to Python code, with rewritten jit functions.

    Args:
        text: the module's source.
        file: the path that tracebacks name.
    """
    tree = _Functions().visit(parse(text, file))
    return compile(tree, file, "exec", dont_inherit=True)


def _called(node: ast.expr) -> str:
    """Returns the last name of a function, or of what is called."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _Functions(ast.NodeTransformer):
    """Finds the functions to rewrite."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if "jit" in map(_called, node.decorator_list):
            node.body = [_Statements().visit(statement) for statement in node.body]
        return node


class _Statements(ast.NodeTransformer):
    """Rewrites the statements of one function."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _call(TO_TENSOR, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and "constexpr" not in ast.unparse(node.annotation):
            node.value = _call(TO_TENSOR, node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and _called(node.iter) == "range":
            name = node.target.id
            given = ast.copy_location(ast.Name(name, ast.Load()), node.target)
            convert = ast.Assign([node.target], _call(TO_TENSOR, given))
            node.body.insert(0, ast.copy_location(convert, node.target))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        self.generic_visit(node)
        node.values = [_call(TRUTH, value) for value in node.values]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.UnaryOp:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _call(TRUTH, node.operand)
        return node

    def _visit_test(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = _call(TRUTH, node.test)
        return node

    visit_If = visit_IfExp = visit_While = _visit_test


def _call(function: str, value: ast.expr) -> ast.expr:
    name = ast.copy_location(ast.Name(function, ast.Load()), value)
    return ast.copy_location(ast.Call(name, [value], []), value)


_LANGUAGE = "triton.language"
_INTERPRETER = "triton.runtime.interpreter"
_EXTRA = "triton.language.extra"


def _jit(fn: Callable[..., Any] | None = None, **options: object) -> Any:
    """Replaces `triton.jit`: returns the function itself, with the attribute `fn` for Triton's reductions."""
    if fn is None:
        return _jit
    fn.fn = fn  # type: ignore[attr-defined]
    return fn


def _overlay(original: ModuleType, **changed: object) -> ModuleType:
    """Returns a module with a few replaced attributes."""
    made = ModuleType(original.__name__, original.__doc__)
    vars(made).update(changed, __getattr__=partial(getattr, original))
    return made


class _CompiledOnly(ModuleType):
    """Stands for `triton.language.extra` and its contents: imports succeed, calls raise."""

    def __getattr__(self, name: str) -> _CompiledOnly:
        if name.startswith("__"):
            raise AttributeError(name)
        return _CompiledOnly(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise InterpreterOperationError(operation=self.__name__)


class Copies:
    """The private modules, by name; loads them on demand."""

    def __init__(self) -> None:
        import triton.runtime.jit as jit

        self._modules: dict[str, ModuleType] = {
            "triton": _overlay(importlib.import_module("triton"), jit=_jit),
            "triton.runtime.jit": _overlay(jit, jit=_jit, constexpr_function=lambda fn: fn),
        }
        self.builtins = {**vars(builtins), "__import__": self.import_module}

    def import_module(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Serves as `__import__` for code of the copies and for generated modules."""
        package = globals["__package__"] if globals and level else None
        absolute = importlib.util.resolve_name("." * level + name, package)
        if absolute.partition(".")[0] != "triton":
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = self.get(absolute)
        for attribute in fromlist or ():
            if attribute != "*" and not hasattr(module, attribute):
                self.get(f"{absolute}.{attribute}")
        return module if fromlist else self._modules["triton"]

    def get(self, name: str) -> ModuleType:
        if name in self._modules:
            return self._modules[name]
        if name == _EXTRA or name.startswith(_EXTRA + "."):
            return self._keep(name, _CompiledOnly(name))
        if name in (_INTERPRETER, _LANGUAGE) or name.startswith(_LANGUAGE + "."):
            return self._load(name)
        return importlib.import_module(name)

    def _keep(self, name: str, module: ModuleType) -> ModuleType:
        self._modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent in self._modules:
            setattr(self._modules[parent], last, module)
        return module

    def _load(self, name: str) -> ModuleType:
        original = importlib.import_module(name)
        assert original.__file__ is not None
        module = ModuleType(name)
        module.__file__ = original.__file__
        module.__package__ = original.__package__
        module.__dict__["__builtins__"] = self.builtins
        self._keep(name, module)
        exec(_code(original), module.__dict__)
        return module


def _code(original: ModuleType) -> CodeType:
    spec = original.__spec__
    assert spec is not None and spec.loader is not None
    text = spec.loader.get_source(original.__name__)  # type: ignore[attr-defined]
    if "@jit" in text:
        return compile_for_interpreter(text, original.__file__ or original.__name__)
    return spec.loader.get_code(original.__name__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Language:
    """The private instance: its modules, of which `tl` and `interpreter` are two."""

    copies: Copies
    tl: Any
    interpreter: Any

    def to_tensor(self, value: Any) -> Any:
        """Converts an assigned value like the compiler: numbers become tensors, also inside tuples."""
        if isinstance(value, tuple):
            return tuple(map(self.to_tensor, value))
        return self.interpreter.interpreter_semantic.to_tensor(value, False)

    def truth(self, value: Any) -> Any:
        """Returns the value if Python may test its truth; raises for a block."""
        if isinstance(value, self.tl.tensor) and value.handle.data.size != 1:
            shape = [int(n) for n in value.shape]
            raise InterpreterOperationError(operation=f"`if`, `and`, `or`, `not` of a block of shape {shape}")
        return value

    @property
    def helpers(self) -> dict[str, Any]:
        """Returns the functions that rewritten source calls, by name."""
        return {TO_TENSOR: self.to_tensor, TRUTH: self.truth}

    def execute(self, text: str, file: str, name: str) -> dict[str, Any]:
        """Runs a module's source with this language; its jit functions become plain functions."""
        scope = {"__name__": name, "__file__": file, "__builtins__": self.copies.builtins, **self.helpers}
        exec(compile_for_interpreter(text, file), scope)
        return scope


_lock = Lock()


def language() -> Language:
    """Returns this process's private instance; the first call loads it in some tens of milliseconds."""
    with _lock:
        return _load_language()


@cache
def _load_language() -> Language:
    copies = Copies()
    tl: Any = copies.get(_LANGUAGE)
    interpreter: Any = copies.get(_INTERPRETER)
    loaded = Language(copies, tl, interpreter)
    for module in (tl.core, tl.standard, tl.random):
        vars(module).update(loaded.helpers)
    quicken(interpreter, tl)
    # Triton patches the language modules that it finds among a function's globals
    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    correct(interpreter, tl)
    # Triton computes in int64 whether each sum overflows, and drops the answer unless kernels are debugged.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    return loaded
