"""Runs and lists: each says what the table says, and a mask launches from what it holds."""

from __future__ import annotations

import pytest
import torch

from block_mask.zoo import ZOO
from flexmod import masks
from flexmod.block_mask import tiles
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.storage import TileStorage
from flexmod.block_mask.tiles import Runs

GENERATOR = torch.Generator().manual_seed(0)


def random_table(*shape):
    """Tiles in runs of a few, so that neighbors of one kind and of two kinds both come up."""
    table = torch.randint(0, 3, shape, dtype=torch.int8, generator=GENERATOR)
    return torch.where(torch.rand(shape, generator=GENERATOR) < 0.5, table.roll(1, -1), table)


def by_hand(row, kind):
    """The runs of one kind in a list of tiles."""
    found = []
    for tile, its_kind in enumerate(row):
        if its_kind != kind:
            continue
        if found and found[-1][1] == tile:
            found[-1][1] = tile + 1
        else:
            found.append([tile, tile + 1])
    return found


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 4, 9), (1, 1, 7, 64), (5, 2)])
@pytest.mark.parametrize("tiles_at_once", [1, 20, 1 << 22])
def test_runs_of_a_table(shape, tiles_at_once, monkeypatch):
    monkeypatch.setattr(tiles, "TILES_AT_ONCE", tiles_at_once)
    for _ in range(5):
        table = random_table(*shape)
        made = tiles.of_table(table)
        for row, entry in zip(table.flatten(0, -2), made.rows.flatten(0, -3), strict=True):
            for kind, (listed, number, first) in ((1, entry[0].tolist()), (2, entry[1].tolist())):
                assert made.spans[first : first + number].tolist() == by_hand(row.tolist(), kind)
                assert listed == int((row == kind).sum())
        assert torch.equal(made.table(shape[-1]), table)


def test_places_between_rows_may_be_unused():
    """As where each row has its own stretch of `spans`, whatever it needs."""
    table = random_table(1, 1, 6, 10)
    tight = tiles.of_table(table)
    rows, spans = tight.rows.clone(), torch.full((2, 6, 5, 2), 7, dtype=torch.int32)
    for row, kind in torch.cartesian_prod(torch.arange(6), torch.arange(2)).tolist():
        _, number, first = tight.rows[0, 0, row, kind].tolist()
        spans[kind, row, :number] = tight.spans[first : first + number]
        rows[0, 0, row, kind, 2] = (kind * 6 + row) * 5
    assert torch.equal(tiles.Runs(rows, spans.view(-1, 2)).table(10), table)


@pytest.mark.parametrize("name", ZOO)
def test_by_column_is_by_row_turned(name):
    mask_mod, *sizes = ZOO[name]
    mask = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=(64, 32))
    table = mask.table()
    assert torch.equal(mask.storage.runs("q").table(table.shape[-2]), table.mT)
    lists = BlockMask(mask.seq_lengths, *mask.as_tuple()[2:10], BLOCK_SIZE=(64, 32), mask_mod=mask_mod)
    listed = lists.table()
    assert lists.storage.form == "lists" and torch.equal(listed, table.expand_as(listed))


def test_runs_grow_with_the_boundary():
    """A causal mask over 2^14 tokens in tiles of 16: 2^20 tiles, and not a hundred thousand bytes."""
    mask = create_block_mask(masks.causal(), None, None, 1 << 14, 1 << 14, "cpu", 16)
    kept = [
        part for axis in ("kv", "q") for part in (mask.storage.runs(axis).rows, mask.storage.runs(axis).spans)
    ]
    assert sum(part.untyped_storage().nbytes() for part in kept) <= 2 * 1024 * (24 + 16)


def test_looking_at_the_lists_leaves_the_runs():
    mask = create_block_mask(masks.causal(), 2, None, 500, 500, "cpu")
    assert mask.kv_indices is mask.kv_indices and mask.storage.form == "runs"
    assert mask.kv_num_blocks.shape == (2, 1, 4) and mask.to("cpu").storage.form == "runs"


@pytest.mark.parametrize("inference", [False, True])
def test_lists_that_were_written_to_are_what_counts(inference):
    with torch.inference_mode(inference):
        mask = create_block_mask(masks.causal(), None, None, 500, 500, "cpu")
        mask.kv_num_blocks[0, 0, 1] = 0
        assert mask.storage.form == "lists"
        assert mask.table()[0, 0, 1].tolist() == [tiles.FULL, 0, 0, 0]
    assert create_block_mask(masks.causal(), None, None, 500, 500, "cpu").storage.form == "runs"


def test_lists_that_were_assigned_are_what_counts():
    mask = create_block_mask(masks.causal(), None, None, 500, 500, "cpu")
    expected = mask.table().clamp(max=tiles.PARTIAL) * (mask.table() != tiles.FULL)
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    assert mask.storage.form == "lists"
    assert torch.equal(mask.table(), expected)
    assert mask.q_num_blocks is not None


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_held_is_taken_apart_and_put_together(ordered):
    """As masks go into a graph of torch.compile and come out again."""
    tiles = create_block_mask(masks.causal(), None, None, 500, 500, "cpu").storage.runs("kv")
    order = torch.tensor([3, 2, 1, 0], dtype=torch.int32) if ordered else None
    given = Runs(tiles.rows, tiles.spans, order)
    kept = TileStorage((1, 1), (4, 4), {"kv": given, "q": None}, {})
    names, tensors, numbers = kept.to("cpu").taken_apart()
    found = TileStorage.put_together(names, tensors, numbers, (4, 4), True)
    assert found.runs("q") is None and found.runs("kv").tensors() == kept.tensors() == given.tensors()
    assert len(kept.tensors()) == 2 + ordered
