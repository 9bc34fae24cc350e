"""A plan bound to the kinds of its tensors: every size a number, every launch ready to go.

The first run launches by Triton's own launcher, later ones by `direct.py` where that knows how. A run that a
profiler or a TorchDispatchMode watches goes by the launchers and the functions that they see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexmod.internals.torch import current_device, dispatch_mode_count, quick_empty_strided
from flexmod.ir.traces import remember
from flexmod.ir.watched import UNCOUNTED, version_of
from flexmod.plan import (
    Allocate,
    Call,
    Descriptor,
    Extent,
    Keep,
    Launch,
    Place,
    Plan,
    RunNumber,
    View,
    extents_of,
    value_of,
)
from flexmod.runtime import launch
from flexmod.runtime.direct import Direct, hooked
from flexmod.runtime.gluon import layout_of

Tensors = tuple[Tensor | None, ...]
Room = list[Any]
"""What a run has: the tensors and the numbers that it was given, then the tensors that it makes."""

NO_EXTENTS: Mapping[str, int] = {}
KEPT = 16  # results of one step that a mask keeps

layout = lru_cache(layout_of)


class Bound:
    """A plan for tensors of these kinds and numbers of these (`direct.kind_of_number`), on their device."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[Tensor | None],
        device: torch.device,
        extents: Mapping[str, int] = NO_EXTENTS,
    ) -> None:
        known = {**extents_of(plan.inputs, tensors), **extents}
        self.plan = plan
        slots = _slots(plan)
        self._blank = [None] * (len(slots) - len(plan.inputs) - len(plan.numbers))
        steps = [_STEPS[type(step)](step, slots, known, device) for step in plan.steps]
        self._steps = [step.run for step in steps]
        self._watched = [step.watched for step in steps]
        self._results = [None if place is None else slots[place.name] for place in plan.results]

    def run(
        self,
        tensors: Sequence[Tensor | None],
        kept: dict[object, Any] | None = None,
        numbers: Sequence[bool | int | float] = (),
    ) -> Tensors:
        """The results for tensors and numbers of the plan's kinds. `kept`: the mask's memory, for `Keep`."""
        watched = dispatch_mode_count() or hooked()
        room: Room = [*tensors, *numbers, *self._blank]
        for step in self._watched if watched else self._steps:
            step(room, kept)
        return tuple([None if slot is None else room[slot] for slot in self._results])


def sample(step: Launch, tensors: Mapping[str, Tensor], extents: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of a launch as a compiler sees them: a tensor that is not given yet is one of its dtype.

    `tensors` are those given, by name.
    """
    device = next(iter(tensors.values())).device

    def tensor_of(place: Place) -> Tensor:
        given = tensors.get(place.name)
        return torch.empty(1, dtype=place.dtype, device=device) if given is None else given

    made: dict[str, Any] = {}
    for name, value in {**step.arguments, **launch.rung_arguments(step)}.items():
        if isinstance(value, Descriptor):
            made[name] = _described(value, tensor_of(value.base), extents)
        else:
            made[name] = tensor_of(value) if isinstance(value, Place) else value_of(value, extents)
    return made


def _slots(plan: Plan) -> dict[str, int]:
    """The places of a plan by name, numbered: a name that was taken is a mistake of who wrote the plan."""
    names = [f"nothing {number}" if place is None else place.name for number, place in enumerate(plan.inputs)]
    names += [number.name for number in plan.numbers]
    for step in plan.steps:
        if isinstance(step, Call):
            names += [place.name for place in step.makes if place is not None]
        elif isinstance(step, (Allocate, View)):
            names.append(step.place.name)
    assert len(set(names)) == len(names), f"two places of one name: {sorted(names)}"
    return {name: slot for slot, name in enumerate(names)}


def _numbers(extents: Sequence[Extent], known: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(value_of(extent, known) for extent in extents)


class _Allocated:
    def __init__(
        self, step: Allocate, slots: Mapping[str, int], known: Mapping[str, int], device: torch.device
    ) -> None:
        place = step.place
        self._slot, self._zeros = slots[place.name], step.zeros
        self._like = _numbers(place.shape, known), _numbers(place.strides, known)
        self._dtype, self._device = place.dtype, device
        self._quick = quick_empty_strided(device.type)

    def run(self, room: Room, kept: Any) -> None:
        index = self._device.index
        if self._quick is None or not (index is None or current_device() == index):
            self.watched(room, kept)
            return
        made = room[self._slot] = self._quick(*self._like, self._dtype)
        if self._zeros:
            made.zero_()

    def watched(self, room: Room, kept: Any) -> None:
        made = torch.empty_strided(*self._like, dtype=self._dtype, device=self._device)
        room[self._slot] = made.zero_() if self._zeros else made


class _Viewed:
    def __init__(
        self, step: View, slots: Mapping[str, int], known: Mapping[str, int], device: torch.device
    ) -> None:
        self._slot, self._of = slots[step.place.name], slots[step.of.name]
        self._like = _numbers(step.place.shape, known), _numbers(step.place.strides, known)
        self._offset = value_of(step.offset, known)

    def run(self, room: Room, kept: Any) -> None:
        of = room[self._of]
        room[self._slot] = of.as_strided(*self._like, of.storage_offset() + self._offset)

    watched = run


class _Launched:
    def __init__(
        self, step: Launch, slots: Mapping[str, int], known: Mapping[str, int], device: torch.device
    ) -> None:
        self._step, self._device = step, device
        self._grid = (value_of(step.grid, known),)
        self._fixed: dict[str, Any] = {}
        self._slots: dict[str, int] = {}
        self._descriptors: dict[str, Callable[[Tensor], TensorDescriptor]] = {}
        for name, value in {**step.arguments, **launch.rung_arguments(step)}.items():
            if isinstance(value, Descriptor):
                self._slots[name] = slots[value.base.name]
                self._descriptors[name] = _describer(value, known)
            elif isinstance(value, (Place, RunNumber)):
                self._slots[name] = slots[value.name]
            else:
                self._fixed[name] = value_of(value, known)
        self._direct: Direct | None = None

    def run(self, room: Room, kept: Any) -> None:
        if self._direct is not None:
            self._direct(room)
            return
        arguments = self._arguments(room)
        compiled = launch.start(self._step.source, self._step.name, self._device, self._grid, arguments)
        self._direct = self._made_direct(compiled, arguments)

    def watched(self, room: Room, kept: Any) -> None:
        arguments = self._arguments(room)
        launch.start(self._step.source, self._step.name, self._device, self._grid, arguments)

    def _arguments(self, room: Room) -> dict[str, Any]:
        given = {name: room[slot] for name, slot in self._slots.items()}
        described = {name: describe(given[name]) for name, describe in self._descriptors.items()}
        return {**self._fixed, **given, **described}

    def _made_direct(self, compiled: Any, arguments: Mapping[str, Any]) -> Direct | None:
        if compiled is None:
            return None
        names = getattr(self._step.source.module, self._step.name).arg_names
        try:
            values = [arguments[name] for name in names]
            places = {place: self._slots[name] for place, name in enumerate(names) if name in self._slots}
            return Direct(compiled, self._device, self._grid, values, places)
        except (LookupError, AttributeError):  # a launcher that is not known
            return None


class _Called:
    def __init__(
        self, step: Call, slots: Mapping[str, int], known: Mapping[str, int], device: torch.device
    ) -> None:
        self._function = step.function
        self._arguments = _filler(step.arguments, slots, known)
        self._slots = [None if place is None else slots[place.name] for place in step.makes]

    def run(self, room: Room, kept: Any) -> None:
        self._fill(room, self._function(*self._arguments(room)))

    watched = run

    def _fill(self, room: Room, made: Sequence[Tensor | None]) -> None:
        for slot, tensor in zip(self._slots, made, strict=True):
            if slot is not None:
                room[slot] = tensor


class _Kept(_Called):
    """A stream has its own results: another one could read them before they are written."""

    def __init__(
        self, step: Keep, slots: Mapping[str, int], known: Mapping[str, int], device: torch.device
    ) -> None:
        super().__init__(step, slots, known, device)
        self._device = device
        self._reads = [slots[place.name] for place in _places(step.arguments)]
        self._key = (step.function.__name__, _plain(step.arguments, known))

    def run(self, room: Room, kept: dict[object, Any] | None) -> None:
        versions = [version_of(room[slot]) for slot in self._reads]
        stream = 0
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():  # what a CUDA graph makes is the graph's
                kept = None
            else:
                stream = torch.cuda.current_stream(self._device).cuda_stream
        if kept is None or UNCOUNTED in versions:  # a write would not be seen
            super().run(room, kept)
            return
        key = (*self._key, stream, *versions)
        made = kept.get(key)
        if made is None:
            made = tuple(self._function(*self._arguments(room)))
            remember(kept, key, made, KEPT)
        self._fill(room, made)

    watched = run


_STEPS: dict[type, Any] = {
    Allocate: _Allocated, View: _Viewed, Launch: _Launched, Call: _Called, Keep: _Kept
}  # fmt: skip


def _filler(value: Any, slots: Mapping[str, int], known: Mapping[str, int]) -> Callable[[Room], Any]:
    """Fills the tensors of a room into nested arguments."""
    if isinstance(value, Place):
        slot = slots[value.name]
        return lambda room: room[slot]
    if type(value) in (list, tuple):
        kind, parts = type(value), [_filler(part, slots, known) for part in value]
        return lambda room: kind([part(room) for part in parts])
    if type(value) is dict:
        named = {key: _filler(part, slots, known) for key, part in value.items()}
        return lambda room: {key: part(room) for key, part in named.items()}
    number = value_of(value, known)
    return lambda room: number


def _places(value: Any) -> list[Place]:
    if isinstance(value, Place):
        return [value]
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [place for part in parts for place in _places(part)]


def _plain(value: Any, known: Mapping[str, int]) -> object:
    """Nested arguments without their tensors, as a key."""
    if isinstance(value, Place):
        return None
    if type(value) in (list, tuple):
        return tuple(_plain(part, known) for part in value)
    return value_of(value, known)


def _describer(value: Descriptor, known: Mapping[str, int]) -> Callable[[Tensor], TensorDescriptor]:
    shape, strides = list(_numbers(value.shape, known)), list(_numbers(value.strides, known))
    block, of = list(value.block), layout(value.block, value.base.dtype)
    return lambda base: TensorDescriptor(base, shape, strides, block, of)


def _described(value: Descriptor, base: Tensor, known: Mapping[str, int]) -> TensorDescriptor:
    return _describer(value, known)(base)
