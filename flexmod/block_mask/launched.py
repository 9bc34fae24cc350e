"""What a launch reads of a block mask, and a key of all else that the launch depends on."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.block_mask.format import BlockMask
from flexmod.ir.fingerprint import tensor_key
from flexmod.ir.host_numbers import captures_on_device


def captured_tensors(mask: BlockMask | None) -> tuple[Tensor, ...]:
    """What the mask_mod captures."""
    return () if mask is None else mask._traced.tensors


def launched_tensors(mask: BlockMask | None) -> tuple[Tensor, ...]:
    """All of a mask that kernels read: its tiles, and what its mask_mod captures."""
    if mask is None:
        return ()
    return (*mask.held.tensors(), *mask._traced.tensors)


def with_numbers_on(mask: BlockMask, device: torch.device) -> BlockMask:
    """The mask for one launch: host numbers that its mask_mod captures, as they are now, on the device."""
    traced = captures_on_device(mask._traced, device)
    if traced is mask._traced:
        return mask
    made = BlockMask.__new__(BlockMask)
    made.__dict__.update(mask.__dict__, _traced=traced)
    return made


def launch_key(mask: BlockMask) -> tuple[object, ...] | None:
    """Equal where a launch differs at most in what tensors hold; None where that cannot be told.

    It does not keep the mask itself alive. Whatever of it is assigned anew makes another key.
    """
    held, traced = mask.held, mask._traced
    # a list may be assigned anew, runs are not
    lists = held.tensors() if held.form == "lists" else ()
    keys = [tensor_key(tensor) for tensor in (*lists, *traced.tensors)]
    if None in keys:
        return None
    parts = (len(lists), held.separate, held.by_column, held.written())
    rows, columns = mask.BLOCK_SIZE
    return held.name, *parts, traced, rows, columns, mask.seq_lengths, mask.full_tiles_padded, *keys
