"""Computes dense attention in plain differentiable torch, as the reference for tests.

It is slow and takes any float dtype and any device. torch's autograd computes gradients of every order, also
of captured tensors. It needs memory for several copies of the whole score matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.backends.heads import in_order_of
from flexmod.backends.interface import Forward, Problem
from flexmod.backends.tiles import element_table
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.block_mask.tiles import FULL, PARTIAL
from flexmod.ir.evaluate import evaluate


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `interface`, in float32, or in float64 if q is float64."""
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    key, value = (x.to(real).repeat_interleave(group, 1) for x in (k, v))
    scores = problem.scale * (q.to(real) @ key.mT)
    scores = modified(problem, scores)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    alive = scores.masked_fill(dead, 0.0)
    weights = torch.softmax(alive, -1).masked_fill(dead, 0.0)
    lse = torch.logsumexp(alive, -1).masked_fill(dead.squeeze(-1), -torch.inf)
    largest = scores.detach().amax(-1) if want_max else None
    return Forward(in_order_of((weights @ value).to(q.dtype), q), lse, largest)


def modified(problem: Problem, scores: Tensor) -> Tensor:
    """Applies the score mod and the mask to scores [B, Hq, M, N], in their dtype, float32 or float64."""
    keep = None if problem.mask is None else _allowed(problem.mask, scores.shape, scores.device)
    if problem.score is not None:
        # The mod's derivative may be infinite where the mask is False; 0 * inf must not reach q and k.
        seen = scores if keep is None else torch.where(keep, scores, scores.detach())
        b, h, q_idx, kv_idx = _positions(scores.shape, scores.device)
        (result,) = evaluate(
            problem.score.graph, problem.score.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx,
            score=seen, real=scores.dtype,
        )  # fmt: skip
        scores = result.expand(scores.shape)
    return scores if keep is None else torch.where(keep, scores, -torch.inf)


def _allowed(mask: MaskSnapshot, shape: torch.Size, device: torch.device) -> Tensor:
    """Returns the mask as a bool tensor that broadcasts to `shape` [B, Hq, M, N]."""
    tiles = element_table(mask, shape[2], shape[3])
    b, h, q_idx, kv_idx = _positions(shape, device)
    (said,) = evaluate(mask.traced.graph, mask.traced.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
    return (tiles == FULL) | ((tiles == PARTIAL) & said)


def _positions(shape: torch.Size, device: torch.device) -> list[Tensor]:
    """Returns b, h, q_idx and kv_idx, each along its own dimension of `shape`."""
    views = [[-1 if dim == own else 1 for dim in range(4)] for own in range(4)]
    return [torch.arange(size, device=device).view(view) for size, view in zip(shape, views, strict=True)]
