"""Soft-capping: scores pass through cap * tanh(score / cap), so that none is larger than the cap.

SDPA cannot do this: it can only add to a score. The reference is written out, with its S x S matrix of
scores. flexmod makes no such matrix, forward or backward, and finds the derivative of tanh by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod import create_block_mask, create_mask, flex_attention

from common import random_qkv, report

CAP = 5.0


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return CAP * torch.tanh(score / CAP)


def main() -> None:
    q, k, v = random_qkv()
    length = q.shape[2]

    block_mask = create_block_mask(causal, None, None, length, length, device=q.device)
    print(block_mask)

    dense = create_mask(causal, 1, 1, length, length, device=q.device)

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = CAP * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / CAP)
        return scores.masked_fill(~dense, -torch.inf).softmax(-1) @ v

    report(
        lambda q, k, v: flex_attention(q, k, v, softcap, block_mask),
        written_out,
        (q, k, v),
        "attention written out",
    )


if __name__ == "__main__":
    main()
