"""Graphs by number: a compiled model knows the graph of a block mask by one."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

from flexmod.errors import ForgottenGraphError
from flexmod.ir.graph import Graph

# A backward may come after its mask has gone: so many graphs that nothing else holds are remembered.
REMEMBERED = 4096

_COUNT = itertools.count()
_NUMBERS: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_KNOWN: OrderedDict[Graph, int] = OrderedDict()
_LOCK = threading.Lock()


def numbered(graph: Graph) -> tuple[Graph, int]:
    """The first graph that was equal to this one, and its number."""
    with _LOCK:
        number = _KNOWN.get(graph)
        if number is None:
            number = next(_COUNT)
            _KNOWN[graph] = number
            _NUMBERS[number] = graph
            if len(_KNOWN) > REMEMBERED:
                _KNOWN.popitem(last=False)
        else:
            _KNOWN.move_to_end(graph)
        return _NUMBERS[number], number


def graph_of(number: int) -> Graph:
    """The graph with a number. Raises ForgottenGraphError."""
    graph = _NUMBERS.get(number)
    if graph is None:
        raise ForgottenGraphError()
    return graph
