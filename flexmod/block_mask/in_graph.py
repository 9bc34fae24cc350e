"""Builds block masks inside torch.compile and torch.export, with an operation of torch.library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexmod.block_mask.find_tiles import find_tiles
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.parts import MaskMod, noop_mask
from flexmod.block_mask.storage import Axis, TileStorage
from flexmod.block_mask.tiles import Runs, tile_count
from flexmod.errors import InGraphMaskError
from flexmod.ir.graph import POSITIONS, Graph
from flexmod.ir.offsets import Positions
from flexmod.ir.record import Recorded, of_graph, record, traced_of
from flexmod.ir.trace import Traced
from flexmod.runtime import tensor_kinds

# A graph needs the runs' size before the runs are known, and each tile might be one. On a GPU, a line of
# tiles has room for as many runs of each kind.
MOST_RUNS = 1 << 24


@dataclass
class GraphMask:
    """The result of create_block_mask inside a graph, for flex_attention in the same graph.

    `tiles` are rows and spans, by row and by column, see `runs.py`. The mask_mod is `mod`, the text of a
    Record, with its captures.
    """

    tiles: list[Tensor]
    mod: str
    captured: list[Tensor]
    integers: list[int]
    reals: list[float]
    batch: tuple[int, int]
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    positions: Positions | None = None


def create(
    mask_mod: MaskMod,
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    separate: bool,
    positions: Positions | None = None,
) -> GraphMask:
    """Does `create_block_mask` inside a graph. Raises InGraphMaskError for masks of very many tiles."""
    given = mask_mod if positions is None else positions.mask(mask_mod)
    mod = record(given, "mask", device)
    tiles = _tiles_of(mod, sizes, block, device, separate)
    return GraphMask(
        list(tiles), mod.text, mod.captured, mod.integers, mod.reals, sizes[:2], sizes[2:], block, positions
    )


def outside(
    mask_mod: MaskMod,
    traced: Traced,
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    separate: bool,
) -> BlockMask:
    """Builds the mask of a traced mask_mod with the operation, outside of TorchDynamo: for tensors without
    values, and while torch traces. Raises InGraphMaskError for masks of very many tiles.
    """
    captures = (f"{capture.name}, captured by mask_mod," for capture in traced.graph.captures)
    with tensor_kinds.naming_fake(dict(zip(captures, traced.tensors, strict=True))):
        tiles = _tiles_of(of_graph(traced), sizes, block, device, separate)
    grid = tile_count(sizes[2], block[0]), tile_count(sizes[3], block[1])
    storage = storage_of(tiles, traced.graph, sizes[:2], grid)
    return BlockMask.of_storage(storage, sizes[2:], block, mask_mod, traced)


def _tiles_of(
    mod: Recorded,
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Calls the operation on a recorded mod. Raises InGraphMaskError before the operation runs."""
    most_runs(sizes, *map(tile_count, sizes[2:], block))
    return build_tiles(
        mod.captured, mod.integers, mod.reals, mod.text, list(sizes), list(block), separate, device
    )


@torch.library.custom_op("flexmod::block_mask", mutates_args=())
def build_tiles(
    captured: Sequence[Tensor],
    integers: Sequence[int],
    reals: Sequence[float],
    mod: str,
    sizes: Sequence[int],
    block: Sequence[int],
    separate: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operation: rows and spans of the runs by row, then by column, for each batch entry and head."""
    if device.type == "meta":
        return _empty_tiles(sizes, block, device)
    traced, _ = traced_of(mod, captured, integers, reals, device)
    named = dict(zip((f"{capture.name}, captured by mask_mod," for capture in traced.graph.captures),
                     traced.tensors, strict=True))  # fmt: skip
    tensor_kinds.check_readable(named)
    whole = (sizes[0], sizes[1], sizes[2], sizes[3])
    storage = find_tiles(traced, whole, (block[0], block[1]), device, separate)
    rows, columns = storage.grid
    most = most_runs(whole, rows, columns)
    found: list[Tensor] = []
    for axis, lines in (("kv", rows), ("q", columns)):
        runs = storage.runs(axis)  # type: ignore[arg-type]
        assert runs is not None
        spans = runs.spans.new_zeros(most, 2)
        spans[: len(runs.spans)] = runs.spans
        found += [runs.rows.expand(sizes[0], sizes[1], lines, 2, 3).contiguous(), spans]
    return found[0], found[1], found[2], found[3]


@build_tiles.register_fake
def _(
    captured: Sequence[Tensor],
    integers: Sequence[int],
    reals: Sequence[float],
    mod: str,
    sizes: Sequence[int],
    block: Sequence[int],
    separate: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_tiles(sizes, block, device)


def _empty_tiles(
    sizes: Sequence[int], block: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = tile_count(sizes[2], block[0]), tile_count(sizes[3], block[1])
    most = most_runs(sizes, rows, columns)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return (
        empty(sizes[0], sizes[1], rows, 2, 3), empty(most, 2),
        empty(sizes[0], sizes[1], columns, 2, 3), empty(most, 2),
    )  # fmt: skip


def most_runs(sizes: Sequence[int], rows: int, columns: int) -> int:
    """The number of an axis's runs to allocate. Raises InGraphMaskError."""
    most = sizes[0] * sizes[1] * max(rows * _even(columns), columns * _even(rows))
    if most > MOST_RUNS:
        raise InGraphMaskError(
            problem=f"create_block_mask makes a mask of {sizes[0] * sizes[1] * rows * columns} tiles",
            advice="build it before the call, and hand it to the compiled function",
        )
    return most


def _even(tiles: int) -> int:
    return tiles + tiles % 2


def storage_of(
    tiles: Sequence[Tensor], graph: Graph, batch: tuple[int, int], grid: tuple[int, int]
) -> TileStorage:
    """Converts the tiles of a GraphMask to a mask's storage: once if a dimension repeats them."""
    b, h = (slice(None) if name in graph.reads else slice(1) for name in POSITIONS[:2])
    by_axis: dict[Axis, Runs | None] = {
        "kv": Runs(tiles[0][b, h], tiles[1]),
        "q": Runs(tiles[2][b, h], tiles[3]),
    }
    return TileStorage(batch, grid, by_axis, {})


# By the indices of a mask: the state of its lists at their last check, and the check's result.
_checked = WeakTensorKeyDictionary()


def masked(
    storage: TileStorage,
    lengths: tuple[int, int],
    block: tuple[int, int],
    traced: Traced,
    padded: bool = False,
) -> BlockMask:
    """Makes a BlockMask for launches, whose mask_mod is never called. Validates lists once in each state.

    Raises the errors of `BlockMask.look`.
    """
    mask = BlockMask.of_storage(storage, lengths, block, noop_mask, traced, padded)
    lists = mask.storage.written()
    if lists:
        now, known = (lists, lengths, block), _checked.get(mask.kv_indices, (None, padded))
        if known[0] == now:
            mask.known_lists(known[1])
        elif mask.look(again=True):
            _checked[mask.kv_indices] = now, mask.full_tiles_padded
    return mask
