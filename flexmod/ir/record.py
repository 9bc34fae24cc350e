"""Records mods inside torch.compile and torch.export: TorchDynamo runs each once, and keeps a Record of it.

TorchDynamo cannot run the tracer of `trace.py`. It can run a mod on 0-d tensors under a TorchFunctionMode,
which writes down each function that takes them. Captured tensors and Python numbers become inputs of
TorchDynamo's graph: gradients reach them, and new values need no compilation. The rest of a Record is
constant. When the graph runs, the Record is traced like any mod.

`encoded` writes the constants of a compiled graph as text that means the same in every process. An operation
of torch.library takes tensors, numbers and strings. The text becomes part of the graph that torch.compile
caches and torch.export saves; `decoded` evaluates nothing.

`numbered` gives graphs numbers, so that a compiled model can refer to the graph of a block mask. The number
is a digest of the graph's content, so it means the same graph in every process.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmod import errors
from flexmod.errors import ConstantError, ForgottenGraphError, GraphNumberError
from flexmod.errors.base import a_type
from flexmod.ir import advice
from flexmod.ir.evaluate import on_device
from flexmod.ir.formulas import FUNCTIONS, REDUCTIONS, draws, writes
from flexmod.ir.graph import CARRIER, Graph, expect_size
from flexmod.ir.ops import with_default
from flexmod.ir.proxy import Proxy, capture_of, plain_number
from flexmod.ir.torch_calls import CONCRETE, OF_SCALARS
from flexmod.ir.trace import Traced, trace
from flexmod.ir.vectors import NAMES as OF_VECTORS
from flexmod.ir.vectors import converting_row, reduces, reduction_error
from flexmod.runtime.locks import Lock
from flexmod.runtime.private_torch import (
    RECORDED_DIMENSIONS,
    assume_constant,
    guard_defaults,
    let_modes_change,
)
from flexmod.runtime.tensor_kinds import no_autocast

METHOD_WHERE = "where of a tensor"
INDICES = (torch.int32, torch.int64)
GRAPH = "graph"  # replaces a Record's text: the mod's only integer is the number of its graph
SHAPE = (1,) * RECORDED_DIMENSIONS
PASSED_ON = ("__get__", "__repr__", "__format__")  # reads of attributes like dtype, and texts
OPERATORS = {"__rdiv__": "__truediv__"}
PUBLIC_NAMES = {"log_sigmoid": "logsigmoid"}  # of functions whose __name__ is another
METADATA = (
    "size", "dim", "ndimension", "__len__", "is_floating_point", "numel", "nelement", "stride",
    "storage_offset",
)  # fmt: skip
FORMS: dict[str, Callable[..., Any]] = {"tuple": tuple, "list": list}
Numbers = tuple[Sequence[int], Sequence[float]]
Step = tuple[str, Any, tuple[tuple[str, Any], ...], bool]
"""One call: the function's name, its arguments and keywords, see `Recorder.noted`; and whether the mod had
turned gradients off.
"""


class Recorder(TorchFunctionMode):
    """Records a mod's operations on its arguments. Runs inside TorchDynamo, hence the plain lists and loops.

    The mod sees tensors of one element, known by their identity. They have more dimensions than any other
    tensor, and so has every result that was computed from one without the recorder. A short vector has its
    own dimensions before those.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.steps: list[Step] = []
        self.captured: list[Tensor] = []
        self.integers: list[int] = []
        self.reals: list[float] = []
        self.device = device
        self.differentiates = torch.is_grad_enabled()
        dtypes = [torch.int32] * 4 if kind == "mask" else [torch.float32, *[torch.int32] * 4]
        self.arguments = tuple([torch.empty(SHAPE, dtype=dtype, device=device) for dtype in dtypes])
        self.places = dict(zip(self.arguments, range(5), strict=False))  # of arguments and results
        # the dtypes of values and of captured tensors by place, None if they are no scalars
        self.of_values: list[torch.dtype | None] = [*dtypes]
        self.of_captured: list[torch.dtype | None] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, known, random, in_place, converting = _name(func)
        if func is CARRIER and len(args) > 1:
            self.steps.append((expect_size.__name__, self.noted(args), (), False))
            return self._placed(args[0])
        if random:
            raise errors.RandomNumberError(operation=f"torch.{name}")
        if in_place:
            raise errors.MutationError(operation=name)
        if name in PASSED_ON or not (_met(args) or kwargs and _met(tuple(kwargs.values()))):
            if name == "__getitem__" and _is_one_index(args[1]):
                return _element_at(args[0], args[1])
            fact = self._called(func, args, kwargs) if name == "__get__" else None
            return func(*args, **kwargs) if fact is None or isinstance(fact, Tensor) else fact
        if name == "__bool__":
            raise errors.ControlFlowError(advice=advice.TRUTH)
        if name in CONCRETE:
            raise errors.ConcreteValueError(operation=f".{name}()", advice=advice.SYMBOLIC)
        if name in METADATA and isinstance(args[0], Tensor):
            return self._called(func, args, kwargs)
        if not known:
            raise _refusal(name)
        of_kwargs = tuple([(key, self.noted(value)) for key, value in kwargs.items()]) if kwargs else ()
        of_args = self.noted(args)
        without_gradient = self.differentiates and not torch.is_grad_enabled()
        self.steps.append((name, of_args, of_kwargs, without_gradient))
        if name == "__getitem__":
            if _is_one_element(args[0], args[1]):
                return self._new(args[0].dtype, ())
            result = _element(args[0], args[1])
        else:
            known_dtypes = tuple(self.of_values), tuple(self.of_captured)
            dtype = _dtype_of_scalar(func, of_args, of_kwargs, *known_dtypes)
            if dtype is not None:
                return self._new(dtype, ())
            result = self._called(func, args, kwargs)
            # most other functions of vectors are traced once for each element, and torch promotes scalars
            # differently
            scalars = isinstance(result, Tensor) and result.dim() and not converting
            if scalars and not reduces(name.strip("_"), args, kwargs):
                result = result.to(self._called(func, args, kwargs, scalars=True).dtype)
        return self._placed(result)

    def _placed(self, result: Any) -> Any:
        """The result of the last step as the mod sees it."""
        if isinstance(result, Tensor):
            return self._new(result.dtype, _shape(result))
        self.of_values.append(None)
        return result

    def _new(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        result = self.arguments[0].new_empty((*shape, *SHAPE), dtype=dtype)
        self.places[result] = len(self.of_values)
        self.of_values.append(None if shape else dtype)
        return result

    def _called(self, func: Callable[..., Any], args: Any, kwargs: Any, scalars: bool = False) -> Any:
        """Calls a function with tensors of its arguments' dtypes, and of their shapes or of none."""
        options = {key: _ones(kwargs[key], self.device, scalars) for key in kwargs}
        return func(*_ones(args, self.device, scalars), **options)

    def noted(self, value: Any) -> Any:
        """How a step refers to a value: ("value", place), ("captured", place), ("integer", place),
        ("real", place), ("tuple", entries), ("list", entries), or ("constant", value).
        """
        if isinstance(value, Tensor):
            if value.dim() >= len(SHAPE):
                if value not in self.places:
                    raise errors.InGraphModError()
                return ("value", self.places[value])
            place = _place(value, self.captured)
            if place < 0:
                place = len(self.captured)
                self.captured.append(value)
                self.of_captured.append(None if value.dim() else value.dtype)
            return ("captured", place)
        if isinstance(value, (tuple, list)):
            form = "list" if isinstance(value, list) else "tuple"
            return (form, tuple([self.noted(entry) for entry in value]))
        if type(value).__module__ == "numpy":
            # TorchDynamo makes tensors of numpy's numbers, which have other dtypes beside them
            if torch.compiler.is_dynamo_compiling():
                raise errors.InGraphModError()
            value = plain_number(value)
        # the operation takes no symbols but integers: TorchDynamo guards other values where they decide
        # something, and breaks the graph for values of tensors
        if isinstance(value, (bool, torch.SymBool)):
            if value:
                return ("constant", True)
            return ("constant", False)
        if isinstance(value, (int, torch.SymInt)):
            self.integers.append(value)  # type: ignore[arg-type]
            return ("integer", len(self.integers) - 1)
        if isinstance(value, (float, torch.SymFloat)):
            self.reals.append(value if value > 0 else value * 1)  # type: ignore[arg-type,operator]
            return ("real", len(self.reals) - 1)
        return ("constant", value)


def _met(values: Iterable[Any]) -> bool:
    """Is a value of a recorded mod among them?"""
    for value in values:
        if isinstance(value, Tensor):
            if value.dim() >= len(SHAPE):
                return True
        elif isinstance(value, (tuple, list)) and _met(value):
            return True
    return False


@assume_constant
def _name(func: Callable[..., Any]) -> tuple[str, bool, bool, bool, bool]:
    """A function's name, and whether a trace knows it, it draws random numbers, it writes in place, and it
    converts scalars to the dtype of vectors.
    """
    name: str = func.__name__
    if getattr(func, "__module__", "") == "_operator":  # from torch.export
        name = f"__{name.strip('_')}__"
    if name == "where" and func is not torch.where:  # the method has another order of arguments
        name = METHOD_WHERE
    return name, _is_known(name), draws(name), writes(name), converting_row(name) is not None


@assume_constant
def _dtype_of_scalar(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    values: Sequence[torch.dtype | None],
    captured: Sequence[torch.dtype | None],
) -> torch.dtype | None:
    """The dtype of a function's result, if that and all tensors among its arguments are scalars; else None.

    Arguments are as `Recorder.noted` writes them. `values` and `captured` have the scalars' dtypes by place.
    TorchDynamo runs this call as it is. To trace it would take longer than all else that a step needs.
    """
    numbers, dtypes = {"integer": 1, "real": 0.5}, {"value": values, "captured": captured}

    def read(noted: Any) -> Any:
        form, value = noted
        if form in FORMS:
            return FORMS[form](map(read, value))
        if form not in dtypes:
            return numbers.get(form, value)
        dtype = dtypes[form][value]
        if dtype is None:
            raise ValueError(noted)
        return torch.ones((), dtype=dtype, device="cpu")

    try:
        result = func(*read(args), **{name: read(value) for name, value in kwargs})
    except Exception:  # a vector; or it raises again where TorchDynamo traces it
        return None
    return result.dtype if isinstance(result, Tensor) and not result.dim() else None


def _place(tensor: Any, tensors: Sequence[Tensor]) -> int:
    for place, other in enumerate(tensors):
        if other is tensor:
            return place
    return -1


def _ones(value: Any, device: torch.device, scalar: bool = False) -> Any:
    """A tensor of a tensor's dtype, and of the shape that the mod means by it or of none.

    It has ones: an exported program runs what is called with it, and would divide by what memory holds.
    """
    if isinstance(value, Tensor):
        return torch.ones(() if scalar else _shape(value), dtype=value.dtype, device=device)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple([_ones(entry, device, scalar) for entry in value])
    return [_ones(entry, device, scalar) for entry in value] if isinstance(value, list) else value


def _shape(tensor: Tensor) -> tuple[int, ...]:
    shape, most = tensor.shape, len(SHAPE)
    return shape[:-most] if len(shape) >= most else shape


def _is_one_index(index: Any) -> bool:
    """Is an index, in whole or in part, an integer in a tensor? TorchDynamo would ask for its value."""
    entries = index if isinstance(index, tuple) else (index,)
    found = False
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dim() == 0 and entry.dtype in INDICES:
            found = True
        elif not isinstance(entry, int) or isinstance(entry, bool):
            return False
    return found


def _element_at(tensor: Tensor, index: Any) -> Tensor:
    entries = index if isinstance(index, tuple) else (index,)
    return tensor[tuple([x.reshape(1) if isinstance(x, Tensor) else x for x in entries])][0]


def _is_one_element(tensor: Tensor, index: Any) -> bool:
    """Is `tensor[index]` an element of a captured tensor, indexed with the mod's integers?"""
    entries = index if isinstance(index, tuple) else (index,)
    if tensor.dim() != len(entries):
        return False
    for entry in entries:
        if not isinstance(entry, Tensor) or entry.dim() != len(SHAPE) or entry.dtype not in INDICES:
            return False
    return True


def _element(tensor: Tensor, index: Any) -> Tensor:
    """A tensor with the shape of `tensor[index]`; torch itself would read the index's value."""
    entries = index if isinstance(index, tuple) else (index,)
    known = [entry is None or entry is Ellipsis or isinstance(entry, slice) for entry in entries]
    own = _ones(tensor, tensor.device) if tensor.dim() >= len(SHAPE) else tensor
    # an empty table, of a call without positions, has no element 0
    own = own.new_empty(()).expand([max(1, size) for size in own.shape])
    return own[tuple([entry if keep else 0 for entry, keep in zip(entries, known, strict=True)])]


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


def _refusal(name: str) -> errors.FlexmodError:
    """Returns the error for a function that no trace accepts."""
    if name in REDUCTIONS:
        return reduction_error(name)
    return errors.UnknownOperationError(operation=f"torch.{name}", advice=advice.ELEMENTWISE)


def _function(name: str) -> Callable[..., Any]:
    """Finds a torch function, an operator or a method by TorchDynamo's name for it.

    Raises UnknownOperationError or ReductionError if no trace accepts it: the name may come from a saved
    program.
    """
    if not _is_known(name):
        raise _refusal(name)
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


def _is_known(name: str) -> bool:
    tables = (OF_SCALARS, FUNCTIONS, OF_VECTORS, vars(Proxy))
    return name.startswith("__") or name == METHOD_WHERE or any(name in table for table in tables)


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
    return traced.graph, tuple(_place(tensor, stand_ins) for tensor in traced.tensors)


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
