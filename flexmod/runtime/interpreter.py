"""Runs the kernels of a generated module in Triton's interpreter, on CPU tensors, in an ordinary process.

    kernels = interpreted(module)
    kernels.forward[grid](q, k, v, ..., BLOCK_M=64, num_warps=4)

It executes the module's source a second time, against a private instance of Triton's language, with jit
functions rewritten for plain Python. The module itself does not change, and can be compiled at any time.

Triton decides at import, by TRITON_INTERPRET, whether `tl.max`, `tl.zeros`, `tl.cdiv` and the rest of its
standard functions are compiled or interpreted, and its interpreter patches `triton.language` in place while a
kernel runs. An ordinary process imports the compiled kind and must keep it. So `language` loads
`triton.language` and `triton.runtime.interpreter` a second time, under their own names but outside
`sys.modules`, and patches these copies once. The originals never change, so one thread may compile while
another interprets. `Copies.import_module` is `__import__` in the copies' builtins.
`interpreter_corrections.py` corrects the copies, and `quick_interpreter.py` makes them quicker.

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
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

from flexmod.errors import BackendDeviceError, InterpreterOperationError
from flexmod.runtime.interpreter_corrections import correct
from flexmod.runtime.locks import Lock, parse
from flexmod.runtime.quick_interpreter import quicken

# Arguments of a launch that are not parameters of the kernel
LAUNCH_OPTIONS = frozenset(
    ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
    + ("matrix_instr_nonkdim", "waves_per_eu", "kpack")
)

Grid = tuple[int, ...]

# The interpreter stores the position in the grid in one object: one launch at a time.
_one_launch = Lock()
_memo_lock = Lock()


class Kernel:
    """One kernel; `kernel[grid](*args, **options)` runs its programs one after another.

    Arguments have the types of a GPU launch: tensors are pointers to their memory, Python floats are float32,
    integers are int32, or int64 if they do not fit. An annotation other than constexpr sets another type.
    LAUNCH_OPTIONS have no effect. One launch runs at a time; others wait.
    """

    def __init__(self, function: Callable[..., None], language: Language) -> None:
        self._function = function
        self._language = language
        self._signature = inspect.signature(function)
        self._types = {name: _annotated(p.annotation) for name, p in self._signature.parameters.items()}
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<interpreted kernel {self.__name__}>"

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._run, grid)

    def _run(self, grid: Grid, /, *args: Any, **options: Any) -> None:
        names = self._signature.parameters
        options = {key: value for key, value in options.items() if key in names or key not in LAUNCH_OPTIONS}
        bound = self._signature.bind(*args, **options)
        bound.apply_defaults()
        values = {name: self._argument(value, self._types[name]) for name, value in bound.arguments.items()}
        extents = (*grid, 1, 1)[:3]
        builder = self._language.interpreter.interpreter_builder
        # a chip does not warn about an overflow or a NaN either
        with _one_launch, np.errstate(all="ignore"):
            builder.set_grid_dim(*extents)
            for place in product(*map(range, extents)):
                builder.set_grid_idx(*place)
                self._function(**values)

    def _argument(self, value: Any, kind: str) -> Any:
        """Converts a value to the form that the kernel's body expects."""
        if isinstance(value, triton.language.constexpr):
            value = value.value
        if isinstance(value, triton.language.dtype):
            return self._language.tl.dtype(value.name)
        if kind == "constexpr" or value is None:
            return value
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise BackendDeviceError(backend="INTERPRET", wanted="cpu", device=value.device)
        if isinstance(value, (bool, int, float)):
            return self._number(value, kind)
        return self._language.interpreter._implicit_cvt(value)

    def _number(self, value: bool | int | float, kind: str) -> Any:
        tl, interpreter = self._language.tl, self._language.interpreter
        mangle = interpreter.triton.runtime.jit.mangle_type
        dtype = getattr(tl, kind) if kind else tl.str_to_ty(mangle(value), None)
        with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, as on the chip
            data = np.array([value]).astype(interpreter._get_np_dtype(dtype))
        return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


def _annotated(annotation: Any) -> str:
    """Returns the type in a parameter's annotation: "constexpr", the name of a dtype, or ""."""
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.rpartition(".")[2]


def _is_kernel(value: Any) -> bool:
    return callable(value) and getattr(value, "fn", None) is value


def interpreted(module: ModuleType) -> SimpleNamespace:
    """Returns a copy of the module whose kernels are `Kernel`s; caches it per module object.

    Args:
        module: a Python module with `@triton.jit` functions whose source can be read (`inspect.getsource`).
    """
    with _memo_lock:
        twin = module.__dict__.get("__flexmod_interpreted__")
        if twin is None:
            private = language()
            file = module.__file__ or module.__name__
            scope = private.execute(inspect.getsource(module), file, module.__name__)
            kernels = {name: Kernel(value, private) for name, value in scope.items() if _is_kernel(value)}
            twin = module.__dict__["__flexmod_interpreted__"] = SimpleNamespace(**{**scope, **kernels})
        return twin


TO_TENSOR = "__flexmod_to_tensor__"
TRUTH = "__flexmod_truth__"


def compile_for_interpreter(text: str, file: str) -> CodeType:
    """Compiles the whole module to Python code, with rewritten jit functions.

    Args:
        text: the module's source.
        file: the path that tracebacks name.
    """
    tree: Any = parse(text, file)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "jit" in map(_called, node.decorator_list):
            node.body = [_Statements().visit(statement) for statement in node.body]
    return compile(tree, file, "exec", dont_inherit=True)


def _called(node: ast.expr) -> str:
    """Returns the last name of a function, or of what is called."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _Statements(ast.NodeTransformer):
    """Rewrites the statements of one function."""

    def visit_Name(self, node: ast.expr) -> ast.expr:
        return node

    visit_Constant = visit_Name

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
        assert original.__spec__ is not None
        module = importlib.util.module_from_spec(original.__spec__)
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
        if type(value) is self.tl.tensor:
            return value
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
