"""The data of a block mask: its tiles, its lengths, and its mask_mod with the graph.

The tiles of a built mask are a cache of its mask_mod's result: a change of a captured tensor invalidates
them. Functions on masks (`selection.py`, `combine.py`, `facts.py`, `pictures.py`) take a MaskData and return
masks of its class. The public class `BlockMask` (`format.py`) has them as methods.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from flexmod.block_mask.parts import (
    block_pair,
    check_lengths,
    check_values,
    checked_lists,
    length_pair,
    trace_mask,
)
from flexmod.block_mask.storage import (
    ListPart,
    MaskSnapshot,
    TileStorage,
    columns_of,
    is_captured,
    tiles_within,
)
from flexmod.block_mask.tiles import Parts, both_sizes, tile_count
from flexmod.errors import FakeTensorError, MaskModChangedError
from flexmod.ir.composed import Derived, Mask, MaskMod, may_change
from flexmod.ir.offsets import NO_OFFSETS, Positions, positions_of
from flexmod.ir.passes import fitted
from flexmod.ir.record import numbered
from flexmod.ir.replay import deep_copied_traces, leaves, replay
from flexmod.ir.source import mod_name
from flexmod.ir.trace import Traced
from flexmod.ir.watched import Watched, source_states
from flexmod.runtime.private_torch import any_uncounted, outside_of_graphs
from flexmod.runtime.tensor_kinds import has_no_values, tensor_key

AnyMask = TypeVar("AnyMask", bound="MaskData")


class MaskData:
    """The parts of a BlockMask, their checks, and the snapshot that calls launch from.

    It watches the tensors that its mask_mod captures, and tensors that the trace read (`t.item()`,
    `t.shape`). A copy or a pickle contains the tiles, the lengths, the mask_mod and its captures.
    """

    kv_num_blocks = ListPart()
    kv_indices = ListPart()
    full_kv_num_blocks = ListPart()
    full_kv_indices = ListPart()
    q_num_blocks = ListPart()
    q_indices = ListPart()
    full_q_num_blocks = ListPart()
    full_q_indices = ListPart()
    # (mask, its traced mask_mod) -> its tiles, as `storage`; the builder registers itself here
    _find_tiles: ClassVar[Callable[..., Any]]
    _storage: TileStorage
    _seq_lengths: tuple[int, int]
    _block_size: tuple[int, int]
    _mask_mod: MaskMod
    positions: Positions | None = None  # the offsets of mask_mod
    _traced: Traced
    _classified: bool
    full_tiles_padded: bool
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    dq_kv_order: Tensor | None = None
    dq_kv_order_spt: bool | None = None
    _snapshot: MaskSnapshot | None
    _seen: tuple[object, ...] | None
    _watched: Watched | None = None
    _described: tuple[tuple[Tensor, object], ...] = ()
    _on_gpu = False
    # tiles that CUDA graphs read: a replay must find their memory
    _in_graphs: tuple[Any, ...] = ()

    @classmethod
    def _of_storage(
        cls: type[AnyMask],
        storage: TileStorage,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        mask_mod: MaskMod,
        traced: Traced,
        full_tiles_padded: bool = False,
        classified: bool = True,
    ) -> AnyMask:
        """Makes a mask from valid tiles and its mask_mod's graph. `classified`: see `_is_classified`."""
        mask = cls.__new__(cls)
        mask._storage = storage
        mask._snapshot = None
        mask._block_size = block_size
        mask._seq_lengths = seq_lengths
        mask.full_tiles_padded = full_tiles_padded
        mask._classified = classified
        mask._seen = mask._lists_now()
        mask._mask_mod, mask.positions = mask_mod, positions_of(mask_mod)
        mask._know(traced)
        storage.found_from(source_states(traced.tensors))
        return mask

    @property
    def storage(self) -> TileStorage:
        """The present tiles. Lists that a user has written to replace the runs from which they came."""
        if self._storage.outdated:
            self._storage = self._storage.as_lists()
        return self._storage

    def snapshot(self) -> MaskSnapshot:
        """The mask for a launch. Later assignments to the mask do not change it.

        Returns the last snapshot if nothing has changed. Raises the errors of `look` and `refresh`.
        """
        self.refresh()
        storage, last = self.storage, self._snapshot
        if (
            last is not None
            and last.storage is storage
            and last.mod is self._traced
            and last.seq_lengths is self._seq_lengths
            and last.BLOCK_SIZE is self._block_size
            and last.full_tiles_padded is self.full_tiles_padded
            and last.lists == storage.written()
        ):
            return last
        self.look()
        made = MaskSnapshot(
            storage, self._seq_lengths, self._block_size, self.full_tiles_padded, self._traced,
            storage.written(),
        )  # fmt: skip
        if self._seen == (storage, made.lists):  # false for lists that could not be checked
            self._snapshot = made
        return made

    @property
    def mask_mod(self) -> MaskMod:
        """The function behind the tiles. Assigning another one traces it."""
        return self._mask_mod

    @mask_mod.setter
    @outside_of_graphs
    def mask_mod(self, mask_mod: MaskMod) -> None:
        self._know(trace_mask(mask_mod, self.device))
        self._mask_mod, self.positions = mask_mod, positions_of(mask_mod)
        self._classified = False

    def _know(self, traced: Traced) -> None:
        """Takes the trace of mask_mod, and starts to watch its tensors for changes."""
        graph, self.graph_number = numbered(traced.graph)
        self._traced = replace(traced, graph=graph)
        self._watched = _watched(traced)
        self._described = tuple([(tensor, tensor_key(tensor)) for tensor in traced.described])
        self._on_gpu = self.device.type == "cuda"

    def _as_made(self) -> MaskMod:
        """The mask_mod that decided the tiles.

        A function may decide otherwise now, since a number or a tensor in its closure is another one. Then it
        is a replay of the mask's graph. Raises MaskModChangedError if the mask has offsets too, and every
        error of tracing a mask_mod.
        """
        if not may_change(self._mask_mod):
            return self._mask_mod
        now, made = trace_mask(self._mask_mod, self.device), self._traced
        pairs = zip(now.tensors, made.tensors, strict=False)
        if now.graph.key == made.graph.key and all(a is b or _equal(a, b) for a, b in pairs):
            return self._mask_mod
        if self.positions is not None:
            raise MaskModChangedError(name=mod_name(self._mask_mod), positions=self.positions)
        return replay(made, mod_name(self._mask_mod))

    @property
    def _is_classified(self) -> bool:
        """Did mask_mod decide the tiles, and not a user's own lists?"""
        return self._classified and self.storage.form == "runs"

    @property
    def traced(self) -> Traced:
        """The graph of mask_mod with its captures; its index arithmetic is wide enough for the lengths."""
        sizes = (*both_sizes(self.storage.batch), *self.seq_lengths)
        return Traced(fitted(self._traced.graph, sizes), self._traced.tensors)

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """Numbers of queries and of keys in a tile."""
        return self._block_size

    @BLOCK_SIZE.setter
    @outside_of_graphs
    def BLOCK_SIZE(self, block_size: int | tuple[int, int]) -> None:
        pair = block_pair(block_size)
        self._check_lists(self.seq_lengths, pair)
        self._block_size = pair

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys. If you assign fewer queries, the first rows of tiles remain."""
        return self._seq_lengths

    @seq_lengths.setter
    @outside_of_graphs
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        pair = length_pair(lengths)
        rows = tile_count(pair[0], self.BLOCK_SIZE[0])
        if rows < self.storage.grid[0]:
            storage = self.storage
            # all columns: a longer KV_LEN, assigned later, finds its tiles
            table = storage.table(columns_of(storage, self.seq_lengths, self.BLOCK_SIZE))[..., :rows, :]
            self._storage = TileStorage.of_table(table, storage.batch, storage.separate, storage.by_column)
        self._check_lists(pair, self.BLOCK_SIZE)
        self._seq_lengths = pair

    def look(self, again: bool = False) -> bool:
        """Validates lists that changed since the last look, or all lists if `again`.

        Returns False during the capture of a CUDA graph, which cannot read values. Raises
        BlockMaskPartsError, DeviceMismatch.
        """
        if is_captured(self.device):
            return False
        if again or self._lists_now() != self._seen:
            checked_lists(self.storage.all_lists())
            self._check_lists(self.seq_lengths, self.BLOCK_SIZE)
        return True

    def _check_lists(self, lengths: tuple[int, int], block: tuple[int, int]) -> None:
        now, lists = self._lists_now(), self._storage.all_lists()
        check_lengths(lengths, lists["kv_indices"], lists["q_indices"], block)
        padded = check_values(lists, lengths, block)
        # a write that torch does not count may list a full tile at the end
        uncounted = any_uncounted(self._storage.tensors())
        ragged = any(length % size for length, size in zip(lengths, block, strict=True))
        self.full_tiles_padded = padded or uncounted and ragged
        self._seen = now

    def _lists_now(self) -> tuple[TileStorage, tuple[object, ...]]:
        storage = self.storage
        return storage, storage.written()

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch dimensions, queries, keys."""
        return (*self._storage.batch, *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """The device of the tiles."""
        return self._storage.device

    @property
    def _has_no_values(self) -> bool:
        """Are the tiles meta or fake tensors?"""
        return any(map(has_no_values, self.storage.tensors()))

    @property
    def q_offset(self) -> int | Tensor:
        """The position of the first query, a number or a tensor with one for each batch entry."""
        found = self.positions or NO_OFFSETS
        return found.q_offset + found.q_start if found.q_start else found.q_offset

    @property
    def kv_offset(self) -> int | Tensor:
        """The position of the first key, a number or a tensor with one for each batch entry."""
        return (self.positions or NO_OFFSETS).kv_offset

    def numel(self) -> int:
        """The number of scores, masked or not."""
        return math.prod(self.shape)

    def table(self) -> Tensor:
        """int8 [..., Qb, KVb]: EMPTY, PARTIAL or FULL for each tile. A batch dimension along which the mask
        is the same is 1.
        """
        return tiles_within(self.storage, self.seq_lengths, self.BLOCK_SIZE)

    def _parts(self, names: tuple[str, ...]) -> Parts:
        return {name: getattr(self, name) for name in names}

    def refresh(self) -> bool:
        """Finds the tiles again if a captured tensor has changed. Returns whether one has.

        Calls and the methods of a mask do this. A compiled graph does it when it runs, but not for tensors
        that the trace read. During the capture of a CUDA graph the tiles stay as they are.
        Does not notice writes that torch does not count. Tensors of inference mode always count as changed.
        Raises every error of building the mask.
        """
        watched = self._watched
        if (watched is None and not self._described) or torch.compiler.is_compiling():
            return False
        if self._on_gpu and is_captured(self.device):
            if not any(known is self._storage for known in self._in_graphs):
                self._in_graphs += (self._storage,)
            return False
        described = any(tensor_key(tensor) != kind for tensor, kind in self._described)
        changed = described or (watched is not None and not watched.unchanged())
        if not changed or not self._is_classified or self.numel() == 0:
            return False
        same = watched is None or watched.same_kinds()
        again = described or self._traced.read or not same
        traced = trace_mask(self.mask_mod, self.device) if again else self._traced
        # before the search for tiles, so that a write during it counts
        watched, sources = _watched(traced), source_states(traced.tensors)
        storage = self._find_tiles(self, traced)
        if again:
            self._know(traced)
        storage.found_from(sources)
        self._storage, self.full_tiles_padded, self._watched = storage, False, watched
        self._seen = self._lists_now()
        return True

    def __copy__(self: AnyMask) -> AnyMask:
        """A mask with the same tensors. Assigning to one mask does not change the other."""
        state = self._state()  # before its class is read: a mask from a graph becomes a plain one
        new = object.__new__(type(self))
        new.__setstate__({**state, "_storage": copy.copy(self.storage)})
        return new

    def __deepcopy__(self: AnyMask, memo: dict[int, Any]) -> AnyMask:
        """A mask with copies of the tensors. A mask_mod that is a function shares its captures, since Python
        does not copy functions.
        """
        state = self._state()
        new = memo[id(self)] = object.__new__(type(self))
        mask_mod, traced = state.pop("_mask_mod"), state.pop("_traced")
        mask_mod, (traced,) = deep_copied_traces(mask_mod, [traced], memo)
        state = {name: copy.deepcopy(value, memo) for name, value in state.items()}
        new.__setstate__({**state, "_mask_mod": mask_mod, "_traced": traced})
        return new

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: a function is replaced by its graph and its captures."""
        state, traced, mask_mod = self._state(), leaves(self._traced), self._mask_mod
        if isinstance(mask_mod, Derived):
            mask_mod = self._as_made()
        else:
            replayed = replay(traced, mod_name(mask_mod))
            mask_mod = Mask(replayed) if isinstance(mask_mod, Mask) else replayed
        return {**state, "_traced": traced, "_mask_mod": mask_mod}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.positions = positions_of(self._mask_mod)
        self._know(self._traced)
        self._storage.found_from(source_states(self._traced.tensors))
        self._seen = self._lists_now() if state["_seen"] else None

    def _state(self) -> dict[str, Any]:
        """The attributes without state that depends on identity. The record of checked lists becomes a flag:
        are all lists checked?
        """
        self.refresh()
        if any(getattr(tensor, "fake_mode", None) for tensor in self.storage.tensors()):
            raise FakeTensorError(
                problem="block_mask has fake tensors, shapes without values, and is copied or pickled",
                advice="build it again, outside of the FakeTensorMode",
            )
        seen = self._lists_now() == self._seen
        own = {"_seen": seen, "_snapshot": None, "_watched": None, "_described": (), "_in_graphs": ()}
        return {**self.__dict__, **own}  # after `storage`, in which changed lists replace the runs


def positions_in(block_mask: Any) -> Positions | None:
    """The offsets of a call's block mask, which may be None, or torch's BlockMask."""
    if block_mask is None or hasattr(block_mask, "positions"):
        return None if block_mask is None else block_mask.positions
    return positions_of(getattr(block_mask, "mask_mod", None))


def fresh(mask: AnyMask) -> AnyMask:
    """The mask, with tiles for the present values of its captures. Raises FakeTensorError if it has none."""
    mask.refresh()
    if mask._has_no_values:
        raise FakeTensorError(
            problem="block_mask has shapes without values, and its tiles are asked for",
            advice="build it on a device, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, "
            "device=query.device), outside of a FakeTensorMode",
        )
    return mask


def _equal(a: Tensor, b: Tensor) -> bool:
    """Are captured tensors equal? A mask_mod that computes one has a new one in each trace."""
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and not has_no_values(a) and torch.equal(a, b)


def _watched(traced: Traced) -> Watched | None:
    tensors = (*traced.tensors, *traced.read)
    return Watched(tensors, strict=False) if tensors else None
