"""The generated kernels as a backend: a problem's mods are compiled, then launched.

By `hopper.py` where the kernels made for that chip can run, else by `triton.py`, which runs them all. Two
backends: ON_GPU, and INTERPRETED, the very same kernels in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexmod import config
from flexmod.backends import hopper, triton
from flexmod.backends.captured import Sums, gradients
from flexmod.backends.interface import Forward, Gradients, Problem
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.codegen.hopper import Way, hopper_kernels, template, why_portable
from flexmod.codegen.kernels import Captured, Kernels
from flexmod.codegen.spec import KernelSpec, option
from flexmod.codegen.watch import Watch
from flexmod.compiler import Mod, capture_terms, compile_mod, kernels_for
from flexmod.errors import HopperTemplateError
from flexmod.ir.passes import Extents
from flexmod.runtime import tuned
from flexmod.runtime.tape import Repeated
from flexmod.runtime.target import family_of, target_of


@dataclass(frozen=True)
class Generated:
    """A backend in the sense of `interface.py`."""

    interpreted: bool

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        want_max: bool,
        keep: list[Tensor] | None = None,
    ) -> Forward:
        compiled = self._compile(problem, q, k, v, backward=False)
        given = {**compiled.arguments, "want_max": want_max}
        found = None
        if self._for_hopper("forward", compiled, q, k, v):
            try:
                found = hopper.forward(hopper_kernels(compiled.kernels), q, k, v, keep=keep, **given)
            except hopper.NoShape as none:
                _portable("forward", compiled.kernels, str(none))
        if found is None:
            found = triton.forward(compiled.kernels, q, k, v, keep=keep, **given)
        compiled.look()
        return found

    def backward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs: tuple[bool, bool, bool],
        kept: tuple[Tensor, ...] = (),
    ) -> Gradients:
        compiled = self._compile(problem, q, k, v, backward=True)
        tensors, given = (q, k, v, out, lse, grad_out, grad_lse, needs), compiled.arguments
        found = None
        if self._for_hopper("backward", compiled, q, k, v):
            try:
                own = replace(compiled, fused=True) if compiled.wanted else compiled
                found = hopper.backward(hopper_kernels(own.kernels), *tensors, kept, **given)
                compiled = own
            except hopper.NoShape as none:
                _portable("backward", compiled.kernels, str(none))
        if found is None:
            found = triton.backward(compiled.kernels, *tensors, kept, **given)
        compiled.look()
        return Gradients(found.query, found.key, found.value, compiled.capture_gradients(found.sums))

    @staticmethod
    def repeated() -> Repeated:
        """What records and plays a direction of a call."""
        return Repeated()

    def _for_hopper(self, way: Way, compiled: _Compiled, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Do the kernels made for Hopper take this call?"""
        kernels = compiled.kernels
        target = "Triton's interpreter" if self.interpreted else target_of(q.device).name
        why = why_portable(
            kernels.spec, way, target, kernels.options,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        if why is None:
            why = hopper.call_obstacle(q, k, v, compiled.mask if way == "backward" else None)
        if why is not None:
            _portable(way, kernels, why)
        return why is None

    def _compile(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> _Compiled:
        extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        watch = Watch(extents[2:], q.device) if config.check_bounds() else None
        score = mask = None
        score_captured = mask_captured = Captured()
        if problem.score is not None:
            score = compile_mod(problem.score.graph, extents)
            score_captured = Captured(problem.score.tensors, score.numbers, watch)
        if problem.mask is not None:
            mask = compile_mod(problem.mask.traced.graph, extents)
            mask_captured = Captured(problem.mask.traced.tensors, mask.numbers, watch)
        spec = triton.kernel_spec(
            q, k, v, problem.mask, scale=problem.scale, precision=problem.precision, backward=backward
        )
        wanted = tuple(sorted(set(problem.capture_grad.loads))) if problem.capture_grad else ()
        lowered = (score.lowered if score else None, mask.lowered if mask else None)
        family = "" if self.interpreted else family_of(target_of(q.device).name)

        def make(fused: bool) -> Kernels:
            return kernels_for(spec, *lowered, problem.options, self.interpreted, wanted, fused, family)

        given = (problem.scale, problem.mask, score_captured, mask_captured)
        if option(dict(problem.options), "dq" if backward else "forward", "tuned", False):
            self._tune(problem, spec, [make(fused) for fused in (False, True)], q.device)
        return _Compiled(make, score, *given, wanted, extents, watch)

    def _tune(
        self, problem: Problem, spec: KernelSpec, kernels: Sequence[Kernels], device: torch.device
    ) -> None:
        """Have kernels run with the tiles that were found for them; raises where none were."""
        key = tuned.Key(
            "backward" if spec.backward else "forward",
            tuned.device_name(device, self.interpreted),
            spec,
            problem.score.graph if problem.score else None,
            problem.mask.traced.graph if problem.mask else None,
        )
        for each in kernels:
            tuned.apply(each, key, device)


@dataclass(frozen=True)
class _Compiled:
    """A call's kernels and what its mods close over.

    `make(fused)` makes the kernels; `wanted` are the captures that get gradients, and `fused` says that
    Hopper's backward makes them. `watch` is there where the kernels check indices.
    """

    make: Callable[[bool], Kernels]
    score: Mod | None
    scale: float
    mask: MaskSnapshot | None
    score_captured: Captured
    mask_captured: Captured
    wanted: tuple[int, ...]
    extents: Extents
    watch: Watch | None
    fused: bool = False

    @cached_property
    def kernels(self) -> Kernels:
        return self.make(self.fused)

    @property
    def arguments(self) -> dict[str, Any]:
        """What every launch is given."""
        names = ("scale", "mask", "score_captured", "mask_captured")
        return {name: getattr(self, name) for name in names}

    def look(self) -> None:
        """Raises CaptureBoundsError where kernels that check found something."""
        if self.watch is not None:
            self.watch.look()

    def capture_gradients(self, sums: Sums) -> tuple[Tensor | None, ...]:
        """See `interface.Gradients`."""
        if not self.wanted:
            return ()
        assert self.score is not None and self.score.lowered.score is not None
        graph = self.score.lowered.score
        terms = capture_terms(graph, self.wanted, self.fused)
        return gradients(
            graph, terms, sums, self.score_captured.tensors, self.score_captured.numbers, self.extents
        )


def _portable(way: Way, kernels: Kernels, why: str) -> None:
    """Says that the portable template runs, or raises where the options insist on Hopper's."""
    if template(kernels.options, way) == "hopper":
        raise HopperTemplateError(way=way, why=why)
    if config.debug_level() >= 1:
        print(f"flexmod: {way} on the portable template: {why}", file=sys.stderr)


ON_GPU = Generated(interpreted=False)
INTERPRETED = Generated(interpreted=True)
