"""Masks of trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.ir.composed import Mask
from flexmod.ir.graph import expect_size
from flexmod.masks.checks import check_number, check_tensor


def tree(parents: Tensor, context: int = 0) -> Mask:
    """A node of a tree attends to itself, to its ancestors, and to `context` keys before the tree.

        kv_idx < context  or  node kv_idx - context is on the path from node q_idx to its root

    `parents` is an integer tensor [n] with the parent of each node, -1 for a root. Queries are the n nodes;
    keys are the context and then the n nodes. This function reads the values of `parents` once. Nodes may
    come in any order; depth-first order, where each subtree is contiguous, makes few tiles partial.

    Source: Miao et al., SpecInfer, 2023; Cai et al., Medusa, 2024.

    Example:

        parents = torch.tensor([-1, 0, 0, 1, 1, 2], device=query.device)
        block_mask = create_block_mask(masks.tree(parents, context=1018), None, None, 6, 1024)
        out = flex_attention(query[:, :, -6:], key, value, block_mask=block_mask)

    `masks.tree(torch.tensor([-1, 0, 0, 1, 1, 2]), context=3)`, 6 x 9:

        ####.....
        #####....
        ####.#...
        #####.#..
        #####..#.
        ####.#..#
    """
    check_tensor("tree", "parents", parents, ranks=(1,), shapes="[n]")
    check_number("tree", "context", context, least=0)
    enter, leave = _visits(parents)

    @Mask
    def tree_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        count = enter.shape[0]
        q_idx = expect_size(q_idx, count, "masks.tree", "parents")
        kv_idx = expect_size(kv_idx, count + context, "masks.tree", "parents with their context")
        node = torch.clamp(kv_idx - context, min=0)
        below = (enter[node] <= enter[q_idx]) & (enter[q_idx] < leave[node])
        return (kv_idx < context) | below

    return tree_mask


def _visits(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the times at which a depth-first walk enters and leaves each node, int32 [n] each.

    A node is a descendant of another if the walk enters it between the other's two times.
    """
    numbers: list[int] = parents.tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(numbers):
        children.setdefault(parent, []).append(node)
    enter, leave, time = [-1] * len(numbers), [0] * len(numbers), 0
    stack = [(root, False) for root in reversed(children.get(-1, []))]
    while stack:
        node, done = stack.pop()
        if done:
            leave[node] = time
            continue
        enter[node], time = time, time + 1
        stack.append((node, True))
        stack += [(child, False) for child in reversed(children.get(node, []))]
    if -1 in enter:
        raise LibraryArgumentError(
            function="tree", name="parents", value=f"such that node {enter.index(-1)} has no root",
            rule="a forest", advice="give each node the number of its parent, and -1 to a root",
        )  # fmt: skip
    made = (torch.tensor(times, dtype=torch.int32, device=parents.device) for times in (enter, leave))
    return next(made), next(made)
