"""Masks of sequences that are packed one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError
from flexmod.masks.checks import MaskMod, check_number, check_tensor


def document(
    ids: Tensor | None = None,
    causal: bool = False,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    total: int | None = None,
) -> MaskMod:
    """Packed documents keep to themselves: ids[q_idx] == ids[kv_idx], with causal=True also q_idx >= kv_idx.

    Give one of

        ids         [S] or [B, S], the document of each position
        lengths     [n] or [B, n], how long each document is
        cu_seqlens  [n + 1] or [B, n + 1], where each begins; from 0 to the end of the last one

    as integer tensors. `total` is the number of positions, for `lengths` and `cu_seqlens`; those after the
    last document are one of their own. Without it the largest end is read from the device, which waits.

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.

        lengths = torch.tensor([1000, 2000, 1096], device="cuda")
        mask_mod = masks.document(lengths=lengths, causal=True, total=4096)
        block_mask = create_block_mask(mask_mod, None, None, 4096, 4096)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    return _document_mask(_document_ids(ids, lengths, cu_seqlens, total), causal)


def _document_mask(ids: Tensor, causal: bool) -> MaskMod:
    def document_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        of_batch = ids if ids.dim() == 1 else ids[b]
        same = of_batch[q_idx] == of_batch[kv_idx]
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
    if ids is not None:
        return ids
    if total is not None:
        check_number("document", "total", total, least=1)
    ends = value.cumsum(-1) if lengths is not None else value[..., 1:].long()
    positions = torch.arange(int(ends.max()) if total is None else total, device=ends.device)
    in_rows = positions.expand(*ends.shape[:-1], -1).contiguous()
    return torch.searchsorted(ends.contiguous(), in_rows, right=True, out_int32=True)


def shared_prefix(prefix: int, ids: Tensor) -> MaskMod:
    """Several continuations of one prefix, packed one after another, are causal and do not see each other:

        q_idx >= kv_idx  and  (kv_idx < prefix  or  ids[q_idx] == ids[kv_idx])

    `prefix` is a number of positions; `ids` an integer tensor [S], the continuation of each position. What it
    says of the prefix itself does not matter.

    Source: Juravsky et al., Hydragen, 2024.

        ids = torch.arange(8, device="cuda").repeat_interleave(1024)
        block_mask = create_block_mask(masks.shared_prefix(2000, ids), None, None, 8192, 8192)
        out = flex_attention(query, key, value, block_mask=block_mask)
    """
    check_number("shared_prefix", "prefix", prefix, least=0)
    check_tensor("shared_prefix", "ids", ids, ranks=(1,), shapes="[S]")

    def shared_prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | (ids[q_idx] == ids[kv_idx]))

    return shared_prefix_mask


def ragged(offsets: Tensor, mask_mod: MaskMod | None = None) -> MaskMod:
    """Sequences packed one after another; `mask_mod` sees the positions within its own sequence.

        sequence[q_idx] == sequence[kv_idx]  and  mask_mod(b, h, q_idx - start, kv_idx - start)

    `offsets` is an integer tensor [n + 1] that ascends from 0 to the total length: sequence i holds the
    positions from offsets[i] to offsets[i + 1], as in a nested tensor of jagged layout. `mask_mod` None keeps
    every pair within a sequence.

        offsets = torch.tensor([0, 1000, 3000, 4096], device="cuda")
        block_mask = create_block_mask(masks.ragged(offsets, masks.prefix_lm(64)), None, None, 4096, 4096)
        out = flex_attention(packed_query, packed_key, packed_value, block_mask=block_mask)
    """
    check_tensor("ragged", "offsets", offsets, ranks=(1,), shapes="[n + 1]")
    sequence = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
    start = offsets[:-1][sequence]

    def ragged_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = sequence[q_idx] == sequence[kv_idx]
        if mask_mod is None:
            return same
        return same & mask_mod(b, h, q_idx - start[q_idx], kv_idx - start[kv_idx])

    return ragged_mask
