"""Launches the kernels of `codegen/hopper.py`, for calls that they take. Shapes as in `interface.py`.

The backward sums dQ in memory, all programs in any order: two runs may differ in the last bits of it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexmod import config
from flexmod.backends import triton
from flexmod.backends.arguments import allocate, block_of, mask_arguments, sizes, strided
from flexmod.backends.interface import Forward
from flexmod.backends.triton import Found
from flexmod.block_mask.held import Axis
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.codegen.choose import Verdict, choose
from flexmod.codegen.hopper import LIMITS, HopperKernels, Shape, Way, sum_block, sum_row, wide
from flexmod.codegen.kernels import NOTHING, Captured
from flexmod.codegen.schedule import grid
from flexmod.errors import MisaddressedProductsError
from flexmod.ir.reductions import Along
from flexmod.runtime import launch, machine_code, tape
from flexmod.runtime.counters import COUNTER
from flexmod.runtime.gluon import layout_of
from flexmod.runtime.target import target_of

Arguments = Mapping[str, Any]

# Queries in a backward's tile, at most.
TALLEST = 128
# Queries whose dQ is summed side by side, in the order of registers.
SUMMED = 64
# Programs of a backward on each processor, up to which the long ones go first. The last ones of more are few,
# and that neighbours find the same queries in the L2 counts for more: measured, see docs/measurements.md.
ORDERED = 16


class NoShape(Exception):
    """No shape of a kernel does on this device, and why."""


def call_obstacle(q: Tensor, k: Tensor, v: Tensor, by_column: MaskSnapshot | None = None) -> str | None:
    """Why the kernels do not take these tensors, None where they do.

    `by_column` is a mask whose lists by column are needed.
    """
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if not addressable(tensor):
            return f"{name}'s rows, heads or storage are not at multiples of 16 bytes"
    if q.shape[0] * q.shape[1] * _pitch(q.shape[2], by_column) >= 2**31:
        return "2^31 rows of queries or more"
    if by_column is not None and not by_column.held.by_column:
        return "block_mask has no q_num_blocks and q_indices"
    return None


def addressable(tensor: Tensor) -> bool:
    """Can the TMA unit address it: contiguous rows that begin at multiples of 16 bytes?"""
    if tensor.stride(3) != 1 or tensor.data_ptr() % 16:
        return False
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in strides)


def forward(
    kernels: HopperKernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: MaskSnapshot | None = None,
    score_captured: Captured = NOTHING,
    mask_captured: Captured = NOTHING,
    want_max: bool = False,
    keep: list[Tensor] | None = None,
    shape: Shape | None = None,
) -> Forward:
    """Attention of the variant that `kernels` were made for. `call_obstacle` must have found none.

    `keep`: as `triton.forward` has it. `shape`: this one, not one of the ladder. Raises NoShape before
    anything runs.
    """
    batch, heads, length, _ = q.shape
    spec = kernels.spec
    out = allocate(q, v.shape[3])
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    max_scores = torch.empty_like(lse) if want_max else None
    shared = {
        "Q": tiles(q, 64, spec.head_tile),
        "OUT": tiles(out, 64, spec.value_tile),
        "LSE": lse,
        **triton.statistics_kept(kernels.portable, lse, keep),
        "MAX_SCORES": max_scores,
        "COUNTER": COUNTER,
        **mask_arguments(mask, "kv"),
        **_order(mask, "kv"),
        **kernels.portable.mod_arguments("hopper_forward", score_captured, mask_captured),
        **sizes(q, k, scale),
        "B": batch,
        "KV_B": k.shape[0],
    }

    def arguments(shape: Shape) -> Arguments:
        return {
            "K": tiles(k, shape.block_n, spec.head_tile),
            "V": tiles(v, shape.block_n, spec.value_tile),
            **shared,
            **shape.arguments(),
        }

    shape = shape or settle(kernels, "forward", q.device, arguments)
    programs = (min(processors(q.device), *grid(batch, heads, length, shape.block_m)),)
    start(kernels, "forward_kernel", q.device, programs, arguments(shape))
    return Forward(out, lse, max_scores)


def backward(
    kernels: HopperKernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: tuple[bool, bool, bool],
    kept: tuple[Tensor, ...] = (),
    *,
    scale: float,
    mask: MaskSnapshot | None = None,
    score_captured: Captured = NOTHING,
    mask_captured: Captured = NOTHING,
    shape: Shape | None = None,
) -> Found:
    """Gradients of q, k and v where `needs` asks for them, and the sums for captures. As in the forward.

    A `grad_out` that the TMA unit cannot address is copied. Sums by column and along diagonals come with dK
    and dV; portable kernels make the others.
    """
    spec = kernels.spec
    batch, heads, length, _ = q.shape
    kv_batch, kv_heads, keys, _ = k.shape
    pitch = _pitch(length, mask)
    if not addressable(grad_out):
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
    grad_k, grad_v = allocate(k, k.shape[3]), allocate(v, v.shape[3])
    lse2, delta = (q.new_empty(batch * heads * pitch, dtype=torch.float32) for _ in range(2))
    row = sum_row(spec.head_tile)
    blocks = (batch * heads * pitch // SUMMED, SUMMED * q.shape[3] // row, row)
    numbers_of_sum = math.prod(blocks)
    # heads are marked beside the sums of dQ: one thing to set to zero
    zeros = q.new_empty(numbers_of_sum + batch * heads, dtype=torch.float32)
    sum_grad_q = zeros[:numbers_of_sum].view(blocks)
    small = kernels.portable.small_scores
    saved = {} if small else dict(zip(kernels.portable.kept, kept, strict=True))
    made = {"PEAKS": torch.empty_like(lse2), "LARGE": zeros[numbers_of_sum:]} if saved else {}
    buffers, sums = _sums(kernels, lse, keys)
    ordered = grid(kv_batch, kv_heads, keys, 128)[0] <= ORDERED * processors(q.device)
    shared = {
        **buffers,
        **made,
        "GRAD_K": tiles(grad_k, 64, spec.head_tile),
        "GRAD_V": tiles(grad_v, 64, spec.value_tile),
        **mask_arguments(mask, "q"),
        **_order(mask, "q", ordered),
        **kernels.portable.mod_arguments("dkdv", score_captured, mask_captured),
        **sizes(q, k, scale),
        "B": batch,
        "KV_B": k.shape[0],
        "PITCH": pitch,
    }

    def arguments(shape: Shape) -> Arguments:
        return {
            "Q": tiles(q, shape.block_m, spec.head_tile),
            "K": tiles(k, shape.block_n, spec.head_tile),
            "V": tiles(v, shape.block_n, spec.value_tile),
            "GRAD_OUT": tiles(grad_out, shape.block_m, spec.value_tile),
            "LSE2": numbers(lse2, shape.block_m),
            "DELTA": numbers(delta, shape.block_m),
            "SUM_GRAD_Q": summed(sum_grad_q, spec.head_tile, shape.block_m),
            **shared,
            **shape.arguments(),
        }

    shape = shape or settle(kernels, "backward", q.device, arguments)
    for grows in (zeros, *sums["diagonal"], *(sums["column"] if wide(spec) else ())):
        grows.zero_()
    weights = {"LSE2": lse2, **saved, **made}
    programs, statistics = triton.statistics_arguments(
        spec, out, lse, grad_out, grad_lse, delta, pitch, weights
    )
    start(kernels, "statistics_kernel", q.device, programs, statistics)
    # whole blocks where the mask has an order: see `count_tiles`
    whole = spec.mask_block[1] if spec.mask_block and shared.get("Q_ORDER") is not None else 1
    programs = grid(kv_batch, kv_heads, -(-keys // whole) * whole, shape.block_n)
    start(kernels, "backward_kernel", q.device, programs, arguments(shape))
    grad_q = None
    if needs[0]:
        grad_q = allocate(q, q.shape[3])
        rounding = {
            "SUM_GRAD_Q": sum_grad_q,
            **strided("GRAD_Q", "dq", "m", grad_q),
            "scale": scale,
            "HQ": heads,
            "M": length,
            "PITCH": pitch,
        }
        start(kernels, "round_kernel", q.device, grid(batch, heads, length, SUMMED), rounding)
    beside: dict[Along, list[Tensor]] = {}
    if kernels.portable.captures.besides_columns:
        lse2, delta = (x.view(batch, heads, pitch)[..., :length].contiguous() for x in (lse2, delta))
        beside = triton.sums_beside(
            kernels.portable, q, k, v, grad_out, {**(saved or {"LSE2": lse2}), "DELTA": delta}, lse,
            scale=scale, mask=mask, score_captured=score_captured, mask_captured=mask_captured,
        )  # fmt: skip
    return Found(grad_q, grad_k if needs[1] else None, grad_v if needs[2] else None, {**beside, **sums})


def _sums(kernels: HopperKernels, lse: Tensor, keys: int) -> tuple[Arguments, dict[Along, list[Tensor]]]:
    """What the fused kernel's sums for captures go into: arguments, and by how they are summed."""
    text = kernels.portable.captures.column
    arguments: dict[str, Tensor] = {}
    sums: dict[Along, list[Tensor]] = {"column": [], "diagonal": []}
    for term in text.terms if text else ():
        length = keys if term.along == "column" else lse.shape[2] + keys - 1
        buffer = lse.new_empty((*lse.shape[:2], length))
        arguments[f"{term.into}_by_{term.along}".upper()] = buffer
        sums[term.along].append(buffer)
    return arguments, sums


def settle(
    kernels: HopperKernels, way: Way, device: torch.device, arguments: Callable[[Shape], Arguments]
) -> Shape:
    """The shape for a kernel: the first that compiles, fits and does, or else the best by its verdict.

    Only compiles and loads. What was found is remembered, also that no shape does: raises NoShape then. Other
    strides and lengths make another variant of the kernel; where the compilers made that wrong, the ladder is
    tried anew.
    """
    known = kernels.settled.get((way, device))
    if known is None or not isinstance(known, str) and _wrong(kernels, way, device, arguments(known)):
        known = kernels.settled[way, device] = _first_that_does(kernels, way, device, arguments)
        if config.debug_level() >= 1:
            print(f"flexmod: {way} for Hopper: {known}", file=sys.stderr)
    if isinstance(known, str):
        raise NoShape(known)
    return known


def _first_that_does(
    kernels: HopperKernels, way: Way, device: torch.device, arguments: Callable[[Shape], Arguments]
) -> Shape | str:
    """As in `settle`; a string says why there is none."""
    _ = kernels.module  # a fault in its text is no matter of shapes

    def judge(shape: Shape) -> Verdict:
        try:
            verdict = _judged(kernels, way, device, arguments(shape))
        # whatever the compiler or the loader has against a shape: the next one may do
        except Exception as error:
            return Verdict(refusal=error)
        if verdict.refusal is None and not LIMITS.passed(verdict) and config.debug_level() >= 1:
            print(f"flexmod: {way} for Hopper: {shape} gives way: {verdict}", file=sys.stderr)
        return verdict

    chosen = choose(kernels.ladder(way), judge, LIMITS)
    if chosen.rung is not None:
        return chosen.rung
    if chosen.runnable:
        return f"a thread spills {min(v.spills for v in chosen.runnable.values())} registers at least"
    refused = "; ".join(f"{shape}: {refusal_in_words(why)}" for shape, why in chosen.refusals.items())
    why = f"no shape of it compiles: {refused}"
    warnings.warn(f"the {way} does not run on Hopper's template, {why}", stacklevel=2)
    return why


def refusal_in_words(refusal: object) -> str:
    """The first line of what the compiler, the loader or we have against a shape."""
    if refusal is MisaddressedProductsError:
        return machine_code.MISADDRESSED
    return str(refusal).partition("\n")[0] or type(refusal).__name__


def _wrong(kernels: HopperKernels, way: Way, device: torch.device, arguments: Arguments) -> bool:
    compiled = tape.compiled(getattr(kernels.module, f"{way}_kernel"), device, arguments)
    return launch.known_wrong(kernels.portable, compiled) is not None


def _judged(kernels: HopperKernels, way: Way, device: torch.device, arguments: Arguments) -> Verdict:
    compiled = tape.compiled(getattr(kernels.module, f"{way}_kernel"), device, arguments)
    return launch.judged(kernels.portable, compiled, device, machine_code.losses)


def start(
    kernels: HopperKernels, name: str, device: torch.device, programs: tuple[int], arguments: Arguments
) -> None:
    """One launch."""
    tape.start(getattr(kernels.module, name), programs, device, arguments)


def _order(mask: MaskSnapshot | None, axis: Axis, wanted: bool = True) -> Arguments:
    runs = mask.held.runs(axis) if mask else None
    return {} if runs is None else {f"{axis.upper()}_ORDER": runs.order if wanted else None}


def processors(device: torch.device) -> int:
    """How many programs of the forward run at a time: one on each of the chip's processors."""
    return target_of(device).processors or 1


def tiles(tensor: Tensor, rows: int, dims: int) -> TensorDescriptor:
    """A [B, H, length, dim] tensor in tiles of `rows` x `dims` of one head; zeros past an end."""
    # the stride of a dimension of 1 may be anything, but for the unit
    strides = [tensor.stride(dim) if tensor.shape[dim] > 1 else tensor.shape[3] for dim in range(3)]
    block = (1, 1, rows, dims)
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], list(block), layout)


def summed(sums: Tensor, head_tile: int, block_m: int) -> TensorDescriptor:
    """Sums of dQ, [blocks of 64 queries, 64 * D / row, row]: what a consumer adds to one at a time."""
    block = sum_block(head_tile, block_m)
    strides = [sums.stride(0), sums.stride(1), 1]
    return TensorDescriptor(sums, list(sums.shape), strides, list(block), _layout(block, sums.dtype))


def numbers(tensor: Tensor, count: int) -> TensorDescriptor:
    """A one-dimensional tensor, `count` numbers at a time."""
    layout = _layout((count,), tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), [1], [count], layout)


_layout = lru_cache(layout_of)


def _pitch(length: int, mask: MaskSnapshot | None) -> int:
    """Rows between two heads in LSE2 and DELTA.

    Whole tiles, and whole blocks of a mask, which are walked to their end: a tile never meets the next head.
    """
    whole = TALLEST if mask is None else max(TALLEST, block_of(mask)[0])
    return -(-length // whole) * whole
