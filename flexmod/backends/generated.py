"""The generated kernels as a backend: a problem's mods are compiled, then launched by `triton.py`.

Two of them: ON_GPU, and INTERPRETED, the very same kernels in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexmod.backends import triton
from flexmod.backends.interface import Forward, Gradients, Problem
from flexmod.codegen.kernels import Captured, Kernels
from flexmod.compiler import Mod, compile_mod, kernels_for


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
        kernels, score, mask = self._compile(problem, q, k, v, backward=False)
        return triton.forward(
            kernels, q, k, v, scale=problem.scale, mask=problem.mask, want_max=want_max, keep=keep,
            score_captured=score, mask_captured=mask,
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
        kernels, score, mask = self._compile(problem, q, k, v, backward=True)
        return triton.backward(
            kernels, q, k, v, out, lse, grad_out, grad_lse, needs, kept, scale=problem.scale,
            mask=problem.mask, score_captured=score, mask_captured=mask,
        )  # fmt: skip

    def _compile(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, backward: bool
    ) -> tuple[Kernels, Captured, Captured]:
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
        kernels = kernels_for(
            spec,
            score.lowered if score else None,
            mask.lowered if mask else None,
            problem.options,
            self.interpreted,
        )
        return kernels, score_captured, mask_captured


def _captured(mod: Mod, tensors: tuple[Tensor, ...]) -> Captured:
    return Captured(tuple(t.detach() for t in tensors), mod.numbers)


ON_GPU = Generated(interpreted=False)
INTERPRETED = Generated(interpreted=True)
