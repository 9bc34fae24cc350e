"""Computes dense attention in plain differentiable torch, as the reference for tests.

It is slow and takes any float dtype and any device. torch's autograd computes gradients of every order, also
of captured tensors. It needs memory for several copies of the whole score matrix.

Heads are laid out by the keys that they share:

    [Z, G, length, dim]     Z: heads of the keys, one for each batch unless the batches share them
                            G: the query heads, over all batches, that share these keys

Keys and values are [Z, length, dim]. So batched products run over Z for any ratio of heads. A product also
sums key gradients over a group of heads, or over a batch that shares its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from flexmod.backends.arguments import dtype_of_sums, order_of
from flexmod.backends.interface import Forward, Problem
from flexmod.backends.tiles import element_table
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.block_mask.tiles import FULL, PARTIAL
from flexmod.ir.evaluate import evaluate


@dataclass(frozen=True)
class Heads:
    """The layout of one call. `real` is the dtype of its computation."""

    batch: int
    query_heads: int
    key_batch: int
    key_heads: int
    real: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Heads:
        """Returns the layout for q [B, Hq, M, D] and k [B or 1, Hkv, N, D]."""
        return cls(q.shape[0], q.shape[1], k.shape[0], k.shape[1], dtype_of_sums(q.dtype), q.device)

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes Z and G."""
        z = self.key_batch * self.key_heads
        return z, self.batch * self.query_heads // z

    def split_query(self, x: Tensor) -> Tensor:
        """Returns [B, Hq, ...] as contiguous [Z, G, ...] in `real`."""
        return self.group(x).to(self.real).contiguous()

    def split_key(self, x: Tensor) -> Tensor:
        """Returns [B or 1, Hkv, ...] as contiguous [Z, ...] in `real`."""
        return x.flatten(0, 1).to(self.real).contiguous()

    def join_query(self, x: Tensor) -> Tensor:
        """Returns [Z, G, ...] as [B, Hq, ...]."""
        lead, rest = self.batch // self.key_batch, x.shape[2:]
        if lead == 1:
            return x.reshape(self.batch, self.query_heads, *rest)
        x = x.reshape(self.key_batch, self.key_heads, lead, -1, *rest).movedim(2, 1)
        return x.reshape(self.batch, self.query_heads, *rest)

    def join_key(self, x: Tensor) -> Tensor:
        """Returns [Z, ...] as [B or 1, Hkv, ...]."""
        return x.unflatten(0, (self.key_batch, self.key_heads))

    def positions(self) -> tuple[Tensor, Tensor]:
        """Returns b and h of each query head, both int64 [Z, G]."""
        b = torch.arange(self.batch, device=self.device)[:, None].expand(-1, self.query_heads)
        h = torch.arange(self.query_heads, device=self.device).expand(self.batch, -1)
        return self.group(b), self.group(h)

    def where(self, b: int | None, h: int | None) -> tuple[range, range]:
        """Returns the ranges of Z and G for batch b (None: all) and query head h (None: all)."""
        z, g = map(range, self.shape)
        group = self.query_heads // self.key_heads
        if b is not None and self.key_batch > 1:
            z = z[b * self.key_heads : (b + 1) * self.key_heads]
        elif b is not None:
            g = g[b * group : (b + 1) * group]
        if h is not None:
            z, g = z[h // group :: self.key_heads], g[h % group :: group]
        return z, g

    def group(self, x: Tensor) -> Tensor:
        """Returns [B, Hq, ...] as [Z, G, ...], a view if its strides permit."""
        rest = x.shape[2:]
        lead = self.batch // self.key_batch
        if lead == 1:
            return x.reshape(*self.shape, *rest)
        x = x.reshape(self.key_batch, lead, self.key_heads, -1, *rest).movedim(1, 2)
        return x.reshape(*self.shape, *rest)


def in_order_of(x: Tensor, like: Tensor) -> Tensor:
    """Returns x [B, heads, length, dim] without gaps, with like's order of the first three dimensions."""
    order = order_of(like)[::-1]
    if order == (0, 1, 2):
        return x.contiguous()
    return x.permute(*order, 3).contiguous().permute(*(order.index(dim) for dim in range(3)), 3)


def chunks(z: range, g: range, count: int) -> Iterator[tuple[range, range]]:
    """Splits z and g into pairs of ranges with at most `count` heads (at least one); keeps groups whole."""
    by_z, by_g = max(1, count // len(g)), min(len(g), max(1, count))
    for i, j in product(range(0, len(z), by_z), range(0, len(g), by_g)):
        yield z[i : i + by_z], g[j : j + by_g]


def as_slice(numbers: range) -> slice:
    """Returns the range as a slice, so that indexing gives a view."""
    return slice(numbers.start, numbers.stop, numbers.step)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `interface`, in float32, or in float64 if q is float64."""
    real = dtype_of_sums(q.dtype)
    group = q.shape[1] // k.shape[1]
    key, value = (x.to(real).repeat_interleave(group, 1) for x in (k, v))
    scores = problem.scale * (q.to(real) @ key.mT)
    scores = modified(problem, scores)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    alive = scores.masked_fill(dead, 0.0)
    weights = torch.softmax(alive, -1).masked_fill(dead, 0.0)
    # torch's derivative of logsumexp, exp(score - lse), is no softmax where lse rounds the sum away
    top = alive.detach().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    sums = torch.logsumexp(alive - top, -1, keepdim=True) + top
    lse = sums.masked_fill(dead, -torch.inf).squeeze(-1)
    largest = scores.detach().amax(-1) if want_max else None
    return Forward(in_order_of((weights @ value).to(q.dtype), q), lse, largest)


def modified(problem: Problem, scores: Tensor) -> Tensor:
    """Applies the score mod and the mask to scores [B, Hq, M, N], in their dtype, float32 or float64."""
    keep = None if problem.mask is None else _allowed(problem.mask, scores.shape, scores.device)
    if problem.score is not None and keep is not None and any(x.requires_grad for x in problem.score.tensors):
        # of masked scores 0 * inf must not reach the captured tensors either
        b, h, q_idx, kv_idx = kept = keep.expand(scores.shape).nonzero(as_tuple=True)
        (result,) = evaluate(
            problem.score.graph, problem.score.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx,
            score=scores[kept], real=scores.dtype,
        )  # fmt: skip
        return torch.full_like(scores, -torch.inf).index_put(kept, result.expand(len(kept[0])))
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
