"""Comparison of a flexmod BlockMask with torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_release import SEPARATES

from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.tiles import LISTS


def _same_parts(ours: BlockMask, theirs: Any) -> None:
    mine, others = ours.as_tuple(), theirs.as_tuple()
    if not SEPARATES:  # four parts more than torch has
        names = ("seq_lengths", *LISTS, "BLOCK_SIZE", "mask_mod")
        mine, others = (tuple(getattr(mask, name) for name in names) for mask in (ours, theirs))
    assert len(mine) == len(others)
    for one, other in zip(mine[:-1], others[:-1], strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


@pytest.fixture
def same_parts() -> Callable[[BlockMask, Any], None]:
    """Asserts that all parts but the mask_mod are equal to those of a torch mask."""
    return _same_parts
