"""Builds the arguments of a plan's launches for a compiler, and binds launches to kinds of tensors.

The first run uses Triton's launcher; later runs use `direct.py` if it knows the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexmod.plan import Descriptor, Launch, Place, RunNumber, value_of, values_of
from flexmod.runtime import launch
from flexmod.runtime.direct import Direct, hooked
from flexmod.runtime.gluon import TensorDescriptor, layout_of

__all__ = ["BoundLaunch", "hooked", "sample"]

layout = lru_cache(layout_of)


def sample(step: Launch, tensors: Mapping[str, Tensor], extents: Mapping[str, int]) -> dict[str, Any]:
    """Returns the arguments of a launch as a compiler sees them, with stand-ins for missing tensors.

    `tensors` has the known tensors by name. A stand-in has the right dtype, on the same device, or on meta if
    no tensor is known. `extents` includes the numbers of a run.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device("meta"))

    def tensor_of(place: Place) -> Tensor:
        given = tensors.get(place.name)
        return torch.empty(1, dtype=place.dtype, device=device) if given is None else given

    made: dict[str, Any] = {}
    for name, value in {**step.arguments, **launch.rung_arguments(step)}.items():
        if isinstance(value, Descriptor):
            made[name] = _described(value, tensor_of(value.base), extents)
        elif isinstance(value, RunNumber):
            made[name] = extents[value.name]
        else:
            made[name] = tensor_of(value) if isinstance(value, Place) else value_of(value, extents)
    return made


class BoundLaunch:
    """A launch with computed grid and numbers."""

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

    def run(self, room: list[Any], mask: Any) -> None:
        if self._direct is not None:
            self._direct(room)
            return
        arguments = self._arguments(room)
        compiled = launch.start(self._step.source, self._step.name, self._device, self._grid, arguments)
        self._direct = self._made_direct(compiled, arguments)

    def watched(self, room: list[Any], mask: Any) -> None:
        arguments = self._arguments(room)
        launch.start(self._step.source, self._step.name, self._device, self._grid, arguments)

    def _arguments(self, room: list[Any]) -> dict[str, Any]:
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
        except (LookupError, AttributeError):  # an unknown launcher
            return None


def _describer(value: Descriptor, known: Mapping[str, int]) -> Callable[[Tensor], TensorDescriptor]:
    shape, strides = list(values_of(value.shape, known)), list(values_of(value.strides, known))
    block, of = list(value.block), layout(value.block, value.base.dtype)
    return lambda base: TensorDescriptor(base, shape, strides, block, of)


def _described(value: Descriptor, base: Tensor, known: Mapping[str, int]) -> TensorDescriptor:
    return _describer(value, known)(base)
