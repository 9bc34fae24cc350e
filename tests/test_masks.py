"""The library of masks: each against its formula, written out once more in plain Python."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from flexmod import create_block_mask, create_mask, errors, flex_attention, masks, mods
from flexmod.ir.fingerprint import fingerprint
from flexmod.ir.trace import trace

REFERENCE = {"BACKEND": "REFERENCE"}
IDS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 5]
OFFSETS = [0, 3, 5, 5, 10]
SEQUENCE = [0, 0, 0, 1, 1, 3, 3, 3, 3, 3]
SHOWN = [[0, 2], [2, 9], [4, 4]]
IMAGE = [0, 0, 1, 1, 1, 2, 0, 1]


def pixel(index, width=4):
    return divmod(index, width)


def natten_reference(q, k):
    (row, column), (other_row, other_column) = pixel(q), pixel(k)
    center_row, center_column = min(max(row, 1), 3), min(max(column, 1), 2)
    return abs(center_row - other_row) <= 1 and abs(center_column - other_column) <= 1


def standalone_reference(q, k):
    return all(abs(a - b) < 2 for a, b in zip(pixel(q), pixel(k), strict=True))


TREE = [-1, 0, 0, 1, 3, 2, -1, 6]
WAYS = [[0], [1, 0], [2, 0], [3, 1, 0], [4, 3, 1, 0], [5, 2, 0], [6], [7, 6]]
LENGTHS = torch.tensor([[3, 2, 4], [1, 1, 5]])
BY_LENGTH = ([0, 0, 0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 2, 2, 2, 2, 2, 3, 3, 3])


def diffusion_reference(q, k, length=6, block=2):
    blocks = q % length // block, k % length // block
    if q < length and k < length:
        return blocks[0] == blocks[1]
    if q < length:
        return blocks[0] > blocks[1]
    return k >= length and blocks[0] >= blocks[1]


def tiles_reference(q, k):
    """4 x 2 x 6 positions in tiles of 1 x 2 x 2, kernel 3 x 1 x 1."""

    def tile(index):
        number = index // 4
        return number // 3, 0, number % 3

    (frame, _, column), (other_frame, _, other_column) = tile(q), tile(k)
    return abs(min(max(frame, 1), 2) - other_frame) <= 1 and column == other_column


def jagged_reference(q, k):
    start = OFFSETS[SEQUENCE[q]]
    return SEQUENCE[q] == SEQUENCE[k] and (k - start < 2 or q >= k)


def on_an_axis(x, other, length, kernel, dilation=1, causal=False):
    """The neighbors of x on one axis, listed."""
    part = [y for y in range(length) if y % dilation == x % dilation]
    place = part.index(x)
    if causal:
        return other in part[max(0, place - kernel + 1) : place + 1]
    first = min(max(place - kernel // 2, 0), len(part) - kernel)
    return other in part[first : first + kernel]


def neighbors(extent, *axes):
    """The same in several dimensions; `axes` are the last arguments of on_an_axis, for each axis."""

    def reference(q, k):
        kept = True
        for length, axis in zip(extent[::-1], axes[::-1], strict=True):
            kept &= on_an_axis(q % length, k % length, length, *axis)
            q, k = q // length, k // length
        return kept

    return reference


def in_tiles(extent, tile):
    """The pixels (row, column) of an image, tile by tile, by their row-by-row numbers."""
    pixels = itertools.product(*map(range, extent))
    tiled = sorted(pixels, key=lambda p: ([x // n for x, n in zip(p, tile, strict=True)], p))
    return [row * extent[1] + column for row, column in tiled]


def morton(row, column):
    return sum(((row >> n) & 1) << 2 * n + 1 | ((column >> n) & 1) << 2 * n for n in range(4))


def curved(extent):
    """The pixels of an image along the curve."""
    pixels = sorted(itertools.product(*map(range, extent)), key=lambda p: morton(*p))
    return [row * extent[1] + column for row, column in pixels]


TILED, CURVED = in_tiles((4, 6), (2, 3)), curved((5, 3))
KV_OFFSETS = [0, 2, 2, 5, 7]
KV_SEQUENCE = [0, 0, 2, 2, 2, 3, 3]
CHOICE = [1, 0, 2, 5]
KV_IDS = [2, 0, 0, -1, 1, 9, 1]


def chosen_reference(h, q, k):
    return {0: q >= k, 1: abs(q - k) <= 1, 2: k < 3}.get(CHOICE[h], False)


# name -> (mask_mod, Q_LEN, KV_LEN, the same of (b, q, k))
CASES = {
    "causal": (masks.causal(), 9, 12, lambda b, q, k: q >= k),
    "window": (masks.sliding_window(3), 12, 12, lambda b, q, k: 0 <= q - k < 3),
    "window of one": (masks.sliding_window(1), 5, 5, lambda b, q, k: q == k),
    "window both": (masks.sliding_window(3, causal=False), 12, 9, lambda b, q, k: abs(q - k) < 3),
    "prefix": (masks.prefix_lm(4), 9, 9, lambda b, q, k: k < 4 or q >= k),
    "prefixes": (masks.prefix_lm(torch.tensor([2, 6])), 9, 9, lambda b, q, k: k < (2, 6)[b] or q >= k),
    "document": (masks.document(torch.tensor(IDS)), 10, 10, lambda b, q, k: IDS[q] == IDS[k]),
    "documents, causal": (
        masks.document(torch.tensor([IDS, IDS[::-1]]), causal=True), 10, 10,
        lambda b, q, k: q >= k and (IDS, IDS[::-1])[b][q] == (IDS, IDS[::-1])[b][k],
    ),
    "jagged": (masks.jagged(torch.tensor(OFFSETS)), 10, 10, lambda b, q, k: SEQUENCE[q] == SEQUENCE[k]),
    "jagged prefix": (
        masks.jagged(torch.tensor(OFFSETS), masks.prefix_lm(2)), 10, 10,
        lambda b, q, k: jagged_reference(q, k),
    ),
    "padding": (masks.padding(torch.tensor([3, 7])), 4, 8, lambda b, q, k: k < (3, 7)[b]),
    "standalone": (masks.standalone_window(5, 4, 2), 20, 20, lambda b, q, k: standalone_reference(q, k)),
    "natten": (masks.natten((5, 4), 3), 20, 20, lambda b, q, k: natten_reference(q, k)),
    "window by head": (
        masks.sliding_window(torch.tensor([2])), 12, 12, lambda b, q, k: 0 <= q - k < 2
    ),
    "dilated": (masks.dilated_window(3, 3), 12, 12, lambda b, q, k: q - k in (0, 3, 6)),
    "dilated both": (
        masks.dilated_window(2, 4, causal=False), 12, 12, lambda b, q, k: q - k in (-4, 0, 4)
    ),
    "lengths": (
        masks.document(lengths=LENGTHS, total=10), 10, 10, lambda b, q, k: BY_LENGTH[b][q] == BY_LENGTH[b][k]
    ),
    "cu_seqlens": (
        masks.document(cu_seqlens=torch.tensor([0, 3, 5, 9, 10]), causal=True), 10, 10,
        lambda b, q, k: q >= k and BY_LENGTH[0][q] == BY_LENGTH[0][k],
    ),
    "segments": (masks.segments(torch.tensor(IDS)), 10, 10, lambda b, q, k: IDS[q] == IDS[k]),
    "segments, keys of their own": (
        masks.segments(torch.tensor([IDS, IDS[::-1]]), torch.tensor(KV_IDS)), 10, 7,
        lambda b, q, k: (IDS, IDS[::-1])[b][q] == KV_IDS[k],
    ),
    "segments by batch, of keys alone": (
        masks.segments(torch.tensor(KV_IDS), torch.tensor([IDS, IDS[::-1]])), 7, 10,
        lambda b, q, k: KV_IDS[q] == (IDS, IDS[::-1])[b][k],
    ),
    "shared prefix": (
        masks.shared_prefix(4, torch.tensor(IDS)), 10, 10,
        lambda b, q, k: q >= k and (k < 4 or IDS[q] == IDS[k]),
    ),
    "diffusion": (masks.block_diffusion(6, 2), 12, 12, lambda b, q, k: diffusion_reference(q, k)),
    "tree": (masks.tree(torch.tensor(TREE)), 8, 8, lambda b, q, k: k in WAYS[q]),
    "tree in context": (
        masks.tree(torch.tensor(TREE), context=3), 8, 11, lambda b, q, k: k < 3 or k - 3 in WAYS[q]
    ),
    "sliding tiles": (
        masks.sliding_tiles((4, 2, 6), (1, 2, 2), (3, 1, 1)), 48, 48, lambda b, q, k: tiles_reference(q, k)
    ),
    "global": (
        masks.global_window(2, 3), 12, 12, lambda b, q, k: q >= k and (q - k < 2 or k < 3)
    ),
    "global, both sides": (
        masks.global_window(2, 3, causal=False), 12, 12,
        lambda b, q, k: abs(q - k) < 2 or k < 3 or q < 3,
    ),
    "natten in a line": (
        masks.natten((11,), 5, dilation=2), 11, 11, lambda b, q, k: on_an_axis(q, k, 11, 5, 2)
    ),
    "natten, causal": (
        masks.natten((11,), 4, dilation=2, causal=True), 11, 11,
        lambda b, q, k: on_an_axis(q, k, 11, 4, 2, True),
    ),
    "natten, dilated": (
        masks.natten((5, 7), (1, 3), dilation=(1, 2)), 35, 35,
        lambda b, q, k: neighbors((5, 7), (1,), (3, 2))(q, k),
    ),
    "natten of a video": (
        masks.natten((3, 4, 5), (2, 3, 3), causal=(True, False, False)), 60, 60,
        lambda b, q, k: neighbors((3, 4, 5), (2, 1, True), (3,), (3,))(q, k),
    ),
    "natten in tiles": (
        masks.reordered(masks.natten((4, 6), 3), masks.tile_order((4, 6), (2, 3))), 24, 24,
        lambda b, q, k: neighbors((4, 6), (3,), (3,))(TILED[q], TILED[k]),
    ),
    "natten along a curve": (
        masks.reordered(masks.natten((5, 3), 3), masks.morton_order((5, 3))), 15, 15,
        lambda b, q, k: neighbors((5, 3), (3,), (3,))(CURVED[q], CURVED[k]),
    ),
    "sliding tiles of an image": (
        masks.sliding_tiles((4, 9), (2, 3), (1, 3)), 36, 36, lambda b, q, k: q // 18 == k // 18
    ),
    "jagged, keys of their own": (
        masks.jagged(torch.tensor(OFFSETS), masks.causal(), kv_offsets=torch.tensor(KV_OFFSETS)), 10, 7,
        lambda b, q, k: SEQUENCE[q] == KV_SEQUENCE[k]
        and q - OFFSETS[SEQUENCE[q]] >= k - KV_OFFSETS[KV_SEQUENCE[k]],
    ),
    "jagged, more positions": (
        masks.jagged(torch.tensor([0, 3]), masks.causal(), total=7), 7, 7,
        lambda b, q, k: q >= k and (q < 3) == (k < 3),
    ),
    "jagged, a length for each": (
        masks.jagged(torch.tensor(OFFSETS), masks.padding(torch.tensor([1, 2, 0, 4]))), 10, 10,
        lambda b, q, k: SEQUENCE[q] == SEQUENCE[k] and k - OFFSETS[SEQUENCE[q]] < (1, 2, 0, 4)[SEQUENCE[q]],
    ),
    "and, or": (
        masks.causal() & masks.sliding_window(3) | masks.prefix_lm(2), 12, 12,
        lambda b, q, k: (q >= k and 0 <= q - k < 3) or (k < 2 or q >= k),
    ),
    "not": (
        ~masks.causal() & masks.padding(torch.tensor([3, 7])), 9, 9, lambda b, q, k: q < k < (3, 7)[b]
    ),
    "with plain functions": (
        (lambda b, h, q, k: q != 2) & masks.causal() | (lambda b, h, q, k: k == 5), 9, 9,
        lambda b, q, k: (q != 2 and q >= k) or k == 5,
    ),
    "vision": (
        masks.vision_cross(torch.tensor(SHOWN), torch.tensor(IMAGE)), 10, 8,
        lambda b, q, k: SHOWN[IMAGE[k]][0] <= q < SHOWN[IMAGE[k]][1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_masks_keep_what_their_formula_says(name):
    mask_mod, query, key, reference = CASES[name]
    got = create_mask(mask_mod, 2, 1, query, key, "cpu")
    for b, q, k in itertools.product(range(2), range(query), range(key)):
        assert got[b, 0, q, k].item() == reference(b, q, k), (b, q, k)


@pytest.mark.parametrize("name", CASES)
def test_masks_are_masks_of_torch_too(name):
    """torch's own builder makes the same block mask of them."""
    mask_mod, query, key, _ = CASES[name]
    ours, theirs = (
        build(mask_mod, 2, 1, query, key, device="cpu", BLOCK_SIZE=4)
        for build in (create_block_mask, torch_block_mask)
    )
    for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(ours, part), getattr(theirs, part)), part


@pytest.mark.parametrize("name", CASES)
def test_masks_are_known_again(name):
    """What a mask can see is told, so that a second call need not trace it."""
    assert fingerprint(CASES[name][0]) is not None


@pytest.mark.parametrize("name", CASES)
def test_attention_with_each_mask(name):
    """Out and gradients on the CPU, blocks of which some are skipped, against the dense reference."""
    mask_mod, query, key, _ = CASES[name]
    block_mask = create_block_mask(mask_mod, 2, 1, query, key, "cpu", 4)
    results = [attention_and_gradients(block_mask, query, key, options) for options in (None, REFERENCE)]
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def attention_and_gradients(block_mask, query, key, options, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 1, query, 8), (2, 1, key, 8), (2, 1, key, 8)
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    out = flex_attention(*leaves, block_mask=block_mask, kernel_options=options)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


def test_by_head():
    """The last head's choice is none of the masks."""
    kinds = masks.causal(), masks.sliding_window(2, causal=False), lambda b, h, q, k: k < 3
    mask_mod = masks.by_head(torch.tensor(CHOICE), *kinds)
    got = create_mask(mask_mod, 1, 4, 9, 8, "cpu")
    for h, q, k in itertools.product(range(4), range(9), range(8)):
        assert got[0, h, q, k].item() == chosen_reference(h, q, k), (h, q, k)


def test_a_mask_in_the_kernel():
    """Forward and backward of a composed mask, in the interpreter."""
    mask_mod = masks.global_window(9, tokens=4) & ~masks.document(torch.arange(40) // 30) | masks.natten(
        (5, 8), 3
    )
    block_mask = create_block_mask(mask_mod, None, None, 40, 40, "cpu", 16)
    found = attention_and_gradients(block_mask, 40, 40, {"BACKEND": "INTERPRET"}, torch.float32)
    wanted = attention_and_gradients(block_mask, 40, 40, REFERENCE)
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5)


MADE_OF_INTEGERS = {
    "sliding_window": lambda n: masks.sliding_window(n(3)),
    "dilated_window": lambda n: masks.dilated_window(n(3), n(2)),
    "global_window": lambda n: masks.global_window(n(2), n(1)),
    "standalone_window": lambda n: masks.standalone_window(n(4), n(4), n(2)),
    "natten": lambda n: masks.natten((n(4), n(4)), n(1), dilation=(n(1), n(2))),
    "natten, one axis": lambda n: masks.natten((n(16),), n(3), dilation=n(3)),
    "sliding_tiles": lambda n: masks.sliding_tiles((n(4), n(4)), (n(2), n(2)), (n(1), n(1))),
    "prefix_lm": lambda n: masks.prefix_lm(n(3)),
    "block_diffusion": lambda n: masks.block_diffusion(n(8), n(2)),
    "shared_prefix": lambda n: masks.shared_prefix(n(3), torch.arange(16) // 3),
    "tree": lambda n: masks.tree(torch.tensor([-1] + [0] * 15), n(0)),
    "document": lambda n: masks.document(lengths=torch.tensor([5, 6]), total=n(16)),
    "jagged": lambda n: masks.jagged(torch.tensor([0, 5, 10]), total=n(16), kv_total=n(16)),
    "reordered": lambda n: masks.reordered(masks.causal(), masks.tile_order((n(4), n(4)), (n(2), n(4)))),
    "morton": lambda n: masks.reordered(masks.causal(), masks.morton_order((n(4), n(4)))),
}


@pytest.mark.parametrize("name", MADE_OF_INTEGERS)
@pytest.mark.parametrize("integer", [np.int64, np.uint8])
def test_integers_of_numpy_count_as_integers(name, integer):
    """The sizes of a mask often come from numpy: `lengths.max()`, an entry of a shape."""
    expected = create_mask(MADE_OF_INTEGERS[name](int), None, None, 16, 16, "cpu")
    mask = create_block_mask(MADE_OF_INTEGERS[name](integer), None, None, 16, 16, "cpu", BLOCK_SIZE=4)
    assert torch.equal(create_mask(mask.mask_mod, None, None, 16, 16, "cpu"), expected)
    tiles = expected.unflatten(-1, (4, 4)).unflatten(-3, (4, 4)).any(-1).any(-2)
    assert torch.equal(mask.to_dense().bool(), tiles)


def test_a_tensor_is_no_integer_of_a_mask():
    """Its value may change, and the mask would not see that."""
    with pytest.raises(errors.LibraryArgumentError, match="must be an integer of 1 or more"):
        masks.dilated_window(torch.tensor(3), 2)


def test_orders_are_permutations():
    for order in (
        masks.tile_order((4, 6, 10), (2, 3, 5)),
        masks.morton_order((5, 3, 7)),
        masks.morton_order((9,)),
    ):
        assert order.dtype == torch.int32
        assert torch.equal(order.sort().values, torch.arange(len(order), dtype=torch.int32))
    assert masks.tile_order((4, 6), (2, 3)).tolist() == TILED
    assert masks.morton_order((5, 3)).tolist() == CURVED


def test_names_of_masks_tell_what_they_are_of():
    mask_mod = masks.causal() & masks.sliding_window(3) | ~masks.padding(torch.tensor([3]))
    assert mask_mod.__name__ == "((causal_mask & sliding_window_causal) | ~padding_mask)"
    assert repr(mask_mod) == f"<mask {mask_mod.__name__}>"
    assert create_block_mask(mask_mod, None, None, 9, 9, "cpu").to_svg().count("padding_mask") == 1


@pytest.mark.parametrize("negated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_many_masks_joined_one_by_one(negated):
    """Each | or & would otherwise be a few more frames of every trace, and of a fingerprint."""
    near = [lambda b, h, q, k, n=n: (q == n) & (k <= n) for n in range(300)]
    if negated:
        mask_mod = ~functools.reduce(operator.and_, [~masks.Mask(mask_mod) for mask_mod in near])
    else:
        mask_mod = functools.reduce(operator.or_, map(masks.Mask, near))
    expected = create_mask(masks.causal(), None, None, 300, 300, "cpu")
    mask = create_block_mask(mask_mod, None, None, 300, 300, "cpu")
    assert torch.equal(create_mask(mask.mask_mod, None, None, 300, 300, "cpu"), expected)
    assert (masks.causal() | near[0] | masks.causal()).__name__ == "(causal_mask | <lambda> | causal_mask)"


def test_what_a_mask_captures_has_its_name():
    mask_mod = masks.causal() & ~masks.padding(torch.tensor([3]))
    assert [capture.name for capture in trace(mask_mod, "mask").graph.captures] == ["lengths"]


def test_a_mask_of_what_is_no_mask():
    for wrong, error in ((3, errors.NotCallable), (lambda s, b, h, q, k: s, errors.ModArityError)):
        with pytest.raises(error):
            masks.Mask(wrong)
    for combine in (lambda mask, other: mask & other, lambda mask, other: other | mask):
        with pytest.raises(TypeError):
            combine(masks.causal(), 3)


def test_the_lines_of_a_mask_are_its_own():
    for mask_mod in (masks.causal(), masks.natten((5, 5), 3), masks.document(torch.tensor(IDS))):
        where = trace(mask_mod, "mask").graph.result.where
        assert where.file == mask_mod.function.__code__.co_filename


def test_every_pixel_has_a_whole_neighborhood():
    assert (create_mask(masks.natten((6, 9), (3, 5)), 1, 1, 54, 54, "cpu").sum(-1) == 15).all()


RATES = torch.zeros(2)
ONE_PACKING = "given by one of ids, lengths and cu_seqlens"
TWO = "a tuple of 2 positive integers"
KERNEL_RULE = "odd on axes that are not causal, and times the dilation at most the extent, (5, 5)"
EXTENT_RULE = "a tuple of 1, 2 or 3 positive integers"
FROM_0 = "ascending from 0 to at most 1073741824"


@pytest.mark.parametrize(
    ("call", "facts", "rule"),
    [
        (lambda: masks.sliding_window(0), "sliding_window: window is 0", "an integer of 1 or more"),
        (lambda: masks.sliding_window(1.5), "sliding_window: window is 1.5", "an integer of 1 or more"),
        (lambda: masks.prefix_lm("3"), "prefix_lm: prefix is '3'", "an integer of 0 or more"),
        (
            lambda: masks.prefix_lm(RATES),
            "prefix_lm: prefix is torch.float32 [2]",
            "an integer tensor of shape [B]",
        ),
        (
            lambda: masks.document([0, 1]),
            "document: ids is a list",
            "an integer tensor of shape [S] or [B, S]",
        ),
        (lambda: masks.natten((5, 5), 4), "natten: kernel is 4", KERNEL_RULE),
        (lambda: masks.natten((5, 5), (3, 7)), "natten: kernel is (3, 7)", KERNEL_RULE),
        (lambda: masks.natten((5, 5), 3, dilation=2), "natten: kernel is 3", KERNEL_RULE),
        (lambda: masks.natten(5, 3), "natten: extent is 5", EXTENT_RULE),
        (lambda: masks.natten((5, 5), (3, 3, 3)), "natten: kernel is (3, 3, 3)", TWO),
        (
            lambda: masks.natten((5, 5), 3, causal=(True,)),
            "natten: causal is (True,)",
            "True, False or a tuple of 2 of them",
        ),
        (lambda: masks.natten((5, 5), 3, dilation=0), "natten: dilation is (0, 0)", TWO),
        (
            lambda: masks.tile_order((4, 4), (2, 3)),
            "tile_order: tile is (2, 3)",
            "a divisor of extent (4, 4) on each axis",
        ),
        (lambda: masks.morton_order((2, 2, 2, 2)), "morton_order: extent is (2, 2, 2, 2)", EXTENT_RULE),
        (
            lambda: masks.reordered(masks.causal(), RATES),
            "reordered: order is torch.float32 [2]",
            "an integer tensor of shape [S]",
        ),
        (lambda: masks.by_head(torch.tensor([0])), "by_head: mask_mods is empty", "one mask_mod or more"),
        (
            lambda: masks.by_head(RATES, masks.causal()),
            "by_head: choice is torch.float32 [2]",
            "an integer tensor of shape [H]",
        ),
        (lambda: masks.global_window(0, 3), "global_window: window is 0", "an integer of 1 or more"),
        (lambda: masks.global_window(1, 2.0), "global_window: tokens is 2.0", "an integer of 0 or more"),
        (
            lambda: masks.jagged(RATES),
            "jagged: offsets is torch.float32 [2]",
            "an integer tensor of shape [n + 1]",
        ),
        (
            lambda: masks.standalone_window(5, 0, 2),
            "standalone_window: width is 0",
            "an integer of 1 or more",
        ),
        (
            lambda: masks.sliding_window(RATES),
            "sliding_window: window is torch.float32 [2]",
            "an integer tensor of shape [H]",
        ),
        (lambda: masks.dilated_window(3, 0), "dilated_window: dilation is 0", "an integer of 1 or more"),
        (lambda: masks.document(), "document: the packing is given by nothing", ONE_PACKING),
        (
            lambda: masks.document(LENGTHS, lengths=LENGTHS),
            "document: the packing is given by ids and lengths",
            ONE_PACKING,
        ),
        (
            lambda: masks.document(cu_seqlens=torch.tensor([[0, 2, 5], [0, 3, 2]])),
            "document: cu_seqlens is 2 at index 1, 2",
            FROM_0,
        ),
        (lambda: masks.jagged(torch.tensor([0, 2**62])), f"jagged: offsets is {2**62} at index 1", FROM_0),
        (
            lambda: masks.document(lengths=torch.tensor([3, 5]), total=7),
            "document: the running total of lengths is 8 at index 2",
            "ascending from 0 to at most 7, the total length",
        ),
        (
            lambda: masks.jagged(torch.tensor([0, 8]), kv_offsets=torch.tensor([0, 4, 8])),
            "jagged: kv_offsets is for 2 sequences",
            "for 1, as offsets is",
        ),
        (
            lambda: mods.jagged(torch.tensor([0, 8]), mods.alibi(2), total=7),
            "jagged: offsets is 8 at index 1",
            "ascending from 0 to at most 7, the total length",
        ),
        (
            lambda: masks.document(cu_seqlens=RATES),
            "document: cu_seqlens is torch.float32 [2]",
            "an integer tensor of shape [n + 1] or [B, n + 1]",
        ),
        (
            lambda: masks.segments([0, 1]),
            "segments: q_ids is a list",
            "an integer tensor of shape [M] or [B, M]",
        ),
        (
            lambda: masks.segments(LENGTHS, RATES),
            "segments: kv_ids is torch.float32 [2]",
            "an integer tensor of shape [N] or [B, N]",
        ),
        (lambda: masks.document(lengths=LENGTHS, total=0), "document: total is 0", "an integer of 1 or more"),
        (lambda: masks.document(LENGTHS, total=3), "document: total is 3", "left out with ids"),
        (
            lambda: masks.jagged(torch.tensor([0, 8]), total="8"),
            "jagged: total is '8'",
            "an integer of 0 or more",
        ),
        (
            lambda: masks.shared_prefix(torch.arange(64), 10),
            "shared_prefix: prefix is a Tensor of shape [64]",
            "an integer of 0 or more",
        ),
        (
            lambda: masks.vision_cross(torch.zeros(4, 3, dtype=torch.int64), torch.arange(8)),
            "vision_cross: intervals is torch.int64 [4, 3]",
            "an integer tensor of shape [images, 2]",
        ),
        (
            lambda: masks.tree(torch.tensor([-1, 2, 1])),
            "tree: parents is such that node 1 has no root",
            "a forest",
        ),
        (lambda: masks.prefix_lm([3, 4]), "prefix_lm: prefix is a list", "an integer tensor of shape [B]"),
        (lambda: masks.sliding_tiles((4, 4), (2, 2, 2), (1, 1)), "sliding_tiles: tile is (2, 2, 2)", TWO),
        (
            lambda: masks.sliding_tiles((4, 4, 4), (2, 3, 2), (1, 1, 1)),
            "sliding_tiles: tile is (2, 3, 2)",
            "a divisor of extent (4, 4, 4) on each axis",
        ),
        (
            lambda: masks.sliding_tiles((4, 4, 4), (2, 2, 2), (1, 3, 1)),
            "sliding_tiles: kernel is (1, 3, 1)",
            "odd and at most the number of tiles, (2, 2, 2)",
        ),
    ],
)
def test_refusals(call, facts, rule):
    with pytest.raises(errors.LibraryArgumentError) as caught:
        call()
    assert str(caught.value).startswith(f"{facts}; it must be {rule}.\n  Instead: ")


STARTS = torch.tensor([0, 3, 8])
LENGTH_RULE, TOTAL_RULE = "an integer from 1 to 1073741824", "an integer from 0 to 1073741824"
AT_MOST = " with a product of at most 1073741824"


@pytest.mark.parametrize("size", [2**31, 2**40, 2**63 - 1, 2**63, 2**70])
@pytest.mark.parametrize(
    ("make", "facts", "rule"),
    [
        (lambda n: masks.document(lengths=LENGTHS, total=n), "document: total is {}", LENGTH_RULE),
        (lambda n: masks.jagged(STARTS, total=n), "jagged: total is {}", TOTAL_RULE),
        (lambda n: masks.jagged(STARTS, kv_total=n), "jagged: kv_total is {}", TOTAL_RULE),
        (lambda n: masks.block_diffusion(n, 4), "block_diffusion: length is {}", LENGTH_RULE),
        (lambda n: masks.standalone_window(n, 4, 2), "standalone_window: height is {}", LENGTH_RULE),
        (
            lambda n: masks.standalone_window(4, n, 2),
            "standalone_window: width is {}",
            "an integer from 1 to 268435456",
        ),
        (lambda n: masks.natten((n,), 3), "natten: extent is ({},)", EXTENT_RULE + AT_MOST),
        (lambda n: masks.tile_order((4, n), (2, 2)), "tile_order: extent is (4, {})", EXTENT_RULE + AT_MOST),
        (lambda n: masks.morton_order((n, n)), "morton_order: extent is ({0}, {0})", EXTENT_RULE + AT_MOST),
        (lambda n: mods.alibi_slopes(n), "alibi_slopes: heads is {}", LENGTH_RULE),
        (lambda n: mods.sandwich(8, n), "sandwich: length is {}", LENGTH_RULE),
        (lambda n: mods.sandwich(8, 16, n), "sandwich: dim is {}", "an even integer from 2 to 1073741824"),
        (
            lambda n: mods.t5_bias(torch.zeros(8, 2), max_distance=n),
            "t5_bias: max_distance is {}",
            LENGTH_RULE,
        ),
    ],
)
def test_sizes_beyond_all_lengths(size, make, facts, rule):
    test_refusals(lambda: make(size), facts.format(size), rule)


REACHES = {
    "prefix_lm": (masks.prefix_lm, "prefix", 0),
    "sliding_window": (masks.sliding_window, "window", 1),
    "dilated_window": (lambda n: masks.dilated_window(n, 3), "window", 1),
    "dilated_window by dilation": (lambda n: masks.dilated_window(3, n), "dilation", 1),
    "global_window": (lambda n: masks.global_window(n, 2), "window", 1),
    "global_window by tokens": (lambda n: masks.global_window(2, n), "tokens", 0),
    "block_diffusion": (lambda n: masks.block_diffusion(8, n), "block", 1),
    "shared_prefix": (lambda n: masks.shared_prefix(n, torch.arange(16) // 5), "prefix", 0),
    "standalone_window": (lambda n: masks.standalone_window(4, 4, n), "window", 1),
}


@pytest.mark.parametrize("name", REACHES)
def test_a_reach_beyond_all_positions(name):
    """The largest integer of 64 bits reaches as far as the mask; a larger one is refused."""
    make, argument, least = REACHES[name]
    expected = create_mask(make(16), None, None, 16, 16, "cpu")
    assert torch.equal(create_mask(make(2**63 - 1), None, None, 16, 16, "cpu"), expected)
    facts = f"{name.split()[0]}: {argument} is {2**63}"
    test_refusals(lambda: make(2**63), facts, f"an integer from {least} to 9223372036854775807")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_starts_in_a_small_dtype(dtype):
    """A total that the dtype does not hold."""
    starts, total = torch.tensor([0, 5, 100], dtype=dtype), 40_000
    mask = create_block_mask(masks.jagged(starts, total=total), None, None, total, total, "cpu")
    same = create_block_mask(masks.jagged(starts.long(), total=total), None, None, total, total, "cpu")
    assert torch.equal(mask.to_dense(), same.to_dense())


@pytest.mark.parametrize("packing", [{"lengths": LENGTHS[0, :0]}, {"cu_seqlens": torch.tensor([0])}])
def test_no_document_at_all(packing):
    with pytest.raises(errors.CallSizeError):
        create_block_mask(masks.document(**packing), None, None, 8, 8, "cpu")
    assert create_mask(masks.document(**packing, total=8), None, None, 8, 8, "cpu").all()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: masks.reordered(masks.causal, torch.arange(8)), errors.NotMadeError),
        (lambda: masks.jagged(torch.tensor([0, 8]), masks.causal), errors.NotMadeError),
        (lambda: masks.jagged(torch.tensor([0, 8]), 3), errors.NotCallable),
        (lambda: mods.jagged(torch.tensor([0, 8]), masks.causal()), errors.ModArityError),
        (lambda: mods.chain(mods.alibi), errors.NotMadeError),
        (lambda: mods.chain(masks.causal()), errors.ModArityError),
        (lambda: masks.causal() & mods.alibi(3), errors.ModArityError),
    ],
)
def test_a_mod_within_a_mod_is_checked(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("flag", [1, 0, np.bool_(True), np.bool_(False)], ids=["1", "0", "yes", "no"])
def test_what_counts_as_a_flag_in_calls(flag):
    """numpy's comparisons of numbers make numpy's bools."""
    ids = torch.arange(16) // 6

    def made(causal):
        return (
            masks.document(ids, causal), masks.sliding_window(3, causal), masks.dilated_window(2, 2, causal),
            masks.global_window(3, 2, causal), masks.natten((16,), 3, causal=causal),
            masks.natten((4, 4), 3, causal=(causal, True)),
        )  # fmt: skip

    for one, other in zip(made(flag), made(bool(flag)), strict=True):
        assert torch.equal(*(create_mask(mask, 1, 1, 16, 16, "cpu") for mask in (one, other)))
