"""Masks made of masks on a GPU: equal to those that the builder makes there."""

from __future__ import annotations

import pytest
import torch

from benchmarks.mask_rows import document_ids
from flexmod import and_masks, create_block_mask, masks, or_masks
from gpu.test_block_masks import DEVICE, same_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

LENGTH = 5000


def mods():
    ids = document_ids(LENGTH, DEVICE)
    return masks.document(ids), masks.sliding_window(torch.tensor([64, 900], device=DEVICE))


def built(mask_mod, heads, length=LENGTH):
    return create_block_mask(mask_mod, None, heads, length, length, DEVICE, (128, 64))


def test_both_either_and_neither():
    documents, windows = mods()
    first, second = built(documents, None), built(windows, 2)
    same_tiles(first & second, built(and_masks(documents, windows), 2))
    same_tiles(first | second, built(or_masks(documents, windows), 2))
    same_tiles(~~second, second)

    def far(b, h, q_idx, kv_idx):
        return documents(b, h, q_idx, kv_idx) & ~windows(b, h, q_idx, kv_idx)

    same_tiles(first & ~second, built(far, 2))


@pytest.mark.parametrize("length", [300, 4999, 5001])
def test_resize(length):
    _, windows = mods()
    same_tiles(built(windows, 2).resize(length, length), built(windows, 2, length))


def test_pictures():
    documents, _ = mods()
    mask = built(documents, None)
    on_cpu = create_block_mask(
        masks.document(document_ids(LENGTH, torch.device("cpu"))),
        None,
        None,
        LENGTH,
        LENGTH,
        "cpu",
        (128, 64),
    )
    assert mask.to_string(density=True) == on_cpu.to_string(density=True)
    assert mask.to_svg() == on_cpu.to_svg()
