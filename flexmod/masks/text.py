"""Masks of one sequence, or of a batch of sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.ir.composed import Mask
from flexmod.masks.checks import check_counts, check_number, check_tensor


def causal() -> Mask:
    """A query attends to itself and to what comes before it: q_idx >= kv_idx.

    Source: Vaswani et al., Attention Is All You Need, 2017 (the decoder).

    Example:

        block_mask = create_block_mask(masks.causal(), None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)
        print(block_mask)

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
    """Every query sees the whole prefix, and is causal after it: (kv_idx < prefix) | (q_idx >= kv_idx).

    `prefix` is a number of positions, or an integer tensor [B] with one for each batch.

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
    check_counts("prefix_lm", "prefix", prefix, shape="[B]")

    @Mask
    def prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        length = prefix[b] if isinstance(prefix, Tensor) else prefix
        return (kv_idx < length) | (q_idx >= kv_idx)

    return prefix_mask


def padding(lengths: Tensor) -> Mask:
    """Batches padded to one length: kv_idx < lengths[b]. Padded queries still attend to what is there.

    `lengths` is an integer tensor [B].

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
        return kv_idx < lengths[b]

    return padding_mask


def block_diffusion(length: int, block: int) -> Mask:
    """A sequence beside its noisy copy, generated block by block.

    Positions 0 ... length - 1 are the noisy copy, length ... 2 * length - 1 the clean one. With n the block
    of a position, (position % length) // block:

        noisy query, noisy key    n(q_idx) == n(kv_idx)
        noisy query, clean key    n(q_idx) >  n(kv_idx)
        clean query, clean key    n(q_idx) >= n(kv_idx)
        clean query, noisy key    never

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
    check_number("block_diffusion", "length", length, least=1)
    check_number("block_diffusion", "block", block, least=1)

    @Mask
    def block_diffusion_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        query_block, key_block = q_idx % length // block, kv_idx % length // block
        clean_query, clean_key = q_idx >= length, kv_idx >= length
        among_noisy = ~clean_query & ~clean_key & (query_block == key_block)
        to_clean = ~clean_query & clean_key & (query_block > key_block)
        among_clean = clean_query & clean_key & (query_block >= key_block)
        return among_noisy | to_clean | among_clean

    return block_diffusion_mask
