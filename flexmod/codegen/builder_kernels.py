"""The kernels that build the block masks of one mask_mod. The compiler passes them to their launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

from flexmod.codegen.builder_text import BoundsText, BuilderTerm
from flexmod.codegen.kernels import Captured
from flexmod.codegen.mod_text import ModText, Parameter
from flexmod.codegen.watch import IndexWatch
from flexmod.plan import Place, RunNumber

Numbers = Sequence[bool | int | float]


@dataclass(eq=False)
class BuilderKernels:
    """The texts, and the module that is built from them at its first use."""

    terms: tuple[BuilderTerm, ...]
    bounds: BoundsText
    mask: ModText
    build: Callable[[], ModuleType]

    @cached_property
    def module(self) -> ModuleType:
        return self.build()

    def texts(self, kernel: str) -> list[ModText]:
        """The texts that a kernel calls, in order: the bounds, the mask, then the terms."""
        first, stop = {"terms_kernel": (2, None), "squares_kernel": (0, 2), "elements_kernel": (1, 2)}[kernel]
        return self._texts[first:stop]

    @cached_property
    def _texts(self) -> list[ModText]:
        return [self.bounds.text, self.mask, *(term.text for term in self.terms)]

    @cached_property
    def number_parameters(self) -> tuple[tuple[int, Parameter], ...]:
        """The parameters for numbers, each with the place of its text."""
        return tuple(
            (place, p) for place, text in enumerate(self._texts) for p in text.parameters if p.is_number
        )

    @cached_property
    def numbers(self) -> tuple[RunNumber, ...]:
        """The steps of a plan that supply `number_parameters`."""
        return tuple(RunNumber(parameter.name) for _, parameter in self.number_parameters)

    def captured(self, kernel: str, tensors: Sequence[Place], watch: IndexWatch | None) -> dict[str, object]:
        """The launch arguments that a kernel's texts need, by name. `watch`: for kernels that check."""
        given: dict[str, object] = {}
        for text in self.texts(kernel):
            others = tuple(p for p in text.parameters if not p.is_number)
            given |= Captured(tensors, (), watch).arguments(replace(text, parameters=others))
            given |= {p.name: RunNumber(p.name) for p in text.parameters if p.is_number}
        return given


@dataclass(frozen=True, eq=False)
class Builder:
    """The kernels for one graph, and their parameters' numbers, text by text."""

    kernels: BuilderKernels
    numbers: tuple[Numbers, ...]

    def run_numbers(self) -> list[bool | int | float]:
        """The values that a run passes for `BuilderKernels.numbers`."""
        return [parameter.number(self.numbers[place]) for place, parameter in self.kernels.number_parameters]
