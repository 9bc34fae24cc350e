"""A snapshot of a block mask at a call, so that the call's backward reads the same mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask.storage import TileStorage, state
from flexmod.block_mask.tiles import tile_count
from flexmod.internals.torch import version_of
from flexmod.ir.evaluate import captures_on_device
from flexmod.ir.fingerprint import tensor_key
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced


class SnapshotName:
    """Represents, in the cache of calls, all snapshots that differ only in their tensors' values."""


@dataclass(frozen=True, eq=False)
class MaskSnapshot:
    """A block mask as a call's launches read it; see `BlockMask.snapshot`.

    Assigning a part of the mask does not change the snapshot. Its tensors' values may change: `lists` is the
    state of the lists at their check. In `derived`, backends store results from the tiles under their own
    keys.
    """

    storage: TileStorage
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    full_tiles_padded: bool
    mod: Traced
    lists: tuple[object, ...] = ()
    derived: dict[object, Any] = field(default_factory=dict)
    name: SnapshotName = field(default_factory=SnapshotName)

    def is_like(self, other: MaskSnapshot) -> bool:
        """Do they differ only in their tensors' values, or not at all?"""
        return self.structure == other.structure and self.kinds == other.kinds

    @cached_property
    def traced(self) -> Traced:
        """The graph of mask_mod with its captures; its index arithmetic is wide enough for the lengths."""
        batch, heads = self.storage.batch[-2:] if len(self.storage.batch) > 1 else (1, 1)
        return Traced(fitted(self.mod.graph, (batch, heads, *self.seq_lengths)), self.mod.tensors)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that kernels read: the tiles, and mask_mod's captures."""
        return (*self.storage.tensors(), *self.mod.tensors)

    @cached_property
    def kinds(self) -> tuple[object, ...]:
        """The kind of each of `tensors` at the first call."""
        return tuple(map(tensor_key, self.tensors))

    @property
    def names(self) -> tuple[str, ...]:
        """The user's name of each of `tensors`."""
        captures = [f"{capture.name}, captured by mask_mod," for capture in self.mod.graph.captures]
        return (*self.storage.names(), *captures)

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def table(self) -> Tensor:
        """See `BlockMask.table`."""
        return self.storage.table(columns_of(self.storage, self.seq_lengths, self.BLOCK_SIZE))

    def capture_kinds(self) -> tuple[object, ...] | None:
        """The present kinds of captured tensors; None if one has no kind."""
        kinds = tuple([tensor_key(tensor) for tensor in self.mod.tensors])
        return None if None in kinds else kinds

    def states(self) -> list[object]:
        """One value for each of `tensors`, which differs after a write to the tensor."""
        found: list[object]
        if self.storage.form == "lists":
            found = list(self.storage.written())
        else:
            found = [version_of(tensor) for tensor in self.storage.tensors()]
        return found + [state(tensor) for tensor in self.mod.tensors] if self.mod.tensors else found

    @cached_property
    def in_inference_mode(self) -> bool:
        """Was one of the tensors made in inference mode? torch does not count writes to it."""
        return any(tensor.is_inference() for tensor in self.tensors)

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """The snapshot's content except its tensors."""
        storage = (self.storage.form, self.storage.batch, self.storage.separate, self.storage.names())
        return storage, self.seq_lengths, self.BLOCK_SIZE, self.full_tiles_padded, self.mod.graph

    @cached_property
    def facts(self) -> int:
        """A hash of the content except the tensors."""
        return hash(self.structure)

    def with_numbers_on(self, device: torch.device) -> MaskSnapshot:
        """The snapshot for one launch: copies the present host numbers of mask_mod to the device."""
        mod = captures_on_device(self.mod, device)
        return self if mod is self.mod else replace(self, mod=mod)

    def with_tensors(self, tensors: Sequence[Tensor]) -> MaskSnapshot:
        """The snapshot with these tensors, of the same shapes."""
        count = len(self.storage.tensors())
        tiles, captured = tuple(tensors[:count]), tuple(tensors[count:])
        mod = Traced(self.mod.graph, captured)
        if all(new is old for new, old in zip(tiles, self.storage.tensors(), strict=True)):
            return replace(self, mod=mod)
        return replace(self, storage=self.storage.with_tensors(tiles), mod=mod, lists=(), derived={})


def is_captured(device: torch.device) -> bool:
    """Is a CUDA graph of the device's current stream being captured?

    A captured launch runs at each replay on the same memory. During the capture, the host cannot read values,
    and new tensors belong to the graph.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def columns_of(storage: TileStorage, lengths: tuple[int, int], block: tuple[int, int]) -> int:
    """The number of columns of a mask's table."""
    return max(storage.grid[1], tile_count(lengths[1], block[1]))
