"""Facts against brute force, and the line in which they are said."""

from __future__ import annotations

import pytest
import torch

from block_mask.zoo import ZOO
from flexmod import masks
from flexmod.block_mask.build import create_block_mask, create_mask
from flexmod.block_mask.format import BlockMask


def gaps(row):
    return "01" in "".join(map(str, row)).strip("0")


@pytest.mark.parametrize("block", [(64, 32), (128, 128)])
@pytest.mark.parametrize("name", ZOO)
def test_against_brute_force(name, block):
    mask_mod, *sizes = ZOO[name]
    mask = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=block)
    found = mask.facts()
    dense = create_mask(mask_mod, *mask.shape, device="cpu")
    assert found.density == (pytest.approx(int(dense.sum()) / dense.numel()),) * 2
    assert found.every_query == bool(dense.any(-1).all())
    tiles = mask.to_dense()
    assert found.one_run == (not any(map(gaps, tiles.flatten(0, -2).tolist())))
    assert found.longest == pytest.approx(float(tiles.sum(-1).max() / tiles.sum(-1).float().mean()))
    assert found.area == pytest.approx(float((tiles > 0).float().mean()))
    for axis, letter in enumerate("BH"):
        if letter in found.same:
            assert (dense == dense.narrow(axis, 0, 1)).all()


def test_within_a_budget():
    mask = create_block_mask(masks.causal(), None, None, 512, 512, "cpu")
    rough = mask.facts(budget=4 * 128 * 128 - 1)
    assert rough.density == (6 / 16, 10 / 16) and rough.every_query is None
    assert mask.facts(budget=4 * 128 * 128).density == (0.5 + 1 / 1024,) * 2
    everything = create_block_mask(masks.prefix_lm(512), None, None, 512, 512, "cpu")
    assert everything.facts(budget=0).every_query is True


def test_lists_that_say_less_than_the_mask():
    """What is not listed is not attended to; a full tile is, whatever the mask says."""
    counts, indices = torch.tensor([[[1, 0]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(
        counts, indices, counts, indices.flip(-1), mask_mod=masks.causal(), seq_lengths=(200, 256)
    )
    found = mask.facts()
    assert found.density == ((128 * 129 // 2 + 128 * 128) / (200 * 256),) * 2
    assert found.every_query is False and found.one_run


def test_the_line():
    assert str(create_block_mask(masks.causal(), 2, 3, 256, 256, "cpu").facts()) == (
        "50.20% of all pairs, in 75.00% of the tiles; every query has keys; one run of tiles a row; "
        "the longest row 1.33 times the mean; the same for all batches and heads"
    )
    mask = create_block_mask(masks.padding(torch.tensor([0, 300])), 2, None, 256, 512, "cpu", 64)
    assert str(mask.facts()) == (
        "29.30% of all pairs, in 31.25% of the tiles; some queries have no keys; one run of tiles a row; "
        "the longest row 2.00 times the mean"
    )
    assert str(mask).splitlines()[-2] == str(mask.facts())
    assert str(mask.facts(budget=0)).startswith("25.00% to 31.25% of all pairs")
    nothing = create_block_mask(lambda b, h, q_idx, kv_idx: False, 1, 1, 64, 64, "cpu").facts()
    assert str(nothing) == (
        "0.00% of all pairs, in 0.00% of the tiles; some queries have no keys; one run of tiles a row; "
        "the longest row 0.00 times the mean"
    )
