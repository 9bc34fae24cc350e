"""The masks that every part of the block mask is tried on, with lengths that suit them."""

from __future__ import annotations

from typing import Any

import torch

from flexmod import masks
from flexmod.block_mask.build import and_masks, noop_mask, or_masks

S = 520
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3]).repeat_interleave(65)
IDS_BY_BATCH = torch.stack([IDS, torch.arange(S) // 130, torch.zeros(S, dtype=torch.int64)])
OFFSETS = torch.tensor([0, 100, 101, 350, S])
INTERVALS = torch.tensor([[0, 70], [70, 200], [200, 130]])
IMAGES = torch.arange(3).repeat_interleave(100)


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx <= 100 * h


# name -> (mask_mod, B, H, Q_LEN, KV_LEN)
ZOO: dict[str, tuple[Any, int | None, int | None, int, int]] = {
    "noop": (noop_mask, None, None, 300, 512),
    "causal": (masks.causal(), None, None, 1000, 1000),
    "causal_wide": (masks.causal(), 2, 3, 256, 700),
    "window": (masks.sliding_window(200), None, None, 1024, 1024),
    "window_both_sides": (masks.sliding_window(77, causal=False), None, None, 777, 640),
    "prefix": (masks.prefix_lm(300), None, None, 768, 768),
    "prefix_by_batch": (masks.prefix_lm(torch.tensor([0, 130, 500])), 3, 2, S, S),
    "document": (masks.document(IDS), None, None, S, S),
    "document_causal": (masks.document(IDS_BY_BATCH, causal=True), 3, 2, S, S),
    "document_and_window": (and_masks(masks.document(IDS), masks.sliding_window(50)), None, None, S, S),
    "standalone_window": (masks.standalone_window(24, 30, 4), None, None, 720, 720),
    "natten": (masks.natten((24, 30), 7), None, None, 720, 720),
    "ragged": (masks.jagged(OFFSETS, masks.causal()), None, None, S, S),
    "vision_cross": (masks.vision_cross(INTERVALS, IMAGES), None, None, 256, 300),
    "padding": (masks.padding(torch.tensor([1, 128, 400])), 3, None, 200, 400),
    "by_head": (by_head, None, 4, 512, 384),
    "union": (or_masks(masks.sliding_window(9), masks.padding(torch.tensor([5, 200]))), 2, 2, 300, 300),
}
