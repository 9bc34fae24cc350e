"""FLEXMOD_CHECK_BOUNDS=1 on a GPU: portable kernels, those made for Hopper, and the builder of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod.errors import CaptureBoundsError
from flexmod.runtime import config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 1000
TEMPLATES = ["portable", "auto"]


@pytest.fixture(autouse=True)
def checked(switch: Callable[[str, object], None]) -> None:
    switch(config.CHECK_BOUNDS, 1)


def numbers(count: int) -> Tensor:
    return torch.linspace(-1, 1, count, device=DEVICE)


def attend(score_mod: Any, template: str, mask_mod: Any = None) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, LENGTH, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    inputs = [x.requires_grad_() for x in inputs]
    mask = None
    if mask_mod is not None:
        mask = flexmod.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device=DEVICE)
    out = flexmod.flex_attention(*inputs, score_mod, mask, kernel_options={"TEMPLATE": template})
    return out, inputs


@pytest.mark.parametrize("template", TEMPLATES)
def test_outside(template: str) -> None:
    """By column, by row and by pair, above and below."""
    short = numbers(990)
    mods: list[tuple[Any, int]] = [
        (lambda s, b, h, q_idx, kv_idx: s + short[kv_idx], 999),
        (lambda s, b, h, q_idx, kv_idx: s * short[q_idx], 999),
        (lambda s, b, h, q_idx, kv_idx: s + short[q_idx - kv_idx], 999),
        (lambda s, b, h, q_idx, kv_idx: s + short[h + 988], 991),
        (lambda s, b, h, q_idx, kv_idx: s + short[-kv_idx], -999),
    ]
    for mod, index in mods:
        for _ in range(2):
            with pytest.raises(CaptureBoundsError, match=rf"is indexed with {index} in dimension 0"):
                attend(mod, template)


@pytest.mark.parametrize("template", TEMPLATES)
def test_inside(switch: Callable[[str, object], None], template: str) -> None:
    """Nothing is reported of padding, and results and gradients are those of kernels that do not check."""
    table, slopes, ids = numbers(LENGTH), numbers(4), torch.arange(LENGTH, device=DEVICE) // 77

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * table[-1 - kv_idx] + slopes[h] * table[q_idx]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    found = []
    for setting in ("1", "0"):
        switch(config.CHECK_BOUNDS, setting)
        out, inputs = attend(score_mod, template, mask_mod)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, plain in zip(*found, strict=True):
        # dQ of Hopper's backward is added up in any order
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("template", TEMPLATES)
def test_backward(switch: Callable[[str, object], None], template: str) -> None:
    """The forward ran unchecked; the backward's own kernels find it."""
    short = numbers(990)
    switch(config.CHECK_BOUNDS, 0)
    out, inputs = attend(lambda s, b, h, q_idx, kv_idx: s * short[kv_idx], template)
    switch(config.CHECK_BOUNDS, 1)
    with pytest.raises(CaptureBoundsError, match="is indexed with 999 in dimension 0"):
        out.sum().backward()


def test_masks() -> None:
    short = torch.zeros(990, device=DEVICE, dtype=torch.int32)
    mods: list[Any] = [
        lambda b, h, q_idx, kv_idx: short[q_idx] <= kv_idx,
        lambda b, h, q_idx, kv_idx: short[q_idx - kv_idx] == 0,
        lambda b, h, q_idx, kv_idx: short[(q_idx * 31 + kv_idx) % 1000] <= kv_idx,
    ]
    for mod in mods:
        with pytest.raises(CaptureBoundsError, match=r"mask_mod, is indexed with 999 in dimension 0"):
            flexmod.create_block_mask(mod, None, None, LENGTH, LENGTH, device=DEVICE)
