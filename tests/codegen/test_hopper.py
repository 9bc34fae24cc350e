"""The kernels for Hopper: what they take, their text, and that they compile for sm_90 as they should.

No GPU is needed here; what they compute is in tests/gpu.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import ALIBI, ALIBI_GRAD, CAUSAL, DOCUMENT, SOFTCAP, SOFTCAP_GRAD
from triton_release import NEWEST, Limits

from flexmod import explain, mods
from flexmod.codegen.exponent_text import write_exponent
from flexmod.codegen.hopper import (
    TARGET,
    BackwardShape,
    HopperKernels,
    ladder,
    spec_obstacle,
    sum_block,
    text,
    why_portable,
)
from flexmod.codegen.mod_text import ModText, Parameter
from flexmod.codegen.spec import KernelSpec
from flexmod.compiler import kernels_for, lower
from flexmod.ir.trace import trace
from flexmod.runtime import offline
from flexmod.runtime.gluon import descriptor_type

BF16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32


def spec(dtype: torch.dtype = BF16, dim: int = 128, value_dim: int = 0, **other: Any) -> KernelSpec:
    return KernelSpec(dtype, dtype, dtype, dim, value_dim or dim, **other)


def exponent(score_mod: Any) -> ModText:
    """As forwards take a score_mod."""
    lowered = lower(trace(score_mod, "score").graph, (1, 4, 1024, 1024), split=False)
    assert lowered.score is not None
    return write_exponent(lowered.score)


SLOPES = mods.alibi(torch.ones(4))
ALIBI_EXPONENT, SOFTCAP_EXPONENT = exponent(SLOPES), exponent(mods.softcap(17.5))


# What is taken


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (128, 128), (64, 128), (96, 96), (80, 40), (192, 128), (192, 192), (256, 256), (64, 256)],
)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_taken(dims: tuple[int, int], way: Any) -> None:
    assert spec_obstacle(spec(BF16, *dims), way) is None
    assert spec_obstacle(spec(HALF, *dims, mask_block=(128, 128)), way) is None


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
        (spec(dim=264), "forward", "a head dimension of 264, above 256"),
        (spec(dim=68), "forward", f"a head dimension of 68, no multiple of 8: {ADDRESSED}"),
        (spec(dim=32), "backward", "head dimensions of 32 and 32: the tiles are 64 wide"),
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
    assert why_portable(refused, way, TARGET, {}) == why


@pytest.mark.parametrize(
    ("way", "target", "options", "facts", "why"),
    [
        ("forward", "sm_90", {}, {}, None),
        (
            "backward",
            "sm_90",
            {"num_stages": 2},
            {},
            "kernel option num_stages speaks of the portable template",
        ),
        ("forward", "sm_80", {}, {}, "sm_80 is no Hopper chip (sm_90)"),
        ("forward", "gfx942", {}, {}, "gfx942 is no Hopper chip (sm_90)"),
        ("forward", "sm_90", {"BLOCK_M": 64}, {}, "kernel option BLOCK_M speaks of the portable template"),
        ("backward", "sm_90", {"BLOCK_M": 64}, {}, None),
        ("backward", "sm_90", {"fwd_num_warps": 4}, {}, None),
        ("forward", "sm_90", {"TEMPLATE": "portable"}, {}, "kernel option TEMPLATE asks for it"),
        ("forward", "sm_90", {"bwd_TEMPLATE": "portable"}, {}, None),
        ("forward", "sm_90", {"deterministic": True}, {"deterministic": True}, None),
        ("backward", "sm_90", {"deterministic": False}, {}, None),
        (
            "backward",
            "sm_90",
            {"deterministic": True},
            {},
            "a deterministic backward: Hopper's adds up dQ in any order",
        ),
        (
            "backward",
            "sm_90",
            {},
            {"deterministic": True},
            "a deterministic backward: Hopper's adds up dQ in any order",
        ),
    ],
)
def test_choice_of_the_template(way: Any, target: str, options: Any, facts: Any, why: str | None) -> None:
    assert why_portable(spec(), way, target, options, **facts) == why


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
    def first(way: Any, dim: int, score: Any = None, mask: Any = None) -> str:
        return str(ladder(spec(dim=dim, mask_block=(128, 128) if mask else None), way, score, mask)[0])

    two_numbers, three_numbers = (replace(DOCUMENT, held_by_column=held) for held in (2, 3))
    assert first("forward", 128, mask=CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 128, mask=two_numbers) == "128x128 (2 consumers)"
    assert first("forward", 128, mask=three_numbers) == "128x64 (2 consumers)"
    busy = replace(SOFTCAP, expensive=frozenset({"element"}))
    assert first("forward", 128, busy, CAUSAL) == "128x64 (2 consumers)"
    assert first("forward", 128, ALIBI, CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 64, busy, CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 64) == "192x128 (3 consumers)"
    assert first("forward", 64, ALIBI_EXPONENT) == "192x128 (3 consumers)"
    assert first("forward", 64, ALIBI_EXPONENT, CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 64, mask=CAUSAL) == "128x128 (2 consumers)"
    assert first("forward", 256, mask=CAUSAL) == "128x64 (2 consumers)"
    assert first("backward", 128, mask=CAUSAL) == "64x128 (ahead, shared operand)"
    assert first("backward", 128, mask=DOCUMENT) == "64x128 (ahead, shared operand)"
    assert first("backward", 128) == "64x128 (ahead, shared operand)"
    assert first("backward", 128, SOFTCAP) == "64x128 (ahead, shared operand, late)"
    assert first("backward", 128, SOFTCAP, CAUSAL) == "64x128 (ahead, shared operand, late)"
    assert first("backward", 64) == "128x128 (ahead, own operand)"
    assert first("backward", 64, mask=CAUSAL) == "128x128 (ahead, own operand)"
    assert first("backward", 64, mask=DOCUMENT) == "128x128 (in step, own operand, late)"
    assert first("backward", 64, ALIBI) == "128x128 (in step, own operand, late)"
    assert first("backward", 256) == first("backward", 192, SOFTCAP) == "64x64 (ahead)"
    keys_held = replace(spec(dim=192), value_dim=128)
    assert str(ladder(keys_held, "backward", None, None)[0]) == "64x64 (ahead, late)"


# The text


def test_golden_forward(golden: Callable[[str, str], None]) -> None:
    golden(text(spec(mask_block=(128, 128)), ALIBI_EXPONENT, CAUSAL), "hopper_alibi_forward.txt")


def test_golden_backward(golden: Callable[[str, str], None]) -> None:
    shared = spec(dim=64, mask_block=(128, 128), shared_kv=True, backward=True)
    golden(text(shared, SOFTCAP, DOCUMENT, SOFTCAP_GRAD), "hopper_softcap_backward.txt")


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
    ):
        source = text(replace(spec(mask_block=block, backward=backward), **other), *texts)
        assert max(map(len, source.splitlines())) <= 110
        compile(source, "module", "exec")


def test_a_derivative_of_one_is_no_step() -> None:
    backward = spec(mask_block=(128, 128), backward=True)
    assert "grad = score_grad(" not in text(backward, ALIBI, CAUSAL, ALIBI_GRAD)
    capped = text(backward, SOFTCAP, CAUSAL, SOFTCAP_GRAD)
    # both factors of the gradient are kept from masked pairs: a derivative may be infinite there
    assert "grad = score_grad(" in capped and "grad = gl.where(keep, grad, 0.0)" in capped


def by_windows(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx // 49 - kv_idx // 49)


def test_what_a_first_query_is_a_multiple_of_is_told_where_it_helps() -> None:
    """Where positions are divided or masked; between plain differences it makes longer addresses."""
    told = "first_query = start_m & (2**31 - BLOCK_M)"
    assert told not in explain(mods.relative_position()).hopper["backward"]
    assert told in explain(mods.relative_position(), near).hopper["backward"]
    assert told in explain(by_windows).hopper["backward"]


# Compiled for sm_90

LEARNED = torch.ones(4, requires_grad=True)
LEARNED_BIAS = torch.ones(1024, requires_grad=True)
LISTS = ("_ROWS", "_RUNS", "_ORDER", "_BLOCKS", "_INDICES", "COUNTER")


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask of this file alone, without numbers: equal graphs quote the first one's lines, and a number that
    changes from test to test becomes an argument."""
    return q_idx + h >= kv_idx


def bias_of_keys(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LEARNED_BIAS[kv_idx]


def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * torch.exp(LEARNED[h])


@pytest.mark.parametrize(
    ("way", "score_mod", "mask_mod", "dim", "spills", "instructions", "form"),
    [
        ("forward", None, None, 64, (288, 560), 48, "runs"),
        ("forward", SLOPES, None, 64, (0, 700), 48, "runs"),
        ("forward", mods.softcap(12.5), near, 128, (64, 144), 48, "runs"),
        ("forward", SLOPES, near, 128, (64, 208), 48, "runs"),
        ("forward", None, near, 64, (0, 0), 48, "lists"),
        ("forward", None, near, 192, (64, 64), 64, "runs"),
        ("backward", None, None, 128, (128, 128), 64, "runs"),
        ("backward", None, near, 64, (128, 256), 64, "lists"),
        ("backward", mods.softcap(12.5), near, 128, (64, 384), 64, "runs"),
        ("backward", None, near, 192, (64, 64), 96, "runs"),
        ("backward", mods.softcap(12.5), None, 256, (64, 128), 128, "runs"),
        ("backward", mods.relative_position(), None, 128, (0, 64), 64, "runs"),
    ],
)
def test_compiles(
    way: Any, score_mod: Any, mask_mod: Any, dim: int, spills: Limits, instructions: int, form: Any
) -> None:
    """`spills` in bytes, at most: with Triton 3.6, and with the newest, which spills more."""
    report = compiled(way, score_mod, mask_mod, dim, form)
    assert report.fits
    assert report.warnings == report.losses == ()
    assert report.spills <= spills[NEWEST]
    assert report.matrix_instructions["HGMMA"] >= instructions


def test_compiles_with_keys_in_registers() -> None:
    report = compiled("backward", None, near, 192, value_dim=128)
    assert report.fits
    assert report.warnings == report.losses == ()
    assert report.spills <= (64, 96)[NEWEST]
    # the score's products, of two consumers, before and in the loop; no other reads an operand from registers
    assert len(re.findall(r"wgmma\.mma_async.+}, {", report.asm["ptx"])) == 2 * 2 * 192 // 16


def of_near_ones(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx + h >= kv_idx, score + 0.1 * (q_idx - kv_idx), score)


def test_what_a_score_judges_is_not_held_for_the_mask() -> None:
    """The mask is asked in partial tiles alone: the score's truth values would be held until then."""
    assert compiled("forward", of_near_ones, near, 128).spills <= 64
    modules = explain(of_near_ones, near).hopper
    assert "first_key = made_anew(first_key)" in modules["forward"]
    assert "first_query = made_anew(start_m)" in modules["backward"]
    plain = explain(bias_of_keys, near).hopper
    assert "made_anew(first_key)" not in plain["forward"]


@pytest.mark.parametrize("score_mod", [None, mods.relative_position()])
def test_a_step_that_meets_no_end_does_not_ask_its_elements(score_mod: Any) -> None:
    """A branch stands between weights and selects: compilers are not to make one of the two."""
    ptx = compiled("backward", score_mod, None, 128).asm["ptx"]
    first = ptx.index("selp.f32")
    assert " bra " in ptx[ptx.rindex("ex2.approx", 0, first) : first]


def relative_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LEARNED_BIAS[q_idx - kv_idx + 512]


@pytest.mark.parametrize(
    ("score_mod", "dim", "spills"), [(mods.alibi(LEARNED), 64, (128, 128)), (bias_of_keys, 128, (64, 128))]
)
def test_compiles_with_sums_for_captures(score_mod: Any, dim: int, spills: Limits) -> None:
    report = compiled("backward", score_mod, near, dim, rung=2)
    assert report.fits
    assert report.warnings == report.losses == ()
    assert report.spills <= spills[NEWEST]
    # from one lane to the next: all of a key's queries are in the lanes of four
    assert "shfl.sync.bfly" in report.asm["ptx"]


@pytest.mark.parametrize(("dim", "spills"), [(64, (512, 1920)), (128, (128, 1152)), (256, (256, 768))])
def test_compiles_with_sums_along_diagonals(dim: int, spills: Limits) -> None:
    report = compiled("backward", relative_table, near, dim)
    assert report.fits
    assert report.warnings == report.losses == ()
    assert report.spills <= spills[NEWEST]
    # 16 keys of a warp and their queries, turned in its lanes; sums to memory, from no other's
    assert report.asm["ptx"].count("shfl.sync.idx") >= 16 * 2
    assert "red.global" in report.asm["ptx"] or "atom.global" in report.asm["ptx"]


@pytest.mark.parametrize(
    ("score_mod", "waits"),
    [(mods.alibi(LEARNED), True), (bias_of_keys, True), (temperature, False), (relative_table, True)],
)
def test_sums_for_captures(score_mod: Any, waits: bool) -> None:
    """A term that is no number in a masked pair must not be made of what is 0 there."""
    lowered = lower(trace(score_mod, "score").graph, (1, 4, 1024, 1024), split=False)
    backward = spec(mask_block=(128, 128), shared_kv=True, backward=True)
    kernels = kernels_for(backward, lowered, None, wanted=(0,), fused=True)
    assert kernels.captures.column and not kernels.captures.row
    source = text(backward, kernels.score, CAUSAL, kernels.grad, kernels.captures)
    compile(source, "module", "exec")
    (term,) = kernels.captures.column.terms
    before, after = source.index("if step < partial_steps:"), source.index("dp = warpgroup_mma_wait")
    call = source.index(f"grad, grad_of_{term.name} = ")
    assert call > after if waits else call < before
    assert (f"grad_of_{term.name} = gl.where(keep" in source) != waits
    if term.along == "column":
        assert f"gl.store({term.into.upper()}_BY_COLUMN + line" in source
    else:
        assert f"add_diagonals(grad_of_{term.name}, start_m - own_n, " in source


def compiled(
    way: Any,
    score_mod: Any,
    mask_mod: Any,
    dim: int,
    form: Any = "runs",
    rung: int = 0,
    value_dim: int | None = None,
) -> offline.Report:
    """A shape of the ladder, compiled for sm_90."""
    traced = [trace(f, kind) if f else None for f, kind in ((score_mod, "score"), (mask_mod, "mask"))]  # type: ignore
    learned = tuple(n for n, x in enumerate(traced[0].tensors) if x.requires_grad) if traced[0] else ()
    lowered = [lower(t.graph, (1, 4, 1024, 1024), split=False) if t else None for t in traced]
    block = (128, 128) if mask_mod else None
    backward = way == "backward"
    asked = spec(dim=dim, mask_block=block, mask_form=form, backward=backward)
    asked = replace(asked, value_dim=value_dim or dim)
    portable = kernels_for(asked, *lowered, wanted=learned, fused=True)
    kernels = HopperKernels(portable)
    shape = kernels.ladder(way)[rung]
    rows = shape.block_m if isinstance(shape, BackwardShape) else 64
    tiles = {"Q": rows, "GRAD_OUT": rows, **dict.fromkeys(("OUT", "GRAD_K", "GRAD_V"), 64)}
    tiles |= dict.fromkeys(("K", "V"), shape.block_n)
    columns = {"Q": asked.head_tile, "K": asked.head_tile, "GRAD_K": asked.head_tile}
    signature = {
        name: descriptor_type((1, 1, count, columns.get(name, asked.value_tile)), BF16)
        for name, count in tiles.items()
    }
    signature["SUM_GRAD_Q"] = descriptor_type(sum_block(asked.head_tile, rows), SINGLE)
    signature |= dict.fromkeys(("LSE2", "DELTA"), descriptor_type((rows,), SINGLE))
    texts = (kernels.score, portable.captures.by_kernel(portable.grad)["dkdv"], portable.mask)
    signature |= {"LSE": "*fp32", "scale": "fp32"}
    signature |= {p.name: type_of(p) for mod in texts if mod for p in mod.parameters}
    constants: dict[str, object] = dict(shape.arguments())
    options: dict[str, Any] = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    kernel = getattr(kernels.module, f"{way}_kernel")
    if not backward:
        constants["MAX_SCORES"] = None
    for name in kernel.arg_names:
        if name not in constants:
            kind = (
                "*fp32"
                if name.endswith(("_BY_COLUMN", "_BY_DIAGONAL"))
                else "*i32"
                if name.endswith(LISTS)
                else "i32"
            )
            signature.setdefault(name, kind)
    chosen = {name: signature[name] for name in kernel.arg_names if name in signature}
    return offline.compile(kernel, chosen, constants, "sm_90", **options)


def type_of(parameter: Parameter) -> str:
    """All captured tensors of this file are float32."""
    return {"pointer": "*fp32", "number": "fp32"}.get(parameter.kind, "i32")
