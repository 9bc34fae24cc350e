"""The Triton backend: the generated kernels, on a GPU or in the interpreter.

The compiler makes `Kernels` for a `kernel_spec`; `forward` and `backward` allocate, gather the arguments and
launch. Shapes are those of `interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexmod.backends.arguments import (
    Arguments,
    allocate,
    block_of,
    grad_lse_arguments,
    mask_arguments,
    sizes,
    strided,
)
from flexmod.backends.captured import Sums
from flexmod.backends.interface import Forward
from flexmod.backends.triton_captured import sums_along_diagonals, sums_of_elements
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.codegen.kernels import NOTHING, Captured, Kernels
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.schedule import grid
from flexmod.codegen.spec import KernelName, KernelSpec, Tile, statistics_rows
from flexmod.ir.reductions import Along
from flexmod.runtime.launch import launch, start

# What `statistics_kernel` may make of scores that may be large: kernels that read PEAK and REST want nothing.
NO_PEAKS: Arguments = dict.fromkeys(("LSE2", "PEAK", "REST", "PEAKS", "LARGE"))


class Found(NamedTuple):
    """What a backward finds: gradients where they were asked for, and the sums of captured tensors' terms."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    sums: Sums


def kernel_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSnapshot | None,
    *,
    scale: float,
    precision: Literal["ieee", "tf32"],
    backward: bool,
) -> KernelSpec:
    """The spec that a call asks for. `precision` is for float32; half types take no heed of it."""
    return KernelSpec(
        q_dtype=q.dtype,
        k_dtype=k.dtype,
        v_dtype=v.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        mask_block=None if mask is None else block_of(mask),
        mask_form="runs" if mask is None else mask.held.form,
        full_tiles_padded=mask is not None and mask.full_tiles_padded,
        precision=precision if q.dtype is torch.float32 else "ieee",
        positive_scale=scale > 0,
        shared_kv=backward and q.shape[:2] != k.shape[:2],
        backward=backward,
    )


def forward(
    kernels: Kernels,
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
) -> Forward:
    """Attention of the variant that `kernels` were made for.

    The lse, one number that is rounded, is too coarse for a backward where it is large: `keep` gets two
    numbers a row in its place.

    Raises:
        NoTileFits: see `launch`.
        BlockSizeError, OptionValueError: see `ladder`.
    """
    batch, heads, length, _ = q.shape
    out = allocate(q, v.shape[3])
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    max_scores = torch.empty_like(lse) if want_max else None
    arguments = {
        **strided("Q", "q", "m", q),
        **strided("K", "k", "n", k),
        **strided("V", "v", "n", v),
        **strided("OUT", "o", "m", out),
        "LSE": lse,
        "MAX_SCORES": max_scores,
        **statistics_kept(kernels, lse, keep),
        **mask_arguments(mask, "kv"),
        **kernels.mod_arguments("forward", score_captured, mask_captured),
        **sizes(q, k, scale),
    }
    launch(kernels, "forward", q.device, lambda tile: grid(batch, heads, length, tile.block_m), arguments)
    return Forward(out, lse, max_scores)


def statistics_kept(kernels: Kernels, lse: Tensor, keep: list[Tensor] | None) -> Arguments:
    """The arguments for what a backward needs besides the lse, which is in `keep` then."""
    names = kernels.kept
    if keep is not None:
        keep += [torch.empty_like(lse) for _ in names]
    return dict(zip(names, keep if keep else (None, None), strict=False))


def backward(
    kernels: Kernels,
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
) -> Found:
    """Gradients of q, k and v where `needs` asks for them; the strides of `grad_out` and `grad_lse` may be 0.

    The sums are those that `kernels.captures` name.

    Raises:
        BlockMaskPartsError: the mask has no lists by column, and a gradient needs them.
        NoTileFits, BlockSizeError, OptionValueError: as in the forward.
    """
    batch, heads, length, _ = q.shape
    captures, keys = kernels.captures, k.shape[2]
    delta = torch.empty_like(lse)
    by_lse = kernels.small_scores and not kernels.spec.exact
    weights = {"LSE2": torch.empty_like(lse)} if by_lse else dict(zip(kernels.kept, kept, strict=True))
    grad_q = grad_k = grad_v = None
    sums: dict[Along, list[Tensor]] = {}
    arguments = _of_backward(
        kernels, q, k, v, grad_out, {**weights, "DELTA": delta}, scale, mask, score_captured, mask_captured
    )

    def by_query(tile: Tile) -> tuple[int]:
        return grid(batch, heads, length, tile.block_m)

    if kernels.spec.exact:
        launch(kernels, "delta", q.device, by_query, {**arguments("delta"), **grad_lse_arguments(grad_lse)})
    else:
        programs, given = statistics_arguments(
            kernels.spec, out, lse, grad_out, grad_lse, delta, length, weights if by_lse else NO_PEAKS
        )
        start(kernels, "statistics_kernel", q.device, programs, given)
    if needs[0] or captures.row:
        grad_q = allocate(q, q.shape[3]) if needs[0] else None
        sums["row"] = _by_query(kernels, lse, grad_q, arguments)
    if needs[1] or needs[2] or captures.column:
        # without terms of its own the kernel makes both
        grad_k = allocate(k, k.shape[3]) if needs[1] or not captures.column else None
        grad_v = allocate(v, v.shape[3]) if needs[2] or not captures.column else None
        columns, sums["column"] = sum_buffers(captures.column, "_BY_COLUMN", lse, keys)
        own = {
            **arguments("dkdv"),
            **strided("GRAD_K", "dk", "n", grad_k),
            **strided("GRAD_V", "dv", "n", grad_v),
            **columns,
            **({"BATCHES": batch // k.shape[0]} if kernels.spec.shared_kv else {}),
        }
        b, h, n, _ = k.shape
        launch(kernels, "dkdv", q.device, lambda tile: grid(b, h, n, tile.block_n), own)
    sums |= _apart(kernels, lse, keys, mask, score_captured, arguments)
    return Found(grad_q, grad_k if needs[1] else None, grad_v if needs[2] else None, sums)


def sums_beside(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    statistics: Mapping[str, Tensor],
    lse: Tensor,
    *,
    scale: float,
    mask: MaskSnapshot | None = None,
    score_captured: Captured = NOTHING,
    mask_captured: Captured = NOTHING,
) -> dict[Along, list[Tensor]]:
    """The sums that `kernels.captures` name but for those by column: what a backward by other kernels lacks.

    `statistics` are arguments, [B, Hq, M] float32: DELTA as `statistics_kernel` makes it, and LSE2 or what
    the forward kept. Raises as `backward` does.
    """
    arguments = _of_backward(
        kernels, q, k, v, grad_out, statistics, scale, mask, score_captured, mask_captured
    )
    sums: dict[Along, list[Tensor]] = {}
    if kernels.captures.row:
        sums["row"] = _by_query(kernels, lse, None, arguments)
    return sums | _apart(kernels, lse, k.shape[2], mask, score_captured, arguments)


def _of_backward(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    statistics: Mapping[str, Tensor],
    scale: float,
    mask: MaskSnapshot | None,
    score_captured: Captured,
    mask_captured: Captured,
) -> Callable[[KernelName], Arguments]:
    """What a kernel of the backward is given, but for its results."""
    shared = {
        **strided("Q", "q", "m", q),
        **strided("K", "k", "n", k),
        **strided("V", "v", "n", v),
        **strided("GRAD_OUT", "g", "m", grad_out),
        **statistics,
        **sizes(q, k, scale),
    }

    def arguments(kernel: KernelName) -> Arguments:
        lists = {} if kernel == "diagonal" else mask_arguments(mask, "q" if kernel == "dkdv" else "kv")
        return {**shared, **lists, **kernels.mod_arguments(kernel, score_captured, mask_captured)}

    return arguments


def _by_query(
    kernels: Kernels, lse: Tensor, grad_q: Tensor | None, arguments: Callable[[KernelName], Arguments]
) -> list[Tensor]:
    """dq_kernel: fills `grad_q`, where it is given, and makes the sums by row."""
    rows, sums = sum_buffers(kernels.captures.row, "_BY_ROW", lse, lse.shape[2])
    own = {**arguments("dq"), **strided("GRAD_Q", "dq", "m", grad_q), **rows}
    batch, heads, length = lse.shape
    launch(kernels, "dq", lse.device, lambda tile: grid(batch, heads, length, tile.block_m), own)
    return sums


def _apart(
    kernels: Kernels,
    lse: Tensor,
    keys: int,
    mask: MaskSnapshot | None,
    score_captured: Captured,
    arguments: Callable[[KernelName], Arguments],
) -> dict[Along, list[Tensor]]:
    """The sums that have kernels of their own."""
    sums: dict[Along, list[Tensor]] = {}
    batch, heads, length = lse.shape
    extents, device = (batch, heads, length, keys), lse.device
    if kernels.captures.diagonal:
        sums["diagonal"] = sums_along_diagonals(kernels, device, extents, arguments("diagonal"), mask)
    if kernels.captures.element:
        sums["element"] = sums_of_elements(
            kernels, device, extents, arguments("scatter"), score_captured.tensors
        )
    return sums


def sum_buffers(
    text: ModText | None, suffix: str, lse: Tensor, length: int
) -> tuple[Arguments, list[Tensor]]:
    """A [B, Hq, length] buffer for each of a text's terms, as arguments and in order."""
    terms = text.terms if text else ()
    buffers = [lse.new_empty((*lse.shape[:2], length)) for _ in terms]
    return {term.into.upper() + suffix: x for term, x in zip(terms, buffers, strict=True)}, buffers


def statistics_arguments(
    spec: KernelSpec,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    delta: Tensor,
    pitch: int,
    weights: Mapping[str, object],
) -> tuple[tuple[int], Arguments]:
    """The grid and the arguments of the kernel that fills delta, [B, Hq, pitch] float32, and `weights`.

    These are LSE2 alone where scores are small, else those of NO_PEAKS.
    """
    batch, heads, length = lse.shape
    rows = statistics_rows(spec)
    arguments = {
        **strided("OUT", "o", "m", out),
        **strided("GRAD_OUT", "g", "m", grad_out),
        "LSE": lse,
        **weights,
        **grad_lse_arguments(grad_lse),
        "DELTA": delta,
        "HQ": heads,
        "M": length,
        "PITCH": pitch,
        "BLOCK_M": rows,
    }
    return grid(batch, heads, pitch, rows), arguments
