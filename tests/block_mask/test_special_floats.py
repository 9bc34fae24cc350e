"""Tiles of masks over infinities, nan, zeros of both signs and denormals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from block_mask.test_generated import check
from block_mask.test_refine import by_hand, traced
from flexmod.block_mask import refine

CPU = torch.device("cpu")
SIZE = 96
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3.4e38, -3.4e38, 1.0, -1.0, 5.0)
# padding and documents are constant over whole tiles
PADDED = torch.tensor([0.0] * 40 + [math.inf] * 56)
TABLES = {
    "padded": PADDED,
    "padded below": -PADDED,
    "edges": torch.tensor(EDGES).repeat_interleave(8),
    "edges of a half type": torch.tensor(EDGES).half().repeat_interleave(8),
}
GENERATOR = torch.Generator().manual_seed(0)
PAIRS = torch.rand(SIZE, SIZE, generator=GENERATOR) * 10
PAIRS[torch.rand(SIZE, SIZE, generator=GENERATOR) < 0.3] = math.inf
NUMBERS = (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-45, 3e38)
BLOCKS = ((16, 8), (8, 40))

Mask = Callable[[Any, Any, Any, Any, Any, Any], Any]
MASKS: dict[str, Mask] = {
    "a product": lambda t, a, b, h, q, k: (t[q] - t[k]) * a <= 1,
    "the other way round": lambda t, a, b, h, q, k: a * (t[q] - t[k]) >= -1,
    "a product of rows": lambda t, a, b, h, q, k: t[q] * a > t[k],
    "a square": lambda t, a, b, h, q, k: (t[q] - t[k]) * (t[q] - t[k]) >= a * 0,
    "a product of both": lambda t, a, b, h, q, k: abs(t[q] * t[k]) >= a,
    "a product with a position": lambda t, a, b, h, q, k: (t[q] - t[k]) * (q - k) * a <= 3,
    "a difference of products": lambda t, a, b, h, q, k: t[q] * a - t[k] * a <= 1,
    "a quotient": lambda t, a, b, h, q, k: t[q] / a - t[k] < 1,
    "a quotient of both": lambda t, a, b, h, q, k: t[q] / t[k] * a < 2,
    "a minimum": lambda t, a, b, h, q, k: torch.minimum(t[q] - t[k], t[q] * a) <= 1,
    "a maximum": lambda t, a, b, h, q, k: torch.maximum((t[q] - t[k]) * a, k * 1.0) >= 0,
    "a negation": lambda t, a, b, h, q, k: torch.logical_not(t[q] + t[k] < a),
    "not equal": lambda t, a, b, h, q, k: (t[q] - t[k]) * a != 0,
    "equal": lambda t, a, b, h, q, k: (t[q] - t[k]) * a == 0,
    "a root": lambda t, a, b, h, q, k: torch.sqrt(t[q] * t[k]) >= a,
    "a rounding": lambda t, a, b, h, q, k: torch.floor((t[q] - t[k]) * a) <= 1,
    "a sign": lambda t, a, b, h, q, k: torch.sign((t[q] - t[k]) * a) <= 0,
    "a choice": lambda t, a, b, h, q, k: torch.where(t[q] > t[k], (t[q] - t[k]) * a, t[k] * a) <= 1,
    "a choice of infinities": lambda t, a, b, h, q, k: torch.where(t[q] > t[k], math.inf, -math.inf) >= a,
    "a maximum of a pair": lambda t, a, b, h, q, k: torch.maximum(PAIRS[q, k], t[q]) < 1e30,
    "a minimum of a pair": lambda t, a, b, h, q, k: torch.minimum(-PAIRS[q, k], t[k]) > -1e30,
    "the size of a pair": lambda t, a, b, h, q, k: torch.maximum(PAIRS[q, k], t[q]).abs() < t[k] + a,
    "a cast to bool": lambda t, a, b, h, q, k: ((t[q] - t[k]) * a).bool() & (q >= k),
    "a cast to a half type": lambda t, a, b, h, q, k: ((t[q] - t[k]).half() * a).half() <= 1,
}


def mask_of(name: str, table: str, number: float) -> Any:
    mask, t = MASKS[name], TABLES[table]
    return lambda b, h, q_idx, kv_idx: mask(t, number, b, h, q_idx, kv_idx)


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_on_the_cpu(name: str, table: str, first: int) -> None:
    """Each number with one of the two blocks, in turn."""
    for place, number in enumerate(NUMBERS, first + list(TABLES).index(table)):
        mask_mod, sizes, block = mask_of(name, table, number), (1, 1, SIZE, SIZE), BLOCKS[place % 2]
        found = refine.classify(traced(mask_mod, sizes), sizes, block, CPU)
        assert torch.equal(found, by_hand(mask_mod, sizes, block)), (number, block)


@pytest.mark.covering(1, long=1)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's own
@pytest.mark.parametrize("number", [0.0, math.nan], ids=repr)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_generated_kernels(name: str, number: float) -> None:
    """The same as on the CPU, in the interpreter."""
    check(mask_of(name, "edges", number), (1, 1, SIZE, SIZE), (16, 8))
    check(mask_of(name, "padded", number), (1, 1, SIZE, SIZE), (16, 16))
