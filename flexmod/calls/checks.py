"""Checks a call's tensors, mask and captures before a launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmod import errors
from flexmod.backends.options import USUAL, Layout
from flexmod.block_mask.parts import check_no_gradient
from flexmod.block_mask.storage import MaskSnapshot, TileStorage
from flexmod.codegen.spec import FLOAT8, KERNEL_DTYPES, SMALLEST_TILE
from flexmod.errors.base import a_type, counted
from flexmod.ir.evaluate import is_host_number
from flexmod.ir.graph import check_sizes, dtype_name, used_captures
from flexmod.ir.offsets import LARGEST
from flexmod.ir.trace import Traced
from flexmod.runtime import tensor_kinds

MOST_PROGRAMS = 2**31 - 1
SWAPPED = "; or say by layout='bhsd' or 'bshd' which dimension has the positions"
GENERATED = ("triton", "interpret")  # the backends of generated kernels
TORCH_DTYPES = (*KERNEL_DTYPES, torch.float64)  # of the other backends


def check_tensors(query: Any, key: Any, value: Any, enable_gqa: bool, layout: Layout = USUAL) -> None:
    """Checks shapes and devices of query, key and value, whose dimensions are in the layout's order."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise errors.NotATensor(name=name, type=a_type(tensor), layout=layout.shape)
        if tensor.is_nested:
            raise errors.NestedTensorInput(name=name)
        if tensor.layout is not torch.strided:
            raise errors.NotStrided(name=name, layout=tensor.layout)
        if tensor.dim() != 4:
            raise errors.NotFourDimensional(
                name=name, rank=counted(tensor.dim(), "dimension"), shape=tuple(tensor.shape),
                layout=layout.shape,
            )  # fmt: skip
        if not tensor.shape[3]:
            raise errors.EmptyHeadDim(name=name, shape=tuple(tensor.shape))
    for name in ("key", "value"):
        check_device("query", query, name, named[name].device)
    if query.shape[3] != key.shape[3]:
        raise errors.HeadDimMismatch(query=query.shape[3], key=key.shape[3])
    heads, length = layout.heads, layout.length
    if key.shape[length] != value.shape[length]:
        raise errors.LengthMismatch(
            key=key.shape[length], value=value.shape[length], dimension=f"{length}{layout.named}"
        )
    if key.shape[heads] != value.shape[heads]:
        counts = (query.shape[heads], key.shape[heads], value.shape[heads])
        raise errors.KeyValueHeadsMismatch.of(*counts, heads, layout.named)
    # `in` compares no symbols of a graph
    if key.shape[0] != value.shape[0] or not (key.shape[0] == 1 or key.shape[0] == query.shape[0]):
        raise errors.BatchMismatch(query=query.shape[0], key=key.shape[0], value=value.shape[0])
    of_query, of_key = query.shape[heads], key.shape[heads]
    in_no_groups = of_query % of_key if of_key else of_query
    if in_no_groups or (of_query != of_key and not enable_gqa):
        error = errors.HeadRatioError if in_no_groups else errors.HeadCountMismatch
        raise error(query=counted(of_query, "head"), key=of_key, layout=_swapped(query, key, layout))


def _swapped(query: Tensor, key: Tensor, layout: Layout) -> str:
    """Advice for tensors whose heads and lengths may be swapped. Only an error asks for it.

    In a graph, a comparison of lengths is a guard.
    """
    lengths = query.shape[layout.length], key.shape[layout.length]
    return SWAPPED if lengths[0] == lengths[1] < query.shape[layout.heads] else ""


def is_float8(query: Any, key: Any, value: Any, scales: Any, out_dtype: Any) -> bool:
    """Returns whether a call has float8 tensors, scales or an output dtype; see `float8.lowered`."""
    if scales is not None or out_dtype is not None:
        return True
    return any(getattr(x, "dtype", None) in FLOAT8 for x in (query, key, value))


def with_equal_heads(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Tensor, Tensor] | None:
    """Repeats heads of key or of value, so that both have as many; None if they have, or cannot.

    Kernels read keys and values by one head's number. With `enable_gqa` both numbers may divide query's.
    """
    given = (query, key, value)
    if not enable_gqa or not all(isinstance(x, Tensor) and x.dim() == 4 for x in given):
        return None
    of_query, of_key, of_value = (x.shape[1] for x in given)
    if of_key == of_value or not of_key or not of_value or of_query % of_key or of_query % of_value:
        return None
    if not torch.compiler.is_compiling():
        tensor_kinds.check({"key": key, "value": value})
    # not math.lcm, which takes no symbols of a graph
    most = next(n for n in range(of_key, of_query + 1, of_key) if n % of_value == 0)
    return key.repeat_interleave(most // of_key, 1), value.repeat_interleave(most // of_value, 1)


def check_extents(query: Tensor, key: Tensor) -> None:
    """Checks that positions, their sums and the number of programs fit in int32, as kernels need."""
    for name, tensor in (("query", query), ("key", key)):
        batch, heads, length, _ = tensor.shape
        if length > LARGEST:
            raise errors.ExtentError(
                name=f"{name}'s length", value=length, limit=LARGEST, along="the positions"
            )
        tiles = batch * heads * -(-length // SMALLEST_TILE)
        if tiles > MOST_PROGRAMS:
            raise errors.ExtentError(
                name=f"the number of {name}'s tiles, batch * heads * length / {SMALLEST_TILE},", value=tiles,
                limit=MOST_PROGRAMS, along="the batch",
            )  # fmt: skip


def check_dtypes(query: Tensor, key: Tensor, value: Tensor, backend: str, wants_grad: bool) -> None:
    """Checks that the backend takes the dtypes; key and value may have a lower one without gradients."""
    if backend == "triton" and any(x.dtype in FLOAT8 for x in (query, key, value)):
        return  # `float8.lowered` checked them
    accepted = KERNEL_DTYPES if backend in GENERATED else TORCH_DTYPES
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in accepted:
            raise errors.UnsupportedDtype(
                name=name, dtype=dtype_name(tensor.dtype), backend=backend.upper(),
                accepted=", ".join(map(dtype_name, accepted)), advice=_cast_of(tensor),
            )  # fmt: skip
    if key.dtype == value.dtype == query.dtype:
        return
    names = [dtype_name(tensor.dtype) for tensor in (query, key, value)]
    if key.dtype != value.dtype or torch.promote_types(query.dtype, key.dtype) != query.dtype:
        raise errors.MixedDtypes(query=names[0], key=names[1], value=names[2])
    if wants_grad:
        raise errors.LowerPrecisionBackward(query=names[0], key=names[1])


def _cast_of(tensor: Tensor) -> str:
    """Returns code that casts the tensor to a dtype that attention takes."""
    if tensor.is_quantized:
        return "dequantize()"
    return "real" if tensor.is_complex() else f"to({torch.bfloat16})"


def check_mask(mask: MaskSnapshot, query: Tensor, key: Tensor) -> None:
    """Checks the mask's shape, device and captures against the call."""
    check_device("query", query, "block_mask", mask.device)
    tiles = mask.storage.tensors()
    tensor_kinds.check({f"block_mask's tensor {number}": tensor for number, tensor in enumerate(tiles)})
    check_dimensions(mask.storage)
    lengths = (query.shape[2], key.shape[2])
    if tuple(mask.seq_lengths) != lengths:
        swapped = ""
        if tuple(mask.seq_lengths) == (query.shape[1], key.shape[1]):
            swapped = SWAPPED
        raise errors.MaskLengthError(
            mask_q=mask.seq_lengths[0], mask_kv=mask.seq_lengths[1], query=counted(lengths[0], "position"),
            key=lengths[1], call=_rebuild_call(mask, lengths), layout=swapped,
        )  # fmt: skip
    for dim, axis, index in ((0, "B", "b"), (1, "H", "h")):
        size = mask.storage.batch[dim]
        if size not in (1, query.shape[dim]):
            raise errors.MaskBroadcastError(axis=axis, mask=size, query=query.shape[dim])
        if size == 1 < query.shape[dim] and index in mask.mod.graph.reads:
            raise errors.MaskReadsBroadcastIndex(index=index, axis=axis, query=query.shape[dim])
    check_sizes(mask.mod.graph, (*query.shape[:2], *lengths), "the call")
    check_captures(mask.mod, query)


def check_dimensions(storage: TileStorage) -> None:
    """Checks that a mask has dimensions for batch and head."""
    if len(storage.batch) != 2:
        raise errors.BlockMaskPartsError(
            problem=f"block_mask's kv_indices have shape {(*storage.batch, *storage.grid)}; attention takes "
            "[B, H, Qb, KVb]",
            advice="give all its lists dimensions for B and H, of size 1 where the mask is the same for each",
        )


def _rebuild_call(mask: MaskSnapshot, lengths: tuple[int, int]) -> str:
    if 0 in lengths:
        return "leave block_mask out of a call without queries or without keys"
    batch, heads = (size if size > 1 else None for size in mask.storage.batch)
    device = str(mask.device)
    part = lengths[0] < min(mask.seq_lengths[0], lengths[1])
    at_the_end = f", with q_offset={lengths[1] - lengths[0]} if the queries are the last" if part else ""
    return (
        f"create_block_mask(mask_mod, {batch}, {heads}, {lengths[0]}, {lengths[1]}, device={device!r}, "
        f"BLOCK_SIZE={tuple(mask.BLOCK_SIZE)}){at_the_end}"
    )


def check_captures(traced: Traced, query: Tensor) -> None:
    """Checks that captured tensors are on query's device and that a mask captures none with a gradient.

    A tensor with one element may be on the host.
    """
    for number in used_captures(traced.graph.nodes):
        tensor, name = traced.tensors[number], traced.graph.captured_names[number]
        if not is_host_number(tensor, query.device):
            check_device("query", query, name, tensor.device)
        tensor_kinds.check({name: tensor})
        if traced.graph.kind == "mask":
            check_no_gradient(traced, number)


def check_device(first: str, one: Tensor, second: str, other: torch.device) -> None:
    if one.device != other:
        raise errors.DeviceMismatch.of(first, one.device, second, other)
