"""Compiling for chips that are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton

from flexmod.codegen import cache
from flexmod.errors import UnknownTarget
from flexmod.runtime import offline
from flexmod.runtime.interpreter import interpreted
from flexmod.runtime.private_triton import OutOfResources
from flexmod.runtime.target import named

TEXT = """import triton
import triton.language as tl


@triton.jit
def product(A, B, Out, scale, K, D: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in tl.range(0, K):
        a = tl.load(A + k * BLOCK * D + i[:, None] * D + d[None, :])
        b = tl.load(B + k * BLOCK * D + i[:, None] * D + d[None, :])
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(Out + i[:, None] * BLOCK + i[None, :], acc * scale)
"""
SIGNATURE = {"A": "*bf16", "B": "*bf16", "Out": "*fp32", "scale": "fp32", "K": "i32"}


def kernel() -> Any:
    return cache.load(TEXT, "product").product


@pytest.mark.parametrize(
    ("target", "instruction"),
    [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("gfx942", "v_mfma")],
)
def test_a_dot(target: str, instruction: str) -> None:
    report = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 64}, target)
    assert report.target == named(target)
    assert report.matrix_instructions[instruction] > 0
    assert set(report.matrix_instructions) == {instruction}
    assert 16 <= report.registers <= 512
    assert report.spills == 0
    assert 0 < report.shared <= report.target.shared_limit
    assert report.fits
    assert "amdgcn" in report.asm or instruction in report.sass
    assert str(report).startswith(f"{target}: shared {report.shared} of {report.target.shared_limit} bytes, ")


def test_without_a_disassembler_the_ptx_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_disassemble", lambda cubin: "")
    report = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 64}, "sm_90")
    assert set(report.matrix_instructions) == {"wgmma.mma_async"}


def test_what_does_not_fit() -> None:
    options = {"num_warps": 8, "num_stages": 4}
    report = offline.compile(kernel(), SIGNATURE, {"D": 256, "BLOCK": 128}, "sm_86", **options)
    assert report.shared > named("sm_86").shared_limit
    assert not report.fits


def test_what_does_not_fit_the_tensor_memory() -> None:
    """Triton makes a trap of such a kernel, and its loader refuses it."""
    report = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 128}, "sm_100", num_warps=8)
    assert 0 < report.tensor_columns <= named("sm_100").tensor_columns and "trap;" not in report.asm["ptx"]
    larger = replace(report, tensor_columns=768)
    assert report.too_large is None and not larger.fits
    found = larger.too_large
    assert isinstance(found, OutOfResources)
    assert (found.required, found.limit, found.name) == (768, 512, "tensor memory")
    older = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 64}, "sm_90")
    assert older.tensor_columns == 0


def test_spills_are_counted() -> None:
    report = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 128}, "sm_80", num_warps=1)
    assert report.registers == 255
    assert report.spills > 0
    assert report.local > 0


def test_alignment_is_the_callers_word() -> None:
    aligned = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 64}, "sm_90")
    not_aligned = offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 64}, "sm_90", divisible={})
    assert "cp.async" in aligned.asm["ptx"]
    assert "cp.async.cg" not in not_aligned.asm["ptx"]


def test_unknown_target() -> None:
    with pytest.raises(UnknownTarget, match="'sm_9000' is not a chip"):
        offline.compile(kernel(), SIGNATURE, {"D": 64, "BLOCK": 64}, "sm_9000")


def test_a_kernel_that_does_not_compile() -> None:
    with pytest.raises(triton.CompilationError):
        offline.compile(kernel(), SIGNATURE, {"D": 63, "BLOCK": 64}, "sm_90")


def test_in_a_process_that_interprets() -> None:
    interpreted(cache.load(TEXT, "product"))
    report = offline.compile(kernel(), SIGNATURE, {"D": 32, "BLOCK": 64}, "sm_90")
    assert report.matrix_instructions["HGMMA"] > 0


def test_assembler_warnings_are_kept() -> None:
    warning = "ptxas info : (C7510) Potential ..."
    report = offline.Report(named("sm_90"), 0, 255, 8, 16, (warning,), asm={"ptx": "mma.sync " * 4})
    assert str(report).splitlines()[1:] == [f"  {warning}"]
    assert "255 registers, 8 bytes of spills, mma.sync=4" in str(report)
