"""A library of score mods. Each function returns an ordinary score_mod(score, b, h, q_idx, kv_idx) -> score.

    score_mod = mods.chain(mods.alibi(16), mods.softcap(50.0))
    out = flexmod.flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

Each result is a ScoreMod, which you call like a function and can pickle; `mods.ScoreMod` wraps your own
function. A floating-point tensor that you pass gets a gradient if it requires one. An invalid argument raises
LibraryArgumentError when you make the mod.
"""

from flexmod.ir.composed import ScoreMod
from flexmod.mods.positions import (
    alibi,
    alibi_slopes,
    causal_score,
    relative_bias,
    relative_position,
    sandwich,
    t5_bias,
)
from flexmod.mods.scores import (
    chain,
    graphormer_edge,
    graphormer_spatial,
    jagged,
    mla_rope,
    sink,
    softcap,
    temperature,
)

__all__ = [
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "causal_score",
    "chain",
    "graphormer_edge",
    "graphormer_spatial",
    "jagged",
    "mla_rope",
    "relative_bias",
    "relative_position",
    "sandwich",
    "sink",
    "softcap",
    "t5_bias",
    "temperature",
]
