"""Copies of operands that a plan makes first, so that its kernels take less time.

    bias    of pairs of positions, in aligned rows. The TMA unit and vector loads take rows that begin at
            multiples of 16 bytes or elements. Of other rows, each element is a load of its own.
    heads   of keys and values, in a backward. One program has some keys of a head, and all query heads that
            read them. With too few programs for the chip, each of several copies of a head serves some of
            these query heads, and the gradients of the copies are summed up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.arguments import Operands
from flexmod.backends.triton import Found
from flexmod.codegen.compiler import Lowered
from flexmod.codegen.spec import KernelSpec
from flexmod.codegen.variant import ALIGNED, pair_tile
from flexmod.ir.passes import Extents
from flexmod.runtime.plan import Extent, Place, PlanWriter, cdiv, contiguous

# A bias is copied if each element is read READS times or more. Calls of fewer than POSITIONS positions take
# no less time then.
READS, POSITIONS = 4, 65
# Heads are copied until there are PROGRAMS programs for two processors, each with KEYS keys. Programs that
# read fewer than QUERIES queries take less time than the copies.
PROGRAMS, KEYS, QUERIES = 3, 128, 3072


@dataclass(frozen=True)
class CopiedOperands:
    """What a call copies: a capture of its score_mod, by number; how many copies of each head it makes."""

    bias: int | None = None
    heads: int = 1

    def in_place(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns a score_mod's captures, with a stand-in for the copy."""
        return tuple(aligned_like(x) if number == self.bias else x for number, x in enumerate(tensors))

    def begin(self, writer: PlanWriter, call: Operands) -> Operands:
        """Writes the copies; returns the operands with them."""
        if self.bias is not None:
            call = _with_bias(writer, call, self.bias)
        return _with_heads(writer, call, self.heads) if self.heads > 1 else call

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


def copied_bias(
    spec: KernelSpec, score: Lowered, tensors: Sequence[Tensor], extents: Extents
) -> int | None:
    """Returns the number of a capture that kernels read from a copy with aligned rows, or None.

    Its rows alone keep it from being the `pair_tile`. The copy takes as long as three reads of all elements,
    each by a load of its own; the call has these `extents`.
    """
    few = min(extents[2:]) < POSITIONS
    if few or score.checked or pair_tile(spec, score.graph, tensors) is not None:
        return None
    reads = math.prod(extents)
    aligned = [x if x.dim() < 2 or READS * x.numel() > reads else aligned_like(x) for x in tensors]
    return pair_tile(spec, score.graph, aligned)


def copies_of_heads(query: Tensor, key: Tensor, entries: int, processors: int) -> int:
    """Returns how many copies of each head of keys a backward reads; `entries` of the batch count."""
    group = query.shape[1] // key.shape[1]
    if group * query.shape[2] < QUERIES:
        return 1
    programs = entries * key.shape[1] * -(-key.shape[2] // KEYS)
    divisors = (count for count in range(1, group) if group % count == 0)
    return next((count for count in divisors if 2 * count * programs >= PROGRAMS * processors), group)


def aligned_strides(shape: Sequence[Extent]) -> tuple[Extent, ...]:
    """Returns strides of rows that have room for a multiple of ALIGNED elements."""
    return contiguous((*shape[:-1], cdiv(shape[-1], ALIGNED) * ALIGNED))


def aligned_like(tensor: Tensor, device: torch.device | str = "meta") -> Tensor:
    """Returns an empty tensor with aligned rows, by default without memory."""
    strides: Any = aligned_strides(tensor.shape)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)


def in_aligned_rows(tensor: Tensor) -> tuple[Tensor]:
    return (aligned_like(tensor, tensor.device).copy_(tensor.detach()),)


def _with_bias(writer: PlanWriter, call: Operands, number: int) -> Operands:
    captured = call.score_captured
    tensors = list(captured.tensors)
    place = tensors[number]
    copy = Place(f"aligned_{place.name}", place.shape, aligned_strides(place.shape), place.dtype)
    writer.call(in_aligned_rows, (place,), (copy,))
    tensors[number] = copy
    return replace(call, score_captured=captured._replace(tensors=tuple(tensors)))


def repeat_heads(tensor: Tensor, count: int) -> tuple[Tensor]:
    return (tensor.repeat_interleave(count, 1),)


def sum_heads(grad: Tensor, sums: Tensor) -> tuple[()]:
    """Adds neighbouring heads of `grad` in float32, as many as it has for each head of `sums`."""
    torch.sum(grad.unflatten(1, (sums.shape[1], -1)), 2, out=sums)
    return ()


def _with_heads(writer: PlanWriter, call: Operands, count: int) -> Operands:
    made, orders = [], dict(call.orders)
    for place in (call.k, call.v):
        shape = (place.shape[0], place.shape[1] * count, *place.shape[2:])
        copy = Place(f"repeated_{place.name}", shape, contiguous(shape), place.dtype)
        writer.call(repeat_heads, (place, count), (copy,))
        orders[copy.name] = call.orders[place.name]
        made.append(copy)
    return replace(call, k=made[0], v=made[1], orders=orders)
