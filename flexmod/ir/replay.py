"""Makes a mod from a traced graph. The mod does not need the traced function, and can be pickled.

`copied` copies a mod as copy.deepcopy does, and finds the tensors that the copy captures. Python copies
modules, bound methods, partials and callable objects together with their tensors. It does not copy functions:
a copied closure captures the same tensors as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexmod.errors import NotPicklableError
from flexmod.ir.evaluate import index, real_dtype, steps_of, value_of
from flexmod.ir.graph import Graph, Immutable
from flexmod.ir.ops import NUMBER_DTYPES
from flexmod.ir.proxy import Proxy
from flexmod.ir.source import mod_name
from flexmod.ir.trace import Traced, trace

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
    """Copies a mod. Its traces refer to the tensors that the copy captures, describes and reads.

    Objects that the mod reaches, for example the model that contains it, may be only partly copied yet.
    """
    new = copy.deepcopy(mod, memo)
    known = {id(tensor) for x in traces for part in (x.tensors, x.described, x.read) for tensor in part}
    copied = known.intersection(map(id, _tensors(mod))) if known and new is not mod else ()

    def of_copy(part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple([copy.deepcopy(t, memo) if id(t) in copied else t for t in part])

    return new, [
        Traced(x.graph, of_copy(x.tensors), x.eager, of_copy(x.described), of_copy(x.read)) for x in traces
    ]


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
    yield from (part for _, part in slots_of(value))


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of an object's slots."""
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


class _Program(Immutable):
    """The steps of a graph. Slots hide its contents from searches for tensors and functions in objects."""

    __slots__ = ("result", "steps")

    def __init__(self, graph: Graph) -> None:
        self.steps, (self.result,) = steps_of(graph)


class Replay(CopiesByAttribute):
    """A mod that computes a traced graph on tensors, under torch.compile, and on proxies.

    Pickles and copies contain its graph and the captured tensors. MaskReplay and ScoreReplay have the
    arguments of their kind.
    """

    __call__: Callable[..., Any]

    def __init__(self, traced: Traced, name: str) -> None:
        self.traced = traced
        self.__name__ = name
        self._program = _Program(traced.graph)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (leaves(self.traced), self.__name__)

    def __repr__(self) -> str:
        return f"<replay of {self.__name__}>"

    def _run(self, b: Any, **inputs: Any) -> Any:
        inputs["b"] = b
        if isinstance(b, Proxy):
            return b._tracer.inline(self.traced.graph, self.traced.tensors, inputs)
        given = {
            n: x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu") for n, x in inputs.items()
        }
        score = given.get("score")
        real = torch.float64 if score is not None and score.dtype == torch.float64 else torch.float32
        values: list[Any] = []
        # TorchDynamo runs this: no dicts of nodes, no cached properties
        for step in self._program.steps:
            if step.op == "const":
                values.append(given["b"].new_full((), step.value, dtype=NUMBER_DTYPES[type(step.value)]))
            elif step.op == "load":
                tensor = self.traced.tensors[step.value]
                indices = tuple([index(values[place]) for place in step.args])
                values.append((tensor[indices] if indices else tensor).to(real_dtype(step.dtype, real)))
            else:
                values.append(value_of(step, values, given, real))
        return values[self._program.result].to(real_dtype(self.traced.graph.result.dtype, real))


class MaskReplay(Replay):
    """A mask_mod that computes a traced graph."""

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self._run(b, h=h, q_idx=q_idx, kv_idx=kv_idx)


class ScoreReplay(Replay):
    """A score_mod that computes a traced graph."""

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self._run(b, score=score, h=h, q_idx=q_idx, kv_idx=kv_idx)


def replay(traced: Traced, name: str | None = None) -> Replay:
    """Makes a mod of the graph's kind; messages and pictures show `name`."""
    kind = traced.graph.kind
    return (MaskReplay if kind == "mask" else ScoreReplay)(traced, name or f"{kind}_mod")


def leaves(traced: Traced) -> Traced:
    """Detaches tensors that autograd computed, as torch.save does: another process gets leaves."""
    tensors = [t if t.is_leaf else t.detach().requires_grad_(t.requires_grad) for t in traced.tensors]
    return Traced(traced.graph, tuple(tensors))


def for_pickle(mod: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Returns an object to pickle instead of a mod. It computes the same as the mod does now, and does not
    need the mod's function.

    Raises NotPicklableError if the mod cannot be traced.
    """
    if isinstance(mod, CopiesByAttribute):  # flexmod's own mods pickle themselves
        return mod
    return replay(traced_for_pickle(mod, kind), mod_name(mod))


def traced_for_pickle(mod: Callable[..., Any], kind: str) -> Traced:
    """Traces a mod on the device of its captured tensors. Raises NotPicklableError."""
    try:
        traced = trace(mod, kind)
        away = [t.device for t in traced.tensors if t.device.type != "cpu"]
        return trace(mod, kind, away[0]) if away else traced
    except Exception as error:
        raise NotPicklableError(
            mod=f"{kind}_mod {mod_name(mod)}", error=type(error).__name__, kind=kind,
            reason=f"{error}".partition("\n")[0],
        ) from error  # fmt: skip
