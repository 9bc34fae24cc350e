"""Masks of what is near in a sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.ir.composed import Mask
from flexmod.masks.checks import check_counts, check_number


def sliding_window(window: int | Tensor, causal: bool = True) -> Mask:
    """A query attends to keys at most `window` positions away: 0 <= q_idx - kv_idx <= window.

    That is window + 1 keys, its own position among them. With causal=False the window reaches to both sides,
    |q_idx - kv_idx| <= window. `window` is a number, or an integer tensor [H] with one for each head.

    Source: Beltagy et al., Longformer, 2020; Jiang et al., Mistral 7B, 2023.

    Example:

        mask_mod = masks.sliding_window(256)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.sliding_window(2)`, 8 x 8:

        #.......
        ##......
        ###.....
        .###....
        ..###...
        ...###..
        ....###.
        .....###
    """
    check_counts("sliding_window", "window", window, shape="[H]")

    def sliding_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        reach = window[h] if isinstance(window, Tensor) else window
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= reach)

    def sliding_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        reach = window[h] if isinstance(window, Tensor) else window
        return (q_idx - kv_idx <= reach) & (kv_idx - q_idx <= reach)

    return Mask(sliding_window_causal if causal else sliding_window_both_sides)


def dilated_window(window: int, dilation: int, causal: bool = True) -> Mask:
    """Every `dilation`-th key of a window:

        0 <= q_idx - kv_idx <= window * dilation  and  (q_idx - kv_idx) % dilation == 0

    That is window + 1 keys. With causal=False the window reaches to both sides.

    Source: Beltagy et al., Longformer, 2020.

    Example:

        mask_mod = masks.dilated_window(64, dilation=4)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.dilated_window(2, dilation=2)`, 8 x 8:

        #.......
        .#......
        #.#.....
        .#.#....
        #.#.#...
        .#.#.#..
        ..#.#.#.
        ...#.#.#
    """
    check_number("dilated_window", "window", window, least=0)
    check_number("dilated_window", "dilation", dilation, least=1)
    inside = sliding_window(window * dilation, causal)

    @Mask
    def dilated_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return inside(b, h, q_idx, kv_idx) & ((q_idx - kv_idx) % dilation == 0)

    return dilated_mask


def global_window(window: int, tokens: int, causal: bool = True) -> Mask:
    """A window, beside a few first tokens that all see and that see all: the sinks of a long stream.

        (|q_idx - kv_idx| <= window  or  kv_idx < tokens  or  q_idx < tokens)  and  q_idx >= kv_idx

    `window` and `tokens` are numbers of positions. With causal=False the last condition falls away.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023; with causal=False
    the global attention of Beltagy et al., Longformer, 2020.

    Example:

        mask_mod = masks.global_window(256, tokens=4)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.global_window(1, tokens=2)`, 8 x 8:

        #.......
        ##......
        ###.....
        ####....
        ##.##...
        ##..##..
        ##...##.
        ##....##

    `masks.global_window(1, tokens=2, causal=False)`, 8 x 8:

        ########
        ########
        ####....
        #####...
        ##.###..
        ##..###.
        ##...###
        ##....##
    """
    check_number("global_window", "window", window, least=0)
    check_number("global_window", "tokens", tokens, least=0)

    @Mask
    def global_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < tokens) | (q_idx - kv_idx <= window))

    @Mask
    def global_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx <= window) & (kv_idx - q_idx <= window)
        return near | (kv_idx < tokens) | (q_idx < tokens)

    return global_window_causal if causal else global_window_both_sides
