"""The generated kernels as a backend: a problem's mods are compiled, then launched by `triton.py`.

Two of them: ON_GPU, and INTERPRETED, the very same kernels in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexmod.backends import triton
from flexmod.backends.captured import Sums, gradients
from flexmod.backends.interface import Forward, Gradients, Problem
from flexmod.codegen.kernels import Captured, Kernels
from flexmod.compiler import Mod, capture_terms, compile_mod, kernels_for
from flexmod.ir.passes import Extents


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
        return triton.forward(
            compiled.kernels, q, k, v, scale=problem.scale, mask=problem.mask, want_max=want_max, keep=keep,
            score_captured=compiled.score_captured, mask_captured=compiled.mask_captured,
        )  # fmt: skip

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
        found = triton.backward(
            compiled.kernels, q, k, v, out, lse, grad_out, grad_lse, needs, kept, scale=problem.scale,
            mask=problem.mask, score_captured=compiled.score_captured, mask_captured=compiled.mask_captured,
        )  # fmt: skip
        return Gradients(found.query, found.key, found.value, compiled.capture_gradients(found.sums))

    def _compile(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> _Compiled:
        extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        score = mask = None
        score_captured = mask_captured = Captured()
        if problem.score is not None:
            score = compile_mod(problem.score.graph, extents)
            score_captured = _captured(score, problem.score.tensors)
        if problem.mask is not None:
            mask = compile_mod(problem.mask.traced.graph, extents)
            mask_captured = _captured(mask, problem.mask.traced.tensors)
        spec = triton.kernel_spec(
            q, k, v, problem.mask, scale=problem.scale, precision=problem.precision, backward=backward
        )
        wanted = tuple(sorted(set(problem.capture_grad.loads))) if problem.capture_grad else ()
        kernels = kernels_for(
            spec,
            score.lowered if score else None,
            mask.lowered if mask else None,
            problem.options,
            self.interpreted,
            wanted,
        )
        return _Compiled(kernels, score, score_captured, mask_captured, wanted, extents)


@dataclass(frozen=True)
class _Compiled:
    """A call's kernels and what its mods close over; `wanted` are the captures that get gradients."""

    kernels: Kernels
    score: Mod | None
    score_captured: Captured
    mask_captured: Captured
    wanted: tuple[int, ...]
    extents: Extents

    def capture_gradients(self, sums: Sums) -> tuple[Tensor | None, ...]:
        """See `interface.Gradients`."""
        if not self.wanted:
            return ()
        assert self.score is not None and self.score.lowered.score is not None
        graph = self.score.lowered.score
        terms = capture_terms(graph, self.wanted)
        return gradients(
            graph, terms, sums, self.score_captured.tensors, self.score_captured.numbers, self.extents
        )


def _captured(mod: Mod, tensors: tuple[Tensor, ...]) -> Captured:
    return Captured(tuple(t.detach() for t in tensors), mod.numbers)


ON_GPU = Generated(interpreted=False)
INTERPRETED = Generated(interpreted=True)
