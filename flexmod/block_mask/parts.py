"""Validates the parts of a block mask, and that they fit together; traces its mask_mod."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from flexmod import errors
from flexmod.block_mask.tiles import FULL, LISTS, Parts, dense, tile_count
from flexmod.errors.base import a_type, counted, shown
from flexmod.ir.composed import MaskMod
from flexmod.ir.fingerprint import remembered
from flexmod.ir.graph import as_int, line_of_load, used_captures
from flexmod.ir.offsets import LARGEST
from flexmod.ir.trace import Traced
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import is_wrapped, outside_transforms


def block_pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """BLOCK_SIZE as (queries, keys). Raises BlockSizeError."""
    given = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    pair = [n for n in map(positive, given) if n is not None]
    if len(given) != 2 or len(pair) != 2:
        raise errors.BlockSizeError(
            block_size=shown(block_size),
            problem="is neither an integer from 1 to 1073741824 nor a pair of them",
            advice="BLOCK_SIZE=128 or BLOCK_SIZE=(queries, keys)",
        )  # fmt: skip
    return pair[0], pair[1]


def device_of(device: torch.device | str | int | None) -> torch.device:
    """The device with its index, as tensors report it: "cuda" becomes cuda:0. Raises NoDeviceError."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    if isinstance(device, torch.device) and device.index is not None:
        return device
    try:
        return torch.empty(0, device=device).device
    except TypeError:
        problem = "it must be a torch.device, the name of one or None"
    except (AssertionError, RuntimeError) as error:  # torch's own, for a device that is not there
        problem = str(error).splitlines()[0].rstrip(".")
    raise errors.NoDeviceError(device=shown(device), problem=problem)


def length(name: str, value: SupportsIndex | None) -> int:
    """A number of positions as an int. Raises LengthError."""
    number = positive(value)
    if number is None:
        tensor = "query" if name == "Q_LEN" else "key"
        advice = f"give the number of positions, e.g. {name}={tensor}.shape[2]"
        if as_int(value) == 0:
            advice = "call flex_attention without a block mask where there are no queries or no keys"
        raise errors.LengthError(name=name, value=shown(value), advice=advice)
    return number


def length_pair(lengths: object) -> tuple[int, int]:
    """Numbers of queries and of keys as ints. Raises LengthError and BlockMaskPartsError."""
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        raise errors.BlockMaskPartsError(
            problem=f"seq_lengths is {shown(lengths)}, not the numbers of queries and of keys",
            advice="write seq_lengths=(query.shape[2], key.shape[2])",
        )
    return length("Q_LEN", lengths[0]), length("KV_LEN", lengths[1])


def positive(value: object) -> int | None:
    """An integer from 1 to LARGEST, of any library, as an int; None for anything else."""
    number = as_int(value)
    if number is None or number <= 0:
        return None
    return None if type(number) is int and number > LARGEST else number  # no guard of a symbolic length


def checked_lists(parts: Parts) -> Parts:
    """Validates the eight lists and returns them as int32. Lists that `parts` does not name become None.

    Does not read their values, see `check_values`.
    """
    lists = [plain_list(name, parts.get(name)) for name in LISTS]
    counts, indices, columns = lists[0], lists[1], lists[5]
    if counts is None or indices is None or indices.dim() < 2:
        raise errors.BlockMaskPartsError(
            problem="kv_num_blocks and kv_indices are needed, of shapes [B, H, Qb] and [B, H, Qb, KVb]",
            advice="see BlockMask's description of its parts, or use create_block_mask",
        )
    by_row, by_column = indices.shape[:-1], None if columns is None else columns.shape[:-1]
    for i, rows in ((0, by_row), (2, by_row), (4, by_column), (6, by_column)):
        _check_pair(LISTS[i : i + 2], lists[i : i + 2], rows)
    for name, part in zip(LISTS, lists, strict=True):
        if part is not None and part.device != indices.device:
            raise errors.DeviceMismatch.of("kv_indices", indices.device, name, part.device)
    return dict(zip(LISTS, lists, strict=True))


def plain_list(name: str, part: Any) -> Tensor | None:
    """A list for kernels: without torch.func's wrappers or a negative bit, and integers as int32.

    Raises BlockMaskPartsError, VmapError, TensorKindError, FreedStorageError.
    """
    if part is None:
        return None
    if not isinstance(part, Tensor):
        raise errors.BlockMaskPartsError(
            problem=f"{name} is {a_type(part)}, not a tensor",
            advice=f"make it one, e.g. torch.tensor({name}, dtype=torch.int32)",
        )
    plain = tensor_kinds.plain(part, name)
    tensor_kinds.check_class(name, part)
    if plain.device.type != "meta":
        tensor_kinds.check_readable({name: plain})
    with outside_transforms():
        return _narrowed(plain.resolve_neg())


def _narrowed(part: Tensor) -> Tensor:
    """A list of integers as int32. Any other list is unchanged, and `checked_lists` raises an error for it.

    A number beyond int32 becomes one for which `check_values` raises an error.
    """
    dtype = part.dtype
    if dtype == torch.int32 or not _is_integer(part):
        return part
    if dtype in (torch.int64, torch.uint64, torch.uint32):
        limits = torch.iinfo(torch.int32)
        part = part.to(torch.int64).clamp(limits.min, limits.max)
    return part.to(torch.int32)


def _is_integer(part: Tensor) -> bool:
    return not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)


def _check_pair(names: tuple[str, ...], pair: Sequence[Tensor | None], rows: torch.Size | None) -> None:
    counts, indices = pair
    if counts is None and indices is None:
        return
    problem = ""
    if counts is None or indices is None:
        there, missing = names if indices is None else names[::-1]
        problem = f"{there} is given without {missing}"
    elif not (_is_integer(counts) and _is_integer(indices)):
        problem = f"{names[0]} is {counts.dtype} and {names[1]} {indices.dtype}, but both hold integers"
    elif counts.shape != indices.shape[:-1] or indices.shape[:-1] != rows:
        problem = f"{names[0]} has shape {tuple(counts.shape)} and {names[1]} {tuple(indices.shape)}"
    if problem:
        raise errors.BlockMaskPartsError(
            problem=problem,
            advice="give counts [..., rows] and indices [..., rows, columns] of the same rows",
        )


def table_of(given: Any) -> Tensor:
    """A user's table of tiles, as int8 [B, H, Qb, KVb]: FULL where it is not 0.

    Raises BlockMaskPartsError.
    """
    found = plain_list("tiles", given)
    if found is None or found.is_floating_point() or found.is_complex() or not 2 <= found.dim() <= 4:
        what = "None" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
        raise errors.BlockMaskPartsError(
            problem=f"tiles is {what}; a table of tiles is bool or integers, of shape [B, H, Qb, KVb]",
            advice="give one entry for each tile, e.g. block_mask.to_dense(); a dense mask of one entry for "
            "each query and key goes to create_block_mask",
        )
    table = (found != 0).to(torch.int8) * FULL
    return table.reshape(*(1,) * (4 - table.dim()), *table.shape)


def check_grid(grid: tuple[int, int], lengths: tuple[int, int], block: tuple[int, int]) -> None:
    """Raises BlockMaskPartsError if a table of tiles does not cover the lengths exactly."""
    expected = tuple(map(tile_count, lengths, block))
    if grid != expected:
        raise errors.BlockMaskPartsError(
            problem=f"tiles has {counted(grid[0], 'row')} and {counted(grid[1], 'column')}, but "
            f"Q_LEN={lengths[0]} and KV_LEN={lengths[1]} have {expected[0]} and {expected[1]} with "
            f"BLOCK_SIZE {block}",
            advice="give the seq_lengths and the BLOCK_SIZE that the table was made for",
        )


def check_lengths(
    lengths: tuple[int, int], by_row: Tensor, by_column: Tensor | None, block: tuple[int, int]
) -> None:
    """Raises BlockMaskPartsError if lengths and lists disagree: kernels address a row's tiles by both."""
    rows, columns = map(tile_count, lengths, block)
    problem = ""
    if by_row.shape[-2] != rows:
        listed = counted(by_row.shape[-2], "row")
        problem = f"tiles of {listed} are listed, but Q_LEN={lengths[0]} has {rows}"
    elif by_column is not None and by_column.shape[-2] < columns:
        listed = counted(by_column.shape[-2], "column")
        problem = f"tiles of {listed} are listed, but KV_LEN={lengths[1]} has {columns}"
    if problem:
        raise errors.BlockMaskPartsError(
            problem=f"{problem} with BLOCK_SIZE {block}",
            advice="give the seq_lengths that the lists were made for",
        )


def check_values(parts: Parts, lengths: tuple[int, int], block: tuple[int, int]) -> bool:
    """Validates the lists' values. Returns whether full tiles reach past the end of a length: kernels must
    mask the end in such tiles too.

    Waits for the lists' device. Raises BlockMaskPartsError for a tile that does not exist or is listed twice,
    and for a count that is negative or exceeds the list.
    """
    rows, columns = map(tile_count, lengths, block)
    ragged = {"kv": lengths[1] % block[1] > 0, "q": lengths[0] % block[0] > 0}
    padded: list[bool] = []
    tables: dict[str, Tensor] = {}
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        of_counts = name.replace("indices", "num_blocks")
        counts, indices = parts.get(of_counts), parts.get(name)
        if counts is None or indices is None:
            continue
        axis, other, count = ("q", "kv", rows) if "q_" in name else ("kv", "q", columns)
        room = indices.shape[-1]
        listed = torch.arange(room, device=indices.device) < counts[..., None]
        width = max(count, room)  # assigning seq_lengths may crop lists for longer keys
        miscounted = ((counts < 0) | (counts > room)).any()
        outside = (listed & ((indices < 0) | (indices >= width))).any()
        whole = count - ragged[axis]  # tiles that end before the length does
        table = dense((counts.clamp(0, room), indices.clamp(0, width - 1)), width)
        repeated = (table.sum(-1) < counts).any()
        partial = tables.get(name.removeprefix("full_"))
        if partial is not None:
            both = min(width, partial.shape[-1])
            repeated |= (table[..., :both] & partial[..., :both]).any()
        tables[name] = table
        over = (listed & (indices >= whole)).any() | (counts[..., -1] > 0).any() & ragged[other]
        *wrong, reaches_over = torch.stack([miscounted, outside, repeated, over]).tolist()
        of_wrong = (
            (f"{of_counts} has a count that is not one from 0 to {room}, the width of {name}",
             "count how many entries of each row are tiles, 0 where there are none"),
            (f"{name} lists a tile that is not one of the {width}", f"list tiles from 0 to {width - 1}"),
            (f"{name} lists a tile that is listed before",
             "list each tile once, as partial or as full: kernels would count its scores twice"),
        )  # fmt: skip
        for problem, advice in itertools.compress(of_wrong, wrong):
            raise errors.BlockMaskPartsError(problem=problem, advice=advice)
        padded.append(reaches_over and name.startswith("full"))
    return any(padded)


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """The mask_mod that keeps every score."""
    return batch.new_ones((), dtype=torch.bool)


def trace_mask(mask_mod: MaskMod, device: torch.device) -> Traced:
    """Traces a mask_mod. Unwraps its captures from torch.func's wrappers, which a mask outlives.

    Raises every error of tracing, VmapError, TensorKindError, FreedStorageError, and MaskCaptureGradientError
    for a capture that requires a gradient, if gradients are recorded.
    """
    traced = unwrapped(remembered(mask_mod, "mask", device))
    for number in used_captures(traced.graph.nodes):
        check_no_gradient(traced, number)
    return traced


def check_no_gradient(traced: Traced, number: int) -> None:
    """Raises MaskCaptureGradientError if a gradient is recorded for one of a mask's captures."""
    if traced.tensors[number].requires_grad and tensor_kinds.records_gradients():
        line = line_of_load(traced.graph.nodes, number)
        raise errors.MaskCaptureGradientError(name=traced.graph.captures[number].name, where=line)


def unwrapped(traced: Traced) -> Traced:
    """The traced mask with captures unwrapped from torch.func's wrappers. Raises as `trace_mask`."""
    captured = []
    for capture, tensor in zip(traced.graph.captures, traced.tensors, strict=True):
        if is_wrapped(tensor) and tensor.requires_grad:
            raise errors.MaskCaptureGradientError(name=capture.name)
        name = f"{capture.name}, captured by mask_mod"
        captured.append(tensor_kinds.plain(tensor, name))
        if not tensor_kinds.has_no_values(captured[-1]):
            tensor_kinds.check_readable({f"{name},": captured[-1]})
    return replace(traced, tensors=tuple(captured))
