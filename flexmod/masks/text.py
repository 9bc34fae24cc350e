"""Masks of one sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.masks.checks import MaskMod, check_counts, check_number, check_tensor


def causal() -> MaskMod:
    """A query attends to itself and to what comes before it: q_idx >= kv_idx.

    Source: Vaswani et al., Attention Is All You Need, 2017 (the decoder).

        block_mask = create_block_mask(masks.causal(), None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
        print(block_mask)
    """

    def causal_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    return causal_mask


def sliding_window(window: int | Tensor, causal: bool = True) -> MaskMod:
    """A query attends to keys at most `window` positions away: 0 <= q_idx - kv_idx <= window.

    That is window + 1 keys, its own position among them. With causal=False the window reaches to both sides,
    |q_idx - kv_idx| <= window. `window` is a number, or an integer tensor [H] with one for each head.

    Source: Beltagy et al., Longformer, 2020; Jiang et al., Mistral 7B, 2023.

        mask_mod = masks.sliding_window(1024)
        block_mask = create_block_mask(mask_mod, None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_counts("sliding_window", "window", window, shape="[H]")

    def sliding_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        reach = window[h] if isinstance(window, Tensor) else window
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= reach)

    def sliding_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        reach = window[h] if isinstance(window, Tensor) else window
        return (q_idx - kv_idx <= reach) & (kv_idx - q_idx <= reach)

    return sliding_window_causal if causal else sliding_window_both_sides


def dilated_window(window: int, dilation: int, causal: bool = True) -> MaskMod:
    """Every `dilation`-th key of a window:

        0 <= q_idx - kv_idx <= window * dilation  and  (q_idx - kv_idx) % dilation == 0

    That is window + 1 keys. With causal=False the window reaches to both sides.

    Source: Beltagy et al., Longformer, 2020.

        mask_mod = masks.dilated_window(256, dilation=4)
        block_mask = create_block_mask(mask_mod, None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_number("dilated_window", "window", window, least=0)
    check_number("dilated_window", "dilation", dilation, least=1)
    inside = sliding_window(window * dilation, causal)

    def dilated_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return inside(b, h, q_idx, kv_idx) & ((q_idx - kv_idx) % dilation == 0)

    return dilated_mask


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Every query sees the whole prefix, and is causal after it: (kv_idx < prefix) | (q_idx >= kv_idx).

    `prefix` is a number of positions, or an integer tensor [B] with one for each batch.

    Source: Raffel et al., T5, 2019.

        mask_mod = masks.prefix_lm(torch.tensor([100, 250], device="cuda"))
        block_mask = create_block_mask(mask_mod, 2, None, 4096, 4096)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_counts("prefix_lm", "prefix", prefix, shape="[B]")

    def prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        length = prefix[b] if isinstance(prefix, Tensor) else prefix
        return (kv_idx < length) | (q_idx >= kv_idx)

    return prefix_mask


def padding(lengths: Tensor) -> MaskMod:
    """Batches padded to one length: kv_idx < lengths[b]. Padded queries still attend to what is there.

    `lengths` is an integer tensor [B].

        lengths = torch.tensor([1000, 730], device="cuda")
        block_mask = create_block_mask(masks.padding(lengths), 2, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_tensor("padding", "lengths", lengths, ranks=(1,), shapes="[B]")

    def padding_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < lengths[b]

    return padding_mask


def block_diffusion(length: int, block: int) -> MaskMod:
    """A sequence beside its noisy copy, generated block by block.

    Positions 0 ... length - 1 are the noisy copy, length ... 2 * length - 1 the clean one. With n the block
    of a position, (position % length) // block:

        noisy query, noisy key    n(q_idx) == n(kv_idx)
        noisy query, clean key    n(q_idx) >  n(kv_idx)
        clean query, clean key    n(q_idx) >= n(kv_idx)
        clean query, noisy key    never

    Source: Arriola et al., Block Diffusion, 2025.

        mask_mod = masks.block_diffusion(4096, block=64)
        block_mask = create_block_mask(mask_mod, None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_number("block_diffusion", "length", length, least=1)
    check_number("block_diffusion", "block", block, least=1)

    def block_diffusion_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        query_block, key_block = q_idx % length // block, kv_idx % length // block
        clean_query, clean_key = q_idx >= length, kv_idx >= length
        among_noisy = ~clean_query & ~clean_key & (query_block == key_block)
        to_clean = ~clean_query & clean_key & (query_block > key_block)
        among_clean = clean_query & clean_key & (query_block >= key_block)
        return among_noisy | to_clean | among_clean

    return block_diffusion_mask


def tree(parents: Tensor, context: int = 0) -> MaskMod:
    """A node of a tree attends to itself, to its ancestors, and to `context` keys before the tree.

        kv_idx < context  or  node kv_idx - context is on the way from node q_idx to its root

    `parents` is an integer tensor [n], the parent of each node and -1 for a root: queries are the n nodes,
    keys the context and then the n nodes. It is read once, here. Nodes in any order; where each subtree is
    contiguous (depth first) few tiles are partial.

    Source: Miao et al., SpecInfer, 2023; Cai et al., Medusa, 2024.

        mask_mod = masks.tree(torch.tensor([-1, 0, 0, 1, 1, 2]), context=1000)
        block_mask = create_block_mask(mask_mod, None, None, 6, 1006)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_tensor("tree", "parents", parents, ranks=(1,), shapes="[n]")
    check_number("tree", "context", context, least=0)
    enter, leave = _visits(parents)

    def tree_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        node = torch.clamp(kv_idx - context, min=0)
        below = (enter[node] <= enter[q_idx]) & (enter[q_idx] < leave[node])
        return (kv_idx < context) | below

    return tree_mask


def _visits(parents: Tensor) -> tuple[Tensor, Tensor]:
    """When a walk through the tree, depth first, enters each node, and when it has left it: int32 [n].

    A node is below another when it is entered between that one's two times.
    """
    numbers: list[int] = parents.tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(numbers):
        children.setdefault(parent, []).append(node)
    enter, leave, time = [-1] * len(numbers), [0] * len(numbers), 0
    stack = [(root, False) for root in reversed(children.get(-1, []))]
    while stack:
        node, done = stack.pop()
        if done:
            leave[node] = time
            continue
        enter[node], time = time, time + 1
        stack.append((node, True))
        stack += [(child, False) for child in reversed(children.get(node, []))]
    if -1 in enter:
        raise LibraryArgumentError(
            function="tree", name="parents", value=f"such that node {enter.index(-1)} has no root",
            rule="a forest", advice="give each node the number of its parent, and -1 to a root",
        )  # fmt: skip
    made = (torch.tensor(times, dtype=torch.int32, device=parents.device) for times in (enter, leave))
    return next(made), next(made)
