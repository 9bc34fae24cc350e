"""Masks that differ from head to head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.ir.composed import Mask, and_masks, or_masks
from flexmod.ir.graph import expect_size
from flexmod.masks.checks import MaskMod, check_tensor


def by_head(choice: Tensor, *mask_mods: MaskMod) -> Mask:
    """Gives each head one of several masks:

        mask_mods[choice[h]](b, h, q_idx, kv_idx)

    `choice` is an integer tensor [H] with values from 0 to the number of masks - 1. A head with any other
    value attends to nothing. Build the block mask with H heads.

    Source: Gemma Team, Gemma 2, 2024 (windows in every second layer); Xiao et al., DuoAttention, 2024
    (windows in some heads).

    Example:

        choice = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1], device=query.device)
        mask_mod = masks.by_head(choice, masks.causal(), masks.sliding_window(128))
        block_mask = create_block_mask(mask_mod, None, 8, 1024, 1024)

    `masks.by_head(torch.tensor([1]), masks.causal(), masks.sliding_window(3))`, 8 x 8:

        #.......
        ##......
        ###.....
        .###....
        ..###...
        ...###..
        ....###.
        .....###
    """
    check_tensor("by_head", "choice", choice, ranks=(1,), shapes="[H]")
    if not mask_mods:
        raise LibraryArgumentError(
            function="by_head", name="mask_mods", value="empty", rule="one mask_mod or more",
            advice="write by_head(choice, masks.causal(), masks.sliding_window(128))",
        )  # fmt: skip

    def chosen(number: int) -> Mask:
        @Mask
        def choice_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return choice[expect_size(h, choice.shape[0], "masks.by_head", "choice")] == number

        return choice_mask

    return or_masks(*(and_masks(chosen(number), mask_mod) for number, mask_mod in enumerate(mask_mods)))
