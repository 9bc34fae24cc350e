"""Masks of one sequence, or of a batch of sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.ir.composed import Mask
from flexmod.ir.graph import expect_size, look_up
from flexmod.masks.checks import check_counts, check_number, check_tensor


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
    length = check_number("block_diffusion", "length", length, least=1)
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
