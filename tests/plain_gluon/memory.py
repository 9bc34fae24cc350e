"""Memory of both kinds: tiles that programs share, and tensors behind descriptors and pointers.

Shared memory holds NaN until something has come, and knows of each element who wrote it and who read it: see
`order.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plain_gluon.order import PARTITIONS, Actor, Barrier, Clock, Race, Read, here, source_line
from plain_gluon.tiles import plain, tile


class Shared:
    """A part of shared memory. `parts`: its elements; who wrote each, and when; when each actor read it."""

    def __init__(self, parts: Sequence[np.ndarray], dtype: Any, layout: Any = None) -> None:
        self.parts, self.dtype, self.layout = parts, dtype, layout

    @staticmethod
    def new(dtype: Any, shape: Sequence[int], layout: Any, fill: float) -> Shared:
        kind = np.int64 if dtype == "int32" else np.float64
        writer = np.zeros(shape, dtype=np.intp)  # numpy reads by this type of index at once
        times = [np.zeros(shape, dtype=np.int32) for _ in range(1 + PARTITIONS)]
        return Shared([np.full(shape, fill, dtype=kind), writer, *times], dtype, layout)

    @property
    def array(self) -> np.ndarray:
        return self.parts[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def index(self, place: int) -> Shared:
        return self._view(lambda part: part[place])

    def reshape(self, shape: list[int]) -> Shared:
        def reshaped(part: np.ndarray) -> np.ndarray:
            view = part.view()
            view.shape = tuple(shape)  # no copy
            return view

        return self._view(reshaped)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda part: part.transpose(order))

    def slice(self, start: int, count: int, dim: int) -> Shared:
        assert start + count <= self.array.shape[dim]
        return self._view(lambda part: part[(slice(None),) * dim + (slice(start, start + count),)])

    def load(self, layout: Any) -> Any:
        read = Read(here.actor)
        if self.written_before(here.actor.clock, by_a_unit=False):
            self.read(here.actor)
        else:
            read.spoil("reads what has not come yet")
        read.finish()
        return tile(self.array.copy(), read)

    def store(self, value: Any) -> None:
        self.written(here.actor, here.actor.clock)
        self.array[...] = plain(value)

    def written_before(self, clock: Clock, by_a_unit: bool) -> bool:
        """Has it come, for a reader with this clock? `by_a_unit`: for the TMA or the matrix unit."""
        _, writer, time, *_ = self.parts
        return bool((clock[int(by_a_unit)][writer] >= time).all())

    def read(self, actor: Actor) -> None:
        """Notes that it has been read until now."""
        self.parts[3 + actor.number][...] = actor.time

    def written(self, actor: Actor, clock: Clock, by: Barrier | None = None) -> None:
        """Notes that it is written, by an actor or by the copy of a barrier. Nobody may read it any more."""
        if not self.written_before(clock, by is not None):
            raise Race(f"over what another writes: {source_line()}")
        for number, reads in enumerate(self.parts[3:]):
            known = clock[0, number]
            if reads.max() > known:
                late = np.unique(reads[reads > known]).tolist()
                actor.actors[number].caught(late, f"{actor.name}: {source_line()}")
        self.parts[1][...] = by.number if by else actor.number
        self.parts[2][...] = by.phase + 1 if by else actor.time

    def _view(self, of: Callable[[np.ndarray], np.ndarray]) -> Shared:
        return Shared([of(part) for part in self.parts], self.dtype, self.layout)


class Descriptor:
    """What the TMA unit knows of a tensor: tiles of `block`, zeros past an end, clipped there when stored."""

    def __init__(self, tensor: Tensor, block: Sequence[int]) -> None:
        self.tensor, self.block, self.layout, self.dtype = tensor.detach(), tuple(block), None, tensor.dtype
        self.block_type = SimpleNamespace(nbytes=int(np.prod(block)) * tensor.element_size())

    def part(self, start: Sequence[int]) -> Tensor:
        assert all(place >= 0 for place in start), "the TMA unit takes no store in front of a tensor"
        places = zip(start, self.block, strict=True)
        return self.tensor[tuple(slice(int(place), int(place) + size) for place, size in places)]

    def read(self, start: Sequence[int]) -> np.ndarray:
        found, part = np.zeros(self.block), self.part(start)
        found[tuple(map(slice, part.shape))] = part.double().numpy()
        return found

    def write(self, start: Sequence[int], tile: np.ndarray, add: bool) -> None:
        part = self.part(start)
        own = torch.from_numpy(tile[tuple(map(slice, part.shape))].copy()).to(self.dtype)
        part.copy_(part + own if add else own)


class Pointer:
    """An address in a tensor's storage, or a tile of them."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor.detach(), offset
        first = tensor.storage_offset()
        count = tensor.untyped_storage().nbytes() // tensor.element_size() - first
        self.flat = tensor.as_strided((count,), (1,), first)

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + np.asarray(steps))

    def load(self, mask: Any = True, other: Any = 0) -> Any:
        offset, mask, other = np.broadcast_arrays(*map(np.asarray, (self.offset, mask, other)))
        found = self.flat[self._places(offset[mask])]
        if found.dtype != torch.bool:
            found = found.double() if found.is_floating_point() else found.long()
        made = other.astype(found.numpy().dtype)
        made[mask] = found.numpy()
        return made if made.ndim else made.item()

    def store(self, value: Any, mask: Any = True) -> None:
        offset, value, mask = np.broadcast_arrays(*map(np.asarray, (self.offset, value, mask)))
        self.flat[self._places(offset[mask])] = torch.from_numpy(value[mask]).to(self.flat.dtype)

    def add(self, value: Any, mask: Any = True) -> Any:
        """By atomics; what was there before, of one number."""
        offset, value, mask = np.broadcast_arrays(*map(np.asarray, (self.offset, value, mask)))
        before = self.flat[int(offset)].item() if offset.ndim == 0 else None
        more = torch.from_numpy(value[mask]).to(self.flat.dtype)
        self.flat.index_put_((self._places(offset[mask]),), more, accumulate=True)
        return before

    def _places(self, offset: np.ndarray) -> Tensor:
        assert offset.size == 0 or 0 <= offset.min() <= offset.max() < len(self.flat), "outside of a tensor"
        return torch.from_numpy(offset.copy()).long()
