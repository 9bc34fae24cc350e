"""Finds the user's line of a mod, the names of its captured tensors, and its number of arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import keyword
import linecache
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch

from flexmod import errors
from flexmod.errors import Where
from flexmod.errors.base import a_type, counted
from flexmod.ir.graph import ARGUMENTS, POSITIONS
from flexmod.runtime.private_torch import members_of_module

EXAMPLES = {
    "mask": "def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx",
    "score": "def score_mod(score, b, h, q_idx, kv_idx): return score",
}

MOD_OF_A_BLOCK_MASK = ", or the BlockMask's own, block_mask.mask_mod"

SEARCHED = 1000  # values to search at most for the names of captured tensors

_FLEXMOD = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__ or ""))
_NOT_THE_USER = (_FLEXMOD + os.sep, _TORCH + os.sep, contextlib.__file__)  # runs their `with` blocks
# Code that torch.fx writes, and modules that Inductor writes; the user's line is the one that calls them.
_OF_A_GRAPH, _OF_INDUCTOR = "<eval_with_key>", "torch._inductor."
_LIBRARY_MODS = tuple(os.path.join(_FLEXMOD, name) + os.sep for name in ("masks", "mods"))


@functools.lru_cache(4096)  # cells of a notebook are files, too
def is_users(file: str) -> bool:
    # the mods of flexmod's own library are ordinary mods: an error in one names its line
    return file.startswith(_LIBRARY_MODS) or not (
        file.startswith(_NOT_THE_USER) or file.startswith("<frozen")
    )


def user_line() -> Where | None:
    """The innermost line on the stack that belongs neither to flexmod nor to torch."""
    return place_of(user_frame())


def user_frame(library: bool = True) -> FrameType | None:
    """The innermost frame of a user's code, or of a mod of the library unless `library` is False."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        skipped = _OF_A_GRAPH if library else (_OF_A_GRAPH, *_LIBRARY_MODS)
        written = str(frame.f_globals.get("__name__")).startswith(_OF_INDUCTOR)
        if is_users(file) and not file.startswith(skipped) and not written:
            break
        frame = frame.f_back
    return frame


def place_of(frame: FrameType | None) -> Where | None:
    return None if frame is None else line_in(frame, frame.f_lineno)


def line_in(frame: FrameType, line: int | None) -> Where:
    """A line of a frame's code; the first one of its function if generated code has no numbers of lines."""
    file = frame.f_code.co_filename
    linecache.lazycache(file, frame.f_globals)  # the loader has the text of a module in a zip file
    return Where(file, line or frame.f_code.co_firstlineno)


def line_of(mod: Callable[..., Any] | None, text: str | None = None) -> Where | None:
    """The first line of a function that has a text in it, else its first line; without a text its last."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    codes = [getattr(x, "__code__", None) for x in (mod, getattr(mod, "forward", None), type(mod).__call__)]
    code = next((code for code in codes if code is not None and is_users(code.co_filename)), None)
    if code is None:
        return None
    lines = sorted({line for _, _, line in code.co_lines() if line is not None} or {code.co_firstlineno})
    if text is None:
        return Where(code.co_filename, lines[-1])
    named = (line for line in lines if text in linecache.getline(code.co_filename, line))
    return Where(code.co_filename, next(named, code.co_firstlineno))


def positional_count(mod: Callable[..., Any]) -> int:
    """How many positional arguments without defaults a mod takes.

    Raises TypeError or ValueError for what is not written in Python and does not name its arguments.
    """
    if isinstance(mod, torch.nn.Module):
        mod = mod.forward
    call: Any = mod if inspect.isfunction(mod) else type(mod).__call__
    if inspect.isfunction(call) and not any(hasattr(x, "__wrapped__") for x in (mod, call)):
        # forty times faster for the usual case; a callable object is an argument itself
        return call.__code__.co_argcount - len(call.__defaults__ or ()) - (call is not mod)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(mod).parameters.values()
    inner = inspect.unwrap(mod.func if isinstance(mod, functools.partial) else mod)
    unnamed = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if unnamed and not inspect.isfunction(call) and not hasattr(inner, "__code__"):
        raise ValueError(mod)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _takes_the_rest(mod: Callable[..., Any]) -> bool:
    """Does a mod take further positional arguments as `*args`, like the function of a decorator?"""
    function = mod.forward if isinstance(mod, torch.nn.Module) else mod
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def mod_kind(mod: Callable[..., Any]) -> str:
    """ "score" for five positional arguments without defaults, "mask" for four.

    Raises ModArityError for any other count, NotCallable for an object that is not callable.
    """
    count = _checked_count(mod, "the function", EXAMPLES["mask"])
    for kind in EXAMPLES:
        if count == len(ARGUMENTS[kind]):
            return kind
    raise errors.ModArityError(
        mod=mod_name(mod), count=counted(count, "positional argument"),
        expected=f"{EXAMPLES['mask']}, or {EXAMPLES['score']}"
    )


def check_arity(mod: Callable[..., Any], kind: str) -> None:
    """Raises an error if a mod cannot be called with the arguments of its kind."""
    count = _checked_count(mod, f"{kind}_mod", EXAMPLES[kind])
    wanted = len(ARGUMENTS[kind])
    if count != wanted and not (count < wanted and _takes_the_rest(mod)):
        expected, name = EXAMPLES[kind], mod_name(mod)
        if kind == "score" and count == len(ARGUMENTS["mask"]):
            expected += f", or give the mask as block_mask=create_block_mask({name}, B, H, Q_LEN, KV_LEN)"
            expected += f", to flexmod.compile as mask_mod={name}"
        elif kind == "mask" and count == len(ARGUMENTS["score"]):
            expected += f", or give the score_mod as score_mod={name} to flex_attention or flexmod.compile"
        given = counted(count, "positional argument")
        raise errors.ModArityError(mod=f"{kind}_mod {name}", count=given, expected=expected)


def _checked_count(mod: Callable[..., Any], what: str, expected: str) -> int:
    if not callable(mod):
        if isinstance(mod, torch.Tensor):
            expected = _of_tensor(what, mod)
        elif type(mod).__name__ == "BlockMask":
            of_score = what.startswith("score")
            expected += ", and the BlockMask as block_mask=block_mask" if of_score else MOD_OF_A_BLOCK_MASK
        elif isinstance(mod, (list, tuple)):
            several = "mods.chain(*score_mods)" if what.startswith("score") else "and_masks(*mask_mods)"
            expected += f", or join several, {several}"
        elif hasattr(mod, "__array__") and what.startswith("mask"):
            expected += ", or make the array a tensor, torch.from_numpy(dense)"
        raise errors.NotCallable(mod=what, type=a_type(mod), expected=expected)
    check_made(mod)
    try:
        return positional_count(mod)
    except (TypeError, ValueError):  # some built-in functions have no signature
        raise errors.NoSignatureError(mod=what, function=mod_name(mod), expected=expected) from None


def check_made(mod: object) -> None:
    """Raises NotMadeError for a function of `masks` or `mods` that nobody called."""
    code = getattr(mod, "__code__", None) if inspect.isfunction(mod) else None
    if code is None or not code.co_filename.startswith(_LIBRARY_MODS):
        return
    if code.co_flags & inspect.CO_NESTED:  # a mod that one of them made; TorchDynamo traces no further
        return
    package, name = mod.__module__.split(".")[1], mod.__name__  # type: ignore[attr-defined]
    if getattr(sys.modules.get(f"flexmod.{package}"), name, None) is mod:
        needs = [p.name for p in inspect.signature(mod).parameters.values() if p.default is p.empty]  # type: ignore[arg-type]
        kind = "mask" if package == "masks" else "score"
        call = f"{package}.{name}({', '.join(needs)})"
        where = place_of(user_frame(library=False))
        raise errors.NotMadeError(function=f"{package}.{name}", kind=kind, call=call, where=where)


def _of_tensor(what: str, tensor: torch.Tensor) -> str:
    """A mod that reads a dense bias."""
    arguments = ARGUMENTS["score" if what.startswith("score") else "mask"]
    element = f"bias[{', '.join(POSITIONS[-tensor.dim() :])}]" if 0 < tensor.dim() <= 4 else "bias[...]"
    result = element
    if what.startswith("score"):
        hides = tensor.dtype == torch.bool
        result = f"torch.where({element}, score, -float('inf'))" if hides else f"score + {element}"
    return f"lambda {', '.join(arguments)}: {result}"


def mod_name(mod: Callable[..., Any]) -> str:
    while isinstance(mod, functools.partial):
        mod = mod.func
    return getattr(mod, "__name__", type(mod).__name__)


def capture_names(
    mod: Callable[..., Any], tensors: Sequence[torch.Tensor], given: Mapping[int, str] | None = None
) -> list[str]:
    """Finds the user's names of captured tensors in closures, globals, attributes and partial arguments.

    `given` has known names by id. Each name is an identifier, and no two are equal; a tensor without a name
    is `captured0`, `captured1`, ...
    """
    found = dict(given or {})
    left = {id(t) for t in tensors} - found.keys()
    with contextlib.suppress(Exception):  # a user's object may raise an error when it is searched
        for name, tensor in reached(mod, _may_hold_tensors) if left else ():
            found.setdefault(id(tensor), name)
            left.discard(id(tensor))
            if not left:
                break
    names: list[str] = []
    for i, tensor in enumerate(tensors):
        name = (
            re.sub(r"\W", "_", found.get(id(tensor), f"captured{i}"), flags=re.ASCII).strip("_")
            or f"captured{i}"
        )
        if keyword.iskeyword(name) or name[0].isdigit():
            name = f"captured_{name}"
        while name in names:
            name = f"{name}_{i}"
        names.append(name)
    return names


def reached(mod: Any, enters: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """(name, value) for each value that a callable reaches through values that `enters` accepts, the nearest
    first.
    """
    seen = {id(mod): mod}
    queue = deque([mod])
    while queue and len(seen) < SEARCHED:
        for name, item in near(queue.popleft()):
            yield name, item
            if id(item) not in seen and enters(item):
                seen[id(item)] = item
                queue.append(item)


def leads_to_mods(value: Any) -> bool:
    """Is it a user's function, or may it contain the mods that another one was made from?"""
    kind = type(value)  # isinstance would run an object's own code
    if kind is FunctionType:
        return is_users(value.__code__.co_filename)
    return issubclass(kind, (functools.partial, tuple, list)) or str(kind.__module__).startswith("flexmod.")


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, (type, str, int, float, torch.Tensor)) or inspect.ismodule(value):
        return False
    return not inspect.isbuiltin(value) and (
        isinstance(value, (tuple, list, dict)) or hasattr(value, "__dict__")
    )


def near(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) for each value inside a function, object or container."""
    if isinstance(value, functools.partial):
        yield from value.keywords.items()
        yield from ((f"argument{i}", a) for i, a in enumerate(value.args))
        yield "", value.func
    elif inspect.ismethod(value):
        yield "", value.__func__
        yield from near(value.__self__)
    elif inspect.isfunction(value):
        yield from _near_function(value)
    elif isinstance(value, (tuple, list)):
        yield from ((f"item{i}", v) for i, v in enumerate(value[:64]))
    elif isinstance(value, dict):
        yield from [(str(k), v) for k, v in value.items()]
    else:
        yield from [*getattr(value, "__dict__", {}).items()]
        if isinstance(value, torch.nn.Module):
            for members in members_of_module(value):
                yield from members.items()
        if callable(value):
            yield "", type(value).__call__


def _near_function(function: Any) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    if is_users(code.co_filename):  # globals of torch's functions are not the user's captures
        yield from ((n, function.__globals__[n]) for n in code.co_names if n in function.__globals__)
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
