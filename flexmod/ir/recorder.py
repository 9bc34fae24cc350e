"""Records what a mod does inside TorchDynamo or torch.export; `record.py` says what for.

TorchDynamo cannot run the tracer of `trace.py`. It can run a mod on 0-d tensors under a TorchFunctionMode,
which writes down each function that takes them. Captured tensors and Python numbers become inputs of
TorchDynamo's graph: gradients reach them, and new values need no compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmod import errors
from flexmod.ir import advice
from flexmod.ir.formulas import FUNCTIONS, REDUCTIONS, draws, writes
from flexmod.ir.graph import CARRIER, expect_size
from flexmod.ir.proxy import Proxy, plain_number
from flexmod.ir.torch_calls import CONCRETE, OF_SCALARS
from flexmod.ir.vector_calls import NAMES as OF_VECTORS
from flexmod.ir.vector_calls import reduces, reduction_error
from flexmod.ir.vectors import converting_row, entries_of
from flexmod.runtime.private_torch import RECORDED_DIMENSIONS, assume_constant

METHOD_WHERE = "where of a tensor"
INDICES = (torch.int32, torch.int64)
SHAPE = (1,) * RECORDED_DIMENSIONS
PASSED_ON = ("__get__", "__repr__", "__format__")  # reads of attributes like dtype, and texts
METADATA = (
    "size", "dim", "ndimension", "__len__", "is_floating_point", "numel", "nelement", "stride",
    "storage_offset",
)  # fmt: skip
FORMS: dict[str, Callable[..., Any]] = {"tuple": tuple, "list": list}
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
            raise refusal(name)
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
            place = place_among(value, self.captured)
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
    return name, is_known(name), draws(name), writes(name), converting_row(name) is not None


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


def place_among(tensor: Any, tensors: Sequence[Tensor]) -> int:
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
    found = False
    for entry in entries_of(index):
        if isinstance(entry, Tensor) and entry.dim() == 0 and entry.dtype in INDICES:
            found = True
        elif not isinstance(entry, int) or isinstance(entry, bool):
            return False
    return found


def _element_at(tensor: Tensor, index: Any) -> Tensor:
    return tensor[tuple([x.reshape(1) if isinstance(x, Tensor) else x for x in entries_of(index)])][0]


def _is_one_element(tensor: Tensor, index: Any) -> bool:
    """Is `tensor[index]` an element of a captured tensor, indexed with the mod's integers?"""
    entries = entries_of(index)
    if tensor.dim() != len(entries):
        return False
    for entry in entries:
        if not isinstance(entry, Tensor) or entry.dim() != len(SHAPE) or entry.dtype not in INDICES:
            return False
    return True


def _element(tensor: Tensor, index: Any) -> Tensor:
    """A tensor with the shape of `tensor[index]`; torch itself would read the index's value."""
    entries = entries_of(index)
    known = [entry is None or entry is Ellipsis or isinstance(entry, slice) for entry in entries]
    own = _ones(tensor, tensor.device) if tensor.dim() >= len(SHAPE) else tensor
    # an empty table, of a call without positions, has no element 0
    own = own.new_empty(()).expand([max(1, size) for size in own.shape])
    return own[tuple([entry if keep else 0 for entry, keep in zip(entries, known, strict=True)])]


def refusal(name: str) -> errors.FlexmodError:
    """Returns the error for a function that no trace accepts."""
    if name in REDUCTIONS:
        return reduction_error(name)
    return errors.UnknownOperationError(operation=f"torch.{name}", advice=advice.ELEMENTWISE)


def is_known(name: str) -> bool:
    tables = (OF_SCALARS, FUNCTIONS, OF_VECTORS, vars(Proxy))
    return name.startswith("__") or name == METHOD_WHERE or any(name in table for table in tables)
