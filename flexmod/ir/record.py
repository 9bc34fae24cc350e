"""Keeps mods inside torch.compile and torch.export: TorchDynamo runs each once, and keeps a Record of it.

`recorder.py` writes down what a mod does. Its tensors and numbers are inputs of TorchDynamo's graph. The rest
of a Record is constant. When the graph runs, the Record is traced like any mod.

`encoded` writes the constants of a compiled graph as text that means the same in every process. An operation
of torch.library takes tensors, numbers and strings. The text becomes part of the graph that torch.compile
caches and torch.export saves; `decoded` evaluates nothing.

`numbered` gives graphs numbers, so that a compiled model can refer to the graph of a block mask. The number
is a digest of the graph's content, so it means the same graph in every process.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flexmod import errors
from flexmod.errors import ConstantError, ForgottenGraphError, GraphNumberError
from flexmod.errors.base import a_type
from flexmod.ir.evaluate import on_device
from flexmod.ir.formulas import FUNCTIONS
from flexmod.ir.graph import Graph
from flexmod.ir.ops import with_default
from flexmod.ir.proxy import capture_of
from flexmod.ir.recorder import FORMS, METHOD_WHERE, Recorder, Step, is_known, place_among, refusal
from flexmod.ir.trace import Traced, trace
from flexmod.runtime.locks import Lock
from flexmod.runtime.private_torch import assume_constant, guard_defaults, let_modes_change
from flexmod.runtime.tensor_kinds import no_autocast

GRAPH = "graph"  # replaces a Record's text: the mod's only integer is the number of its graph
OPERATORS = {"__rdiv__": "__truediv__"}
PUBLIC_NAMES = {"log_sigmoid": "logsigmoid"}  # of functions whose __name__ is another
Numbers = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Record:
    """A mod's recorded operations: `steps` in order, and the last value. `text` contains everything.

    `learned` are the places of captured tensors that require gradients. `default` is torch's default dtype at
    the recording: a backward, or a program in another process, may run with another one.
    """

    kind: str
    steps: tuple[Step, ...]
    result: Any
    learned: tuple[int, ...]
    default: torch.dtype
    text: str

    def run(self, arguments: Sequence[Any], captured: Sequence[Tensor], numbers: Numbers) -> Any:
        """Runs the recorded mod on other arguments."""
        values = list(arguments)
        known = {"value": values, "captured": captured, "integer": numbers[0], "real": numbers[1]}

        def read(noted: Any) -> Any:
            form, value = noted
            if form in FORMS:
                return FORMS[form](read(entry) for entry in value)
            return value if form == "constant" else known[form][value]

        with with_default(self.default):
            for name, args, kwargs, without_gradient in self.steps:
                with torch.no_grad() if without_gradient else nullcontext():
                    named = {key: read(value) for key, value in kwargs}
                    values.append(_function(name)(*read(args), **named))
        return read(self.result)


def _function(name: str) -> Callable[..., Any]:
    """Finds a torch function, an operator or a method by TorchDynamo's name for it.

    Raises UnknownOperationError or ReductionError if no trace accepts it: the name may come from a saved
    program.
    """
    if not is_known(name):
        raise refusal(name)
    if name.startswith("__"):  # `torch.__eq__` compares modules
        straight = getattr(operator, name, None)
        if straight is not None:
            return straight
        turned = getattr(operator, OPERATORS.get(name, f"__{name[3:]}"))
        return lambda value, other: turned(other, value)
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    bare = PUBLIC_NAMES.get(name, name.removeprefix("special_").removeprefix("linalg_"))
    # relu of torch.nn.functional takes `inplace`, unlike torch's
    for home in (torch.nn.functional, torch, torch.special, torch.linalg):
        found = getattr(home, bare, None)
        if callable(found):  # `torch.float` is a dtype, so the method is used
            return found
    method = "where" if name == METHOD_WHERE else name
    return lambda value, *args, **kwargs: getattr(value, method)(*args, **kwargs)


@lru_cache(1024)
def _graph(
    text: str, kinds: tuple[Any, ...], integers: tuple[int, ...], texts: tuple[str, ...], device: Any
) -> tuple[Graph, tuple[int, ...]]:
    """The graph of a record, and for each of its captures the place among the record's captures.

    `texts` are floats in hexadecimal.
    """
    record = record_of(text)
    reals = tuple(map(float.fromhex, texts))
    stand_ins = [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta") for dtype, shape, strides in kinds
    ]
    for place in record.learned:
        stand_ins[place].requires_grad_()

    def recorded(*arguments: Any) -> Any:
        return record.run(arguments, stand_ins, (integers, reals))

    traced = trace(recorded, record.kind, device)
    return traced.graph, tuple(place_among(tensor, stand_ins) for tensor in traced.tensors)


@assume_constant
def _text_of(
    kind: str, steps: tuple[Step, ...], result: Any, learned: tuple[int, ...], default: torch.dtype
) -> str:
    return encoded((kind, steps, result, learned, default))


@lru_cache(4096)
def record_of(text: str) -> Record:
    """Reads a Record from its text. Raises ConstantError for any other text."""
    parts = decoded(text)
    if not isinstance(parts, tuple) or len(parts) != 5:
        raise ConstantError(problem=f"the text {text[:80]!r}")
    return Record(*parts, text)


def listed(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Tensors as an operation's argument: for no tensors, a list of None.

    AOTInductor's executor passes None for an empty list. torch looks for tensors of other classes in lists
    that hold None, but not in lists that may be None.
    """
    return [*tensors] or [None]


def unlisted(given: Sequence[Any] | None) -> list[Any]:
    """What a list among an operation's arguments holds: tensors, see `listed`, or numbers."""
    return [x for x in given or () if x is not None]


@dataclass
class Recorded:
    """A mod as an operation's arguments: its Record's text, or GRAPH, with its tensors and numbers."""

    text: str
    captured: Sequence[Tensor]
    integers: Sequence[int]
    reals: Sequence[float]

    def traced(self, device: torch.device) -> tuple[Traced, tuple[int, ...]]:
        """The mod's graph, and for each of its captures the place in `captured`.

        Raises OperationTensorError if torch dispatched a tensor subclass whose properties differ from the
        tensor that it passes on.
        """
        if self.text != GRAPH:
            kinds = tuple((t.dtype, tuple(t.shape), tuple(t.stride())) for t in self.captured)
            # 0.0 equals -0.0, and nan equals nothing: texts tell numbers apart
            texts = tuple(real.hex() for real in self.reals)
            graph, places = _graph(self.text, kinds, tuple(self.integers), texts, device)
            return Traced(graph, tuple(self.captured[place] for place in places)), places
        graph = graph_of(self.integers[0])
        for capture, tensor in zip(graph.captures, self.captured, strict=True):
            found = capture_of(capture.name, tensor)
            if capture != found:
                raise errors.OperationTensorError(
                    operation="attention", name=capture.name,
                    found=f"{found.dtype} of rank {found.rank}",
                    expected=f"{capture.dtype} of rank {capture.rank}",
                )  # fmt: skip
        return Traced(graph, tuple(self.captured)), tuple(range(len(self.captured)))


def record(mod: Callable[..., Any], kind: str, device: torch.device) -> Recorded:
    """Records a mod inside TorchDynamo or torch.export. Raises RandomNumberError, MutationError."""
    recorder = Recorder(kind, device)
    guard_defaults()
    let_modes_change(True)
    with no_autocast("cpu"), no_autocast("cuda"), recorder:
        let_modes_change(False)
        result = mod(*recorder.arguments)
    noted = recorder.noted(result)
    learned = [place for place, tensor in enumerate(recorder.captured) if tensor.requires_grad]
    text = _text_of(kind, tuple(recorder.steps), noted, tuple(learned), torch.get_default_dtype())
    captured = [on_device(tensor, device) for tensor in recorder.captured]
    return Recorded(text, captured, recorder.integers, recorder.reals)


def of_graph(traced: Traced) -> Recorded:
    """Makes a Recorded from a traced mod, outside of TorchDynamo."""
    return Recorded(GRAPH, list(traced.tensors), [numbered(traced.graph)[1]], [])


NAMED = (torch.dtype, torch.layout, torch.memory_format)


def encoded(value: Any) -> str:
    """Text for tuples, None, bools, integers, floats, strings, dtypes, devices and slices.

    Raises ConstantError for anything else.
    """
    return json.dumps(_plain(value), separators=(",", ":"))


def decoded(text: str) -> Any:
    """The value that `encoded` wrote. Raises ConstantError for any other text."""
    try:
        return _value(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConstantError(problem=f"the text {text[:80]!r}") from error


def _named(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, NAMED):
        raise ValueError(name)
    return found


# what JSON does not have, by name: the classes, what JSON stores of a value, and the value of that
STORED: dict[str, tuple[tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": ((float,), float.hex, float.fromhex),
    "torch": (NAMED, lambda value: str(value).removeprefix("torch."), _named),
    "device": ((torch.device,), str, torch.device),
    "slice": ((slice,), lambda value: _plain((value.start, value.stop, value.step)),
              lambda parts: slice(*map(_value, parts))),
    "ellipsis": ((type(Ellipsis),), lambda value: 0, lambda stored: Ellipsis),
}  # fmt: skip


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    for name, (kinds, stored, _) in STORED.items():
        if type(value) in kinds:
            return {name: stored(value)}
    raise ConstantError(problem=a_type(value))


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple([_value(item) for item in plain])
    if not isinstance(plain, dict):
        return plain
    ((name, stored),) = plain.items()
    return STORED[name][2](stored)


# A backward may run after its mask is deleted, so this many unreferenced graphs stay in memory.
REMEMBERED = 4096

BITS = 62  # a number's width: TorchDynamo and torch.library take signed 64-bit integers

_NUMBERS: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_LOCK = Lock()


@lru_cache(REMEMBERED)
def numbered(graph: Graph) -> tuple[Graph, int]:
    """The first numbered graph that equals this one, and its number. Raises GraphNumberError."""
    number = digest(graph)
    with _LOCK:
        first = _NUMBERS.setdefault(number, graph)
    if first != graph:
        raise GraphNumberError(number=number)
    return first, number


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
