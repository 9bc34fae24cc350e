"""Detects changes of captured tensors, to invalidate results that were computed from their values."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flexmod.ir.fingerprint import names_of
from flexmod.ir.graph import Graph
from flexmod.ir.replay import Replay, slots_of
from flexmod.runtime.private_torch import UNCOUNTED as UNCOUNTED
from flexmod.runtime.private_torch import version_of as version_of
from flexmod.runtime.tensor_kinds import tensor_key


class Watched:
    """A record of tensors' state at its creation, to detect later changes.

    It detects writes that torch counts (`tensor.fill_()`, a step of most optimizers) and replaced tensors
    (`tensor.data = other`, `torch.utils.swap_tensors`, `module.to()`). It does not detect writes that torch
    does not count: through `tensor.data` or `tensor.detach().numpy()`, by an optimizer with `fused=True`, by
    a custom kernel, into a storage.

    Tensors of inference mode always count as changed, since torch counts no writes to them. So do tensors
    without a kind (`tensor_key`), unless `strict` is False.

    It keeps the tensors' memory alive, so that no other tensor gets their addresses.
    """

    __slots__ = ("_memory", "_states", "_strict", "tensors")

    def __init__(self, tensors: Sequence[Tensor], strict: bool = True) -> None:
        self.tensors = tuple(tensors)
        self._strict = strict
        self._states = [_state(tensor) for tensor in tensors]
        known = (t for t, state in zip(self.tensors, self._states, strict=True) if state is not None)
        self._memory = [tensor.untyped_storage() for tensor in known]

    def unchanged(self) -> bool:
        """Do the tensors still have their recorded kinds and, as far as torch knows, their values?"""
        for tensor, state in zip(self.tensors, self._states, strict=True):
            if state != _state(tensor) or (self._strict if state is None else state[1] == UNCOUNTED):
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


def _state(tensor: Tensor) -> tuple[object, ...] | None:
    """Kind, count of writes and address of a tensor; None if it has no kind."""
    kind = tensor_key(tensor)
    return None if kind is None else (kind, version_of(tensor), tensor.data_ptr())


SourceStates = list[tuple[object, object]]


def source_states(tensors: Sequence[Tensor]) -> SourceStates:
    """The states of tensors from whose values something is computed, equal for other objects of one memory.

    Keeps no memory alive: the tensors may be of a compiled graph, which reuses or captures its memory.
    """
    return [(_state(tensor), _memory_of(tensor)) for tensor in tensors]


def _memory_of(tensor: Tensor) -> object:
    """A weak reference, which is equal to others of the same memory while that lives."""
    return None if tensor_key(tensor) is None else ref(tensor.untyped_storage())


# By the memory of a result. Python's own weak dictionaries would have TorchDynamo compile their callbacks.
_sources = WeakIdKeyDictionary()


def computed_from(result: Tensor, sources: SourceStates) -> None:
    """Records a result's sources for as long as its memory lives; a second record has no effect."""
    _sources.setdefault(result.untyped_storage(), sources)


def sources_of(result: Tensor) -> SourceStates | None:
    """The recorded sources of a result."""
    return _sources.get(result.untyped_storage())


# on the paths to captured tensors: reads a part of an object, the part's name, its recorded value
Links = tuple[tuple[Callable[[Any], object], Any, object], ...]
NEVER: Links = (({}.get, "", NotImplemented),)  # does not hold
SEARCHED = 10_000  # objects to search at most
OWN = ("flexmod.calls.compiled", "flexmod.block_mask.format")  # handles and masks: no mod reads their tensors
LISTS = (list, deque)
NOT_SEARCHED = (Tensor, str, int, float, Graph)
# no tensors of a user are in their modules, classes and globals
LIBRARIES = sys.stdlib_module_names | {"flexmod", "numpy", "torch"}
UNNAMED = {"__call__", "__getitem__", "__getattr__"}  # methods that run without their names in any code
TABLES = ("_parameters", "_buffers", "_modules")  # of a torch.nn.Module


def links_of(mods: Iterable[tuple[Callable[..., Any], Sequence[Tensor]]]) -> Links:
    """The parts of objects through which mods reach tensors: attributes, entries of dicts and lists,
    variables of closures, globals, default arguments.

    Includes every path to one of the tensors, since the mod may read any of them. Includes what else the mod
    may find in the objects on a path: new entries (`tables[-1]`), and a tensor in place of None.

    Returns NEVER if there is no path to one of the tensors (a weak reference), if there are too many objects,
    or if one of them raises an error. Then each call traces the mods.
    """
    try:
        return _links_of(mods)
    except Exception:  # from a user's method: a mod may never call it
        return NEVER


def _links_of(mods: Iterable[tuple[Callable[..., Any], Sequence[Tensor]]]) -> Links:
    links: dict[object, tuple[Callable[[Any], object], Any, object]] = {}
    for mod, tensors in mods:
        wanted = {id(tensor) for tensor in tensors}
        leading = _parts_by_value(mod, wanted) if wanted else {}
        if leading is None or not (wanted <= leading.keys() or isinstance(mod, Replay)):
            return NEVER  # a Replay's tensors stay
        met, ahead = set(wanted), [*wanted]
        watched: list[Part] = []
        while ahead:
            for whole, part in leading.get(ahead.pop(), ()):
                watched.append(part)
                if id(whole) not in met:
                    met.add(id(whole))
                    ahead.append(id(whole))
                    for entries in _containers(whole):
                        links[id(entries)] = (_entries_of(entries), "", True)
        watched += [part for whole, part in leading.get(id(None), ()) if id(whole) in met]
        for owner, name, item in watched:
            if owner is not None:
                links[id(owner), name] = _reader(owner), name, item
    return tuple(links.values())


def hold(links: Links) -> bool:
    """Do the parts still have their recorded values?"""
    try:
        for read, name, value in links:
            if read(name) is not value:
                return False
    except Exception:  # the part is gone, or a user's method raises: a new trace shows whether the mod does
        return False
    return True


def _entries_of(container: Any) -> Callable[[str], bool]:
    """Makes a test: has a list or dict its present keys, in order, and values of the present types?"""

    def now() -> tuple[list[Any], list[type]]:
        if isinstance(container, dict):
            return [*container], [*map(type, container.values())]
        return [], [*map(type, container)]

    def same(name: str) -> bool:
        keys, types = now()
        return types == known_types and all(map(is_, keys, known_keys))

    known_keys, known_types = now()
    return same


def _containers(value: Any) -> list[Any]:
    """The lists and dicts that are an object's own parts."""
    own = getattr(value, "__dict__", None)
    tables = [own[name] for name in TABLES] if own is not None and isinstance(value, torch.nn.Module) else []
    if isinstance(value, ModuleType) or (isinstance(value, FunctionType) and not own):
        return []
    if str(type(value).__module__).startswith("flexmod."):
        own = None  # attributes of mods and masks of the library stay
    return [each for each in (value, own, *tables) if isinstance(each, (*LISTS, dict))]


Part = tuple[Any, Any, Any]  # owner (None if it cannot get another value), name, value


def _parts_by_value(mod: Callable[..., Any], wanted: set[int]) -> dict[int, list[tuple[Any, Part]]] | None:
    """By the id of a value: the parts that have it, each with the object that it is a part of.

    Includes the tensors `wanted`, and all objects that a mod may reach. None if these are too many.
    """
    found: dict[int, list[tuple[Any, Part]]] = {}
    seen = {id(mod)}
    queue: deque[Any] = deque([mod])
    named: list[Any] = []  # objects with parts that count if a code on the way has their names
    names, known = {*UNNAMED}, 0
    while queue or known < len(names):
        if not queue:
            known = len(names)
            queue, named = deque(named), []
            continue
        value = queue.popleft()
        if isinstance(value, FunctionType) and not _of_library(value):
            code = names_of(value.__code__)
            names.update(code.globals, code.attributes)
        elif isinstance(value, ModuleType) or _classes(value):
            named.append(value)
        for part in _parts(value, names):
            item = part[2]
            if id(item) not in wanted:
                if isinstance(item, NOT_SEARCHED) or isinstance(item, dict) and not item:
                    continue
                if id(item) not in seen:
                    seen.add(id(item))
                    if len(seen) > SEARCHED:
                        return None
                    if type(item).__module__ not in OWN:
                        queue.append(item)
            found.setdefault(id(item), []).append((value, part))
    return found


def _reader(owner: Any) -> Callable[[Any], object]:
    if isinstance(owner, dict):
        return owner.get
    return owner.__getitem__ if isinstance(owner, LISTS) else partial(getattr, owner)


def _parts(value: Any, names: set[str]) -> Iterator[Part]:
    """The parts of an object that may lead to a tensor.

    Of a Python module's members and a class's functions, includes those with one of the `names`: the others
    might lead to everything.
    """
    if isinstance(value, ModuleType):
        known = vars(value)
        yield from [(known, name, known[name]) for name in names & known.keys() if not _of_library(value)]
        return
    if isinstance(value, MethodType):
        yield from ((None, "", part) for part in (value.__self__, value.__func__))
    elif isinstance(value, partial):
        yield from ((None, "", part) for part in (value.func, *value.args, value.keywords))
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell, "cell_contents", cell.cell_contents
        defaults = ((value, name, getattr(value, name)) for name in ("__defaults__", "__kwdefaults__"))
        yield from (part for part in defaults if part[2])
        known = {} if _of_library(value) else value.__globals__
        yield from [(known, name, known[name]) for name in names_of(value.__code__).globals if name in known]
    elif isinstance(value, LISTS):
        yield from [(value, place, part) for place, part in enumerate(value)]
    elif isinstance(value, tuple):
        yield from ((None, "", part) for part in value)
    elif isinstance(value, dict):
        yield from [(value, name, part) for name, part in value.items()]
    for kind in _classes(value):
        for name, part in [*vars(kind).items()]:
            function = _function_of(part)
            if function is not None and name in names:
                yield None, "", function
            # not what a subclass or the object itself has by the same name
            if not _binds(part) and getattr(value, name) is part:
                yield value, name, part
    own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        for table in TABLES:
            yield from [(own[table], name, part) for name, part in own[table].items()]
    yield from [(own, name, part) for name, part in [*own.items()] if name not in TABLES]
    yield from ((value, name, part) for name, part in slots_of(value))


def _classes(value: Any) -> list[type]:
    """An object's class and its bases, or a class and its bases, without a library's."""
    return [k for k in (value if isinstance(value, type) else type(value)).__mro__ if not _of_library(k)]


def _of_library(value: Any) -> bool:
    """Is it a module, class or function of a library?"""
    if isinstance(value, FunctionType):
        name = value.__globals__.get("__name__")  # functools.wraps changes __module__
    else:
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(name).partition(".")[0] in LIBRARIES


def _function_of(part: Any) -> FunctionType | None:
    """The function of an attribute of a class: a method, or a property's."""
    if isinstance(part, (staticmethod, classmethod)):
        part = part.__func__
    elif isinstance(part, property):
        part = part.fget
    return part if isinstance(part, FunctionType) else None


def _binds(part: object) -> bool:
    """Is this attribute of a class a function, a property, or another descriptor?"""
    return hasattr(type(part), "__get__")
