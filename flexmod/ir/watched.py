"""Whether captured tensors are what they were: for whatever is made of their values and kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.internals.torch import UNCOUNTED as UNCOUNTED
from flexmod.internals.torch import version_of as version_of
from flexmod.ir.fingerprint import tensor_key


class Watched:
    """Tensors as they were when this was made.

    It sees writes that torch counts (`tensor.fill_()`, an optimizer's step) and another tensor in place of
    this one (`tensor.data = other`, `torch.utils.swap_tensors`, `module.to()`). It cannot see writes that
    torch does not count: through `tensor.data` or `tensor.detach().numpy()`, by a custom kernel, into a
    storage. Of a tensor of inference mode torch counts none. Such a tensor always counts as changed, or
    with `strict` False only where its kind or its memory is another.

    It keeps the memory of the tensors, so that no other tensor can get their addresses meanwhile.
    """

    __slots__ = ("_memory", "_states", "_strict", "tensors")

    def __init__(self, tensors: Sequence[Tensor], strict: bool = True) -> None:
        self.tensors = tuple(tensors)
        self._strict = strict
        self._states = [_state(tensor, strict) for tensor in tensors]
        known = (t for t, state in zip(self.tensors, self._states, strict=True) if state is not None)
        self._memory = [tensor.untyped_storage() for tensor in known]

    def unchanged(self) -> bool:
        """Do the tensors have the values, as far as torch knows, and the kinds that they had?"""
        for tensor, state in zip(self.tensors, self._states, strict=True):
            if state != _state(tensor, self._strict) or (state is None and self._strict):
                return False
        return True

    def same_kinds(self) -> bool:
        """Have they the shapes, strides, dtypes and devices that they had?"""
        pairs = zip(self.tensors, self._states, strict=True)
        return all(state is None or state[0] == tensor_key(tensor) for tensor, state in pairs)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy watches the copies of the tensors; what has changed already stays changed."""
        return _copied, (self.tensors, self._strict, self.unchanged())


def _copied(tensors: Sequence[Tensor], strict: bool, unchanged: bool) -> Watched:
    made = Watched(tensors, strict)
    if not unchanged:
        made._states = [(None,)] * len(made.tensors)
    return made


def _state(tensor: Tensor, strict: bool) -> tuple[object, ...] | None:
    """Kind, count of writes and address of a tensor; None where these do not tell that it is the same."""
    writes = version_of(tensor)
    kind = None if writes == UNCOUNTED and strict else tensor_key(tensor)
    return None if kind is None else (kind, writes, tensor.data_ptr())


# attributes on the way to a captured tensor: the dict that holds one, its name, its value
Links = tuple[tuple[dict[str, Any], str, object], ...]
SEARCHED = 1000  # objects that are searched
OWN = ("flexmod.compiled", "flexmod.block_mask.format")  # of handles and masks, where no mod reads tensors
TABLES = ("_parameters", "_buffers", "_modules")  # of a torch.nn.Module


def links_of(mods: Iterable[tuple[Callable[..., Any], Sequence[Tensor]]]) -> Links:
    """The attributes by which mods reach tensors: of a method's object, a module, a submodule.

    Wherever an object holds one of the tensors counts: the mod may read it there.
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
    """Are the attributes what they were?"""
    for table, name, value in links:  # noqa: SIM110, three times as slow
        if table.get(name) is not value:
            return False
    return True


def _held_by(value: Any) -> Iterator[tuple[dict[str, Any] | None, str, Any]]:
    """(table, name, value) of what an object holds; without a table where nothing can be assigned anew."""
    if isinstance(value, MethodType):
        yield from ((None, "", part) for part in (value.__self__, value.__func__))
    elif isinstance(value, partial):
        yield from ((None, "", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
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
