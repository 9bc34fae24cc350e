"""The generated Hopper backward, run as plain Python beside dense attention: its pipeline, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from tiers import long_but

from flexmod.codegen.hopper import BackwardShape

from .hopper_backward_calls import APART, APART_CHUNKS, CHUNKS, DELAYED, TOGETHER, Call, Case, faults


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Under deterministic algorithms torch fills what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


# every way there is, those too that no ladder has
WAYS = [
    *(
        BackwardShape(block_m, ahead=ahead, shared_operand=shared, late=late)
        for block_m, ahead, shared, late in product((64, 128), *[(False, True)] * 3)
    ),
    *(
        BackwardShape(64, ahead=ahead, shared_operand=None, late=late, block_n=64)
        for ahead, late in product((False, True), repeat=2)
    ),
]
IN_STEP = BackwardShape(128, ahead=False, shared_operand=False, late=True)
LATE = BackwardShape(64, ahead=True, shared_operand=None, late=True, block_n=64)
WIDE = (192, 136)


def dims(shape: BackwardShape) -> tuple[int, int]:
    return WIDE if shape.block_n == 64 else (192, 64) if shape.ahead is None else (64, 64)


CASES = [
    # few blocks, whose pairs are judged; many steps over one tile of keys, and a derivative of the score
    *(Case("documents", "slopes", shape, dims(shape), (260, 130)) for shape in WAYS),
    # products in the order of wider heads
    *(Case("documents", "slopes", s, (128, 64), (260, 130)) for s in WAYS if s.block_m < s.block_n),
    # dQ a step late: sums for captures by column, heads that share keys, few steps and none, and what no
    # number comes of past the ends
    *(Case("documents", "slopes", shape, (192, 64), (260, 130), heads=(2, 1)) for shape in (DELAYED, CHUNKS)),
    Case("window", "bias of keys", CHUNKS, (192, 128), (140, 130), batch=(2, 1)),
    *(Case("", "gate", shape, (192, 64), (129, 65)) for shape in (DELAYED, CHUNKS)),
    Case("holes", "softcap", DELAYED, (192, 64), (260, 130)),
    *(Case(mask, "softcap", CHUNKS, (160, 128), (130, 260)) for mask in ("holes", "listed")),
    Case("by head", "alibi", CHUNKS, (192, 64), (70, 300), heads=(4, 2), batch=(2, 1), ordered=True),
    Case("listed", "alibi", DELAYED, (192, 64), (260, 130)),
    *(Case("", "softcap", DELAYED, (136, 128), lengths) for lengths in ((1, 1), (65, 300), (129, 65))),
    Case("by head", "alibi", DELAYED, (192, 64), (70, 300), heads=(4, 2), batch=(2, 1), ordered=True),
    Case("nothing", "softcap", DELAYED, (192, 64)),
    Case("window", "", DELAYED, (160, 72), (130, 199), form="lists", grad_lse=True, block=(128, 256)),
    Case("same", "", DELAYED, (192, 64), (5, 5), (3, 1), scale=3.0, dtype=torch.float16, block=(256, 256)),
    Case("causal", "softcap", DELAYED, (192, 64), dtype=torch.bfloat16),
    # a score in chunks
    Case("documents", "slopes", APART_CHUNKS, (128, 128), (260, 130), heads=(2, 1)),
    Case("window", "bias of keys", APART_CHUNKS, (128, 64), (140, 130), batch=(2, 1)),
    Case("listed", "gate", APART_CHUNKS, lengths=(129, 65)),
    Case("by head", "alibi", APART_CHUNKS, (128, 128), (70, 300), heads=(4, 2), batch=(2, 1), ordered=True),
    *(Case("documents", "slopes", shape, (256, 64), (260, 130)) for shape in (TOGETHER, LATE)),
    *(Case("", "softcap", shape, dims(shape), (260, 65)) for shape in (APART, IN_STEP, TOGETHER, LATE)),
    # lengths, and what no number comes of past them
    *(Case("", "", shape, dims(shape), (1, 1)) for shape in (APART, TOGETHER)),
    *(Case("", "gate", shape, dims(shape), (129, 65)) for shape in (IN_STEP, LATE)),
    Case("", "", lengths=(1, 300)),
    Case("causal", "gate", replace(APART, stages=3)),
    # masks: queries that see nothing, lists in place of runs, one for each batch entry and head
    *(
        Case(mask, "", IN_STEP, form=form)
        for mask in ("window", "listed", "holes")
        for form in ("runs", "lists")
    ),
    Case("documents"),
    Case("documents", block=(128, 256), lengths=(300, 300)),
    Case("nothing", "softcap"),
    # rows of blocks in an order; then tiles may lie past the last key
    Case("holes", "slopes", ordered=True, lengths=(260, 300)),
    Case("by head", "", IN_STEP, (64, 64), (300, 300), (2, 2), (2, 1), ordered=True, block=(256, 256)),
    Case("window", "bias of keys", TOGETHER, WIDE, ordered=True, lengths=(130, 130)),
    Case("causal", "relative table", LATE, WIDE, ordered=True, lengths=(130, 130), heads=(2, 1)),
    Case("holes", "gate", LATE, WIDE),
    Case("listed", "alibi", TOGETHER, WIDE, form="lists"),
    Case("by head", "alibi", heads=(2, 1), batch=(2, 2)),
    # tiles of a captured tensor
    Case("", "pairs"),
    Case("holes", "times pairs", APART, (128, 64), (260, 300), ordered=True),
    Case("causal", "times pairs", heads=(4, 2), batch=(2, 1), lengths=(130, 130), form="lists"),
    # heads and batch entries that share keys
    Case("causal", "softcap", heads=(4, 2), batch=(2, 1), lengths=(66, 66)),
    Case("", "", TOGETHER, WIDE, heads=(3, 1), batch=(2, 1), lengths=(70, 70)),
    # head dimensions
    *(Case("causal", "", APART, dims) for dims in ((64, 128), (128, 64), (96, 40), (80, 112))),
    *(Case("causal", "", LATE, dims, (130, 70)) for dims in ((256, 256), (160, 224), (64, 256), (136, 136))),
    # a block's tiles past the last query, which meet no other head's numbers: here half types would overflow
    *(
        Case("same", "", shape, dims(shape), (5, 5), (3, 1), scale=3.0, dtype=torch.float16, block=(256, 256))
        for shape in (APART, LATE)
    ),
    # scale and lse
    Case("causal", "softcap", IN_STEP, scale=-0.3, grad_lse=True),
    Case("", "", TOGETHER, WIDE, (130, 65), grad_lse=True),
    # sums for captures: by column, along diagonals and by element, before and after dp has come
    *(
        Case(mask, learned, shape, dims(shape), (140, 130), heads=(2, 1))
        for learned, mask in (
            ("bias of keys", "window"), ("relative table", "causal"), ("temperature", "listed"),
            ("clamped distances", ""), ("several", "holes"), ("bias of pairs and heads", "causal"),
        )
        for shape in (APART, LATE)
    ),
    Case("causal", "relative table", IN_STEP, lengths=(140, 199)),
    Case("", "bias of everything", IN_STEP, lengths=(70, 130), heads=(4, 2), batch=(3, 1)),
    Case("by head", "bias of pairs", TOGETHER, WIDE, (130, 70), heads=(2, 1), batch=(2, 2)),
    Case("", "temperature", lengths=(70, 70), heads=(4, 2), batch=(3, 1)),
    # positions that begin elsewhere
    *(Case("causal at 90", "alibi at 90", shape, dims(shape), (130, 199)) for shape in (APART, LATE)),
    Case("listed at 90", "alibi at a tensor", IN_STEP, lengths=(130, 199), batch=(2, 1)),
    # rounded as on the chip
    *(Case("window", "softcap", APART, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    Case("causal", "bias of keys", TOGETHER, WIDE, dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("case", long_but(CASES[::2], CASES), ids=str)
def test_it_ends_and_agrees_with_dense_attention(case: Case) -> None:
    call = Call(case)
    out, lse, exact = call.truth()
    assert not faults(call.run(out, lse), exact, case.dtype)


@pytest.mark.parametrize("shape", [APART, DELAYED, TOGETHER], ids=str)
def test_gradients_of_copied_heads_are_two_numbers_each(shape: BackwardShape) -> None:
    """The second one is what the first was rounded by."""
    case = Case("", "", shape, dims(shape), (70, 65), heads=(4, 2), batch=(2, 1), dtype=torch.bfloat16)
    call = Call(case)
    out, lse, _ = call.truth()
    rounded = call.run(out, lse)[1:]
    for one, both in zip(rounded, call.run(out, lse, copied_heads=True)[1:], strict=True):
        first, second = both[:, ::2], both[:, 1::2]
        assert torch.equal(first, one)
        assert (second.abs() <= first.abs() * 2**-8).all()
        assert second.count_nonzero() > 0.9 * second.numel()


@pytest.mark.parametrize("shape", [APART, DELAYED, TOGETHER], ids=str)
def test_in_any_order_of_turns(shape: BackwardShape) -> None:
    call = Call(Case("", "", shape, dims(shape), (260, 65), heads=(2, 1)))
    out, lse, exact = call.truth()
    for seed in range(1, 4):
        assert not faults(call.run(out, lse, seed=seed), exact, call.case.dtype)
