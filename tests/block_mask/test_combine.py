"""Masks made of masks: what they keep, element by element, and equal to masks built of one mask_mod."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

from block_mask.zoo import IDS, IDS_BY_BATCH, ZOO
from flexmod import errors, flex_attention, masks
from flexmod.block_mask import refine
from flexmod.block_mask.build import and_masks, create_block_mask, create_mask, or_masks
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL

S = 520
MODS = {
    "causal": (masks.causal(), 1, 1),
    "window": (masks.sliding_window(100, causal=False), 1, 1),
    "document": (masks.document(IDS), 1, 1),
    "documents": (masks.document(IDS_BY_BATCH), 3, 1),
    "windows": (masks.sliding_window(torch.tensor([7, 300])), 1, 2),
    "natten": (masks.natten((20, 26), 7), 1, 1),
    "strided": (lambda b, h, q_idx, kv_idx: kv_idx % 40 < 7, 1, 1),
}  # fmt: skip
BLOCK = (32, 48)  # 520 is ragged in both


def built(name, **options):
    mask_mod, batch, heads = MODS[name]
    return create_block_mask(mask_mod, batch, heads, S, S, "cpu", BLOCK, **options)


def tiles_of(dense, block=BLOCK):
    """int8 [B, H, Qb, KVb]: what a mask [B, H, Q, KV] makes of its tiles."""
    pad = (0, -dense.shape[3] % block[1], 0, -dense.shape[2] % block[0])
    padded = torch.nn.functional.pad(dense, pad)
    kept = padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).sum((3, 5))
    return torch.where(kept == block[0] * block[1], FULL, torch.where(kept > 0, PARTIAL, EMPTY))


def kept(mask):
    """bool [B, H, Q, KV]: what a kernel makes of a mask. Full tiles whole, of others what mask_mod says."""
    of_mod = create_mask(mask.mask_mod, *mask.shape, device="cpu")
    rows, columns = (
        torch.arange(n) // size for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)
    )
    kinds = mask.table()[..., rows, :][..., columns].expand(mask.shape)
    return (kinds == FULL) | ((kinds == PARTIAL) & of_mod)


def same(found, expected):
    assert found.shape == expected.shape
    assert torch.equal(
        found.table().expand(expected.to_dense().shape), expected.table().expand_as(expected.to_dense())
    )
    by_column = [(m.q_num_blocks, m.full_q_num_blocks) for m in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*by_column, strict=True))


@pytest.mark.parametrize("pair", [*itertools.combinations(MODS, 2)], ids="-".join)
def test_both_and_either(pair):
    first, second = map(built, pair)
    sizes = [max(n) for n in zip(first.shape[:2], second.shape[:2], strict=True)]
    mods = [MODS[name][0] for name in pair]
    for found, together in ((first & second, and_masks(*mods)), (first | second, or_masks(*mods))):
        same(found, create_block_mask(together, *sizes, S, S, "cpu", BLOCK))
        assert torch.equal(kept(found), create_mask(together, *sizes, S, S, "cpu"))


@pytest.mark.parametrize("name", ZOO)
def test_complement(name):
    mask_mod, batch, heads, queries, keys = ZOO[name]
    mask = create_block_mask(mask_mod, batch, heads, queries, keys, "cpu", BLOCK)
    dense = ~create_mask(mask_mod, batch, heads, queries, keys, "cpu")
    assert torch.equal(kept(~mask), dense)
    assert torch.equal((~mask).table().expand_as(mask.to_dense()), tiles_of(dense).to(torch.int8))
    same(~~mask, mask)


def test_what_keeps_both_and_neither():
    mask = built("natten")
    assert (mask & ~mask).sparsity() == 100
    assert torch.equal(kept(mask | ~mask), torch.ones(1, 1, S, S, dtype=torch.bool))


@pytest.mark.parametrize("how", ["and", "or", "not"])
def test_full_tiles_that_are_not_told_apart(how):
    mask, other = built("causal", separate_full_blocks=False), built("document")
    mods = MODS["causal"][0], MODS["document"][0]
    found, dense = {
        "and": lambda: (mask & other, create_mask(and_masks(*mods), 1, 1, S, S, "cpu")),
        "or": lambda: (other | mask, create_mask(or_masks(*mods), 1, 1, S, S, "cpu")),
        "not": lambda: (~mask, ~create_mask(mods[0], 1, 1, S, S, "cpu")),
    }[how]()
    assert found.full_kv_indices is None
    assert torch.equal(kept(found), dense)


def given(mask_mod=None):
    """A mask of lists: tiles (0, 0), (1, 1) partial, (1, 0), (2, 2) full, of 60 x 70 positions."""
    counts, indices = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[[0, 1, 2], [1, 0, 2], [0, 1, 2]]]])
    full = torch.tensor([[[0, 1, 1]]]), torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 1]]]])
    return BlockMask.from_kv_blocks(
        counts, indices, *full, BLOCK_SIZE=(20, 24), mask_mod=mask_mod, seq_lengths=(60, 70)
    )


def test_lists_count_more_than_the_mask_mod_beside_them():
    mask = given(masks.sliding_window(3))
    other = create_block_mask(masks.causal(), 1, 1, 60, 70, "cpu", (20, 24))
    a, b = kept(mask), kept(other)
    assert torch.equal(kept(mask & other), a & b)
    assert torch.equal(kept(other | mask), a | b)
    assert torch.equal(kept(~mask), ~a)
    assert torch.equal(kept(~(~mask & other)), a | ~b)


def test_a_mask_mod_that_was_assigned_makes_lists_of_tiles():
    mask = create_block_mask(masks.causal(), 1, 1, 60, 70, "cpu", (20, 24))
    assert mask._is_classified
    mask.mask_mod = masks.sliding_window(3)
    assert not mask._is_classified
    assert torch.equal(kept(~mask), ~kept(mask))
    assert not mask[:, :, 1:]._is_classified


@pytest.mark.parametrize(
    "sizes",
    [(520, 520), (519, 521), (521, 519), (32, 48), (1, 1), (1000, 300), (300, 1000), (512, 528)],
    ids=str,
)
@pytest.mark.parametrize("name", ["causal", "window", "windows", "strided"])
def test_resize(name, sizes):
    mask_mod, batch, heads = MODS[name]
    expected = create_block_mask(mask_mod, batch, heads, *sizes, "cpu", BLOCK)
    found = built(name).resize(*sizes)
    same(found, expected)
    assert found.mask_mod is mask_mod
    assert found._is_classified


def test_a_mask_grows_by_a_position_at_a_time(monkeypatch):
    """As in decoding. Nothing but the last row and the last column of tiles is looked at."""
    looked_at = []
    decided = refine.Refined._decided

    def watched(self, rows, columns, at):
        looked_at.append(at)
        return decided(self, rows, columns, at)

    mask_mod = masks.sliding_window(20)
    mask = create_block_mask(mask_mod, 1, 1, 100, 100, "cpu", 16)
    monkeypatch.setattr(refine.Refined, "_decided", watched)
    for length in range(101, 150):
        mask = mask.resize(length, length)
        last = (length - 1) // 16
        assert all(((at[:, 2:] >= last - 1).any(1)).all() for at in looked_at)
        assert sum(map(len, looked_at)) <= 4 * last
        looked_at.clear()
    monkeypatch.undo()
    same(mask, create_block_mask(mask_mod, 1, 1, 149, 149, "cpu", 16))


def test_lists_can_shrink():
    mask = given(masks.sliding_window(3))
    smaller = mask.resize(45, 30)
    assert torch.equal(kept(smaller), kept(mask)[..., :45, :30])
    with pytest.raises(errors.BlockMaskResizeError):
        mask.resize(61, 70)


def test_what_does_not_go_together():
    mask = built("causal")
    by_batch = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= b, 1, 1, S, S, "cpu", BLOCK)
    lists = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
    for other in (
        create_block_mask(masks.causal(), 1, 1, S, S + 1, "cpu", BLOCK),
        create_block_mask(masks.causal(), 1, 1, S, S, "cpu", 32),
        BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK),
    ):
        with pytest.raises(errors.BlockMaskCombineError):
            mask & other
    with pytest.raises(errors.BlockMaskCombineError):
        by_batch | built("documents")
    with pytest.raises(errors.BlockMaskCombineError):
        create_block_mask(masks.causal(), 2, 1, S, S, "cpu", BLOCK) | built("documents")
    for one, other in ((mask, masks.causal()), (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, mask)):
        with pytest.raises(errors.BlockMaskCombineError, match="is not a BlockMask"):
            one & other
    with pytest.raises(TypeError):
        mask & 3


@pytest.mark.parametrize("name", ["dilated", "first and own", "returning"])
@pytest.mark.parametrize("more", [(1, 0), (0, 1), (17, 17), (100, 300)])
def test_a_larger_mask_keeps_pairs_past_the_old_end(name, more):
    """A tile at the old end may have been empty."""
    ids = torch.arange(1000) // 110 % 3
    mask_mod = {
        "dilated": masks.dilated_window(8, 200),
        "first and own": lambda b, h, q_idx, kv_idx: (kv_idx % 324 == 0) | (q_idx == kv_idx),
        "returning": lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
    }[name]
    small = create_block_mask(mask_mod, None, None, 324, 324, "cpu", 64)
    lengths = 324 + more[0], 324 + more[1]
    whole = create_block_mask(mask_mod, None, None, *lengths, "cpu", 64)
    assert torch.equal(small.resize(*lengths).table(), whole.table())


def attended(mask):
    """bool [Q, KV]: what a call attends to, in the last batch entry."""
    queries, keys = mask.seq_lengths
    query, key = (torch.zeros(mask.shape[0], 1, n, 16) for n in (queries, keys))
    value = torch.eye(keys).expand(mask.shape[0], 1, keys, keys)
    return flex_attention(query, key, value, block_mask=mask)[-1, 0] > 0


def test_parts_of_a_mask_keep_what_its_mask_mod_was() -> None:
    """A function decides otherwise once a variable of its closure is another one; tiles were made before."""
    width, ids = 8, torch.arange(S) // 50

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < width) & (ids[q_idx] == ids[kv_idx])

    q_idx, kv_idx, old = torch.arange(S)[:, None], torch.arange(S), ids
    causal = create_block_mask(masks.causal(), None, None, S, S, "cpu", BLOCK)
    mask = create_block_mask(window, None, None, S, S, "cpu", BLOCK)
    before = mask & causal
    width, ids = 40, torch.arange(S) // 20
    of_window = (q_idx - kv_idx < 8) & (old[:, None] == old)
    of_both = of_window & (q_idx >= kv_idx)
    for made in (before, mask & causal, before & causal, ~~before, before.to("cpu"), before[:, :, :]):
        assert torch.equal(attended(made), of_both)
    for made in (copy.deepcopy(before), pickle.loads(pickle.dumps(before)), BlockMask.cat([before, before])):
        assert torch.equal(attended(made), of_both)
    assert torch.equal(attended(~mask), ~of_window)
    assert torch.equal(attended(mask[:, :, 1:]), of_window[BLOCK[0] :])
    assert torch.equal(attended(mask | causal), of_window | (q_idx >= kv_idx))
    # writes to what the mask captures still count
    old[100:] = 3
    of_both_now = (q_idx - kv_idx < 8) & (old[:, None] == old) & (q_idx >= kv_idx)
    assert torch.equal(attended(mask & causal), of_both_now)


CUTS = {"crop": lambda mask: mask._adjust(20, 24), "resize": lambda mask: mask.resize(20, 24)}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_users_full_tile_stays_full_where_a_length_cuts_it(cut):
    """Its mask_mod may drop some of its elements."""
    counts, columns = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    lists = torch.zeros_like(counts), columns.expand(1, 1, 2, 2), counts, columns.expand(1, 1, 2, 2)
    even = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: q % 2 == 0)
    part = cut(even)
    query, key, value = (torch.randn(1, 1, n, 8) for n in (part.shape[2], part.shape[3], part.shape[3]))
    exact = torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double())
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=part), exact.float())


def shortened(mask, keys):
    found = copy.copy(mask)
    found.seq_lengths = mask.seq_lengths[0], keys
    return found


def with_room(mask, keys):
    """The mask for fewer keys, from lists that have room for more tiles."""
    short = mask.resize(mask.seq_lengths[0], keys)
    room = mask.kv_indices.shape[-1] - short.kv_indices.shape[-1]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(short, name) for name in names]
    lists[1], lists[3] = (torch.nn.functional.pad(part, (0, room)) for part in lists[1::2])
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, seq_lengths=short.seq_lengths
    )


@pytest.mark.parametrize("shorten", [shortened, with_room])
def test_tiles_past_the_keys_count_for_nothing(shorten):
    """Lists may have tiles, or room, for more keys than the mask has."""
    keys = 100  # ragged
    whole = built("window")
    mask, other = shorten(whole, keys), built("causal").resize(S, keys)
    window, causal = (create_mask(MODS[name][0], 1, 1, S, keys, "cpu") for name in ("window", "causal"))
    assert mask.to_dense().shape == other.to_dense().shape
    made = {
        "and": (mask & other, window & causal),
        "or": (other | mask, window | causal),
        "not": (~mask, ~window),
        "cat": (BlockMask.cat([mask, other]), torch.cat([window, causal])),
        "rows": ((~mask)[:, :, 1:], ~window[:, :, BLOCK[0] :]),
    }
    for found, dense in made.values():
        assert torch.equal(kept(found), dense)
        assert found.table().shape[-1] == tiles_of(dense).shape[-1]
        # a full tile is computed whole, so its padding must be none
        assert not ((found.table() == FULL) & (tiles_of(dense) != FULL)).any()
    assert mask.to_string(density=True) == whole.resize(S, keys).to_string(density=True)


MADE = {"both": lambda lists, other: lists & other, "not": lambda lists, other: ~lists}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_what_is_made_of_lists_does_not_grow(made):
    """The lists say nothing of positions past their lengths."""
    causal = create_block_mask(masks.causal(), 1, 1, 60, 70, "cpu", (20, 24))
    mask = made(given(masks.causal()), causal)
    later = mask[:, :, 1:]
    assert torch.equal(kept(mask.resize(45, 30)), kept(mask)[..., :45, :30])
    assert torch.equal(kept(later.resize(30, 70)), kept(mask)[..., 20:50, :])
    for lengths, made_for in (((61, 70), 60), ((60, 71), 70), ((200, 70), 60)):
        with pytest.raises(errors.CallSizeError, match=f"a block mask of lists is made for {made_for}"):
            mask.resize(*lengths)
    with pytest.raises(errors.CallSizeError, match="has 45, from position 20 on"):
        later.resize(45, 70)


def test_chosen_rows_do_not_grow():
    """There are no rows after the last chosen one; an even step goes on."""
    rows = create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16)[:, :, [2, 0, 3]]
    assert torch.equal(kept(rows.resize(20, 64)), kept(rows)[..., :20, :])
    for part, has in ((rows, 49), (rows[:, :, 1:], "33, from position 16 on")):
        with pytest.raises(errors.CallSizeError, match=f"chosen rows is made for 48 queries .* has {has}"):
            part.resize(part.seq_lengths[0] + 1, 64)
