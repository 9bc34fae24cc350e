"""Builds a BlockMask from a mask_mod: finds the runs of its tiles and stores them.

The bounds of the mask decide whole tiles, from coarse to fine. Only the elements of undecided tiles are
evaluated: by generated kernels on a GPU (`generated.py`), in torch elsewhere (`refine.py`). A mask that is
the same for each batch entry or head is built once. Inside torch.compile and torch.export, an operation of
torch.library builds the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from flexmod.block_mask import refine
from flexmod.block_mask.combine import dense_mask
from flexmod.block_mask.format import DEFAULT_BLOCK, BlockMask
from flexmod.block_mask.parts import block_pair, device_of, length, noop_mask, positive, trace_mask
from flexmod.block_mask.storage import Axis, MaskSnapshot, TileStorage, is_captured
from flexmod.block_mask.tiles import PARTIAL, MaskLayout, Runs, both_sizes, positions_on_axes, tile_count
from flexmod.errors import ArgumentTypeError, DeviceMismatch, FlexmodError, InGraphMaskError, MaskExtentError
from flexmod.errors.base import shown
from flexmod.ir.composed import MaskMod, and_masks, or_masks
from flexmod.ir.evaluate import captures_on_device, evaluate, is_host_number
from flexmod.ir.graph import POSITIONS, Graph, as_bool, check_sizes
from flexmod.ir.offsets import OffsetLike, Positions, stated
from flexmod.ir.passes import fitted
from flexmod.ir.record import Recorded, listed, of_graph, record, unlisted
from flexmod.ir.replay import replay
from flexmod.ir.source import check_arity, mod_kind
from flexmod.ir.trace import Traced, trace
from flexmod.ir.watched import computed_from, source_states, sources_of
from flexmod.runtime import tensor_kinds
from flexmod.runtime.locks import lazy_imports
from flexmod.runtime.private_torch import any_uncounted, dynamo, outside_of_graphs, outside_transforms

__all__ = ["and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]

Device = torch.device | str | int | None


def create_block_mask(
    mask_mod: MaskMod | Tensor,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    q_offset: OffsetLike = None,
    kv_offset: OffsetLike = None,
) -> BlockMask:
    """Builds the BlockMask of a mask_mod(b, h, q_idx, kv_idx) -> bool, or of a dense mask.

    A dense mask is a tensor, bool [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN]. It is True
    where a query attends to a key, as in scaled_dot_product_attention. It gives the mask its sizes and its
    device. Calls read it, so a later write to it counts.

    `B` and `H` are the numbers of batch entries and query heads. None means that the mask is the same for
    all. `Q_LEN` and `KV_LEN` are the numbers of queries and keys. `BLOCK_SIZE` is a tile's size. It is one
    number or (queries, keys). `device` None is the current accelerator, or the CPU if there is none. With
    `separate_full_blocks` False, every tile is listed as partial. `_compile`, `compute_dq_write_order` and
    `dq_kv_order` are torch's, and have no effect. On the device "meta", or in a FakeTensorMode, the mask has
    shapes only.

    With offsets, the mask_mod sees shifted positions: the first query is q_offset, the first key kv_offset.
    Each is an integer up to 2^30, or an int32 or int64 tensor with one element for each of B batch entries or
    for all, alone or as `flexmod.Offset(values, bound)`. None is 0. A call with this mask gives its score_mod
    the same positions. After a write to such a tensor, the next use finds the tiles again.

    Raises LengthError, MaskExtentError, BlockSizeError, NoDeviceError, OffsetTypeError, OffsetValueError,
    OffsetShapeError, OffsetMismatchError, MaskCaptureGradientError, DenseMaskError, ArgumentTypeError, and
    every error of tracing. DeviceMismatch if a captured tensor is on another device; TensorKindError and
    FreedStorageError if a kernel cannot read one.

    Source: Dong et al., Flex Attention, 2024.

    Example:

        block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1024, 1024)
        print(block_mask)
    """
    ArgumentTypeError.check_flags(separate_full_blocks=separate_full_blocks)
    block = block_pair(BLOCK_SIZE)
    if isinstance(mask_mod, Tensor):
        device = mask_mod.device if device is None else device
        mask_mod, (B, H, Q_LEN, KV_LEN) = dense_mask(mask_mod, (B, H, Q_LEN, KV_LEN))
    elif not callable(mask_mod):
        check_arity(mask_mod, "mask")  # before the sizes, which such a call may leave out
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    here = device_of(device)
    positions = stated(q_offset, kv_offset, sizes[0], here, "the mask")
    layout = MaskLayout(sizes, block, here, as_bool(separate_full_blocks))
    if not torch.compiler.is_compiling():
        return _create(mask_mod, layout, positions)
    try:
        return create_in_graph(mask_mod, layout, positions)
    except FlexmodError as error:
        if not torch.compiler.is_dynamo_compiling():
            raise
        why = error.message
    dynamo().graph_break(msg=why)
    return _create(mask_mod, layout, positions)


@outside_of_graphs
def _create(mask_mod: MaskMod, layout: MaskLayout, positions: Positions | None) -> BlockMask:
    """Does `create_block_mask` outside of a graph."""
    sizes, block, here, _ = layout
    if positions is not None:
        mask_mod = positions.mask(mask_mod)
    traced = trace_mask(mask_mod, here)
    check_captures(traced, here)
    without_values = here.type == "meta" or any(map(tensor_kinds.has_no_values, traced.tensors))
    with outside_transforms():
        if without_values or tensor_kinds.recorded_by_torch():
            return create_by_operation(mask_mod, traced, layout)
        return BlockMask._of_storage(find_tiles(traced, layout), sizes[2:], block, mask_mod, traced)


def _find_again(mask: BlockMask, traced: Traced) -> TileStorage:
    """Finds the tiles of a mask by its traced mask_mod."""
    check_captures(traced, mask.device)
    sizes = (*both_sizes(mask.storage.batch), *mask.seq_lengths)
    with outside_transforms():
        return find_tiles(traced, MaskLayout(sizes, mask.BLOCK_SIZE, mask.device, mask.storage.separate))


BlockMask._find_tiles = staticmethod(_find_again)


@outside_of_graphs
def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device = None
) -> Tensor:
    """The dense mask of a mask_mod, bool [B, H, Q_LEN, KV_LEN]. A score_mod masks where it turns 0 into -inf.

    Allocates the whole mask, so it is for pictures and comparisons at small sizes. `B`, `H` and `device` are
    as in create_block_mask. Raises LengthError, MaskExtentError, NoDeviceError, DeviceMismatch, and every
    error of tracing.

    Source: Dong et al., Flex Attention, 2024.

    Example:

        keep = create_mask(masks.causal(), None, None, 100, 100, device="cpu")
        assert keep.sum() == 100 * 101 / 2
    """
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    here = device_of(device)
    kind = mod_kind(mod_fn)
    traced = trace(mod_fn, kind, here)
    check_captures(traced, here)
    check_sizes(traced.graph, sizes, "the mask")
    traced = Traced(fitted(traced.graph.with_lines, sizes), traced.tensors)
    score = torch.zeros(sizes, device=here) if kind == "score" else None
    positions = positions_on_axes(sizes, here, torch.int32)
    (result,) = evaluate(traced.graph, traced.tensors, **positions, score=score)
    mask = result if kind == "mask" else ~torch.isneginf(result)
    return mask.expand(sizes).clone(memory_format=torch.contiguous_format)


def _sizes(B: int | None, H: int | None, Q_LEN: int | None, KV_LEN: int | None) -> tuple[int, int, int, int]:
    counts = []
    for axis, (name, value) in enumerate((("B", B), ("H", H))):
        count = 1 if value is None else positive(value)
        if count is None:
            raise MaskExtentError(name=name, value=shown(value), axis=axis)
        counts.append(count)
    return counts[0], counts[1], length("Q_LEN", Q_LEN), length("KV_LEN", KV_LEN)


def find_tiles(traced: Traced, layout: MaskLayout) -> TileStorage:
    """Finds the tiles of a mask_mod; `check_captures` must accept its captures.

    Raises CallSizeError, and every error of bounds and kernels.
    """
    sizes, block, device, separate = layout
    check_sizes(traced.graph, sizes, "the block mask")
    moved = captures_on_device(Traced(traced.graph.of_any_size, traced.tensors), device)
    if not has_kernels(device):
        return _in_torch(moved, layout)
    generated = _with_kernels()
    if generated.is_first(moved, layout):
        # without captured tensors, the host is faster: a GPU's kernels of torch are loaded one by one
        place = device if moved.tensors else torch.device("cpu")
        found = _in_torch(moved, layout._replace(device=place)).to(device)
        return found.in_order() if moved.tensors and generated.is_ordered(block, device) else found
    return TileStorage(sizes[:2], layout.grid(), generated.build(moved, layout), {}, separate)


def _in_torch(traced: Traced, layout: MaskLayout) -> TileStorage:
    sizes, block, device, separate = layout
    graph = fitted(traced.graph.with_lines, sizes)
    table = refine.classify(Traced(graph, traced.tensors), sizes, block, device)
    if not separate:
        table.clamp_(max=PARTIAL)
    return TileStorage.of_table(table, sizes[:2], separate)


@cache
def _with_kernels() -> ModuleType:
    with lazy_imports():
        from flexmod.runtime import side_by_side

        side_by_side.start_ahead()
        from flexmod.block_mask import generated
    return generated


def has_kernels(device: torch.device) -> bool:
    """Do generated kernels find the tiles on this device? Stand-ins for a GPU replace this."""
    return device.type == "cuda"


def check_captures(traced: Traced, device: torch.device) -> None:
    """Raises DeviceMismatch if a captured tensor is neither on the mask's device nor a number of the host."""
    for capture, tensor in zip(traced.graph.captures, traced.tensors, strict=True):
        _check_device(capture.name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device and not is_host_number(tensor, device):
        raise DeviceMismatch.of("the mask", device, name, tensor.device)


# A graph needs the runs' size before the runs are known, and each tile might be one. On a GPU, a line of
# tiles has room for as many runs of each kind.
MOST_RUNS = 1 << 24


class GraphMask(BlockMask):
    """The result of create_block_mask inside a graph. Its first use outside makes it a plain BlockMask.

    Inside a graph, flex_attention takes its parts. Everything else needs attributes that a BlockMask has.
    The lists in `tiles` are rows and spans, by row and by column, see `tiles.py`. The mask_mod that made
    them is recorded in `tiled`, and without the mask's offsets in `mod`.
    """

    def __init__(
        self, tiles: list[Tensor], tiled: Recorded, mod: Recorded, layout: MaskLayout,
        positions: Positions | None,
    ) -> None:  # fmt: skip
        self.tiles, self.tiled, self.mod, self.layout = tiles, tiled, mod, layout
        self.positions = positions

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _make_plain(self)
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _make_plain(self)
        return self.__reduce_ex__(protocol)


@outside_of_graphs
def _make_plain(mask: GraphMask) -> None:
    """Turns the mask into a BlockMask with the same tiles, whose mask_mod replays the record."""
    layout, positions = mask.layout._replace(device=mask.tiles[0].device), mask.positions
    traced, own = (mod.traced(layout.device)[0] for mod in (mask.tiled, mask.mod))
    storage = present_tiles(storage_of(mask.tiles, traced.graph, layout), traced, layout, outside=False)
    mask_mod: MaskMod = replay(own)
    mask_mod = mask_mod if positions is None else positions.mask(mask_mod)
    made = BlockMask._of_storage(storage, layout.sizes[2:], layout.block, mask_mod, traced)
    mask.__class__ = BlockMask  # type: ignore[assignment]
    mask.__dict__ = made.__dict__


def create_in_graph(mask_mod: MaskMod, layout: MaskLayout, positions: Positions | None = None) -> GraphMask:
    """Does `create_block_mask` inside a graph. Raises InGraphMaskError for masks of very many tiles."""
    device = layout.device
    mod = tiled = record(mask_mod, "mask", device)
    if positions is not None:
        tiled = record(positions.mask(mask_mod), "mask", device)
    for tensor in tiled.captured:
        _check_device("a tensor, captured by mask_mod", tensor, device)
    return GraphMask(list(_tiles_of(tiled, layout)), tiled, mod, layout, positions)


def create_by_operation(mask_mod: MaskMod, traced: Traced, layout: MaskLayout) -> BlockMask:
    """Builds the mask of a traced mask_mod with the operation, outside of TorchDynamo: for tensors without
    values, and while torch traces. Raises InGraphMaskError for masks of very many tiles.
    """
    with tensor_kinds.naming_mixed(traced.named()):
        tiles = _tiles_of(of_graph(traced), layout)
    storage = storage_of(tiles, traced.graph, layout)
    return BlockMask._of_storage(storage, layout.sizes[2:], layout.block, mask_mod, traced)


def _tiles_of(mod: Recorded, layout: MaskLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Calls the operation on a recorded mod. Raises InGraphMaskError before the operation runs."""
    sizes, block, device, separate = layout
    most_runs(sizes, *layout.grid())
    return build_tiles(
        listed(mod.captured), mod.integers, mod.reals, mod.text, list(sizes), list(block), separate, device
    )


@torch.library.custom_op(
    "flexmod::block_mask",
    mutates_args=(),
    schema="(Tensor?[] captured, SymInt[]? integers, float[]? reals, str mod, SymInt[] sizes, "
    "SymInt[] block, bool separate, Device device) -> (Tensor, Tensor, Tensor, Tensor)",
)
def build_tiles(
    captured: Sequence[Tensor | None],
    integers: Sequence[int] | None,
    reals: Sequence[float] | None,
    mod: str,
    sizes: Sequence[int],
    block: Sequence[int],
    separate: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operation: rows and spans of the runs by row, then by column, for each batch entry and head.

    Its lists are as in `record.listed`.
    """
    if device.type == "meta":
        return _empty_tiles(sizes, block, device)
    traced, _ = Recorded(mod, unlisted(captured), unlisted(integers), unlisted(reals)).traced(device)
    tensor_kinds.check_readable(traced.named())
    whole = (sizes[0], sizes[1], sizes[2], sizes[3])
    sources = source_states(traced.tensors)
    storage = find_tiles(traced, MaskLayout(whole, (block[0], block[1]), device, separate))
    rows, columns = storage.grid
    most = most_runs(whole, rows, columns)
    found: list[Tensor] = []
    for axis, lines in (("kv", rows), ("q", columns)):
        runs = storage.runs(axis)  # type: ignore[arg-type]
        assert runs is not None
        spans = runs.spans.new_zeros(most, 2)
        spans[: len(runs.spans)] = runs.spans
        table = runs.rows.expand(sizes[0], sizes[1], lines, 2, 3).contiguous()
        made = Runs(table, spans).with_fixed_sizes()  # for another graph, which may take the mask
        found += [made.rows, made.spans]
    computed_from(found[1], sources)
    return found[0], found[1], found[2], found[3]


@build_tiles.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, sizes, block, _, device = given
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
    # a line has room for an even number of runs; max() would be a guard that binds two lengths together
    most = sizes[0] * sizes[1] * (rows * columns + rows + columns)
    if most > MOST_RUNS:
        raise InGraphMaskError(
            problem=f"create_block_mask makes a mask of {sizes[0] * sizes[1] * rows * columns} tiles",
            advice="build it before the call, and hand it to the compiled function",
        )
    return most


def storage_of(tiles: Sequence[Tensor], graph: Graph, layout: MaskLayout) -> TileStorage:
    """Converts the tiles of a GraphMask to a mask's storage: once if a dimension repeats them."""
    b, h = (slice(None) if name in graph.reads else slice(1) for name in POSITIONS[:2])
    by_axis: dict[Axis, Runs | None] = {
        "kv": Runs(tiles[0][b, h].contiguous(), tiles[1]),  # kernels take no strides of rows
        "q": Runs(tiles[2][b, h].contiguous(), tiles[3]),
    }
    return TileStorage(layout.sizes[:2], layout.grid(), by_axis, {}, layout.separate)


# By the memory of a mask's runs: what the tiles that replaced them last were found from, their graph and
# layout, and the tiles. Masks of other lengths may share the memory.
_found_again = WeakIdKeyDictionary()


def present_tiles(storage: TileStorage, traced: Traced, layout: MaskLayout, outside: bool) -> TileStorage:
    """The tiles of a mask_mod for the present values of its captured tensors: `storage`, if it has them.

    A compiled graph has the tiles of a mask as inputs, and no code of it runs before they are read. So the
    operation that reads them finds them again after a write, and so does its backward. It remembers what it
    found for a mask from `outside` the graph. On a GPU that excludes tiles that may be in a CUDA graph's
    memory: torch gives such a graph copies of its inputs.
    """
    runs = None if storage.outdated else storage.runs("kv")
    if not traced.tensors or runs is None or not all(layout.sizes[2:]):
        return storage
    if layout.device.type == "meta" or is_captured(layout.device):
        return storage
    # before the search for tiles, so that a write during it counts
    known, sources = sources_of(runs.spans), source_states(traced.tensors)
    memory = runs.spans.untyped_storage()
    # since a mask was made in the graph there were no writes, counted or not
    if not (outside and any_uncounted(traced.tensors)):
        if known == sources:
            return storage
        last = _found_again.get(memory)
        if last is not None and last[:3] == (sources, traced.graph, layout):
            return last[3]
    found = find_tiles(traced, layout)
    found.found_from(sources)
    if outside and (known is not None or layout.device.type == "cpu"):
        _found_again[memory] = sources, traced.graph, layout, found
    return found


# By the indices of a mask: the state of its lists at their last check, and the check's result.
_checked = WeakTensorKeyDictionary()


def masked(storage: TileStorage, traced: Traced, layout: MaskLayout, padded: bool) -> MaskSnapshot:
    """Makes a mask for launches. Validates lists once in each state.

    Raises the errors of `BlockMask.look`.
    """
    lengths, block = layout.sizes[2:], layout.block
    if storage.form == "runs" and not storage.outdated:
        return MaskSnapshot(storage, lengths, block, padded, traced)
    mask = BlockMask._of_storage(storage, lengths, block, noop_mask, traced, padded)
    lists = mask.storage.written()
    if lists:
        now, known = (lists, lengths, block), _checked.get(mask.kv_indices, (None, padded))
        if known[0] == now:
            mask.full_tiles_padded = known[1]
        elif mask.look(again=True):
            _checked[mask.kv_indices] = now, mask.full_tiles_padded
    return mask.snapshot()
