"""Score mods for graphs, whose nodes are the positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod.ir.composed import ScoreMod
from flexmod.ir.graph import expect_size
from flexmod.masks.checks import check_tensor
from flexmod.mods.checks import check_float


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
        of_batch = distances
        if distances.dim() == 3:
            of_batch = distances[expect_size(b, distances.shape[0], owner, "distances")]
        query = expect_size(q_idx, distances.shape[-2], owner, "distances")
        key = expect_size(kv_idx, distances.shape[-1], owner, "distances")
        return score + table[of_batch[query, key], expect_size(h, table.shape[1], owner, "table")]

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

    # a path that has ended reads the last type, which is 0
    biases = torch.nn.functional.pad(table, (0, 0, 0, 1))
    lengths = (edges >= 0).sum(-1, dtype=torch.int32).clamp(min=1)

    owner = "mods.graphormer_edge"

    @ScoreMod
    def edge_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        paths, counts = edges, lengths
        if edges.dim() == 4:
            batch = expect_size(b, edges.shape[0], owner, "edges")
            paths, counts = edges[batch], lengths[batch]
        query = expect_size(q_idx, edges.shape[-3], owner, "edges")
        key = expect_size(kv_idx, edges.shape[-2], owner, "edges")
        head = expect_size(h, table.shape[2], owner, "table")
        path = paths[query, key]
        total = sum(biases[n, path[n], head] for n in range(edges.shape[-1]))
        return score + total / counts[query, key]

    return edge_score
