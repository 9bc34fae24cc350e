"""BlockMask: which tiles of the score matrix there is anything to compute in.

A drop-in for `torch.nn.attention.flex_attention.BlockMask` that owns the graph of its mask_mod, keeps it when
it is sliced, and checks when it is made that its parts fit together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask import tiles
from flexmod.block_mask.algebra import Algebra
from flexmod.block_mask.copied import Copied
from flexmod.block_mask.drawn import Drawn
from flexmod.block_mask.held import Held, ListPart
from flexmod.block_mask.launched import MaskSnapshot, columns_of, is_captured
from flexmod.block_mask.mask_mod import MaskMod, noop_mask, trace_mask
from flexmod.block_mask.parts import (
    block_pair,
    check_lengths,
    check_values,
    checked_lists,
    length,
)
from flexmod.block_mask.refresh import Refreshed
from flexmod.block_mask.tiles import EMPTY, FLASH_PARTS, LISTS, Parts
from flexmod.errors import NotABlockMask, SlicedTorchMaskError
from flexmod.ir.kept import numbered
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced

DEFAULT_BLOCK = 128


class BlockMask(Refreshed, Copied, Algebra, Drawn):
    """A block-sparse mask: for each row of tiles the partial and the full ones, and the mask_mod behind them.

    A tile is BLOCK_SIZE[0] queries by BLOCK_SIZE[1] keys. It is listed as full when the mask keeps all of it,
    as partial when it keeps some (or reaches over the end of a length), and not at all when it keeps nothing.

        kv_num_blocks, kv_indices              partial tiles of each row of tiles
        full_kv_num_blocks, full_kv_indices    full ones; both None: every tile is listed as partial
        q_num_blocks, q_indices                partial tiles of each column, or None
        full_q_num_blocks, full_q_indices      full ones of each column, or None

    With Qb and KVb the numbers of tiles, counts are int32 [B, H, Qb] (by column: [B, H, KVb]) and indices
    int32 [B, H, Qb, KVb] ([B, H, KVb, Qb]); the first `count` entries of a row count, and `create_block_mask`
    puts them in ascending order. Any strides: a mask that is the same for each head is an expanded view.
    A mask that was built holds runs of tiles (`runs.py`), and makes these lists when they are asked for.

    Where a tensor that mask_mod captures or read (`t.item()`, `t.shape`) is written to, or gets other memory,
    the tiles of a mask that was built are found again at its next use (`refresh`). Lists that a user gave
    stay as they are.

    `full_tiles_padded`: a full tile reaches over the end of a length (never so in a mask that was built).
    The lists, `mask_mod`, `seq_lengths` and `BLOCK_SIZE` may be assigned: later calls see it, the backward of
    an earlier call does not. `traced` is the graph of `mask_mod`, taken when it was assigned.

    A mask can be copied, pickled and sent by a DataLoader's worker. A pickle holds the graph in place of the
    mask_mod, and the captured tensors; torch.load reads one with weights_only=False.

    Raises BlockMaskPartsError, BlockSizeError, LengthError, DeviceMismatch where the parts do not fit
    together, TensorKindError and FreedStorageError where no kernel can read one, and what tracing a mask_mod
    raises.
    """

    kv_num_blocks = ListPart()
    kv_indices = ListPart()
    full_kv_num_blocks = ListPart()
    full_kv_indices = ListPart()
    q_num_blocks = ListPart()
    q_indices = ListPart()
    full_q_num_blocks = ListPart()
    full_q_indices = ListPart()
    _seen: tuple[object, ...] | None

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: int | tuple[int, int] = (DEFAULT_BLOCK, DEFAULT_BLOCK),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        parts = {
            "kv_num_blocks": kv_num_blocks, "kv_indices": kv_indices,
            "full_kv_num_blocks": full_kv_num_blocks, "full_kv_indices": full_kv_indices,
            "q_num_blocks": q_num_blocks, "q_indices": q_indices,
            "full_q_num_blocks": full_q_num_blocks, "full_q_indices": full_q_indices,
        }  # fmt: skip
        self._held = Held.of_lists(checked_lists(parts))
        self._snapshot: MaskSnapshot | None = None
        self._block_size = block_pair(BLOCK_SIZE)
        self.seq_lengths = seq_lengths
        self.mask_mod = mask_mod
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

    @classmethod
    def of_held(
        cls,
        held: Held,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        mask_mod: MaskMod,
        traced: Traced,
        full_tiles_padded: bool = False,
    ) -> BlockMask:
        """A mask of tiles that need no look, with the graph of its mask_mod."""
        mask = cls.__new__(cls)
        mask._held = held
        mask._snapshot = None
        mask._block_size = block_size
        mask._seq_lengths = seq_lengths
        mask.full_tiles_padded = full_tiles_padded
        mask._classified = True
        mask._seen = mask._lists_now()
        mask._mask_mod = mask_mod
        mask._know(traced)
        mask.dq_write_order = mask.dq_write_order_full = mask.dq_kv_order = mask.dq_kv_order_spt = None
        return mask

    @classmethod
    def of_table(
        cls,
        table: Tensor,
        batch: tuple[int, ...],
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        mask_mod: MaskMod,
        traced: Traced,
        *,
        separate: bool = True,
        by_column: bool = True,
        full_tiles_padded: bool = False,
    ) -> BlockMask:
        """A mask of `table`, int8 [..., Qb, KVb], whose batch dimensions are those of `batch` or 1."""
        held = Held.of_table(table, batch, separate, by_column)
        return cls.of_held(held, seq_lengths, block_size, mask_mod, traced, full_tiles_padded)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> BlockMask:
        """A BlockMask from its lists by row; the lists by column are made unless `compute_q_blocks` is False.

        The lists are those of BlockMask, counts int32 [B, H, Qb] and indices int32 [B, H, Qb, KVb].
        `mask_mod` None keeps every score of the listed tiles. `seq_lengths` (queries, keys) None: the tiles
        end where the lengths do. Raises as BlockMask does.
        """
        parts = checked_lists(
            {
                "kv_num_blocks": kv_num_blocks, "kv_indices": kv_indices,
                "full_kv_num_blocks": full_kv_num_blocks, "full_kv_indices": full_kv_indices,
            }
        )  # fmt: skip
        block = block_pair(BLOCK_SIZE)
        rows, width = parts["kv_indices"].shape[-2:]
        lengths = seq_lengths or (rows * block[0], width * block[1])
        check_values(parts, lengths, block)  # before they are transposed
        columns = max(width, tiles.tile_count(lengths[1], block[1]))
        for kind in ("", "full_") if compute_q_blocks else ():
            lists = parts[f"{kind}kv_num_blocks"], parts[f"{kind}kv_indices"]
            if lists[0] is not None:
                by_column = tiles.transposed(lists, columns)
                parts[f"{kind}q_num_blocks"], parts[f"{kind}q_indices"] = by_column
        return cls(
            lengths, **parts, BLOCK_SIZE=block, mask_mod=mask_mod or noop_mask,
            dq_write_order=dq_write_order, dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )  # fmt: skip

    @property
    def held(self) -> Held:
        """Its tiles as they are now. Lists that were written to replace the runs that they were made of."""
        if self._held.outdated:
            self._held = self._held.as_lists()
        return self._held

    def snapshot(self) -> MaskSnapshot:
        """The mask as a call launches from it: what is assigned later does not change it.

        The last one while nothing has changed. Raises as `look` and `refresh` do.
        """
        self.refresh()
        held, last = self.held, self._snapshot
        if (
            last is not None
            and last.held is held
            and last.mod is self._traced
            and last.seq_lengths is self._seq_lengths
            and last.BLOCK_SIZE is self._block_size
            and last.full_tiles_padded is self.full_tiles_padded
            and last.lists == held.written()
        ):
            return last
        self.look()
        made = MaskSnapshot(
            held, self._seq_lengths, self._block_size, self.full_tiles_padded, self._traced, held.written()
        )
        if last is not None and made.is_like(last):  # what calls know of it holds still
            made = replace(made, name=last.name)
        if self._seen == (held, made.lists):  # not so in lists that nobody could look at
            self._snapshot = made
        return made

    @property
    def mask_mod(self) -> MaskMod:
        """The function behind the tiles; it may be assigned, and is traced then."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskMod) -> None:
        self._know(trace_mask(mask_mod, self.device))
        self._mask_mod = mask_mod
        self._classified = False

    def _know(self, traced: Traced) -> None:
        graph, self.graph_number = numbered(traced.graph)
        self._traced = replace(traced, graph=graph)
        self.watch(traced, self.device)

    @property
    def classified(self) -> bool:
        """Are the tiles what mask_mod says, and not lists that were given beside it?"""
        return self._classified and self.held.form == "runs"

    @property
    def traced(self) -> Traced:
        """The graph of mask_mod, its index arithmetic wide enough for the lengths, and what it captures."""
        batch, heads = self.held.batch[-2:] if len(self.held.batch) > 1 else (1, 1)
        return Traced(fitted(self._traced.graph, (batch, heads, *self.seq_lengths)), self._traced.tensors)

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """Numbers of queries and of keys in a tile."""
        return self._block_size

    @BLOCK_SIZE.setter
    def BLOCK_SIZE(self, block_size: int | tuple[int, int]) -> None:
        pair = block_pair(block_size)
        self._check_lists(self.seq_lengths, pair)
        self._block_size = pair

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        pair = (length("Q_LEN", lengths[0]), length("KV_LEN", lengths[1]))
        self._check_lists(pair, self.BLOCK_SIZE)
        self._seq_lengths = pair

    def look(self, again: bool = False) -> bool:
        """Checks lists that were assigned or written to since they were last looked at, or `again`.

        While a CUDA graph is captured nobody can look: False. Raises BlockMaskPartsError, DeviceMismatch.
        """
        if is_captured(self.device):
            return False
        if again or self._lists_now() != self._seen:
            checked_lists(self._parts(LISTS))
            self._check_lists(self.seq_lengths, self.BLOCK_SIZE)
        return True

    def known_lists(self, padded: bool) -> None:
        """The lists, as they are now, have been checked, and this was found."""
        self.full_tiles_padded, self._seen = padded, self._lists_now()

    def _check_lists(self, lengths: tuple[int, int], block: tuple[int, int]) -> None:
        now = self._lists_now()
        check_lengths(lengths, self.kv_indices, self.q_indices, block)
        self.full_tiles_padded = check_values(self._parts(LISTS), lengths, block)
        self._seen = now

    def _lists_now(self) -> tuple[Held, tuple[object, ...]]:
        held = self.held
        return held, held.written()

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch dimensions, queries, keys."""
        return (*self.held.batch, *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """Where its tiles are."""
        return self.held.device

    def numel(self) -> int:
        """The number of scores, masked or not."""
        return math.prod(self.shape)

    def table(self) -> Tensor:
        """int8 [..., Qb, KVb]: EMPTY, PARTIAL or FULL for each tile; 1 in place of a batch dimension along
        which the mask is the same.
        """
        return self.held.table(columns_of(self.held, self.seq_lengths, self.BLOCK_SIZE))

    def to_dense(self) -> Tensor:
        """int32 [B, H, Qb, KVb]: 1 where a tile is listed, partial or full."""
        self.refresh()
        return (self.table() != EMPTY).to(torch.int32).expand(*self.held.batch, -1, -1)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The parts in order: seq_lengths, the eight lists, torch's four dq_ parts, BLOCK_SIZE, mask_mod.

        `flatten` puts in seq_lengths and BLOCK_SIZE as two numbers each, otherwise as pairs.
        """
        lengths, block = (
            (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        )
        parts = self._parts((*LISTS, *FLASH_PARTS, "dq_kv_order_spt"))
        return (*lengths, *parts.values(), *block, self.mask_mod)

    def _parts(self, names: tuple[str, ...]) -> Parts:
        return {name: getattr(self, name) for name in names}


def from_torch(mask: Any) -> BlockMask:
    """A BlockMask of a torch one: the same lists, the same mask_mod. A flexmod one comes back as it is.

    Raises NotABlockMask, and SlicedTorchMaskError for a torch mask that lost its mask_mod.
    """
    if isinstance(mask, BlockMask):
        return mask
    if not all(hasattr(mask, name) for name in (*LISTS, "seq_lengths", "BLOCK_SIZE", "mask_mod")):
        raise NotABlockMask(type=type(mask).__name__)
    # the stub that torch puts in a slice; its name is all that tells it from a user's function
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise SlicedTorchMaskError()
    parts: Parts = {name: getattr(mask, name, None) for name in (*LISTS, *FLASH_PARTS, "dq_kv_order_spt")}
    return BlockMask(mask.seq_lengths, **parts, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
