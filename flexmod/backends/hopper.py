"""Writes plans for the kernels of `codegen/hopper.py`. Shapes as in `arguments.py`.

The programs of the backward add to dQ in memory in any order, so two runs may differ in its last bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from flexmod.backends import arguments as call_arguments
from flexmod.backends import triton
from flexmod.backends.arguments import (
    Arguments,
    BackwardInputs,
    Operands,
    block_of,
    copied,
    dense,
    grid,
    mask_arguments,
    mask_strides,
    sizes,
    strided,
    value_scale_arguments,
)
from flexmod.backends.captured import element_buffers
from flexmod.backends.copies import has_aligned_rows, is_copied
from flexmod.backends.triton import Found, Rungs
from flexmod.block_mask.storage import Axis, MaskSnapshot
from flexmod.codegen.hopper import (
    NAME,
    ROOM,
    TARGET,
    BackwardShape,
    ForwardShape,
    HopperKernels,
    hopper_kernels,
    spec_obstacle,
    stepped,
    sum_block,
    sum_row,
    wide,
)
from flexmod.codegen.spec import Direction, option
from flexmod.codegen.variant import Variant
from flexmod.runtime.direct import COUNTER
from flexmod.runtime.plan import Descriptor, Extent, Place, PlanWriter, Size, cdiv, if_several, least

# kernel_options for the portable template's kernels
TILE_OPTIONS: Mapping[Direction, tuple[str, ...]] = {
    "forward": ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"),
    "backward": ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages"),
}
# The most queries in a backward's tile.
TALLEST = 128
BYTES = 16  # The TMA unit addresses multiples of these.
# Queries in one block of dQ's sums, which keeps the order of registers.
SUMMED = 64
# Up to this many programs on each processor a backward starts long ones first. With more programs, neighbours
# that share queries in the L2 matter more: see docs/measurements.md.
ORDERED = 16
# Parameters of `steps_kernel` for a mask of runs and for one of lists, of which a mask has one.
NO_BLOCKS: Arguments = {
    **dict.fromkeys(("KV_ROWS", "KV_RUNS", "KV_NUM_BLOCKS", "KV_INDICES")), "kv_slots": 0,
    **dict.fromkeys(("FULL_KV_NUM_BLOCKS", "FULL_KV_INDICES")), "full_kv_slots": 0,
}  # fmt: skip


def obstacle(
    variant: Variant, direction: Direction, target: str, *, deterministic: bool = False
) -> str | None:
    """Returns why the kernels for Hopper cannot serve a variant on a chip, see `families.Family`."""
    if target != TARGET:
        return f"{target} is no Hopper chip ({TARGET})"
    if (why := spec_obstacle(variant.spec_of(direction), direction)) is not None:
        return why
    options = dict(variant.options)

    def given(name: str) -> Any:
        return option(options, direction, name, None)

    for name in TILE_OPTIONS[direction]:
        if given(name) is not None:
            return f"kernel option {name} speaks of the portable template"
    if direction == "backward" and (deterministic or given("deterministic")):
        return "a deterministic backward: Hopper's adds up dQ in any order"
    return None


def call_obstacle(q: Tensor, k: Tensor, v: Tensor, by_column: MaskSnapshot | None = None) -> str | None:
    """Returns why the kernels cannot take these tensors, or None if they can.

    `by_column`: the mask, if the call needs its lists by column.
    """
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if not (addressable(tensor) or is_copied(tensor, q, k, BYTES)):
            return f"{name}'s rows, heads or storage are not at multiples of 16 bytes"
    rows: Any = q.shape[0] * q.shape[1] * _pitch(q.shape[2], by_column)
    if rows >= 2**31:
        return "2^31 rows of queries or more"
    if by_column is not None and not by_column.storage.by_column:
        return "block_mask has no q_num_blocks and q_indices"
    return None


def addressable(tensor: Tensor) -> bool:
    """Returns whether the TMA unit can address it: contiguous rows that begin at multiples of 16 bytes."""
    return has_aligned_rows(tensor, BYTES)


def forward(
    writer: PlanWriter,
    kernels: HopperKernels,
    call: Operands,
    rungs: Rungs,
    *,
    want_max: bool = False,
    keep: bool = False,
) -> tuple[Place | None, ...]:
    """Writes the plan of a forward, see `triton.forward`. `call_obstacle` must return None for the call."""
    batch, heads, length, _ = call.extents
    shape: ForwardShape = rungs["forward"]
    spec, q, k, v = kernels.spec, call.q, call.k, call.v
    out, lse, max_scores, *kept = made = call.results(writer, kernels.portable.kept, want_max, keep)
    assert out is not None
    arguments = {
        "K": tiles(k, shape.block_n, spec.head_tile),
        "V": _values(writer, kernels, v, shape.block_n),
        "Q": tiles(q, 64, spec.head_tile),
        "OUT": tiles(out, 64, spec.value_tile),
        "LSE": lse,
        **dict(zip_longest(kernels.portable.kept, kept)),
        "MAX_SCORES": max_scores,
        "COUNTER": COUNTER,
        **_blocks(writer, kernels, call, shape),
        **kernels.portable.mod_arguments("forward", call.score_captured, call.mask_captured, of_family=True),
        **_pair_tiles(kernels, call, 64, shape.block_n),
        **value_scale_arguments(call.value_scale),
        **sizes(call),
        "B": batch,
        "KV_B": k.shape[0],
    }
    programs = least(shape.programs * Size("PROCESSORS"), grid(batch, heads, length, shape.block_m))
    writer.launch(kernels, "forward", programs, arguments, shape)
    return made


def _values(writer: PlanWriter, kernels: HopperKernels, v: Place, block_n: int) -> Descriptor:
    """Describes the forward's values. A launch copies those in float8: the matrix unit reads them by keys."""
    spec = kernels.spec
    if spec.v_dtype not in ROOM:
        return tiles(v, block_n, spec.value_tile)
    batch, heads, keys, dim = v.shape
    by_keys = writer.empty("value_by_keys", (batch, heads, dim, cdiv(keys, 128) * 128), v.dtype)
    arguments = {**strided("V", "v", "n", v), "V_BY_KEYS": by_keys, "HKV": heads, "N": keys}
    arguments |= {"DV": dim, "DV_TILE": spec.value_tile}
    writer.launch(kernels, "values", grid(batch, heads, keys, 128), arguments)
    return tiles(by_keys, spec.value_tile, block_n)


def _pair_tiles(kernels: HopperKernels, call: Operands, rows: int, columns: int) -> Arguments:
    """Describes the captured tensor of which kernels copy tiles."""
    of_tile = kernels.score.pair_tile if kernels.score else None
    if of_tile is None:
        return {}
    captured = call.score_captured.tensors[of_tile.index]
    block = (*[1] * len(of_tile.at), rows, columns)
    return {of_tile.name: Descriptor(captured, captured.shape, captured.strides, block)}


def _blocks(writer: PlanWriter, kernels: HopperKernels, call: Operands, shape: Any) -> Arguments:
    """Returns the forward's arguments for the mask. On float8, a launch writes the steps of each tile."""
    given = mask_arguments(writer, call.mask, "kv")
    if not stepped(kernels.spec):
        return given | _order(call.mask, "kv")
    rows: Any = given.get("KV_ROWS", given.get("KV_NUM_BLOCKS"))
    _, _, length, keys = call.extents
    assert kernels.spec.mask_block is not None
    sizes = (*rows.shape[:2], cdiv(length, shape.block_m), 1 + cdiv(keys, shape.block_n))
    steps = writer.empty("steps", sizes, torch.int32)
    blocks = {name: value for name, value in given.items() if not name.startswith("stride")}
    arguments = {**NO_BLOCKS, **blocks, "KV_STEPS": steps, "ROWS": rows.shape[2], "M": length, "N": keys}
    arguments |= dict(zip(("Q_BLOCK", "KV_BLOCK"), kernels.spec.mask_block, strict=True))
    arguments |= {"CONSUMERS": shape.consumers, "BLOCK_N": shape.block_n}
    writer.launch(kernels, "steps", math.prod(sizes[:3]), arguments)
    return {"KV_STEPS": steps, **mask_strides(sizes[:3])}


def backward(
    writer: PlanWriter,
    kernels: HopperKernels,
    call: Operands,
    incoming: BackwardInputs,
    needs: tuple[bool, bool, bool],
    rungs: Rungs,
    key: Tensor,
    grad_out: Tensor,
) -> Found:
    """Writes the gradients of q, k and v that `needs` asks for, and the sums for captures.

    The kernel of dK and dV makes the sums in `captures.column` and `captures.added`; portable kernels make
    the others.
    """
    if not addressable(grad_out):
        incoming = incoming._replace(grad_out=dense(writer, incoming.grad_out))
    shape: BackwardShape = rungs["backward"]
    spec, q, k, v = kernels.spec, call.q, call.k, call.v
    batch, heads, length, keys = call.extents
    kv_batch, kv_heads = k.shape[:2]
    pitch = _pitch(length, call.mask)
    summands = 2 if call.copied_heads else 1
    grad_k = call.like(writer, "grad_key", k, heads=summands)
    grad_v = call.like(writer, "grad_value", v, heads=summands)
    rows = batch * heads * pitch
    lse2, delta = writer.empty("lse2", (rows,)), writer.empty("delta", (rows,))
    row = sum_row(spec.head_tile)
    blocks = (rows // SUMMED, SUMMED * spec.head_dim // row, row)
    # the flags of heads follow dQ's sums, so that one fill sets both to zero
    zeros = writer.empty("zeros", (math.prod(blocks) + batch * heads,), zeros=True)
    sum_grad_q = writer.view("sum_grad_query", zeros, blocks)
    saved: dict[str, Place] = {}
    made: dict[str, Place] = {}
    if not kernels.portable.small_scores:
        saved = dict(zip(kernels.portable.kept, incoming.kept, strict=True))
        large = writer.view("large", zeros, (batch * heads,), offset=math.prod(blocks))
        made = {"ROW_MAXIMA": writer.like("row_maxima", lse2), "LARGE": large}
    buffers, sums = _sums(writer, kernels, call)
    weights = {"LSE2": lse2, **saved, **made}
    programs, statistics = triton.statistics_arguments(spec, incoming, delta, pitch, weights)
    writer.launch(kernels, "statistics", programs, statistics)
    count: Any = key.shape[0] * key.shape[1] * cdiv(key.shape[2], 128)
    order = _order(call.mask, "q", count <= ORDERED * call_arguments.processors(key.device))
    arguments = {
        "Q": tiles(q, shape.block_m, spec.head_tile),
        "K": tiles(k, shape.block_n, spec.head_tile),
        "V": tiles(v, shape.block_n, spec.value_tile),
        "GRAD_OUT": tiles(incoming.grad_out, shape.block_m, spec.value_tile),
        "LSE2": Descriptor(lse2, lse2.shape, (1,), (shape.block_m,)),
        "DELTA": Descriptor(delta, delta.shape, (1,), (shape.block_m,)),
        # consumers add one block at a time
        "SUM_GRAD_Q": Descriptor(
            sum_grad_q, sum_grad_q.shape, sum_grad_q.strides, sum_block(spec.head_tile, shape.block_m)
        ),
        **buffers,
        **made,
        "GRAD_K": tiles(grad_k, 64, spec.head_tile),
        "GRAD_V": tiles(grad_v, 64, spec.value_tile),
        **mask_arguments(writer, call.mask, "q"),
        **order,
        **kernels.portable.mod_arguments("dkdv", call.score_captured, call.mask_captured, of_family=True),
        **_pair_tiles(kernels, call, shape.block_m, shape.block_n),
        **sizes(call),
        "B": batch,
        "KV_B": kv_batch,
        "PITCH": pitch,
        "SUMMANDS": summands,
    }
    # whole blocks if the mask has an order: see `count_tiles`
    whole = spec.mask_block[1] if spec.mask_block and order.get("Q_ORDER") is not None else 1
    programs = grid(kv_batch, kv_heads, cdiv(keys, whole) * whole, shape.block_n)
    writer.launch(kernels, "backward", programs, arguments, shape)
    grad_q = _rounded(writer, kernels, call, sum_grad_q, pitch) if needs[0] else None
    other_sums: triton.Sums = {}
    if kernels.portable.captures.besides_columns:
        by_row = {"DELTA": _rows_of(writer, delta, call, pitch)}
        by_row |= saved or {"LSE2": _rows_of(writer, lse2, call, pitch)}
        other_sums = triton.sums_beside(writer, kernels.portable, call, incoming.grad_out, by_row, rungs)
    return Found(grad_q, grad_k if needs[1] else None, grad_v if needs[2] else None, {**other_sums, **sums})


def _rounded(writer: PlanWriter, kernels: HopperKernels, call: Operands, sums: Place, pitch: Extent) -> Place:
    """Writes the launch that makes dQ of its sums."""
    spec = kernels.spec
    batch, heads, length, _ = call.extents
    grad_q = call.like(writer, "grad_query", call.q)
    arguments = {
        "SUM_GRAD_Q": sums,
        **strided("GRAD_Q", "dq", "m", grad_q),
        "scale": call.scale,
        "HQ": heads,
        "M": length,
        "PITCH": pitch,
        "D": spec.head_dim,
        "D_TILE": spec.head_tile,
    }
    writer.launch(kernels, "round", grid(batch, heads, length, SUMMED), arguments)
    return grad_q


def _rows_of(writer: PlanWriter, padded: Place, call: Operands, pitch: Extent) -> Place:
    """Returns a view [B, Hq, M] of numbers in rows of `pitch`."""
    batch, heads, length, _ = call.extents
    made = Place(f"{padded.name}_rows", (batch, heads, length), (), padded.dtype)
    writer.call(copied, (padded, made.shape, (heads * pitch, pitch, 1)), (made,))
    return made


def _sums(writer: PlanWriter, kernels: HopperKernels, call: Operands) -> tuple[Arguments, triton.Sums]:
    """Allocates the fused kernel's sums for captures; returns arguments, and places by axis of the sum."""
    captures = kernels.portable.captures
    batch, heads, length, keys = call.extents
    arguments: Arguments = {}
    sums: triton.Sums = {"column": [], "diagonal": []}
    for term in captures.column.terms if captures.column else ():
        places = keys if term.along == "column" else length + keys - 1
        grows = term.along == "diagonal" or wide(kernels.spec)
        arguments[term.sums] = buffer = writer.empty(term.sums.lower(), (batch, heads, places), zeros=grows)
        sums[term.along].append(buffer)
    if captures.added:
        made = element_buffers(writer, captures.added, call)
        sums["element"] = list(made.values())
        arguments |= made
    return arguments, sums


def _order(mask: MaskSnapshot | None, axis: Axis, wanted: bool = True) -> Arguments:
    runs = mask.storage.runs(axis) if mask else None
    return {} if runs is None else {f"{axis.upper()}_ORDER": runs.order if wanted else None}


def tiles(tensor: Place, rows: int, dims: int) -> Descriptor:
    """Describes a [B, H, length, dim] tensor in tiles of `rows` x `dims` of one head; zeros past an end."""
    # a dimension of size 1 may have any stride, which the TMA unit may refuse
    row = tensor.shape[3]
    strides = (if_several(tensor.shape[dim], tensor.stride(dim), row) for dim in range(3))
    return Descriptor(tensor, tensor.shape, (*strides, 1), (1, 1, rows, dims))


def _pitch(length: Extent, mask: MaskSnapshot | None) -> Extent:
    """Returns the rows from one head to the next in LSE2 and DELTA.

    It is a multiple of tiles and of the mask's blocks, which kernels walk to their end, so that a tile never
    reads the next head.
    """
    whole = TALLEST if mask is None else max(TALLEST, block_of(mask)[0])
    return cdiv(length, whole) * whole


class HopperFamily:
    """The Hopper family, see `families.Family`."""

    name, title, target = NAME, "kernels made for Hopper", TARGET
    reduce_in_backward = reads_order = True
    obstacle = staticmethod(obstacle)
    call_obstacle = staticmethod(call_obstacle)
    kernels = staticmethod(hopper_kernels)
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    def aligned_bytes(self, dtype: torch.dtype) -> int:
        return BYTES
