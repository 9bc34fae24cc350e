"""BlockMask: the tiles of the score matrix that attention must compute.

A drop-in for `torch.nn.attention.flex_attention.BlockMask`. It has the graph of its mask_mod, also after
slicing, and its constructor checks that its parts fit together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexmod.block_mask import combine, pictures, tiles
from flexmod.block_mask.combine import How
from flexmod.block_mask.data import MaskData, fresh
from flexmod.block_mask.facts import COUNTED, Facts, facts, sparsity
from flexmod.block_mask.parts import (
    block_pair,
    check_grid,
    check_values,
    checked_lists,
    device_of,
    length,
    length_pair,
    noop_mask,
    table_of,
    trace_mask,
)
from flexmod.block_mask.storage import TileStorage
from flexmod.block_mask.tiles import EMPTY, FLASH_PARTS, LISTS, PARTIAL, Parts, keep_padding_partial
from flexmod.errors import ArgumentTypeError, BlockMaskCombineError, NotABlockMask, SlicedTorchMaskError
from flexmod.ir.composed import Derived, MaskMod, moved
from flexmod.ir.source import mod_name
from flexmod.runtime.private_torch import GetAttrKey, outside_of_graphs

DEFAULT_BLOCK = 128


class BlockMask(MaskData):
    """A block-sparse mask: each row's partial and full tiles, and the mask_mod behind them.

    A tile is BLOCK_SIZE[0] queries by BLOCK_SIZE[1] keys. It is full if the mask keeps all of it, and partial
    if the mask keeps some of it. A tile that reaches past the end of a length is partial too. A tile of which
    the mask keeps nothing is not listed.

        kv_num_blocks, kv_indices              partial tiles of each row of tiles
        full_kv_num_blocks, full_kv_indices    full tiles of each row; both None: every tile is partial
        q_num_blocks, q_indices                partial tiles of each column, or None
        full_q_num_blocks, full_q_indices      full tiles of each column, or None

    Qb and KVb are the numbers of tiles. By row, counts are int32 [B, H, Qb] and indices int32
    [B, H, Qb, KVb]; by column, [B, H, KVb] and [B, H, KVb, Qb]. The first `count` entries of a row are valid,
    and `create_block_mask` sorts them. Strides are free: lists may be expanded views. Rows of tiles past the
    queries of `seq_lengths` are dropped. A built mask stores runs of tiles (`tiles.py`), and makes these
    lists at their first use.

    A built mask finds its tiles again (`refresh`) at its next use after a change of a tensor that its
    mask_mod captures or read (`t.item()`, `t.shape`): a write, or other memory. A user's own lists stay as
    they are.

    `full_tiles_padded`: a full tile reaches past the end of a length (never in a built mask). The lists,
    `mask_mod`, `seq_lengths` and `BLOCK_SIZE` may be assigned: later calls see the change, the backward of an
    earlier call does not. `traced` is the graph of `mask_mod` from its assignment.

    A mask on the device meta, or from a FakeTensorMode, has shapes only: methods that read its tiles raise
    FakeTensorError.

    A mask can be copied, pickled and sent by a DataLoader's worker. The pickle contains the graph, not the
    mask_mod, and the captured tensors; torch.load reads it with weights_only=False.

    Raises BlockMaskPartsError, BlockSizeError, LengthError or DeviceMismatch if the parts do not fit
    together, TensorKindError and FreedStorageError if a kernel cannot read one, and every error of tracing a
    mask_mod.
    """

    @outside_of_graphs
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
        lists = (
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
            q_num_blocks, q_indices, full_q_num_blocks, full_q_indices,
        )  # fmt: skip
        self._storage = TileStorage.of_lists(checked_lists(dict(zip(LISTS, lists, strict=True))))
        self._snapshot = None
        self._block_size = block_pair(BLOCK_SIZE)
        self._seq_lengths = length_pair(seq_lengths)
        self.seq_lengths = self._seq_lengths  # checks the lists, and drops rows of tiles past the queries
        self.mask_mod = mask_mod
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

    @classmethod
    @outside_of_graphs
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
        """Makes a BlockMask from its lists by row.

        Computes the lists by column too, unless `compute_q_blocks` is False. Counts are int32 [B, H, Qb],
        indices int32 [B, H, Qb, KVb], as in BlockMask. `mask_mod` None keeps every score of the listed tiles.
        `seq_lengths` (queries, keys) None: the lengths end with the last tiles. Raises the errors of
        BlockMask.
        """
        ArgumentTypeError.check_flags(compute_q_blocks=compute_q_blocks)
        by_row = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        parts = checked_lists(dict(zip(LISTS, by_row, strict=False)))
        block = block_pair(BLOCK_SIZE)
        rows, width = parts["kv_indices"].shape[-2:]
        lengths = length_pair((rows * block[0], width * block[1]) if seq_lengths is None else seq_lengths)
        check_values(parts, lengths, block)  # before the lists are transposed
        columns = max(width, tiles.tile_count(lengths[1], block[1]))
        for kind in ("", "full_") if compute_q_blocks else ():
            lists = parts[f"{kind}kv_num_blocks"], parts[f"{kind}kv_indices"]
            if lists[0] is not None:
                by_column = tiles.transposed(lists, columns)
                parts[f"{kind}q_num_blocks"], parts[f"{kind}q_indices"] = by_column
        return cls(
            lengths, **parts, BLOCK_SIZE=block, mask_mod=noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order, dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )  # fmt: skip

    @classmethod
    @outside_of_graphs
    def from_dense(
        cls,
        tiles: Tensor,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
    ) -> BlockMask:
        """Makes a BlockMask from a table of tiles, bool or integers [B, H, Qb, KVb]; the inverse of to_dense.

        A tile is listed where `tiles` is not 0. Missing dimensions for H and B are 1. With `mask_mod` None
        the mask keeps every score of the listed tiles, else the scores that mask_mod keeps there.
        `seq_lengths` (queries, keys) None: the lengths end with the last tiles.

        Raises BlockMaskPartsError, BlockSizeError, LengthError, and every error of tracing a mask_mod.

        Example:

            last_two = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])
            block_mask = BlockMask.from_dense(last_two, BLOCK_SIZE=64)
            assert torch.equal(block_mask.to_dense()[0, 0], last_two)
        """
        block = block_pair(BLOCK_SIZE)
        table = table_of(tiles)
        rows, columns = table.shape[-2:]
        lengths = length_pair((rows * block[0], columns * block[1]) if seq_lengths is None else seq_lengths)
        check_grid((rows, columns), lengths, block)
        table = keep_padding_partial(table if mask_mod is None else table.clamp(max=PARTIAL), lengths, block)
        mod = noop_mask if mask_mod is None else mask_mod
        storage = TileStorage.of_table(table, tuple(table.shape[:2]), separate=mask_mod is None)
        traced = trace_mask(mod, table.device)
        return cls._of_storage(storage, lengths, block, mod, traced, classified=False)

    @classmethod
    @outside_of_graphs
    def cat(cls, masks: Sequence[BlockMask]) -> BlockMask:
        """Concatenates masks along the batch: entry 0 of the second mask follows the last of the first.

        A mask with H=1 broadcasts, unless its mask_mod reads h.

        Raises BlockMaskCombineError, NotABlockMask and ArgumentTypeError.

        Example:

            one, other = (create_block_mask(masks.sliding_window(n), 1, None, 512, 512) for n in (64, 100))
            both = BlockMask.cat([one, other])
            assert both.shape == (2, 1, 512, 512)
        """
        advice = "give a list, BlockMask.cat([first, second])"
        ArgumentTypeError.check(isinstance(masks, Iterable), "masks", masks, advice)
        masks = tuple(masks)  # it may be a generator
        for mask in masks:
            if not isinstance(mask, BlockMask):
                raise NotABlockMask.of(mask)
        return combine.concatenated([fresh(mask) for mask in masks])

    @outside_of_graphs
    def to_dense(self) -> Tensor:
        """int32 [B, H, Qb, KVb]: 1 where a tile is listed, partial or full."""
        self.refresh()
        return (self.table() != EMPTY).to(torch.int32).expand(*self.storage.batch, -1, -1)

    @outside_of_graphs
    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The parts in order: seq_lengths, the eight lists, torch's four dq_ parts, BLOCK_SIZE, mask_mod.

        `flatten` puts in seq_lengths and BLOCK_SIZE as two numbers each, otherwise as pairs.
        """
        ArgumentTypeError.check_flags(flatten=flatten)
        lengths, block = (
            (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        )
        parts = self._parts((*LISTS, *FLASH_PARTS, "dq_kv_order_spt"))
        return (*lengths, *parts.values(), *block, self.mask_mod)

    _TENSOR_ATTRS: ClassVar[tuple[str, ...]] = (*LISTS, *FLASH_PARTS)
    _CONTEXT_ATTRS: ClassVar[tuple[str, ...]] = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "dq_kv_order_spt")

    def _flatten(self) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The lists that are not None, and everything else, for torch.utils._pytree, as torch's BlockMask."""
        parts = self._parts(self._TENSOR_ATTRS)
        absent = tuple([name for name, part in parts.items() if part is None])
        present = tuple([part for part in parts.values() if part is not None])
        return present, (*[getattr(self, name) for name in self._CONTEXT_ATTRS], absent)

    def _flatten_with_keys(self) -> tuple[tuple[tuple[Any, Tensor], ...], tuple[Any, ...]]:
        """As `_flatten`, with a key for each list."""
        present, context = self._flatten()
        names = (name for name in self._TENSOR_ATTRS if name not in context[-1])
        return tuple([(GetAttrKey(name), part) for name, part in zip(names, present, strict=True)]), context

    @classmethod
    def _unflatten(cls, leaves: Sequence[Any], context: tuple[Any, ...]) -> BlockMask:
        """The inverse of `_flatten`. Raises the errors of BlockMask."""
        *known, absent = context
        names = (name for name in cls._TENSOR_ATTRS if name not in absent)
        parts = dict.fromkeys(absent) | dict(zip(names, leaves, strict=True))
        return cls(**parts, **dict(zip(cls._CONTEXT_ATTRS, known, strict=True)))

    @outside_of_graphs
    def __getitem__(self, index: Any) -> BlockMask:
        """mask[b, h, q] selects batches, heads and rows of tiles. Dimensions stay: mask[0] has B=1.

        An entry is an int, a slice, or a list or tensor of ints or bools. The slice sees the positions of the
        whole: the mask_mod of mask[1] gets b = 1, and with mask[:, :, 2] it gets q_idx from
        2 * BLOCK_SIZE[0] on.

        Raises BlockMaskIndexError.
        """
        return combine.sliced(fresh(self), index)

    @outside_of_graphs
    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Crops the mask to the first queries and keys, with the same mask_mod.

        Raises BlockMaskCropError if a length grows.
        """
        return combine.cropped(fresh(self), (length("Q_LEN", new_q_len), length("KV_LEN", new_kv_len)))

    @outside_of_graphs
    def resize(self, q_len: int, kv_len: int) -> BlockMask:
        """Makes the mask of the same mask_mod for other lengths, smaller or larger, and reuses known tiles.

        A mask that grows with a sequence, `mask.resize(n + 1, n + 1)`, evaluates one row and one column of
        tiles. Raises LengthError, and BlockMaskResizeError if a mask from a user's own lists would grow.
        """
        return combine.resized(fresh(self), (length("Q_LEN", q_len), length("KV_LEN", kv_len)))

    def __and__(self, other: BlockMask) -> BlockMask:
        """Keeps the elements that both masks keep. Batch and head dimensions of 1 broadcast.

        Raises BlockMaskCombineError.
        """
        return self._with(other, "and")

    def __or__(self, other: BlockMask) -> BlockMask:
        """Keeps the elements that either mask keeps. Raises BlockMaskCombineError."""
        return self._with(other, "or")

    __rand__, __ror__ = __and__, __or__

    @outside_of_graphs
    def _with(self, other: object, how: How) -> BlockMask:
        if callable(other) or isinstance(other, Tensor):
            given = mod_name(other) if callable(other) else "a tensor"
            raise BlockMaskCombineError(
                problem=f"{given} is not a BlockMask",
                advice=f"combine the mask_mods, create_block_mask({how}_masks(first, second), B, H, Q_LEN, "
                "KV_LEN), or build a block mask of each",
            )
        if not isinstance(other, BlockMask):
            return NotImplemented
        return combine.combined(fresh(self), fresh(other), how)

    @outside_of_graphs
    def __invert__(self) -> BlockMask:
        """Keeps exactly the elements that the mask drops. Raises BlockMaskCombineError."""
        return combine.complement(fresh(self))

    @outside_of_graphs
    def to(self, device: torch.device | str) -> BlockMask:
        """A mask with its tiles on another device. Tensors that mask_mod captures do not move.

        Raises NoDeviceError.
        """
        device = device_of(device)
        if device == self.device:
            self.refresh()
        else:  # values move
            fresh(self)
        mask_mod = moved(self._as_made(), device) if isinstance(self.mask_mod, Derived) else self.mask_mod
        traced = self._traced if mask_mod is self.mask_mod else trace_mask(mask_mod, device)
        new = self._of_storage(
            self.storage.to(device), self.seq_lengths, self.BLOCK_SIZE, mask_mod, traced,
            self.full_tiles_padded, self._classified,
        )  # fmt: skip
        for name in FLASH_PARTS:
            part = getattr(self, name)
            setattr(new, name, None if part is None else part.to(device))
        new.dq_kv_order_spt = self.dq_kv_order_spt
        return new

    def to_string(
        self,
        grid_size: int | tuple[int, int] = (20, 20),
        limit: int = 4,
        *,
        density: bool = False,
        color: bool = False,
    ) -> str:
        """Draws the mask as text: cells are solid if all their tiles are listed, shaded if some, else blank.

        `density` shades by the share of elements that the mask keeps instead. `color` does so in a terminal's
        colors, and distinguishes full from partial tiles. Draws at most `grid_size` rows and columns (-1: a
        cell for each tile), for the first `limit` pairs (b, h), or for all if negative.

        Raises GridSizeError and ArgumentTypeError.
        """
        return pictures.text(fresh(self), grid_size, limit, density, color)

    def to_svg(self, b: int = 0, h: int = 0) -> str:
        """Draws one batch and head as the text of an SVG file.

        Colors show full tiles, partial tiles, and the kept share of partial tiles. Masks of up to 128
        positions show each element. Raises BlockMaskIndexError.
        """
        return pictures.svg(self._one(b, h))

    def _repr_svg_(self) -> str | None:
        """Notebooks show the mask's picture, if it has tiles."""
        return None if self._has_no_values else self.to_svg()

    def plot(self, target: Any = None, b: int = 0, h: int = 0) -> Any:
        """Draws one batch and head with matplotlib into `target`: a file's name, axes, or None for a new
        figure. Returns the axes.

        Masks of up to 1024 positions show each element. Raises MissingMatplotlib, BlockMaskIndexError, and
        ArgumentTypeError for a target of another type.

            mask.plot("mask.png")
        """
        return pictures.plot(self._one(b, h), target)

    @outside_of_graphs
    def sparsity(self) -> float:
        """The part of the score matrix outside of the listed tiles, in per cent, as torch counts it.

        The padding of tiles at the edges counts as listed; the result is 0 where that makes it negative.
        """
        return sparsity(fresh(self))

    @outside_of_graphs
    def facts(self, budget: float = math.inf) -> Facts:
        """Facts about the mask: density, whether every query has keys, and others.

        Counts the elements of partial tiles if there are at most `budget`. Raises ArgumentTypeError.
        """
        return facts(fresh(self), budget)

    @outside_of_graphs
    def __str__(self) -> str:
        """The mask as text, and its facts in a line."""
        if self._has_no_values:
            return repr(self)
        mask = fresh(self)
        head = f"BlockMask(shape={mask.shape}, sparsity={mask.sparsity():.2f}%, "
        head += "" if mask.positions is None else f"{mask.positions}, "
        return f"{head}\n{self.to_string().strip()}\n{mask.facts(COUNTED)}\n)"

    def __repr__(self) -> str:
        if self._has_no_values:
            return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, without values)"
        mask = fresh(self)
        shapes = [(name, None if part is None else part.shape) for name, part in mask._parts(LISTS).items()]
        listed = [
            *shapes,
            ("BLOCK_SIZE", mask.BLOCK_SIZE),
            ("shape", mask.shape),
            ("sparsity", f"{mask.sparsity():.2f}%"),
            ("mask_mod", getattr(mask.mask_mod, "__name__", mask.mask_mod)),
        ]
        lines = [f"    {name}={value}" for name, value in listed]
        if mask.positions is not None:
            lines.append(f"    {mask.positions}")
        return "BlockMask(\n" + ",\n".join(lines) + "\n)"

    def _one(self, b: int, h: int) -> BlockMask:
        mask = fresh(self)
        return mask[b, h] if mask.storage.batch else mask


def from_torch(mask: Any) -> BlockMask:
    """Converts torch's BlockMask: same lists, same mask_mod. Returns a flexmod BlockMask unchanged.

    Raises NotABlockMask, and SlicedTorchMaskError for a torch mask that lost its mask_mod.
    """
    if isinstance(mask, BlockMask):
        return mask
    if not all(hasattr(mask, name) for name in (*LISTS, "seq_lengths", "BLOCK_SIZE", "mask_mod")):
        raise NotABlockMask.of(mask)
    # torch puts this stub into a slice; only its name distinguishes it from a user's function
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise SlicedTorchMaskError()
    parts: Parts = {name: getattr(mask, name, None) for name in (*LISTS, *FLASH_PARTS, "dq_kv_order_spt")}
    return BlockMask(mask.seq_lengths, **parts, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
