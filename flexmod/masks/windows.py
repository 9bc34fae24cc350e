"""Masks of keys that are near the query in a sequence, and masks that differ from head to head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.ir.composed import Mask, and_masks, or_masks
from flexmod.ir.graph import look_up
from flexmod.masks.checks import MaskMod, check_counts, check_flag, check_number, check_tensor


def sliding_window(window: int | Tensor, causal: bool = True) -> Mask:
    """A query attends to `window` keys, its own and the window - 1 before it: 0 <= q_idx - kv_idx < window.

    With causal=False it also attends to the window - 1 keys after it, |q_idx - kv_idx| < window. The argument
    `window` is a number, at least 1, or an integer tensor [H] with one for each head.

    Mistral and Hugging Face's `sliding_window` count the same way. FlashAttention's window_size=(left, 0)
    does not count the query's own key: write sliding_window(left + 1).

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries, as `causal` shows: lambda b, h, q, k: window_mod(b, h, q + N - M, k).

    Source: Beltagy et al., Longformer, 2020; Jiang et al., Mistral 7B, 2023.

    Example:

        mask_mod = masks.sliding_window(256)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.sliding_window(3)`, 8 x 8:

        #.......
        ##......
        ###.....
        .###....
        ..###...
        ...###..
        ....###.
        .....###

    `masks.sliding_window(2, causal=False)`, 6 x 6:

        ##....
        ###...
        .###..
        ..###.
        ...###
        ....##
    """
    window = check_counts("sliding_window", "window", window, shape="[H]", least=1)
    check_flag("sliding_window", "causal", causal)

    def sliding_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        size = look_up(window, "masks.sliding_window", "window", h)
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    def sliding_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        size = look_up(window, "masks.sliding_window", "window", h)
        return (q_idx - kv_idx < size) & (kv_idx - q_idx < size)

    return Mask(sliding_window_causal if causal else sliding_window_both_sides)


def dilated_window(window: int, dilation: int, causal: bool = True) -> Mask:
    """A query attends to `window` keys, its own and window - 1 before it, each `dilation` positions apart:

        0 <= q_idx - kv_idx < window * dilation  and  (q_idx - kv_idx) % dilation == 0

    With causal=False it also attends to window - 1 keys after it, |q_idx - kv_idx| < window * dilation.

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries, as `causal` shows: lambda b, h, q, k: window_mod(b, h, q + N - M, k).

    Source: Beltagy et al., Longformer, 2020.

    Example:

        mask_mod = masks.dilated_window(64, dilation=4)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.dilated_window(3, dilation=2)`, 8 x 8:

        #.......
        .#......
        #.#.....
        .#.#....
        #.#.#...
        .#.#.#..
        ..#.#.#.
        ...#.#.#
    """
    window = check_number("dilated_window", "window", window, least=1)
    dilation = check_number("dilated_window", "dilation", dilation, least=1)
    inside = sliding_window(window * dilation, check_flag("dilated_window", "causal", causal))

    @Mask
    def dilated_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return inside(b, h, q_idx, kv_idx) & ((q_idx - kv_idx) % dilation == 0)

    return dilated_mask


def global_window(window: int, tokens: int, causal: bool = True) -> Mask:
    """A query attends to `window` keys, its own and the window - 1 before it, and to the first `tokens` keys:

        (q_idx - kv_idx < window  or  kv_idx < tokens)  and  q_idx >= kv_idx

    The first tokens serve as attention sinks. With causal=False the window also has the window - 1 keys after
    the query, and the first `tokens` queries attend to all keys:

        |q_idx - kv_idx| < window  or  kv_idx < tokens  or  q_idx < tokens

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries, as `causal` shows: lambda b, h, q, k: window_mod(b, h, q + N - M, k).

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023; with causal=False
    the global attention of Beltagy et al., Longformer, 2020.

    Example:

        mask_mod = masks.global_window(256, tokens=4)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.global_window(2, tokens=2)`, 8 x 8:

        #.......
        ##......
        ###.....
        ####....
        ##.##...
        ##..##..
        ##...##.
        ##....##

    `masks.global_window(2, tokens=2, causal=False)`, 8 x 8:

        ########
        ########
        ####....
        #####...
        ##.###..
        ##..###.
        ##...###
        ##....##
    """
    window = check_number("global_window", "window", window, least=1)
    tokens = check_number("global_window", "tokens", tokens, least=0)

    @Mask
    def global_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < tokens) | (q_idx - kv_idx < window))

    @Mask
    def global_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx < window) & (kv_idx - q_idx < window)
        return near | (kv_idx < tokens) | (q_idx < tokens)

    return global_window_causal if check_flag("global_window", "causal", causal) else global_window_both_sides


def by_head(choice: Tensor, *mask_mods: MaskMod) -> Mask:
    """Gives each head one of several masks:

        mask_mods[choice[h]](b, h, q_idx, kv_idx)

    `choice` is an integer tensor [H] with values from 0 to the number of masks - 1. A head with any other
    value attends to nothing. Build the block mask with H heads.

    Source: Gemma Team, Gemma 2, 2024 (windows in every second layer); Xiao et al., DuoAttention, 2024
    (windows in some heads).

    Example:

        choice = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1], device=query.device)
        mask_mod = masks.by_head(choice, masks.causal(), masks.sliding_window(128))
        block_mask = create_block_mask(mask_mod, None, 8, 1024, 1024)

    `masks.by_head(torch.tensor([1]), masks.causal(), masks.sliding_window(3))`, 8 x 8:

        #.......
        ##......
        ###.....
        .###....
        ..###...
        ...###..
        ....###.
        .....###
    """
    check_tensor("by_head", "choice", choice, ranks=(1,), shapes="[H]")
    if not mask_mods:
        raise LibraryArgumentError(
            function="by_head", name="mask_mods", value="empty", rule="one mask_mod or more",
            advice="write by_head(choice, masks.causal(), masks.sliding_window(128))",
        )  # fmt: skip

    def chosen(number: int) -> Mask:
        @Mask
        def choice_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return look_up(choice, "masks.by_head", "choice", h) == number

        return choice_mask

    return or_masks(*(and_masks(chosen(number), mask_mod) for number, mask_mod in enumerate(mask_mods)))
