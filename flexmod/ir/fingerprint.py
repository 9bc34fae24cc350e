"""A mod's fingerprint: a key such that two mods with equal keys make the same graph.

The fingerprint covers everything that the mod's code can reach: defaults, closures, the globals that it
names, and the functions among these.

Numbers, strings and dtypes count by value; tensors by shape, dtype and layout, not by their values. Functions
count by their code, a Mask and a ScoreMod by their function, a replay by its graph. A mod built from others
counts by these.

A mod that reaches anything else has no fingerprint: attributes of objects, lists and dicts, methods, imports,
writes to globals. Such a mod is traced at each call.

`find` caches traces by fingerprint: a mod with a known fingerprint does not run again.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.ir.composed import Derived, Mask, ScoreMod
from flexmod.ir.formulas import FUNCTIONS
from flexmod.ir.graph import Graph
from flexmod.ir.offsets import Positions
from flexmod.ir.proxy import VALUE_DTYPES
from flexmod.ir.replay import MaskReplay, ScoreReplay
from flexmod.ir.torch_calls import OF_SCALARS
from flexmod.ir.trace import Traced, trace
from flexmod.runtime.locks import Lock
from flexmod.runtime.tensor_kinds import CLASSES, tensor_key

PLAIN = (bool, int, str, type(None), torch.dtype, torch.device)
CALLABLES = (BuiltinFunctionType, FunctionType, type, type(Tensor))
MODULES = (math, torch, torch.nn, torch.nn.functional, torch.special)
BUILTINS = (
    "abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "isinstance", "len", "max", "min",
    "pow", "range", "reversed", "round", "sum", "tuple", "zip",
)  # fmt: skip
# Attributes of torch, tensors and traced values that a mod may name. None reveals a tensor's values or
# torch's settings. If torch works on tensors alone, the trace notices (`Traced.eager`).
ATTRIBUTES = frozenset(
    (
        *OF_SCALARS, *(name for name in vars(math) if name[0] != "_"),
        *(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES), "Tensor",
        "shape", "dtype", "device", "ndim", "requires_grad", "size", "dim", "numel", "is_floating_point",
        "nn", "functional", "special", "finfo", "iinfo", "max", "min", "eps", "tiny", "bits",
    )
)  # fmt: skip
# Bytecode that changes objects others see, or reads objects that a fingerprint does not follow.
REFUSED = (
    "STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "DELETE_", "IMPORT_",
    "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_LOCALS", "LOAD_CLASSDEREF", "LOAD_FROM_DICT", "LOAD_SUPER",
)  # fmt: skip


class Seen(NamedTuple):
    """A fingerprint, and the tensors that the mod can reach, in the order of the search."""

    key: tuple[object, ...]
    tensors: tuple[Tensor, ...]


class _Unknown(Exception):
    """Raised for an object that has no fingerprint."""


def fingerprint(mod: Any) -> Seen | None:
    """The fingerprint of a mod; None if the graph may depend on something that a fingerprint does not cover.

    Does not run the mod. The key keeps only the mod's code alive.
    """
    sight = _Sight()
    try:
        sight.add(mod)
        if sight.modules:
            sight.add_members()
    except _Unknown:
        return None
    return Seen(tuple(sight.key), tuple(sight.tensors))


class _Sight:
    def __init__(self) -> None:
        self.key: list[object] = []
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}  # functions and tensors met so far, by id
        # met so far; a module may be an argument of another function, so each attribute is read from each
        self.modules: dict[ModuleType, None] = {}
        self._attributes: dict[str, None] = {}

    def add_members(self) -> None:
        """Adds what the code may read from the modules that it reaches."""
        modules, attributes, met = self.modules, self._attributes, (0, 0)
        while met != (len(modules), len(attributes)):  # members may be modules and functions
            met = len(modules), len(attributes)
            for module in [*modules]:
                member = vars(module)
                for name in [*attributes]:
                    if name in member:
                        self.key.append(name)
                        self.add(member[name])

    def add(self, value: Any) -> None:
        """Adds a value to the key."""
        kind = type(value)
        if kind in PLAIN:
            self.key += (kind, value)
        elif kind is float:
            # -0.0 equals 0.0, and nan equals nothing
            self.key += (kind, value if value and value == value else repr(value))
        elif kind in CALLABLES and value in PURE:
            self.key.append(value)
        elif kind is FunctionType:
            if self._is_new(value):
                self._add_function(value)
        elif kind in CLASSES:
            if self._is_new(value):
                self.tensors.append(value)
                key = tensor_key(value)
                # an attribute that a user gave to a tensor, `table.tau`, may be one that the code names
                if key is None or not ATTRIBUTES.isdisjoint(value.__dict__):
                    raise _Unknown
                self.key.append(key)
        elif kind is Mask or kind is ScoreMod:
            self.key.append(kind)
            self.add(value.function)
        elif kind is MaskReplay or kind is ScoreReplay:
            self.key.append(value.traced.graph.with_lines)  # or an error would name an equal mod's line
            for tensor in value.traced.tensors:
                self.add(tensor)
        elif issubclass(kind, (Derived, Positions)):
            self.key.append(kind)
            for field in fields(value):
                self.add(getattr(value, field.name))
        elif kind is tuple:
            self.key += (kind, len(value))
            for item in value:
                self.add(item)
        elif kind is ModuleType and value in MODULES:
            self.key.append(value)
            self.modules[value] = None
        elif kind is partial and not value.__dict__:
            self.key += (kind, len(value.args), *value.keywords)
            for item in (value.func, *value.args, *value.keywords.values()):
                self.add(item)
        else:
            raise _Unknown

    def _is_new(self, value: object) -> bool:
        """Is this the first time that the search meets the value? Later times add only its place."""
        place = self._places.get(id(value))
        if place is None:
            self._places[id(value)] = len(self._places)
            return True
        self.key += ("again", place)
        return False

    def _add_function(self, function: FunctionType) -> None:
        code = names_of(function.__code__)
        if not code.covered or function.__dict__:
            raise _Unknown
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        self.key += (code, len(defaults), *keywords)
        self._attributes.update(code.attributes)
        for value in (*defaults, *keywords.values()):
            self.add(value)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                raise _Unknown from None
            self.add(value)
        scope = function.__globals__
        for name in code.globals:
            if name in scope:
                self.add(scope[name])
            else:
                member = scope.get("__builtins__", builtins)
                own = member if isinstance(member, dict) else vars(member)
                self.add(own.get(name, self))


@dataclass(frozen=True, eq=False)
class CodeNames:
    """The names that a function's code and its inner functions use. Stands for the code in a key.

    `covered`: the code does nothing else than a fingerprint covers.
    """

    code: CodeType
    globals: tuple[str, ...]
    attributes: dict[str, None]
    covered: bool


# By the id of a code, which the entry keeps alive: comparing equal codes would compare all their constants.
CODES = 4096  # entries at most; keys hold their own CodeNames, so they stay right
_codes: dict[int, CodeNames] = {}
_lock = Lock()


def names_of(code: CodeType) -> CodeNames:
    """Reads a code's names, once."""
    known = _codes.get(id(code))
    if known is None:
        found = _study(code)
        with _lock:  # keys compare these by identity: all threads get the same one
            if len(_codes) >= CODES:
                del _codes[next(iter(_codes))]
            known = _codes.setdefault(id(code), found)
    return known


def _study(code: CodeType) -> CodeNames:
    named: dict[str, None] = {}
    attributes: dict[str, None] = {}
    covered = True
    for part in _nested(code):
        for step in dis.get_instructions(part):
            rebinds = step.opname.startswith("STORE_DEREF") and step.argval in part.co_freevars
            covered &= not (rebinds or step.opname.startswith(REFUSED))
            if step.opcode in dis.hasname:
                names = named if step.opname == "LOAD_GLOBAL" else attributes
                names[step.argval] = None
    return CodeNames(code, tuple(named), attributes, covered and attributes.keys() <= ATTRIBUTES)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested(value)


def _pure() -> frozenset[object]:
    """The functions and types that may be met: what they give depends on their arguments alone."""
    found = [*FUNCTIONS.values(), *(getattr(builtins, name) for name in BUILTINS)]
    for module in MODULES:
        found += [member for name, member in vars(module).items() if name in ATTRIBUTES]
    return frozenset(member for member in found if type(member) in CALLABLES)


PURE = _pure()


REMEMBERED = 1024


Places = tuple[int, ...]

# by fingerprint: the graph, and the places of a trace's `tensors` and `described` among the fingerprint's
_known: dict[object, tuple[Graph, Places, Places]] = {}


def find(
    mod: Callable[..., Any], kind: str, device: torch.device, seen: Seen | None
) -> tuple[Traced, Places | None]:
    """Traces a mod or finds its trace in the cache. Also returns where the fingerprint `seen` has its
    captured tensors, or None if the next call traces it again.
    """
    if seen is None:
        return trace(mod, kind, device), None
    key = seen.key, kind, device, torch.get_default_dtype()
    known = _known.get(key)
    if known is not None:
        graph, places, described = known
        captured, beside = ([seen.tensors[place] for place in part] for part in (places, described))
        return Traced(graph, tuple(captured), described=tuple(beside)), places
    traced = trace(mod, kind, device)
    of_seen = {id(tensor): place for place, tensor in enumerate(seen.tensors)}
    if traced.eager or any(id(tensor) not in of_seen for tensor in (*traced.tensors, *traced.described)):
        return traced, None
    now = fingerprint(mod)
    if now is None or now.key != seen.key:  # another thread assigned a number in between
        return traced, None
    of_trace = ([of_seen[id(tensor)] for tensor in part] for part in (traced.tensors, traced.described))
    places, described = map(tuple, of_trace)
    remember(_known, key, (traced.graph, places, described), REMEMBERED)
    return traced, places


def remembered(mod: Callable[..., Any], kind: str, device: torch.device) -> Traced:
    """Traces a mod or finds its trace in the cache."""
    return find(mod, kind, device, fingerprint(mod))[0]


def remember(memory: dict[Any, Any], key: object, value: object, limit: int) -> None:
    """Puts an entry into a dict, and drops the oldest entry beyond the limit."""
    with _lock:
        if len(memory) >= limit:
            del memory[next(iter(memory))]
        memory[key] = value
