"""Attention on float8 by the kernels of a GPU, against float64 of what the tensors stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from float8_cases import CASES, E5M2, Float8Case, check, eager, handle

from flexmod import masks, mods
from flexmod.runtime.dequantize import dequantized

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

WAYS: dict[str, Callable[..., Any]] = {
    "auto": eager,
    "portable": lambda *x, **options: eager(*x, kernel_options={"TEMPLATE": "portable"}, **options),
    "handle": handle,
}
LONG = (1, 4, 2, 500, 777)
_LARGER = {
    "plain": Float8Case(),
    "no scales": Float8Case(by=("", "", "")),
    "by tensor, causal": Float8Case(by=("tensor", "tensor", "tensor"), mask=masks.causal()),
    "by block, soft-cap": Float8Case(by=("block", "block", "block"), score=mods.softcap(5.0)),
    "window": Float8Case(mask=masks.sliding_window(100)),
    "ALiBi": Float8Case(score=mods.alibi(4), mask=masks.causal()),
    "steep": Float8Case(score=mods.alibi(torch.tensor([9.0, 30.0, 0.5, 100.0])), mask=masks.causal()),
    "holes": replace(CASES["mixed scales"], by=("head", "head", "head")),
    "the other format": Float8Case(format=E5M2, score=mods.softcap(20.0), mask=masks.causal()),
    "float16 out": Float8Case(out_dtype=torch.float16),
    "float32 out": Float8Case(out_dtype=torch.float32),
}
ALL = CASES | {
    f"{name}, D={dim}": replace(case, sizes=LONG, dims=(dim, dim))
    for dim in (64, 128, 256)
    for name, case in _LARGER.items()
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("way", WAYS)
def test_attention(way: str, name: str) -> None:
    case = ALL[name]
    if name.startswith("steep"):
        case = replace(case, score=mods.alibi(torch.tensor([9.0, 30.0, 0.5, 100.0], device="cuda")))
    check(case, WAYS[way], "cuda", _weights(case, way))


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_conversion_is_torchs(format: torch.dtype, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 300, 64), (1, 2, 1, 80), (3, 1, 128, 256), (1, 0, 5, 16)):
        x = torch.randn(*shape[:2], shape[2] + 1, shape[3] + 16, device="cuda").to(format)[:, :, 1:, :-16]
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if shape[0] == 2 else x
        scale = torch.rand(*shape[:2], -(-shape[2] // 128), device="cuda") + 0.5
        rows = scale.repeat_interleave(128, 2)[:, :, : shape[2], None]
        assert torch.equal(dequantized(x, None, dtype), x.to(dtype))
        assert torch.equal(dequantized(x, scale, dtype), (x.float() * rows).to(dtype))
    every = torch.arange(256, device="cuda").to(torch.uint8).view(format).reshape(1, 1, 16, 16)
    found = dequantized(every, None, dtype)
    torch.testing.assert_close(found, every.to(dtype), equal_nan=True, rtol=0, atol=0)


def _weights(case: Float8Case, way: str) -> torch.dtype | None:
    """The dtype of the weights: float8 in Hopper's kernels, float16 in portable ones, else the output's."""
    if "query" not in case.float8 or case.by[2] == "block":
        return None
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and min(case.dims) >= 64
    on_hopper &= case.out_dtype is not torch.float32
    return case.format if way != "portable" and on_hopper else torch.float16
