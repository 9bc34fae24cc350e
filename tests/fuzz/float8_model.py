"""How a GPU's matrix unit rounds float8 products, for the limits of tests."""

from __future__ import annotations

import torch
from torch import Tensor

# log2 of the largest weight in float8
ROOM = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def summed_in_14_bits(query: Tensor, key: Tensor) -> Tensor:
    """query [..., M, D] @ key [..., D, N] in float64, as the unit sums products of float8.

    It takes 32 at a time, and keeps 14 bits of each term, two of them before the point of the product with
    the largest exponent. Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, 3.3.2.
    """
    total = (query[..., :1] * key[..., :1, :]) * 0.0
    of_query, of_key = _exponents(query), _exponents(key)
    for start in range(0, query.shape[-1], 32):
        own = slice(start, start + 32)
        exponents = (of_query[..., own, None] + of_key[..., None, own, :]).amax(-2)
        unit = torch.exp2(torch.maximum(exponents, _exponents(total)) - 12)[..., None, :]
        products = query[..., own, None] * key[..., None, own, :]
        terms = torch.cat([products, total[..., None, :]], -2)
        total = ((terms / unit).trunc() * unit).sum(-2)
    return total


def _exponents(x: Tensor) -> Tensor:
    return x.abs().clamp(min=1e-30).log2().floor()


def rounded_weights(weights: Tensor, dtype: torch.dtype, peak: float = 1.0) -> Tensor:
    """Softmax weights, rounded to a dtype in which the largest of a row is `peak`, or that times 2^ROOM."""
    largest = weights.amax(-1, keepdim=True).clamp(min=1e-30) * (2.0 ** -ROOM.get(dtype, 0) / peak)
    return (weights / largest).to(torch.float32).to(dtype).to(weights.dtype) * largest
