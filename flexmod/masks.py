"""A library of masks. Each function returns an ordinary mask_mod(b, h, q_idx, kv_idx) -> bool.

They compose with `and_masks` and `or_masks`, and with masks of your own:

    mask_mod = flexmod.and_masks(masks.causal(), masks.document(ids))
    block_mask = flexmod.create_block_mask(mask_mod, None, None, 8192, 8192)
    out = flexmod.flex_attention(query, key, value, block_mask=block_mask)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError

MaskMod = Callable[[Any, Any, Any, Any], Any]
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


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


def sliding_window(window: int, causal: bool = True) -> MaskMod:
    """A query attends to keys at most `window` positions away: 0 <= q_idx - kv_idx <= window.

    That is window + 1 keys, its own position among them. With causal=False the window reaches to both sides,
    |q_idx - kv_idx| <= window.

    Source: Beltagy et al., Longformer, 2020; Jiang et al., Mistral 7B, 2023.

        mask_mod = masks.sliding_window(1024)
        block_mask = create_block_mask(mask_mod, None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    _check_number("sliding_window", "window", window, least=0)

    def sliding_window_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    def sliding_window_both_sides(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx <= window) & (kv_idx - q_idx <= window)

    return sliding_window_causal if causal else sliding_window_both_sides


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Every query sees the whole prefix, and is causal after it: (kv_idx < prefix) | (q_idx >= kv_idx).

    `prefix` is a number of positions, or an integer tensor [B] with one for each batch.

    Source: Raffel et al., T5, 2019.

        mask_mod = masks.prefix_lm(torch.tensor([100, 250], device="cuda"))
        block_mask = create_block_mask(mask_mod, 2, None, 4096, 4096)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    if isinstance(prefix, Tensor):
        _check_tensor("prefix_lm", "prefix", prefix, ranks=(1,), shapes="[B]")
    else:
        _check_number("prefix_lm", "prefix", prefix, least=0)

    def prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        length = prefix[b] if isinstance(prefix, Tensor) else prefix
        return (kv_idx < length) | (q_idx >= kv_idx)

    return prefix_mask


def document(ids: Tensor, causal: bool = False) -> MaskMod:
    """Packed documents keep to themselves: ids[q_idx] == ids[kv_idx], with causal=True also q_idx >= kv_idx.

    `ids` is an integer tensor [S], the document of each position, or [B, S] with a packing for each batch.

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.

        ids = torch.repeat_interleave(torch.arange(3, device="cuda"), torch.tensor([1000, 2000, 1096],
        device="cuda")) block_mask = create_block_mask(masks.document(ids, causal=True), None, None, 4096,
        4096) out = flex_attention(query, key, value, block_mask=block_mask)
    """
    _check_tensor("document", "ids", ids, ranks=(1, 2), shapes="[S] or [B, S]")

    def document_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        of_batch = ids if ids.dim() == 1 else ids[b]
        same = of_batch[q_idx] == of_batch[kv_idx]
        return same & (q_idx >= kv_idx) if causal else same

    return document_mask


def ragged(offsets: Tensor, mask_mod: MaskMod | None = None) -> MaskMod:
    """Sequences packed one after another; `mask_mod` sees the positions within its own sequence.

        sequence[q_idx] == sequence[kv_idx]  and  mask_mod(b, h, q_idx - start, kv_idx - start)

    `offsets` is an integer tensor [n + 1] that ascends from 0 to the total length: sequence i holds the
    positions from offsets[i] to offsets[i + 1], as in a nested tensor of jagged layout. `mask_mod` None keeps
    every pair within a sequence.

        offsets = torch.tensor([0, 1000, 3000, 4096], device="cuda")
        block_mask = create_block_mask(masks.ragged(offsets, masks.prefix_lm(64)), None, None, 4096, 4096)
        out = flex_attention(packed_query, packed_key, packed_value, block_mask=block_mask)
    """
    _check_tensor("ragged", "offsets", offsets, ranks=(1,), shapes="[n + 1]")
    sequence = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
    start = offsets[:-1][sequence]

    def ragged_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = sequence[q_idx] == sequence[kv_idx]
        if mask_mod is None:
            return same
        return same & mask_mod(b, h, q_idx - start[q_idx], kv_idx - start[kv_idx])

    return ragged_mask


def padding(lengths: Tensor) -> MaskMod:
    """Batches padded to one length: kv_idx < lengths[b]. Padded queries still attend to what is there.

    `lengths` is an integer tensor [B].

        lengths = torch.tensor([1000, 730], device="cuda")
        block_mask = create_block_mask(masks.padding(lengths), 2, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    _check_tensor("padding", "lengths", lengths, ranks=(1,), shapes="[B]")

    def padding_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < lengths[b]

    return padding_mask


def standalone_window(height: int, width: int, window: int) -> MaskMod:
    """Pixels of an image attend to a square around them: |row - row'| <= window and |column - column'| <=
    window.

    Positions are pixels row by row, height * width of them: row = q_idx // width, column = q_idx % width.

    Source: Ramachandran et al., Stand-Alone Self-Attention in Vision Models, 2019.

        mask_mod = masks.standalone_window(height=128, width=64, window=8)
        block_mask = create_block_mask(mask_mod, None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    _check_image("standalone_window", height, width)
    _check_number("standalone_window", "window", window, least=0)

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
    _check_image("natten", height, width)
    rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    for size, extent in ((rows, height), (columns, width)):
        if not _is_int(size) or size < 1 or size % 2 == 0 or size > extent:
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
    _check_tensor("vision_cross", "intervals", intervals, ranks=(2,), shapes="[images, 2]")
    _check_tensor("vision_cross", "image_idx", image_idx, ranks=(1,), shapes="[KV]")

    def vision_cross_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        interval = intervals[image_idx[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return vision_cross_mask


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(function: str, name: str, value: Any, least: int) -> None:
    if not _is_int(value) or value < least:
        raise LibraryArgumentError(
            function=function, name=name, value=repr(value), rule=f"an integer of {least} or more",
            advice="count it in positions",
        )  # fmt: skip


def _check_image(function: str, height: int, width: int) -> None:
    _check_number(function, "height", height, least=1)
    _check_number(function, "width", width, least=1)


def _check_tensor(function: str, name: str, value: Any, ranks: tuple[int, ...], shapes: str) -> None:
    if isinstance(value, Tensor) and value.dim() in ranks and value.dtype in INTEGERS:
        return
    given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise LibraryArgumentError(
        function=function, name=name, value=given, rule=f"an integer tensor of shape {shapes}",
        advice="convert it, e.g. torch.as_tensor(values, dtype=torch.int32, device=query.device)",
    )  # fmt: skip
