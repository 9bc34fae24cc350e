"""The kernels that build the block masks of one mask_mod, as the compiler hands them to their launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from torch import Tensor

from flexmod.codegen.builder_text import BoundsText, BuilderTerm
from flexmod.codegen.mod_text import ModText, Parameter
from flexmod.codegen.render import parameters

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

    @cached_property
    def by_kernel(self) -> dict[str, list[tuple[Parameter, int]]]:
        """The parameters that a kernel's texts need, and the text that each belongs to.

        Texts are numbered: the bounds, the mask, then the terms.
        """
        owners = [self.bounds.text, self.mask, *(term.text for term in self.terms)]
        wanted = {"terms_kernel": owners[2:], "squares_kernel": owners[:2], "elements_kernel": owners[1:2]}
        return {
            kernel: [
                (p, next(i for i, text in enumerate(owners) if p in text.parameters))
                for p in parameters(*texts)
            ]
            for kernel, texts in wanted.items()
        }


@dataclass(frozen=True, eq=False)
class Builder:
    """The kernels for one graph, and the numbers that their parameters take: those of each text in turn."""

    kernels: BuilderKernels
    numbers: tuple[Numbers, ...]

    def captured(self, kernel: str, tensors: Sequence[Tensor]) -> dict[str, object]:
        """The launch arguments that a kernel's texts need, by name."""
        wanted = self.kernels.by_kernel[kernel]
        return {p.name: p.value(tensors, self.numbers[owner]) for p, owner in wanted}
