"""What the compilers make of the tiles: matrix instructions, spills, shared memory. No chip is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attention_cases import CAUSAL
from tiers import long_but
from triton_release import NEWEST

from flexmod import explain
from flexmod.codegen import cache
from flexmod.codegen.ladder import ladder
from flexmod.codegen.render import render
from flexmod.codegen.spec import KernelName, KernelSpec, Tile
from flexmod.codegen.variant import variant
from flexmod.runtime import offline
from flexmod.tools import ahead

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
ABSENT = ("MAX_SCORES", "GRAD_LSE")
SIZES = ("HQ", "HKV", "M", "N", "kv_slots", "full_kv_slots", "q_slots", "full_q_slots", "tile_slots", "room")
STATISTICS = ("LSE", "LSE2", "LARGE", "ROW_MAX", "ROW_MAXIMA", "TOTAL", "REST", "DELTA")
LISTS = ("NUM_BLOCKS", "INDICES", "_ROWS", "_RUNS", "COUNTS", "TILES")


def compiled(
    spec: KernelSpec, kernel: KernelName, tile: Tile, target: str, text: str = ""
) -> offline.Report:
    """A causal kernel of dense tensors, as a launch would specialize it."""
    function = getattr(cache.load(text or render(spec, mask=CAUSAL), "offline"), f"{kernel}_kernel")
    signature, divisible = {}, []
    constants: dict[str, object] = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    for name in function.arg_names:
        if name in ABSENT or name in constants or (name.startswith("stride") and name.endswith("d")):
            constants.setdefault(name, None if name in ABSENT else 1)
            continue
        if name.endswith(("_FIXED", "_LARGEST")):
            signature[name] = "*i64" if name.endswith("_FIXED") else "*i32"
        elif name.endswith(LISTS):
            signature[name] = "*i32"
        elif name in (*STATISTICS, "table_of_score") or "_BY_" in name:
            signature[name] = "*fp32"
        elif name == "scale":
            signature[name] = "fp32"
        else:
            integer = name in SIZES or "stride" in name or "_size" in name
            signature[name] = "i32" if integer else TYPES[spec.q_dtype]
        if name not in SIZES and "_size" not in name and name != "scale":
            divisible.append(name)
    return offline.compile(
        function, signature, constants, target,
        num_warps=tile.warps, num_stages=tile.stages, divisible=dict.fromkeys(divisible, True),
    )  # fmt: skip


def spec_of(dtype: torch.dtype, dim: int, precision: str = "ieee") -> KernelSpec:
    return KernelSpec(dtype, dtype, dtype, dim, dim, (128, 128), precision=precision, backward=True)  # type: ignore[arg-type]


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("dim", [64, 128])
def test_first_rung_on_hopper(kernel: KernelName, dim: int) -> None:
    spec = spec_of(torch.bfloat16, dim)
    report = compiled(spec, kernel, ladder(spec, kernel, {})[0], "sm_90")
    assert report.fits, report
    assert report.matrix_instructions.get("HGMMA", 0) > 0, report
    assert report.spills <= (256, 560)[NEWEST], report


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("target", ["sm_86", "gfx942"])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_small_devices_find_a_rung(kernel: KernelName, target: str) -> None:
    spec = spec_of(torch.bfloat16, 256)
    report = compiled(spec, kernel, ladder(spec, kernel, {})[-1], target)
    assert report.fits, report


@pytest.mark.long
def test_float32_of_head_dim_512_has_a_rung_on_hopper() -> None:
    for precision in ("tf32", "ieee"):
        spec = spec_of(torch.float32, 512, precision)
        report = compiled(spec, "forward", ladder(spec, "forward", {})[-1], "sm_90")
        assert report.fits, report


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_exact_products_of_float32_are_made_of_products_in_bfloat16(kernel: KernelName) -> None:
    spec = spec_of(torch.float32, 64).on("nvidia")
    report = compiled(spec, kernel, ladder(spec, kernel, {})[-1], "sm_80")
    assert report.matrix_instructions.get("HMMA", 0) > 0, report
    assert ".bf16.bf16" in report.asm["ptx"] and ".tf32" not in report.asm["ptx"]


table = torch.zeros(4, 64, 64, requires_grad=True)
LEARNED: dict[KernelName, Any] = {
    "diagonal": lambda s, b, h, q_idx, kv_idx: s + table[h, 0, q_idx - kv_idx + 63],
    "scatter": lambda s, b, h, q_idx, kv_idx: s + table[h, q_idx, kv_idx],
}


@pytest.mark.long
@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("kernel", LEARNED)
def test_kernels_of_captured_tensors(kernel: KernelName, target: str) -> None:
    """Of the sum of elements it is the second deterministic pass, with 64-bit atomics, that is compiled."""
    text = explain(LEARNED[kernel], lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).source
    spec = spec_of(torch.bfloat16, 64)
    report = compiled(spec, kernel, ladder(spec, kernel, {})[-1], target, text)
    assert report.fits, report
    assert report.spills <= (512, 704)[NEWEST], report
    assert report.matrix_instructions, report


def test_a_condition_of_mask_and_score_is_judged_once() -> None:
    """In a partial tile; in a full one the score alone asks."""

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 100)

    def near_ones(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(window(b, h, q_idx, kv_idx), s + 0.5, s)

    spec, tile = spec_of(torch.bfloat16, 64), Tile(64, 64, 4, 2)
    texts = [explain(score_mod, window).source for score_mod in (None, near_ones)]
    ptx = [compiled(spec, "forward", tile, "sm_90", text).asm["ptx"] for text in texts]
    masked, both = (text.count("setp.lt.u32") for text in ptx)
    of_a_tile = tile.block_m * tile.block_n // (32 * tile.warps)
    assert of_a_tile <= masked < of_a_tile + 8
    assert 2 * of_a_tile <= both < 2 * of_a_tile + 8


@pytest.mark.parametrize("kernel", long_but({"dkdv"}, ["forward", "dq", "dkdv"]))
def test_a_load_that_waits_for_the_score(kernel: KernelName) -> None:
    """Triton's pipeliner fails on it for Hopper with more than one tile in flight."""
    text = explain(
        lambda s, b, h, q_idx, kv_idx: s * table[h, 0, s.clamp(0, 9).int()],
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    ).source
    spec = spec_of(torch.bfloat16, 64)
    tiles = ladder(spec, kernel, {}, waits_for_score=True)
    assert {tile.stages for tile in tiles} == {1}
    assert compiled(spec, kernel, tiles[-1], "sm_90", text).matrix_instructions


PAIRS, TRUTHS = torch.zeros(4, 64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bool)


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + PAIRS[h, q_idx, kv_idx]


def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return TRUTHS[q_idx, kv_idx]


@pytest.mark.parametrize(
    ("mods", "target", "width"),
    [
        ((biased, None), "sm_80", "v4.b32"),
        pytest.param((None, allowed), "sm_80", "v4.b32", marks=pytest.mark.long),
        ((None, allowed), "sm_90", "b16"),
    ],
)
def test_a_thread_loads_several_elements_of_a_row(mods: Any, target: str, width: str) -> None:
    """Where a captured tensor's rows have multiples of 16 elements. On Hopper all consumers do it."""
    job = next(job for job in ahead.jobs(variant(*mods, head_dim=64), target) if job.kernel == "forward")
    report = job.compile().report
    assert report is not None
    loads = set(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+)\b", report.asm["ptx"]))
    assert width in loads and "b8" not in loads
    assert (width == "b16") == ("b16" in loads)
