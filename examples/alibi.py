"""ALiBi: no position embeddings; each head lowers a score with the distance, by a slope of its own.

A score_mod changes a score and returns it. This one captures a table of slopes and indexes it with the head.
The -inf of causal attention is best left to a mask, which skips tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import create_block_mask, flex_attention

from common import random_qkv, report


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def main() -> None:
    q, k, v = random_qkv()
    heads, length = q.shape[1:3]
    slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device=q.device) / heads)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    block_mask = create_block_mask(causal, None, None, length, length, device=q.device)
    print(block_mask)

    position = torch.arange(length, device=q.device)
    distance = position[:, None] - position
    bias = -slopes[:, None, None] * distance
    bias = bias.masked_fill(distance < 0, -torch.inf)
    report(
        lambda q, k, v: flex_attention(q, k, v, alibi, block_mask),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, bias[None]),
        (q, k, v),
        "SDPA with a dense bias",
    )


if __name__ == "__main__":
    main()
