"""The kernels for Hopper: what they take and what not, their shapes, and their text around hand-written mods.

What the compiler makes of a user's mods is in test_hopper_compiled.py; what kernels compute, in tests/gpu.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import ALIBI, ALIBI_GRAD, CAUSAL, DOCUMENT, SOFTCAP, SOFTCAP_GRAD
from torch import Tensor

from flexmod import mods
from flexmod.codegen.compiler import lower
from flexmod.codegen.hopper import hopper_kernels, ladder, spec_obstacle, text
from flexmod.codegen.kernels import CaptureTexts, ModText, TermText
from flexmod.codegen.ladder import ENDS_SOON
from flexmod.codegen.spec import KernelSpec
from flexmod.codegen.term_text import write_exponent
from flexmod.codegen.variant import variant
from flexmod.ir.trace import trace

BF16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def spec(dtype: torch.dtype = BF16, dim: int = 128, value_dim: int = 0, **other: Any) -> KernelSpec:
    return KernelSpec(dtype, dtype, dtype, dim, value_dim or dim, **other)


def exponent(score_mod: Any) -> ModText:
    """As forwards take a score_mod."""
    lowered = lower(trace(score_mod, "score").graph, (1, 4, 1024, 1024), split=False)
    assert lowered.graph is not None
    return write_exponent(lowered.graph)


def exponent_in_tiles(tensor: Tensor) -> ModText:
    score = lower(trace(at_pair(tensor, "h"), "score").graph, (1, 4, 8, 8), split=False).graph
    assert score is not None
    return write_exponent(score, pair_tile=0)


ALIBI_EXPONENT, SOFTCAP_EXPONENT = exponent(mods.alibi(torch.ones(4))), exponent(mods.softcap(17.5))


# What is taken


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (128, 128), (64, 128), (96, 96), (80, 40), (192, 128), (192, 192), (256, 256), (64, 256)],
)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_taken(dims: tuple[int, int], way: Any) -> None:
    assert spec_obstacle(spec(BF16, *dims), way) is None
    assert spec_obstacle(spec(HALF, *dims, mask_block=(128, 128)), way) is None


@pytest.mark.parametrize("v_dtype", [E4M3, E5M2, BF16, HALF])
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (80, 112), (256, 256)])
def test_taken_in_float8(v_dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert spec_obstacle(KernelSpec(E4M3, E4M3, v_dtype, *dims, out_dtype=BF16), "forward") is None


ADDRESSED = "the TMA unit addresses rows of 16 bytes"


@pytest.mark.parametrize(
    ("refused", "way", "why"),
    [
        (spec(SINGLE), "forward", "float32 operands"),
        (
            KernelSpec(BF16, HALF, HALF, 64, 64),
            "forward",
            "keys and values of another dtype than the queries",
        ),
        (
            KernelSpec(BF16, BF16, E4M3, 64, 64),
            "forward",
            "keys and values of another dtype than the queries",
        ),
        (
            KernelSpec(E4M3, E5M2, E4M3, 64, 64, out_dtype=BF16),
            "forward",
            "keys and values of another dtype than the queries",
        ),
        (spec(E4M3, 64, out_dtype=SINGLE), "forward", "an output in float32"),
        (
            spec(E4M3, 72, out_dtype=BF16),
            "forward",
            f"a head dimension of 72, no multiple of 16: {ADDRESSED}",
        ),
        (spec(dim=264), "forward", "a head dimension of 264, above 256"),
        (spec(dim=68), "forward", f"a head dimension of 68, no multiple of 8: {ADDRESSED}"),
        (spec(dim=32), "backward", "head dimensions of 32 and 32: the tiles are 64 wide"),
        (
            spec(short=64),
            "forward",
            "a short call: small tiles of the portable kernels take less time",
        ),
        (
            spec(mask_block=(64, 128)),
            "forward",
            "blocks of 64 x 128 in the mask, no multiples of 128 x 64",
        ),
        (
            spec(mask_block=(128, 64)),
            "backward",
            "blocks of 128 x 64 in the mask, no multiples of 64 x 128",
        ),
    ],
)
def test_specs_that_are_not_taken(refused: KernelSpec, way: Any, why: str) -> None:
    assert spec_obstacle(refused, way) == why


# Tiles of captured tensors


def at_pair(tensor: Tensor, *outer: Any) -> Callable[..., Any]:
    """Adds a tensor's elements at a pair of positions; `outer` are numbers, or "b" and "h"."""

    def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        known = {"b": b, "h": h}
        return score + tensor[(*(known.get(index, index) for index in outer), q_idx, kv_idx)]

    return add


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


SQUARE = zeros(2, 40, 48)
IN_TILES = {
    "by head": (at_pair(SQUARE, "h"), True),
    "one": (at_pair(SQUARE[0]), True),
    "of a batch entry": (at_pair(SQUARE[None, None], "b", 0, 1), True),
    "float32": (at_pair(SQUARE.float(), "h"), True),
    "float16": (at_pair(SQUARE.half(), "h"), True),
    "cut": (at_pair(SQUARE[:, 1:, :9], "h"), True),
    "odd rows": (at_pair(zeros(2, 40, 49), "h"), False),
    "odd start": (at_pair(zeros(2, 40, 56)[..., 1:], "h"), False),
    "expanded": (at_pair(SQUARE[0].expand(2, 40, 48), "h"), False),
    "across": (at_pair(SQUARE.mT, "h"), False),
    "integers": (at_pair(SQUARE.int(), "h"), False),
    "float64": (at_pair(SQUARE.double(), "h"), False),
    "from the end": (at_pair(SQUARE, -1), False),
    "six dimensions": (at_pair(SQUARE[None, None, None], 0, 0, 0, "h"), False),
    "keys first": (lambda score, b, h, q_idx, kv_idx: score + SQUARE[h, kv_idx, q_idx], False),
    "shifted": (lambda score, b, h, q_idx, kv_idx: score + SQUARE[h, q_idx, kv_idx + 1], False),
    "of groups": (lambda score, b, h, q_idx, kv_idx: score + SQUARE[h // 2, q_idx, kv_idx], True),
    "of a batch and group": (
        lambda score, b, h, q_idx, kv_idx: score + SQUARE[b * 4 + h % 4, q_idx, kv_idx], True
    ),
    "far nested": (
        lambda score, b, h, q_idx, kv_idx: score + SQUARE[((h * 2 + b) * 2 + b) * 2, q_idx, kv_idx], False
    ),
    "of the head before": (lambda score, b, h, q_idx, kv_idx: score + SQUARE[h - 1, q_idx, kv_idx], False),
    "of a quotient by 0": (lambda score, b, h, q_idx, kv_idx: score + SQUARE[h // b, q_idx, kv_idx], False),
    "by query": (lambda score, b, h, q_idx, kv_idx: score + SQUARE[q_idx, q_idx, kv_idx], False),
    "twice": (
        lambda score, b, h, q_idx, kv_idx: score + SQUARE[h, q_idx, kv_idx] + SQUARE[h, kv_idx, q_idx],
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("score_mod", "taken"), IN_TILES.values(), ids=IN_TILES)
def test_captures_that_come_in_tiles(score_mod: Callable[..., Any], taken: bool) -> None:
    of_call = variant(score_mod, head_dim=128, dtype=BF16)
    assert of_call.spec_of("forward").pair_tile == (0 if taken else None)
    made: Any = hopper_kernels(of_call.kernels("forward"))
    assert ("pair_tiles" in made.text) == taken


def test_which_tile_comes() -> None:
    of_call = variant(IN_TILES["of a batch and group"][0], head_dim=128, dtype=BF16)
    for direction, rows in (("forward", "start_m + 64 * consumer"), ("backward", "start_m")):
        made: Any = hopper_kernels(of_call.kernels(direction))
        assert f"[(batch * 4) + (head % 4), {rows}, start_n]" in made.text


def test_a_backward_without_such_a_tile_shares_the_portable_text() -> None:
    of_call = variant(at_pair(SQUARE.mT, "h"), head_dim=128, dtype=BF16)
    kernels = of_call.kernels("backward")
    assert kernels.family_score is kernels.score is not None


def test_wide_heads_leave_no_room_for_a_tile_in_float32() -> None:
    rows = (at_pair(SQUARE, "h"), 256, 0), (at_pair(SQUARE.float(), "h"), 256, None)
    for score_mod, dim, tile in rows:
        assert variant(score_mod, head_dim=dim, dtype=BF16).spec_of("forward").pair_tile == tile
    for dtype in (E4M3, torch.float32):
        assert variant(rows[0][0], head_dim=128, dtype=dtype).spec_of("forward").pair_tile is None


def test_of_two_such_captures_the_first_comes_in_tiles() -> None:
    other = SQUARE.clone()

    def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + SQUARE[h, q_idx, kv_idx] * other[h, q_idx, kv_idx]

    source = hopper_kernels(variant(add, dtype=BF16).kernels("forward")).text
    assert "SQUARE_tile_of_score.block_type" in source
    assert "tl.load(other + " in source


# Shapes


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("block", [None, (128, 128), (128, 192), (64, 128), (384, 256), (64, 64)])
def test_tiles_divide_the_blocks_of_the_mask(dim: int, block: Any) -> None:
    for way in ("forward", "backward"):
        taken = spec(dim=dim, mask_block=block)
        if spec_obstacle(taken, way) is None:
            shapes = ladder(taken, way, None, CAUSAL if block else None)
            assert len(set(shapes)) == len(shapes) > 0
            q_block, kv_block = block or (128, 128)
            assert all(q_block % s.block_m == kv_block % s.block_n == 0 for s in shapes if block)


def test_the_first_shape_follows_the_mods() -> None:
    def first(way: Any, dim: int, score: Any = None, mask: Any = None, **facts: Any) -> str:
        of = spec(dim=dim, mask_block=(128, 128) if mask else None, **facts)
        return str(ladder(of, way, score, mask)[0])

    one_number, two_numbers, three_numbers = (replace(DOCUMENT, column_values=count) for count in (1, 2, 3))
    assert first("forward", 128, mask=CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 128, mask=two_numbers) == "128x128 (2 consumers)"
    assert first("forward", 128, mask=three_numbers) == "128x64 (2 consumers)"
    busy = replace(SOFTCAP, expensive=frozenset({"element"}))
    assert first("forward", 128, busy, CAUSAL) == "128x64 (2 consumers)"
    assert first("forward", 128, ALIBI, CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 64, busy, CAUSAL) == "128x128 (2 consumers)"
    computes = replace(busy, computes=True)
    ahead_of_all = {
        (128, CAUSAL): ["128x64 (2 consumers)", "64x64 (1 consumer)", "128x128 (2 consumers)"],
        (64, CAUSAL): ["64x128 (1 consumer)", "64x64 (1 consumer)", "128x128 (2 consumers)"],
        (64, None): ["192x128 (3 consumers)", "64x128 (1 consumer)", "64x64 (1 consumer)"],
        (256, None): ["128x64 (2 consumers)"],
    }
    for (dim, mask), expected in ahead_of_all.items():
        of = spec(dim=dim, mask_block=(128, 128) if mask else None)
        assert [str(shape) for shape in ladder(of, "forward", computes, mask)[:3]] == expected
    assert first("forward", 64) == "192x128 (3 consumers)"
    assert first("forward", 64, ALIBI_EXPONENT) == "192x128 (3 consumers)"
    assert first("forward", 64, ALIBI_EXPONENT, CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 64, mask=CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 64, mask=CAUSAL, short=ENDS_SOON) == "64x128 (1 consumer)"
    assert first("forward", 64, mask=one_number) == "64x128 (1 consumer)"
    assert first("forward", 64, mask=three_numbers) == "64x128 (1 consumer)"
    assert first("forward", 256, mask=CAUSAL) == "128x64 (2 consumers)"
    half, single = (exponent_in_tiles(zeros(4, 8, 8, dtype=dtype)) for dtype in (BF16, SINGLE))
    assert first("forward", 128, half) == "128x128 (2 consumers)"
    assert first("forward", 64, half) == "192x128 (3 consumers)"
    assert first("forward", 128, single) == "128x64 (2 consumers)"
    assert first("forward", 64, single) == "128x128 (2 consumers)"
    assert first("forward", 64, single, one_number) == "128x128 (2 consumers)"
    shapes: Any = {64: "192x128 (3 consumers)", 128: "192x128 (3 consumers)", 256: "128x128 (2 consumers)"}
    for mask in (None, CAUSAL, one_number):
        for dim, shape in shapes.items():
            of = spec(E4M3, dim, out_dtype=BF16, mask_block=(128, 128) if mask else None)
            expected = "64x128 (1 consumer)" if mask is one_number and dim <= 128 else shape
            assert str(ladder(of, "forward", None, mask)[0]) == expected
    assert first("backward", 128, mask=CAUSAL) == "64x128 (ahead, shared operand)"
    assert first("backward", 128, mask=DOCUMENT) == "64x128 (ahead, shared operand)"
    assert first("backward", 128) == "64x128 (ahead, shared operand)"
    assert first("backward", 128, SOFTCAP) == "64x128 (ahead, shared operand, late)"
    assert first("backward", 128, SOFTCAP, CAUSAL) == "64x128 (ahead, shared operand, late)"
    assert first("backward", 64) == "128x128 (ahead, own operand)"
    assert first("backward", 64, mask=CAUSAL) == "128x128 (ahead, own operand)"
    assert first("backward", 64, mask=DOCUMENT) == "128x128 (in step, own operand, late)"
    in_chunks = "64x128 (in step, shared operand, late, 4 chunks)"
    assert [str(ladder(spec(dim=dim), "backward", ALIBI, None)[-1]) for dim in (64, 128)] == [in_chunks] * 2
    assert first("backward", 64, ALIBI) == "128x128 (in step, own operand, late)"
    assert first("backward", 256) == first("backward", 192, SOFTCAP) == "64x64 (ahead)"
    narrow_values = replace(spec(dim=192), value_dim=128)
    late = ["64x128 (dQ a step late)", "64x128 (dQ a step late, 4 chunks)"]
    terms = {along: (TermText("t", "t", 0, along),) for along in ("column", "diagonal")}
    by_column = replace(ALIBI_GRAD, terms=terms["column"], keeps_zeros=True)
    for score, captures in ((None, {}), (SOFTCAP, {}), (ALIBI, {"column": by_column})):
        shapes = ladder(narrow_values, "backward", score, None, CaptureTexts(**captures))
        assert [str(shape) for shape in shapes] == late[: 2 if score else 1]
    for captures in (
        {"column": replace(by_column, keeps_zeros=False)},
        {"column": replace(by_column, terms=(*terms["column"], *terms["diagonal"]))},
        {"column": by_column, "added": by_column},
    ):
        shapes = ladder(narrow_values, "backward", SOFTCAP, None, CaptureTexts(**captures))
        assert str(shapes[0]) == "64x64 (ahead)"
    halves = replace(narrow_values, mask_block=(128, 64))
    assert str(ladder(halves, "backward", None, CAUSAL)[0]) == "64x64 (ahead)"


# The text


def test_golden_forward(golden: Callable[[str, str], None]) -> None:
    golden(text(spec(mask_block=(128, 128)), ALIBI_EXPONENT, CAUSAL), "hopper_alibi_forward.txt")


def test_golden_forward_with_a_tile_of_a_captured_tensor(golden: Callable[[str, str], None]) -> None:
    golden(text(spec(pair_tile=0), exponent_in_tiles(SQUARE)), "hopper_pairs_forward.txt")


def test_golden_forward_in_float8(golden: Callable[[str, str], None]) -> None:
    golden(text(spec(E4M3, 128, 112, out_dtype=BF16)), "hopper_float8_forward.txt")


def test_golden_forward_in_float8_with_a_mask(golden: Callable[[str, str], None]) -> None:
    masked = spec(E4M3, 128, mask_block=(128, 128), out_dtype=BF16, value_scale=True)
    golden(text(masked, None, CAUSAL), "hopper_float8_causal_forward.txt")


def test_golden_backward(golden: Callable[[str, str], None]) -> None:
    shared = spec(dim=64, mask_block=(128, 128), shared_kv=True, backward=True)
    golden(text(shared, SOFTCAP, DOCUMENT, SOFTCAP_GRAD), "hopper_softcap_backward.txt")


def test_golden_backward_with_grad_q_a_step_late(golden: Callable[[str, str], None]) -> None:
    late = replace(spec(dim=192, mask_block=(128, 128), backward=True), value_dim=128)
    golden(text(late, SOFTCAP, CAUSAL, SOFTCAP_GRAD), "hopper_late_backward.txt")


DTYPES = ("q_dtype", "k_dtype", "v_dtype")
FORWARDS = (
    (None, None),
    (None, DOCUMENT),
    (SOFTCAP_EXPONENT, None),
    (SOFTCAP_EXPONENT, CAUSAL),
    (ALIBI_EXPONENT, CAUSAL),
)
BACKWARDS = (
    (None, None),
    (None, DOCUMENT),
    (SOFTCAP, None, SOFTCAP_GRAD),
    (ALIBI, CAUSAL, ALIBI_GRAD),
)


@pytest.mark.parametrize("texts", [*FORWARDS, *BACKWARDS])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_a_careful_text(texts: Any, block: Any) -> None:
    if texts[1] is not None and block is None:
        return
    backward = texts in BACKWARDS
    for other in (
        {"mask_form": "lists"},
        {"shared_kv": True, "head_dim": 80},
        {"full_tiles_padded": True, "value_dim": 64},
        {"head_dim": 192},
        *([] if backward else [dict.fromkeys(DTYPES, E4M3) | {"out_dtype": BF16, "head_dim": 80}]),
    ):
        source = text(replace(spec(mask_block=block, backward=backward), **other), *texts)
        assert max(map(len, source.splitlines())) <= 110
        compile(source, "module", "exec")
        for name in re.findall("from flexmod.runtime.gluon import (.*)", source)[0].split(", "):
            assert len(re.findall(rf"\b{name}\b", source)) > 1, name


def test_a_derivative_of_one_is_no_step() -> None:
    backward = spec(mask_block=(128, 128), backward=True)
    assert "grad = score_grad(" not in text(backward, ALIBI, CAUSAL, ALIBI_GRAD)
    capped = text(backward, SOFTCAP, CAUSAL, SOFTCAP_GRAD)
    # both factors of the gradient are kept from masked pairs: a derivative may be infinite there
    assert "grad = score_grad(" in capped and "grad = gl.where(keep, grad, 0.0)" in capped
