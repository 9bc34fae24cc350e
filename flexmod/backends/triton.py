"""Writes plans for the portable kernels, which run on a GPU or in the interpreter.

The compiler makes `Kernels` for a `kernel_spec`. `forward` and `backward` write the allocations and launches,
with a tile for each kernel that has a ladder. Shapes as in `arguments.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexmod.backends import decoding
from flexmod.backends.arguments import (
    Arguments,
    BackwardInputs,
    Operands,
    Problem,
    block_of,
    grad_lse_arguments,
    grid,
    mask_arguments,
    sizes,
    strided,
    value_scale_arguments,
)
from flexmod.backends.captured import sums_along_diagonals, sums_of_elements
from flexmod.backends.decoding import ForwardTarget
from flexmod.backends.options import PORTABLE
from flexmod.codegen import cache
from flexmod.codegen.kernels import Kernels, ModText
from flexmod.codegen.ladder import short_length
from flexmod.codegen.spec import (
    FLOAT8,
    LARGE,
    Decoding,
    KernelName,
    KernelSpec,
    statistics_rows,
)
from flexmod.codegen.variant import ALIGNED
from flexmod.ir.derivative import Along
from flexmod.runtime.plan import Extent, Place, PlanWriter, contiguous

# What `statistics_kernel` reads and writes besides DELTA, for kernels that weigh by the lse.
NO_WEIGHTS: Arguments = dict.fromkeys(("LSE2", "ROW_MAX", "REST", "ROW_MAXIMA", "LARGE"))


Rungs = Mapping[Any, Any]
"""By the names of kernels: the rung of its ladder that each is launched with."""
Sums = dict[Along, list[Place]]


class Found(NamedTuple):
    """A backward's results: the requested gradients, and the sums of captured tensors' terms."""

    query: Place | None
    key: Place | None
    value: Place | None
    sums: Sums


def kernel_spec(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, backward: bool, few: Decoding | None = None
) -> KernelSpec:
    """Returns the KernelSpec of a call; `few`: see `decoding.decoding`."""
    mask, out_dtype = problem.mask, problem.out_dtype
    spec = KernelSpec(
        q_dtype=q.dtype,
        k_dtype=k.dtype,
        v_dtype=v.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        mask_block=None if mask is None else block_of(mask),
        mask_form="runs" if mask is None else mask.storage.form,
        full_tiles_padded=mask is not None and mask.full_tiles_padded,
        precision=problem.precision if q.dtype is torch.float32 else "ieee",
        positive_scale=problem.scale > 0,
        shared_kv=backward and q.shape[:2] != k.shape[:2],
        backward=backward,
        out_dtype=None if out_dtype is q.dtype else out_dtype,
        value_scale=problem.value_scale is not None,
        decoding=few,
    )
    longest = max(q.shape[2], k.shape[2])
    return replace(spec, short=short_length(spec, longest, dict(problem.options)))


@lru_cache(cache.KEPT)
def of_half_values(kernels: Kernels) -> Kernels:
    """Returns the kernels with values in float16 in place of float8, which it holds exactly.

    Kernels for few queries read each value once, and convert it themselves.
    """
    spec = kernels.spec
    if spec.v_dtype not in FLOAT8 or spec.decoding is not None:
        return kernels
    return replace(kernels, spec=replace(spec, v_dtype=torch.float16))


def half_values(value: Tensor) -> tuple[Tensor]:
    """Returns float8 values [B, H, N, DV] in float16, contiguous."""
    from flexmod.runtime.dequantize import dequantized  # imports Triton

    return (dequantized(value, None, torch.float16, torch.contiguous_format),)


def forward(
    writer: PlanWriter,
    kernels: Kernels,
    call: Operands,
    tiles: Rungs,
    *,
    want_max: bool = False,
    keep: bool = False,
) -> tuple[Place | None, ...]:
    """Writes the plan of a forward; returns the places of out, lse and the row maximum.

    A large lse is too coarse for a backward, since it is one rounded number. With `keep` the forward returns
    two more numbers for each row.

    Raises BlockMaskPartsError, like `mask_arguments`.
    """
    out, lse, max_scores, *kept = made = call.results(writer, kernels.kept, want_max, keep)
    assert out is not None
    statistics = {"LSE": lse, **dict(zip_longest(kernels.kept, kept))}
    target = ForwardTarget(call, out, max_scores, statistics, call.q.shape[0])
    if kernels.spec.decoding is not None:
        target = decoding.begin(writer, kernels, target)
        call = target.call
    value = call.v
    if value.dtype != kernels.spec.v_dtype:
        value = Place("half_value", value.shape, contiguous(value.shape), torch.float16)
        writer.call(half_values, (call.v,), (value,))
    arguments = {
        **strided("Q", "q", "m", call.q),
        **strided("K", "k", "n", call.k),
        **strided("V", "v", "n", value),
        **strided("OUT", "o", "m", target.out),
        "MAX_SCORES": target.max_scores,
        **target.statistics,
        **mask_arguments(writer, call.mask, "kv"),
        **kernels.mod_arguments("forward", call.score_captured, call.mask_captured),
        **value_scale_arguments(call.value_scale),
        **sizes(call),
    }
    tile = tiles["forward"]
    _, heads, length, _ = call.extents
    writer.launch(kernels, "forward", grid(target.entries, heads, length, tile.block_m), arguments, tile)
    if kernels.spec.split:
        decoding.finish(writer, kernels, target, made)
    return made


def backward(
    writer: PlanWriter,
    kernels: Kernels,
    call: Operands,
    incoming: BackwardInputs,
    needs: tuple[bool, bool, bool],
    tiles: Rungs,
    *_: Tensor,
) -> Found:
    """Writes the gradients of q, k and v that `needs` asks for, and the sums in `kernels.captures`.

    The strides of grad_out may be 0.

    Raises BlockMaskPartsError: the mask has no lists by column, and a gradient needs them.
    """
    batch, heads, length, keys = call.extents
    captures, lse, spec = kernels.captures, incoming.lse, kernels.spec
    by_key = needs[1] or needs[2] or captures.column
    # in a short call the kernel for dK and dV can make dQ, if its tile has all keys, and delta for itself
    can_make_q = spec.short and not (captures.row or spec.mask_block)
    with_q = can_make_q and by_key and tiles["dkdv"].block_n >= spec.short
    alone = with_q and spec.makes_delta and not (captures.diagonal or captures.element)
    delta = None if alone else writer.like("delta", lse)
    by_lse = kernels.small_scores and not spec.exact
    weights: dict[str, Place] = (
        {"LSE2": lse if delta is None else writer.like("lse2", lse)}
        if by_lse
        else dict(zip(kernels.kept, incoming.kept, strict=True))
    )
    grad_q = grad_k = grad_v = None
    sums: Sums = {}
    shared = _of_backward(call, incoming.grad_out, {**weights, "DELTA": delta})
    launches = _Launches(writer, kernels, call, tiles, shared)
    if spec.exact:
        launches.by_row("delta", grad_lse_arguments(incoming.grad_lse))
    elif delta is not None:
        programs, given = statistics_arguments(spec, incoming, delta, length, weights if by_lse else {})
        writer.launch(kernels, "statistics", programs, given)
    if needs[0] or captures.row:
        grad_q = call.like(writer, "grad_query", call.q) if needs[0] else None
        if not with_q:
            sums["row"] = launches.by_query(grad_q)
    if by_key:
        # without captured terms the kernel always computes both gradients
        both = not captures.column
        dtype = torch.float32 if call.copied_heads else None
        grad_k = call.like(writer, "grad_key", call.k, dtype) if needs[1] or both else None
        grad_v = call.like(writer, "grad_value", call.v, dtype) if needs[2] or both else None
        columns, sums["column"] = sum_buffers(writer, captures.column, (batch, heads, keys))
        shared_batch, shared_heads = call.k.shape[:2]
        own = {
            **launches.arguments("dkdv"),
            **strided("GRAD_K", "dk", "n", grad_k),
            **strided("GRAD_V", "dv", "n", grad_v),
            **(strided("GRAD_Q", "dq", "m", grad_q if with_q else None) if can_make_q else {}),
            **(grad_lse_arguments(incoming.grad_lse if alone else None) if can_make_q else {}),
            **columns,
            **({"BATCHES": batch // shared_batch} if spec.shared_kv else {}),
        }
        tile = tiles["dkdv"]
        writer.launch(kernels, "dkdv", grid(shared_batch, shared_heads, keys, tile.block_n), own, tile)
    sums |= launches.apart()
    return Found(grad_q, grad_k if needs[1] else None, grad_v if needs[2] else None, sums)


def sums_beside(
    writer: PlanWriter,
    kernels: Kernels,
    call: Operands,
    grad_out: Place,
    statistics: Mapping[str, Place],
    tiles: Rungs,
) -> Sums:
    """Writes the sums in `kernels.captures`, except sums by column, which other kernels make.

    `statistics` are arguments, [B, Hq, M] float32: DELTA from `statistics_kernel`, and LSE2 or the tensors
    that the forward kept. Raises the errors of `backward`.
    """
    launches = _Launches(writer, kernels, call, tiles, _of_backward(call, grad_out, statistics))
    rows: Sums = {"row": launches.by_query(None)} if kernels.captures.row else {}
    return rows | launches.apart()


def _of_backward(call: Operands, grad_out: Place, statistics: Mapping[str, Place | None]) -> Arguments:
    """Returns the arguments that all kernels of a backward have."""
    return {
        **strided("Q", "q", "m", call.q),
        **strided("K", "k", "n", call.k),
        **strided("V", "v", "n", call.v),
        **strided("GRAD_OUT", "g", "m", grad_out),
        **statistics,
        **sizes(call),
    }


class _Launches(NamedTuple):
    """Writes launches of backward kernels. `shared`: the arguments of all."""

    writer: PlanWriter
    kernels: Kernels
    call: Operands
    tiles: Rungs
    shared: Arguments

    def arguments(self, kernel: KernelName) -> Arguments:
        """Returns a kernel's arguments without results."""
        call = self.call
        axis: Literal["q", "kv"] = "q" if kernel == "dkdv" else "kv"
        lists = {} if kernel == "diagonal" else mask_arguments(self.writer, call.mask, axis)
        mods = self.kernels.mod_arguments(kernel, call.score_captured, call.mask_captured)
        return {**self.shared, **lists, **mods}

    def by_row(self, kernel: KernelName, own: Arguments) -> None:
        """Writes a launch with programs for tiles of queries, and `own` arguments besides."""
        batch, heads, length, _ = self.call.extents
        given, tile = {**self.arguments(kernel), **own}, self.tiles[kernel]
        self.writer.launch(self.kernels, kernel, grid(batch, heads, length, tile.block_m), given, tile)

    def by_query(self, grad_q: Place | None) -> list[Place]:
        """Writes the launch of dq_kernel, which fills `grad_q`, if any, and makes the sums by row."""
        rows, sums = sum_buffers(self.writer, self.kernels.captures.row, self.call.extents[:3])
        self.by_row("dq", {**strided("GRAD_Q", "dq", "m", grad_q), **rows})
        return sums

    def apart(self) -> Sums:
        """Writes the sums that have their own kernels."""
        sums: Sums = {}
        of_call = self.writer, self.kernels, self.call
        if self.kernels.captures.diagonal:
            given, tile = self.arguments("diagonal"), self.tiles["diagonal"]
            sums["diagonal"] = sums_along_diagonals(*of_call, given, tile)
        if self.kernels.captures.element:
            sums["element"] = sums_of_elements(*of_call, self.arguments("scatter"), self.tiles["scatter"])
        return sums


def sum_buffers(
    writer: PlanWriter, text: ModText | None, shape: tuple[Extent, ...]
) -> tuple[Arguments, list[Place]]:
    """Allocates a [B, Hq, length] buffer for each term of a text; returns arguments, and places in order."""
    terms = text.terms if text else ()
    buffers = [writer.empty(term.sums.lower(), shape) for term in terms]
    return {term.sums: buffer for term, buffer in zip(terms, buffers, strict=True)}, buffers


def statistics_arguments(
    spec: KernelSpec, incoming: BackwardInputs, delta: Place, pitch: Extent, weights: Mapping[str, object]
) -> tuple[Extent, Arguments]:
    """Returns grid and arguments of the kernel that fills delta, [B, Hq, pitch] float32, and `weights`.

    `weights` has some of the names in NO_WEIGHTS: for small scores LSE2 only.
    """
    batch, heads, length = incoming.lse.shape
    rows = statistics_rows(spec)
    arguments = {
        **strided("OUT", "o", "m", incoming.out),
        **strided("GRAD_OUT", "g", "m", incoming.grad_out),
        "LSE": incoming.lse,
        **NO_WEIGHTS,
        **weights,
        **grad_lse_arguments(incoming.grad_lse),
        "DELTA": delta,
        "HQ": heads,
        "M": length,
        "PITCH": pitch,
        "DV": spec.value_dim,
        "DV_TILE": spec.value_tile,
        "FROM": LARGE,
        "BLOCK_M": rows,
    }
    return grid(batch, heads, pitch, rows), arguments


class PortableFamily:
    """The portable kernels as a family, see `families.Family`. They take every call."""

    name, title, target = PORTABLE, "portable Triton kernels", ""
    reduce_in_backward = reads_order = False
    kernels = staticmethod(of_half_values)
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    def obstacle(self, *_: Any, **__: Any) -> None:
        return None

    call_obstacle = obstacle

    def aligned_bytes(self, dtype: torch.dtype) -> int:
        return ALIGNED * dtype.itemsize
