"""Mods for calls on a part of their queries or keys, and such parts beside the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexmod import create_block_mask, flex_attention, masks, mods

Parts = Sequence[tuple[int, int]]


@dataclass
class Case:
    """Mods of one sequence; `learned` are tensors of the score_mod that get gradients."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    learned: list[Tensor] = field(default_factory=list)


def cases(
    length: int, heads: int, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Case]:
    """By name. Tables have an entry for each position of a whole of this length, and no more."""
    generator = torch.Generator().manual_seed(5)

    def learned(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return values.to(device, dtype).requires_grad_()

    documents = (torch.arange(length) * 3 // length).to(device)
    windows = (torch.arange(heads) * 20 + 30).to(device)
    rows, columns, pairs = learned(length), learned(heads, length), learned(length, length)
    distances, slopes = learned(heads, 2 * length - 1), learned(heads)
    causal = masks.causal()

    def far(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx >= kv_idx) & (kv_idx % 5 != 3), score, -float("inf"))

    return {
        "causal": Case(None, causal),
        "alibi": Case(mods.alibi(heads), causal),
        "alibi, no mask": Case(mods.alibi(heads)),
        "softcap": Case(mods.softcap(3.0), causal),
        "window": Case(None, masks.sliding_window(40)),
        "both sides": Case(None, masks.sliding_window(21, causal=False)),
        "documents": Case(None, masks.document(documents) & causal),
        "windows of heads": Case(mods.alibi(heads), masks.sliding_window(windows)),
        "prefix": Case(None, masks.prefix_lm(length // 3)),
        "-inf branches": Case(far),
        "learned rows": Case(lambda s, b, h, q, k: s + rows[q] * s, causal, [rows]),
        "learned columns": Case(lambda s, b, h, q, k: s + columns[h, k], causal, [columns]),
        "learned pairs": Case(lambda s, b, h, q, k: s + pairs[q, k], causal, [pairs]),
        "learned distances": Case(
            lambda s, b, h, q, k: s + distances[h, q - k + length - 1], masks.sliding_window(70), [distances]
        ),
        "learned buckets": Case(
            lambda s, b, h, q, k: s + distances[h, torch.log1p((q - k).abs() / 3).int()], causal, [distances]
        ),
        "cosines": Case(lambda s, b, h, q, k: s * torch.cos((q - k) * 0.1) + slopes[h], causal, [slopes]),
        "learned slopes": Case(lambda s, b, h, q, k: s + slopes[h] * (k - q), causal, [slopes]),
    }


NAMES = tuple(cases(8, 2))


def attend(
    case: Case,
    inputs: Sequence[Tensor],
    options: dict[str, Any],
    block: int | tuple[int, int] = 32,
    grads: Tensor | None = None,
    mask: Callable[..., Any] | None = None,
    **offsets: Any,
) -> list[Tensor]:
    """out, lse, and with `grads`, of out, the gradients of query, key, value and what is learned.

    `mask` in place of the case's. Offsets that are tensors are those of batch entries.
    """
    mask = mask or case.mask
    query, key, value = leaves = [x.detach().requires_grad_(grads is not None) for x in inputs]
    batch, heads, length, _ = query.shape
    block_mask = None
    if mask is not None:
        sizes = (batch, heads, length, key.shape[2], query.device, block)
        block_mask = create_block_mask(mask, *sizes, **offsets)
    out, lse = flex_attention(
        query, key, value, case.score, block_mask, return_lse=True, kernel_options=options, **offsets
    )  # type: ignore[misc]
    if grads is None:
        return [out.detach(), lse.detach()]
    # a row with nothing to attend to has no lse to speak of
    wanted = (*leaves, *case.learned)
    gradients = torch.autograd.grad([out, lse.clamp(min=-1e9)], wanted, [grads, torch.zeros_like(lse)])
    return [out.detach(), lse.detach(), *gradients]


def keeps(mask: Callable[..., Any] | None, first: int, last: int) -> Callable[..., Any]:
    """The mask on keys first..last - 1 alone."""

    def keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= first) & (kv_idx < last)

    return masks.Mask(keys) if mask is None else masks.Mask(keys) & mask


def merged(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """out and lse of all keys, from those of parts of them."""
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    shares = torch.where(lse == -float("inf"), 0.0, (lses - lse).exp())
    outs = torch.stack([out for out, _ in parts])
    return [(shares[..., None] * outs).sum(0), lse]
