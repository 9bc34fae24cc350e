"""explain(): what flexmod makes of a mod, for people: the graphs and the module of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexmod.codegen.render import render
from flexmod.codegen.spec import KernelSpec
from flexmod.compiler import lower
from flexmod.ir.graph import Graph
from flexmod.ir.trace import trace


@dataclass(frozen=True)
class Explanation:
    """`str` shows the graphs; `source` is the rendered module, forward and backward."""

    graphs: tuple[Graph, ...]
    source: str

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.graphs)) or "no mod: plain attention"


def explain(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | tuple[int, int] = 128,
) -> Explanation:
    """What flexmod compiles for these mods; nothing is launched, no GPU is needed.

    head_dim, value_dim (head_dim if None): of query and key, and of value. dtype: of all three. block_size:
    of the mask's tiles, (queries, keys). Raises what tracing raises.
    """
    extents = (1, 1, 1 << 15, 1 << 15)
    score = lower(trace(score_mod, "score").graph, extents, split=mask_mod is None) if score_mod else None
    mask = lower(trace(mask_mod, "mask").graph, extents, split=False) if mask_mod else None
    if score is not None and score.split is not None:
        mask = lower(score.split, extents, split=False)
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    spec = KernelSpec(
        q_dtype=dtype, k_dtype=dtype, v_dtype=dtype, head_dim=head_dim, value_dim=value_dim or head_dim,
        mask_block=block if mask else None, backward=True,
    )  # fmt: skip
    source = render(
        spec, score.text if score else None, mask.text if mask else None, score.grad_text if score else None
    )
    graphs = [g for g in (mask.score if mask else None, *((score.score, score.grad) if score else ())) if g]
    return Explanation(tuple(graphs), source)
