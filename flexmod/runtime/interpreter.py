"""Runs the kernels of a generated module in Triton's interpreter, on CPU tensors, in an ordinary process.

    kernels = interpreted(module)
    kernels.forward[grid](q, k, v, ..., BLOCK_M=64, num_warps=4)

It executes the module's source a second time, against a private instance of Triton's language
(`interpreter_language`), with jit functions rewritten for plain Python. The module itself does not change,
and can be compiled at any time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

from flexmod.errors import BackendDeviceError
from flexmod.runtime.interpreter_language import Language, language
from flexmod.runtime.locks import Lock

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
        if not kind:
            kind = _number_type(value)
        tl, interpreter = self._language.tl, self._language.interpreter
        dtype = getattr(tl, kind)
        with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, as on the chip
            data = np.array([value]).astype(interpreter._get_np_dtype(dtype))
        return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


def _number_type(value: bool | int | float) -> str:
    """Returns the name of the type of a Python number in a launch."""
    if isinstance(value, bool):
        return "int1"
    if isinstance(value, float):
        return "float32"
    if -(2**31) <= value < 2**31:
        return "int32"
    return "int64" if value < 2**63 else "uint64"


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
