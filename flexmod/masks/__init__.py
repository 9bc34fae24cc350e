"""A library of masks. Each function returns an ordinary mask_mod(b, h, q_idx, kv_idx) -> bool.

The operators `&`, `|` and `~` combine them with one another and with your own functions:

    mask_mod = masks.causal() & masks.sliding_window(1024) | masks.prefix_lm(256)
    block_mask = flexmod.create_block_mask(mask_mod, None, None, 8192, 8192)
    out = flexmod.flex_attention(query, key, value, block_mask=block_mask)

An invalid argument raises LibraryArgumentError when you make the mask.
"""

from flexmod.ir.composed import Mask
from flexmod.masks.checks import MaskMod
from flexmod.masks.images import (
    morton_order,
    natten,
    reordered,
    sliding_tiles,
    standalone_window,
    tile_order,
    vision_cross,
)
from flexmod.masks.packed import document, jagged, segments, shared_prefix, tree
from flexmod.masks.sequences import (
    block_diffusion,
    by_head,
    causal,
    dilated_window,
    global_window,
    padding,
    prefix_lm,
    sliding_window,
)

__all__ = [
    "Mask",
    "MaskMod",
    "block_diffusion",
    "by_head",
    "causal",
    "dilated_window",
    "document",
    "global_window",
    "jagged",
    "morton_order",
    "natten",
    "padding",
    "prefix_lm",
    "reordered",
    "segments",
    "shared_prefix",
    "sliding_tiles",
    "sliding_window",
    "standalone_window",
    "tile_order",
    "tree",
    "vision_cross",
]
