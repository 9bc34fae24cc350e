"""A variant of attention apart from its tensors of the day: mods traced and lowered, and a KernelSpec.

What `explain`, ahead-of-time builds and standalone files start from. Constants stay as the mods have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexmod.codegen.kernels import Kernels
from flexmod.codegen.prelude import Family
from flexmod.codegen.spec import Direction, KernelSpec
from flexmod.compiler import Lowered, kernels_for, lower
from flexmod.ir.passes import Extents
from flexmod.ir.trace import Traced, trace

EXTENTS: Extents = (1, 1, 1 << 15, 1 << 15)


@dataclass(frozen=True)
class Variant:
    """`spec` is that of the backward, whose module has the forward too.

    `score_tensors` and `mask_tensors` are what the mods capture, in the order of their graphs' captures;
    `learned` the numbers of those of the score_mod that require grad. `options` are checked kernel_options.
    """

    spec: KernelSpec
    score: Lowered | None
    mask: Lowered | None
    score_tensors: tuple[torch.Tensor, ...] = ()
    mask_tensors: tuple[torch.Tensor, ...] = ()
    learned: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def spec_of(self, direction: Direction) -> KernelSpec:
        return replace(self.spec, backward=direction == "backward")

    def kernels(self, direction: Direction, reduce_in_backward: bool = False, family: Family = "") -> Kernels:
        """The portable kernels of one direction, for a family of chips.

        `reduce_in_backward`: those beside a backward that makes the sums for captures itself.
        """
        grad_captures = self.learned if direction == "backward" else ()
        spec = self.spec_of(direction)
        return kernels_for(
            spec,
            self.score,
            self.mask,
            self.options,
            grad_captures=grad_captures,
            reduce_in_backward=reduce_in_backward,
            family=family,
        )


def variant(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | tuple[int, int] = 128,
    extents: Extents = EXTENTS,
    **facts: Any,
) -> Variant:
    """Trace and lower the mods; the -inf branches of a score_mod without a mask beside it become one.

    `extents` are the largest B, Hq, M and N that index arithmetic must be wide enough for; `facts` further
    fields of the KernelSpec. Raises what tracing raises.
    """
    spec = spec_for(dtype, head_dim, value_dim, block_size, **facts)
    traced = trace(score_mod, "score") if score_mod else None
    return of_traces(traced, trace(mask_mod, "mask") if mask_mod else None, spec, extents)


def spec_for(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int | None = None,
    block_size: int | tuple[int, int] = 128,
    **facts: Any,
) -> KernelSpec:
    """That of a backward with a mask, of one dtype; `facts` are further fields."""
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    return KernelSpec(
        q_dtype=dtype, k_dtype=dtype, v_dtype=dtype, head_dim=head_dim, value_dim=value_dim or head_dim,
        mask_block=block, backward=True, **facts,
    )  # fmt: skip


def of_traces(
    traced: Traced | None,
    of_mask: Traced | None,
    spec: KernelSpec,
    extents: Extents = EXTENTS,
    options: tuple[tuple[str, Any], ...] = (),
) -> Variant:
    """The variant of a traced score_mod and a traced mask_mod; `spec` has the block of a mask in any case.

    It quotes the lines of these mods, whatever equal ones there were.
    """
    score = lower(replace(traced.graph, lines=True), extents, split=of_mask is None) if traced else None
    if traced is not None and score is not None and score.split is not None:
        of_mask = Traced(score.split, tuple(tensor.detach() for tensor in traced.tensors))
    mask = lower(replace(of_mask.graph, lines=True), extents, split=False) if of_mask else None
    tensors = traced.tensors if traced else ()
    changes = score is not None and score.score is not None
    return Variant(
        spec if mask else replace(spec, mask_block=None),
        score,
        mask,
        tensors,
        of_mask.tensors if of_mask else (),
        tuple(n for n, tensor in enumerate(tensors) if tensor.requires_grad) if changes else (),
        options,
    )
