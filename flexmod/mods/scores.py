"""Score mods that read the score, captured tensors, or the edges of a graph; `chain` combines mods.

First come mods that read the score alone, then mods for latent attention, for graphs whose nodes are the
positions, and for sequences that are packed one after another. `positions.py` has mods of distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import ArgumentTypeError, LibraryArgumentError
from flexmod.errors.base import a_type
from flexmod.ir.composed import ScoreMod
from flexmod.ir.formulas import tanh_approximate
from flexmod.ir.graph import expect_size, look_up
from flexmod.ir.source import check_arity
from flexmod.masks.checks import check_float, check_number, check_positive, check_tensor
from flexmod.masks.packed import sequences


def chain(*score_mods: Callable[..., Any]) -> ScoreMod:
    """Applies score mods one after another:

        chain(first, second)(score, ...) == second(first(score, ...), ...)

    It takes any score mods, also your own functions. chain() returns the score unchanged.

    Source: Gemma Team, Gemma 2, 2024 (a cap after other changes of the score).

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
                function="chain", name="a mod", value=a_type(score_mod),
                rule="a function (score, b, h, q_idx, kv_idx) -> score",
                advice="write e.g. chain(mods.alibi(8), mods.softcap(50.0))",
            )  # fmt: skip
        check_arity(score_mod, "score")

    @ScoreMod
    def chained(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return chained


def softcap(cap: float, approximate: bool = False) -> ScoreMod:
    """Keeps scores within (-cap, cap): cap * tanh(score / cap).

    The argument `cap` is a positive number in units of the scaled score. With `approximate=True` the kernel
    may use the chip's own tanh instruction, whose relative error is up to 2^-11. The error changes a score by
    up to cap / 2048 and a weight by the same ratio, 2.4% at a cap of 50. NVIDIA's chips have this
    instruction; other chips and the CPU compute the exact tanh. See `flexmod.tanh_approximate`.

    Source: Gemma Team, Gemma 2, 2024.

    Example:

        score_mod = mods.softcap(50.0)
        out = flex_attention(query, key, value, score_mod=score_mod)

    `mods.softcap(2.0)`, 1 x 5, scores of -8 -2 0 2 8:

          -2.00  -1.52   0.00   1.52   2.00
    """
    cap = check_positive("softcap", "cap", cap)

    @ScoreMod
    def softcap_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    @ScoreMod
    def softcap_approximate_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * tanh_approximate(score / cap)

    ArgumentTypeError.check_flags(approximate=approximate)
    return softcap_approximate_score if approximate else softcap_score


def temperature(value: float | Tensor) -> ScoreMod:
    """Divides scores: score / temperature. Above 1 the softmax becomes flatter, below 1 sharper.

    `value` is a positive number, or a floating-point tensor: [] for one temperature, [H] for one for each
    head; gradients reach it.

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
        value = check_positive("temperature", "value", value)
    else:
        check_float("temperature", "value", value, ranks=(0, 1), shapes="[] or [H]")

    @ScoreMod
    def temperature_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score / look_up(value, "mods.temperature", "value", h)

    return temperature_score


def sink(logits: Tensor, position: int = 0) -> ScoreMod:
    """Makes one key an attention sink, whose score depends on the head only:

        logits[h]  where kv_idx == position, else score

    The parameter `logits` is a floating-point tensor [H]; gradients reach it. Put a position of zeros in
    front of key and value, and keep it in the mask: it takes a share of each row's softmax and adds nothing
    to the output. The function `flexmod.apply_sink` gives the same result without such a position, from a
    call's log-sum-exp.

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
    position = check_number("sink", "position", position, least=0)

    @ScoreMod
    def sink_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        logit = look_up(logits, "mods.sink", "logits", h)
        return torch.where(kv_idx == position, logit, score)

    return sink_score


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
        of_query = look_up(query_rope, owner, "query_rope", b, h, q_idx)
        of_key = look_up(key_rope, owner, "key_rope", b, kv_idx)
        products = (of_query[i] * of_key[i] for i in range(query_rope.shape[-1]))
        return score + scale * sum(products)

    return rope_score


def graphormer_spatial(table: Tensor, distances: Tensor) -> ScoreMod:
    """Adds a bias for the shortest path's length: score + table[distances[b, q_idx, kv_idx], h].

    The parameter `table` is a floating-point tensor [lengths, H]; gradients reach it. The integer tensor
    `distances`, [N, N] or [B, N, N], has values from 0 to lengths - 1. Give pairs without a path a value of
    their own.

    Source: Ying et al., Do Transformers Really Perform Bad for Graph Representation?, 2021.

    Example:

        distances = torch.randint(0, 20, (1024, 1024), device=query.device)
        table = torch.zeros(20, 8, device=query.device, requires_grad=True)
        out = flex_attention(query, key, value, score_mod=mods.graphormer_spatial(table, distances))

    `mods.graphormer_spatial(torch.tensor([[3.0], [2.0], [-1.0]]),
    torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]]))`, 3 x 3, scores of 0:

           3.00   2.00  -1.00
           2.00   3.00   2.00
          -1.00   2.00   3.00
    """
    check_float("graphormer_spatial", "table", table, ranks=(2,), shapes="[lengths, H]")
    check_tensor("graphormer_spatial", "distances", distances, ranks=(2, 3), shapes="[N, N] or [B, N, N]")

    owner = "mods.graphormer_spatial"

    @ScoreMod
    def spatial_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = look_up(distances, owner, "distances", b, q_idx, kv_idx)
        return score + table[distance, expect_size(h, table.shape[1], owner, "table")]

    return spatial_score


def graphormer_edge(table: Tensor, edges: Tensor) -> ScoreMod:
    """Adds the mean bias of the edges on the shortest path:

        score + sum over n of table[n, edges[b, q_idx, kv_idx, n], h] / number of edges

    The parameter `table` is a floating-point tensor [longest, types, H] with a bias for each place on a path
    and each type of edge; gradients reach it. The integer tensor `edges`, [N, N, longest] or
    [B, N, N, longest], has the type of each edge on a path, and -1 after the path's end. A path without edges
    adds 0. The kernel's code grows with `longest`: keep it small; Graphormer uses 5.

    Source: Ying et al., Do Transformers Really Perform Bad for Graph Representation?, 2021.

    Example:

        edges = torch.randint(-1, 4, (1024, 1024, 3), device=query.device)
        table = torch.zeros(3, 4, 8, device=query.device, requires_grad=True)
        out = flex_attention(query, key, value, score_mod=mods.graphormer_edge(table, edges))

    `mods.graphormer_edge(torch.tensor([[[4.0], [6.0]], [[1.0], [2.0]]]),
    torch.tensor([[[-1, -1], [0, -1], [0, 1]], [[0, -1], [-1, -1], [1, -1]], [[1, 0], [1, -1], [-1, -1]]]))`,
    3 x 3, scores of 0:

           0.00   4.00   3.00
           4.00   0.00   6.00
           3.50   6.00   0.00
    """
    check_float("graphormer_edge", "table", table, ranks=(3,), shapes="[longest, types, H]")
    check_tensor(
        "graphormer_edge", "edges", edges, ranks=(3, 4), shapes="[N, N, longest] or [B, N, N, longest]"
    )

    owner = "mods.graphormer_edge"

    @ScoreMod
    def edge_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        paths = edges if edges.dim() == 3 else edges[expect_size(b, edges.shape[0], owner, "edges")]
        query = expect_size(q_idx, edges.shape[-3], owner, "edges")
        key = expect_size(kv_idx, edges.shape[-2], owner, "edges")
        head = expect_size(h, table.shape[2], owner, "table")
        path = paths[query, key]
        on_path = [path[n] >= 0 for n in range(edges.shape[-1])]
        total = sum(torch.where(on, table[n, path[n], head], 0.0) for n, on in enumerate(on_path))
        count = sum(on.to(torch.int32) for on in on_path)
        return score + total / (count + (count == 0))

    return edge_score


def jagged(
    offsets: Tensor,
    score_mod: Callable[..., Any],
    *,
    kv_offsets: Tensor | None = None,
    total: int | None = None,
    kv_total: int | None = None,
) -> ScoreMod:
    """Applies `score_mod` within each packed sequence, as if the sequence were a batch entry:

        score_mod(score, s(q_idx), h, q_idx - start, kv_idx - start)

    Here s is the number of the sequence and start its first position. Within a sequence, positions of queries
    and of keys count from 0. Use it with `masks.jagged`, which has the same arguments: `offsets` is an
    integer tensor [n + 1]; `kv_offsets` [n + 1] has the offsets of keys, if their lengths differ from the
    queries'. This function reads the offsets once, and later writes to them change nothing.

    `flexmod.varlen_attention` and `flexmod.nested_attention` use this mod.

    Source: the jagged layout of torch.nested; Dao, FlashAttention-2, 2023 (variable lengths).

    Example:

        offsets = torch.tensor([0, 300, 700, 1024], device=query.device)
        block_mask = create_block_mask(masks.jagged(offsets), None, None, 1024, 1024)
        score_mod = mods.jagged(offsets, mods.relative_position())
        out = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

    `mods.jagged(torch.tensor([0, 2, 4]), lambda s, b, h, q, k: s + 10 * b + k)`, 4 x 4, scores of 0:

           0.00   1.00   0.00   1.00
           0.00   1.00   0.00   1.00
          10.00  11.00  10.00  11.00
          10.00  11.00  10.00  11.00
    """
    _, within = sequences("mods.jagged", offsets, kv_offsets, total, kv_total)
    check_arity(score_mod, "score")

    @ScoreMod
    def jagged_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        number, query, key = within(q_idx, kv_idx)
        return score_mod(score, number, h, query, key)

    return jagged_score


__all__ = [
    "chain", "graphormer_edge", "graphormer_spatial", "jagged",
    "mla_rope", "sink", "softcap", "temperature",
]  # fmt: skip
