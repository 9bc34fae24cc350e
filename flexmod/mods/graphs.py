"""Score mods for graphs, whose nodes are the positions, and for sequences that are packed one after
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.ir.composed import ScoreMod
from flexmod.ir.graph import expect_size, look_up
from flexmod.ir.source import check_arity
from flexmod.masks.checks import check_float, check_tensor
from flexmod.masks.packed import sequences


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
