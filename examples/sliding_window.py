"""A sliding window: a position attends to the last `window` positions, itself included.

The window is a Python number that the mask closes over. The first value is a constant in the kernel. The
second shows flexmod that the number varies and makes it an argument; no later value compiles again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import and_masks, create_block_mask, create_mask, flex_attention

from common import random_qkv, report


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def sliding_window(window: int) -> Callable[..., Tensor]:
    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < window

    return and_masks(causal, near)


def main() -> None:
    q, k, v = random_qkv()
    length = q.shape[2]

    for window in (128, 200, 333):
        start = time.perf_counter()
        mask = sliding_window(window)
        block_mask = create_block_mask(mask, None, None, length, length, device=q.device)
        flex_attention(q, k, v, block_mask=block_mask)
        elapsed = 1e3 * (time.perf_counter() - start)
        print(f"window {window}: {block_mask.sparsity():.1f}% of the area skipped, {elapsed:.1f} ms")
    print(block_mask)

    dense = create_mask(mask, 1, 1, length, length, device=q.device)
    report(
        lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dense),
        (q, k, v),
    )


if __name__ == "__main__":
    main()
