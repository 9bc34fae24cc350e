"""What the compilers make of the tiles: matrix instructions, spills, shared memory. No chip is needed."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CAUSAL

from flexmod.codegen import cache
from flexmod.codegen.render import render
from flexmod.codegen.spec import KernelName, KernelSpec, Tile, ladder
from flexmod.runtime import offline

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
ABSENT = ("MAX_SCORES", "GRAD_LSE")
SIZES = ("HQ", "HKV", "M", "N", "kv_slots", "full_kv_slots", "q_slots", "full_q_slots")


def compiled(spec: KernelSpec, kernel: KernelName, tile: Tile, target: str) -> offline.Report:
    """A causal kernel of dense tensors, as a launch would specialize it."""
    function = getattr(cache.load(render(spec, mask=CAUSAL), "offline"), f"{kernel}_kernel")
    signature, divisible = {}, []
    constants: dict[str, object] = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    for name in function.arg_names:
        if name in ABSENT or name in constants or (name.startswith("stride") and name.endswith("d")):
            constants.setdefault(name, None if name in ABSENT else 1)
            continue
        if name.endswith(("NUM_BLOCKS", "INDICES", "_ROWS", "_RUNS")):
            signature[name] = "*i32"
        elif name in ("LSE", "LSE2", "DELTA"):
            signature[name] = "*fp32"
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if name in SIZES or name.startswith("stride") else TYPES[spec.q_dtype]
        if name not in SIZES and name != "scale":
            divisible.append(name)
    return offline.compile(
        function, signature, constants, target,
        num_warps=tile.warps, num_stages=tile.stages, divisible=divisible,
    )  # fmt: skip


def spec_of(dtype: torch.dtype, dim: int, precision: str = "ieee") -> KernelSpec:
    return KernelSpec(dtype, dtype, dtype, dim, dim, (128, 128), precision=precision, backward=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("dim", [64, 128])
def test_first_rung_on_hopper(kernel: KernelName, dim: int) -> None:
    spec = spec_of(torch.bfloat16, dim)
    report = compiled(spec, kernel, ladder(spec, kernel, {})[0], "sm_90")
    assert report.fits, report
    assert report.matrix_instructions.get("HGMMA", 0) > 0, report
    assert report.spills <= 256, report


@pytest.mark.parametrize("target", ["sm_86", "gfx942"])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_small_devices_find_a_rung(kernel: KernelName, target: str) -> None:
    spec = spec_of(torch.bfloat16, 256)
    report = compiled(spec, kernel, ladder(spec, kernel, {})[-1], target)
    assert report.fits, report


def test_float32_of_head_dim_512_has_a_rung_on_hopper() -> None:
    for precision in ("tf32", "ieee"):
        spec = spec_of(torch.float32, 512, precision)
        report = compiled(spec, "forward", ladder(spec, "forward", {})[-1], "sm_90")
        assert report.fits, report
