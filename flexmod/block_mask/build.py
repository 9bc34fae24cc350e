"""Builds a BlockMask from a mask_mod: finds the runs of its tiles (`in_graph.py`) and stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask import in_graph
from flexmod.block_mask.combine import Dense
from flexmod.block_mask.format import DEFAULT_BLOCK, BlockMask
from flexmod.block_mask.in_graph import check_captures, find_tiles
from flexmod.block_mask.parts import MaskMod, block_pair, device_of, length, noop_mask, positive, trace_mask
from flexmod.block_mask.storage import TileStorage
from flexmod.block_mask.tiles import MaskLayout, both_sizes
from flexmod.errors import DenseMaskError, MaskExtentError
from flexmod.ir.composed import and_masks, or_masks
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS, check_sizes, dtype_name
from flexmod.ir.offsets import OffsetLike, stated
from flexmod.ir.passes import fitted
from flexmod.ir.source import mod_kind
from flexmod.ir.trace import Traced, trace
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import outside_of_graphs, outside_transforms

__all__ = ["and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]

Device = torch.device | str | int | None


def create_block_mask(
    mask_mod: MaskMod | Tensor,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    q_offset: OffsetLike = None,
    kv_offset: OffsetLike = None,
) -> BlockMask:
    """Builds the BlockMask of a mask_mod(b, h, q_idx, kv_idx) -> bool, or of a dense mask.

    A dense mask is a tensor, bool [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN]. It is True
    where a query attends to a key, as in scaled_dot_product_attention. It gives the mask its sizes and its
    device. Calls read it, so a later write to it counts.

    `B` and `H` are the numbers of batch entries and query heads. None means that the mask is the same for
    all. `Q_LEN` and `KV_LEN` are the numbers of queries and keys. `BLOCK_SIZE` is a tile's size. It is one
    number or (queries, keys). `device` None is the current accelerator, or the CPU if there is none. With
    `separate_full_blocks` False, every tile is listed as partial. `_compile`, `compute_dq_write_order` and
    `dq_kv_order` are torch's, and have no effect. On the device "meta", or in a FakeTensorMode, the mask has
    shapes only.

    With offsets, the mask_mod sees shifted positions: the first query is q_offset, the first key kv_offset.
    Each is an integer up to 2^30, or an int32 or int64 tensor with one element for each of B batch entries or
    for all, alone or as `flexmod.Offset(values, bound)`. None is 0. A call with this mask gives its score_mod
    the same positions. After a write to such a tensor, the next use finds the tiles again.

    Raises LengthError, MaskExtentError, BlockSizeError, NoDeviceError, OffsetTypeError, OffsetValueError,
    OffsetShapeError, OffsetMismatchError, MaskCaptureGradientError, DenseMaskError, and every error of
    tracing. DeviceMismatch if a captured tensor is on another device; TensorKindError and FreedStorageError
    if a kernel cannot read one.

    Source: Dong et al., Flex Attention, 2024.

    Example:

        block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1024, 1024)
        print(block_mask)
    """
    block = block_pair(BLOCK_SIZE)
    if isinstance(mask_mod, Tensor):
        device = mask_mod.device if device is None else device
        mask_mod, (B, H, Q_LEN, KV_LEN) = _dense(mask_mod, (B, H, Q_LEN, KV_LEN))
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    here = device_of(device)
    positions = stated(q_offset, kv_offset, sizes[0], here, "the mask")
    layout = MaskLayout(sizes, block, here, separate_full_blocks)
    if torch.compiler.is_compiling():
        return in_graph.create(mask_mod, layout, positions)
    if positions is not None:
        mask_mod = positions.mask(mask_mod)
    traced = trace_mask(mask_mod, here)
    check_captures(traced, here)
    without_values = here.type == "meta" or any(map(tensor_kinds.has_no_values, traced.tensors))
    with outside_transforms():
        if without_values or tensor_kinds.recorded_by_torch():
            return in_graph.outside(mask_mod, traced, layout)
        return BlockMask._of_storage(find_tiles(traced, layout), sizes[2:], block, mask_mod, traced)


def _dense(dense: Tensor, given: tuple[int | None, ...]) -> tuple[MaskMod, tuple[int | None, ...]]:
    """The mask_mod that reads a dense mask, and the mask's sizes. Raises DenseMaskError.

    Each given size must equal the tensor's, which may also be 1.
    """
    shape = tuple(dense.shape)
    if dense.dtype != torch.bool:
        positions = ", ".join(("b", "h", "q_idx", "kv_idx")[-len(shape) :])
        raise DenseMaskError(
            shape=shape, problem=f"is {dtype_name(dense.dtype)}, but it says True or False",
            advice="compare it, e.g. create_block_mask(dense > 0). Numbers to add to scores are a score_mod, "
            f"lambda score, b, h, q_idx, kv_idx: score + dense[{positions}]",
        )  # fmt: skip
    if not 2 <= len(shape) <= 4:
        raise DenseMaskError(
            shape=shape, problem="has the wrong number of dimensions",
            advice="give [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN]",
        )  # fmt: skip
    whole = (1,) * (4 - len(shape)) + shape
    for axis, (name, size, own) in enumerate(zip(("B", "H", "Q_LEN", "KV_LEN"), given, whole, strict=True)):
        if size is not None and size != own and (axis > 1 or own != 1):
            advice = "leave B, H, Q_LEN and KV_LEN out: the tensor has them"
            if shape == (given[0], given[3]):
                advice = "index a padding mask [B, KV_LEN]: lambda b, h, q_idx, kv_idx: dense[b, kv_idx]"
            problem = f"has {name}={own}, but {name}={size} is given"
            raise DenseMaskError(shape=shape, problem=problem, advice=advice)
    sizes = [own if size is None else size for size, own in zip(given, whole, strict=True)]
    return Dense(dense.view(whole)), tuple(sizes)


def _find_again(mask: BlockMask, traced: Traced) -> TileStorage:
    """Finds the tiles of a mask by its traced mask_mod."""
    check_captures(traced, mask.device)
    sizes = (*both_sizes(mask.storage.batch), *mask.seq_lengths)
    with outside_transforms():
        return find_tiles(traced, MaskLayout(sizes, mask.BLOCK_SIZE, mask.device, mask.storage.separate))


BlockMask._find_tiles = staticmethod(_find_again)


@outside_of_graphs
def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device = None
) -> Tensor:
    """The dense mask of a mask_mod, bool [B, H, Q_LEN, KV_LEN]. A score_mod masks where it turns 0 into -inf.

    Allocates the whole mask, so it is for pictures and comparisons at small sizes. `B`, `H` and `device` are
    as in create_block_mask. Raises LengthError, MaskExtentError, NoDeviceError, DeviceMismatch, and every
    error of tracing.

    Source: Dong et al., Flex Attention, 2024.

    Example:

        keep = create_mask(masks.causal(), None, None, 100, 100, device="cpu")
        assert keep.sum() == 100 * 101 / 2
    """
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    here = device_of(device)
    kind = mod_kind(mod_fn)
    traced = trace(mod_fn, kind, here)
    check_captures(traced, here)
    check_sizes(traced.graph, sizes, "the mask")
    places = _places(sizes, here)
    traced = Traced(fitted(traced.graph.with_lines(), sizes), traced.tensors)
    score = torch.zeros(sizes, device=here) if kind == "score" else None
    (result,) = evaluate(traced.graph, traced.tensors, **places, score=score)
    mask = result if kind == "mask" else ~torch.isneginf(result)
    return mask.expand(sizes).clone(memory_format=torch.contiguous_format)


def _places(sizes: Sequence[int], device: torch.device) -> dict[str, Any]:
    """b, h, q_idx and kv_idx, each along its own axis of four."""
    places = {}
    for axis, (name, size) in enumerate(zip(POSITIONS, sizes, strict=True)):
        shape = [1] * 4
        shape[axis] = size
        places[name] = torch.arange(size, dtype=torch.int32, device=device).view(shape)
    return places


def _sizes(B: int | None, H: int | None, Q_LEN: int | None, KV_LEN: int | None) -> tuple[int, int, int, int]:
    counts = []
    for axis, (name, value) in enumerate((("B", B), ("H", H))):
        count = 1 if value is None else positive(value)
        if count is None:
            raise MaskExtentError(name=name, value=value, axis=axis)
        counts.append(count)
    return counts[0], counts[1], length("Q_LEN", Q_LEN), length("KV_LEN", KV_LEN)
