"""Where a mod comes from: the user's line, the names of what it captures, how many arguments it takes."""

from __future__ import annotations

import functools
import inspect
import keyword
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flexmod import errors
from flexmod.errors import Where

MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
EXAMPLES = {
    "mask": "def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx",
    "score": "def score_mod(score, b, h, q_idx, kv_idx): return score",
}

_NOT_THE_USER = tuple(os.path.dirname(os.path.abspath(m.__file__)) + os.sep for m in (errors, torch))  # type: ignore[type-var]
_LIBRARY_MODS = tuple(os.path.join(_NOT_THE_USER[0], name) for name in ("masks.py", "mods.py"))


@functools.cache
def _is_users(file: str) -> bool:
    # the mods of flexmod's own library are ordinary mods: an error in one names its line
    return file in _LIBRARY_MODS or not (file.startswith(_NOT_THE_USER) or file.startswith("<frozen"))


def user_line() -> Where | None:
    """The innermost line on the stack that belongs neither to flexmod nor to torch."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return Where(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def positional_count(mod: Callable[..., Any]) -> int:
    """How many positional arguments without defaults a mod takes."""
    if inspect.isfunction(mod) and not hasattr(mod, "__wrapped__"):  # the usual case, forty times faster
        return mod.__code__.co_argcount - len(mod.__defaults__ or ())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(mod).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def mod_kind(mod: Callable[..., Any]) -> str:
    """ "score" for five positional arguments without defaults, "mask" for four.

    Raises ModArityError for any other count, NotCallable for what is no function.
    """
    count = _checked_count(mod, "the function", EXAMPLES["mask"])
    if count == len(SCORE_ARGUMENTS):
        return "score"
    if count == len(MASK_ARGUMENTS):
        return "mask"
    raise errors.ModArityError(mod=mod_name(mod), count=count, expected=f"{EXAMPLES['mask']}, or {EXAMPLES['score']}")


def check_arity(mod: Callable[..., Any], kind: str) -> None:
    """Refuse a mod that cannot be called with the arguments of its kind."""
    count = _checked_count(mod, f"{kind}_mod", EXAMPLES[kind])
    if count != len(MASK_ARGUMENTS if kind == "mask" else SCORE_ARGUMENTS):
        raise errors.ModArityError(mod=f"{kind}_mod {mod_name(mod)}", count=count, expected=EXAMPLES[kind])


def _checked_count(mod: Callable[..., Any], what: str, expected: str) -> int:
    if not callable(mod):
        raise errors.NotCallable(mod=what, type=type(mod).__name__, expected=expected)
    return positional_count(mod)


def mod_name(mod: Callable[..., Any]) -> str:
    while isinstance(mod, functools.partial):
        mod = mod.func
    return getattr(mod, "__name__", type(mod).__name__)


def capture_names(
    mod: Callable[..., Any], tensors: Sequence[torch.Tensor], given: Mapping[int, str] | None = None
) -> list[str]:
    """The user's own names of captured tensors: closure, globals, attributes, partial arguments.

    `given` has names by id that are known already. Each name is an identifier and no two are equal; a tensor
    without one is `captured0`, `captured1`, ...
    """
    wanted = {id(t) for t in tensors}
    found = dict(given or {})
    for name, value in _surroundings(mod, 0):
        if id(value) in wanted:
            found.setdefault(id(value), name)
    names: list[str] = []
    for i, tensor in enumerate(tensors):
        name = re.sub(r"\W", "_", found.get(id(tensor), f"captured{i}"), flags=re.ASCII).strip("_") or f"captured{i}"
        if keyword.iskeyword(name) or name[0].isdigit():
            name = f"captured_{name}"
        while name in names:
            name = f"{name}_{i}"
        names.append(name)
    return names


def _surroundings(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything near a callable that it may have captured."""
    if depth > 6:
        return
    near: list[tuple[str, Any]] = []
    if isinstance(value, functools.partial):
        near += [(f"argument{i}", a) for i, a in enumerate(value.args)]
        near += [*value.keywords.items(), ("", value.func)]
    elif inspect.ismethod(value):
        near += [*vars(value.__self__).items()] if hasattr(value.__self__, "__dict__") else []
        near += [*getattr(value.__self__, "_parameters", {}).items(), *getattr(value.__self__, "_buffers", {}).items()]
        near += [("", value.__func__)]
    elif inspect.isfunction(value):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        near += [(name, c.cell_contents) for name, c in cells if _is_full(c)]
        near += [(n, value.__globals__[n]) for n in value.__code__.co_names if n in value.__globals__]
        near += [(f"default{i}", d) for i, d in enumerate(value.__defaults__ or ())]
        near += [*(value.__kwdefaults__ or {}).items()]
    elif isinstance(value, (tuple, list)):
        near += [("", v) for v in value[:64]]
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        near += [*vars(value).items(), ("", type(value).__call__)]
        near += [*getattr(value, "_parameters", {}).items(), *getattr(value, "_buffers", {}).items()]
    for name, item in near:
        if isinstance(item, torch.Tensor):
            yield name or "captured", item
        elif isinstance(item, (functools.partial, tuple, list)) or inspect.ismethod(item) or inspect.isfunction(item):
            yield from _surroundings(item, depth + 1)
        elif name in ("self", "") or callable(item) and hasattr(item, "__dict__") and not inspect.ismodule(item):
            if not isinstance(item, type) and not inspect.isbuiltin(item):
                yield from ((n, v) for n, v in getattr(item, "__dict__", {}).items() if isinstance(v, torch.Tensor))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
