"""A module as users write them: its score mod captures parameters and a buffer, its mask an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexmod import create_block_mask, flex_attention

LENGTH = 20
DOCUMENTS = torch.arange(LENGTH) // 9


class BiasedAttention(nn.Module):
    """Two heads over LENGTH positions."""

    bucket: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([0.1, 0.2]))
        self.table = nn.Parameter(torch.linspace(-1, 1, 4))
        self.register_buffer("bucket", torch.arange(LENGTH) % 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, options: Any = None) -> Tensor:
        def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - self.slopes[h] * (q_idx - kv_idx) + self.table[self.bucket[kv_idx]]

        def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

        mask = create_block_mask(same, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, biased, mask, kernel_options=options)
