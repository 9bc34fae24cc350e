"""The kernels that build the block masks of one mask_mod, as the compiler hands them to their launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from flexmod.codegen.builder_text import BoundsText, BuilderTerm
from flexmod.codegen.kernels import Captured
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.watch import Watch
from flexmod.plan import Place

Numbers = Sequence[bool | int | float]


@dataclass(eq=False)
class BuilderKernels:
    """The texts, and the module that comes of them, built when it is first needed."""

    terms: tuple[BuilderTerm, ...]
    bounds: BoundsText
    mask: ModText
    build: Callable[[], ModuleType]

    @cached_property
    def module(self) -> ModuleType:
        return self.build()

    def texts(self, kernel: str) -> list[tuple[int, ModText]]:
        """The texts that a kernel calls, by their numbers: the bounds, the mask, then the terms."""
        texts = [self.bounds.text, self.mask, *(term.text for term in self.terms)]
        first, stop = {"terms_kernel": (2, None), "squares_kernel": (0, 2), "elements_kernel": (1, 2)}[kernel]
        return list(enumerate(texts))[first:stop]


@dataclass(frozen=True, eq=False)
class Builder:
    """The kernels for one graph, and the numbers that their parameters take: those of each text in turn."""

    kernels: BuilderKernels
    numbers: tuple[Numbers, ...]

    def captured(self, kernel: str, tensors: Sequence[Place], watch: Watch | None) -> dict[str, object]:
        """The launch arguments that a kernel's texts need, by name. `watch`: for kernels that check."""
        given: dict[str, object] = {}
        for number, text in self.kernels.texts(kernel):
            given |= Captured(tensors, self.numbers[number], watch).arguments(text)
        return given
