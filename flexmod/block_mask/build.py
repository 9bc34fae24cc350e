"""The builder: a mask_mod becomes the table of its tiles, the table becomes a BlockMask.

The mask is evaluated strip by strip, at most `strip_elements` of it at a time, and only along the positions
that its graph reads: a mask that is the same for each head is evaluated for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flexmod import transforms
from flexmod.block_mask import tiles
from flexmod.block_mask.format import DEFAULT_BLOCK, BlockMask, MaskMod, noop_mask, trace_mask
from flexmod.block_mask.parts import block_pair, length, positive
from flexmod.errors import DeviceMismatch, MaskExtentError, NotCallable
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS
from flexmod.ir.passes import fitted
from flexmod.ir.source import mod_kind
from flexmod.ir.trace import Traced, trace

__all__ = ["and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]

Device = torch.device | str | int | None
Span = tuple[int, int]


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """The BlockMask of a mask_mod(b, h, q_idx, kv_idx) -> bool.

    B and H None: 1. `device` None: the current accelerator, else the CPU. BLOCK_SIZE: one number, or
    (queries, keys). `separate_full_blocks` False lists every tile as partial. `_compile` changes nothing:
    there is nothing to compile.

    Raises LengthError, MaskExtentError, BlockSizeError, DeviceMismatch where a captured tensor is elsewhere,
    and what tracing raises.

        mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8192, 8192)
    """
    block = block_pair(BLOCK_SIZE)
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    here = _device(device)
    traced = trace_mask(mask_mod, here)
    _check_captures(traced, here)
    with transforms.paused():
        table = classify(Traced(fitted(traced.graph, sizes), traced.tensors), sizes, block, here)
        if not separate_full_blocks:
            table.clamp_(max=tiles.PARTIAL)
        return BlockMask.of_table(
            table, sizes[:2], sizes[2:], block, mask_mod, traced, separate=separate_full_blocks
        )


def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device = None
) -> Tensor:
    """The whole mask, bool [B, H, Q_LEN, KV_LEN], of a mask_mod. Of a score_mod: where 0 does not become
    -inf.

    Everything is made at once: for pictures and comparisons at small sizes. Raises as `create_block_mask`.
    """
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    here = _device(device)
    kind = mod_kind(mod_fn)
    traced = trace(mod_fn, kind, here)
    _check_captures(traced, here)
    places = _places([(0, size) for size in sizes], here)
    traced = Traced(fitted(traced.graph, sizes), traced.tensors)
    score = torch.zeros(sizes, device=here) if kind == "score" else None
    (result,) = evaluate(traced.graph, traced.tensors, **places, score=score)
    mask = result if kind == "mask" else ~torch.isneginf(result)
    return mask.expand(sizes).clone(memory_format=torch.contiguous_format)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that keeps what all of them keep; everything when there are none. Raises NotCallable."""
    _check_callable(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_ones((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result & mask_mod(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that keeps what any of them keeps; nothing when there are none. Raises NotCallable."""
    _check_callable(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_zeros((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result | mask_mod(b, h, q_idx, kv_idx)
        return result

    return or_mask


def classify(traced: Traced, sizes: Sequence[int], block: tuple[int, int], device: torch.device) -> Tensor:
    """What each tile is, EMPTY, PARTIAL or FULL: int8 [B or 1, H or 1, Qb, KVb].

    `sizes` is (B, H, Q_LEN, KV_LEN). The 1 stands where the graph reads no b, or no h.
    """
    extents = [size if name in traced.graph.reads else 1 for name, size in zip(POSITIONS, sizes, strict=True)]
    blocks = (1, 1, *block)
    some = torch.zeros(*map(tiles.tile_count, extents, blocks), dtype=torch.uint8, device=device)
    every = torch.ones_like(some)
    for strip in strips(extents, blocks, strip_elements(device)):
        (result,) = evaluate(traced.graph, traced.tensors, **_places(strip, device))
        kept = result.expand([stop - start for start, stop in strip]).contiguous().view(torch.uint8)
        where = tuple(slice(a // n, tiles.tile_count(z, n)) for (a, z), n in zip(strip, blocks, strict=True))
        some[where] |= _by_tile(kept, blocks, torch.amax)
        every[where] &= _by_tile(kept, blocks, torch.amin)
    table = (some + every).to(torch.int8)
    whole = table.expand(-1, -1, *map(tiles.tile_count, sizes[2:], block)).clone()
    return tiles.keep_padding_partial(whole, (sizes[2], sizes[3]), block)


def strip_elements(device: torch.device) -> int:
    """How much of a mask is evaluated at once: what a CPU's caches hold, or what keeps a GPU busy."""
    return 1 << 20 if device.type == "cpu" else 1 << 24


def strips(extents: Sequence[int], blocks: Sequence[int], limit: int) -> Iterator[tuple[Span, ...]]:
    """Cuts [B, H, Q, KV] into boxes of at most `limit` elements.

    On each axis a box covers whole tiles, or lies within one.
    """
    steps = [1, 1, min(extents[2], blocks[2], max(1, int(limit**0.5))), 1]
    for axis in (3, 2, 1, 0):
        others = steps[0] * steps[1] * steps[2] * steps[3] // steps[axis]
        step = min(extents[axis], max(1, limit // others))
        steps[axis] = step if step < blocks[axis] else step // blocks[axis] * blocks[axis]
    return product(*map(_spans, extents, blocks, steps))


def _spans(extent: int, block: int, step: int) -> list[Span]:
    if step >= block:
        return [(start, min(start + step, extent)) for start in range(0, extent, step)]
    return [
        (start, min(start + step, tile + block, extent))
        for tile in range(0, extent, block)
        for start in range(tile, min(tile + block, extent), step)
    ]


def _by_tile(kept: Tensor, blocks: Sequence[int], reduce: Callable[..., Tensor]) -> Tensor:
    """Reduces the last two axes of a strip, which starts a tile or lies in one, to one entry a tile."""
    for axis in (2, 3):
        block, size = blocks[axis], kept.shape[axis]
        whole = size // block * block
        parts = [kept.narrow(axis, 0, whole).unflatten(axis, (-1, block))] if whole else []
        if whole < size:
            parts.append(kept.narrow(axis, whole, size - whole).unsqueeze(axis))
        kept = torch.cat([reduce(part, dim=axis + 1) for part in parts], dim=axis)
    return kept


def _places(box: Sequence[Span], device: torch.device) -> dict[str, Any]:
    """b, h, q_idx and kv_idx of a box, each along its own axis of four."""
    places = {}
    for axis, (name, (start, stop)) in enumerate(zip(POSITIONS, box, strict=True)):
        shape = [1] * 4
        shape[axis] = stop - start
        places[name] = torch.arange(start, stop, dtype=torch.int32, device=device).view(shape)
    return places


def _sizes(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> tuple[int, int, int, int]:
    counts = []
    for axis, (name, value) in enumerate((("B", B), ("H", H))):
        count = 1 if value is None else positive(value)
        if count is None:
            raise MaskExtentError(name=name, value=value, axis=axis)
        counts.append(count)
    return counts[0], counts[1], length("Q_LEN", Q_LEN), length("KV_LEN", KV_LEN)


def _device(device: Device) -> torch.device:
    """With its index: "cuda" becomes cuda:0, as a tensor's device says it."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return torch.empty(0, device=device).device


def _check_captures(traced: Traced, device: torch.device) -> None:
    for capture, tensor in zip(traced.graph.captures, traced.tensors, strict=True):
        if tensor.device != device:
            raise DeviceMismatch(
                first="the mask",
                first_device=str(device),
                second=capture.name,
                second_device=str(tensor.device),
                name=capture.name,
            )


def _check_callable(mask_mods: Sequence[object]) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise NotCallable(
                mod=repr(mask_mod),
                type=type(mask_mod).__name__,
                expected="lambda b, h, q_idx, kv_idx: q_idx >= kv_idx",
            )
