"""Score mods for latent attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.ir.composed import ScoreMod
from flexmod.ir.graph import expect_size
from flexmod.mods.checks import check_float


def mla_rope(query_rope: Tensor, key_rope: Tensor, scale: float) -> ScoreMod:
    """Adds the rotary part of latent attention, whose key all heads share:

        score + scale * sum over i of query_rope[b, h, q_idx, i] * key_rope[b, kv_idx, i]

    The floating-point tensors `query_rope` [B, H, M, R] and `key_rope` [B, N, R] are rotated already;
    gradients reach both. The `scale` is 1/sqrt(D + R); pass the same scale to flex_attention.

    The mod multiplies R pairs of elements for each score, which suits a small R. For DeepSeek's R = 64 it is
    far faster to concatenate both parts, which gives the same score from a head dimension of D + R:

        query = torch.cat((query, query_rope), -1)
        key = torch.cat((key, key_rope[:, None].expand(-1, key.shape[1], -1, -1)), -1)

    Source: DeepSeek-AI, DeepSeek-V2, 2024.

    Example:

        query_rope, key_rope = torch.randn(2, 8, 1024, 4), torch.randn(2, 1024, 4)
        score_mod = mods.mla_rope(query_rope.to(query), key_rope.to(query), scale=68**-0.5)
        out = flex_attention(query, key, value, score_mod=score_mod, scale=68**-0.5)

    `mods.mla_rope(torch.arange(4.0).view(1, 1, 4, 1), torch.arange(4.0).view(1, 4, 1), 0.5)`,
    4 x 4, scores of 0:

           0.00   0.00   0.00   0.00
           0.00   0.50   1.00   1.50
           0.00   1.00   2.00   3.00
           0.00   1.50   3.00   4.50
    """
    check_float("mla_rope", "query_rope", query_rope, ranks=(4,), shapes="[B, H, M, R]")
    check_float("mla_rope", "key_rope", key_rope, ranks=(3,), shapes="[B, N, R]")
    if query_rope.shape[-1] != key_rope.shape[-1]:
        raise LibraryArgumentError(
            function="mla_rope", name="key_rope", value=f"of width {key_rope.shape[-1]}",
            rule=f"of query_rope's, {query_rope.shape[-1]}", advice="give both the same last dimension",
        )  # fmt: skip

    owner = "mods.mla_rope"

    @ScoreMod
    def rope_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch = expect_size(b, query_rope.shape[0], owner, "query_rope")
        head = expect_size(h, query_rope.shape[1], owner, "query_rope")
        query = expect_size(q_idx, query_rope.shape[2], owner, "query_rope")
        key = expect_size(kv_idx, key_rope.shape[1], owner, "key_rope")
        of_query = query_rope[batch, head, query]
        of_key = key_rope[expect_size(b, key_rope.shape[0], owner, "key_rope"), key]
        products = (of_query[i] * of_key[i] for i in range(query_rope.shape[-1]))
        return score + scale * sum(products)

    return rope_score
