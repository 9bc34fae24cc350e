"""Causal attention: a position attends to itself and to what came before it.

The mask is a Python function of two positions. flexmod cuts all pairs of positions into tiles. It skips the
empty tiles (blank in the picture), computes the full ones without a mask, and asks the function only in the
rest, here those on the diagonal.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import create_block_mask, create_mask, flex_attention

from common import random_qkv, report


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def main() -> None:
    q, k, v = random_qkv()
    length = q.shape[2]

    block_mask = create_block_mask(causal, None, None, length, length, device=q.device)
    print(block_mask)

    dense = create_mask(causal, 1, 1, length, length, device=q.device)
    report(
        lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dense),
        (q, k, v),
    )


if __name__ == "__main__":
    main()
