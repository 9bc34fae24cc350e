"""What kernels take of a call's tensors and its mask, by the names of their parameters; room for results."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexmod.block_mask.held import Axis
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.block_mask.runs import Runs
from flexmod.errors import BlockMaskPartsError

Arguments = dict[str, object]


def allocate(like: Tensor, dim: int) -> Tensor:
    """An uninitialized tensor of like's dtype and shape, but for a last dimension of `dim`.

    Batch, heads and rows lie in memory in like's order, so that [B, M, H, D] storage stays that.
    """
    strides, step = [0, 0, 0, 1], dim
    for i in sorted((2, 1, 0), key=like.stride):
        strides[i] = step
        step *= like.shape[i]
    return like.new_empty_strided((*like.shape[:3], dim), strides)


def block_of(mask: MaskSnapshot) -> tuple[int, int]:
    """(queries, keys) of a block, as kernels walk it: to its end, wherever the positions end.

    A single block may be of any size: in torch 2^30 stands for "no mask". Here it ends soon after the
    positions, at a power of two, since each size has kernels of its own.
    """
    sizes = zip(mask.BLOCK_SIZE, mask.seq_lengths, strict=True)
    rows, columns = (min(int(size), max(128, 1 << (length - 1).bit_length())) for size, length in sizes)
    return rows, columns


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


def grad_lse_arguments(grad_lse: Tensor | None) -> Arguments:
    strides = grad_lse.stride() if grad_lse is not None else (0, 0, 0)
    return {"GRAD_LSE": grad_lse, **dict(zip(("stride_lb", "stride_lh", "stride_lm"), strides, strict=True))}


def mask_arguments(mask: MaskSnapshot | None, axis: Axis) -> Arguments:
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


def _lists(mask: MaskSnapshot, axis: Axis) -> Arguments:
    """The lists of a mask; see `_list_arguments`.

    Remembered where they are the mask's own tensors. Copies are made again: a recording has to see it, and on
    another stream a launch could read a copy before it is written.
    """
    known: Arguments | None = mask.derived.get(axis)
    if known is not None:
        return known
    names = [f"{axis}_num_blocks", f"{axis}_indices", f"full_{axis}_num_blocks", f"full_{axis}_indices"]
    lists = [mask.held.list(name) for name in names]
    arguments = _list_arguments(axis, names, lists)
    read = [arguments[name.upper()] for name in names]
    if all(a is b for a, b in zip(read, lists, strict=True)):
        mask.derived[axis] = arguments
    return arguments


def _list_arguments(axis: str, names: list[str], lists: list[Tensor | None]) -> Arguments:
    """Lists of blocks, contiguous, with the strides they share.

    A mask that is the same for each batch entry or head comes as an expanded view: one copy of it is read.
    """
    present = [t for t in lists if t is not None]
    for dim in (0, 1):
        if all(t.shape[dim] == 1 or t.stride(dim) == 0 for t in present):
            present = [t if t.shape[dim] == 1 else t.narrow(dim, 0, 1) for t in present]
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


def mask_strides(shape: Sequence[int]) -> Arguments:
    """From one batch, and one head, of [batches, heads, lines] to the next, in lines; 0 for a single one."""
    batch, heads, lines = shape
    return {
        "stride_mask_b": heads * lines if batch > 1 else 0,
        "stride_mask_h": lines if heads > 1 else 0,
    }
