"""A prefix language model: the prompt is seen whole, what follows it is causal.

Two masks, each a function of its own, become one with or_masks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import create_block_mask, create_mask, flex_attention, or_masks

from common import random_qkv, report


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def prefix(length: int) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < length

    return mask


def main() -> None:
    q, k, v = random_qkv()
    length = q.shape[2]

    mask = or_masks(prefix(300), causal)
    block_mask = create_block_mask(mask, None, None, length, length, device=q.device)
    print(block_mask)

    dense = create_mask(mask, 1, 1, length, length, device=q.device)
    report(
        lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dense),
        (q, k, v),
    )


if __name__ == "__main__":
    main()
