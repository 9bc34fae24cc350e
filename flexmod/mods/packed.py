"""Score mods for sequences that are packed one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexmod.ir.composed import ScoreMod
from flexmod.ir.graph import expect_size
from flexmod.masks.checks import check_tensor
from flexmod.masks.packed import places


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
    queries'.

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
    check_tensor("jagged", "offsets", offsets, ranks=(1,), shapes="[n + 1]")
    sequence, start = places(offsets, total)
    kv_start, kv_name = start, "offsets" if kv_offsets is None else "kv_offsets"
    if kv_offsets is not None:
        check_tensor("jagged", "kv_offsets", kv_offsets, ranks=(1,), shapes="[n + 1]")
    if kv_offsets is not None or kv_total not in (None, start.shape[0]):
        _, kv_start = places(offsets if kv_offsets is None else kv_offsets, kv_total)

    @ScoreMod
    def jagged_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        query = expect_size(q_idx, start.shape[0], "mods.jagged", "offsets")
        key = expect_size(kv_idx, kv_start.shape[0], "mods.jagged", kv_name)
        return score_mod(score, sequence[query], h, query - start[query], key - kv_start[key])

    return jagged_score
