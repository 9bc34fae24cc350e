"""The picture is torch's, character by character."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.attention.flex_attention as theirs

from block_mask.zoo import ZOO
from flexmod import errors, masks
from flexmod.block_mask.build import create_block_mask


def without_facts(text):
    *lines, _, end = text.split("\n")
    return "\n".join([*lines, end])


@pytest.mark.parametrize("name", ZOO)
def test_str_equal_to_torch(name):
    mask_mod, *sizes = ZOO[name]
    ours = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=16)
    other = theirs.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=16)
    mine, others = str(ours), str(other)
    mine = without_facts(mine)
    others = re.sub(r"sparsity=-[\d.]+%", "sparsity=0.00%", others)
    if ours.kv_indices.shape[:2].numel() > 4:  # then each says in its own words that there is more
        mine, others = (text[: text.index("...")] for text in (mine, others))
    assert mine == others


@pytest.mark.parametrize("grid_size", [1, 3, 7, 20, (4, 9), (50, 1), -1])
def test_grid_sizes_equal_to_torch(grid_size):
    arguments = (masks.natten((24, 30), 7), None, None, 720, 719)
    ours = create_block_mask(*arguments, device="cpu", BLOCK_SIZE=16)
    other = theirs.create_block_mask(*arguments, device="cpu", BLOCK_SIZE=16)
    assert ours.to_string(grid_size) == other.to_string(grid_size)


def test_limit():
    mask = create_block_mask(masks.causal(), 3, 2, 256, 256, "cpu")
    picture = "██  \n████\n"
    names = [f"({b}, {h})" for b in range(3) for h in range(2)]
    more = "...\nThe first 2 are shown; to_string(limit=N) draws N, mask[b, h] picks one."
    assert mask.to_string(limit=2) == f"{names[0]}\n{picture}\n{names[1]}\n{picture}\n{more}"
    everything = "\n".join(f"{name}\n{picture}" for name in names)
    assert mask.to_string(limit=6) == mask.to_string(limit=-1) == everything


def test_cells_at_the_edge_are_not_diluted_by_padding():
    """Five rows of tiles in cells of two: the last cell holds one row, solid when that one is there."""
    everything = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= 0, None, None, 80, 80, "cpu", 16)
    assert everything.to_string(grid_size=3) == "(0, 0)\n" + "██████\n" * 3


def test_without_batch_dimensions():
    lists = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
    ours = create_block_mask(masks.causal(), None, None, 8, 8, "cpu").from_kv_blocks(*lists)
    assert ours.to_string() == theirs.BlockMask.from_kv_blocks(*lists).to_string() == "()\n██  \n████\n"


@pytest.mark.parametrize("grid_size", [0, -2, (3,), (2, 0), "20"])
def test_refused_grid_sizes(grid_size):
    mask = create_block_mask(masks.causal(), None, None, 256, 256, "cpu")
    with pytest.raises(errors.GridSizeError) as caught:
        mask.to_string(grid_size)
    assert str(caught.value) == (
        f"grid_size is {grid_size!r}; it is the largest number of rows and columns to draw.\n"
        "  Instead: give a positive integer, a pair (rows, columns) of them, or -1 to draw every tile."
    )
