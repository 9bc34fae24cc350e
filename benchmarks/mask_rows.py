"""The masks whose building is measured: each a function of the length and the device, at a batch of 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod import masks

MaskMod = Callable[[Any, Any, Any, Any], Any]
HEADS = 16


def random_lengths(length: int) -> Tensor:
    """Lengths of documents of 100 to 8000 tokens that make up `length`, the same in every run."""
    drawn = torch.randint(100, 8001, (length // 100 + 1,), generator=torch.Generator().manual_seed(0))
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


def jagged(length: int, device: torch.device) -> MaskMod:
    """Sequences of a jagged batch, causal within each of them."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), random_lengths(length).cumsum(0)])
    return masks.jagged(offsets.to(device), masks.causal())


def vision_cross(length: int, device: torch.device) -> MaskMod:
    """Text that sees the images of its paragraph, 1024 tokens each."""
    starts = torch.arange(length // 1024) * 1024
    intervals = torch.stack([starts, (starts + 3000).clamp(max=length)], 1).to(device, torch.int32)
    return masks.vision_cross(intervals, (torch.arange(length) // 1024).to(device, torch.int32))


def video(length: int, device: torch.device) -> MaskMod:
    """Tiles of 4 frames of 8 x 8, as nearly a cube of them as there can be, and all that are next to one."""
    tiles = length // 256
    wide = max(4, 1 << (tiles.bit_length() - 1) // 3)
    while tiles % wide**2:
        wide //= 2
    deep = tiles // wide**2
    across, along = (3 if side > 2 else 1 for side in (wide, deep))
    return masks.sliding_tiles((4 * deep, 8 * wide, 8 * wide), (4, 8, 8), (along, across, across))


def tree(length: int, device: torch.device) -> MaskMod:
    """A random tree, depth first: from one node to the next a level down, or up to two levels back."""
    back = torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    parents: list[int] = []
    path: list[int] = []
    for node, levels in enumerate(back):
        del path[max(0, len(path) - levels) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return masks.tree(torch.tensor(parents, device=device))


def head_windows(length: int, device: torch.device) -> MaskMod:
    """A causal window of another length in each head."""
    windows = torch.randint(128, 4096, (HEADS,), generator=torch.Generator().manual_seed(0))
    return masks.sliding_window(windows.to(device))


# name -> (mask, heads)
MASKS: dict[str, tuple[Callable[[int, torch.device], MaskMod], int | None]] = {
    "no-op": (noop, None),
    "causal": (lambda n, device: masks.causal(), None),
    "window 1024": (lambda n, device: masks.sliding_window(1024), None),
    "prefix": (lambda n, device: masks.prefix_lm(n // 4), None),
    "documents": (lambda n, device: masks.document(document_ids(n, device)), None),
    "documents, causal": (lambda n, device: masks.document(document_ids(n, device), causal=True), None),
    "jagged, causal": (jagged, None),
    "image window 8": (lambda n, device: masks.standalone_window(*image_sides(n), 9), None),
    "NATTEN 7x7": (lambda n, device: masks.natten(image_sides(n), 7), None),
    "vision cross": (vision_cross, None),
    "dilated window": (lambda n, device: masks.dilated_window(1024, dilation=4), None),
    "block diffusion": (lambda n, device: masks.block_diffusion(n // 2, 32), None),
    "shared prefix": (lambda n, device: masks.shared_prefix(n // 8, document_ids(n, device)), None),
    "3-D sliding tiles": (video, None),
    "tree": (tree, None),
    "window by head": (head_windows, HEADS),
}
