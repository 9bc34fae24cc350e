"""The functions of a module in Triton, run as the interpreter runs them, with the types that a chip has.

The rest of a module is Gluon, with plain numbers and tiles of float64: converted where one calls the other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from flexmod.runtime.interpreter import Kernel, language
from flexmod.runtime.interpreter_corrections import narrow, widen
from plain_gluon.memory import Pointer
from plain_gluon.order import SOURCE
from plain_gluon.tiles import plain, tile

TRITON = language()
tl = TRITON.tl


class Whole(int):
    """An integer or a truth value, with the type it had."""

    kind: Any


class Real(float):
    """A float, with the type it had."""

    kind: Any


class Language:
    """`tl` with the texts for a chip that a mod may have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    def inline_asm_elementwise(self, text: str, _: str, given: Sequence[Any], *__: Any, **___: Any) -> Any:
        assert given[0].type.scalar == tl.float32, "the assembler takes the register of another type as it is"
        x = given[0].handle.data
        if "tanh.approx" in text:
            found = np.tanh(x)
        elif text.startswith("rcp.approx"):
            found = 1 / x
        elif text.startswith("lg2.approx"):
            found = np.log2(x)
        else:
            assert "ex2.approx" in text, text  # the logistic
            found = 1 / (1 + np.exp2(x))
        return tl.tensor(_handle(found, tl.float32), given[0].type)


def split(source: str) -> tuple[str, str]:
    """The module's Triton, and its Gluon without what it imports. Lines stay where they are."""
    lines = source.splitlines(keepends=True)
    triton, gluon = ["\n"] * len(lines), ["\n"] * len(lines)
    for node in ast.parse(source).body:
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
        own = slice(first - 1, node.end_lineno)
        text = "".join(lines[own])
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        if isinstance(node, ast.Assign) or (text.startswith(("@triton", "import triton"))):
            triton[own] = [line.replace("gl.constexpr", "tl.constexpr") for line in lines[own]]
        if not imports and not text.startswith("@triton"):
            gluon[own] = lines[own]
    return "".join(triton), "".join(gluon)


@lru_cache(16)
def functions_of(triton: str) -> dict[str, Callable[..., Any]]:
    """The functions of a module's Triton, by name."""
    scope = TRITON.execute(triton, SOURCE, "module")
    scope["tl"] = Language()
    return {name: x for name, x in scope.items() if getattr(x, "fn", None) is x}


def kernel(function: Callable[..., Any]) -> Kernel:
    return Kernel(function, TRITON)


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Gluon calls it."""
    return lambda *given: _outward(function(*map(_inward, given)))


def _inward(x: Any) -> Any:
    if isinstance(x, Pointer):
        return TRITON.interpreter._implicit_cvt(x.tensor)
    if not isinstance(x, (bool, int, float, np.generic, np.ndarray)):
        return x
    kind = getattr(x, "kind", None) or _kind(np.asarray(x))
    data = np.asarray(plain(x)) if np.ndim(x) else np.array([x])
    held = _handle(data, kind)
    return tl.tensor(held, tl.block_type(kind, list(data.shape)) if np.ndim(x) else kind)


def _kind(x: np.ndarray) -> Any:
    if x.dtype == bool:
        return tl.int1
    if x.dtype.kind == "f":
        return tl.float32
    return tl.int32 if x.size == 0 or -(2**31) <= x.min() <= x.max() < 2**31 else tl.int64


def _handle(data: np.ndarray, kind: Any) -> Any:
    numbers = narrow(data) if kind == tl.bfloat16 else data.astype(TRITON.interpreter._get_np_dtype(kind))
    return TRITON.interpreter.TensorHandle(numbers, kind)


def _outward(x: Any) -> Any:
    if isinstance(x, (tuple, tl.tuple)):
        return tuple(map(_outward, x))
    if not isinstance(x, tl.tensor):
        return x
    kind, data = x.type.scalar, x.handle.data
    data = widen(data) if kind == tl.bfloat16 else data
    if not x.type.is_block():
        made: Any = Real(data.item()) if data.dtype.kind == "f" else Whole(data.item())
    else:
        whole = {"b": bool, "f": np.float64}.get(data.dtype.kind, np.int64)
        made = tile(data.astype(whole))
    made.kind = kind
    return made
