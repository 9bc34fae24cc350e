"""The library of masks and score mods: each against its formula, written out once more in plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flexmod import errors, masks, mods
from flexmod.block_mask.build import create_mask
from flexmod.ir.evaluate import evaluate
from flexmod.ir.trace import trace

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
    return all(abs(a - b) <= 2 for a, b in zip(pixel(q), pixel(k), strict=True))


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


def ragged_reference(q, k):
    start = OFFSETS[SEQUENCE[q]]
    return SEQUENCE[q] == SEQUENCE[k] and (k - start < 2 or q >= k)


# name -> (mask_mod, Q_LEN, KV_LEN, the same of (b, q, k))
CASES = {
    "causal": (masks.causal(), 9, 12, lambda b, q, k: q >= k),
    "window": (masks.sliding_window(3), 12, 12, lambda b, q, k: 0 <= q - k <= 3),
    "window of one": (masks.sliding_window(0), 5, 5, lambda b, q, k: q == k),
    "window both": (masks.sliding_window(3, causal=False), 12, 9, lambda b, q, k: abs(q - k) <= 3),
    "prefix": (masks.prefix_lm(4), 9, 9, lambda b, q, k: k < 4 or q >= k),
    "prefixes": (masks.prefix_lm(torch.tensor([2, 6])), 9, 9, lambda b, q, k: k < (2, 6)[b] or q >= k),
    "document": (masks.document(torch.tensor(IDS)), 10, 10, lambda b, q, k: IDS[q] == IDS[k]),
    "documents, causal": (
        masks.document(torch.tensor([IDS, IDS[::-1]]), causal=True), 10, 10,
        lambda b, q, k: q >= k and (IDS, IDS[::-1])[b][q] == (IDS, IDS[::-1])[b][k],
    ),
    "ragged": (masks.ragged(torch.tensor(OFFSETS)), 10, 10, lambda b, q, k: SEQUENCE[q] == SEQUENCE[k]),
    "ragged prefix": (
        masks.ragged(torch.tensor(OFFSETS), masks.prefix_lm(2)), 10, 10,
        lambda b, q, k: ragged_reference(q, k),
    ),
    "padding": (masks.padding(torch.tensor([3, 7])), 4, 8, lambda b, q, k: k < (3, 7)[b]),
    "standalone": (masks.standalone_window(5, 4, 2), 20, 20, lambda b, q, k: standalone_reference(q, k)),
    "natten": (masks.natten(5, 4, 3), 20, 20, lambda b, q, k: natten_reference(q, k)),
    "window by head": (
        masks.sliding_window(torch.tensor([2])), 12, 12, lambda b, q, k: 0 <= q - k <= 2
    ),
    "dilated": (masks.dilated_window(2, 3), 12, 12, lambda b, q, k: q - k in (0, 3, 6)),
    "dilated both": (
        masks.dilated_window(1, 4, causal=False), 12, 12, lambda b, q, k: q - k in (-4, 0, 4)
    ),
    "lengths": (
        masks.document(lengths=LENGTHS, total=10), 10, 10, lambda b, q, k: BY_LENGTH[b][q] == BY_LENGTH[b][k]
    ),
    "cu_seqlens": (
        masks.document(cu_seqlens=torch.tensor([0, 3, 5, 9, 10]), causal=True), 10, 10,
        lambda b, q, k: q >= k and BY_LENGTH[0][q] == BY_LENGTH[0][k],
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


def test_the_lines_of_a_mask_are_its_own():
    for mask_mod in (masks.causal(), masks.natten(5, 5, 3), masks.document(torch.tensor(IDS))):
        where = trace(mask_mod, "mask").graph.result.where
        assert where.file == mask_mod.__code__.co_filename


def test_every_pixel_has_a_whole_neighborhood():
    assert (create_mask(masks.natten(6, 9, (3, 5)), 1, 1, 54, 54, "cpu").sum(-1) == 15).all()


SCORE_CASES = {
    "alibi": (mods.alibi(4), lambda s, h, q, k: s + 2.0 ** (-2.0 * (h + 1)) * (k - q)),
    "alibi table": (mods.alibi(torch.tensor([0.5, 0.25])), lambda s, h, q, k: s + (0.5, 0.25)[h] * (k - q)),
    "softcap": (mods.softcap(2.5), lambda s, h, q, k: 2.5 * math.tanh(s / 2.5)),
    "relative": (mods.relative_position(), lambda s, h, q, k: s + q - k),
    "causal": (mods.causal_score(), lambda s, h, q, k: s if q >= k else -math.inf),
}


@pytest.mark.parametrize("name", SCORE_CASES)
def test_score_mods_do_what_their_formula_says(name):
    score_mod, reference = SCORE_CASES[name]
    traced = trace(score_mod, "score")
    score = torch.linspace(-4, 4, 2 * 5 * 6, dtype=torch.float64).view(1, 2, 5, 6)
    places = {
        name: torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(("b", "h", "q_idx", "kv_idx"), score.shape, strict=True))
    }
    (got,) = evaluate(traced.graph, traced.tensors, **places, score=score, real=torch.float64)
    for h, q, k in itertools.product(range(2), range(5), range(6)):
        assert got[0, h, q, k].item() == pytest.approx(reference(score[0, h, q, k].item(), h, q, k), rel=1e-6)


RATES = torch.zeros(2)
ALIBI_RULE = "the number of heads, or a floating-point tensor of shape [H]"
ONE_PACKING = "given by one of ids, lengths and cu_seqlens"
THREE = "a tuple of 3 positive integers"
KERNEL_RULE = "odd, positive and at most the image, 5 x 5"


@pytest.mark.parametrize(
    ("call", "facts", "rule"),
    [
        (lambda: masks.sliding_window(-1), "sliding_window: window is -1", "an integer of 0 or more"),
        (lambda: masks.sliding_window(1.5), "sliding_window: window is 1.5", "an integer of 0 or more"),
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
        (lambda: masks.natten(5, 5, 4), "natten: kernel is 4", KERNEL_RULE),
        (lambda: masks.natten(5, 5, (3, 7)), "natten: kernel is (3, 7)", KERNEL_RULE),
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
            lambda: masks.document(cu_seqlens=RATES),
            "document: cu_seqlens is torch.float32 [2]",
            "an integer tensor of shape [n + 1] or [B, n + 1]",
        ),
        (lambda: masks.document(lengths=LENGTHS, total=0), "document: total is 0", "an integer of 1 or more"),
        (
            lambda: masks.tree(torch.tensor([-1, 2, 1])),
            "tree: parents is such that node 1 has no root",
            "a forest",
        ),
        (lambda: masks.sliding_tiles((4, 4), (2, 2, 2), (1, 1, 1)), "sliding_tiles: extent is (4, 4)", THREE),
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
        (lambda: mods.softcap(0), "softcap: cap is 0", "a positive number"),
        (lambda: mods.alibi(0), "alibi: slopes is 0", ALIBI_RULE),
        (lambda: mods.alibi(torch.tensor([1, 2])), "alibi: slopes is torch.int64 [2]", ALIBI_RULE),
    ],
)
def test_refusals(call, facts, rule):
    with pytest.raises(errors.LibraryArgumentError) as caught:
        call()
    assert str(caught.value).startswith(f"{facts}; it must be {rule}.\n  Instead: ")
