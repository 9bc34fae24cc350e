"""Numbers that a mod closes over and reads beside float64 tensors keep the digits of float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexmod
from flexmod import create_block_mask, flex_attention
from flexmod.block_mask import generated
from flexmod.block_mask.tiles import MaskLayout
from flexmod.ir.trace import trace

WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.7, 1 / 3, 1e-50, 1e300, 2.0], dtype=torch.float64).repeat(4)
SINGLE = WEIGHTS.float()
SIZES = (1, 1, 32, 32)
# the first is a constant of a kernel, the others are arguments; float32 does not hold most of them
NUMBERS = (5.0, 0.1, 0.2, 1 / 3, 1e-50, 1e300, 0.5)

MASKS: dict[str, Callable[[float], Any]] = {
    "threshold": lambda n: lambda b, h, q, k: WEIGHTS[k] >= n,
    "of rows and columns": lambda n: lambda b, h, q, k: WEIGHTS[q] * n >= WEIGHTS[k],
    "beside float32": lambda n: lambda b, h, q, k: (WEIGHTS[k] >= n) & (SINGLE[q] >= n),
    "cast": lambda n: lambda b, h, q, k: (q * n).double() <= WEIGHTS[k],
}
# where 0.1 is a constant of a kernel
CONSTANTS: dict[str, Any] = {
    "comparison": lambda b, h, q, k: WEIGHTS[k] >= 0.1,
    "remainder": lambda b, h, q, k: WEIGHTS[k] % 0.1 == 0.0,
}
INTERPRET = {"kernel_options": {"BACKEND": "INTERPRET"}}
CALLS = {"cpu": {}, "interpret": INTERPRET, "reference": {"kernel_options": {"BACKEND": "REFERENCE"}}}


def eager(mask_mod: Any) -> torch.Tensor:
    """bool [32, 32], by torch on tensors of numbers."""
    q, k = (torch.arange(32) for _ in range(2))
    rows = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    return rows(torch.tensor(0), torch.tensor(0), q, k)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_a_mask_of_a_number_that_changes(make: Callable[[float], Any], options: dict[str, Any]) -> None:
    zeros = torch.zeros(1, 1, 32, 16)
    for number in NUMBERS:
        block_mask = create_block_mask(make(number), *SIZES, device="cpu", BLOCK_SIZE=16)
        lse = flex_attention(zeros, zeros, zeros, block_mask=block_mask, return_lse=True, **options)[1]
        assert torch.equal(lse[0, 0].exp().round().long(), eager(make(number)).sum(-1)), number


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mask_mod", CONSTANTS.values(), ids=CONSTANTS)
def test_a_mask_of_a_constant(mask_mod: Any, options: dict[str, Any]) -> None:
    zeros = torch.zeros(1, 1, 32, 16)
    block_mask = create_block_mask(mask_mod, *SIZES, device="cpu", BLOCK_SIZE=16)
    lse = flex_attention(zeros, zeros, zeros, block_mask=block_mask, return_lse=True, **options)[1]
    assert torch.equal(lse[0, 0].exp().round().long(), eager(mask_mod).sum(-1))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's own
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_the_tiles_of_a_number_that_changes(make: Callable[[float], Any]) -> None:
    for number in NUMBERS:
        layout = MaskLayout((1, 1, 16, 16), (1, 1), torch.device("cpu"), True)
        runs = generated.build(trace(make(number), "mask"), layout, interpreted=True)["kv"]
        assert runs is not None
        assert torch.equal(runs.table(16)[0, 0] > 0, eager(make(number))[:16, :16]), number


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "handle"])
def test_a_score_of_a_number_that_changes(compiled: bool, options: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 1, 1, 32, 16, generator=torch.Generator().manual_seed(0))
    for number in NUMBERS:

        def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, number: float = number) -> Any:
            return score + torch.where(WEIGHTS[kv_idx] >= number, 3.0, -3.0)

        attend = flexmod.compile(biased, **options) if compiled else flex_attention
        given = {} if compiled else {"score_mod": biased, **options}
        bias = torch.where(number <= WEIGHTS, 3.0, -3.0)
        expected = torch.softmax(q @ k.mT / 4 + bias, -1) @ v
        torch.testing.assert_close(attend(q, k, v, **given), expected, rtol=1e-4, atol=1e-5)
