"""Kernels: one compiled attention, as the compiler hands it to the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from flexmod.codegen.mod_text import NO_CAPTURES, CaptureTexts, ModText, Parameter
from flexmod.codegen.render import parameters
from flexmod.codegen.spec import KernelName, KernelSpec, Tile, ladder


class Captured(NamedTuple):
    """What a mod closes over in one call: its tensors (`Traced.tensors`) and its promoted numbers."""

    tensors: Sequence[torch.Tensor] = ()
    numbers: Sequence[bool | int | float] = ()


NOTHING = Captured()


@dataclass(eq=False)
class Kernels:
    """A spec, the mods' texts, and the module that comes of them, built when it is first needed.

    `build(spec)` renders and loads the module. `grad` is the derivative of `score`, there when spec.backward;
    `captures` are those that make gradients of captured tensors as well. `exponent` is `score` as Hopper's
    forward has it.
    `options` are checked kernel_options. `interpreted`: Triton's interpreter runs the kernels on CPU tensors.
    """

    spec: KernelSpec
    build: Callable[[KernelSpec], ModuleType]
    score: ModText | None = None
    mask: ModText | None = None
    grad: ModText | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    interpreted: bool = False
    captures: CaptureTexts = NO_CAPTURES
    exponent: ModText | None = None

    @cached_property
    def module(self) -> ModuleType:
        return self.build(self.spec)

    @cached_property
    def tiles(self) -> dict[tuple[KernelName, torch.device], Tile]:
        """The tile that each kernel has settled on, on each device; the launcher keeps it."""
        return {}

    def ladder(self, kernel: KernelName) -> tuple[Tile, ...]:
        """The tiles to try; see `spec.ladder`."""
        if kernel not in self._ladders:
            by_column = any(mod is not None and mod.held_by_column for mod in (self.score, self.mask))
            waits = self.score is not None and self.score.waits_for_score
            self._ladders[kernel] = ladder(self.spec, kernel, self.options, by_column, waits)
        return self._ladders[kernel]

    def mod_arguments(
        self, kernel: KernelName | Literal["hopper_forward"], score: Captured, mask: Captured
    ) -> dict[str, object]:
        """The launch arguments that the mods of a kernel need, by name."""
        if kernel not in self._parameters:
            grad = self.captures.by_kernel(self.grad).get(kernel)
            own = (self.exponent,) if kernel == "hopper_forward" else (self.score, grad)
            self._parameters[kernel] = parameters(*own)
        values = {p.name: p.value(score.tensors, score.numbers) for p in self._parameters[kernel]}
        for p in self.mask.parameters if self.mask else ():
            values[p.name] = p.value(mask.tensors, mask.numbers)
        return values

    @cached_property
    def _ladders(self) -> dict[KernelName, tuple[Tile, ...]]:
        return {}

    @cached_property
    def _parameters(self) -> dict[str, tuple[Parameter, ...]]:
        """By kernel, those of the score_mod and of its derivative there."""
        return {}
