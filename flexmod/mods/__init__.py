"""A library of score mods. Each function returns an ordinary score_mod(score, b, h, q_idx, kv_idx) -> score.

out = flexmod.flex_attention(query, key, value, score_mod=mods.softcap(50.0))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


def alibi(slopes: int | Tensor) -> ScoreMod:
    """A penalty that grows with the distance: score + slope[h] * (kv_idx - q_idx).

    `slopes` is the number of heads H, for slope[h] = 2 ** (-8 * (h + 1) / H), or a floating-point tensor [H]
    of your own. Meant for use with a causal mask, where the distance has one sign.

    Source: Press et al., Train Short, Test Long, 2021.

        block_mask = create_block_mask(masks.causal(), None, None, 4096, 4096)
        out = flex_attention(query, key, value, score_mod=mods.alibi(16), block_mask=block_mask)
        out = flex_attention(query, key, value, score_mod=mods.alibi(slopes), block_mask=block_mask)
    """
    if isinstance(slopes, Tensor):
        if slopes.dim() != 1 or not slopes.is_floating_point():
            _refuse_slopes(f"{slopes.dtype} {list(slopes.shape)}")
        table = slopes

        def alibi_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + table[h] * (kv_idx - q_idx)

        return alibi_table

    if not isinstance(slopes, int) or isinstance(slopes, bool) or slopes < 1:
        _refuse_slopes(repr(slopes))
    rate = -8.0 / slopes

    def alibi_formula(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.exp2((h + 1) * rate) * (kv_idx - q_idx)

    return alibi_formula


def softcap(cap: float) -> ScoreMod:
    """Keeps scores within (-cap, cap): cap * tanh(score / cap).

    Source: Gemma Team, Gemma 2, 2024.

        score_mod = mods.softcap(50.0)
        out = flex_attention(query, key, value, score_mod=score_mod)
    """
    if not isinstance(cap, (int, float)) or isinstance(cap, bool) or not cap > 0:
        raise LibraryArgumentError(
            function="softcap",
            name="cap",
            value=repr(cap),
            rule="a positive number",
            advice="write e.g. softcap(50.0)",
        )

    def softcap_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return softcap_score


def relative_position() -> ScoreMod:
    """Adds the distance: score + (q_idx - kv_idx).

    The small example of what a score mod can do with positions.

        score_mod = mods.relative_position()
        out = flex_attention(query, key, value, score_mod=score_mod)
    """

    def relative_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (q_idx - kv_idx)

    return relative_score


def causal_score() -> ScoreMod:
    """The causal mask written as a score mod: score where q_idx >= kv_idx, else -inf.

    The same attention as with `masks.causal()`.

        score_mod = mods.causal_score()
        out = flex_attention(query, key, value, score_mod=score_mod)
    """

    def causal_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    return causal_mod


def _refuse_slopes(value: str) -> None:
    raise LibraryArgumentError(
        function="alibi", name="slopes", value=value,
        rule="the number of heads, or a floating-point tensor of shape [H]",
        advice="write e.g. alibi(query.shape[1])",
    )  # fmt: skip
