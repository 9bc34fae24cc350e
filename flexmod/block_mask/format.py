"""BlockMask: which tiles of the score matrix there is anything to compute in.

A drop-in for `torch.nn.attention.flex_attention.BlockMask` that owns the graph of its mask_mod, keeps it when
it is sliced, and checks when it is made that its parts fit together.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask import combine, cuts, pictures, tiles
from flexmod.block_mask.data import MaskData, fresh
from flexmod.block_mask.derived import How
from flexmod.block_mask.facts import COUNTED, Facts, facts, sparsity
from flexmod.block_mask.mask_mod import MaskMod, noop_mask, trace_mask
from flexmod.block_mask.parts import block_pair, check_values, checked_lists, length
from flexmod.block_mask.storage import TileStorage
from flexmod.block_mask.tiles import EMPTY, FLASH_PARTS, LISTS, Parts
from flexmod.errors import NotABlockMask, SlicedTorchMaskError
from flexmod.ir.composed import moved

DEFAULT_BLOCK = 128


class BlockMask(MaskData):
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
        self._storage = TileStorage.of_lists(checked_lists(parts))
        self._snapshot = None
        self._block_size = block_pair(BLOCK_SIZE)
        self.seq_lengths = seq_lengths
        self.mask_mod = mask_mod
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

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

    def to_dense(self) -> Tensor:
        """int32 [B, H, Qb, KVb]: 1 where a tile is listed, partial or full."""
        self.refresh()
        return (self.table() != EMPTY).to(torch.int32).expand(*self.storage.batch, -1, -1)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The parts in order: seq_lengths, the eight lists, torch's four dq_ parts, BLOCK_SIZE, mask_mod.

        `flatten` puts in seq_lengths and BLOCK_SIZE as two numbers each, otherwise as pairs.
        """
        lengths, block = (
            (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        )
        parts = self._parts((*LISTS, *FLASH_PARTS, "dq_kv_order_spt"))
        return (*lengths, *parts.values(), *block, self.mask_mod)

    def __getitem__(self, index: Any) -> BlockMask:
        """mask[b, h, q]: some batches, heads and rows of tiles. No dimension is lost: mask[0] has B=1.

        An entry is an int, a slice, or a list or tensor of ints or bools. The slice sees the positions of the
        whole: the mask_mod of mask[1] gets b = 1, that of mask[:, :, 2] gets q_idx from 2 * BLOCK_SIZE[0] on.

        Raises BlockMaskIndexError.
        """
        return cuts.sliced(fresh(self), index)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner: the same mask_mod on the first queries and keys.

        Raises BlockMaskCropError where the lengths grow.
        """
        return cuts.cropped(fresh(self), (length("Q_LEN", new_q_len), length("KV_LEN", new_kv_len)))

    def resize(self, q_len: int, kv_len: int) -> BlockMask:
        """The same mask_mod on other lengths, smaller or larger: as building it, but tiles that are known are
        kept. So a mask that grows with a sequence, `mask.resize(n + 1, n + 1)`, looks at one row and one
        column of tiles.

        Raises LengthError, and BlockMaskResizeError where a mask that was given as lists would grow.
        """
        return combine.resized(fresh(self), (length("Q_LEN", q_len), length("KV_LEN", kv_len)))

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks keep. A dimension of 1, for batch or head, serves each of the other's.

        Raises BlockMaskCombineError.
        """
        return self._with(other, "and")

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either mask keeps. Raises BlockMaskCombineError."""
        return self._with(other, "or")

    def _with(self, other: BlockMask, how: How) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return combine.combined(fresh(self), fresh(other), how)

    def __invert__(self) -> BlockMask:
        """What the mask does not keep. Raises BlockMaskCombineError."""
        return combine.complement(fresh(self))

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask with its tiles on another device. Tensors that mask_mod captures stay where they are."""
        mask = fresh(self)
        mask_mod = moved(mask.mask_mod, device)
        traced = mask._traced if mask_mod is mask.mask_mod else trace_mask(mask_mod, torch.device(device))
        new = mask.of_storage(
            mask.storage.to(device),
            mask.seq_lengths,
            mask.BLOCK_SIZE,
            mask_mod,
            traced,
            mask.full_tiles_padded,
        )
        new._classified = mask._classified
        for name in FLASH_PARTS:
            part = getattr(mask, name)
            setattr(new, name, None if part is None else part.to(device))
        new.dq_kv_order_spt = mask.dq_kv_order_spt
        return new

    def to_string(
        self,
        grid_size: int | tuple[int, int] = (20, 20),
        limit: int = 4,
        *,
        density: bool = False,
        color: bool = False,
    ) -> str:
        """The picture: solid where all tiles are listed, shaded where some are, blank where none is.

        `density` shades by the share of elements that the mask keeps instead; `color` does that in a
        terminal's colors, and tells full tiles from partial ones.

        At most `grid_size` rows and columns (-1: a cell for each tile), for the first `limit` pairs (b, h); a
        negative limit draws all of them. Raises GridSizeError.
        """
        return pictures.text(fresh(self), grid_size, limit, density, color)

    def to_svg(self, b: int = 0, h: int = 0) -> str:
        """The picture of one batch and head as the text of an SVG file.

        Full tiles, partial ones, and how much these keep have colors; up to 128 positions each element is
        drawn. Raises BlockMaskIndexError.
        """
        return pictures.svg(self._one(b, h))

    def plot(self, target: Any = None, b: int = 0, h: int = 0) -> Any:
        """The picture of one batch and head, drawn with matplotlib into `target`: the name of a file, axes,
        or None for a new figure. Returns the axes.

        Up to 1024 positions each element is drawn. Raises MissingMatplotlib, BlockMaskIndexError.

            mask.plot("mask.png")
        """
        return pictures.plot(self._one(b, h), target)

    def sparsity(self) -> float:
        """How much of the score matrix lies outside of the listed tiles, in per cent.

        Below zero where the padding of the tiles at the edge outweighs what is skipped.
        """
        return sparsity(fresh(self))

    def facts(self, budget: float = math.inf) -> Facts:
        """What the mask turns out to be: density, whether every query has keys, and so on.

        Elements of partial tiles are counted where there are no more than `budget`.
        """
        return facts(fresh(self), budget)

    def __str__(self) -> str:
        """The picture, and the facts in a line."""
        mask = fresh(self)
        head = f"BlockMask(shape={mask.shape}, sparsity={mask.sparsity():.2f}%, "
        head += "" if mask.positions is None else f"{mask.positions}, "
        return f"{head}\n{self.to_string().strip()}\n{mask.facts(COUNTED)}\n)"

    def __repr__(self) -> str:
        mask = fresh(self)
        shapes = [(name, None if part is None else part.shape) for name, part in mask._parts(LISTS).items()]
        shown = [
            *shapes,
            ("BLOCK_SIZE", mask.BLOCK_SIZE),
            ("shape", mask.shape),
            ("sparsity", f"{mask.sparsity():.2f}%"),
            ("mask_mod", getattr(mask.mask_mod, "__name__", mask.mask_mod)),
        ]
        lines = [f"    {name}={value}" for name, value in shown]
        if mask.positions is not None:
            lines.append(f"    {mask.positions}")
        return "BlockMask(\n" + ",\n".join(lines) + "\n)"

    def _one(self, b: int, h: int) -> BlockMask:
        mask = fresh(self)
        return mask[b, h] if mask.storage.batch else mask


def from_torch(mask: Any) -> BlockMask:
    """A BlockMask of a torch one: the same lists, the same mask_mod. A flexmod one comes back as it is.

    Raises NotABlockMask, and SlicedTorchMaskError for a torch mask that lost its mask_mod.
    """
    if isinstance(mask, BlockMask):
        return mask
    if not all(hasattr(mask, name) for name in (*LISTS, "seq_lengths", "BLOCK_SIZE", "mask_mod")):
        raise NotABlockMask.of(mask)
    # the stub that torch puts in a slice; its name is all that tells it from a user's function
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise SlicedTorchMaskError()
    parts: Parts = {name: getattr(mask, name, None) for name in (*LISTS, *FLASH_PARTS, "dq_kv_order_spt")}
    return BlockMask(mask.seq_lengths, **parts, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
