"""BlockMask: its parts are torch's, and a slice sees the positions of the whole."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_release import separates

from block_mask.zoo import ZOO
from flexmod import errors, flex_attention, masks
from flexmod.block_mask.build import create_block_mask, create_mask, noop_mask
from flexmod.block_mask.format import BlockMask, from_torch
from flexmod.block_mask.tiles import LISTS
from flexmod.ir.evaluate import evaluate
from flexmod.ir.offsets import MaskAt, Offset

COUNTS = torch.tensor([[[1, 2, 2]]], dtype=torch.int32)
INDICES = torch.tensor([[[[0, 1], [0, 1], [1, 0]]]], dtype=torch.int32)


def both(name, **options):
    mask_mod, *sizes = ZOO[name]
    options = {"device": "cpu", **options}
    return create_block_mask(mask_mod, *sizes, **options), theirs.create_block_mask(
        mask_mod, *sizes, **options
    )


def dense_of_graph(mask):
    """What the mask's own graph says, bool [B, H, Q, KV]."""
    names = ("b", "h", "q_idx", "kv_idx")
    sizes = mask.shape
    places = {
        name: torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    return evaluate(mask.traced.graph, mask.traced.tensors, **places)[0].expand(sizes)


# the drop-in


@pytest.mark.parametrize("name", ZOO)
def test_facts_equal_to_torch(name):
    ours, other = both(name)
    assert ours.shape == other.shape and ours.numel() == other.numel()
    assert ours.sparsity() == max(other.sparsity(), 0.0)
    assert ours.BLOCK_SIZE == other.BLOCK_SIZE and ours.seq_lengths == other.seq_lengths
    assert torch.equal(ours.to_dense(), other.to_dense()) and ours.to_dense().dtype == torch.int32
    assert repr(ours) == re.sub(r"sparsity=-[\d.]+%", "sparsity=0.00%", repr(other))
    assert ours.mask_mod is other.mask_mod


@separates
def test_as_tuple():
    ours, other = both("causal")
    nested = ours.as_tuple(flatten=False)
    assert len(nested) == len(other.as_tuple(flatten=False)) == len(ours.as_tuple()) - 2
    assert nested[0] == (1000, 1000) and nested[-2] == (128, 128) and nested[-1] is ours.mask_mod


@pytest.mark.parametrize("compute_q_blocks", [True, False])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"BLOCK_SIZE": 64}, {"BLOCK_SIZE": (32, 16), "seq_lengths": (90, 31)}]
)
def test_from_kv_blocks_equal_to_torch(compute_q_blocks, full, options, same_parts):
    parts = [COUNTS, INDICES, *((2 - COUNTS, INDICES.flip(-1)) if full else (None, None))]
    options = {"compute_q_blocks": compute_q_blocks, **options}
    ours = BlockMask.from_kv_blocks(*parts, **options)
    other = theirs.BlockMask.from_kv_blocks(*parts, **options)
    same_parts(ours, other)
    assert ours.sparsity() == max(other.sparsity(), 0.0) and ours.mask_mod is noop_mask
    assert not ours.traced.graph.reads


def test_lists_may_be_narrower_than_the_keys():
    """Rows with one tile each of five, as a decoder would write them."""
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, torch.tensor([[[[4], [1]]]]), seq_lengths=(200, 600))
    assert mask.to_dense().tolist() == [[[[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]]]
    assert mask.q_num_blocks.tolist() == [[[0, 1, 0, 0, 1]]]
    assert mask.kv_indices.dtype == torch.int32


def test_to_device():
    mask = both("document_causal")[0]
    moved = mask.to("meta")
    assert moved.kv_indices.device.type == moved.full_q_num_blocks.device.type == "meta"
    assert moved.mask_mod is mask.mask_mod and mask.kv_indices.device.type == "cpu"


@pytest.mark.parametrize("how", ["built", "moved", "fake"])
def test_a_mask_without_values(how):
    """It has shapes, a text and copies; what reads its tiles says what it lacks."""
    with FakeTensorMode() if how == "fake" else nullcontext():
        device = "meta" if how == "built" else "cpu"
        mask = create_block_mask(masks.causal(), 2, None, 100, 200, device, BLOCK_SIZE=32)
    mask = mask.to("meta") if how == "moved" else mask
    shown = "BlockMask(shape=(2, 1, 100, 200), BLOCK_SIZE=(32, 32), without values)"
    assert repr(mask) == str(mask) == shown and mask._repr_svg_() is None
    assert mask.to(mask.device).shape == mask.shape == (2, 1, 100, 200)
    for method in (
        lambda: mask & mask, lambda: ~mask, lambda: mask[0], lambda: mask._adjust(9, 9), mask.sparsity,
        lambda: mask.resize(300, 300), mask.facts, mask.to_svg, mask.to_string, mask.plot,
        lambda: BlockMask.cat([mask, mask]),
        *([] if how == "fake" else [lambda: mask.to("cpu")]),
    ):  # fmt: skip
        with pytest.raises(errors.FakeTensorError, match="^block_mask has shapes without values, and its"):
            method()


def test_to_device_takes_the_tables_of_a_slice_along():
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + h, None, 4, 256, 256, "cpu")[
        :, [3, 0]
    ]
    assert [t.device.type for t in mask.to("meta").traced.tensors] == ["meta"]
    assert mask.traced.tensors[0].tolist() == [3, 0]


def test_from_torch(same_parts):
    for name in ("noop", "document_causal"):
        _, other = both(name)
        ours = from_torch(other)
        same_parts(ours, other)
        assert ours.mask_mod is other.mask_mod and from_torch(ours) is ours
        assert torch.equal(dense_of_graph(ours), create_mask(other.mask_mod, *other.shape, device="cpu"))
    default = from_torch(theirs.BlockMask.from_kv_blocks(COUNTS, INDICES))
    assert dense_of_graph(default).all()


@separates
def test_from_torch_carries_what_it_does_not_read(same_parts):
    other = theirs.create_block_mask(masks.causal(), 1, 1, 512, 512, "cpu", compute_dq_write_order=True)
    assert other.dq_write_order is not None
    same_parts(from_torch(other), other)
    same_parts(from_torch(other).to("cpu"), other)


def test_mask_mod_can_be_assigned():
    mask = both("causal")[0]
    mask.mask_mod = masks.sliding_window(3)
    assert "sliding_window" in repr(mask)
    assert torch.equal(dense_of_graph(mask), create_mask(masks.sliding_window(3), *mask.shape, device="cpu"))


# slices


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(1, 3), (slice(None), 1), (1, 0), (slice(0, 2), slice(1, 2)),
     (slice(None), slice(None), slice(1, 3)), (slice(None, None, 2),),
     (2, slice(None), torch.tensor([1], dtype=torch.int32)), torch.tensor([2, 0])],
)  # fmt: skip
def test_slices_list_the_tiles_of_torch(index):
    ours, other = both("document_causal")
    mine, others = ours[index], other[index]
    for name in (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
    ):
        assert torch.equal(getattr(mine, name), getattr(others, name)), name
    assert torch.equal(mine.to_dense(), others.to_dense())


INDICES_AND_ROWS = [
    (0, ([0], None, None)),
    (-2, ([1], None, None)),
    (slice(1, 3), ([1, 2], None, None)),
    (slice(None, None, 2), ([0, 2], None, None)),
    ([2, 0, 2], ([2, 0, 2], None, None)),
    (torch.tensor([True, False, True]), ([0, 2], None, None)),
    (np.int64(2), ([2], None, None)),
    (torch.tensor(2), ([2], None, None)),
    (np.array([2, 1]), ([2, 1], None, None)),
    (range(2, -1, -1), ([2, 1, 0], None, None)),
    ((slice(None), 1), (None, [1], None)),
    ((1, torch.tensor([3, 0])), ([1], [3, 0], None)),
    ((..., 1), (None, None, [1])),
    ((slice(None), slice(None), slice(1, None)), (None, None, [1, 2, 3, 4])),
    ((slice(None), slice(None), slice(0, 5, 2)), (None, None, [0, 2, 4])),
    ((2, 3, [3, 1, 4]), ([2], [3], [3, 1, 4])),
    ((slice(None), slice(None), -1), (None, None, [4])),
]


@pytest.mark.parametrize(("index", "rows"), INDICES_AND_ROWS, ids=[str(i) for i, _ in INDICES_AND_ROWS])
def test_a_slice_sees_the_positions_of_the_whole(index, rows):
    """Its graph, evaluated at its own positions, gives the rows of the whole mask; and so do its tiles."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx + 50 * b - kv_idx >= 0) & ((q_idx * (h + 1) + kv_idx) % 97 != b)

    whole = create_block_mask(mask_mod, 3, 4, 550, 300, "cpu")
    part = whole[index]
    dense = create_mask(mask_mod, *whole.shape, device="cpu")
    for axis, chosen in enumerate(rows):
        if chosen is None:
            continue
        if axis == 2:
            chosen = [q for row in chosen for q in range(row * 128, min(row * 128 + 128, 550))]
        dense = dense.index_select(axis, torch.tensor(chosen))
    assert part.shape == tuple(dense.shape)
    assert torch.equal(dense_of_graph(part), dense)
    again = create_block_mask(part.mask_mod, *part.shape, device="cpu")
    for mine, others in zip(part.as_tuple()[:-1], again.as_tuple()[:-1], strict=True):
        assert torch.equal(mine, others) if isinstance(mine, torch.Tensor) else mine == others


def test_a_slice_of_a_slice():
    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx * (b + 1) >= kv_idx * (h + 2)

    whole = create_block_mask(mask_mod, 5, 6, 640, 640, "cpu")
    part = whole[1:, [5, 1, 3], 1:][2:, 1:][:, :, [2, 0]]
    dense = create_mask(mask_mod, *whole.shape, device="cpu")[3:, [1, 3]]
    dense = torch.cat([dense[:, :, 384:512], dense[:, :, 128:256]], dim=2)
    assert torch.equal(dense_of_graph(part), dense)
    assert part.mask_mod.__name__ == "mask_mod"


def test_a_slice_keeps_the_mask_mod_that_does_not_notice():
    whole = both("causal_wide")[0]
    assert whole[1, 2].mask_mod is whole.mask_mod
    part = whole[..., 1]
    assert isinstance(part.mask_mod, MaskAt)
    assert (part.q_offset, part.kv_offset) == (128, 0)
    assert part.mask_mod.mask_mod is whole.mask_mod
    assert whole[..., :1].mask_mod is whole.mask_mod
    assert not both("causal")[0][0].traced.tensors


def test_iteration_goes_through_the_batches():
    mask = both("prefix_by_batch")[0]
    assert [torch.equal(one.to_dense(), mask[i].to_dense()) for i, one in enumerate(mask)] == [True] * 3


def test_a_slice_makes_no_lists_by_column_where_the_mask_has_none():
    mask = BlockMask.from_kv_blocks(COUNTS, INDICES, compute_q_blocks=False)
    assert mask[0].q_indices is None and mask._adjust(200, 128).q_indices is None


# crops


@pytest.mark.parametrize("lengths", [(256, 256), (512, 512), (512, 1024), (128, 1024)])
def test_adjust_equal_to_torch_where_tiles_divide(lengths):
    """Elsewhere torch fails: at (512, 256) it lists tiles that lie beyond the keys."""
    ours, other = (
        create(masks.causal(), 2, 1, 1024, 1024, "cpu")
        for create in (create_block_mask, theirs.create_block_mask)
    )
    mine, others = ours._adjust(*lengths), other._adjust(*lengths)
    assert mine.seq_lengths == others.seq_lengths and mine.mask_mod is ours.mask_mod
    assert torch.equal(mine.to_dense(), others.to_dense()) and mine.sparsity() == others.sparsity()


@pytest.mark.parametrize("separate_full_blocks", [True, False])
@pytest.mark.parametrize("name", ["window", "document_causal", "by_head", "natten"])
def test_adjust_is_what_the_builder_makes(name, separate_full_blocks):
    """At most: a tile that keeps nothing within the new lengths may stay listed, as partial."""
    mask_mod, b, h, query, key = ZOO[name]
    whole = create_block_mask(mask_mod, b, h, query, key, "cpu", separate_full_blocks=separate_full_blocks)
    crop = whole._adjust(300, 200)
    built = create_block_mask(mask_mod, b, h, 300, 200, "cpu", separate_full_blocks=separate_full_blocks)
    assert crop.shape == built.shape
    assert (crop.to_dense() >= built.to_dense()).all()
    if separate_full_blocks:
        assert torch.equal(crop.full_kv_num_blocks, built.full_kv_num_blocks)
    else:
        assert crop.full_kv_indices is None
    assert torch.equal(dense_of_graph(crop), create_mask(mask_mod, *crop.shape, device="cpu"))


# refusals


def refusal(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


NEEDED = "kv_num_blocks and kv_indices are needed, of shapes [B, H, Qb] and [B, H, Qb, KVb]"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((COUNTS, INDICES[0, 0, 0]), NEEDED),
        ((None, INDICES), NEEDED),
        ((COUNTS, INDICES, COUNTS), "full_kv_num_blocks is given without full_kv_indices"),
        ((COUNTS, INDICES, None, INDICES), "full_kv_indices is given without full_kv_num_blocks"),
        ((COUNTS.float(), INDICES),
         "kv_num_blocks is torch.float32 and kv_indices torch.int32, but both hold integers"),
        ((COUNTS[..., :2], INDICES), "kv_num_blocks has shape (1, 1, 2) and kv_indices (1, 1, 3, 2)"),
        ((COUNTS, INDICES, COUNTS[0], INDICES[0]),
         "full_kv_num_blocks has shape (1, 3) and full_kv_indices (1, 3, 2)"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(parts, problem):
    message = refusal(errors.BlockMaskPartsError, lambda: BlockMask.from_kv_blocks(*parts))
    assert message.startswith(f"{problem}.\n  Instead: ")


def test_lengths_that_do_not_fit():
    def make(lengths):
        return BlockMask.from_kv_blocks(COUNTS, INDICES, seq_lengths=lengths)

    assert make((300, 200)).shape == (1, 1, 300, 200)
    assert refusal(errors.BlockMaskPartsError, lambda: make((400, 256))) == (
        "tiles of 3 rows are listed, but Q_LEN=400 has 4 with BLOCK_SIZE (128, 128).\n"
        "  Instead: give the seq_lengths that the lists were made for."
    )
    refusal(errors.LengthError, lambda: make((300, 0)))
    mask = make((300, 200))
    mask.seq_lengths = (257, 1)
    assert mask.shape == (1, 1, 257, 1)
    with pytest.raises(
        errors.BlockMaskPartsError, match="tiles of 2 columns are listed, but KV_LEN=300 has 3"
    ):
        mask.seq_lengths = (300, 300)


def test_parts_on_two_devices():
    message = refusal(
        errors.DeviceMismatch, lambda: BlockMask.from_kv_blocks(COUNTS, INDICES, COUNTS.to("meta"), INDICES)
    )
    assert message == (
        "kv_indices is on cpu but full_kv_num_blocks is on meta.\n"
        "  Instead: make full_kv_num_blocks on cpu; on meta it has no elements."
    )


@pytest.mark.parametrize(
    ("index", "problem", "advice"),
    [
        (3, "the number of batches is 3", "use numbers from -3 to 2"),
        ((0, [0, -5]), "the number of heads is 4", "use numbers from -4 to 3"),
        ((0, 0, slice(5, 5)), "it chooses none of the rows of tiles", "choose at least one"),
        ((0, 0, 0, 0), "too many indices", "give at most three, mask[b, h, q]"),
        (
            ([0], [1]),
            "lists on two axes could mean pairs or a grid",
            "index one axis at a time, mask[b][:, h]",
        ),
        (None, "NoneType is no index", "use ints, slices, or one list or tensor of ints"),
        (True, "bool is no index", "use ints, slices, or one list or tensor of ints"),
        ([True, False], "the list has 2 bools, but the number of batches is 3", "give one bool for each"),
        ([0.5], "a list has one dimension of ints or bools, not 1 of torch.float32", "flatten it"),
        ([[0], [1, 2]], "it is no list of numbers", "use one list of ints"),
        (["a"], "it is no list of numbers", "use one list of ints"),
        (int, "type is no index", "use ints, slices, or one list or tensor of ints"),
        ([1j], "a list has one dimension of ints or bools, not 1 of torch.complex64", "flatten it"),
        ([[0]], "a list has one dimension of ints or bools, not 2 of torch.int64", "flatten it"),
        (slice(None, None, -1), "a slice that runs backwards", "give the numbers as a list"),
    ],
)
def test_refused_indices(index, problem, advice):
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= b + h, 3, 4, 550, 300, "cpu")
    assert refusal(errors.BlockMaskIndexError, lambda: mask[index]) == (
        f"a block mask of (3, 4, 5) (batches, heads, rows of tiles) is indexed with {index}: {problem}.\n"
        f"  Instead: {advice}."
    )


def test_the_short_row_can_only_come_last():
    mask = create_block_mask(masks.causal(), None, None, 550, 300, "cpu")
    assert refusal(errors.BlockMaskIndexError, lambda: mask[:, :, [4, 0]]) == (
        "a block mask of 5 rows of tiles is indexed with [4, 0]: the last row holds 38 of 128 queries and "
        "can only come last.\n"
        "  Instead: put it at the end, or build the mask with a Q_LEN that the tiles divide."
    )


def test_crops_do_not_grow():
    mask = create_block_mask(masks.causal(), None, None, 300, 300, "cpu")
    assert refusal(errors.BlockMaskCropError, lambda: mask._adjust(350, 200)) == (
        "_adjust crops a block mask: this one of Q_LEN=300 and KV_LEN=300 has no tiles for Q_LEN=350 and "
        "KV_LEN=200.\n"
        "  Instead: build it anew, create_block_mask(mask_mod, B, H, 350, 200)."
    )


def test_from_torch_refuses():
    assert refusal(errors.NotABlockMask, lambda: from_torch(COUNTS)).startswith(
        "block_mask is a Tensor, not a BlockMask."
    )
    other = theirs.create_block_mask(masks.causal(), 1, 1, 256, 256, "cpu")
    assert refusal(errors.SlicedTorchMaskError, lambda: from_torch(other[0])) == (
        "this torch BlockMask was sliced, and torch drops the mask_mod of a slice.\n"
        "  Instead: slice a mask of flexmod.create_block_mask, which keeps its mask_mod, or set the slice's "
        "mask_mod first."
    )


def test_values_of_lists_are_looked_at():
    outside = BlockMask.from_kv_blocks
    assert refusal(errors.BlockMaskPartsError, lambda: outside(COUNTS, INDICES + 1)) == (
        "kv_indices lists a tile that is not one of the 2.\n"
        "  Instead: list tiles from 0 to 1."
    )
    refusal(errors.BlockMaskPartsError, lambda: outside(COUNTS, INDICES - 1))
    assert refusal(errors.BlockMaskPartsError, lambda: outside(COUNTS + 1, INDICES)) == (
        "kv_num_blocks has a count that is not one from 0 to 2, the width of kv_indices.\n"
        "  Instead: count how many entries of each row are tiles, 0 where there are none."
    )


WRONG_NUMBERS = {
    "negative": lambda part: part - 10,
    "beyond 32 bits": lambda part: part.long() + 2**32,
    "below 32 bits": lambda part: part.long() - 2**32,
    "the end of int64": lambda part: torch.full_like(part.long(), 2**63 - 1),
    "unsigned": lambda part: torch.full_like(part.long(), 2**32 - 1).to(torch.uint32),
    "64 bits, unsigned": lambda part: torch.full_like(part.long(), -1).view(torch.uint64),
}
NO_INTEGERS = {
    "bool": lambda part: part.bool(),
    "float32": lambda part: part.float(),
    "complex64": lambda part: part.to(torch.complex64),
}
INTEGERS = (torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def changed_mask(way, name, change):
    """A mask one of whose lists a user has changed."""
    mask = create_block_mask(masks.causal(), None, None, 48, 48, device="cpu", BLOCK_SIZE=16)
    lists = {each: getattr(mask, each).clone() for each in LISTS}
    if way == "made":
        lists[name] = change(lists[name])
    mask = BlockMask((48, 48), **lists, BLOCK_SIZE=16, mask_mod=masks.causal())
    if way == "assigned":
        setattr(mask, name, change(lists[name]))
    return mask


@pytest.mark.parametrize("way", ["made", "assigned"])
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("wrong", [*WRONG_NUMBERS, *NO_INTEGERS])
def test_lists_of_other_numbers_are_refused_by_name(wrong, name, way):
    change = WRONG_NUMBERS.get(wrong) or NO_INTEGERS[wrong]
    query = torch.zeros(1, 1, 48, 8)
    with pytest.raises(errors.BlockMaskPartsError) as caught:
        flex_attention(query, query, query, block_mask=changed_mask(way, name, change))
    message = str(caught.value)
    assert name in message
    if wrong in NO_INTEGERS:
        assert f"{name} is torch.{wrong}" in message or f"and {name} torch.{wrong}" in message
        assert "both hold integers" in message


@pytest.mark.parametrize("way", ["made", "assigned"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_lists_of_every_integer(dtype, way):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 48, 8, generator=draw)
    wanted = flex_attention(query, query, query, block_mask=changed_mask("made", "kv_indices", torch.clone))
    for name in LISTS:
        mask = changed_mask(way, name, lambda part: part.to(dtype))
        assert getattr(mask, name).dtype == torch.int32
        assert torch.equal(flex_attention(query, query, query, block_mask=mask), wanted)


@pytest.mark.parametrize(("lengths", "padded"), [((384, 256), False), ((384, 200), True), ((300, 256), True)])
def test_full_tiles_over_an_end_are_noticed(lengths, padded):
    counts = torch.full_like(COUNTS, 2)
    mask = BlockMask.from_kv_blocks(counts * 0, INDICES, counts, INDICES, seq_lengths=lengths)
    assert mask.full_tiles_padded == padded
    assert not create_block_mask(noop_mask, None, None, *lengths, device="cpu").full_tiles_padded


def test_integers_of_numpy_count_as_integers():
    four, lengths = np.int64(4), (np.int64(16), np.int64(15))
    mask = create_block_mask(masks.causal(), None, None, *lengths, "cpu", BLOCK_SIZE=four)
    lists = mask.kv_num_blocks, mask.kv_indices
    listed = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=four, seq_lengths=lengths)
    assert listed.seq_lengths == (16, 15)
    assert all(type(length) is int for length in listed.seq_lengths)
    assert mask.to_string(np.int64(2)) == mask.to_string(2)
    assert Offset(torch.tensor([4]), np.int64(9)).bound == 9
    options = {"BACKEND": "INTERPRET", "BLOCK_M": np.int64(16), "num_warps": np.int32(2)}
    query = torch.randn(1, 1, 16, 16)
    plain = {"BACKEND": "INTERPRET", "BLOCK_M": 16, "num_warps": 2}
    results = [flex_attention(query, query, query, kernel_options=each) for each in (options, plain)]
    assert torch.equal(*results)
