"""Computes block-sparse attention on the CPU, the default for CPU tensors.

`flash` runs torch's flash attention for each step of the mask's tiles. It serves calls without a score mod,
or with one that adds a bias to the score. `blocks`, in plain torch, serves all other calls:

    any other score mod; the largest scores; gradients of captured tensors; scores too large for one lse; a
    mask with queries or keys that are not finite; a torch without that operation
"""

from __future__ import annotations

from torch import Tensor

from flexmod.backends import blocks, flash
from flexmod.backends.bias import added_to_score
from flexmod.backends.interface import BackwardInputs, Forward, Gradients, Problem
from flexmod.runtime.private_torch import flash_on_cpu


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `interface`. Computes half precision in float32 and rounds at the end."""
    found = flash.forward(problem, q, k, v) if serves(problem) else None
    if found is None:
        return blocks.forward(problem, q, k, v, want_max=want_max)
    return found._replace(max_scores=blocks.largest_scores(problem, q, k)) if want_max else found


def backward(problem: Problem, given: BackwardInputs, needs: tuple[bool, bool, bool]) -> Gradients:
    """Runs a backward, see `interface`. Two runs agree bit for bit."""
    by_flash = problem.capture_grad is None and serves(problem)
    found = flash.backward(problem, given, needs) if by_flash else None
    return blocks.backward(problem, given, needs) if found is None else found


def serves(problem: Problem) -> bool:
    """Returns whether flash attention computes this variant."""
    added = problem.score is None or added_to_score(problem.score.graph) is not None
    return added and flash_on_cpu() is not None
