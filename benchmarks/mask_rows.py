"""The masks whose building is measured: each a function of the length and the device, at a batch of 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod import masks

MaskMod = Callable[[Any, Any, Any, Any], Any]
HEADS = 16
TILE = 256  # tokens of a tile of a video: 4 frames of 8 x 8


def random_lengths(length: int) -> Tensor:
    """Lengths of documents of 100 to 8000 tokens that make up `length`, the same in every run."""
    drawn = torch.randint(100, 8001, (length // 100,), generator=torch.Generator().manual_seed(0))
    count = int((drawn.cumsum(0) < length).sum()) + 1
    drawn = drawn[:count].clone()
    drawn[-1] -= drawn.sum() - length
    return drawn


def document_ids(length: int, device: torch.device) -> Tensor:
    lengths = random_lengths(length)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device, torch.int32)


def image_sides(length: int) -> tuple[int, int]:
    width = 1 << (length.bit_length() // 2)
    return length // width, width


def noop(length: int, device: torch.device) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: q_idx >= 0


def causal(length: int, device: torch.device) -> MaskMod:
    return masks.causal()


def window(length: int, device: torch.device) -> MaskMod:
    return masks.sliding_window(1024)


def prefix(length: int, device: torch.device) -> MaskMod:
    return masks.prefix_lm(length // 4)


def documents(length: int, device: torch.device) -> MaskMod:
    return masks.document(document_ids(length, device))


def causal_documents(length: int, device: torch.device) -> MaskMod:
    return masks.document(document_ids(length, device), causal=True)


def ragged(length: int, device: torch.device) -> MaskMod:
    """A jagged batch, causal within each of its sequences."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), random_lengths(length).cumsum(0)])
    return masks.ragged(offsets.to(device), masks.causal())


def image_window(length: int, device: torch.device) -> MaskMod:
    return masks.standalone_window(*image_sides(length), 8)


def natten(length: int, device: torch.device) -> MaskMod:
    return masks.natten(*image_sides(length), 7)


def vision_cross(length: int, device: torch.device) -> MaskMod:
    """Text that sees the images of its paragraph, 1024 tokens each."""
    images = length // 1024
    starts = torch.arange(images) * 1024
    intervals = torch.stack([starts, (starts + 3000).clamp(max=length)], 1).to(device, torch.int32)
    return masks.vision_cross(intervals, (torch.arange(length) // 1024).to(device, torch.int32))


def dilated_window(length: int, device: torch.device) -> MaskMod:
    def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        apart = q_idx - kv_idx
        return (apart >= 0) & (apart <= 4096) & (apart % 4 == 0)

    return dilated


def block_diffusion(length: int, device: torch.device) -> MaskMod:
    """Noisy tokens, then clean ones, in blocks of 32 (Arriola et al., Block Diffusion, 2025)."""
    half = length // 2

    def diffusion(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        clean_q, clean_kv = q_idx >= half, kv_idx >= half
        block_q, block_kv = q_idx % half // 32, kv_idx % half // 32
        same = (block_q == block_kv) & (clean_q == clean_kv)
        past = clean_kv & ~clean_q & (block_q > block_kv)
        return same | past | (clean_kv & clean_q & (block_q >= block_kv))

    return diffusion


def shared_prefix(length: int, device: torch.device) -> MaskMod:
    """Many continuations of one prompt, each causal."""
    ids, prompt = document_ids(length, device), length // 8

    def shared(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < prompt) | (ids[q_idx] == ids[kv_idx]))

    return shared


def sliding_tiles(length: int, device: torch.device) -> MaskMod:
    """A video, tile by tile: tiles up to one away in time, height and width (Zhang et al., 2025)."""
    tiles = length // TILE
    wide = 1 << ((tiles.bit_length() - 1) // 3)
    high = wide

    def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        tile_q, tile_kv = q_idx // TILE, kv_idx // TILE
        near = torch.abs(tile_q % wide - tile_kv % wide) <= 1
        near = near & (torch.abs(tile_q // wide % high - tile_kv // wide % high) <= 1)
        return near & (torch.abs(tile_q // (wide * high) - tile_kv // (wide * high)) <= 1)

    return sliding


def tree(length: int, device: torch.device) -> MaskMod:
    """Tokens of a tree, depth first, that see their ancestors: kv_idx <= q_idx < end[kv_idx]."""
    back = torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    end: list[int] = [length] * length
    path: list[int] = []
    for node, levels in enumerate(back):
        for _ in range(min(len(path), levels)):
            end[path.pop()] = node
        path.append(node)
    ends = torch.tensor(end, dtype=torch.int32, device=device)

    def ancestors(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx < ends[kv_idx])

    return ancestors


def head_windows(length: int, device: torch.device) -> MaskMod:
    """A causal window of another length in each head."""
    windows = torch.randint(128, 4096, (HEADS,), generator=torch.Generator().manual_seed(0)).to(device)

    def windowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= windows[h])

    return windowed


# name -> (mask, heads)
MASKS: dict[str, tuple[Callable[[int, torch.device], MaskMod], int | None]] = {
    "no-op": (noop, None),
    "causal": (causal, None),
    "window 1024": (window, None),
    "prefix": (prefix, None),
    "documents": (documents, None),
    "documents, causal": (causal_documents, None),
    "jagged, causal": (ragged, None),
    "image window 8": (image_window, None),
    "NATTEN 7x7": (natten, None),
    "vision cross": (vision_cross, None),
    "dilated window": (dilated_window, None),
    "block diffusion": (block_diffusion, None),
    "shared prefix": (shared_prefix, None),
    "3-D sliding tiles": (sliding_tiles, None),
    "tree": (tree, None),
    "window by head": (head_windows, HEADS),
}
