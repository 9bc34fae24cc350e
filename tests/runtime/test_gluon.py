"""`runtime/gluon.py`: the PTX of the running maximum compares floats as integers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexmod.runtime.gluon import _larger_of_two_rows, running_max

INFINITY, NAN = float("inf"), float("nan")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def run_ptx(text: str, given: Sequence[int]) -> list[int]:
    """Runs inline PTX of the kind that running_max has; returns the operands, integers without a sign."""
    values: dict[str, Any] = {f"${place}": number for place, number in enumerate(given)}

    def signed(name: str) -> int:
        number = 0 if name == "0" else values[name]
        return number - 2**32 if number >= 2**31 else number

    skipped = False
    for line in re.findall(r"[^;:{}]+", text):
        if not line.strip():
            continue
        guard, words = re.match(r"(?:@(!?\w+) )?(.*)", line.strip()).groups()  # type: ignore[union-attr]
        operation, *names = words.replace(",", "").split()
        if operation == "KNOWN":
            skipped = False
        if skipped or operation in (".reg", "KNOWN"):
            continue
        if guard and values[guard.strip("!")] == guard.startswith("!"):
            continue
        match operation:
            case "bra":
                skipped = True
            case "mov.b32":
                values[names[0]] = values[names[1]]
            case "max.s32":
                values[names[0]] = values[max(names[1:], key=signed)]
            case "min.u32":
                values[names[0]] = min(values[name] for name in names[1:])
            case "setp.lt.s32":
                values[names[0]] = signed(names[1]) < signed(names[2])
            case "setp.lt.and.s32":
                values[names[0]] = signed(names[1]) < signed(names[2]) and values[names[3]]
            case "or.pred":
                values[names[0]] = values[names[1]] or values[names[2]]
            case _:
                raise AssertionError(line)
    return [values[f"${place}"] for place in range(len(given))]


def bits(x: Tensor) -> list[int]:
    return [number % 2**32 for number in x.view(torch.int32).tolist()]


def rows(columns: int, seed: int) -> Tensor:
    """Rows of all signs, of one sign, of zeros, of infinities, and with a NaN that has a sign."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(8, columns, generator=generator)
    masked = normal.masked_fill(torch.rand(8, columns, generator=generator) < 0.9, -INFINITY)
    nothing = torch.full((1, columns), -INFINITY)
    zeros = torch.tensor([-0.0, -1.0]).repeat(columns // 2)[None]
    ignored = (-normal[:1].abs()).index_fill(1, torch.tensor([1]), -NAN)
    return torch.cat([normal, -normal.abs(), masked, -masked.abs(), nothing, zeros, ignored, normal[:1] * 0])


def without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(-INFINITY, INFINITY, -INFINITY)


@pytest.mark.parametrize("columns", [64, 128])
def test_integers_find_the_largest_float(columns: int) -> None:
    text = _larger_of_two_rows(columns)
    tile = rows(columns // 4, seed=columns)
    for before in (-3.2e38, -1.5, -0.0, 0.0, 0.25):
        for first, second in zip(tile, tile.roll(1, 0), strict=True):
            numbers = torch.stack([first, second], 1).flatten()
            found = run_ptx(text, [0, 0, *bits(numbers), *bits(torch.tensor([before, before]))])
            largest = torch.tensor([x - 2**32 if x >= 2**31 else x for x in found[:2]], dtype=torch.int32)
            expected = without_nan(torch.stack([first, second])).amax(1)
            start = torch.full((2,), before)
            # the chip's maximum ignores NaN
            assert torch.equal(torch.fmax(start, largest.view(torch.float32)), torch.fmax(start, expected))


@gluon.jit
def maximum_kernel(TILE, BEFORE, OUT, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    tile = gl.load(TILE + rows[:, None] * COLUMNS + columns[None, :])
    gl.store(OUT + rows, running_max(gl.load(BEFORE + rows), tile))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("columns", [64, 128])
def test_running_max_on_the_chip(columns: int) -> None:
    tile = torch.cat([rows(columns, seed) for seed in range(3)])[:64]
    before = torch.randn(64).masked_fill(torch.rand(64) < 0.3, -3.2e38)
    out = torch.full((64,), NAN, device="cuda")
    maximum_kernel[(1,)](tile.cuda(), before.cuda(), out, columns, num_warps=4)
    assert torch.equal(out.cpu(), without_nan(tile).amax(1).maximum(before))
