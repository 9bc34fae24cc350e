"""Masks of images and videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.masks.checks import MaskMod, check_extents, check_image, check_number, check_tensor, is_int


def standalone_window(height: int, width: int, window: int) -> MaskMod:
    """Pixels of an image attend to a square around them: |row - row'| <= window and |column - column'| <=
    window.

    Positions are pixels row by row, height * width of them: row = q_idx // width, column = q_idx % width.

    Source: Ramachandran et al., Stand-Alone Self-Attention in Vision Models, 2019.

        mask_mod = masks.standalone_window(height=128, width=64, window=8)
        block_mask = create_block_mask(mask_mod, None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_image("standalone_window", height, width)
    check_number("standalone_window", "window", window, least=0)

    def standalone_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near_row = torch.abs(q_idx // width - kv_idx // width) <= window
        near_column = torch.abs(q_idx % width - kv_idx % width) <= window
        return near_row & near_column

    return standalone_mask


def natten(height: int, width: int, kernel: int | tuple[int, int]) -> MaskMod:
    """Pixels of an image attend to a kernel around them, which is moved inwards where it would cross the
    border.

        |clamp(row, kh // 2, height - 1 - kh // 2) - row'| <= kh // 2, the same for columns

    so that every pixel has kh * kw neighbors. Positions are pixels row by row; `kernel` is odd, one number or
    (kh, kw), and no larger than the image.

    Source: Hassani et al., Neighborhood Attention Transformer, 2022.

        mask_mod = masks.natten(height=90, width=90, kernel=7)
        block_mask = create_block_mask(mask_mod, None, None, 8100, 8100)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_image("natten", height, width)
    rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    for size, extent in ((rows, height), (columns, width)):
        if not is_int(size) or size < 1 or size % 2 == 0 or size > extent:
            raise LibraryArgumentError(
                function="natten", name="kernel", value=kernel,
                rule=f"odd, positive and at most the image, {height} x {width}",
                advice="write kernel=7 or kernel=(5, 7)",
            )  # fmt: skip
    reach_rows, reach_columns = rows // 2, columns // 2

    def natten_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        center_row = torch.clamp(q_idx // width, reach_rows, height - 1 - reach_rows)
        center_column = torch.clamp(q_idx % width, reach_columns, width - 1 - reach_columns)
        near_row = torch.abs(center_row - kv_idx // width) <= reach_rows
        near_column = torch.abs(center_column - kv_idx % width) <= reach_columns
        return near_row & near_column

    return natten_mask


def sliding_tiles(
    extent: tuple[int, int, int], tile: tuple[int, int, int], kernel: tuple[int, int, int]
) -> MaskMod:
    """Tiles of a video attend to a box of tiles around them, which is moved inwards where it would cross the
    border: on each axis

        |clamp(t, kernel // 2, tiles - 1 - kernel // 2) - t'| <= kernel // 2

    with t and t' the tiles of q_idx and kv_idx. `extent` is (frames, height, width) in positions; `tile`,
    which divides it, is in positions too; `kernel` counts tiles, is odd and no more than there are. Positions
    are tile by tile: those of one tile follow one another.

    Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025.

        mask_mod = masks.sliding_tiles(extent=(12, 48, 80), tile=(4, 8, 8), kernel=(3, 3, 3))
        block_mask = create_block_mask(mask_mod, None, None, 46080, 46080, BLOCK_SIZE=256)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    for name, value in (("extent", extent), ("tile", tile), ("kernel", kernel)):
        check_extents("sliding_tiles", name, value, axes=3)
    if any(whole % part for whole, part in zip(extent, tile, strict=True)):
        raise LibraryArgumentError(
            function="sliding_tiles", name="tile", value=tile,
            rule=f"a divisor of extent {extent} on each axis", advice="pad the video to whole tiles",
        )  # fmt: skip
    counts = [whole // part for whole, part in zip(extent, tile, strict=True)]
    if any(size % 2 == 0 or size > count for size, count in zip(kernel, counts, strict=True)):
        raise LibraryArgumentError(
            function="sliding_tiles", name="kernel", value=kernel,
            rule=f"odd and at most the number of tiles, {tuple(counts)}", advice="write kernel=(3, 3, 3)",
        )  # fmt: skip
    volume = tile[0] * tile[1] * tile[2]

    def sliding_tiles_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        query, key, near = q_idx // volume, kv_idx // volume, None
        for size, count in zip(kernel[::-1], counts[::-1], strict=True):
            reach = size // 2
            center = torch.clamp(query % count, reach, count - 1 - reach)
            on_axis = torch.abs(center - key % count) <= reach
            near = on_axis if near is None else on_axis & near
            query, key = query // count, key // count
        return near

    return sliding_tiles_mask


def vision_cross(intervals: Tensor, image_idx: Tensor) -> MaskMod:
    """A text token attends to the tokens of the images that are shown to it:

        start <= q_idx < stop  with  start, stop = intervals[image_idx[kv_idx]]

    `intervals` is an integer tensor [images, 2], the text positions that see an image; `image_idx` an integer
    tensor [KV], the image that each image token belongs to.

    Source: Alayrac et al., Flamingo, 2022.

        image_idx = torch.arange(2, device="cuda").repeat_interleave(1024)
        mask_mod = masks.vision_cross(torch.tensor([[0, 70], [70, 512]], device="cuda"), image_idx)
        block_mask = create_block_mask(mask_mod, None, None, 512, 2048)
    """
    check_tensor("vision_cross", "intervals", intervals, ranks=(2,), shapes="[images, 2]")
    check_tensor("vision_cross", "image_idx", image_idx, ranks=(1,), shapes="[KV]")

    def vision_cross_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        interval = intervals[image_idx[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return vision_cross_mask
