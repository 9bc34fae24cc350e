"""A library of masks. Each function returns an ordinary mask_mod(b, h, q_idx, kv_idx) -> bool.

They compose with `and_masks` and `or_masks`, and with masks of your own:

    mask_mod = flexmod.and_masks(masks.causal(), masks.document(ids))
    block_mask = flexmod.create_block_mask(mask_mod, None, None, 8192, 8192)
    out = flexmod.flex_attention(query, key, value, block_mask=block_mask)
"""

from flexmod.masks.checks import MaskMod
from flexmod.masks.images import natten, sliding_tiles, standalone_window, vision_cross
from flexmod.masks.packed import document, ragged, shared_prefix
from flexmod.masks.text import (
    block_diffusion,
    causal,
    dilated_window,
    padding,
    prefix_lm,
    sliding_window,
    tree,
)

__all__ = [
    "MaskMod",
    "block_diffusion",
    "causal",
    "dilated_window",
    "document",
    "natten",
    "padding",
    "prefix_lm",
    "ragged",
    "shared_prefix",
    "sliding_tiles",
    "sliding_window",
    "standalone_window",
    "tree",
    "vision_cross",
]
