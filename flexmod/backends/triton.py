"""The Triton backend: the generated kernels, on a GPU or in the interpreter.

The compiler makes `Kernels` for a `kernel_spec`; `forward` and `backward` allocate, gather the arguments and
launch. Shapes are those of `interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexmod.backends.captured import Sums
from flexmod.backends.interface import Forward
from flexmod.backends.triton_captured import mask_strides, sums_along_diagonals, sums_of_elements
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.held import Axis
from flexmod.block_mask.runs import Runs
from flexmod.codegen.kernels import NOTHING, Captured, Kernels
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.schedule import grid
from flexmod.codegen.spec import KernelName, KernelSpec, Tile, statistics_rows
from flexmod.errors import BlockMaskPartsError
from flexmod.ir.reductions import Along
from flexmod.runtime.launch import launch, start

Arguments = dict[str, object]


class Found(NamedTuple):
    """What a backward finds: gradients where they were asked for, and the sums of captured tensors' terms."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    sums: Sums


def block_of(mask: BlockMask) -> tuple[int, int]:
    """(queries, keys) of a block, as kernels walk it: to its end, wherever the positions end.

    A single block may be of any size: in torch 2^30 stands for "no mask". Here it ends soon after the
    positions, at a power of two, since each size has kernels of its own.
    """
    sizes = zip(mask.BLOCK_SIZE, mask.seq_lengths, strict=True)
    rows, columns = (min(int(size), max(128, 1 << (length - 1).bit_length())) for size, length in sizes)
    return rows, columns


def kernel_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
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
    mask: BlockMask | None = None,
    score_captured: Captured = NOTHING,
    mask_captured: Captured = NOTHING,
    want_max: bool = False,
    keep: list[Tensor] | None = None,
) -> Forward:
    """Attention of the variant that `kernels` were made for.

    An exact spec keeps each row's largest score and sum: the lse, one number for both, is too coarse there.

    Raises:
        NoTileFits: see `launch`.
        BlockSizeError, OptionValueError: see `ladder`.
    """
    batch, heads, length, _ = q.shape
    out = allocate(q, v.shape[3])
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    max_scores = torch.empty_like(lse) if want_max else None
    if keep is not None and kernels.spec.exact:
        keep += [torch.empty_like(lse), torch.empty_like(lse)]
    arguments = {
        **strided("Q", "q", "m", q),
        **strided("K", "k", "n", k),
        **strided("V", "v", "n", v),
        **strided("OUT", "o", "m", out),
        "LSE": lse,
        "MAX_SCORES": max_scores,
        **(dict(zip(("PEAK", "TOTAL"), keep or (None, None), strict=True)) if kernels.spec.exact else {}),
        **mask_arguments(mask, "kv"),
        **kernels.mod_arguments("forward", score_captured, mask_captured),
        **sizes(q, k, scale),
    }
    launch(kernels, "forward", q.device, lambda tile: grid(batch, heads, length, tile.block_m), arguments)
    return Forward(out, lse, max_scores)


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
    mask: BlockMask | None = None,
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
    weights = dict(zip(("PEAK", "TOTAL"), kept, strict=True)) if kept else {"LSE2": torch.empty_like(lse)}
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
            kernels.spec, out, lse, grad_out, grad_lse, weights["LSE2"], delta, pitch=length
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
    lse2: Tensor,
    delta: Tensor,
    *,
    scale: float,
    mask: BlockMask | None = None,
    score_captured: Captured = NOTHING,
    mask_captured: Captured = NOTHING,
) -> dict[Along, list[Tensor]]:
    """The sums that `kernels.captures` name but for those by column: what a backward by other kernels lacks.

    `lse2` and `delta`, [B, Hq, M] float32, are as `statistics_kernel` makes them. Raises as `backward` does.
    """
    statistics = {"LSE2": lse2, "DELTA": delta}
    arguments = _of_backward(
        kernels, q, k, v, grad_out, statistics, scale, mask, score_captured, mask_captured
    )
    sums: dict[Along, list[Tensor]] = {}
    if kernels.captures.row:
        sums["row"] = _by_query(kernels, lse2, None, arguments)
    return sums | _apart(kernels, lse2, k.shape[2], mask, score_captured, arguments)


def _of_backward(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    statistics: Mapping[str, Tensor],
    scale: float,
    mask: BlockMask | None,
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
    mask: BlockMask | None,
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
    lse2: Tensor,
    delta: Tensor,
    pitch: int,
) -> tuple[tuple[int], Arguments]:
    """The grid and the arguments of the kernel that fills lse2 and delta, [B, Hq, pitch] float32 each."""
    batch, heads, length = lse.shape
    rows = statistics_rows(spec)
    arguments = {
        **strided("OUT", "o", "m", out),
        **strided("GRAD_OUT", "g", "m", grad_out),
        "LSE": lse,
        **grad_lse_arguments(grad_lse),
        "LSE2": lse2,
        "DELTA": delta,
        "HQ": heads,
        "M": length,
        "PITCH": pitch,
        "BLOCK_M": rows,
    }
    return grid(batch, heads, pitch, rows), arguments


def grad_lse_arguments(grad_lse: Tensor | None) -> Arguments:
    strides = grad_lse.stride() if grad_lse is not None else (0, 0, 0)
    return {"GRAD_LSE": grad_lse, **dict(zip(("stride_lb", "stride_lh", "stride_lm"), strides, strict=True))}


def allocate(like: Tensor, dim: int) -> Tensor:
    """An uninitialized tensor of like's dtype and shape, but for a last dimension of `dim`.

    Batch, heads and rows lie in memory in like's order, so that [B, M, H, D] storage stays that.
    """
    strides, step = [0, 0, 0, 1], dim
    for i in sorted((2, 1, 0), key=like.stride):
        strides[i] = step
        step *= like.shape[i]
    return like.new_empty_strided((*like.shape[:3], dim), strides)


def strided(name: str, letters: str, row: str, tensor: Tensor | None) -> Arguments:
    """The tensor and its strides as a kernel names them. A batch of 1 is the same for every batch entry."""
    b, h, m, d = tensor.stride() if tensor is not None else (0, 0, 0, 0)
    return {
        name: tensor,
        f"stride_{letters}b": b if tensor is not None and tensor.shape[0] > 1 else 0,
        f"stride_{letters}h": h,
        f"stride_{letters}{row}": m,
        f"stride_{letters}d": d,
    }


def sizes(q: Tensor, k: Tensor, scale: float) -> Arguments:
    return {"scale": scale, "HQ": q.shape[1], "HKV": k.shape[1], "M": q.shape[2], "N": k.shape[2]}


def mask_arguments(mask: BlockMask | None, axis: Axis) -> Arguments:
    """The mask's blocks of keys in each row ("kv"), or its blocks of queries in each column ("q")."""
    if mask is None:
        return {}
    if axis == "q" and not mask.held.by_column:
        raise BlockMaskPartsError(
            problem="block_mask has no q_num_blocks and q_indices, and a gradient is summed up by keys",
            advice="build it with create_block_mask, or from_kv_blocks(..., compute_q_blocks=True)",
        )
    runs = mask.held.runs(axis)
    return _lists(mask, axis) if runs is None else _run_arguments(axis, runs)


def _run_arguments(axis: Axis, runs: Runs) -> Arguments:
    return {
        f"{axis.upper()}_ROWS": runs.rows,
        f"{axis.upper()}_RUNS": runs.spans,
        **mask_strides(runs.rows.shape[:3]),
    }


# By mask and axis: the lists that the arguments were made of, and the arguments.
_remembered: WeakKeyDictionary[BlockMask, dict[str, tuple[list[Tensor | None], Arguments]]] = (
    WeakKeyDictionary()
)


def _lists(mask: BlockMask, axis: Axis) -> Arguments:
    """The lists of a mask; see `_list_arguments`.

    Remembered while the mask has the same lists, unless they were copied: a write to them must be seen.
    """
    names = [f"{axis}_num_blocks", f"{axis}_indices", f"full_{axis}_num_blocks", f"full_{axis}_indices"]
    lists: list[Tensor | None] = [getattr(mask, name) for name in names]
    known = _remembered.setdefault(mask, {}).get(axis)
    if known is not None and all(a is b for a, b in zip(known[0], lists, strict=True)):
        return known[1]
    arguments = _list_arguments(axis, names, lists)
    read = [arguments[name.upper()] for name in names]
    if all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(read, lists, strict=True)):  # type: ignore
        _remembered[mask][axis] = (lists, arguments)
    return arguments


def _list_arguments(axis: str, names: list[str], lists: list[Tensor | None]) -> Arguments:
    """Lists of blocks, contiguous, with the strides they share.

    A mask that is the same for each batch entry or head comes as an expanded view: one copy of it is read.
    """
    present = [t for t in lists if t is not None]
    for dim in (0, 1):
        if all(t.shape[dim] == 1 or t.stride(dim) == 0 for t in present):
            present = [t.narrow(dim, 0, 1) for t in present]
    counts, indices, *full = [t.contiguous() for t in present]
    full_counts, full_indices = full if full else (None, None)
    return {
        names[0].upper(): counts,
        names[1].upper(): indices,
        f"{axis}_slots": indices.shape[3],
        names[2].upper(): full_counts,
        names[3].upper(): full_indices,
        f"full_{axis}_slots": full_indices.shape[3] if full_indices is not None else 0,
        **mask_strides(counts.shape),
    }
