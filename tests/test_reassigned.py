"""Another tensor takes the place of a captured one. A handle sees it, wherever a mod finds its tensors."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from test_numbers import BACKENDS, LENGTH, inputs, near, truth
from torch import Tensor, nn

import flexmod
from flexmod import flex_attention
from flexmod.calls import compiled, prepared

Read = Callable[[], Tensor]
Assign = Callable[[Tensor], Any]


@dataclass(slots=True)
class Slotted:
    tensor: Tensor
    other: Tensor | None = None

    def __call__(self) -> Tensor:
        return self.tensor


@dataclass
class Plain:
    tensor: Tensor

    def __call__(self) -> Tensor:
        return self.tensor


class OfClass:
    tensor: ClassVar[Tensor]

    def __call__(self) -> Tensor:
        return self.tensor


class Computed:
    def __init__(self, tensor: Tensor) -> None:
        self._known = {"all": [tensor]}

    @property
    def tensor(self) -> Tensor:
        return self._known["all"][0]


class Asked:
    def __init__(self, tensor: Tensor) -> None:
        self._inner = Slotted(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Pair(NamedTuple):
    tensor: Tensor
    other: int = 0


OF_FILE: dict[str, Tensor] = {}
GLOBAL = torch.tensor(0)
CONTEXT: ContextVar[Tensor] = ContextVar("tensor")


def set_global(tensor: Tensor) -> None:
    global GLOBAL
    GLOBAL = tensor


def of_attribute(holder: Any) -> tuple[Read, Assign]:
    return lambda: holder.tensor, lambda new: setattr(holder, "tensor", new)


def of_entry(holder: Any, key: Any) -> tuple[Read, Assign]:
    return lambda: holder[key], lambda new: holder.__setitem__(key, new)


def of_object(holder: Any) -> tuple[Read, Assign]:
    return holder, lambda new: setattr(holder, "tensor", new)


def of_method(tensor: Tensor) -> tuple[Read, Assign]:
    holder = Slotted(tensor)
    return holder.__call__, lambda new: setattr(holder, "tensor", new)


def of_property(tensor: Tensor) -> tuple[Read, Assign]:
    holder = Computed(tensor)
    return lambda: holder.tensor, lambda new: holder._known.update(all=[new])


def of_getattr(tensor: Tensor) -> tuple[Read, Assign]:
    holder = Asked(tensor)
    return lambda: holder.tensor, lambda new: setattr(holder._inner, "tensor", new)


def of_nested(tensor: Tensor) -> tuple[Read, Assign]:
    holder = {"a": [(0, tensor)]}
    return lambda: holder["a"][0][1], lambda new: holder["a"].__setitem__(0, (0, new))


def of_read_only_dict(tensor: Tensor) -> tuple[Read, Assign]:
    holder = {"a": tensor}
    view = types.MappingProxyType(holder)
    return lambda: view["a"], lambda new: holder.update(a=new)


def variable(tensor: Tensor) -> tuple[Read, Assign]:
    def assign(new: Tensor) -> None:
        nonlocal tensor
        tensor = new

    return lambda: tensor, assign


def inner_variable(tensor: Tensor) -> tuple[Read, Assign]:
    read, assign = variable(tensor)

    def outer() -> Tensor:
        def inner() -> Tensor:
            return read()

        return inner()

    return outer, assign


def of_class(tensor: Tensor) -> tuple[Read, Assign]:
    OfClass.tensor = tensor
    return OfClass(), lambda new: setattr(OfClass, "tensor", new)


def of_global(tensor: Tensor) -> tuple[Read, Assign]:
    set_global(tensor)
    return lambda: GLOBAL, set_global


def of_dict_of_file(tensor: Tensor) -> tuple[Read, Assign]:
    OF_FILE["tensor"] = tensor
    return lambda: OF_FILE["tensor"], lambda new: OF_FILE.update(tensor=new)


def of_module_of_python(tensor: Tensor) -> tuple[Read, Assign]:
    settings = types.ModuleType("settings")
    settings.tensor = tensor  # type: ignore[attr-defined]
    return of_attribute(settings)


def of_function(tensor: Tensor) -> tuple[Read, Assign]:
    def read() -> Tensor:
        return read.tensor  # type: ignore[attr-defined, no-any-return]

    read.tensor = tensor  # type: ignore[attr-defined]
    return read, lambda new: setattr(read, "tensor", new)


def of_default(tensor: Tensor) -> tuple[Read, Assign]:
    def read(tensor: Tensor = tensor) -> Tensor:
        return tensor

    return read, lambda new: setattr(read, "__defaults__", (new,))


def of_keyword(tensor: Tensor) -> tuple[Read, Assign]:
    def read(*, tensor: Tensor = tensor) -> Tensor:
        return tensor

    return read, lambda new: read.__kwdefaults__.update(tensor=new)


def of_partial(tensor: Tensor) -> tuple[Read, Assign]:
    read = functools.partial(lambda *, tensor: tensor, tensor=tensor)
    return read, lambda new: read.keywords.update(tensor=new)


def of_weak_reference(tensor: Tensor) -> tuple[Read, Assign]:
    holder = Plain(tensor)
    known = weakref.ref(holder)
    return lambda: known().tensor, lambda new: setattr(holder, "tensor", new)  # type: ignore[union-attr]


def of_context(tensor: Tensor) -> tuple[Read, Assign]:
    CONTEXT.set(tensor)
    return lambda: CONTEXT.get(), CONTEXT.set


def of_pair(tensor: Tensor) -> tuple[Read, Assign]:
    holder = types.SimpleNamespace(pair=Pair(tensor))
    return lambda: holder.pair.tensor, lambda new: setattr(holder, "pair", Pair(new))


def among_many(tensor: Tensor) -> tuple[Read, Assign]:
    many = [types.SimpleNamespace(number=[n]) for n in range(3000)]
    holder = types.SimpleNamespace(many=many, last=types.SimpleNamespace(of=Plain(tensor)))
    return lambda: holder.last.of.tensor, lambda new: setattr(holder.last.of, "tensor", new)


def of_parameters(tensor: Tensor) -> tuple[Read, Assign]:
    held = nn.ParameterList([nn.Parameter(tensor, False)])
    return lambda: held[0], lambda new: held.__setitem__(0, nn.Parameter(new, False))


HOLDERS: dict[str, Callable[[Tensor], tuple[Read, Assign]]] = {
    "attribute": lambda t: of_attribute(Plain(t)),
    "called object": lambda t: of_object(Plain(t)),
    "slot": lambda t: of_attribute(Slotted(t)),
    "called object with slots": lambda t: of_object(Slotted(t)),
    "bound method": of_method,
    "class": of_class,
    "property": of_property,
    "getattr": of_getattr,
    "list": lambda t: of_entry([t], 0),
    "dict": lambda t: of_entry({"a": t}, "a"),
    "nested": of_nested,
    "deque": lambda t: of_entry(deque([t]), 0),
    "read-only dict": of_read_only_dict,
    "named tuple": of_pair,
    "variable": variable,
    "variable of a variable": inner_variable,
    "global": of_global,
    "dict of a file": of_dict_of_file,
    "module of Python": of_module_of_python,
    "attribute of a function": of_function,
    "default": of_default,
    "keyword": of_keyword,
    "partial": of_partial,
    "weak reference": of_weak_reference,
    "context": of_context,
    "among many": among_many,
    "parameters": of_parameters,
}


def mods_of(read: Read) -> tuple[Any, Any]:
    return (
        lambda s, b, h, q, k: s * read(),
        lambda b, h, q, k: (q - k).abs() <= read(),
    )


@pytest.mark.covering(1, long=1, costly=("interpret",))
@pytest.mark.parametrize("way", ["itself", "copy", "deepcopy"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_handle_sees_another_tensor(backend: str, holder: str, way: str) -> None:
    read, assign = HOLDERS[holder](torch.tensor(4))
    mods, tensors = mods_of(read), inputs()
    attend = flexmod.compile(*mods, kernel_options=BACKENDS[backend])
    attend = {"itself": lambda x: x, "copy": copy.copy, "deepcopy": copy.deepcopy}[way](attend)

    def agree() -> bool:
        return all(near(attend(*tensors), truth(*tensors, *mods)) for _ in range(3))

    assert agree()
    for width in (2, 9):
        assign(torch.tensor(width))
        assert agree()
        read().fill_(width + 3)
        assert agree()


@torch.no_grad()
def test_a_copy_made_after_the_change_sees_it_at_once() -> None:
    read, assign = variable(torch.tensor(4))
    mods, tensors = mods_of(read), inputs()
    attend = flexmod.compile(*mods)
    assign(torch.tensor(1))
    assert near(copy.deepcopy(attend)(*tensors), truth(*tensors, *mods))


@torch.no_grad()
def test_another_thread_assigns_a_tensor_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    read, assign = variable(torch.zeros(LENGTH))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bias = read()
        return score + (bias[kv_idx] if bias.dim() == 1 else bias[kv_idx, q_idx])

    def attend_twice(*arguments: Any) -> Any:
        monkeypatch.undo()
        result = prepared.attend(*arguments)
        assign(torch.linspace(-3, 3, LENGTH * LENGTH).view(LENGTH, LENGTH))
        attend(*tensors)
        return result

    attend, tensors = flexmod.compile(mod), inputs()
    monkeypatch.setattr(prepared, "attend", attend_twice)
    attend(*tensors)
    assert near(attend(*tensors), truth(*tensors, mod))


@torch.no_grad()
def test_an_entry_that_is_gone() -> None:
    holder = [torch.tensor(1.0), torch.tensor(3.0)]
    attend, tensors = flexmod.compile(lambda s, b, h, q, k: holder[-1] * s), inputs()
    for _ in range(2):
        assert near(attend(*tensors), truth(*tensors, lambda s, *_: holder[-1] * s))
        holder.pop()
        if holder:
            assert near(attend(*tensors), truth(*tensors, lambda s, *_: holder[-1] * s))
    with pytest.raises(IndexError):
        attend(*tensors)


def last_of_list(tensor: Tensor) -> tuple[Read, Assign]:
    holder = [tensor]
    return lambda: holder[-1], holder.append


def first_of_list(tensor: Tensor) -> tuple[Read, Assign]:
    holder = [None, None, tensor]
    places = iter((1, 0))
    return lambda: next(t for t in holder if t is not None), lambda t: holder.__setitem__(next(places), t)


def last_of_dict(tensor: Tensor) -> tuple[Read, Assign]:
    holder = {0: tensor}
    return lambda: [*holder.values()][-1], lambda new: holder.__setitem__(len(holder), new)


def order_of_dict(tensor: Tensor) -> tuple[Read, Assign]:
    holder = {0: torch.tensor(2), 1: torch.tensor(9), 2: tensor}
    names = iter((0, 1))

    def assign(new: Tensor) -> None:
        name = next(names)
        holder[name] = holder.pop(name)
        new.fill_(holder[name])

    return lambda: [*holder.values()][-1], assign


def last_of_modules(tensor: Tensor) -> tuple[Read, Assign]:
    held = nn.ModuleDict()

    def assign(new: Tensor) -> None:
        held[str(len(held))] = nn.ParameterList([nn.Parameter(new, False)])

    assign(tensor)
    return lambda: [*held.values()][-1][0], assign


def instead_of_attribute(tensor: Tensor) -> tuple[Read, Assign]:
    holder = types.SimpleNamespace(usual=tensor, other=None)
    return lambda: holder.usual if holder.other is None else holder.other, partial_set(holder, "other")


def instead_of_slot(tensor: Tensor) -> tuple[Read, Assign]:
    holder = Slotted(tensor)
    return lambda: holder.tensor if holder.other is None else holder.other, partial_set(holder, "other")


def instead_of_buffer(tensor: Tensor) -> tuple[Read, Assign]:
    held = nn.Module()
    held.register_parameter("usual", nn.Parameter(tensor, False))
    held.register_buffer("other", None)
    return lambda: held.usual if held.other is None else held.other, partial_set(held, "other")


def instead_of_variable(tensor: Tensor) -> tuple[Read, Assign]:
    other: Any = None

    def assign(new: Tensor) -> None:
        nonlocal other
        other = new

    return lambda: tensor if other is None else other, assign


def new_attribute(tensor: Tensor) -> tuple[Read, Assign]:
    holder = types.SimpleNamespace(usual=tensor)
    return lambda: getattr(holder, "other", holder.usual), partial_set(holder, "other")


def partial_set(holder: Any, name: str) -> Assign:
    return lambda new: setattr(holder, name, new)


BESIDE = [
    last_of_list, first_of_list, last_of_dict, order_of_dict, last_of_modules, instead_of_attribute,
    instead_of_slot, instead_of_buffer, instead_of_variable, new_attribute,
]  # fmt: skip


@pytest.mark.parametrize("holder", BESIDE)
@torch.no_grad()
def test_a_handle_sees_a_tensor_beside_its_own(holder: Callable[[Tensor], tuple[Read, Assign]]) -> None:
    read, assign = holder(torch.tensor(4))
    mods, tensors = mods_of(read), inputs()
    attend = flexmod.compile(*mods)
    for width in (2, 9):
        for _ in range(3):
            assert near(attend(*tensors), truth(*tensors, *mods))
        assign(torch.tensor(width))
    assert int(read()) == 9
    assert near(attend(*tensors), truth(*tensors, *mods))


@pytest.mark.parametrize("holder", ["variable", "list", "slot", "default", "global", "parameters", "partial"])
@torch.no_grad()
def test_a_known_path_is_not_traced_again(holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, assign = HOLDERS[holder](torch.tensor(4))
    attend, tensors = flexmod.compile(*mods_of(read)), inputs()
    attend(*tensors)
    assign(torch.tensor(2))
    attend(*tensors)
    monkeypatch.setattr(compiled, "trace", None)
    for _ in range(3):
        attend(*tensors)


@pytest.mark.parametrize("name", ["tau", "e", "eps", "bits", "max"])
@torch.no_grad()
def test_a_number_that_a_tensor_has_as_an_attribute(name: str) -> None:
    table, tensors = torch.ones(LENGTH), inputs()
    space = {"table": table}
    exec(f"mod = lambda s, b, h, q, k: s * table[k] * table.{name}", space)
    for number in (2.0, 5.0, 5.0, 0.5):
        setattr(table, name, number)
        wanted = truth(*tensors, lambda s, b, h, q, k, number=number: s * number)
        assert near(flex_attention(*tensors, space["mod"]), wanted)
