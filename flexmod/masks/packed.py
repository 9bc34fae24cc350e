"""Masks of packed sequences, and of sequences that share their beginnings: a prefix, or a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import ArgumentTypeError, LibraryArgumentError
from flexmod.errors.base import shown
from flexmod.ir.composed import Mask
from flexmod.ir.graph import as_bool, as_position, expect_size, look_up
from flexmod.ir.offsets import LARGEST
from flexmod.ir.source import check_arity
from flexmod.masks.checks import MaskMod, check_number, check_packing, check_starts, check_tensor


def document(
    ids: Tensor | None = None,
    causal: bool = False,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    total: int | None = None,
) -> Mask:
    """A query attends to its own document: ids[q_idx] == ids[kv_idx], with causal=True also q_idx >= kv_idx.

    Give one of these integer tensors:

        ids         [S] or [B, S], the document of each position
        lengths     [n] or [B, n], the length of each document
        cu_seqlens  [n + 1] or [B, n + 1], where each document begins, and where the last one ends

    With `lengths` or `cu_seqlens`, `total` is the number of positions; positions after the last document form
    one more document. Without `total` the host waits for the device to read the last end. This function
    reads `lengths` and `cu_seqlens` once: later writes to them change nothing, later writes to `ids` do.

    Queries and keys are the same positions, counted from 0. With a key/value cache, where the queries are the
    last M of N positions, shift the queries, as `causal` shows:
    lambda b, h, q, k: document_mod(b, h, q + N - M, k).

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.

    Example:

        lengths = torch.tensor([300, 400, 324], device=query.device)
        mask_mod = masks.document(lengths=lengths, causal=True, total=1024)
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.document(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]))`, 8 x 8:

        ###.....
        ###.....
        ###.....
        ...##...
        ...##...
        .....###
        .....###
        .....###

    `masks.document(lengths=torch.tensor([3, 2, 3]), causal=True)`, 8 x 8:

        #.......
        ##......
        ###.....
        ...#....
        ...##...
        .....#..
        .....##.
        .....###
    """
    argument = "ids" if ids is not None else "total" if total is not None else "sum of lengths"
    ids = _document_ids(ids, lengths, cu_seqlens, total)
    ArgumentTypeError.check_flags(causal=causal)
    owner, causal = "masks.document", as_bool(causal)

    @Mask
    def document_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = look_up(ids, owner, argument, b, q_idx) == look_up(ids, owner, argument, b, kv_idx)
        return same & (q_idx >= kv_idx) if causal else same

    return document_mask


def _document_ids(
    ids: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None, total: int | None
) -> Tensor:
    given = {"ids": ids, "lengths": lengths, "cu_seqlens": cu_seqlens}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise LibraryArgumentError(
            function="document", name="the packing", value=f"given by {' and '.join(named) or 'nothing'}",
            rule="given by one of ids, lengths and cu_seqlens",
            advice="write document(ids), document(lengths=...) or document(cu_seqlens=...)",
        )  # fmt: skip
    shapes = {"ids": "[S] or [B, S]", "lengths": "[n] or [B, n]", "cu_seqlens": "[n + 1] or [B, n + 1]"}
    value = check_tensor("document", named[0], given[named[0]], ranks=(1, 2), shapes=shapes[named[0]])
    if ids is not None and total is not None:
        raise LibraryArgumentError(
            function="document", name="total", value=shown(total), rule="left out with ids",
            advice="write document(ids): ids has a document for each position",
        )  # fmt: skip
    if ids is not None:
        return ids
    if total is not None:
        total = check_number("document", "total", total, least=1, most=LARGEST)
    name, starts = "cu_seqlens", value
    if lengths is not None:
        name, starts = "the running total of lengths", torch.nn.functional.pad(value.cumsum(-1), (1, 0))
    check_starts("document", name, starts, total, ranks=(1, 2), shapes=shapes["cu_seqlens"])
    ends = starts[..., 1:].long()
    if total is None:
        total = int(starts.max()) if starts.numel() else 0
    positions = torch.arange(total, device=ends.device)
    in_rows = positions.expand(*ends.shape[:-1], -1).contiguous()
    return torch.searchsorted(ends.contiguous(), in_rows, right=True, out_int32=True)


def segments(q_ids: Tensor, kv_ids: Tensor | None = None) -> Mask:
    """A query attends to the keys of its segment: q_ids[q_idx] == kv_ids[kv_idx].

    The integer tensors `q_ids` [M] or [B, M] and `kv_ids` [N] or [B, N] have the segment of each query and
    each key, in any order. Without `kv_ids` keys have the segments of the queries. Give padding an id that
    the other side does not have: such a query attends to nothing, and its output is 0. For self-attention
    `masks.document` also takes lengths.

    Source: the SegmentIds of JAX's flash attention for TPUs, 2023 (jax.experimental.pallas).

    Example:

        q_ids = torch.arange(1024, device=query.device) // 300
        kv_ids = torch.where(torch.arange(1024, device=query.device) < 1000, q_ids, -1)
        mask_mod = masks.segments(q_ids, kv_ids) & masks.causal()
        block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)

    `masks.segments(torch.tensor([0, 0, 1, 1, 1, 7]), torch.tensor([0, 0, 0, 1, 1, 2, -1, -1]))`, 6 x 8:

        ###.....
        ###.....
        ...##...
        ...##...
        ...##...
        ........
    """
    check_tensor("segments", "q_ids", q_ids, ranks=(1, 2), shapes="[M] or [B, M]")
    of_keys, name = (q_ids, "q_ids") if kv_ids is None else (kv_ids, "kv_ids")
    check_tensor("segments", "kv_ids", of_keys, ranks=(1, 2), shapes="[N] or [B, N]")

    owner = "masks.segments"

    @Mask
    def segments_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return look_up(q_ids, owner, "q_ids", b, q_idx) == look_up(of_keys, owner, name, b, kv_idx)

    return segments_mask


def shared_prefix(prefix: int, ids: Tensor) -> Mask:
    """A query attends, causally, to a shared prefix and to its own continuation, not to other continuations:

        q_idx >= kv_idx  and  (kv_idx < prefix  or  ids[q_idx] == ids[kv_idx])

    `prefix` is a number of positions. `ids` is an integer tensor [S] with the continuation of each position;
    its values in the prefix have no effect. The continuations follow one another.

    Queries and keys are the same positions, counted from 0. With a key/value cache, where the queries are the
    last M of N positions, shift the queries, as `causal` shows:
    lambda b, h, q, k: shared_mod(b, h, q + N - M, k).

    Source: Juravsky et al., Hydragen, 2024.

    Example:

        ids = torch.arange(1024, device=query.device) // 256
        block_mask = create_block_mask(masks.shared_prefix(300, ids), None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.shared_prefix(2, torch.tensor([0, 0, 1, 1, 1, 2, 2, 2]))`, 8 x 8:

        #.......
        ##......
        ###.....
        ####....
        #####...
        ##...#..
        ##...##.
        ##...###
    """
    prefix = check_number("shared_prefix", "prefix", prefix, least=0)
    check_tensor("shared_prefix", "ids", ids, ranks=(1,), shapes="[S]")

    owner = "masks.shared_prefix"

    @Mask
    def shared_prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = look_up(ids, owner, "ids", q_idx) == look_up(ids, owner, "ids", kv_idx)
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | same)

    return shared_prefix_mask


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
    context = check_number("tree", "context", context, least=0)
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


def jagged(
    offsets: Tensor,
    mask_mod: MaskMod | None = None,
    *,
    kv_offsets: Tensor | None = None,
    total: int | None = None,
    kv_total: int | None = None,
) -> Mask:
    """Applies `mask_mod` within each packed sequence, as if the sequence were a batch entry:

        s(q_idx) == s(kv_idx)  and  mask_mod(s(q_idx), h, q_idx - start, kv_idx - start)

    Here s is the number of the sequence and start its first position.

        offsets     integer tensor [n + 1], ascending from 0 to the total length. Sequence i has the positions
                    from offsets[i] to offsets[i + 1], as in a nested tensor with jagged layout.
        mask_mod    if None, a query attends to its whole sequence
        kv_offsets  [n + 1], the offsets of keys, if their lengths differ from the queries'
        total       the number of query positions; positions after the last sequence form one more sequence.
                    Without `total` the host waits for the device to read the last offset.
        kv_total    the same for keys

    Within a sequence, positions of queries and of keys count from 0. With a key/value cache a sequence has
    fewer queries than keys; `mask_mod` must then shift the queries by the difference. This function reads the
    offsets once, and later writes to them change nothing.

    `flexmod.varlen_attention` and `flexmod.nested_attention` use this mask.

    Source: the jagged layout of torch.nested; Dao, FlashAttention-2, 2023 (variable lengths).

    Example:

        offsets = torch.tensor([0, 300, 700, 1024], device=query.device)
        block_mask = create_block_mask(masks.jagged(offsets, masks.causal()), None, None, 1024, 1024)
        out = flex_attention(query, key, value, block_mask=block_mask)

    `masks.jagged(torch.tensor([0, 3, 8]), masks.prefix_lm(2))`, 8 x 8:

        ##......
        ##......
        ###.....
        ...##...
        ...##...
        ...###..
        ...####.
        ...#####
    """
    same, within = sequences("masks.jagged", offsets, kv_offsets, total, kv_total)
    if mask_mod is not None:
        check_arity(mask_mod, "mask")

    @Mask
    def jagged_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        alike = same(q_idx, kv_idx)
        if mask_mod is None:
            return alike
        number, query, key = within(q_idx, kv_idx)
        return alike & mask_mod(number, h, query, key)

    return jagged_mask


def sequences(
    owner: str, offsets: Tensor, kv_offsets: Tensor | None, total: int | None, kv_total: int | None
) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], tuple[Any, Any, Any]]]:
    """Returns two functions of q_idx and kv_idx, for packed sequences as `jagged` takes them: are both in one
    sequence? And the number of the query's sequence, and both positions in their own sequences.
    """
    totals = {"total": total, "kv_total": kv_total}
    total, kv_total = (
        number if number is None else check_number("jagged", name, number, least=0, most=LARGEST)
        for name, number in totals.items()
    )
    check_packing("jagged", {"offsets": offsets, "kv_offsets": kv_offsets}, total, kv_total)
    sequence, start = _places(offsets, total)
    kv_sequence, kv_start = sequence, start
    if kv_offsets is not None or kv_total not in (None, sequence.shape[0]):
        kv_sequence, kv_start = _places(offsets if kv_offsets is None else kv_offsets, kv_total)
    kv_name, last = "offsets" if kv_offsets is None else "kv_offsets", offsets.shape[0] - 1

    def same(q_idx: Any, kv_idx: Any) -> Any:
        return look_up(sequence, owner, "offsets", q_idx) == look_up(kv_sequence, owner, kv_name, kv_idx)

    def within(q_idx: Any, kv_idx: Any) -> tuple[Any, Any, Any]:
        number = as_position(look_up(sequence, owner, "offsets", q_idx), q_idx, last)
        number = expect_size(number, last, owner, "offsets", sequences=True)
        first, kv_first = look_up(start, owner, "offsets", q_idx), look_up(kv_start, owner, kv_name, kv_idx)
        query = as_position(q_idx - first, q_idx, start.shape[0] - 1)
        return number, query, as_position(kv_idx - kv_first, kv_idx, kv_start.shape[0] - 1)

    return same, within


def _places(offsets: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    """Returns each position's sequence and that sequence's start, int32 [total], from offsets [n + 1]."""
    positions = torch.arange(int(offsets[-1]) if total is None else total, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].long(), positions, right=True, out_int32=True)
    return sequence, offsets.to(torch.int32)[sequence]


__all__ = ["document", "jagged", "segments", "shared_prefix", "tree"]
