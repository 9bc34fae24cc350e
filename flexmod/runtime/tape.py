"""What a function of tensors did, recorded once and played again on other tensors of the same kind.

A backend's forward or backward allocates, calls torch, launches kernels; all else that it does, however much,
only finds out which. For tensors of the same shapes, strides, dtypes, devices and alignment that comes out
the same. So a tape keeps the operations and the launches, with slots in place of the tensors.

Nothing is left out in silence: the tape sees each operation of torch (a TorchDispatchMode) and each launch
(`start`). What it cannot repeat (a tensor that it has not seen being made, a value read by the host) makes
the whole no tape.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexmod.runtime.counters import filled
from flexmod.runtime.direct import Direct, hooked

Tensors = tuple[Tensor | None, ...]
Kinds = tuple[object, ...]
Room = list[Any]
"""The tensors of a run by the numbers of their slots: those that it was given, those that it makes."""

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ZEROS = {"zeros", "zeros_like", "new_zeros"}
RECORDED = 2  # the run that is recorded: the first one settles on tiles, and may be the only one
UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Repeated:
    """A function that does the same for all tensors of one kind: run at first, recorded then, then played."""

    def __init__(self) -> None:
        self._runs = 0
        self._kinds: Kinds = ()
        self._tape: Tape | None = None

    def played(
        self, given: Sequence[Tensor | None], beside: Sequence[Tensor] = (), kinds: Kinds = ()
    ) -> Tensors | None:
        """As `__call__`, where there is a tape and nobody watches; else None, and nothing has run."""
        tape = self._tape
        if tape is None or torch._C._len_torch_dispatch_stack() or hooked():
            return None
        if kinds is not self._kinds and kinds != self._kinds or len(given) + len(beside) != tape.given:
            return None
        return tape.play((*given, *beside))

    def __call__(
        self,
        run: Callable[..., Tensors],
        given: Tensors,
        beside: Sequence[Tensor] = (),
        kinds: Kinds = (),
    ) -> Tensors:
        """run(*given). `beside` are further tensors that it reads, of these `kinds`.

        Those given are of one kind in all calls. Without the kind of each tensor beside, nothing is recorded.
        """
        found = self.played(given, beside, kinds)
        if found is not None:
            return found
        known = len(kinds) == len(beside) and None not in kinds
        if self._tape is not None or not known or torch._C._len_torch_dispatch_stack() or hooked():
            return run(*given)
        self._runs += 1
        if self._runs != RECORDED:
            return run(*given)
        result, tape = record(run, given, beside)
        self._kinds, self._tape = kinds, tape  # in this order: another thread may play it at once
        return result


def record(
    run: Callable[..., Tensors], given: Tensors, beside: Sequence[Tensor]
) -> tuple[Tensors, Tape | None]:
    """The result of run(*given), without its graph, and the tape of it if it can be repeated."""
    # Each slot is a tensor of its own, though the caller may have given one twice.
    apart = tuple(None if tensor is None else tensor.detach() for tensor in given)
    recorder = _Recorder((*apart, *beside))
    _current.recorder = recorder
    try:
        with torch.no_grad(), recorder:
            result = run(*apart)
    finally:
        _current.recorder = None
    return result, recorder.finish(result)


class _Step(NamedTuple):
    """`act` reads and fills a room. An allocation makes the tensor of a slot, and does nothing else."""

    act: Callable[[Room], object]
    reads: frozenset[int]
    allocates: int | None = None


class Tape:
    """A recorded run."""

    def __init__(
        self, steps: Sequence[Callable[[Room], object]], given: int, made: int, results: list[int | None]
    ) -> None:
        self.given = given
        self._steps = steps
        self._blank = [None] * made
        self._results = results

    def play(self, given: Sequence[Tensor | None]) -> Tensors:
        room: Room = [*given, *self._blank]
        for step in self._steps:
            step(room)
        return tuple([None if slot is None else room[slot] for slot in self._results])


class _Current(threading.local):
    recorder: _Recorder | None = None


_current = _Current()


def start(function: Any, grid: tuple[int], device: torch.device | None, arguments: Mapping[str, Any]) -> Any:
    """function[grid](**arguments) on the device, or in the interpreter where there is none."""
    recorder = _current.recorder
    if recorder is None:
        return _launched(function, grid, device, arguments)
    with recorder.deaf():
        compiled = _launched(function, grid, device, arguments)
    recorder.launched(compiled, function, grid, device, arguments)
    return compiled


def compiled(function: Any, device: torch.device, arguments: Mapping[str, Any]) -> Any:
    """What a launch with these arguments would run."""
    with torch.cuda.device(device):
        return function.warmup(grid=(1,), **_ready(arguments, device))


def _launched(
    function: Any,
    grid: tuple[int],
    device: torch.device | None,
    arguments: Mapping[str, Any],
) -> Any:
    if device is None:
        return function[grid](**arguments)
    with torch.cuda.device(device):
        return function[grid](**_ready(arguments, device))


def _ready(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Products fused with sums, said outright: Triton's default for it is about to change."""
    return {"enable_fp_fusion": True, **filled(arguments, device)}


class _Unrepeatable(Exception):
    pass


class _Slot(NamedTuple):
    """Stands for a tensor in recorded arguments."""

    number: int


class _Recorder(TorchDispatchMode):
    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._kept = list(given)  # what a slot is known by is the tensor's id
        self._slots = {id(tensor): slot for slot, tensor in enumerate(given) if tensor is not None}
        self._aliases: list[Tensor] = []  # kept for their ids as well
        self._given = len(given)
        self._steps: list[_Step] = []
        self._hears = True
        self._repeatable = len(self._slots) == sum(tensor is not None for tensor in given)

    @contextmanager
    def deaf(self) -> Iterator[None]:
        self._hears = False
        try:
            yield
        finally:
            self._hears = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._hears:
            self._keep(lambda: self._operation(func, args, kwargs, result))
        return result

    def launched(
        self,
        compiled: object,
        function: Any,
        grid: tuple[int],
        device: torch.device | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self._keep(lambda: self._launch(compiled, function, grid, device, arguments))

    def finish(self, result: Tensors) -> Tape | None:
        if not self._repeatable or any(t is not None and id(t) not in self._slots for t in result):
            return None
        results = [None if tensor is None else self._slots[id(tensor)] for tensor in result]
        needed = {slot for slot in results if slot is not None}
        if any(slot < self._given for slot in needed):
            return None
        kept = []
        for step in reversed(self._steps):
            if step.allocates is None or step.allocates in needed:
                needed |= step.reads
                kept.append(step.act)
        return Tape(kept[::-1], self._given, len(self._kept) - self._given, results)

    def _keep(self, make: Callable[[], _Step | None]) -> None:
        try:
            step = make()
        except _Unrepeatable:
            self._repeatable = False
        else:
            self._steps += [step] if step else []

    def _slot(self, tensor: Tensor) -> _Slot:
        slot = self._slots.get(id(tensor))
        if slot is None:
            raise _Unrepeatable
        return _Slot(slot)

    def _new_slot(self, tensor: Tensor) -> int:
        """The slot of a result, which may be a tensor that was there."""
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        return self._slots[id(tensor)]

    def _operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> _Step | None:
        name = func.overloadpacket.__name__
        if name == "lift_fresh":  # a number that the host has made a tensor
            number, slot = result.clone(), self._new_slot(result)
            return _Step(lambda room: room.__setitem__(slot, number.clone()), frozenset(), slot)
        if name in ALLOCATIONS | ZEROS:
            slot = self._new_slot(result)
            return _Step(_allocation(slot, result, name in ZEROS), frozenset(), slot)
        places = tree_map_only(Tensor, self._slot, (args, kwargs))
        if name == "detach":  # the same tensor to a tape, which knows no gradients
            self._slots[id(result)] = self._slot(args[0]).number
            self._aliases.append(result)
            return None
        leaves = tree_leaves(result)
        reads = frozenset(x.number for x in tree_flatten(places, is_leaf=_is_slot)[0] if _is_slot(x))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            # a number or a dtype: the host went on with it
            if reads:
                raise _Unrepeatable
            return None
        if UNREPEATABLE & set(func.tags) or _comes_to_the_host(leaves, (args, kwargs)):
            raise _Unrepeatable
        if name == "zero_":
            (slot,) = reads
            return _Step(lambda room: room[slot].zero_(), reads)
        made = [self._new_slot(leaf) for leaf in leaves]
        return _Step(_again(func, places, made), reads)

    def _launch(
        self,
        compiled: object,
        function: Any,
        grid: tuple[int],
        device: torch.device | None,
        arguments: Mapping[str, Any],
    ) -> _Step:
        slots = {
            name: self._slot(value.base if isinstance(value, TensorDescriptor) else value).number
            for name, value in arguments.items()
            if isinstance(value, (Tensor, TensorDescriptor))
        }
        reads = frozenset(slots.values())
        if device is not None:
            names = function.arg_names
            try:
                values = [arguments[name] for name in names]
                places = {place: slots[name] for place, name in enumerate(names) if name in slots}
                return _Step(Direct(compiled, device, grid, values, places), reads)
            except (LookupError, AttributeError):  # a launcher that is not known
                pass
        fixed = {
            name: _without_base(value) if isinstance(value, TensorDescriptor) else value
            for name, value in arguments.items()
            if not isinstance(value, Tensor)
        }

        def act(room: Room) -> None:
            filled = {**fixed, **{name: _filled(fixed.get(name), room[slot]) for name, slot in slots.items()}}
            _launched(function, grid, device, filled)

        return _Step(act, reads)


def _comes_to_the_host(made: list[Tensor], read: Any) -> bool:
    """Does a copy go where the host can read it unseen?"""
    given = [leaf for leaf in tree_leaves(read) if isinstance(leaf, Tensor)]
    return any(t.device.type == "cpu" for t in made) and any(t.device.type != "cpu" for t in given)


def _is_slot(value: object) -> bool:
    return isinstance(value, _Slot)


def _allocation(slot: int, like: Tensor, zero: bool) -> Callable[[Room], object]:
    size, stride, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    # what torch's own compiled graphs allocate by, on the current device: half the time, if it is there
    quick = getattr(guards, f"_empty_strided_{device.type}", None)

    def act(room: Room) -> None:
        if quick is not None and (device.index is None or torch._C._cuda_getDevice() == device.index):
            made = room[slot] = quick(size, stride, dtype)
        else:
            made = room[slot] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if zero:
            made.zero_()

    return act


def _again(func: Any, places: Any, made: list[int]) -> Callable[[Room], object]:
    def act(room: Room) -> None:
        args, kwargs = tree_map_only(_Slot, lambda slot: room[slot.number], places, is_leaf=_is_slot)
        for slot, tensor in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
            room[slot] = tensor

    return act


def _without_base(descriptor: TensorDescriptor) -> TensorDescriptor:
    pattern = copy.copy(descriptor)
    pattern.base = None
    return pattern


def _filled(pattern: TensorDescriptor | None, tensor: Tensor) -> Any:
    """The argument for a slot: the tensor, or a descriptor of it."""
    if pattern is None:
        return tensor
    made = copy.copy(pattern)
    made.base = tensor
    return made
