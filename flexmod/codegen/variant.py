"""Describes a variant of attention without the tensors of a call: lowered mods and a KernelSpec.

`explain`, ahead-of-time builds and standalone files start from it. Constants of the mods stay constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexmod.codegen.compiler import Lowered, kernels_for, lower
from flexmod.codegen.device_functions import Family
from flexmod.codegen.expressions import reads_pair
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.ladder import ENDS_SOON, short_length
from flexmod.codegen.spec import FLOAT8, KERNEL_DTYPES, Direction, KernelSpec
from flexmod.errors import ArgumentTypeError
from flexmod.errors.base import is_size
from flexmod.ir.graph import ExpectedSize, Graph
from flexmod.ir.ops import HALF
from flexmod.ir.passes import Extents
from flexmod.ir.trace import Traced, trace

EXTENTS: Extents = (1, 1, 1 << 15, 1 << 15)
ALIGNED = 16  # portable kernels know of rows that begin at multiples of so many elements


@dataclass(frozen=True)
class Variant:
    """A variant of attention: lowered mods, a KernelSpec and checked kernel_options.

    The `spec` is for the backward, whose module includes the forward; `spec_of` adds what follows from the
    direction and the captured tensors. `score_tensors` and `mask_tensors` are
    the mods' captured tensors, in the order of their graphs' captures. `learned` has the numbers of the
    score_mod's captures that require grad. `score_sizes` and `mask_sizes` are the sizes that the mods were
    made for.
    """

    spec: KernelSpec
    score: Lowered | None
    mask: Lowered | None
    score_tensors: tuple[torch.Tensor, ...] = ()
    mask_tensors: tuple[torch.Tensor, ...] = ()
    learned: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    score_sizes: tuple[ExpectedSize, ...] = ()
    mask_sizes: tuple[ExpectedSize, ...] = ()

    def spec_of(self, direction: Direction) -> KernelSpec:
        spec = replace(self.spec, backward=direction == "backward")
        score = self.score.graph if self.score else None
        return replace(spec, pair_tile=pair_tile(spec, score, self.score_tensors))

    def of_length(self, length: int | None, direction: Direction) -> Variant:
        """Returns the variant for one direction of calls with so many queries and keys; None for many.

        Raises ArgumentTypeError if the length is no size.
        """
        if length is None:
            return self
        ArgumentTypeError.check(is_size(length), "length", length, "give a whole number above 0")
        short = short_length(self.spec_of(direction), length, dict(self.options))
        return replace(self, spec=replace(self.spec, short=short))

    def kernels(
        self,
        direction: Direction,
        reduce_in_backward: bool = False,
        family: Family = "",
        interpreted: bool = False,
    ) -> Kernels:
        """Returns the portable kernels of one direction, for a family of chips or Triton's interpreter.

        `reduce_in_backward`: another family's backward makes the sums for captures itself.
        """
        grad_captures = self.learned if direction == "backward" else ()
        return kernels_for(
            self.spec_of(direction), self.score, self.mask, self.options, interpreted,
            grad_captures, reduce_in_backward, family,
        )  # fmt: skip


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
    """Traces and lowers the mods. Without a mask_mod, the score_mod's -inf branches become a mask.

    `extents`: the largest B, Hq, M and N for index arithmetic. `facts`: further fields of the KernelSpec.
    Raises ArgumentTypeError for an invalid dtype, dimension or block size, and what tracing raises.
    """
    _check(dtype, head_dim, value_dim, block_size)
    spec = spec_for(dtype, head_dim, value_dim, block_size, **facts)
    traced = trace(score_mod, "score") if score_mod is not None else None
    return of_traces(traced, trace(mask_mod, "mask") if mask_mod is not None else None, spec, extents)


def _check(dtype: object, head_dim: object, value_dim: object, block_size: object) -> None:
    sides = block_size if isinstance(block_size, tuple) and len(block_size) == 2 else (block_size,)
    check_dtype(dtype, dtype in (*KERNEL_DTYPES, *FLOAT8))
    check_dim("head_dim", head_dim)
    if value_dim is not None:
        check_dim("value_dim", value_dim)
    right = all(map(is_size, sides))
    ArgumentTypeError.check(right, "block_size", block_size, "give e.g. 128 or (128, 64)")


def check_dtype(dtype: object, right: bool) -> None:
    """Raises ArgumentTypeError if the dtype is not right."""
    advice = "give torch.float16, torch.bfloat16 or torch.float32"
    ArgumentTypeError.check(right, "dtype", dtype, advice)


def check_dim(name: str, value: object) -> None:
    """Raises ArgumentTypeError if a head dimension is no positive int."""
    ArgumentTypeError.check(is_size(value), name, value, "give a whole number above 0, e.g. 64")


def spec_for(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int | None = None,
    block_size: int | tuple[int, int] = 128,
    **facts: Any,
) -> KernelSpec:
    """Returns the spec of a backward with a mask, for one dtype; `facts` are further fields."""
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    spec = KernelSpec(
        q_dtype=dtype, k_dtype=dtype, v_dtype=dtype, head_dim=head_dim, value_dim=value_dim or head_dim,
        mask_block=block, backward=True, **facts,
    )  # fmt: skip
    return spec.of_dtype(dtype)


def of_traces(
    traced: Traced | None,
    of_mask: Traced | None,
    spec: KernelSpec,
    extents: Extents = EXTENTS,
    options: tuple[tuple[str, Any], ...] = (),
) -> Variant:
    """Returns the variant of a traced score_mod and mask_mod; `spec` has a mask's block size in any case.

    Its kernels quote the lines of these mods, even if equal mods came before.
    """
    mask_sizes = of_mask.graph.expected if of_mask else ()
    score = lower(traced.graph.with_lines, extents, split=of_mask is None) if traced else None
    if traced is not None and score is not None and score.split is not None:
        of_mask = Traced(score.split, tuple(tensor.detach() for tensor in traced.tensors))
    mask = lower(of_mask.graph.with_lines, extents, split=False) if of_mask else None
    tensors = traced.tensors if traced else ()
    changes = score is not None and score.graph is not None
    return Variant(
        spec if mask else replace(spec, mask_block=None),
        score,
        mask,
        tensors,
        of_mask.tensors if of_mask else (),
        tuple(n for n, tensor in enumerate(tensors) if tensor.requires_grad) if changes else (),
        options,
        traced.graph.expected if traced else (),
        mask_sizes,
    )


def pair_tile(spec: KernelSpec, score: Graph | None, tensors: Sequence[torch.Tensor]) -> int | None:
    """Returns the number of a score_mod's capture whose tiles kernels may copy, or None.

    The score_mod reads such a tensor once, at [.., q_idx, kv_idx]. It is a float tensor of at most five
    dimensions, whose rows are contiguous and begin at multiples of 16 bytes, or of 16 elements in a short
    call. A tile of it has room beside keys and values.
    """
    loads = [node for node in score.nodes if node.op == "load"] if score else []
    for node in filter(reads_pair, loads):
        number: int = node.value
        once = sum(other.value == number for other in loads) == 1
        if once and _in_tiles(tensors[number], spec) and _has_room(spec, tensors[number].dtype):
            return number
    return None


def _in_tiles(tensor: torch.Tensor, spec: KernelSpec) -> bool:
    # portable kernels serve short calls
    unit = ALIGNED * tensor.itemsize if 0 < spec.short < ENDS_SOON else 16
    return aligned_rows(tensor, tensor.stride()[:-1], unit) and tensor.numel() > 0 and tensor.dim() <= 5


def aligned_rows(tensor: torch.Tensor, strides: Sequence[int], unit: int = 16) -> bool:
    """Are rows contiguous, at multiples of `unit` bytes? The other dimensions have these `strides`."""
    aligned = all(stride > 0 and stride * tensor.itemsize % unit == 0 for stride in strides)
    return aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0


def _has_room(spec: KernelSpec, dtype: torch.dtype) -> bool:
    small = max(spec.head_tile, spec.value_tile) <= 128
    fits = dtype in HALF and small if spec.backward else dtype in HALF or dtype is torch.float32 and small
    return fits and spec.q_dtype in HALF
