"""Detects changes of captured tensors, to invalidate results that were computed from their values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.ir.fingerprint import tensor_key
from flexmod.runtime.private_torch import UNCOUNTED as UNCOUNTED
from flexmod.runtime.private_torch import version_of as version_of


class Watched:
    """A record of tensors' state at its creation, to detect later changes.

    It detects writes that torch counts (`tensor.fill_()`, an optimizer's step) and replaced tensors
    (`tensor.data = other`, `torch.utils.swap_tensors`, `module.to()`). It does not detect writes that torch
    does not count: through `tensor.data` or `tensor.detach().numpy()`, by a custom kernel, into a storage.
    torch counts no writes to inference-mode tensors. They always count as changed, or with `strict` False
    only if their kind or memory changed.

    It keeps the tensors' memory alive, so that no other tensor gets their addresses.
    """

    __slots__ = ("_memory", "_states", "_strict", "tensors")

    def __init__(self, tensors: Sequence[Tensor], strict: bool = True) -> None:
        self.tensors = tuple(tensors)
        self._strict = strict
        self._states = [_state(tensor, strict) for tensor in tensors]
        known = (t for t, state in zip(self.tensors, self._states, strict=True) if state is not None)
        self._memory = [tensor.untyped_storage() for tensor in known]

    def unchanged(self) -> bool:
        """Do the tensors still have their recorded kinds and, as far as torch knows, their values?"""
        for tensor, state in zip(self.tensors, self._states, strict=True):
            if state != _state(tensor, self._strict) or (state is None and self._strict):
                return False
        return True

    def same_kinds(self) -> bool:
        """Do the tensors still have their recorded shapes, strides, dtypes and devices?"""
        pairs = zip(self.tensors, self._states, strict=True)
        return all(state is None or state[0] == tensor_key(tensor) for tensor, state in pairs)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy watches the copies of the tensors; tensors that have changed stay changed."""
        return _copied, (self.tensors, self._strict, self.unchanged())


def _copied(tensors: Sequence[Tensor], strict: bool, unchanged: bool) -> Watched:
    made = Watched(tensors, strict)
    if not unchanged:
        made._states = [(None,)] * len(made.tensors)
    return made


def _state(tensor: Tensor, strict: bool) -> tuple[object, ...] | None:
    """Kind, count of writes and address of a tensor; None if they cannot prove that it is unchanged."""
    writes = version_of(tensor)
    kind = None if writes == UNCOUNTED and strict else tensor_key(tensor)
    return None if kind is None else (kind, writes, tensor.data_ptr())


# attributes on the path to a captured tensor: its dict, its name, its value
Links = tuple[tuple[dict[str, Any], str, object], ...]
SEARCHED = 1000  # objects to search at most
OWN = ("flexmod.calls.compiled", "flexmod.block_mask.format")  # handles and masks: no mod reads their tensors
TABLES = ("_parameters", "_buffers", "_modules")  # of a torch.nn.Module


def links_of(mods: Iterable[tuple[Callable[..., Any], Sequence[Tensor]]]) -> Links:
    """The attributes through which mods reach tensors: of a method's object, a module, a submodule.

    Includes every attribute that refers to one of the tensors, since the mod may read any of them.
    """
    found = (link for mod, tensors in mods for link in _links(mod, {id(tensor) for tensor in tensors}))
    return tuple({(id(table), name): (table, name, value) for table, name, value in found}.values())


def _links(mod: Callable[..., Any], wanted: set[int]) -> Iterator[tuple[dict[str, Any], str, object]]:
    seen = {id(mod)}
    queue: deque[tuple[Any, Links]] = deque([(mod, ())])
    while queue and wanted and len(seen) < SEARCHED:
        value, way = queue.popleft()
        for table, name, item in _held_by(value):
            here = way if table is None else (*way, (table, name, item))
            if id(item) in wanted:
                yield from here
            elif id(item) not in seen and not isinstance(item, (Tensor, ModuleType, type, str, int, float)):
                seen.add(id(item))
                if type(item).__module__ not in OWN:
                    queue.append((item, here))


def hold(links: Links) -> bool:
    """Do the attributes still have their recorded values?"""
    for table, name, value in links:  # noqa: SIM110, three times as slow
        if table.get(name) is not value:
            return False
    return True


def _held_by(value: Any) -> Iterator[tuple[dict[str, Any] | None, str, Any]]:
    """(table, name, value) for each value inside an object; without a table if it cannot be reassigned."""
    if isinstance(value, MethodType):
        yield from ((None, "", part) for part in (value.__self__, value.__func__))
    elif isinstance(value, partial):
        yield from ((None, "", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield None, "", cell.cell_contents
        yield from ((None, "", part) for part in value.__defaults__ or ())
        known = value.__globals__
        yield from ((None, "", known[name]) for name in value.__code__.co_names if name in known)
    elif isinstance(value, (list, tuple)):
        yield from ((None, "", part) for part in value)
    elif isinstance(value, dict):
        yield from [(value, name, part) for name, part in value.items()]
    else:
        own = getattr(value, "__dict__", {})
        if isinstance(value, torch.nn.Module):
            for table in TABLES:
                yield from [(own[table], name, part) for name, part in own[table].items()]
        yield from [(own, name, part) for name, part in [*own.items()] if name not in TABLES]
