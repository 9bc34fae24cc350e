"""Binds a plan to the kinds of its tensors: computes all sizes and prepares all launches.

If a profiler or a TorchDispatchMode watches a run, it uses launchers and functions that they see. A plan
without launches does not need Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask.storage import is_captured
from flexmod.ir.fingerprint import remember
from flexmod.ir.watched import UNCOUNTED, version_of
from flexmod.runtime.plan import (
    MASK,
    Allocate,
    Binding,
    Call,
    Keep,
    Launch,
    Place,
    Plan,
    View,
    extents_of,
    value_of,
    values_of,
)
from flexmod.runtime.private_torch import current_device, dispatch_mode_count, quick_empty_strided

Tensors = tuple[Tensor | None, ...]
Room = list[Any]
"""What a run has: the tensors and the numbers that it was given, then the tensors that it makes."""

NO_EXTENTS: Mapping[str, int] = {}
KEPT = 16  # results of one step in a mask's cache


class Bound:
    """A plan for tensors and numbers of fixed kinds (see `direct.kind_of_number`), on one device."""

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
        kinds, self._hooked = _STEPS, lambda: False
        if plan.launches():
            from flexmod.runtime.direct import hooked
            from flexmod.runtime.launch import BoundLaunch

            kinds, self._hooked = {**_STEPS, Launch: BoundLaunch}, hooked
        to = Binding(slots, known, device)
        steps = [kinds[type(step)](step, to) for step in plan.steps]
        self._steps = [step.run for step in steps]
        self._watched = [step.watched for step in steps]
        self._results = [None if place is None else slots[place.name] for place in plan.results]

    def run(
        self, tensors: Sequence[Tensor | None], mask: Any = None, numbers: Sequence[bool | int | float] = ()
    ) -> Tensors:
        """Runs the plan on tensors and numbers of its kinds; `mask`: the snapshot with the mask's tensors."""
        if mask is not None:
            mask.storage.wait()
        watched = dispatch_mode_count() or self._hooked()
        room: Room = [*tensors, *numbers, *self._blank]
        for step in self._watched if watched else self._steps:
            step(room, mask)
        return tuple([None if slot is None else room[slot] for slot in self._results])


def _slots(plan: Plan) -> dict[str, int]:
    """Numbers the places of a plan by name; asserts that each name occurs once."""
    names = [f"nothing {number}" if place is None else place.name for number, place in enumerate(plan.inputs)]
    names += [number.name for number in plan.numbers]
    for step in plan.steps:
        if isinstance(step, Call):
            names += [place.name for place in step.makes if place is not None]
        elif isinstance(step, (Allocate, View)):
            names.append(step.place.name)
    assert len(set(names)) == len(names), f"two places of one name: {sorted(names)}"
    return {name: slot for slot, name in enumerate(names)}


class _Allocated:
    def __init__(self, step: Allocate, to: Binding) -> None:
        place = step.place
        self._slot, self._zeros = to.slots[place.name], step.zeros
        self._like = values_of(place.shape, to.extents), values_of(place.strides, to.extents)
        self._dtype, self._device = place.dtype, to.device
        self._quick = quick_empty_strided(to.device.type)

    def run(self, room: Room, mask: Any) -> None:
        index = self._device.index
        if self._quick is None or not (index is None or current_device() == index):
            self.watched(room, mask)
            return
        made = room[self._slot] = self._quick(*self._like, self._dtype)
        if self._zeros:
            made.zero_()

    def watched(self, room: Room, mask: Any) -> None:
        made = torch.empty_strided(*self._like, dtype=self._dtype, device=self._device)
        room[self._slot] = made.zero_() if self._zeros else made


class _Viewed:
    def __init__(self, step: View, to: Binding) -> None:
        self._slot, self._of = to.slots[step.place.name], to.slots[step.of.name]
        self._like = values_of(step.place.shape, to.extents), values_of(step.place.strides, to.extents)
        self._offset = value_of(step.offset, to.extents)

    def run(self, room: Room, mask: Any) -> None:
        of = room[self._of]
        room[self._slot] = of.as_strided(*self._like, of.storage_offset() + self._offset)

    watched = run


class _Called:
    def __init__(self, step: Call, to: Binding) -> None:
        self._function = step.function
        self._arguments = _filler(step.arguments, to)
        self._slots = [None if place is None else to.slots[place.name] for place in step.makes]

    def run(self, room: Room, mask: Any) -> None:
        self._fill(room, self._function(*self._arguments(room, mask)))

    watched = run

    def _fill(self, room: Room, made: Sequence[Tensor | None]) -> None:
        for slot, tensor in zip(self._slots, made, strict=True):
            if slot is not None:
                room[slot] = tensor


class _Kept(_Called):
    """A `Keep` step. Each stream has its own results, since another stream could read them too early."""

    def __init__(self, step: Keep, to: Binding) -> None:
        super().__init__(step, to)
        self._device = to.device
        parts = [*_parts(step.arguments)]
        self._reads = [to.slots[part.name] for part in parts if isinstance(part, Place)]
        plain = (None if isinstance(part, Place) else value_of(part, to.extents) for part in parts)
        self._key = (step.function.__name__, *plain)

    def run(self, room: Room, mask: Any) -> None:
        versions = [version_of(room[slot]) for slot in self._reads]
        # results of a CUDA graph belong to the graph; without a version, a write stays unseen
        if mask is None or is_captured(self._device) or UNCOUNTED in versions:
            super().run(room, mask)
            return
        stream, kept = 0, mask.derived
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device).cuda_stream
        key = (*self._key, stream, *versions)
        made = kept.get(key)
        if made is None:
            made = tuple(self._function(*self._arguments(room, mask)))
            remember(kept, key, made, KEPT)
        self._fill(room, made)

    watched = run


_STEPS: dict[type, Any] = {
    Allocate: _Allocated, View: _Viewed, Call: _Called, Keep: _Kept
}  # fmt: skip


def _filler(value: Any, to: Binding) -> Callable[[Room, Any], Any]:
    """Returns a function that puts a run's tensors and mask into nested arguments."""
    if isinstance(value, Place):
        slot = to.slots[value.name]
        return lambda room, mask: room[slot]
    if value is MASK:
        return lambda room, mask: mask
    if type(value) in (list, tuple):
        kind, parts = type(value), [_filler(part, to) for part in value]
        return lambda room, mask: kind([part(room, mask) for part in parts])
    if type(value) is dict:
        named = {key: _filler(part, to) for key, part in value.items()}
        return lambda room, mask: {key: part(room, mask) for key, part in named.items()}
    number = value_of(value, to.extents)
    return lambda room, mask: number


def _parts(value: Any) -> Iterator[Any]:
    """Yields nested arguments one after another."""
    if type(value) in (list, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value
