"""Document masking: several documents packed into one sequence, each of which attends only to itself.

The mask captures a tensor, `document_of`, and indexes it with the two positions. New documents make a new
block mask; the kernel stays, since the tensor and its size are arguments of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import create_block_mask, create_mask, flex_attention

from common import random_qkv, report


def causal_documents(document_of: Tensor) -> Callable[..., Tensor]:
    """`document_of`: the document of each position, [length] integers."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (document_of[q_idx] == document_of[kv_idx]) & (q_idx >= kv_idx)

    return mask


def main() -> None:
    q, k, v = random_qkv()
    length = q.shape[2]

    for lengths in ([400, 300, 324], [100, 90, 130, 200, 240, 264]):
        document_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
        mask = causal_documents(document_of)
        block_mask = create_block_mask(mask, None, None, length, length, device=q.device)
        print(f"documents of {lengths} tokens")
        print(block_mask)

        dense = create_mask(mask, 1, 1, length, length, device=q.device)
        report(
            lambda q, k, v, block_mask=block_mask: flex_attention(q, k, v, block_mask=block_mask),
            lambda q, k, v, dense=dense: scaled_dot_product_attention(q, k, v, dense),
            (q, k, v),
        )


if __name__ == "__main__":
    main()
