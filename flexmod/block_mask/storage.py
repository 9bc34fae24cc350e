"""Stores the tiles of a block mask: as runs, or as the user's own lists.

The builder makes runs. torch's eight lists are quadratic in the number of tiles; each is computed from the
runs at its first use. A user's lists stay lists, in their order. A `TileStorage` never changes: assigning
lists gives the mask another one, and earlier calls keep theirs.

A `MaskSnapshot` is taken at a call, so that the call's backward reads the same mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from flexmod.block_mask.parts import plain_list
from flexmod.block_mask.tiles import FULL, LISTS, PARTIAL, Parts, Runs, both_sizes, dense, ordered, tile_count
from flexmod.block_mask.tiles import of_table as runs_of_table
from flexmod.errors import BlockMaskPartsError
from flexmod.errors.base import a_type
from flexmod.ir.evaluate import captures_on_device
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced
from flexmod.ir.watched import SourceStates, computed_from
from flexmod.runtime.private_torch import (
    UNCOUNTED,
    any_uncounted,
    current_stream,
    outside_of_graphs,
    version_of,
)
from flexmod.runtime.tensor_kinds import has_no_values, tensor_key

Axis = Literal["kv", "q"]
Form = Literal["runs", "lists"]


class TileStorage:
    """The tiles of a mask, in the form that launches read.

    `batch` are the mask's batch dimensions; runs that do not depend on one have a 1 there. `grid` is
    (Qb, KVb). The keys of `by_axis` are "kv", for the runs by row, and "q", for the runs by column or None.
    `separate` False: there are no full tiles, and their lists are None.
    """

    def __init__(
        self,
        batch: tuple[int, ...],
        grid: tuple[int, int],
        by_axis: dict[Axis, Runs | None] | None,
        lists: Parts,
        separate: bool = True,
    ) -> None:
        self._versions: dict[str, int] = {}  # of lists that were computed from runs
        self._stream: int | None = None  # of a GPU, on which the tiles were found
        self._waiting: set[int] = set()  # other streams that wait for the tiles
        self.batch = batch
        self.grid = grid
        self.form: Form = "lists" if by_axis is None else "runs"
        # are full tiles listed apart from partial tiles, and are there tiles by column?
        self.separate = separate if by_axis is not None else lists["full_kv_indices"] is not None
        self.by_column = (lists["q_indices"] if by_axis is None else by_axis["q"]) is not None
        self._runs = by_axis
        self._lists = lists  # with runs, only the lists that were used so far
        if by_axis is None:
            self._tensors = tuple(part for name in LISTS if (part := lists[name]) is not None)
        else:
            self._tensors = tuple(t for r in by_axis.values() if r is not None for t in r.tensors())

    @classmethod
    def of_lists(cls, lists: Parts) -> TileStorage:
        """Stores validated lists, see `parts.checked_lists`."""
        indices = lists["kv_indices"]
        return cls(tuple(indices.shape[:-2]), tuple(indices.shape[-2:]), None, lists)

    @classmethod
    def of_table(
        cls, table: Tensor, batch: tuple[int, ...], separate: bool = True, by_column: bool = True
    ) -> TileStorage:
        """Stores the runs of `table`, int8 [..., Qb, KVb]. Its batch dimensions are `batch`, or 1 each."""
        by_axis: dict[Axis, Runs | None] = {
            "kv": runs_of_table(table).with_fixed_sizes(),
            "q": runs_of_table(table.mT).with_fixed_sizes() if by_column else None,
        }  # fmt: skip
        return cls(batch, (table.shape[-2], table.shape[-1]), by_axis, {}, separate)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have dicts of their own, and compute lists from runs again."""
        if self.form == "lists":
            return TileStorage.of_lists, (dict(self._lists),)
        return TileStorage, (self.batch, self.grid, dict(self._runs or {}), {}, self.separate)

    @classmethod
    def of_parts(
        cls, parts: Parts, batch: tuple[int, ...], grid: tuple[int, int], separate: bool
    ) -> TileStorage:
        """Stores tensors by the identifiers of `parts`, and lists that were computed from runs."""
        lists = {name: parts[name] for name in LISTS if name in parts}
        if "kv_rows" not in parts:
            return cls.of_lists(dict.fromkeys(LISTS) | lists)
        by_axis: dict[Axis, Runs | None] = {"kv": None, "q": None}
        for axis in by_axis:
            if f"{axis}_rows" in parts:
                order = parts.get(f"{axis}_order")
                by_axis[axis] = Runs(parts[f"{axis}_rows"], parts[f"{axis}_runs"], order)
        return cls(batch, grid, by_axis, lists, separate)

    def taken_apart(self) -> tuple[tuple[str, ...], list[Tensor], list[int]]:
        """Names, tensors and numbers; `put_together` is the inverse. TorchDynamo runs this."""
        computed = {} if self._runs is None else self._lists
        made = {name: part for name, part in computed.items() if part is not None}
        versions = [self._versions.get(name, UNCOUNTED) for name in made]
        return (*self.parts(), *made), [*self._tensors, *made.values()], [*self.batch, *versions]

    @classmethod
    def put_together(
        cls,
        names: tuple[str, ...],
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        grid: tuple[int, int],
        separate: bool,
    ) -> TileStorage:
        batch, versions = (numbers[0], numbers[1]), numbers[2:]
        given = zip(names, tensors, strict=True)
        # kernels take no strides of runs; hooks on saved tensors may have changed them
        parts = {name: part if name in LISTS else part.contiguous() for name, part in given}
        storage = cls.of_parts(parts, batch, grid, separate)
        made = names[len(storage._tensors) :]
        storage._versions = dict(zip(made, versions, strict=True))
        return storage

    @property
    def outdated(self) -> bool:
        """Did a user write to a list that came from the runs? Then the lists define the mask.

        So they do if torch does not count writes to one.
        """
        made = self._versions
        return bool(made) and any(
            then == UNCOUNTED or version_of(self._lists[name]) != then for name, then in list(made.items())
        )

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    def found_from(self, sources: SourceStates) -> None:
        """Records of tiles that were just found the captured tensors and the GPU's stream."""
        if self._runs is not None:
            computed_from(self._by_axis("kv").spans, sources)
            known = self._stream is not None or has_no_values(self._tensors[0])
            if self.device.type == "cuda" and not known:
                self._stream = current_stream(self.device.index)

    def wait(self) -> None:
        """Has a GPU's current stream wait for the tiles, if they were found on another one.

        A user does not know when a call finds tiles, so the streams of two calls may not wait for each other.
        """
        if self._stream is None:
            return
        index = self.device.index
        now = current_stream(index)
        if now == self._stream or now in self._waiting or is_captured(self.device):
            return
        stream = torch.cuda.current_stream(index)
        stream.wait_stream(torch.cuda.ExternalStream(self._stream, index))
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._waiting.add(now)

    def runs(self, axis: Axis) -> Runs | None:
        """The runs by row ("kv") or by column ("q") of a mask of the form "runs"."""
        return None if self._runs is None else self._runs[axis]

    def by_row(self) -> list[Tensor]:
        """The tensors with the tiles of each row."""
        runs = self.runs("kv")
        if runs is not None:
            return [runs.rows, runs.spans]
        return [part for name in LISTS[:4] if (part := self._lists[name]) is not None]

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that launches read, in either form."""
        return self._tensors

    def names(self) -> tuple[str, ...]:
        """The user's name of each of `tensors`."""
        if self._runs is not None:
            return ("the tiles of block_mask",) * len(self._tensors)
        return tuple(f"block_mask.{name}" for name in self.parts())

    def parts(self) -> tuple[str, ...]:
        """An identifier for each of `tensors`."""
        if self._runs is None:
            return tuple([name for name in LISTS if self._lists[name] is not None])
        names: list[str] = []
        for axis, runs in self._runs.items():
            if runs is not None:
                names += [f"{axis}_rows", f"{axis}_runs", f"{axis}_order"][: len(runs.tensors())]
        return tuple(names)

    def list(self, name: str) -> Tensor | None:
        """One of the eight lists; see BlockMask."""
        if name not in self._lists:
            if not torch.compiler.is_compiling():
                self.wait()
            new = self._made(name)
            if new is not None and new.is_inference():
                with torch.inference_mode(False):
                    new = new.clone()  # torch counts writes to this one
            made = self._lists.setdefault(name, new)  # another thread may have been first
            if made is not None:
                self._versions.setdefault(name, version_of(made))
        return self._lists[name]

    def all_lists(self) -> Parts:
        """The eight lists by name."""
        return {name: self.list(name) for name in LISTS}

    def written(self) -> tuple[object, ...]:
        """A value that changes with each write to a list that launches read.

        torch does not count writes to tensors of inference mode.
        """
        return () if self._runs is not None else tuple([state(part) for part in self._tensors])

    def as_lists(self, **replaced: Tensor | None) -> TileStorage:
        """The same tiles as lists, some of them replaced."""
        return TileStorage.of_lists(self.all_lists() | replaced)

    def with_tensors(self, tensors: Sequence[Tensor]) -> TileStorage:
        """The same form, with these tensors."""
        parts = dict(zip(self.parts(), tensors, strict=True))
        return TileStorage.of_parts(parts, self.batch, self.grid, self.separate)

    def table(self, columns: int) -> Tensor:
        """int8 [..., Qb, columns]: EMPTY, PARTIAL or FULL for each tile, by row.

        A batch dimension is 1 if the mask is the same along it.
        """
        if self.form == "runs":
            return self._by_axis("kv").table(columns)
        parts = self.by_row()
        for dim in range(len(self.batch)):
            if all(part.stride(dim) == 0 for part in parts):
                parts = [part.narrow(dim, 0, 1) for part in parts]
        table = dense((parts[0], parts[1]), columns).to(torch.int8) * PARTIAL
        return table.masked_fill_(dense((parts[2], parts[3]), columns), FULL) if parts[2:] else table

    def listed(self) -> int:
        """The number of listed tiles in all batches and heads. One synchronization."""
        if self.form == "runs":
            counts = self._by_axis("kv").counts()
            return int(counts.sum()) * math.prod(self.batch) // math.prod(counts.shape[1:-1])
        lists = (self._lists["kv_num_blocks"], self._lists["full_kv_num_blocks"])
        return sum(int(part.sum()) for part in lists if part is not None)

    def to(self, device: torch.device | str) -> TileStorage:
        moved = self.with_tensors([tensor.to(device) for tensor in self._tensors])
        for runs in (moved._runs or {}).values():
            if runs is not None:
                runs.with_fixed_sizes()
        return moved

    def in_order(self) -> TileStorage:
        """Returns the runs with the order of their rows and columns."""
        runs: dict[Axis, Runs | None] = {axis: self._by_axis(axis).in_order() for axis in ("kv", "q")}
        return TileStorage(self.batch, self.grid, runs, {}, self.separate)

    def _by_axis(self, axis: Axis) -> Runs:
        runs = self.runs(axis)
        assert runs is not None
        return runs

    def _made(self, name: str) -> Tensor | None:
        """Computes one list from the runs."""
        axis: Axis = "q" if "q_" in name else "kv"
        runs, full = self.runs(axis), name.startswith("full_")
        if runs is None or full and not self.separate:
            return None
        if name.endswith("num_blocks"):
            return runs.counts()[int(full)].expand(*self.batch, -1).contiguous()
        table = runs.table(self.grid[axis == "kv"])
        _, indices = ordered(table == (FULL if full else PARTIAL))
        return indices.expand(*self.batch, -1, -1).contiguous()


class ListPart:
    """One of the eight lists, as an attribute of a mask with a `storage`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @outside_of_graphs
    def __get__(self, mask: Any, owner: type) -> Any:
        mask.refresh()
        return mask._storage.list(self._name)

    @outside_of_graphs
    def __set__(self, mask: Any, part: Tensor | None) -> None:
        """Integers of another size become int32. The next use of the mask checks whether the list fits."""
        name = self._name
        if not (isinstance(part, Tensor) or part is None and name not in LISTS[:2]):
            raise BlockMaskPartsError(
                problem=f"block_mask.{name} is assigned {a_type(part)}, not a tensor",
                advice="give int32 counts [B, H, rows] and indices [B, H, rows, columns], see BlockMask",
            )
        mask._storage = mask._storage.as_lists(**{name: plain_list(name, part)})


def state(tensor: Tensor) -> tuple[object, ...]:
    """A value that changes with each write to the tensor, and with its memory.

    It does not change with writes to tensors of inference mode, or through `.data`.
    """
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride()


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

    @cached_property
    def name(self) -> object:
        """In keys of calls, one object for all snapshots that differ only in their tensors' values."""
        return object() if None in self.kinds else _name_of(self.structure, self.kinds)

    @cached_property
    def traced(self) -> Traced:
        """The graph of mask_mod with its captures; its index arithmetic is wide enough for the lengths."""
        sizes = (*both_sizes(self.storage.batch), *self.seq_lengths)
        return Traced(fitted(self.mod.graph, sizes), self.mod.tensors)

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
        return (*self.storage.names(), *self.mod.graph.captured_names)

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def table(self) -> Tensor:
        """See `BlockMask.table`."""
        return tiles_within(self.storage, self.seq_lengths, self.BLOCK_SIZE)

    def capture_kinds(self) -> tuple[object, ...] | None:
        """The present kinds of captured tensors; None if one has no kind."""
        kinds = tuple([tensor_key(tensor) for tensor in self.mod.tensors])
        return None if None in kinds else kinds

    def states(self) -> list[object]:
        """One value for each of `tensors`, which differs after a write to the tensor."""
        tiles = self.storage.written() or map(version_of, self.storage.tensors())
        return [*tiles, *map(state, self.mod.tensors)]

    @property
    def writable(self) -> tuple[Tensor, ...]:
        """The tensors that a user can write to; they end `tensors`."""
        return self.tensors if self.storage.form == "lists" else self.mod.tensors

    @cached_property
    def in_inference_mode(self) -> bool:
        """Was a writable tensor made in inference mode? torch does not count writes to it."""
        return any_uncounted(self.writable)

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


@lru_cache(1024)
def _name_of(structure: tuple[object, ...], kinds: tuple[object, ...]) -> object:
    return object()


def is_captured(device: torch.device) -> bool:
    """Is a CUDA graph of the device's current stream being captured?

    A captured launch runs at each replay on the same memory. During the capture, the host cannot read values,
    and new tensors belong to the graph.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def columns_of(storage: TileStorage, lengths: tuple[int, int], block: tuple[int, int]) -> int:
    """The number of columns of a mask's stored tiles, which may be of more keys than the mask has."""
    return max(storage.grid[1], tile_count(lengths[1], block[1]))


def tiles_within(storage: TileStorage, lengths: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """int8 [..., Qb, KVb]: the stored tiles, up to the mask's last key."""
    return storage.table(columns_of(storage, lengths, block))[..., : tile_count(lengths[1], block[1])]
