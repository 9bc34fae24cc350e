"""Checks the arguments of the functions that make masks and score mods. Most checks raise
LibraryArgumentError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask.parts import device_of
from flexmod.errors import LibraryArgumentError
from flexmod.errors.base import a_type, counted, shown
from flexmod.ir.graph import as_int
from flexmod.ir.offsets import LARGEST
from flexmod.ir.proxy import TracedValue, plain_number
from flexmod.runtime import config, tensor_kinds

MaskMod = Callable[[Any, Any, Any, Any], Any]
INT64 = 2**63 - 1
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def whole(value: object) -> int | None:
    """An integer of any library as an int; None for anything else.

    A tensor is not taken for its value, since the mask would not see a later write to it.
    """
    return None if isinstance(value, Tensor) else as_int(value)


def check_number(
    function: str, name: str, value: Any, least: int, advice: str = "count it in positions", most: int = INT64
) -> int:
    """Returns `value` as an int if it is an integer from `least` to `most`."""
    number = whole(value)
    rule = f"an integer of {least} or more"
    if number is not None and number >= least:
        if not _exceeds(number, most):
            return number
        rule = f"an integer from {least} to {most}"
    raise LibraryArgumentError(function=function, name=name, value=shown(value), rule=rule, advice=advice)


def _exceeds(number: int, most: int) -> bool:
    return type(number) is int and number > most  # no guard of a symbolic number


def check_heads(function: str, value: Any) -> int:
    """Returns a number of query heads as an int."""
    return check_number(
        function, "heads", value, 1, "give the number of query heads, query.shape[1]", LARGEST
    )


def checked_device(device: Any) -> torch.device | None:
    """Returns the device, or None for torch's default. Raises NoDeviceError."""
    return None if device is None else device_of(device)


def check_tensor(
    function: str, name: str, value: Any, ranks: tuple[int, ...], shapes: str, last: int | None = None
) -> Tensor:
    """Returns `value` if it is an integer tensor of one of these ranks, and of the `last` size, if given.

    Raises TensorKindError and FreedStorageError too.
    """
    if isinstance(value, Tensor) and not torch.compiler.is_compiling():
        tensor_kinds.check({name: value})
    fits = isinstance(value, Tensor) and value.dtype in INTEGERS
    advice = "convert it, e.g. torch.as_tensor(values, dtype=torch.int32, device=query.device)"
    if fits:
        advice = "bring it into this shape, e.g. with reshape, expand or sum"
    return check_kind(
        function, name, value, ranks, fits and (last is None or value.shape[-1:] == (last,)),
        rule=f"an integer tensor of shape {shapes}", advice=advice,
    )  # fmt: skip


def check_kind(
    function: str, name: str, value: Any, ranks: tuple[int, ...], fits: bool, *, rule: str, advice: str
) -> Tensor:
    """Returns `value` if it is a tensor of one of these ranks and `fits` is true."""
    if isinstance(value, Tensor) and value.dim() in ranks and fits:
        return value
    given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else a_type(value)
    raise LibraryArgumentError(function=function, name=name, value=given, rule=rule, advice=advice)


def check_packing(
    function: str, offsets: dict[str, Any], total: int | None = None, kv_total: int | None = None
) -> None:
    """Accepts the offsets of packed queries and keys by their names, [n + 1] each.

    If the offsets of keys are None, keys have the queries' offsets.
    """
    (name, queries), (kv_name, keys) = offsets.items()
    check_starts(function, name, queries, total)
    if keys is None:
        if kv_total not in (None, total):
            check_starts(function, name, queries, kv_total)
        return
    check_starts(function, kv_name, keys, kv_total)
    if queries.shape != keys.shape:
        raise LibraryArgumentError(
            function=function, name=kv_name, value=f"for {counted(len(keys) - 1, 'sequence')}",
            rule=f"for {len(queries) - 1}, as {name} is",
            advice="give each sequence its keys; one without keys begins where the next one begins",
        )  # fmt: skip


def check_starts(
    function: str, name: str, starts: Any, total: int | None, ranks: tuple[int, ...] = (1,),
    shapes: str = "[n + 1]",
) -> None:  # fmt: skip
    """Accepts an integer tensor of where packed sequences begin, and where the last one ends.

    Reads the values of CPU tensors; of all tensors with FLEXMOD_CHECK_BOUNDS=1; of none in a compiled graph.
    """
    some = isinstance(starts, Tensor) and starts.dim() and starts.shape[-1]
    check_tensor(function, name, starts, ranks if some else (), shapes)
    if torch.compiler.is_compiling() or tensor_kinds.recorded_by_torch() or tensor_kinds.is_hidden(starts):
        return
    if starts.device.type != "cpu" and not config.check_bounds():
        return
    values = starts.long()  # a smaller dtype would wrap the total
    wrong = torch.nn.functional.pad(values, (1, 0)).diff() < 0
    wrong[..., 0] = values[..., 0] != 0
    wrong |= values > (LARGEST if total is None else total)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        end = str(LARGEST) if total is None else f"{total}, the total length"
        raise LibraryArgumentError(
            function=function, name=name, value=f"{int(starts[tuple(place)])} at index {str(place)[1:-1]}",
            rule=f"ascending from 0 to at most {end}",
            advice="give the running total of the sequences' lengths, with a 0 before it",
        )  # fmt: skip


def check_counts(function: str, name: str, value: Any, shape: str, least: int = 0) -> int | Tensor:
    """Returns one number of positions, or a tensor of such numbers; reads no values of a tensor."""
    if isinstance(value, (Tensor, list)):
        return check_tensor(function, name, value, ranks=(1,), shapes=shape)
    return check_number(function, name, value, least)


def check_extents(function: str, name: str, value: Any, axes: int | None = None) -> tuple[int, ...]:
    """Returns a tuple with one positive integer for each axis, of 1, 2 or 3 axes if their number is None."""
    rule = f"a tuple of {axes or '1, 2 or 3'} positive integers"
    sizes = [n for n in map(whole, value) if n is not None and n > 0] if isinstance(value, tuple) else []
    if sizes and len(sizes) == len(value) and len(sizes) in ((1, 2, 3) if axes is None else (axes,)):
        if not _exceeds(math.prod(sizes), LARGEST):
            return tuple(sizes)
        rule += f" with a product of at most {LARGEST}"
    advice = "give one number for each axis, the slowest first"
    if axes is None:
        advice = "write (length,), (height, width) or (frames, height, width)"
    raise LibraryArgumentError(
        function=function, name=name, value=shown(value), rule=rule, advice=advice
    )


def check_tiles(function: str, extent: Any, tile: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the size of an image's tiles, and their number on each axis."""
    extent = check_extents(function, "extent", extent)
    tile = check_extents(function, "tile", tile, len(extent))
    if any(map(operator.mod, extent, tile)):
        raise LibraryArgumentError(
            function=function, name="tile", value=tile,
            rule=f"a divisor of extent {extent} on each axis", advice="pad to whole tiles",
        )  # fmt: skip
    return tile, tuple(map(operator.floordiv, extent, tile))


def check_positive(function: str, name: str, value: Any) -> int | float:
    """Returns `value` as a number of Python if it is positive and finite."""
    number = None if isinstance(value, (Tensor, TracedValue)) else plain_number(value)
    if number is not None and not isinstance(number, bool) and 0 < number < math.inf:
        return number
    raise LibraryArgumentError(
        function=function, name=name, value=shown(value), rule="a positive finite number",
        advice=f"write e.g. {function}(50.0)",
    )  # fmt: skip


def check_float(function: str, name: str, value: Any, ranks: tuple[int, ...], shapes: str) -> Tensor:
    """Returns `value` if it is a floating-point tensor of one of these ranks."""
    return check_kind(
        function, name, value, ranks, isinstance(value, Tensor) and value.is_floating_point(),
        rule=f"a floating-point tensor of shape {shapes}",
        advice="make it e.g. with torch.zeros(..., device=query.device), a parameter if it is learned",
    )  # fmt: skip
