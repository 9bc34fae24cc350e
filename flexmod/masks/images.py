"""Masks of images and videos, and orders of pixels that keep neighbors together.

Row by row, 128 positions form a stripe of the image, and a neighborhood meets many stripes. Tile by tile they
form a rectangle, and a neighborhood meets few rectangles, so fewer blocks of the mask are partial.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.errors.base import is_flag, shown
from flexmod.ir.composed import Mask
from flexmod.ir.graph import as_bool, as_position, expect_size, look_up
from flexmod.ir.offsets import LARGEST
from flexmod.ir.source import check_arity
from flexmod.masks.checks import (
    MaskMod,
    check_extents,
    check_number,
    check_tensor,
    check_tiles,
    checked_device,
)

LEAST = -(2**29)  # an order may mark padding by a negative number; differences of positions fit in int32


def standalone_window(height: int, width: int, window: int) -> Mask:
    """A pixel attends to a square of 2 * window - 1 rows and columns around it:

        |row - row'| < window  and  |column - column'| < window

    The image's border cuts the square; `natten` moves it inwards instead.

    Queries and keys are the height * width pixels, row by row: row = q_idx // width, column = q_idx % width.
    If the queries begin at the pixel `first`, shift them: lambda b, h, q, k: window_mod(b, h, q + first, k).

    Source: Ramachandran et al., Stand-Alone Self-Attention in Vision Models, 2019.

    Example:

        mask_mod = masks.standalone_window(height=32, width=32, window=6)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.standalone_window(height=3, width=5, window=2)`, 15 x 15:

        ##...##........
        ###..###.......
        .###..###......
        ..###..###.....
        ...##...##.....
        ##...##...##...
        ###..###..###..
        .###..###..###.
        ..###..###..###
        ...##...##...##
        .....##...##...
        .....###..###..
        ......###..###.
        .......###..###
        ........##...##
    """
    height = check_number("standalone_window", "height", height, least=1, most=LARGEST)
    width = check_number("standalone_window", "width", width, least=1, most=LARGEST // height)
    window = check_number("standalone_window", "window", window, least=1)

    @Mask
    def standalone_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx = expect_size(q_idx, height * width, "masks.standalone_window", "height * width")
        kv_idx = expect_size(kv_idx, height * width, "masks.standalone_window", "height * width")
        near_row = torch.abs(q_idx // width - kv_idx // width) < window
        near_column = torch.abs(q_idx % width - kv_idx % width) < window
        return near_row & near_column

    return standalone_mask


def natten(
    extent: tuple[int, ...],
    kernel: int | tuple[int, ...],
    dilation: int | tuple[int, ...] = 1,
    causal: bool | tuple[bool, ...] = False,
) -> Mask:
    """A pixel attends to the `kernel` pixels around it on each axis, and to as many at a border:

        |clamp(x, kernel // 2, length - 1 - kernel // 2) - x'| <= kernel // 2

    Here x and x' are the coordinates of q_idx and kv_idx on the axis. At a border the kernel moves inwards.
    A dilation divides the axis into parts by x % dilation, and the formula holds for x // dilation within
    each part. On a causal axis the kernel ends at the pixel itself, 0 <= x - x' < kernel, and never moves.

        extent    (length,), (height, width) or (frames, height, width) in positions, row by row. For
                  positions in another order see `reordered`.
        kernel    pixels, one number for all axes or one for each; odd, unless the axis is causal
        dilation  likewise; kernel * dilation is at most the axis's length
        causal    likewise

    Source: Hassani et al., Neighborhood Attention Transformer, 2022; Hassani and Shi, Dilated Neighborhood
    Attention Transformer, 2022; Hassani et al., Faster Neighborhood Attention, 2024 (causal).

    Example:

        mask_mod = masks.natten((4, 16, 16), kernel=(3, 5, 5), causal=(True, False, False))
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.natten((3, 5), kernel=3)`, 15 x 15:

        ###..###..###..
        ###..###..###..
        .###..###..###.
        ..###..###..###
        ..###..###..###
        ###..###..###..
        ###..###..###..
        .###..###..###.
        ..###..###..###
        ..###..###..###
        ###..###..###..
        ###..###..###..
        .###..###..###.
        ..###..###..###
        ..###..###..###

    `masks.natten((12,), kernel=3, dilation=2)`, 12 x 12:

        #.#.#.......
        .#.#.#......
        #.#.#.......
        .#.#.#......
        ..#.#.#.....
        ...#.#.#....
        ....#.#.#...
        .....#.#.#..
        ......#.#.#.
        .......#.#.#
        ......#.#.#.
        .......#.#.#
    """
    extent = check_extents("natten", "extent", extent)
    axes = len(extent)
    kernels, dilations = (n if isinstance(n, tuple) else (n,) * axes for n in (kernel, dilation))
    causals = causal if isinstance(causal, tuple) else (causal,) * axes
    kernels = check_extents("natten", "kernel", kernels, axes)
    dilations = check_extents("natten", "dilation", dilations, axes)
    if len(causals) != axes or not all(map(is_flag, causals)):
        raise LibraryArgumentError(
            function="natten", name="causal", value=shown(causal),
            rule=f"True, False or a tuple of {axes} of them",
            advice="write e.g. causal=(True, False, False) for a video",
        )  # fmt: skip
    on_axes = tuple(zip(extent, kernels, dilations, map(as_bool, causals), strict=True))
    for length, size, step, ends in on_axes:
        if size * step > length or not (size % 2 or ends):
            raise LibraryArgumentError(
                function="natten", name="kernel", value=kernel,
                rule=f"odd on axes that are not causal, and times the dilation at most the extent, {extent}",
                advice=_kernel_that_fits((n, length // step) for length, n, step, _ in on_axes),
            )  # fmt: skip

    positions = math.prod(extent)

    @Mask
    def natten_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx = expect_size(q_idx, positions, "masks.natten", "extent")
        kv_idx = expect_size(kv_idx, positions, "masks.natten", "extent")
        return _near(q_idx, kv_idx, on_axes)

    return natten_mask


def _kernel_that_fits(sizes: Iterable[tuple[int, int]]) -> str:
    """Advice for a kernel with these sizes, given with the largest one of each axis."""
    fitting = tuple(max(1, min(pair) - (min(pair) + 1) % 2) for pair in sizes)
    return f"write e.g. kernel={fitting}"


def _near(query: Any, key: Any, axes: tuple[tuple[int, int, int, bool], ...]) -> Any:
    """Returns whether the key is in the kernel around the query on each axis of natten: its length, kernel,
    dilation, and whether it is causal.
    """
    near = None
    for axis, (length, size, step, causal) in reversed([*enumerate(axes)]):
        at, key_at = (query % length, key % length) if axis else (query, key)
        on_axis = _neighbors(at, key_at, length, size, step, causal)
        near = on_axis if near is None else on_axis & near
        query, key = query // length, key // length
    return near


def _neighbors(query: Any, key: Any, length: Any, size: int, step: int, causal: bool) -> Any:
    """Returns whether the key's coordinate is in the kernel around the query's, on one axis of natten."""
    if step > 1:
        # each of the parts is an axis of its own; they differ in length by one
        part = query % step
        within = _neighbors(query // step, key // step, (length - 1 - part) // step + 1, size, 1, causal)
        return within & (part == key % step)
    if causal:
        return (query >= key) & (query - key < size)
    reach = size // 2
    if isinstance(length, int):
        center = torch.clamp(query, reach, length - 1 - reach)
    else:
        center = torch.minimum(torch.clamp(query, min=reach), length - 1 - reach)
    return abs(center - key) <= reach


def sliding_tiles(extent: tuple[int, ...], tile: tuple[int, ...], kernel: tuple[int, ...]) -> Mask:
    """A tile of an image or a video attends to a box of `kernel` tiles around it. On each axis:

        |clamp(t, kernel // 2, tiles - 1 - kernel // 2) - t'| <= kernel // 2

    Here t and t' are the tiles of q_idx and kv_idx. At a border the box moves inwards.

        extent  (length,), (height, width) or (frames, height, width) in positions
        tile    in positions, one number for each axis; it divides the extent
        kernel  in tiles, one number for each axis; odd, at most the axis's number of tiles

    Positions go tile by tile, in the order of `tile_order`. If a tile has as many positions as a block of the
    mask, no block is partial.

    Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025.

    Example:

        mask_mod = masks.sliding_tiles(extent=(4, 16, 16), tile=(2, 8, 8), kernel=(1, 1, 1))
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024, BLOCK_SIZE=128)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.sliding_tiles(extent=(2, 10), tile=(2, 2), kernel=(1, 3))`, 20 x 20:

        ############........
        ############........
        ############........
        ############........
        ############........
        ############........
        ############........
        ############........
        ....############....
        ....############....
        ....############....
        ....############....
        ........############
        ........############
        ........############
        ........############
        ........############
        ........############
        ........############
        ........############
    """
    tile, counts = check_tiles("sliding_tiles", extent, tile)
    kernel = check_extents("sliding_tiles", "kernel", kernel, len(counts))
    if any(size % 2 == 0 or size > count for size, count in zip(kernel, counts, strict=True)):
        raise LibraryArgumentError(
            function="sliding_tiles", name="kernel", value=kernel,
            rule=f"odd and at most the number of tiles, {counts}",
            advice=_kernel_that_fits(zip(kernel, counts, strict=True)),
        )  # fmt: skip
    on_axes = tuple((count, size, 1, False) for count, size in zip(counts, kernel, strict=True))
    volume = math.prod(tile)
    positions = volume * math.prod(counts)

    @Mask
    def sliding_tiles_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx = expect_size(q_idx, positions, "masks.sliding_tiles", "extent")
        kv_idx = expect_size(kv_idx, positions, "masks.sliding_tiles", "extent")
        return _near(q_idx // volume, kv_idx // volume, on_axes)

    return sliding_tiles_mask


def vision_cross(intervals: Tensor, image_idx: Tensor) -> Mask:
    """A text token attends to the tokens of its images; each image has an interval of text positions:

        start <= q_idx < stop  with  start, stop = intervals[image_idx[kv_idx]]

    `intervals` is an integer tensor [images, 2] with the text positions that see each image. `image_idx` is
    an integer tensor [KV] with the image of each image token.

    Source: Alayrac et al., Flamingo, 2022.

    Example:

        intervals = torch.tensor([[0, 70], [70, 512]], device=query.device)
        mask_mod = masks.vision_cross(intervals, torch.arange(1024, device=query.device) // 512)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)

    `masks.vision_cross(torch.tensor([[1, 4], [4, 8]]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))`, 8 x 8:

        ........
        ####....
        ####....
        ####....
        ....####
        ....####
        ....####
        ....####
    """
    check_tensor("vision_cross", "intervals", intervals, ranks=(2,), shapes="[images, 2]", last=2)
    check_tensor("vision_cross", "image_idx", image_idx, ranks=(1,), shapes="[KV]")

    @Mask
    def vision_cross_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        interval = intervals[look_up(image_idx, "masks.vision_cross", "image_idx", kv_idx)]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return vision_cross_mask


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
    numbers = torch.arange(math.prod(sizes), dtype=torch.int32, device=checked_device(device)).view(sizes)
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
    extent, device = check_extents("morton_order", "extent", extent), checked_device(device)
    coordinates = torch.meshgrid(*(torch.arange(n, device=device) for n in extent), indexing="ij")
    code = torch.zeros(extent, dtype=torch.int64, device=device)
    bits = max(extent).bit_length()
    for place, (bit, axis) in enumerate(itertools.product(range(bits), reversed(coordinates))):
        code |= ((axis >> bit) & 1) << place
    return code.flatten().argsort().to(torch.int32)


__all__ = [
    "morton_order", "natten", "reordered", "sliding_tiles",
    "standalone_window", "tile_order", "vision_cross",
]  # fmt: skip
