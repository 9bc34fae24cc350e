"""The kernels for Hopper as the compiler makes them of mods: where terms stand in them, and how they compile.

For sm_90, without a GPU: registers, spills, and which instructions there are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from attention_cases import CAUSAL
from triton_release import NEWEST, Limits

from flexmod import explain, mods
from flexmod.codegen.compiler import kernels_for, lower
from flexmod.codegen.hopper import LIMITS, BackwardShape, HopperKernels, sum_block, text
from flexmod.codegen.kernels import Parameter
from flexmod.codegen.spec import KernelSpec
from flexmod.codegen.variant import variant
from flexmod.ir.trace import trace
from flexmod.runtime import offline
from flexmod.runtime.gluon import layout_of
from flexmod.runtime.private_triton import canonicalize_dtype
from flexmod.tools import ahead
from flexmod.tools.ahead import VariantCall

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SLOPES = mods.alibi(torch.ones(4))
RELATIVE = mods.relative_position()
LEARNED = torch.ones(4, requires_grad=True)
LEARNED_BIAS = torch.ones(1024, requires_grad=True)
PAIRS = torch.ones(4, 64, 64, dtype=BF16, requires_grad=True)
LISTS = ("_ROWS", "_RUNS", "_ORDER", "_BLOCKS", "_INDICES", "COUNTER")


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask of this file alone, without numbers: equal graphs quote the first one's lines, and a number that
    changes from test to test becomes an argument."""
    return q_idx + h >= kv_idx


def bias_of_keys(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LEARNED_BIAS[kv_idx]


def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * torch.exp(LEARNED[h])


def by_windows(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx // 49 - kv_idx // 49)


def test_what_a_first_query_is_a_multiple_of_is_told_where_it_helps() -> None:
    """Where positions are divided or masked; between plain differences it makes longer addresses."""
    told = "first_query = (start_m & (2**31 - BLOCK_M)) + CHUNK * OWN_M"
    assert told not in explain(mods.relative_position()).sources["hopper backward"]
    assert told in explain(mods.relative_position(), near).sources["hopper backward"]
    assert told in explain(by_windows).sources["hopper backward"]


def waves(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (1.5 + torch.sin(q_idx * 0.1))


def test_what_costs_much_by_row_is_made_by_one_thread() -> None:
    """Not by each thread for all queries that it sees: 32 sines took 40 s to compile. Nor in two loops."""
    module, plain = (explain(mod).sources["hopper backward"] for mod in (waves, mods.relative_position()))
    assert "gl.convert_layout(add_q_of_score, score_layout)" in module
    assert "WITH_ROW_MAX" not in module
    assert "WITH_ROW_MAX" in plain
    assert "own_q_idx" not in plain


@pytest.mark.parametrize(
    ("way", "score_mod", "mask_mod", "dim", "spills", "instructions", "form"),
    [
        pytest.param("forward", None, None, 64, (288, 560), 48, "runs", marks=pytest.mark.long),
        pytest.param("forward", SLOPES, None, 64, (0, 700), 48, "runs", marks=pytest.mark.long),
        pytest.param(
            "forward", mods.softcap(12.5), near, 128, (64, 144), 48, "runs", marks=pytest.mark.long
        ),
        ("forward", SLOPES, near, 128, (64, 208), 48, "runs"),
        ("forward", None, near, 64, (0, 0), 48, "lists"),
        ("forward", None, near, 192, (64, 64), 64, "runs"),
        pytest.param("backward", None, None, 128, (128, 128), 64, "runs", marks=pytest.mark.long),
        ("backward", None, near, 64, (128, 256), 64, "lists"),
        ("backward", mods.softcap(12.5), near, 128, (64, 384), 64, "runs"),
        pytest.param("backward", None, near, 192, (64, 64), 96, "runs", marks=pytest.mark.long),
        pytest.param(
            "backward", mods.softcap(12.5), None, 256, (64, 128), 128, "runs", marks=pytest.mark.long
        ),
        ("backward", RELATIVE, None, 128, (8, 64), 64, "runs"),
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


@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "dim", "dtype", "spills"),
    [
        (None, None, 128, E4M3, 0),
        (None, near, 128, E5M2, 32),
        pytest.param(mods.softcap(12.5), None, 64, E4M3, 64, marks=pytest.mark.long),
        pytest.param(SLOPES, near, 128, E4M3, 128, marks=pytest.mark.long),
        pytest.param(None, near, 64, E4M3, 160, marks=pytest.mark.long),
        pytest.param(None, near, 256, E5M2, 64, marks=pytest.mark.long),
    ],
)
def test_compiles_in_float8(score_mod: Any, mask_mod: Any, dim: int, dtype: torch.dtype, spills: int) -> None:
    """`spills` in bytes of local memory, at most."""
    half = variant(score_mod, mask_mod, head_dim=dim)
    made = replace(half, spec=replace(half.spec.of_dtype(dtype), value_scale=True))
    call, kernels = VariantCall(made), ahead.kernels_on(made, "forward", "sm_90")
    assert isinstance(kernels, HopperKernels)
    built = ahead.first_tile(call, kernels, "forward", "sm_90")
    report = built.report
    assert report is not None and report.fits and not built.problem
    assert report.warnings == report.losses == ()
    assert report.local <= spills
    assert set(report.matrix_instructions) == {"QGMMA"}
    # weights stay in their threads, as their conversion packs them
    assert "prmt" not in report.asm["ptx"] and report.asm["ptx"].count("cvt.rn.satfinite") >= 2 * 2 * 16
    values = ahead.compiled(call, kernels, "values", "sm_90")
    assert values.spills == 0
    copies = re.findall(r"\b(?:LDG|STG|LDS|STS|STSM)\.\S+", values.sass)
    assert set(copies) == {"LDG.E.128", "STG.E.128", "LDS.128", "STSM.16.M88.4"}


def pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + PAIRS[h, q_idx, kv_idx]


@pytest.mark.long
@pytest.mark.parametrize(("way", "dim", "spills"), [("forward", 128, 128), ("backward", 64, 64)])
def test_compiles_with_tiles_of_a_captured_tensor(way: Any, dim: int, spills: int) -> None:
    """No element of the tensor is loaded by itself."""
    made = variant(pairs, near, head_dim=dim)
    kernels = ahead.kernels_on(made, way, "sm_90")
    report = ahead.first_tile(VariantCall(made), kernels, way, "sm_90").report
    assert report is not None and report.fits
    assert report.warnings == report.losses == ()
    assert report.spills <= spills
    assert not re.findall(r"\bLDG\.E\.U16\b", report.sass)


@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=pytest.mark.long), E4M3])
def test_compiles_with_half_values_and_their_scale(dtype: torch.dtype) -> None:
    half = variant(None, near, head_dim=128)
    spec = replace(half.spec.of_dtype(dtype), v_dtype=BF16, value_scale=True, backward=False)
    made = replace(half, spec=spec)
    kernels = ahead.kernels_on(made, "forward", "sm_90")
    assert isinstance(kernels, HopperKernels)
    built = ahead.first_tile(VariantCall(made), kernels, "forward", "sm_90")
    assert built.report is not None and built.report.fits and not built.report.losses and not built.problem


def test_compiles_with_grad_q_a_step_late() -> None:
    report = compiled("backward", None, near, 192, value_dim=128)
    assert report.fits
    assert report.warnings == report.losses == ()
    # registers of a thread that spill: the kernel's limit for shapes that run
    assert report.local // 4 <= LIMITS.passing


def of_near_ones(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx + h >= kv_idx, score + 0.1 * (q_idx - kv_idx), score)


def test_what_a_score_judges_is_not_held_for_the_mask() -> None:
    """The mask is asked in partial tiles alone: the score's truth values would be held until then."""
    assert compiled("forward", of_near_ones, near, 128).spills <= 64
    modules = explain(of_near_ones, near).sources
    assert "gl.multiple_of(opaque(first_key)" in modules["hopper forward"]
    assert "first_query = (opaque(start_m) & (2**31 - BLOCK_M)) + CHUNK * OWN_M" in modules["hopper backward"]
    plain = explain(bias_of_keys, near).sources
    assert "opaque(first_key)" not in plain["hopper forward"]


@pytest.mark.parametrize("score_mod", [None, RELATIVE])
def test_a_step_that_meets_no_end_does_not_ask_its_elements(score_mod: Any) -> None:
    """A branch stands between weights and selects: compilers are not to make one of the two."""
    ptx = compiled("backward", score_mod, None, 128, "runs").asm["ptx"]
    first = ptx.index("selp.f32", ptx.index("ex2.approx"))
    assert " bra " in ptx[ptx.rindex("ex2.approx", 0, first) : first]


def relative_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LEARNED_BIAS[q_idx - kv_idx + 512]


@pytest.mark.parametrize(
    ("score_mod", "dim", "spills"), [(mods.alibi(LEARNED), 64, (128, 128)), (bias_of_keys, 128, (64, 128))]
)
def test_compiles_with_sums_for_captures(score_mod: Any, dim: int, spills: Limits) -> None:
    report = compiled("backward", score_mod, near, dim, rung=-1)
    assert report.fits
    assert report.warnings == report.losses == ()
    assert report.spills <= spills[NEWEST]
    # from one lane to the next: all of a key's queries are in the lanes of four
    assert "shfl.sync.bfly" in report.asm["ptx"]


@pytest.mark.parametrize(
    ("dim", "spills"),
    [
        pytest.param(64, (512, 1920), marks=pytest.mark.long),
        (128, (128, 1152)),
        pytest.param(256, (256, 768), marks=pytest.mark.long),
    ],
)
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
    block = (128, 128)
    backward = KernelSpec(BF16, BF16, BF16, 128, 128, mask_block=block, shared_kv=True, backward=True)
    kernels = kernels_for(backward, lowered, None, grad_captures=(0,), reduce_in_backward=True)
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


def descriptor_type(block: tuple[int, ...], dtype: torch.dtype) -> str:
    """Triton's type of a descriptor."""
    return f"tensordesc<{canonicalize_dtype(dtype)}{list(block)},{layout_of(block, dtype)!r}>"


@cache
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
    dims = dim, value_dim or dim
    asked = KernelSpec(BF16, BF16, BF16, *dims, mask_block=block, mask_form=form, backward=backward)
    portable = kernels_for(asked, *lowered, grad_captures=learned, reduce_in_backward=True)
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
    signature["SUM_GRAD_Q"] = descriptor_type(sum_block(asked.head_tile, rows), torch.float32)
    signature |= dict.fromkeys(("LSE2", "DELTA"), descriptor_type((rows,), torch.float32))
    texts = (kernels.score, portable.captures.by_kernel(portable.grad)["dkdv"], portable.mask)
    signature |= dict.fromkeys(("LSE", "ROW_MAX", "REST", "ROW_MAXIMA", "LARGE"), "*fp32") | {"scale": "fp32"}
    signature |= {p.name: type_of(p) for mod in texts if mod for p in mod.parameters}
    constants: dict[str, object] = dict(shape.arguments())
    options: dict[str, Any] = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    kernel = getattr(kernels.module, f"{way}_kernel")
    constants |= {"SUMMANDS": 1} if backward else {"MAX_SCORES": None}
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
