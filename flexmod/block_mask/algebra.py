"""The masks that follow from a mask: its slices, other lengths, another device, &, | and ~."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from flexmod.block_mask import combine, cuts
from flexmod.block_mask.mask_mod import trace_mask
from flexmod.block_mask.parts import length
from flexmod.block_mask.rebase import moved
from flexmod.block_mask.refresh import fresh
from flexmod.block_mask.tiles import FLASH_PARTS

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask


class Algebra:
    """A mask that others are made of, as it is when it is asked."""

    def __getitem__(self, index: Any) -> BlockMask:
        """mask[b, h, q]: some batches, heads and rows of tiles. No dimension is lost: mask[0] has B=1.

        An entry is an int, a slice, or a list or tensor of ints or bools. The slice sees the positions of the
        whole: the mask_mod of mask[1] gets b = 1, that of mask[:, :, 2] gets q_idx from 2 * BLOCK_SIZE[0] on.

        Raises BlockMaskIndexError.
        """
        return cuts.sliced(fresh(self), index)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner: the same mask_mod on the first queries and keys.

        Raises BlockMaskCropError where the lengths grow.
        """
        return cuts.cropped(fresh(self), (length("Q_LEN", new_q_len), length("KV_LEN", new_kv_len)))

    def resize(self, q_len: int, kv_len: int) -> BlockMask:
        """The same mask_mod on other lengths, smaller or larger: as building it, but tiles that are known are
        kept. So a mask that grows with a sequence, `mask.resize(n + 1, n + 1)`, looks at one row and one
        column of tiles.

        Raises LengthError, and BlockMaskResizeError where a mask that was given as lists would grow.
        """
        return combine.resized(fresh(self), (length("Q_LEN", q_len), length("KV_LEN", kv_len)))

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks keep. A dimension of 1, for batch or head, serves each of the other's.

        Raises BlockMaskCombineError.
        """
        return self._with(other, "and")

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either mask keeps. Raises BlockMaskCombineError."""
        return self._with(other, "or")

    def _with(self, other: BlockMask, how: Literal["and", "or"]) -> BlockMask:
        if not isinstance(other, Algebra):
            return NotImplemented
        return combine.combined(fresh(self), fresh(other), how)

    def __invert__(self) -> BlockMask:
        """What the mask does not keep. Raises BlockMaskCombineError."""
        return combine.complement(fresh(self))

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask with its tiles on another device. Tensors that mask_mod captures stay where they are."""
        mask = fresh(self)
        mask_mod = moved(mask.mask_mod, device)
        traced = mask._traced if mask_mod is mask.mask_mod else trace_mask(mask_mod, torch.device(device))
        new = mask.of_held(
            mask.held.to(device), mask.seq_lengths, mask.BLOCK_SIZE, mask_mod, traced, mask.full_tiles_padded
        )
        new._classified = mask._classified
        for name in FLASH_PARTS:
            part = getattr(mask, name)
            setattr(new, name, None if part is None else part.to(device))
        new.dq_kv_order_spt = mask.dq_kv_order_spt
        return new
