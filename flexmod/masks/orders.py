"""Masks for sequences that are not lines: images in an order that keeps neighbors together, and trees.

Row by row, 128 positions form a stripe of the image, and a neighborhood meets many stripes. Tile by tile they
form a rectangle, and a neighborhood meets few rectangles, so fewer blocks of the mask are partial.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.ir.composed import Mask
from flexmod.ir.graph import as_position, expect_size
from flexmod.ir.offsets import LARGEST
from flexmod.ir.source import check_arity
from flexmod.masks.checks import MaskMod, check_extents, check_number, check_tensor, check_tiles

LEAST = -(2**29)  # an order may mark padding by a negative number; differences of positions fit in int32


def reordered(mask_mod: MaskMod, order: Tensor) -> Mask:
    """Applies a mask to positions in another order: mask_mod(b, h, order[q_idx], order[kv_idx]).

    `order` is an integer tensor [S] with the old position of each new one, from `tile_order`, `morton_order`
    or your own code. Reorder query, key and value with x[:, :, order]; out[:, :, order.argsort()] restores
    the order of the output.

    Source: Hassani et al., Generalized Neighborhood Attention, 2025 (token permutation).

    Example:

        order = masks.tile_order((32, 32), (8, 16), device=query.device)
        mask_mod = masks.reordered(masks.natten((32, 32), kernel=7), order)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(*(x[:, :, order] for x in (query, key, value)), block_mask=block_mask)

    `masks.reordered(masks.natten((4, 4), kernel=3), masks.tile_order((4, 4), (2, 2)))`, 16 x 16:

        #####.#.##..#...
        #####.#.##..#...
        #####.#.##..#...
        #####.#.##..#...
        .#.#####.#..##..
        .#.#####.#..##..
        .#.#####.#..##..
        .#.#####.#..##..
        ..##..#.#####.#.
        ..##..#.#####.#.
        ..##..#.#####.#.
        ..##..#.#####.#.
        ...#..##.#.#####
        ...#..##.#.#####
        ...#..##.#.#####
        ...#..##.#.#####

    `masks.natten((4, 4), kernel=3)`, 16 x 16:

        ###.###.###.....
        ###.###.###.....
        .###.###.###....
        .###.###.###....
        ###.###.###.....
        ###.###.###.....
        .###.###.###....
        .###.###.###....
        ....###.###.###.
        ....###.###.###.
        .....###.###.###
        .....###.###.###
        ....###.###.###.
        ....###.###.###.
        .....###.###.###
        .....###.###.###
    """
    check_tensor("reordered", "order", order, ranks=(1,), shapes="[S]")
    check_arity(mask_mod, "mask")

    @Mask
    def reordered_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        query = expect_size(q_idx, order.shape[0], "masks.reordered", "order")
        key = expect_size(kv_idx, order.shape[0], "masks.reordered", "order")
        old_query = as_position(order[query], query, LARGEST, LEAST)
        return mask_mod(b, h, old_query, as_position(order[key], key, LARGEST, LEAST))

    return reordered_mask


def tile_order(
    extent: tuple[int, ...], tile: tuple[int, ...], device: torch.device | str | None = None
) -> Tensor:
    """Orders pixels tile by tile, each tile row by row.

    Returns the row-by-row number of the pixel at each position, int32 [S]; S is the product of `extent`.

    `extent` is (length,), (height, width) or (frames, height, width) in pixels. `tile` is the size of a tile
    on each axis in pixels and divides the extent.

    Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025.

    Example:

        order = masks.tile_order((32, 32), (8, 16), device=query.device)
        tiled = query[:, :, order]
        assert torch.equal(tiled[:, :, order.argsort()], query)
    """
    tile, counts = check_tiles("tile_order", extent, tile)
    sizes = [n for pair in zip(counts, tile, strict=True) for n in pair]
    numbers = torch.arange(math.prod(sizes), dtype=torch.int32, device=device).view(sizes)
    return numbers.permute(*range(0, len(sizes), 2), *range(1, len(sizes), 2)).flatten().contiguous()


def morton_order(extent: tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
    """Orders pixels along a Z-order curve.

    Returns the row-by-row number of the pixel at each position, int32 [S]; S is the product of `extent`.

    The curve sorts pixels by the interleaved bits of their coordinates, the slowest axis first. `extent` is
    (length,), (height, width) or (frames, height, width) in pixels, of any sizes.

    Source: Morton, A Computer Oriented Geodetic Data Base, 1966.

    Example:

        order = masks.morton_order((32, 32), device=query.device)
        mask_mod = masks.reordered(masks.natten((32, 32), kernel=7), order)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
    """
    extent = check_extents("morton_order", "extent", extent)
    coordinates = torch.meshgrid(*(torch.arange(n, device=device) for n in extent), indexing="ij")
    code = torch.zeros(extent, dtype=torch.int64, device=device)
    bits = max(extent).bit_length()
    for place, (bit, axis) in enumerate(itertools.product(range(bits), reversed(coordinates))):
        code |= ((axis >> bit) & 1) << place
    return code.flatten().argsort().to(torch.int32)


def tree(parents: Tensor, context: int = 0) -> Mask:
    """A node of a tree attends to itself, to its ancestors, and to `context` keys before the tree.

        kv_idx < context  or  node kv_idx - context is on the path from node q_idx to its root

    `parents` is an integer tensor [n] with the parent of each node, -1 for a root. Queries are the n nodes;
    keys are the context and then the n nodes. This function reads the values of `parents` once. Nodes may
    come in any order; depth-first order, where each subtree is contiguous, makes few tiles partial.

    Source: Miao et al., SpecInfer, 2023; Cai et al., Medusa, 2024.

    Example:

        parents = torch.tensor([-1, 0, 0, 1, 1, 2], device=query.device)
        block_mask = create_block_mask(masks.tree(parents, context=1018), None, None, 6, 1024)
        out = flex_attention(query[:, :, -6:], key, value, block_mask=block_mask)

    `masks.tree(torch.tensor([-1, 0, 0, 1, 1, 2]), context=3)`, 6 x 9:

        ####.....
        #####....
        ####.#...
        #####.#..
        #####..#.
        ####.#..#
    """
    check_tensor("tree", "parents", parents, ranks=(1,), shapes="[n]")
    context = check_number("tree", "context", context, least=0)
    enter, leave = _visits(parents)

    @Mask
    def tree_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        count = enter.shape[0]
        q_idx = expect_size(q_idx, count, "masks.tree", "parents")
        kv_idx = expect_size(kv_idx, count + context, "masks.tree", "parents with their context")
        node = torch.clamp(kv_idx - context, min=0)
        below = (enter[node] <= enter[q_idx]) & (enter[q_idx] < leave[node])
        return (kv_idx < context) | below

    return tree_mask


def _visits(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the times at which a depth-first walk enters and leaves each node, int32 [n] each.

    A node is a descendant of another if the walk enters it between the other's two times.
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
