"""One mask_mod with many captured numbers in turn: each mask is what `create_mask` makes with that number.

The kernels, their bounds and their launches are made for one number and serve the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import host_path
from block_mask.test_refine import MODS
from flexmod import create_block_mask, create_mask, errors
from flexmod.block_mask import generated
from flexmod.block_mask.parts import trace_mask
from flexmod.block_mask.tiles import MaskLayout
from flexmod.codegen import compiler
from flexmod.runtime import direct

CPU = torch.device("cpu")
SIZES = (1, 2, 50, 70)
BLOCK = (16, 16)
LAYOUT = MaskLayout(SIZES, BLOCK, CPU, True)
Number = bool | int | float

# By test id, in the order in which the masks have them.
INTEGERS: dict[str, tuple[Number, ...]] = {
    "to the ends of int32 and int64": (40, 0, -3, 2**31 - 1, 2**31, 2**63 - 1),
    "from beyond int32": (2**31 + 1, 5, -(2**63), 2**40, -(2**31) - 1, 2**30 + 1),
}
EXPONENTS: dict[str, tuple[Number, ...]] = {
    "small first": (2, 0, 5, 31, 64, 2**40), "large later": (3, 1, 63, 2**31, -1)
}  # fmt: skip
FLOATS: dict[str, tuple[Number, ...]] = {
    "zeros and infinities": (40.25, -0.0, -math.inf, 1e-45, 2.0**40, -3.5),
    "large first": (16777217.0, 1e300, 2.0**31, math.nan, math.inf, 0.0, 3.5),
}

WHOLE = {
    "window": "(q >= k) & (q - k <= n)",
    "ahead": "q + n >= k",
    "times": "q * n >= k",
    "times, both": "q * n >= k * n",
    "less twice": "q - n - n > k - 60",
    "as int32": "(q + n).to(torch.int32) >= k",
    "product as int32": "(q * n).to(torch.int32) >= k * 3",
    "difference as int32": "(q * n).to(torch.int32) - (k * n).to(torch.int32) <= 5",
    "int32 of int64": "(q.to(torch.int64) + n).to(torch.int32) >= k",
    "in int64": "q.to(torch.int64) * n + 7 >= k",
    "as int16": "(q * n).to(torch.int16) >= k",
    "as uint8": "(q + n).to(torch.uint8) >= k",
    "as bool": "((q - n).to(torch.bool)) & (q >= k)",
    "bits": "((q & n) == (k & n)) | ((q ^ n) > k + 50)",
    "absolute": "(q - k + n).abs() <= 2 * (q + n)",
    "smaller": "torch.minimum(q, 0 * q + n) >= k - 5",
    "clamped": "torch.clamp(q, max=40) + n >= k",
    "maximum as int32": "torch.maximum(q, (k + n).to(torch.int32)) > 40",
    "float of it": "q * 1.5 + n >= k",
    "where": "torch.where(q > 30, q + n, k) >= k",
    "selected": "torch.where(h == 0, q - n, q) >= k",
    "head": "q - k <= n * (h + 1)",
    "table": "TABLE[torch.clamp(q + n, 0, 9)] >= k",
}
DIVIDED = {
    "floor": "q // n == k // n",
    "remainder": "(q - k) % n == 0",
    "both": "(q // n) * n + k % n >= k",
    "as int32": "((q + n) // n).to(torch.int32) >= k % n",
}
POWERS = {
    "power": "q ** n >= k",
    "of a cast": "q.to(torch.int64) ** n >= k * k",
    "of a float": "(q * 1.0) ** n >= k",
}
FLOATING = {
    "steep": "q * n >= k",
    "quotient": "q / n >= k",
    "window": "(q - k) <= n",
    "in float64": "q.to(torch.float64) * n >= k",
    "as int32": "(q * n).to(torch.int32) >= k",
    "as int64": "(q * n).to(torch.int64) >= k",
    "floor": "(q * 1.0) // n >= k",
    "larger": "torch.maximum(q * 1.0, n - k) >= 30",
    "power": "(q * 1.0) ** n >= k",
    "read twice": "(DOUBLES[k] >= n) & (q * 1.0 >= n)",
    "both": "(q >= k * n) & ((q - k) * 1.0 < n + 3)",
}
TABLE = torch.arange(10) * 9
DOUBLES = torch.arange(100).double() / 7


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No number is known yet; squares are small, so that there are several."""
    monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())
    monkeypatch.setattr(generated, "SIDE", 4)
    generated._builder_part.cache_clear()
    yield
    generated._builder_part.cache_clear()


def maker(text: str) -> Callable[[Number], Any]:
    scope = {"torch": torch, "TABLE": TABLE, "DOUBLES": DOUBLES}
    made: Callable[[Number], Any] = eval(f"lambda n: lambda b, h, q, k: {text}", scope)
    return made


def kinds_of(kept: Tensor) -> Tensor:
    """What each tile of a mask [B, H, M, N] is; one that reaches over an end is not full."""
    rest = (0, -kept.shape[3] % BLOCK[1], 0, -kept.shape[2] % BLOCK[0])
    counts = torch.nn.functional.pad(kept.int(), rest)
    counts = counts.unflatten(2, (-1, BLOCK[0])).unflatten(4, (-1, BLOCK[1])).sum((3, 5))
    return (counts > 0).to(torch.int8) + (counts == BLOCK[0] * BLOCK[1]).to(torch.int8)


def check(make: Callable[[Number], Any], numbers: Sequence[Number]) -> None:
    """Of those numbers that torch takes."""
    taken = 0
    for number in numbers:
        try:
            wanted = create_mask(make(number), *SIZES, device=CPU)
        except (errors.FlexmodError, RuntimeError):
            continue
        taken += 1
        mask = create_block_mask(make(number), *SIZES, device=CPU, BLOCK_SIZE=BLOCK)
        runs = generated.build(trace_mask(make(number), CPU), LAYOUT, interpreted=True)
        kinds = kinds_of(wanted)
        assert torch.equal(mask.table().expand(kinds.shape), kinds), (number, "in torch")
        for axis, expected in (("kv", kinds), ("q", kinds.mT)):
            found = runs[axis]
            assert found is not None
            table = found.table(expected.shape[-1])
            assert torch.equal(table.expand(expected.shape), expected), (number, axis)
    assert taken > 2


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("numbers", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_whole_numbers(text: str, numbers: Sequence[Number]) -> None:
    check(maker(text), numbers)


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("numbers", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize("text", DIVIDED.values(), ids=DIVIDED)
def test_divisors(text: str, numbers: Sequence[Number]) -> None:
    check(maker(text), [n for n in numbers if n])


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("numbers", EXPONENTS.values(), ids=EXPONENTS)
@pytest.mark.parametrize("text", POWERS.values(), ids=POWERS)
def test_powers(text: str, numbers: Sequence[Number]) -> None:
    check(maker(text), numbers)


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("numbers", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("text", FLOATING.values(), ids=FLOATING)
def test_floats(text: str, numbers: Sequence[Number]) -> None:
    check(maker(text), numbers)


@pytest.mark.parametrize("text", [WHOLE["window"], WHOLE["as int32"], FLOATING["both"]])
def test_numbers_of_several_types(text: str) -> None:
    check(maker(text), (40, 40.0, 3, True, 3.5, 2**31, False, 1, 2**40, 1.0))


def test_launches_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later numbers of a kind go into launches that are there."""
    started, launched = [], []
    with host_path.on_an_h200(), monkeypatch.context() as inside:
        start = direct.start
        inside.setattr(host_path._Launch, "__call__", lambda self, *arguments: launched.append(arguments))
        inside.setattr(direct, "start", lambda *given: started.append(given) or start(*given))
        for number, by_triton in ((4000, 3), (4001, 3), (4002, 0), (77777, 0), (2**31, 3), (1, 0)):
            started.clear()
            launched.clear()
            create_block_mask(maker(WHOLE["window"])(number), None, None, 50, 70, device="cpu")
            assert len(started) == by_triton, number
            assert by_triton or sum(number in arguments for arguments in launched) >= 2


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(MODS, MODS, st.lists(st.sampled_from(sum(INTEGERS.values(), ())), min_size=3, max_size=4))
def test_random_masks(first: str, second: str, numbers: Sequence[int]) -> None:
    scope = {"torch": torch, "ids": torch.arange(100).flip(0) // 13}
    text = f"(({first}) & (q_idx - n <= kv_idx)) | (({second}) & ((q_idx + n).to(torch.int32) < kv_idx))"
    check(eval(f"lambda n: lambda b, h, q_idx, kv_idx: {text}", scope), numbers)
