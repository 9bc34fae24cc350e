"""Arithmetic that torch defines, on a card; see tests/test_arithmetic.py."""

from __future__ import annotations

import pytest
import torch
from arithmetic_mods import MODS, as_mask, eager, on_device

import flexmod
from flexmod import create_block_mask, flex_attention

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

SIZES = (1, 4, 256, 384)
# the portable kernels and, where the chip has them, those made for it
DTYPES = (torch.float32, torch.bfloat16)
# what a chip rounds on the way to a jump of the score itself
OF_SCORES = ("turns_of_the_score", "denormal_divisor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in MODS if name not in OF_SCORES])
def test_a_score_is_what_torch_makes_of_it(name: str, dtype: torch.dtype) -> None:
    """Eagerly, a second and a third time as recorded, and by a handle."""
    random = torch.Generator("cuda").manual_seed(5)
    heads, queries, keys = SIZES[1:]
    q, k, v = (
        torch.randn(1, heads, n, 64, generator=random, device="cuda", dtype=dtype)
        for n in (queries, keys, keys)
    )
    scores = eager(MODS[name], SIZES, (q.float() @ k.float().mT / 8).cpu()).cuda()
    expected = (torch.softmax(scores.double(), -1) @ v.double()).to(dtype)
    mod = on_device(MODS[name], "cuda")
    handle = flexmod.compile(mod)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for attend in (flex_attention, flex_attention, flex_attention):
        torch.testing.assert_close(attend(q, k, v, mod), expected, **tolerance)
    for _ in range(3):
        torch.testing.assert_close(handle(q, k, v), expected, **tolerance)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("name", [name for name in MODS if name not in OF_SCORES])
def test_a_mask_is_what_torch_makes_of_it(name: str, dtype: torch.dtype) -> None:
    """Tile by tile: full, partial and empty ones. By element: where all scores are 0, the lse of a row is the
    logarithm of how many keys it sees. And the attention of it.
    """
    expected = eager(as_mask(MODS[name]), SIZES).cuda()
    mask_mod = as_mask(on_device(MODS[name], "cuda"))
    block_mask = create_block_mask(mask_mod, *SIZES, device="cuda", BLOCK_SIZE=64)
    kept = expected.unflatten(3, (-1, 64)).unflatten(2, (-1, 64)).float().mean((3, 5))
    assert torch.equal(block_mask.to_dense().bool(), kept > 0)
    random = torch.Generator("cuda").manual_seed(6)
    q, k, v = (
        torch.randn(1, 4, n, 64, generator=random, device="cuda", dtype=dtype) for n in (256, 384, 384)
    )
    counted = flex_attention(q * 0, k, v, block_mask=block_mask, return_lse=True)[1]
    torch.testing.assert_close(counted.exp().round().long(), expected.sum(-1))
    scores = torch.where(expected, (q.double() @ k.double().mT) / 8, -torch.inf)
    dead = ~expected.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    found = flex_attention(q, k, v, block_mask=block_mask)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-3}
    torch.testing.assert_close(found.double(), weights @ v.double(), **tolerance)


def test_a_condition_around_a_division_stays() -> None:
    """A compiler may conclude from a division that its divisor is not 0, and drop `w > 0` for `w >= 0`."""
    w = torch.tensor([0, 3, 0, 7], dtype=torch.int32, device="cuda")

    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.where(w[kv_idx % 4] > 0, (q_idx // w[kv_idx % 4]) * 0.01, -1.0)

    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda") for _ in range(3))
    places = torch.arange(256, device="cuda", dtype=torch.int32)
    each = w[places % 4]
    added = torch.where(each > 0, places[:, None] // each.clamp(min=1) * 0.01, -1.0)
    scores = q.double() @ k.double().mT / 8 + added
    found = flex_attention(q, k, v, mod)
    torch.testing.assert_close(found.double(), torch.softmax(scores, -1) @ v.double(), rtol=1e-4, atol=1e-5)
