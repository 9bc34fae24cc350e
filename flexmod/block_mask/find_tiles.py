"""Finds the tiles of a traced mask_mod: by generated kernels on a GPU, in torch elsewhere.

The bounds of the mask decide whole tiles, from coarse to fine. Only the elements of undecided tiles are
evaluated (`generated.py`, `refine.py`). A mask that is the same for each batch entry or head is built once.
On a GPU, torch finds the tiles of the first mask of a mask_mod, while its kernels compile (`first_mask.py`).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from flexmod.block_mask import refine
from flexmod.block_mask.storage import TileStorage
from flexmod.block_mask.tiles import PARTIAL, tile_count
from flexmod.errors import DeviceMismatch
from flexmod.ir.evaluate import captures_on_device, is_host_number
from flexmod.ir.graph import check_sizes
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced
from flexmod.runtime.lazy_imports import lazy_imports


def find_tiles(
    traced: Traced,
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    separate: bool,
) -> TileStorage:
    """Finds the tiles of a mask_mod for (B, H, Q_LEN, KV_LEN); `check_captures` must accept its captures.

    `separate` False lists full tiles as partial. Raises CallSizeError, and every error of bounds and kernels.
    """
    check_sizes(traced.graph, sizes, "the block mask")
    moved = captures_on_device(Traced(traced.graph.of_any_size(), traced.tensors), device)
    if not has_kernels(device):
        return _in_torch(moved, sizes, block, device, separate)
    first_mask, generated = _with_kernels()
    if first_mask.is_first(moved, sizes, block, device, separate):
        # without captured tensors, the host is faster: a GPU's kernels of torch are loaded one by one
        place = device if moved.tensors else torch.device("cpu")
        found = _in_torch(moved, sizes, block, place, separate).to(device)
        return found.in_order() if moved.tensors and generated.is_ordered(block, device) else found
    by_axis = generated.build(moved, sizes, block, device, separate)
    grid = tile_count(sizes[2], block[0]), tile_count(sizes[3], block[1])
    return TileStorage(sizes[:2], grid, by_axis, {}, separate)


def _in_torch(
    traced: Traced,
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    separate: bool,
) -> TileStorage:
    table = refine.classify(Traced(fitted(traced.graph, sizes), traced.tensors), sizes, block, device)
    if not separate:
        table.clamp_(max=PARTIAL)
    return TileStorage.of_table(table, sizes[:2], separate)


@cache
def _with_kernels() -> tuple[ModuleType, ModuleType]:
    with lazy_imports():
        from flexmod.block_mask import first_mask, generated
    return first_mask, generated


def has_kernels(device: torch.device) -> bool:
    """Do generated kernels find the tiles on this device?"""
    return device.type == "cuda"


def check_captures(traced: Traced, device: torch.device) -> None:
    """Raises DeviceMismatch if a captured tensor is neither on the mask's device nor a number of the host."""
    for capture, tensor in zip(traced.graph.captures, traced.tensors, strict=True):
        if tensor.device != device and not is_host_number(tensor, device):
            raise DeviceMismatch(
                first="the mask",
                first_device=str(device),
                second=capture.name,
                second_device=str(tensor.device),
                name=capture.name,
            )
