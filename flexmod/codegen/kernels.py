"""The kernels of one compiled attention. The compiler passes them to the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from flexmod.codegen.choose import Limits
from flexmod.codegen.mod_text import NO_CAPTURES, CaptureTexts, ModText
from flexmod.codegen.spec import KernelName, KernelSpec, Tile, ladder
from flexmod.codegen.watch import IndexWatch
from flexmod.plan import Place


class Captured(NamedTuple):
    """A mod's captures in a plan: its tensors (`Traced.tensors`), as places, and its promoted numbers.

    `watch` is set for kernels that check the indices into the tensors.
    """

    tensors: Sequence[Place] = ()
    numbers: Sequence[bool | int | float] = ()
    watch: IndexWatch | None = None

    def arguments(self, text: ModText) -> dict[str, object]:
        """The launch arguments for a text's parameters, by name."""
        given = {p.name: p.value(self.tensors, self.numbers) for p in text.parameters if p.kind != "found"}
        if text.checks:
            assert self.watch is not None
            (name,) = (p.name for p in text.parameters if p.kind == "found")
            given[name] = self.watch.room(text.checks, self.tensors)
        return given


NOTHING = Captured()


class Made(Protocol):
    """The kernels of a family for one direction of a variant, as launches and the choice of tiles use them.

    `rungs`: the classes of its tiles, dataclasses of plain numbers. `tiles`: each kernel's chosen rung on
    each device, or why there is none; the launcher fills it.
    """

    family: ClassVar[str]
    limits: ClassVar[Limits]
    rungs: ClassVar[tuple[type, ...]]

    @property
    def spec(self) -> KernelSpec: ...

    @property
    def interpreted(self) -> bool: ...

    @property
    def module(self) -> ModuleType: ...

    @property
    def tiles(self) -> dict[tuple[str, torch.device], Any]: ...

    def ladder(self, kernel: Any) -> tuple[Any, ...]:
        """The rungs to try for a kernel, best first."""


@dataclass(eq=False)
class Kernels:
    """A spec, the mods' texts, and the module that is built from them at its first use.

        build           renders and loads the module for a spec
        grad            the derivative of `score`, if spec.backward
        captures        the derivatives that also compute gradients of captured tensors
        exponent        `score` as the exponent of a forward's weights, see `ir/exponents.py`
        options         validated kernel_options

    `interpreted`: Triton's interpreter runs the kernels on CPU tensors.
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

    family: ClassVar[str] = "portable"
    limits: ClassVar[Limits] = Limits(passing=64)
    rungs: ClassVar[tuple[type, ...]] = (Tile,)

    @cached_property
    def module(self) -> ModuleType:
        return self.build(self.spec)

    @property
    def kept(self) -> tuple[str, ...]:
        """The forward's arguments for tensors that a backward needs besides the lse, [B, Hq, M] float32 each.

        The same for each score_mod: if a number becomes an argument later, the backward is another one.
        """
        return ("ROW_MAX", "TOTAL") if self.spec.exact else ("ROW_MAX", "REST")

    @property
    def small_scores(self) -> bool:
        """Are scores small for all operands? Then the backward needs only the lse."""
        return self.score is not None and self.score.small

    @cached_property
    def tiles(self) -> dict[tuple[str, torch.device], Any]:
        """See `Made`."""
        return {}

    def ladder(self, kernel: KernelName) -> tuple[Tile, ...]:
        """The tiles to try; see `spec.ladder`."""
        if kernel not in self._ladders:
            by_column = any(mod is not None and mod.held_by_column for mod in (self.score, self.mask))
            waits = self.score is not None and self.score.waits_for_score
            self._ladders[kernel] = ladder(self.spec, kernel, self.options, by_column, waits)
        return self._ladders[kernel]

    def mod_arguments(
        self, kernel: KernelName, score: Captured, mask: Captured, *, exponent: bool = False
    ) -> dict[str, object]:
        """The launch arguments that the mods of a kernel need, by name.

        `exponent`: the kernel computes the exponent in place of the score.
        """
        grad = self.captures.by_kernel(self.grad).get(kernel)
        own = (self.exponent,) if exponent else (self.score, grad)
        values: dict[str, object] = {}
        for text, captured in (*((text, score) for text in own), (self.mask, mask)):
            if text is not None:
                values |= captured.arguments(text)
        return values

    @cached_property
    def _ladders(self) -> dict[KernelName, tuple[Tile, ...]]:
        return {}
