"""Copies of operands that a plan makes first, so that its kernels take less time.

    rows    of query, key, value and the output's gradient, and of a bias of pairs of positions. The TMA unit
            and vector loads take rows that begin at multiples of 16 bytes or elements. Of other rows, each
            element is a load of its own.
    heads   of keys and values, in a backward. One program has some keys of a head, and all query heads that
            read them. With too few programs for the chip, each of several copies of a head serves some of
            these query heads, and the gradients of the copies are summed up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.arguments import Operands
from flexmod.backends.triton import Found
from flexmod.codegen.compiler import Lowered
from flexmod.codegen.spec import Direction, KernelSpec
from flexmod.codegen.variant import ALIGNED, Variant, aligned_rows, pair_tile
from flexmod.ir.passes import Extents
from flexmod.runtime.plan import Extent, Place, PlanWriter, cdiv, contiguous

# A bias is copied if each element is read READS times or more, where a mask is taken to keep one pair of
# MASKED. Calls of fewer than POSITIONS positions take no less time then. Other tensors are copied from LONG
# queries and keys on. Of the keys in a cache, a mask may keep only as many as there are queries. Then kernels
# read fewer rows than a copy of more than 2 * queries**2 / LONG keys.
READS, MASKED, POSITIONS, LONG = 4, 4, 65, 512
# Heads are copied until there are PROGRAMS programs for two processors, each with KEYS keys. Programs that
# read fewer than QUERIES queries take less time than the copies.
PROGRAMS, KEYS, QUERIES = 3, 128, 3072
LARGE_BATCH = 2**20  # entries read each element of any bias often enough for a copy


@dataclass(frozen=True)
class CopiedOperands:
    """What a call copies for the kernels of any family.

        bias     the number of a capture of its score_mod, or None
        heads    how many copies it makes of each head of keys and values
    """

    bias: int | None = None
    heads: int = 1

    def as_read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns a score_mod's captures as kernels read them: the copy of `bias` is a stand-in."""
        numbered = enumerate(tensors)
        return tuple(aligned(x.shape, x.dtype) if number == self.bias else x for number, x in numbered)

    def begin(
        self,
        writer: PlanWriter,
        call: Operands,
        tensors: tuple[Tensor, Tensor, Tensor],
        unit: Callable[[torch.dtype], int],
    ) -> Operands:
        """Writes the copies; returns the operands with them.

        `tensors` are query, key and value. Rows in a dtype are aligned at multiples of `unit(dtype)` bytes.
        """
        query, key, _ = tensors
        places, orders = [call.q, call.k, call.v], dict(call.orders)
        for number, heads in enumerate((1, self.heads, self.heads)):
            if heads > 1 or is_copied(tensors[number], query, key, unit(tensors[number].dtype)):
                order = orders[places[number].name]
                places[number] = copied_rows(writer, places[number], heads)
                orders[places[number].name] = order
        copied_heads = self.heads > 1
        call = replace(call, q=places[0], k=places[1], v=places[2], orders=orders, copied_heads=copied_heads)
        if self.bias is None:
            return call
        captures = list(call.score_captured.tensors)
        captures[self.bias] = copied_rows(writer, captures[self.bias])
        return replace(call, score_captured=call.score_captured._replace(tensors=tuple(captures)))

    def end(self, writer: PlanWriter, call: Operands, found: Found) -> Found:
        """Writes the gradients of the operands: sums over their copies."""
        if self.heads == 1:
            return found
        sums: list[Place | None] = []
        for place, grad in ((call.k, found.key), (call.v, found.value)):
            made = None if grad is None else call.like(writer, f"sum_grad_{place.name}", place)
            sums.append(made)
            if made is not None:
                writer.call(sum_heads, (grad, made))
        return found._replace(key=sums[0], value=sums[1])


def is_copied(tensor: Tensor, query: Tensor, key: Tensor, unit: int) -> bool:
    """Do kernels read this tensor [B, H, length, dim] of a call from a copy with aligned rows?

    They read rows fast that begin at multiples of `unit` bytes. Portable kernels read columns of positions as
    fast. A copy of a tensor that overlaps would take more memory than it. No vector load takes rows of an odd
    number of elements.
    """
    queries, keys = query.shape[2], key.shape[2]
    rarely_read = min(queries, keys) < LONG or keys * LONG > 2 * queries**2
    if rarely_read or tensor.shape[3] % 2 or overlaps(tensor):
        return False
    return not (has_aligned_rows(tensor, unit) or has_aligned_rows(tensor.mT, unit))


def has_aligned_rows(tensor: Tensor, unit: int) -> bool:
    """Are the rows of [B, H, length, dim] contiguous, and do they begin at multiples of `unit` bytes?"""
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return aligned_rows(tensor, strides, unit)


def overlaps(tensor: Tensor) -> bool:
    """May elements share memory, as in a tensor from `expand` or `unfold`?"""
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * (size - 1)
    return False


def copied_bias(
    spec: KernelSpec, score: Lowered, tensors: Sequence[Tensor], extents: Extents
) -> int | None:
    """Returns the number of a capture that kernels read from a copy with aligned rows, or None.

    Only its strides and its start keep it from being the `pair_tile`. The copy takes as long as three reads
    of all elements, each by a load of its own; the call has these `extents`. A copy of a tensor that overlaps
    could take thousands of times its memory.
    """
    few = min(extents[2:]) < POSITIONS
    if few or score.checked or pair_tile(spec, score.graph, tensors) is not None:
        return None
    reads = math.prod(extents) // (MASKED if spec.mask_block else 1)
    often = (x.dim() > 1 and not overlaps(x) and READS * x.numel() <= reads for x in tensors)
    copies = [aligned(x.shape, x.dtype) if copy else x for x, copy in zip(tensors, often, strict=True)]
    return pair_tile(spec, score.graph, copies)


def with_copied_bias(made: Variant, direction: Direction, length: int) -> Variant | None:
    """Returns the variant of calls with so many queries and keys that copy a bias, or None if none do."""
    if made.score is None:
        return None
    extents = (LARGE_BATCH, 1, length, length)
    number = copied_bias(made.spec_of(direction), made.score, made.score_tensors, extents)
    if number is None:
        return None
    return replace(made, score_tensors=CopiedOperands(number).as_read(made.score_tensors))


def copies_of_heads(query: Tensor, key: Tensor, alone: bool, processors: int) -> int:
    """Returns how many copies of each head of keys a backward reads; `alone`: of one entry of the batch."""
    group = query.shape[1] // key.shape[1]
    if group * query.shape[2] < QUERIES or key.shape[0] * key.shape[2] == 0:
        return 1
    programs = (1 if alone else key.shape[0]) * key.shape[1] * -(-key.shape[2] // KEYS)
    wanted = -(-PROGRAMS * processors // (2 * programs))
    # a group of a prime number has no other divisor, and may be far too many
    divisors = [count for count in range(1, min(group, 4 * wanted) + 1) if group % count == 0]
    return next((count for count in divisors if count >= wanted), divisors[-1])


def aligned_strides(shape: Sequence[Extent]) -> tuple[Extent, ...]:
    """Returns strides of rows that have room for a multiple of ALIGNED elements."""
    return contiguous((*shape[:-1], cdiv(shape[-1], ALIGNED) * ALIGNED))


def aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "meta") -> Tensor:
    """Returns an empty tensor with aligned rows, by default without memory."""
    strides: Any = aligned_strides(shape)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)


def in_aligned_rows(tensor: Tensor, heads: int) -> tuple[Tensor]:
    """Returns a copy with aligned rows; `heads` copies of each part of dimension 1 follow one another."""
    first, second, *rest = tensor.shape
    copy = aligned((first, second * heads, *rest), tensor.dtype, tensor.device)
    copy.unflatten(1, (second, heads)).copy_(tensor.detach().unsqueeze(2))
    return (copy,)


def sum_heads(grad: Tensor, sums: Tensor) -> tuple[()]:
    """Adds neighbouring heads of `grad`, as many as it has for each head of `sums`, in float32."""
    torch.sum(grad.unflatten(1, (sums.shape[1], -1)), 2, out=sums)
    return ()


def copied_rows(writer: PlanWriter, place: Place, heads: int = 1) -> Place:
    """Writes a copy with aligned rows, and `heads` copies of each head."""
    first, second, *rest = place.shape
    shape = (first, second * heads, *rest)
    copy = Place(f"aligned_{place.name}", shape, aligned_strides(shape), place.dtype)
    writer.call(in_aligned_rows, (place, heads), (copy,))
    return copy
