"""Masks of a sequence or a batch of them: causal ones, windows, and masks that differ from head to head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.errors import ArgumentTypeError, LibraryArgumentError
from flexmod.ir.composed import Mask, and_masks, or_masks
from flexmod.ir.graph import expect_size, look_up
from flexmod.ir.offsets import LARGEST
from flexmod.masks.checks import INT64, MaskMod, check_counts, check_number, check_tensor


def causal() -> Mask:
    """A query attends to the key at its own position and to all keys before it: q_idx >= kv_idx.

    Both positions count from 0, also where M != N: one query with 64 keys attends to the first key only. With
    a key/value cache, where the queries are the last M of N positions, shift the queries by N - M, as in the
    example. A shift that changes from call to call does not recompile kernels.

    Source: Vaswani et al., Attention Is All You Need, 2017 (the decoder).

    Example:

        block_mask = create_block_mask(masks.causal(), None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)
        causal, offset = masks.causal(), 1024 - 3  # the last 3 of 1024 positions
        block_mask = create_block_mask(lambda b, h, q, k: causal(b, h, q + offset, k), None, None, 3, 1024)
        last = flex_attention(query[:, :, -3:], key, value, block_mask=block_mask)

    `masks.causal()`, 8 x 8:

        #.......
        ##......
        ###.....
        ####....
        #####...
        ######..
        #######.
        ########
    """

    @Mask
    def causal_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    return causal_mask


def prefix_lm(prefix: int | Tensor) -> Mask:
    """A query attends to the first `prefix` keys, to its own key and to all keys before it:

        kv_idx < prefix  or  q_idx >= kv_idx

    `prefix` is a number of positions, or an integer tensor [B] with one for each batch entry. Both positions
    count from 0. With a key/value cache, where the queries are the last M of N positions, shift the queries,
    as `causal` shows: lambda b, h, q, k: prefix_mod(b, h, q + N - M, k).

    Source: Raffel et al., T5, 2019.

    Example:

        mask_mod = masks.prefix_lm(torch.tensor([100, 250], device=query.device))
        block_mask = create_block_mask(mask_mod, 2, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.prefix_lm(3)`, 8 x 8:

        ###.....
        ###.....
        ###.....
        ####....
        #####...
        ######..
        #######.
        ########
    """
    prefix = check_counts("prefix_lm", "prefix", prefix, shape="[B]")

    @Mask
    def prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < look_up(prefix, "masks.prefix_lm", "prefix", b)) | (q_idx >= kv_idx)

    return prefix_mask


def padding(lengths: Tensor) -> Mask:
    """A query attends to the first lengths[b] keys of its batch entry: kv_idx < lengths[b].

    `lengths` is an integer tensor [B]. Padded queries attend to the same keys as the others. M and N may
    differ, since the mask does not read q_idx.

    Source: Devlin et al., BERT, 2018 (the attention mask of a padded batch).

    Example:

        mask_mod = masks.padding(torch.tensor([1000, 730], device=query.device))
        block_mask = create_block_mask(mask_mod, 2, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.padding(torch.tensor([5]))`, 8 x 8:

        #####...
        #####...
        #####...
        #####...
        #####...
        #####...
        #####...
        #####...
    """
    check_tensor("padding", "lengths", lengths, ranks=(1,), shapes="[B]")

    @Mask
    def padding_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < look_up(lengths, "masks.padding", "lengths", b)

    return padding_mask


def block_diffusion(length: int, block: int) -> Mask:
    """The mask of block diffusion: a noisy copy of a sequence, then the clean sequence, in blocks.

    Positions 0 ... length - 1 are the noisy copy, length ... 2 * length - 1 the clean one. A position's block
    is n = (position % length) // block. A query attends to a key if:

        noisy query, noisy key    n(q_idx) == n(kv_idx)
        noisy query, clean key    n(q_idx) >  n(kv_idx)
        clean query, clean key    n(q_idx) >= n(kv_idx)
        clean query, noisy key    never

    Queries and keys are the same 2 * length positions. If a call has only some of the queries, shift q_idx,
    as `causal` shows.

    Source: Arriola et al., Block Diffusion, 2025.

    Example:

        mask_mod = masks.block_diffusion(512, block=64)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.block_diffusion(6, block=2)`, 12 x 12:

        ##..........
        ##..........
        ..##..##....
        ..##..##....
        ....######..
        ....######..
        ......##....
        ......##....
        ......####..
        ......####..
        ......######
        ......######
    """
    length = check_number("block_diffusion", "length", length, least=1, most=LARGEST)
    block = check_number("block_diffusion", "block", block, least=1)

    @Mask
    def block_diffusion_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx = expect_size(q_idx, 2 * length, "masks.block_diffusion", "2 * length")
        kv_idx = expect_size(kv_idx, 2 * length, "masks.block_diffusion", "2 * length")
        query_block, key_block = q_idx % length // block, kv_idx % length // block
        clean_query, clean_key = q_idx >= length, kv_idx >= length
        among_noisy = ~clean_query & ~clean_key & (query_block == key_block)
        to_clean = ~clean_query & clean_key & (query_block > key_block)
        among_clean = clean_query & clean_key & (query_block >= key_block)
        return among_noisy | to_clean | among_clean

    return block_diffusion_mask


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
    ArgumentTypeError.check_flags(causal=causal)

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
    inside = sliding_window(min(window * dilation, INT64), causal)

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
    ArgumentTypeError.check_flags(causal=causal)

    @Mask
    def global_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < tokens) | (q_idx - kv_idx < window))

    @Mask
    def global_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx < window) & (kv_idx - q_idx < window)
        return near | (kv_idx < tokens) | (q_idx < tokens)

    return global_window_causal if causal else global_window_both_sides


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


__all__ = [
    "block_diffusion", "by_head", "causal", "dilated_window",
    "global_window", "padding", "prefix_lm", "sliding_window",
]  # fmt: skip
