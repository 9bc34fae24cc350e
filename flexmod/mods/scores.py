"""Score mods of the score itself, and mods of mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.ir.approximate import tanh_approximate
from flexmod.ir.composed import ScoreMod
from flexmod.ir.sizes import expect_size
from flexmod.masks.checks import check_number
from flexmod.mods.checks import check_float, check_positive


def chain(*score_mods: Callable[..., Any]) -> ScoreMod:
    """One mod after another: each changes the score that the one before it left.

        chain(first, second)(score, ...) == second(first(score, ...), ...)

    Any score mods, yours too. Without any the score stays as it is.

    Source: Gemma Team, Gemma 2, 2024, caps what a bias was added to.

    Example:

        score_mod = mods.chain(mods.alibi(8), mods.softcap(50.0))
        block_mask = create_block_mask(masks.causal(), None, None, 1024, 1024)
        out = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

    `mods.chain(mods.relative_position(), mods.softcap(2.0))`, 4 x 4, scores of 0:

           0.00  -0.92  -1.52  -1.81
           0.92   0.00  -0.92  -1.52
           1.52   0.92   0.00  -0.92
           1.81   1.52   0.92   0.00
    """
    for score_mod in score_mods:
        if not callable(score_mod):
            raise LibraryArgumentError(
                function="chain", name="a mod", value=f"a {type(score_mod).__name__}",
                rule="a function (score, b, h, q_idx, kv_idx) -> score",
                advice="write e.g. chain(mods.alibi(8), mods.softcap(50.0))",
            )  # fmt: skip

    @ScoreMod
    def chained(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return chained


def softcap(cap: float, approximate: bool = False) -> ScoreMod:
    """Keeps scores within (-cap, cap): cap * tanh(score / cap).

    `cap` is a positive number, in units of the scaled score. With `approximate=True` tanh may be the chip's
    own instruction: its relative error of up to 2^-11 puts a score off by up to cap / 2048, and a weight by
    as large a share, 2.4% at a cap of 50. NVIDIA's chips have one; elsewhere, on the CPU too, tanh is as
    accurate as without. See `flexmod.tanh_approximate`.

    Source: Gemma Team, Gemma 2, 2024.

    Example:

        score_mod = mods.softcap(50.0)
        out = flex_attention(query, key, value, score_mod=score_mod)

    `mods.softcap(2.0)`, 1 x 5, scores of -8 -2 0 2 8:

          -2.00  -1.52   0.00   1.52   2.00
    """
    check_positive("softcap", "cap", cap)

    @ScoreMod
    def softcap_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    @ScoreMod
    def softcap_approximate_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * tanh_approximate(score / cap)

    return softcap_approximate_score if approximate else softcap_score


def temperature(value: float | Tensor) -> ScoreMod:
    """Divides scores: score / temperature. Beyond 1 the softmax becomes flatter, below 1 sharper.

    `value` is a positive number, or a floating-point tensor: [] for one temperature, [H] for one for each
    head; it may be learned.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015 (the temperature of a softmax);
    learned for each head in Liu et al., Swin Transformer V2, 2021.

    Example:

        values = torch.ones(8, device=query.device, requires_grad=True)
        out = flex_attention(query, key, value, score_mod=mods.temperature(values))
        out.sum().backward()

    `mods.temperature(2.0)`, 1 x 5, scores of -8 -2 0 2 8:

          -4.00  -1.00   0.00   1.00   4.00
    """
    if not isinstance(value, Tensor):
        check_positive("temperature", "value", value)
    else:
        check_float("temperature", "value", value, ranks=(0, 1), shapes="[] or [H]")

    @ScoreMod
    def temperature_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() == 1:
            return score / value[expect_size(h, value.shape[0], "mods.temperature", "value")]
        return score / value

    return temperature_score


def sink(logits: Tensor, position: int = 0) -> ScoreMod:
    """One key is a sink: its score is a number of the head, whatever the query is.

        logits[h]  where kv_idx == position, else score

    The sink takes a share of each row's softmax, and gives nothing back where its value is zero: put a
    position of zeros in front of key and value, and let the mask keep it. `flexmod.apply_sink` does the same
    to a call that has no such position, through its log-sum-exp. `logits` is a floating-point tensor [H],
    which may be learned.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023; OpenAI, gpt-oss,
    2025 (learned logits).

    Example:

        logits = torch.zeros(8, device=query.device, requires_grad=True)
        padded = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (key, value))
        out = flex_attention(query, *padded, score_mod=mods.sink(logits))

    `mods.sink(torch.tensor([5.0]))`, 4 x 4, scores of 0:

           5.00   0.00   0.00   0.00
           5.00   0.00   0.00   0.00
           5.00   0.00   0.00   0.00
           5.00   0.00   0.00   0.00
    """
    check_float("sink", "logits", logits, ranks=(1,), shapes="[H]")
    check_number("sink", "position", position, least=0)

    @ScoreMod
    def sink_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        logit = logits[expect_size(h, logits.shape[0], "mods.sink", "logits")]
        return torch.where(kv_idx == position, logit, score)

    return sink_score
