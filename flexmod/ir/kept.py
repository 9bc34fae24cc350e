"""Numbers graphs, so that a compiled model can refer to the graph of a block mask by an integer.

The number is a digest of the graph's content, so it means the same graph in every process.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from hashlib import blake2b
from weakref import WeakValueDictionary

from flexmod.errors import ForgottenGraphError, GraphNumberError
from flexmod.ir.graph import Graph
from flexmod.locks import Lock

# A backward may run after its mask is deleted, so this many unreferenced graphs stay in memory.
REMEMBERED = 4096

BITS = 62  # a number's width: TorchDynamo and torch.library take signed 64-bit integers

_NUMBERS: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_KNOWN: OrderedDict[Graph, int] = OrderedDict()
_LOCK = Lock()


def numbered(graph: Graph) -> tuple[Graph, int]:
    """The first numbered graph that equals this one, and its number. Raises GraphNumberError."""
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
    """A digest of structure, constants and captures, equal in every process."""
    structure, *rest = graph.key
    text = repr((_digest_of_structure(structure), *rest)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> (64 - BITS)


@lru_cache(REMEMBERED)
def _digest_of_structure(structure: object) -> str:
    """The structure's digest, shared by graphs that differ only in their numbers."""
    return blake2b(repr(structure).encode(), digest_size=16).hexdigest()


def graph_of(number: int) -> Graph:
    """Finds a graph by its number. Raises ForgottenGraphError."""
    graph = _NUMBERS.get(number)
    if graph is None:
        raise ForgottenGraphError()
    return graph
