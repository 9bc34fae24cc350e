"""Masks from data: a table of tiles, a dense mask, masks concatenated, chosen batch entries."""

from __future__ import annotations

import pickle

import pytest
import torch

from block_mask.test_combine import BLOCK, kept, tiles_of
from block_mask.zoo import IDS_BY_BATCH, ZOO
from flexmod import BlockMask, create_block_mask, errors, flex_attention, masks, mods
from flexmod.block_mask import selection
from flexmod.block_mask.build import create_mask


def call(*sizes, block_mask=None, **options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(*size, requires_grad=True) for size in sizes)
    out = flex_attention(q, k, v, block_mask=block_mask, **options)
    out.sin().sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ZOO)
def test_from_dense_is_the_inverse_of_to_dense(name):
    mask_mod, *sizes = ZOO[name]
    mask = create_block_mask(mask_mod, *sizes, "cpu", BLOCK)
    found = BlockMask.from_dense(mask.to_dense(), BLOCK, mask_mod, mask.seq_lengths)
    assert torch.equal(found.to_dense(), mask.to_dense()) and found.shape == mask.shape
    assert torch.equal(kept(found), kept(mask))
    again = BlockMask.from_dense(found.to_dense(), found.BLOCK_SIZE, found.mask_mod, found.seq_lengths)
    assert torch.equal(again.table(), found.table())


@pytest.mark.parametrize("lengths", [(96, 144), (70, 100), None])
def test_a_table_of_tiles_keeps_all_scores_of_its_tiles(lengths):
    tiles = torch.tensor([[1, 0, 0], [0, 7, 0], [-1, 0, 1]])
    mask = BlockMask.from_dense(tiles, BLOCK, seq_lengths=lengths)
    q, kv = mask.seq_lengths
    elements = (tiles != 0).repeat_interleave(32, 0).repeat_interleave(48, 1)[None, None, :q, :kv]
    assert (q, kv) == (lengths or (96, 144))
    assert torch.equal(kept(mask), elements)
    assert torch.equal(mask.table(), tiles_of(elements).to(torch.int8))
    assert torch.equal(kept(~mask), ~elements)
    sizes = (1, 2, q, 16), (1, 2, kv, 16), (1, 2, kv, 16)
    equal(
        call(*sizes, block_mask=mask), call(*sizes, block_mask=create_block_mask(elements, BLOCK_SIZE=BLOCK))
    )
    with pytest.raises(errors.BlockMaskResizeError):
        mask.resize(200, 200)


def test_a_table_of_tiles_of_each_batch_and_head():
    tiles = torch.rand(2, 3, 4, 5) < 0.5
    mask = BlockMask.from_dense(tiles, 16)
    assert torch.equal(mask.to_dense(), tiles.int())
    assert torch.equal(mask[1, 2].to_dense(), tiles[1:, 2:].int())
    assert torch.equal(BlockMask.from_dense(tiles[0], 16).to_dense(), tiles[:1].int())
    assert torch.equal(pickle.loads(pickle.dumps(mask)).to_dense(), tiles.int())


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_dense_mask(rank):
    torch.manual_seed(1)
    whole = torch.rand(2, 4, 70, 90) < 0.3
    dense = whole[0, 0] if rank == 2 else whole[0] if rank == 3 else whole
    mask = create_block_mask(dense, BLOCK_SIZE=BLOCK)
    assert mask.shape == (*(1,) * (4 - rank), *dense.shape)
    assert torch.equal(kept(mask), dense.expand(mask.shape))
    assert torch.equal(mask.table(), tiles_of(dense.expand(mask.shape)).to(torch.int8))
    q, k, v = torch.randn(2, 4, 70, 16), torch.randn(2, 4, 90, 16), torch.randn(2, 4, 90, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, atol=1e-5, rtol=1e-5)


def test_a_dense_mask_of_given_sizes():
    dense = torch.rand(70, 90) < 0.3
    mask = create_block_mask(dense, 3, None, 70, 90, "cpu", separate_full_blocks=False)
    assert mask.shape == (3, 1, 70, 90) and mask.full_kv_indices is None
    assert create_block_mask(dense, H=2).shape == (1, 2, 70, 90)


def test_a_write_to_a_dense_mask_counts():
    dense = torch.zeros(100, 100, dtype=torch.bool)
    mask = create_block_mask(dense, BLOCK_SIZE=16)
    assert not mask.to_dense().any()
    dense[50, 20] = True
    assert mask.to_dense().nonzero().tolist() == [[0, 0, 3, 1]]


def test_a_dense_mask_is_a_block_mask_like_others():
    dense = torch.rand(1, 2, 70, 90) < 0.3
    mask = create_block_mask(dense, BLOCK_SIZE=BLOCK)
    assert torch.equal(kept(pickle.loads(pickle.dumps(mask))), dense)
    assert torch.equal(kept(mask[:, 1, 1:]), dense[:, 1:, 32:])
    assert torch.equal(kept(mask._adjust(40, 50)), dense[..., :40, :50])
    assert torch.equal(kept(~mask), ~dense)
    assert repr(mask).splitlines()[-2].strip() == "mask_mod=dense"
    with pytest.raises(errors.CallSizeError) as raised:
        mask.resize(71, 90)
    assert str(raised.value) == (
        "a dense mask is made for 70 queries (its shape[2]), but the block mask has 71.\n"
        "  Instead: give it 71 queries, or build the block mask with Q_LEN=70."
    )


def test_a_dense_mask_in_a_graph():
    dense = torch.rand(70, 70) < 0.3

    def attend(q, dense):
        return flex_attention(q, q, q, block_mask=create_block_mask(dense))

    q = torch.randn(1, 2, 70, 16)
    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, dense)
    torch.testing.assert_close(found, attend(q, dense))


PARTS = {
    "causal": lambda: create_block_mask(masks.causal(), 2, None, 130, 130, "cpu", BLOCK),
    "one": lambda: create_block_mask(masks.causal(), 1, None, 130, 130, "cpu", BLOCK),
    "window": lambda: create_block_mask(masks.sliding_window(40), 1, None, 130, 130, "cpu", BLOCK),
    "documents": lambda: create_block_mask(
        masks.document(IDS_BY_BATCH[:, :130]), 3, None, 130, 130, "cpu", BLOCK
    ),
    "heads": lambda: create_block_mask(
        masks.sliding_window(torch.tensor([7, 90])), 1, 2, 130, 130, "cpu", BLOCK
    ),
    "slice": lambda: PARTS["documents"]()[1:],
    "dense": lambda: create_block_mask(torch.eye(130, dtype=torch.bool), BLOCK_SIZE=BLOCK),
    "tiles": lambda: BlockMask.from_dense(torch.eye(5, 3).int(), BLOCK, masks.causal(), (130, 130)),
    "shifted": lambda: create_block_mask(masks.causal(), 1, None, 130, 130, "cpu", BLOCK, q_offset=9),
    "also shifted": lambda: create_block_mask(
        masks.sliding_window(9), 2, None, 130, 130, "cpu", BLOCK, q_offset=9
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ("causal",), ("causal", "one"), ("causal", "window", "one"), ("documents", "documents"),
        ("window", "documents", "causal"), ("heads", "causal"), ("slice", "dense"), ("tiles", "window"),
        ("shifted", "also shifted"), ("shifted", "shifted"),
    ],
    ids="-".join,
)  # fmt: skip
def test_concatenation(names):
    parts = [PARTS[name]() for name in names]
    mask = BlockMask.cat(parts)
    heads = max(part.shape[1] for part in parts)
    assert mask.shape == (sum(part.shape[0] for part in parts), heads, 130, 130)
    assert torch.equal(kept(mask), torch.cat([kept(p).expand(-1, heads, -1, -1) for p in parts]))
    assert torch.equal(mask.table().expand(*mask.shape[:2], -1, -1),
                       torch.cat([p.table().expand(p.shape[0], heads, -1, -1) for p in parts]))  # fmt: skip
    assert mask.positions is None or mask.positions.agrees(parts[0].positions)
    start = 0
    for part in parts:
        chosen = mask[start : start + part.shape[0]]
        assert torch.equal(kept(chosen), kept(part).expand(-1, heads, -1, -1))
        start += part.shape[0]


def test_attention_of_concatenated_masks():
    parts = [PARTS["window"](), PARTS["documents"]()]
    q, k, v = (torch.randn(4, 2, 130, 16) for _ in range(3))
    expected = [flex_attention(q[:1], k[:1], v[:1], block_mask=parts[0]),
                flex_attention(q[1:], k[1:], v[1:], block_mask=parts[1])]  # fmt: skip
    found = flex_attention(q, k, v, block_mask=BlockMask.cat(parts))
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_concatenated_masks_pickle_and_say_what_they_are():
    mask = BlockMask.cat([PARTS["one"](), PARTS["window"]()])
    assert mask.mask_mod.__name__ == "cat(causal_mask, sliding_window_causal)"
    assert torch.equal(kept(pickle.loads(pickle.dumps(mask))), kept(mask))
    assert mask.resize(131, 131).shape == (2, 1, 131, 131)
    assert BlockMask.cat([PARTS["causal"](), PARTS["one"]()]).mask_mod.__name__ == "causal_mask"
    assert BlockMask.cat(part() for part in (PARTS["one"], PARTS["one"])).shape[0] == 2  # type: ignore[arg-type]


def test_masks_that_do_not_concatenate():
    mask, lengths = PARTS["causal"](), torch.tensor([3, 4])
    offsets = create_block_mask(masks.causal(), 2, None, 130, 130, "cpu", BLOCK, q_offset=lengths)
    longer = create_block_mask(masks.causal(), 2, None, 131, 130, "cpu", BLOCK)
    by_head = create_block_mask(lambda b, h, q, k: q > k + h, 1, None, 130, 130, "cpu", BLOCK)
    for others, problem in (
        ([longer], "seq_lengths is (130, 130) in one and (131, 130) in the other"),
        ([offsets], "q_offset=0, kv_offset=0 in one and q_offset=a tensor of 2 on cpu, kv_offset=0"),
        ([PARTS["heads"](), by_head], "one has H=1, and its mask_mod reads h; the other has H=2"),
    ):
        with pytest.raises(errors.BlockMaskCombineError) as raised:
            BlockMask.cat([mask, *others])
        assert problem in str(raised.value)
    with pytest.raises(errors.BlockMaskCombineError) as raised:
        BlockMask.cat([offsets, offsets])
    assert str(raised.value) == (
        "these block masks do not go together: q_offset has one element for each batch entry.\n"
        "  Instead: build one mask, with the elements of all entries in q_offset."
    )
    with pytest.raises(errors.BlockMaskCombineError, match="there are none"):
        BlockMask.cat([])
    with pytest.raises(errors.NotABlockMask):
        BlockMask.cat([mask, torch.ones(3)])


@pytest.mark.parametrize(
    "chosen", [[2, 0], torch.tensor([2, 0]), [True, False, True], range(2, -1, -2)], ids=str
)
def test_chosen_batch_entries(chosen):
    mask = PARTS["documents"]()
    numbers = [0, 2] if chosen == [True, False, True] else [2, 0]
    assert torch.equal(kept(mask[chosen]), create_mask(mask.mask_mod, *mask.shape, device="cpu")[numbers])


def test_more_value_heads_than_query_heads_as_the_error_says() -> None:
    """Each value head is used with the key head of its place: key head i of 4 and value heads 2i, 2i + 1."""
    q, k, v = torch.randn(2, 4, 40, 16), torch.randn(2, 4, 50, 16), torch.randn(2, 8, 50, 16)
    with pytest.raises(errors.KeyValueHeadsMismatch):
        flex_attention(q, k, v, mods.softcap(5.0), enable_gqa=True)
    advised = v.unflatten(1, (4, 2)).transpose(2, 3).flatten(3)
    found = (
        flex_attention(q, k, advised, mods.softcap(5.0)).unflatten(3, (2, -1)).transpose(2, 3).flatten(1, 2)
    )
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    expected = flex_attention(q, k, v, mods.softcap(5.0))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def lists(*rows):
    """The counts and indices of rows of tiles, padded with 0."""
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    indices = torch.tensor([[*row, *[0] * (len(rows) - len(row))] for row in rows], dtype=torch.int32)
    return counts[None, None], indices[None, None]


def test_a_tile_that_is_listed_twice_is_refused() -> None:
    """Kernels would count its scores twice, and torch on the CPU once."""
    message = "lists a tile that is listed before"
    right = lists([0, 1], [1])
    with pytest.raises(errors.BlockMaskPartsError, match=f"^kv_indices {message}"):
        BlockMask.from_kv_blocks(*lists([0], [1, 1]), BLOCK_SIZE=16)
    with pytest.raises(errors.BlockMaskPartsError, match=f"^full_kv_indices {message}"):
        BlockMask.from_kv_blocks(*right, *lists([], [1]), BLOCK_SIZE=16)
    with pytest.raises(errors.BlockMaskPartsError, match=f"^q_indices {message}"):
        BlockMask((32, 32), *right, None, None, *lists([0, 0], [0, 1]), None, None, BLOCK_SIZE=16)
    mask = BlockMask.from_kv_blocks(*right, *lists([], [0]), BLOCK_SIZE=16)
    assert mask.to_dense().all()
    mask.kv_indices[0, 0, 0, 1] = 0
    query = torch.randn(1, 1, 32, 16)
    with pytest.raises(errors.BlockMaskPartsError, match=f"^kv_indices {message}"):
        flex_attention(query, query, query, block_mask=mask)


@pytest.mark.parametrize("lengths", [32, (32,), "ab"])
def test_lengths_that_are_no_pair_are_refused(lengths) -> None:
    with pytest.raises((errors.BlockMaskPartsError, errors.LengthError)):
        BlockMask.from_kv_blocks(*lists([0], [1]), BLOCK_SIZE=16, seq_lengths=lengths)
    with pytest.raises((errors.BlockMaskPartsError, errors.LengthError)):
        BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), BLOCK_SIZE=16, seq_lengths=lengths)


def test_masks_in_another_order_from_an_older_release(monkeypatch):
    """Their graph is the older release's, which a trace now need not give again."""
    with monkeypatch.context() as older:
        older.setattr(selection, "as_position", lambda value, *_: value)
        mask = create_block_mask(masks.causal(), None, None, 96, 96, "cpu", 32)[:, :, [2, 0, 1]]
        pickled = pickle.dumps(mask)
    found = pickle.loads(pickled)
    assert torch.equal(kept(found), kept(mask))
    assert torch.equal(kept(found.to("cpu")), kept(mask)) and torch.equal(kept(~found), ~kept(mask))
    assert torch.equal(kept(pickle.loads(pickle.dumps(found))[:, :, 1:]), kept(mask)[:, :, 32:])


SHORTER = {
    "_adjust": lambda mask, lengths: mask._adjust(*lengths),
    "resize": lambda mask, lengths: mask.resize(*lengths),
    "seq_lengths": lambda mask, lengths: (setattr(mask, "seq_lengths", lengths), mask)[1],
}


@pytest.mark.covering(2, long=2)
@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET"])
@pytest.mark.parametrize("lengths", [(80, 96), (70, 90), (70, 50), (64, 32)], ids=str)
@pytest.mark.parametrize("name", SHORTER)
def test_full_tiles_of_lists_stay_full_in_a_shorter_mask(name, lengths, backend):
    """They keep what the mask_mod forbids. The last row has one full tile, apart from its other tile."""
    full = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    partial = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    lists = [part for table in (partial, full) for part in tile_lists(table)]
    whole = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(16, 32), mask_mod=masks.causal(), seq_lengths=(80, 96)
    )
    causal = create_mask(masks.causal(), 1, 1, 80, 96, "cpu")
    each = torch.stack([table.repeat_interleave(16, 0).repeat_interleave(32, 1) for table in (partial, full)])
    dense = (each[0] & causal | each[1])[..., : lengths[0], : lengths[1]]
    sizes = (1, 1, lengths[0], 16), *[(1, 1, lengths[1], 16)] * 2
    found = call(*sizes, block_mask=SHORTER[name](whole, lengths), kernel_options={"BACKEND": backend})
    equal(found, call(*sizes, block_mask=create_block_mask(dense, BLOCK_SIZE=16)))


def test_tiles_past_fewer_keys_apart_from_the_others():
    mask = BlockMask.from_kv_blocks(
        *tile_lists(torch.tensor([[True, False, True], [False, False, True]])),
        BLOCK_SIZE=32, mask_mod=masks.causal(), seq_lengths=(64, 96),
    )  # fmt: skip
    mask.seq_lengths = (64, 40)
    dense = torch.zeros(64, 40, dtype=torch.bool)
    dense[:32, :32] = torch.ones(32, 32).tril()
    sizes = (1, 2, 64, 16), *[(1, 2, 40, 16)] * 2
    equal(call(*sizes, block_mask=mask), call(*sizes, block_mask=create_block_mask(dense)))


def tile_lists(table):
    """Counts and indices of a table of tiles, for one batch entry and one head."""
    counts, indices = table.sum(-1), table.int().argsort(dim=-1, descending=True, stable=True)
    return counts[None, None].int(), indices[None, None].int()
