"""Caches traces by fingerprint: a mod with a known fingerprint does not run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flexmod.ir.fingerprint import Seen, fingerprint
from flexmod.ir.graph import Graph
from flexmod.ir.trace import Traced, trace
from flexmod.locks import Lock

REMEMBERED = 1024


class Known(NamedTuple):
    """The graph for a fingerprint, and the places of its captures among the fingerprint's tensors, in order.

    `described`: as in `Traced`, by place.
    """

    graph: Graph
    places: tuple[int, ...]
    described: tuple[int, ...] = ()

    def bound(self, seen: Seen) -> Traced:
        captured, described = ([seen.tensors[p] for p in part] for part in (self.places, self.described))
        return Traced(self.graph, tuple(captured), described=tuple(described))


_known: dict[object, Known] = {}
_lock = Lock()


def find(
    mod: Callable[..., Any], kind: str, device: torch.device, seen: Seen | None
) -> tuple[Traced, Known | None]:
    """Traces a mod or finds its trace in the cache. Also returns the cache's entry, if there is one.

    `seen` is the mod's fingerprint.
    """
    key = None if seen is None else (seen.key, kind, device, torch.get_default_dtype())
    known = _known.get(key)
    if known is not None and seen is not None:
        return known.bound(seen), known
    traced = trace(mod, kind, device)
    if seen is None or traced.eager:
        return traced, None
    places = {id(tensor): place for place, tensor in enumerate(seen.tensors)}
    if any(id(tensor) not in places for tensor in (*traced.tensors, *traced.described)):
        return traced, None
    of_trace = ([places[id(tensor)] for tensor in part] for part in (traced.tensors, traced.described))
    known = Known(traced.graph, *map(tuple, of_trace))
    remember(_known, key, known, REMEMBERED)
    return traced, known


def remembered(mod: Callable[..., Any], kind: str, device: torch.device) -> Traced:
    """Traces a mod or finds its trace in the cache."""
    return find(mod, kind, device, fingerprint(mod))[0]


def remember(memory: dict[Any, Any], key: object, value: object, limit: int) -> None:
    """Puts an entry into a dict, and drops the oldest entry beyond the limit."""
    with _lock:
        if len(memory) >= limit:
            del memory[next(iter(memory))]
        memory[key] = value
