"""Score mods that depend on the distance between a query and a key."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmod.errors import ArgumentTypeError, LibraryArgumentError
from flexmod.errors.base import shown
from flexmod.ir.composed import ScoreMod
from flexmod.ir.graph import expect_size, look_up
from flexmod.ir.offsets import LARGEST
from flexmod.masks.checks import check_float, check_heads, check_number, checked_device, whole


def alibi(slopes: int | Tensor) -> ScoreMod:
    """Adds a penalty that grows with the distance: score + slope[h] * (kv_idx - q_idx).

    The argument `slopes` is the number of heads H, for slope[h] = 2 ** (-8 * (h + 1) / H), or your own
    floating-point tensor [H]; gradients reach it. The function `alibi_slopes` makes the paper's slopes for
    any H. A call with another number of heads raises CallSizeError. Use it with a causal mask, where all
    distances have one sign.

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries: lambda s, b, h, q, k: alibi_mod(s, b, h, q + N - M, k). The shift adds one number to a
    whole row: the output stays the same, the lse changes.

    Source: Press et al., Train Short, Test Long, 2021.

    Example:

        block_mask = create_block_mask(masks.causal(), None, None, 1024, 1024)
        out = flex_attention(query, key, value, score_mod=mods.alibi(8), block_mask=block_mask)
        slopes = mods.alibi_slopes(8, device=query.device).requires_grad_()
        out = flex_attention(query, key, value, score_mod=mods.alibi(slopes), block_mask=block_mask)

    `mods.alibi(8)`, 4 x 4, scores of 0:

           0.00   0.50   1.00   1.50
          -0.50   0.00   0.50   1.00
          -1.00  -0.50   0.00   0.50
          -1.50  -1.00  -0.50   0.00
    """
    if isinstance(slopes, Tensor):
        if slopes.dim() != 1 or not slopes.is_floating_point():
            _refuse_slopes(f"{slopes.dtype} {list(slopes.shape)}")
        table = slopes

        @ScoreMod
        def alibi_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + look_up(table, "mods.alibi", "slopes", h) * (kv_idx - q_idx)

        return alibi_table

    heads = whole(slopes)
    if heads is None or heads < 1:
        _refuse_slopes(repr(slopes))
    rate = -8.0 / heads

    @ScoreMod
    def alibi_formula(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        head = expect_size(h, heads, "mods.alibi", "slopes")
        return score + torch.exp2((head + 1) * rate) * (kv_idx - q_idx)

    return alibi_formula


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the slopes of the ALiBi paper for any number of heads, float32 [heads].

    For a power of two they are 2 ** (-8 * (h + 1) / heads). Any other number takes the slopes of the next
    lower power of two, and then every second slope of the next higher one.

    Source: Press et al., Train Short, Test Long, 2021; Scao et al., BLOOM, 2022.

    Example:

        slopes = mods.alibi_slopes(12)
        assert slopes[:8].tolist() == mods.alibi_slopes(8).tolist()
    """
    heads = check_heads("alibi_slopes", heads)
    below = 1 << (heads.bit_length() - 1)
    exponents = [-8 * (h + 1) / below for h in range(below)]
    exponents += [-4 * (2 * h + 1) / below for h in range(heads - below)]
    return torch.tensor([2.0**exponent for exponent in exponents], device=checked_device(device))


def relative_position() -> ScoreMod:
    """Adds the distance: score + (q_idx - kv_idx). A small example of a score mod that reads positions.

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries: lambda s, b, h, q, k: distance_mod(s, b, h, q + N - M, k).

    Source: He et al., FlexAttention, 2024 (its introductory example).

    Example:

        score_mod = mods.relative_position()
        out = flex_attention(query, key, value, score_mod=score_mod)

    `mods.relative_position()`, 4 x 4, scores of 0:

           0.00  -1.00  -2.00  -3.00
           1.00   0.00  -1.00  -2.00
           2.00   1.00   0.00  -1.00
           3.00   2.00   1.00   0.00
    """

    @ScoreMod
    def relative_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (q_idx - kv_idx)

    return relative_score


def causal_score() -> ScoreMod:
    """The causal mask as a score mod: score where q_idx >= kv_idx, else -inf.

    It skips the same tiles as `masks.causal()`. Both positions count from 0. With a key/value cache, where
    the queries are the last M of N positions, shift the queries:
    lambda s, b, h, q, k: causal_mod(s, b, h, q + N - M, k).

    Source: Vaswani et al., Attention Is All You Need, 2017 (the decoder).

    Example:

        score_mod = mods.causal_score()
        out = flex_attention(query, key, value, score_mod=score_mod)

    `mods.causal_score()`, 4 x 4, scores of 0:

           0.00   -inf   -inf   -inf
           0.00   0.00   -inf   -inf
           0.00   0.00   0.00   -inf
           0.00   0.00   0.00   0.00
    """

    @ScoreMod
    def causal_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    return causal_mod


def relative_bias(table: Tensor) -> ScoreMod:
    """Adds a bias for each distance: score + table[h, clamp(kv_idx - q_idx, -reach, reach) + reach].

    The parameter `table` is a floating-point tensor [H, 2 * reach + 1], or [2 * reach + 1] for all heads;
    gradients reach it. Distances beyond the reach take the first or the last entry.

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries: lambda s, b, h, q, k: bias_mod(s, b, h, q + N - M, k).

    Source: Shaw et al., Self-Attention with Relative Position Representations, 2018 (clipped distances); Liu
    et al., Swin Transformer, 2021 (a bias for each head).

    Example:

        table = torch.zeros(8, 2 * 128 + 1, device=query.device, requires_grad=True)
        out = flex_attention(query, key, value, score_mod=mods.relative_bias(table))
        out.sum().backward()

    `mods.relative_bias(torch.tensor([-20.0, -10.0, 0.0, 1.0, 2.0]))`, 4 x 4, scores of 0:

           0.00   1.00   2.00   2.00
         -10.00   0.00   1.00   2.00
         -20.00 -10.00   0.00   1.00
         -20.00 -20.00 -10.00   0.00
    """
    check_float("relative_bias", "table", table, ranks=(1, 2), shapes="[H, 2 * reach + 1] or [2 * reach + 1]")
    if table.shape[-1] % 2 == 0:
        raise LibraryArgumentError(
            function="relative_bias", name="table", value=f"of shape {list(table.shape)}",
            rule="of an odd last dimension, 2 * reach + 1", advice="make its middle the distance 0",
        )  # fmt: skip
    reach = table.shape[-1] // 2

    @ScoreMod
    def relative_bias_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = torch.clamp(kv_idx - q_idx, -reach, reach) + reach
        return score + look_up(table, "mods.relative_bias", "table", h, place)

    return relative_bias_score


def t5_bias(table: Tensor, bidirectional: bool = False, max_distance: int = 128) -> ScoreMod:
    """Adds a bias for each bucket of distances: score + table[bucket(q_idx - kv_idx), h].

    The parameter `table` is a floating-point tensor [buckets, H], the weight of T5's embedding; gradients
    reach it. Half of the buckets have one distance each. The others grow logarithmically up to
    `max_distance`, and the last one has all larger distances. With n buckets and d = max(q_idx - kv_idx, 0):

        d                                                                           where d < n / 2
        min(n - 1, n / 2 + floor(log(d / (n / 2)) / log(max_distance / (n / 2)) * n / 2))  elsewhere

    With `bidirectional`, as in an encoder, half of the buckets are for keys before the query and half for
    keys after it. T5 does not scale its scores: pass scale=1.0. Make the mod again after `table` moves to
    another device, as in module.to(device): its buckets stay.

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries: lambda s, b, h, q, k: t5_mod(s, b, h, q + N - M, k).

    Source: Raffel et al., T5, 2019.

    Example:

        table = torch.zeros(32, 8, device=query.device, requires_grad=True)
        score_mod = mods.t5_bias(table, bidirectional=True)
        out = flex_attention(query, key, value, score_mod=score_mod, scale=1.0)

    `mods.t5_bias(torch.arange(4.0)[:, None], max_distance=6)`, 8 x 8, scores of 0:

           0.00   0.00   0.00   0.00   0.00   0.00   0.00   0.00
           1.00   0.00   0.00   0.00   0.00   0.00   0.00   0.00
           2.00   1.00   0.00   0.00   0.00   0.00   0.00   0.00
           2.00   2.00   1.00   0.00   0.00   0.00   0.00   0.00
           3.00   2.00   2.00   1.00   0.00   0.00   0.00   0.00
           3.00   3.00   2.00   2.00   1.00   0.00   0.00   0.00
           3.00   3.00   3.00   2.00   2.00   1.00   0.00   0.00
           3.00   3.00   3.00   3.00   2.00   2.00   1.00   0.00
    """
    check_float("t5_bias", "table", table, ranks=(2,), shapes="[buckets, H]")
    max_distance = check_number("t5_bias", "max_distance", max_distance, least=1, most=LARGEST)
    ArgumentTypeError.check_flags(bidirectional=bidirectional)
    count = table.shape[0] // 2 if bidirectional else table.shape[0]
    if count < 2 or (bidirectional and table.shape[0] % 2) or max_distance <= count // 2:
        raise LibraryArgumentError(
            function="t5_bias", name="table",
            value=f"of shape {list(table.shape)}, with max_distance={max_distance}",
            rule="of 2 buckets or more for each direction, half of them fewer than max_distance",
            advice="write t5_bias(table) with 32 buckets, or give a larger max_distance",
        )  # fmt: skip
    before = _t5_buckets(count, max_distance)
    after = before + count if bidirectional else torch.zeros_like(before)
    # by kv_idx - q_idx + max_distance
    buckets = torch.cat((before.flip(0), after[1:])).to(table.device)

    @ScoreMod
    def t5_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.clamp(kv_idx - q_idx, -max_distance, max_distance)
        head = expect_size(h, table.shape[1], "mods.t5_bias", "table")
        return score + table[buckets[distance + max_distance], head]

    return t5_score


def _t5_buckets(count: int, max_distance: int) -> Tensor:
    """Returns the buckets of the distances 0 ... max_distance, int32.

    The mod reads this table, since a kernel's logarithm may round differently from T5's.
    """
    exact = count // 2
    distances = torch.arange(max_distance + 1, device="cpu")
    steps = torch.log(distances.clamp(min=exact) / exact) / math.log(max_distance / exact) * (count - exact)
    grown = (exact + steps.long()).clamp(max=count - 1)
    return torch.where(distances < exact, distances, grown).to(torch.int32)


def sandwich(heads: int, length: int, dim: int = 128, device: torch.device | str | None = None) -> ScoreMod:
    """Adds the inner product of two sinusoidal embeddings, which falls with their distance:

        score + sum over i < dim / 2 of cos((q_idx - kv_idx) / 10000 ** (2 * i / dim)) * heads / (8 * (h + 1))

    `heads` is H, `length` the number of positions and `dim` the even width of the embeddings. The mod looks
    the sums up in a table, float32 [length], on `device`. Use it with a causal mask.

    Both positions count from 0. With a key/value cache, where the queries are the last M of N positions,
    shift the queries: lambda s, b, h, q, k: sandwich_mod(s, b, h, q + N - M, k).

    Source: Chi et al., Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis,
    2022.

    Example:

        score_mod = mods.sandwich(8, length=1024, device=query.device)
        block_mask = create_block_mask(masks.causal(), None, None, 1024, 1024)
        out = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

    `mods.sandwich(8, length=4, dim=4)`, 4 x 4, scores of 0:

           2.00   1.54   0.58   0.01
           1.54   2.00   1.54   0.58
           0.58   1.54   2.00   1.54
           0.01   0.58   1.54   2.00
    """
    heads = check_heads("sandwich", heads)
    length = check_number("sandwich", "length", length, least=1, most=LARGEST)
    even = whole(dim)
    if even is None or not 2 <= even <= LARGEST or even % 2:
        raise LibraryArgumentError(
            function="sandwich", name="dim", value=shown(dim), rule=f"an even integer from 2 to {LARGEST}",
            advice="give the width of the embeddings, e.g. 128",
        )  # fmt: skip
    dim = even
    rates = 10000.0 ** (-2.0 * torch.arange(dim // 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * rates
    here = torch.empty(0, device=checked_device(device)).device
    products = angles.cos().sum(-1).to(device=here, dtype=torch.float32)

    @ScoreMod
    def sandwich_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        head = expect_size(h, heads, "mods.sandwich", "heads")
        query = expect_size(q_idx, length, "mods.sandwich", "length")
        key = expect_size(kv_idx, length, "mods.sandwich", "length")
        return score + products[torch.abs(query - key)] * (heads / 8) / (head + 1)

    return sandwich_score


def _refuse_slopes(value: str) -> NoReturn:
    raise LibraryArgumentError(
        function="alibi", name="slopes", value=value,
        rule="the number of heads, or a floating-point tensor of shape [H]",
        advice="write e.g. alibi(query.shape[1])",
    )  # fmt: skip


__all__ = [
    "alibi", "alibi_slopes", "causal_score", "relative_bias",
    "relative_position", "sandwich", "t5_bias",
]  # fmt: skip
