"""Graphs by number: a compiled model knows the graph of a block mask by one.

The number is a digest of what the graph says, so it means the same graph in every process.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from hashlib import blake2b
from weakref import WeakValueDictionary

from flexmod.errors import ForgottenGraphError, GraphNumberError
from flexmod.ir.graph import Graph
from flexmod.locks import Lock

# A backward may come after its mask has gone: so many graphs that nothing else holds are remembered.
REMEMBERED = 4096

BITS = 62  # of a number: TorchDynamo and the operations of torch.library take 64, with a sign

_NUMBERS: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_KNOWN: OrderedDict[Graph, int] = OrderedDict()
_LOCK = Lock()


def numbered(graph: Graph) -> tuple[Graph, int]:
    """The first graph that was equal to this one, and its number. Raises GraphNumberError."""
    with _LOCK:
        number = _KNOWN.get(graph)
        if number is None:
            number = digest(graph)
            first = _NUMBERS.setdefault(number, graph)
            if first != graph:
                raise GraphNumberError(number=number)
            _KNOWN[first] = number
            if len(_KNOWN) > REMEMBERED:
                _KNOWN.popitem(last=False)
        else:
            _KNOWN.move_to_end(graph)
        return _NUMBERS[number], number


def digest(graph: Graph) -> int:
    """Of structure, constants and captures; they are written the same in every process."""
    structure, *rest = graph.key
    text = repr((_digest_of_structure(structure), *rest)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> (64 - BITS)


@lru_cache(REMEMBERED)
def _digest_of_structure(structure: object) -> str:
    """Graphs that differ in numbers alone share it."""
    return blake2b(repr(structure).encode(), digest_size=16).hexdigest()


def graph_of(number: int) -> Graph:
    """The graph with a number. Raises ForgottenGraphError."""
    graph = _NUMBERS.get(number)
    if graph is None:
        raise ForgottenGraphError()
    return graph
