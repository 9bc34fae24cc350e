"""Offsets turn the indices of a call's queries and keys into positions.

    q_idx = index + q_offset        kv_idx = index + kv_offset

An index locates a query or a key in its tensor; a position is the number that mods see. Tiles, edges and
addresses use indices. Offsets are part of the mods: `Positions.mask` and `Positions.score` make mods of
indices that pass positions to the user's mods. So bounds, integer widths, tiles, derivatives and kernels
include the offsets, and a graph without offsets does not change.

A number is a constant of the graph, and becomes an argument of the kernels once it changes. A tensor is
captured, and each call reads it. Its elements are clamped to 0..bound, so that no sum with them wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmod import errors
from flexmod.errors.base import a_type
from flexmod.ir.composed import Derived, Movable
from flexmod.ir.evaluate import is_host_number
from flexmod.ir.graph import as_int, expect_size
from flexmod.runtime import config, tensor_kinds

# The largest offset or length: the sum of two, and of some tiles beyond, is an int32.
LARGEST = 2**30
DTYPES = (torch.int32, torch.int64)


class Offset:
    """A tensor of offsets, int32 or int64 [B] or of one element, with an upper bound of its values.

    For `q_offset` and `kv_offset` of `create_block_mask` and `flex_attention`. A tensor alone has the bound
    2^30. A smaller bound makes faster kernels: below 2^24, kernels compute ALiBi's distances in float32.
    Positions far beyond 2^30 need 64 bits. Raises LibraryArgumentError.

    Example:

        lengths = torch.tensor([700, 12], dtype=torch.int32)
        out = flex_attention(query, key, value, mods.alibi(8), q_offset=Offset(lengths, bound=8192))
    """

    def __init__(self, values: Tensor, bound: int = LARGEST) -> None:
        number = as_int(bound)
        largest = -1 if number is None else number
        most = f"an integer from 0 to {LARGEST}"
        errors.LibraryArgumentError.check(
            "Offset",
            ("values", values, isinstance(values, Tensor), "a tensor", "give torch.tensor(values)"),
            ("bound", bound, 0 <= largest <= LARGEST, most, "give the length of the longest sequence"),
        )
        self.values, self.bound = values, largest

    def __repr__(self) -> str:
        return f"Offset({_shown(self.values)}, bound={self.bound})"


OffsetLike = int | Tensor | Offset | None


class IndexMap(Movable):
    """Maps a new index to the old one; takes traced scalars and tensors."""

    def __call__(self, index: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Positions(Movable):
    """Turns indices into positions. Offsets are numbers, or tensors int32 or int64 [B] or of one element,
    with values up to their bound.

    `q_start`: a number to add to a `q_offset` tensor. `rows`: the order of the queries, if a slice of a mask
    changed it.
    """

    q_offset: int | Tensor = 0
    kv_offset: int | Tensor = 0
    q_bound: int = LARGEST
    kv_bound: int = LARGEST
    q_start: int = 0
    rows: IndexMap | None = None

    def of(self, b: Any, q_idx: Any, kv_idx: Any) -> tuple[Any, Any]:
        """The positions of indices; takes traced scalars and tensors."""
        q_idx = q_idx if self.rows is None else self.rows(q_idx)
        q_idx = _plus("q_offset", q_idx, self.q_offset, b, self.q_bound)
        if self.q_start:
            q_idx = q_idx + self.q_start
        return q_idx, _plus("kv_offset", kv_idx, self.kv_offset, b, self.kv_bound)

    def mask(self, mask_mod: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a mask_mod of indices. Raises OffsetMismatchError if the mask has other offsets."""
        if isinstance(mask_mod, MaskAt):
            self.check_agrees(mask_mod.positions, "this call")
            return mask_mod
        return MaskAt(mask_mod, self)

    def score(self, score_mod: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a score_mod of indices."""
        return score_mod if isinstance(score_mod, ScoreAt) else ScoreAt(score_mod, self)

    def part(self, b: Sequence[int], rows: int) -> Positions | None:
        """The offsets of batch entries `b` and of the queries from `rows` on; None without offsets."""
        q, kv = (_entries(x, b) for x in (self.q_offset, self.kv_offset))
        if isinstance(q, Tensor):
            return replace(self, q_offset=q, kv_offset=kv, q_start=self.q_start + rows)
        found = replace(self, q_offset=q + rows, kv_offset=kv)
        return None if found.agrees(None) else found

    def tensors(self) -> dict[str, tuple[Tensor, int]]:
        """The offsets that are tensors, by name, with their bounds."""
        given = ("q_offset", self.q_offset, self.q_bound), ("kv_offset", self.kv_offset, self.kv_bound)
        return {name: (offset, bound) for name, offset, bound in given if isinstance(offset, Tensor)}

    def check_values(self) -> None:
        """Validates the values of CPU offsets; of all offsets with FLEXMOD_CHECK_BOUNDS=1.

        Raises OffsetValueError.
        """
        for name, (offset, bound) in self.tensors().items():
            here = offset.device.type == "cpu" or config.check_bounds()
            if here and offset.numel() and not tensor_kinds.is_hidden(offset):
                tensor_kinds.check({name: offset})
                for value in offset.aminmax():
                    check_range(name, int(value), bound)

    def agrees(self, other: Positions | None) -> bool:
        """Do both have the same offsets? Tensors are the same if they share their memory."""
        other = other or NO_OFFSETS
        same = same_offset(self.q_offset, other.q_offset) and same_offset(self.kv_offset, other.kv_offset)
        return same and self.q_start == other.q_start and self.rows == other.rows

    def check_agrees(self, of_mask: Positions | None, by: str) -> None:
        """Raises OffsetMismatchError if a mask has other offsets."""
        if not self.agrees(of_mask):
            other = of_mask or NO_OFFSETS
            name = "kv_offset" if same_offset(self.q_offset, other.q_offset) else "q_offset"
            raise errors.OffsetMismatchError(name=name, given=_shown(getattr(self, name)), mask=other, by=by)

    def __str__(self) -> str:
        start = f" + {self.q_start}" if self.q_start else ""
        rows = "" if self.rows is None else " and rows in another order"
        return f"q_offset={_shown(self.q_offset)}{start}, kv_offset={_shown(self.kv_offset)}{rows}"


NO_OFFSETS = Positions()


def _plus(name: str, index: Any, offset: int | Tensor, b: Any, bound: int) -> Any:
    if not isinstance(offset, Tensor):
        return index if type(offset) is int and offset == 0 else index + offset
    zero = b.new_zeros((), dtype=offset.dtype)
    if offset.dim() == 0:
        entry = torch.maximum(zero, offset)
    else:
        one = zero if offset.shape[0] == 1 else expect_size(b, offset.shape[0], name, "tensor")
        entry = torch.maximum(zero, offset[one])
    entry = entry.clamp(max=bound)
    return index + (entry if offset.dtype == torch.int32 else entry.to(torch.int32))


def _entries(offset: int | Tensor, b: Sequence[int]) -> int | Tensor:
    """The offsets of some batch entries; a view if the entries ascend evenly.

    All entries are the tensor itself: a deep copy of a view counts no writes to a deep copy of the tensor.
    """
    if not isinstance(offset, Tensor) or offset.numel() == 1 or b == range(offset.shape[0]):
        return offset
    if isinstance(b, range):
        return offset[b.start : b.stop : b.step]
    return offset[torch.tensor(b, device=offset.device)]


@dataclass(frozen=True, eq=False)
class MaskAt(Derived):
    """A mask_mod of indices that passes positions to `mask_mod`."""

    mask_mod: Callable[..., Any]
    positions: Positions

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.mask_mod(b, h, *self.positions.of(b, q_idx, kv_idx))


@dataclass(frozen=True, eq=False)
class ScoreAt(Derived):
    """A score_mod of indices that passes positions to `score_mod`."""

    score_mod: Callable[..., Any]
    positions: Positions

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.score_mod(score, b, h, *self.positions.of(b, q_idx, kv_idx))


def positions_of(mask_mod: Callable[..., Any] | None) -> Positions | None:
    """The offsets of a mask_mod; None if it has none."""
    return mask_mod.positions if isinstance(mask_mod, MaskAt) else None


def of_positions(mask_mod: Callable[..., Any]) -> Callable[..., Any]:
    """The mask_mod without its offsets."""
    return mask_mod.mask_mod if isinstance(mask_mod, MaskAt) else mask_mod


def stated(
    q_offset: OffsetLike,
    kv_offset: OffsetLike,
    batch: int | None = None,
    device: torch.device | None = None,
    place: str = "query",
) -> Positions | None:
    """Validates the user's offsets. Returns None for no offsets and for 0.

    `place` is "query" or "the mask"; `batch` and `device` are its batch size and device, if known. Raises
    OffsetTypeError, OffsetValueError, OffsetShapeError, DeviceMismatch.
    """
    q, q_bound = _checked("q_offset", q_offset, batch, device, place)
    kv, kv_bound = _checked("kv_offset", kv_offset, batch, device, place)
    if not isinstance(q, Tensor) and not isinstance(kv, Tensor) and q == 0 and kv == 0:
        return None
    found = Positions(q, kv, q_bound, kv_bound)
    if not torch.compiler.is_compiling():
        found.check_values()
    return found


def of_call(
    q_offset: OffsetLike, kv_offset: OffsetLike, query: Any, of_mask: Positions | None, masked: bool
) -> Positions | None:
    """The offsets of a call: its own arguments, or else its mask's offsets, `of_mask`, if it is `masked`.

    Raises OffsetMismatchError if the arguments differ from the mask's offsets, and every error of `stated`.
    None agrees with any offset.
    """
    own, given = None, q_offset is not None or kv_offset is not None
    if given:
        whole = isinstance(query, Tensor) and query.dim() == 4
        batch, device = (query.shape[0], query.device) if whole else (None, None)
        own = stated(q_offset, kv_offset, batch, device, "query")
    if not masked:
        return own
    if given:
        own, known = own or NO_OFFSETS, of_mask or NO_OFFSETS
        if q_offset is None:
            own = replace(own, q_offset=known.q_offset, q_start=known.q_start, rows=known.rows)
        if kv_offset is None:
            own = replace(own, kv_offset=known.kv_offset)
        own.check_agrees(of_mask, "the call")
    if of_mask is not None and not torch.compiler.is_compiling():
        of_mask.check_values()
    return of_mask


def same_offset(one: int | Tensor, other: int | Tensor) -> bool:
    """Are they one number, or tensors that share memory and so stay equal after every write?"""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
    if one is other or torch.compiler.is_compiling():
        return one is other
    if tensor_kinds.has_no_values(one) or tensor_kinds.has_no_values(other):
        return False

    def place(x: Tensor) -> tuple[object, ...]:
        return x.device, x.dtype, x.data_ptr(), x.shape, x.stride()

    return place(one) == place(other)


def _checked(
    name: str, given: OffsetLike, batch: int | None, device: torch.device | None, place: str
) -> tuple[int | Tensor, int]:
    """Validates an offset. Returns it with its bound."""
    if given is None:
        return 0, LARGEST
    values, bound = (given.values, given.bound) if isinstance(given, Offset) else (given, LARGEST)
    if not isinstance(values, Tensor):
        return _number(name, values), LARGEST
    _check_tensor(name, values, batch, place)
    if device is not None and values.device != device and not is_host_number(values, device):
        raise errors.DeviceMismatch.of(place, device, name, values.device)
    return values, bound


def _number(name: str, given: Any) -> int:
    number = as_int(given)
    if number is None:
        raise errors.OffsetTypeError(name=name, value=a_type(given))
    check_range(name, number, LARGEST)
    return number


def check_range(name: str, value: int, bound: int) -> None:
    """Raises OffsetValueError for a value outside of 0..bound."""
    if not 0 <= value <= bound:
        raise errors.OffsetValueError.of(name, value, bound, LARGEST)


def _check_tensor(name: str, given: Tensor, batch: int | None, place: str) -> None:
    """Raises OffsetTypeError or OffsetShapeError for an invalid tensor of offsets."""
    if given.is_nested or given.layout != torch.strided or given.dtype not in DTYPES:
        raise errors.OffsetTypeError(name=name, value=f"a tensor of {given.dtype}".replace("torch.", ""))
    single = given.dim() < 2 and given.numel() == 1
    if not single and (given.dim() != 1 or batch is not None and given.shape[0] != batch):
        shape, size = tuple(given.shape), "B" if batch is None else batch
        advice = f"give one element for each batch entry, shape ({size},), or one number for all"
        if place == "the mask" and len(shape) == 1:
            advice = f"build the mask with B={shape[0]}, or give one number for all"
        raise errors.OffsetShapeError(name=name, shape=shape, place=place, batch=size, advice=advice)


def _shown(offset: object) -> str:
    if not isinstance(offset, Tensor):
        return str(offset)
    return f"a tensor of {offset.numel()} on {offset.device}"
