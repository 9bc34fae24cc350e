"""The builder against torch's, against brute force, and within its memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch_release import separates

from block_mask.zoo import ZOO
from flexmod import errors, masks, mods
from flexmod.block_mask import tiles
from flexmod.block_mask.build import and_masks, create_block_mask, create_mask, noop_mask, or_masks


@pytest.mark.parametrize("one_kind", [False, pytest.param(True, marks=separates)])
@pytest.mark.parametrize("name", ZOO)
def test_equal_to_torch(name, one_kind, same_parts):
    mask_mod, *sizes = ZOO[name]
    options = {"device": "cpu", **({"separate_full_blocks": False} if one_kind else {})}
    same_parts(
        create_block_mask(mask_mod, *sizes, **options), theirs.create_block_mask(mask_mod, *sizes, **options)
    )


@pytest.mark.parametrize("block", [1, 48, (64, 256), (300, 16), (1 << 13, 128), 1 << 30])
def test_equal_to_torch_at_other_tile_sizes(block, same_parts):
    mask_mod = and_masks(masks.causal(), masks.sliding_window(90))
    if isinstance(block, int) and block == 1 << 30:
        # torch would pad to 2 ** 60 elements: one partial tile is what the definition says
        mask = create_block_mask(mask_mod, None, None, 150, 170, "cpu", block)
        assert mask.kv_num_blocks.tolist() == [[[1]]] and mask.full_kv_num_blocks.tolist() == [[[0]]]
        return
    lengths = (150, 170) if block != (1 << 13, 128) else (3, 170)
    same_parts(
        create_block_mask(mask_mod, None, None, *lengths, "cpu", block),
        theirs.create_block_mask(mask_mod, None, None, *lengths, "cpu", block),
    )


@pytest.mark.parametrize("name", ZOO)
def test_create_mask_equal_to_torch(name):
    mask_mod, *sizes = ZOO[name]
    ours = create_mask(mask_mod, *sizes, device="cpu")
    assert ours.dtype == torch.bool and ours.is_contiguous()
    assert torch.equal(ours, theirs.create_mask(mask_mod, *sizes, device="cpu"))


@pytest.mark.parametrize(("query", "key"), [(1, 1), (1, 300), (127, 129), (513, 130)])
def test_brute_force(query, key):
    """Each tile is what its elements, one call of the mod for each, say."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx // 7 + kv_idx // 5 + b) % 3 != h

    block = (64, 32)
    mask = create_block_mask(mask_mod, 2, 2, query, key, "cpu", block)
    q, k = torch.arange(query)[:, None], torch.arange(key)
    for b, h in itertools.product(range(2), range(2)):
        kept = mask_mod(b, h, q, k)
        for row, column in itertools.product(*map(range, mask.to_dense().shape[2:])):
            tile = kept[row * 64 : row * 64 + 64, column * 32 : column * 32 + 32]
            full = bool(tile.all()) and tile.shape == block
            assert listed(mask.kv_num_blocks, mask.kv_indices, b, h, row, column) == (
                bool(tile.any()) and not full
            )
            assert listed(mask.full_kv_num_blocks, mask.full_kv_indices, b, h, row, column) == full


def listed(counts, indices, b, h, row, column):
    return column in indices[b, h, row, : counts[b, h, row]].tolist()


def test_padded_tiles_are_partial():
    mask = create_block_mask(noop_mask, None, None, 130, 200, "cpu")
    assert mask.full_kv_num_blocks.tolist() == [[[1, 0]]]
    assert mask.kv_num_blocks.tolist() == [[[1, 2]]]


@pytest.mark.parametrize("answer", [True, False])
def test_python_bool(answer):
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: answer, 2, 3, 256, 128, "cpu")
    assert mask.full_kv_num_blocks.tolist() == [[[int(answer)] * 2] * 3] * 2
    assert create_mask(lambda b, h, q_idx, kv_idx: answer, 2, 3, 5, 6, "cpu").all().item() is answer


@pytest.mark.parametrize("rows_at_once", [1, 10, 1 << 22])
def test_lists_are_made_in_bounded_pieces(rows_at_once, monkeypatch):
    monkeypatch.setattr(tiles, "TILES_AT_ONCE", rows_at_once)
    active = torch.rand(2, 1, 17, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    counts, indices = tiles.ordered(active)
    assert torch.equal(indices.long(), active.int().argsort(dim=-1, descending=True, stable=True))
    assert torch.equal(counts.long(), active.sum(-1))
    assert torch.equal(tiles.dense((counts, indices), 5), active)


def test_built_once_for_what_the_mask_does_not_read():
    mask = create_block_mask(masks.causal(), 64, 64, 256, 256, "cpu")
    assert mask.kv_indices.shape == (64, 64, 2, 2)
    assert mask.storage.runs("kv").rows.shape == (1, 1, 2, 2, 3)


def test_create_mask_of_a_score_mod():
    sizes = (2, 2, 33, 40)
    for score_mod in (
        mods.causal_score(),
        mods.alibi(2),
        lambda score, b, h, q_idx, kv_idx: score - float("inf"),
    ):
        ours = create_mask(score_mod, *sizes, device="cpu")
        assert torch.equal(ours, theirs.create_mask(score_mod, *sizes, device="cpu"))


def test_combinators():
    empty_and, empty_or = and_masks(), or_masks()
    assert create_mask(empty_and, None, None, 3, 3, "cpu").all()
    assert not create_mask(empty_or, None, None, 3, 3, "cpu").any()
    mixed = and_masks(masks.causal(), lambda b, h, q_idx, kv_idx: True)
    assert torch.equal(create_mask(mixed, 1, 1, 9, 9, "cpu")[0, 0], torch.ones(9, 9).tril().bool())
    # torch's own combinators build on flexmod's masks, and the other way round
    both = theirs.and_masks(masks.causal(), theirs.or_masks(masks.sliding_window(5), theirs.noop_mask))
    assert torch.equal(create_mask(both, 1, 1, 50, 50, "cpu"), theirs.create_mask(both, 1, 1, 50, 50, "cpu"))


def refusal(error, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_refused_sizes():
    causal = masks.causal()
    assert refusal(errors.LengthError, create_block_mask, causal, 1, 1, 0, 5, "cpu").startswith(
        "Q_LEN is 0; it must be an integer from 1 to 1073741824."
    )
    for sizes in ((1, 1, 2**30 + 1, 5), (1, 1, 5, 10**20)):  # kernels count as far
        assert "_LEN is 1" in refusal(errors.LengthError, create_block_mask, causal, *sizes, "cpu", 2**30)
    refusal(errors.MaskExtentError, create_block_mask, lambda b, h, q, k: b > q, 2**63, 1, 5, 5, "cpu")
    refusal(errors.BlockSizeError, create_block_mask, causal, 1, 1, 5, 5, "cpu", 2**63)
    assert create_block_mask(causal, 1, 1, 2**30, 5, "cpu", 2**30).shape == (1, 1, 2**30, 5)
    for lengths in (torch.tensor([4, 5]), np.array([4, 5])):  # of each document, where one number is meant
        assert refusal(errors.LengthError, create_block_mask, causal, 1, 1, lengths, 5, "cpu").endswith(
            "Instead: give the number of positions, e.g. Q_LEN=query.shape[2]."
        )
    assert refusal(errors.LengthError, create_mask, causal, 1, 1, 4, 2.5, "cpu").startswith(
        "KV_LEN is 2.5; it must be an integer from 1 to 1073741824."
    )
    assert refusal(errors.MaskExtentError, create_block_mask, causal, 1, -2, 5, 5, "cpu") == (
        "H is -2; it must be an integer from 1 to 1073741824 or None.\n"
        "  Instead: give H=query.shape[1], or None if the mask is the same for each."
    )
    assert refusal(errors.BlockSizeError, create_block_mask, causal, 1, 1, 5, 5, "cpu", (128, 0)) == (
        "BLOCK_SIZE (128, 0) is neither an integer from 1 to 1073741824 nor a pair of them.\n"
        "  Instead: use BLOCK_SIZE=128 or BLOCK_SIZE=(queries, keys)."
    )


def test_refused_mods():
    assert "no multiple" not in refusal(
        errors.ModArityError, create_block_mask, mods.softcap(5.0), 1, 1, 5, 5, "cpu"
    )
    refusal(
        errors.MaskResultError,
        create_block_mask,
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx,
        1,
        1,
        5,
        5,
        "cpu",
    )
    assert refusal(errors.NotCallable, and_masks, masks.causal(), 3) == (
        "mask_mod is an int, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def mask_mod(b, h, q_idx, kv_idx): "
        "return q_idx >= kv_idx."
    )


def test_capture_on_another_device():
    ids = torch.zeros(8, dtype=torch.int32, device="meta")
    for call in (create_block_mask, create_mask):
        assert refusal(errors.DeviceMismatch, call, masks.document(ids), 1, 1, 8, 8, "cpu") == (
            "the mask is on cpu but ids is on meta.\n  Instead: make ids on cpu; on meta it has no elements."
        )


def test_default_device(device):
    expected = torch.empty(0, device=device).device
    assert create_block_mask(masks.causal(), None, None, 8, 8).kv_indices.device == expected
    assert create_mask(masks.causal(), None, None, 8, 8).device == expected
