"""Copies a mod as copy.deepcopy does, and finds the tensors that the copy captures.

Python copies modules, bound methods, partials and callable objects together with their tensors. It does not
copy functions: a copied closure captures the same tensors as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexmod.ir.trace import Traced

Memo = dict[int, Any]
Self = TypeVar("Self", bound="CopiesByAttribute")
NOT_COPIED = (FunctionType, BuiltinFunctionType, ModuleType, type)


class CopiesByAttribute:
    """Lets copy and deepcopy copy attribute by attribute, whatever pickle does."""

    def __copy__(self: Self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self: Self, memo: Memo) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def deep_copied_traces(
    mod: Callable[..., Any], traces: Sequence[Traced], memo: Memo
) -> tuple[Callable[..., Any], list[Traced]]:
    """Copies a mod. Its traces refer to the tensors that the copy captures, describes and reads."""
    parts = [part for traced in traces for part in (traced.tensors, traced.described, traced.read)]
    new, copied = deep_copied(mod, [tensor for part in parts for tensor in part], memo)
    rest = iter(copied)
    own = iter([tuple(islice(rest, len(part))) for part in parts])
    return new, [Traced(x.graph, next(own), x.eager, next(own), next(own)) for x in traces]


def deep_copied(
    mod: Callable[..., Any], tensors: Sequence[Tensor], memo: Memo
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Copies a mod, and returns the copy's captured tensors in the order of `tensors`.

    Objects that the mod reaches, for example the model that contains it, may be only partly copied yet.
    """
    new = copy.deepcopy(mod, memo)
    left = {id(tensor) for tensor in tensors}
    if new is mod or not left:
        return new, tuple(tensors)
    copied: set[int] = set()
    for tensor in _tensors(mod):
        if id(tensor) in left:
            copied.add(id(tensor))
            if copied == left:
                break
    return new, tuple([copy.deepcopy(t, memo) if id(t) in copied else t for t in tensors])


def _tensors(mod: Any) -> Iterator[Tensor]:
    """The tensors that Python copies with a mod."""
    seen = {id(mod): mod}
    queue = [mod]
    while queue:
        for item in _parts(queue.pop()):
            if isinstance(item, Tensor):
                yield item
            elif id(item) not in seen and not isinstance(item, NOT_COPIED):
                seen[id(item)] = item
                queue.append(item)


def _parts(value: Any) -> Iterator[Any]:
    """The parts of a value that deepcopy copies with it."""
    if isinstance(value, dict):
        yield from [*value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from [*value]
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    # an object with its own __deepcopy__ decides itself what it copies
    if hasattr(type(value), "__deepcopy__") and not isinstance(value, (CopiesByAttribute, torch.nn.Module)):
        return
    yield from [*getattr(value, "__dict__", {}).values()]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name)
