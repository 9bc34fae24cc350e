"""Attention written out: matmul, mod, mask, softmax, matmul, all in the dtype of its inputs.

In float64 it is the truth that the other files measure against; in a half dtype it is the yardstick of what
plain eager code reaches. A mod runs on whole tensors here: elementwise code broadcasts as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mods(NamedTuple):
    """One row of a table: what changes the scores, what rules them out, what of the captured is learned."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    learned: tuple[Tensor, ...] = ()


class Attention(NamedTuple):
    """out [B, Hq, M, Dv], lse [B, Hq, M], and the gradients of q, k and v, where they were asked for."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def attention(
    query: Tensor, key: Tensor, value: Tensor, mods: Mods, *, batch: int = 0, head: int = 0
) -> tuple[Tensor, Tensor]:
    """out and lse of `query [B, Hq, M, D]`, `key [B or 1, Hkv, N, D]`, `value [B or 1, Hkv, N, Dv]`.

    `batch` and `head` are the positions of the first batch and query head, for a slice of a larger problem.
    A row with nothing to attend to gives out 0 and lse -inf.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    positions = _positions(scores, batch, head)
    if mods.score_mod is not None:
        scores = mods.score_mod(scores, *positions).to(query.dtype)
    if mods.mask_mod is not None:
        scores = scores.masked_fill(~mods.mask_mod(*positions), -float("inf"))
    dead = (scores == -float("inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return weights @ value, torch.logsumexp(scores, -1)


def differentiated(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mods: Mods, *, batch: int = 0, head: int = 0
) -> Attention:
    """`attention` of detached inputs, with the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
    out, lse = attention(q, k, v, mods, batch=batch, head=head)
    gradients = torch.autograd.grad(out, (q, k, v), grad_out)
    return Attention(out.detach(), lse.detach(), *gradients)


def _positions(scores: Tensor, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    firsts = (batch, head, 0, 0)
    ranges = [
        torch.arange(first, first + size, device=scores.device)
        for first, size in zip(firsts, scores.shape, strict=True)
    ]
    b, h, q_idx, kv_idx = (
        x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(ranges)
    )
    return b, h, q_idx, kv_idx
