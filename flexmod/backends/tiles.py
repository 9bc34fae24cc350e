"""Lays out a call for the CPU backend: its heads, and the steps of its mask.

Heads are laid out by the keys that they share:

    [Z, G, length, dim]     Z: heads of the keys, one for each batch unless the batches share them
                            G: the query heads, over all batches, that share these keys

Keys and values are [Z, length, dim]. So batched products run over Z for any ratio of heads. A product also
sums key gradients over a group of heads, or over a batch that shares its keys.

A step has rows, columns, and elements that need the mask_mod.

A query attends to no key of an unlisted tile, whatever the mask_mod returns there. It attends to all keys of
a full tile. For a partial tile the mask_mod decides each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.backends.arguments import dtype_of_sums, order_of
from flexmod.backends.products import is_large
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL, tile_count

# Steps join small q blocks to about this many rows, enough for a fast product.
ROWS = 128
# They join rows with other columns up to this many rows, if that computes few more scores.
TALL, WASTE = 256, 1.125
# The same for steps whose products are large, which take less than half the time for a score.
TALLER, MORE_WASTE = 512, 1.8
# Elements of a mask in memory.
MASKED = 1 << 20


@dataclass(frozen=True)
class Heads:
    """The layout of one call. `real` is the dtype of its computation."""

    batch: int
    query_heads: int
    key_batch: int
    key_heads: int
    real: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Heads:
        """Returns the layout for q [B, Hq, M, D] and k [B or 1, Hkv, N, D]."""
        return cls(q.shape[0], q.shape[1], k.shape[0], k.shape[1], dtype_of_sums(q.dtype), q.device)

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes Z and G."""
        z = self.key_batch * self.key_heads
        return z, self.batch * self.query_heads // z

    def split_query(self, x: Tensor) -> Tensor:
        """Returns [B, Hq, ...] as contiguous [Z, G, ...] in `real`."""
        return self.group(x).to(self.real).contiguous()

    def split_key(self, x: Tensor) -> Tensor:
        """Returns [B or 1, Hkv, ...] as contiguous [Z, ...] in `real`."""
        return x.flatten(0, 1).to(self.real).contiguous()

    def join_query(self, x: Tensor) -> Tensor:
        """Returns [Z, G, ...] as [B, Hq, ...]."""
        lead, rest = self.batch // self.key_batch, x.shape[2:]
        if lead == 1:
            return x.reshape(self.batch, self.query_heads, *rest)
        x = x.reshape(self.key_batch, self.key_heads, lead, -1, *rest).movedim(2, 1)
        return x.reshape(self.batch, self.query_heads, *rest)

    def join_key(self, x: Tensor) -> Tensor:
        """Returns [Z, ...] as [B or 1, Hkv, ...]."""
        return x.unflatten(0, (self.key_batch, self.key_heads))

    def positions(self) -> tuple[Tensor, Tensor]:
        """Returns b and h of each query head, both int64 [Z, G]."""
        b = torch.arange(self.batch, device=self.device)[:, None].expand(-1, self.query_heads)
        h = torch.arange(self.query_heads, device=self.device).expand(self.batch, -1)
        return self.group(b), self.group(h)

    def where(self, b: int | None, h: int | None) -> tuple[range, range]:
        """Returns the ranges of Z and G for batch b (None: all) and query head h (None: all)."""
        z, g = map(range, self.shape)
        group = self.query_heads // self.key_heads
        if b is not None and self.key_batch > 1:
            z = z[b * self.key_heads : (b + 1) * self.key_heads]
        elif b is not None:
            g = g[b * group : (b + 1) * group]
        if h is not None:
            z, g = z[h // group :: self.key_heads], g[h % group :: group]
        return z, g

    def group(self, x: Tensor) -> Tensor:
        """Returns [B, Hq, ...] as [Z, G, ...], a view if its strides permit."""
        rest = x.shape[2:]
        lead = self.batch // self.key_batch
        if lead == 1:
            return x.reshape(*self.shape, *rest)
        x = x.reshape(self.key_batch, lead, self.key_heads, -1, *rest).movedim(1, 2)
        return x.reshape(*self.shape, *rest)


def in_order_of(x: Tensor, like: Tensor) -> Tensor:
    """Returns x [B, heads, length, dim] without gaps, with like's order of the first three dimensions."""
    order = order_of(like)[::-1]
    if order == (0, 1, 2):
        return x.contiguous()
    return x.permute(*order, 3).contiguous().permute(*(order.index(dim) for dim in range(3)), 3)


def chunks(z: range, g: range, count: int) -> Iterator[tuple[range, range]]:
    """Splits z and g into pairs of ranges with at most `count` heads (at least one); keeps groups whole."""
    by_z, by_g = max(1, count // len(g)), min(len(g), max(1, count))
    for i, j in product(range(0, len(z), by_z), range(0, len(g), by_g)):
        yield z[i : i + by_z], g[j : j + by_g]


def as_slice(numbers: range) -> slice:
    """Returns the range as a slice, so that indexing gives a view."""
    return slice(numbers.start, numbers.stop, numbers.step)


class StepRules(NamedTuple):
    """What steps may be.

    `squares`: they may be `causal`. `taller`: large ones may have up to TALLER rows.
    `whole_masks`: their masks have all their columns, and so they have fewer rows. Otherwise a mask has the
    columns of partial tiles.
    """

    squares: bool = False
    taller: bool = False
    whole_masks: bool = False


def length(run: slice) -> int:
    return run.stop - run.start


def shared_part(table: Tensor) -> Tensor:
    """Reduces a table's B or H to 1 if the tiles of all batch entries or all heads are the same."""
    for dim in (0, 1):
        first = table.narrow(dim, 0, 1)
        if bool((table == first).all()):
            table = first
    return table


def element_table(mask: MaskSnapshot, rows: int, columns: int) -> Tensor:
    """Returns each element's tile kind, int8 [B, H, rows, columns].

    B or H is 1 if the mask's tiles are the same for each.
    """
    table = mask.table()
    for dim, block, size in ((2, mask.BLOCK_SIZE[0], rows), (3, mask.BLOCK_SIZE[1], columns)):
        table = _spread(table, dim, block, size)
    return table


def _spread(table: Tensor, dim: int, block: int, size: int) -> Tensor:
    """Repeats tiles over `size` elements along a dimension; cuts the last tile."""
    return table.index_select(dim, torch.arange(size, device=table.device) // block)


def steps_of_table(
    table: Tensor,
    block_size: tuple[int, int],
    rows: int,
    columns: int,
    rules: StepRules,
    is_causal: Callable[[range, int], bool],
) -> Iterator[tuple[slice, tuple[slice, ...], bool, Tensor]]:
    """Yields steps of one [Qb, KVb] tile table, rows ascending, without rows that attend to nothing.

    A step is its rows, columns and `causal`, see `steps.Step`. The kinds of its tiles follow, int8 [q tiles,
    kv tiles], none if it is causal.

    `is_causal(q tiles, first kv tile)` says whether the mask_mod is causal in the tiles from there along the
    diagonal.
    """
    q_block, kv_block = block_size
    table = table[:, : tile_count(columns, kv_block)]  # lists may be of longer keys
    together = max(1, ROWS // q_block)
    squares = _squares(table) if rules.squares and q_block == kv_block else {}
    first = 0
    while first < table.shape[0]:
        square = squares.get(first)
        if square is not None and is_causal(*square):
            tiles, column = square
            start, stop = column * kv_block, min((column + len(tiles)) * kv_block, columns)
            span = slice(first * q_block, min(tiles.stop * q_block, rows))
            yield span, (slice(start, stop),), True, table[:0]
            first = tiles.stop
            continue
        last = min(first + together, table.shape[0])
        taller = min(first + TALLER // q_block, table.shape[0])
        if rules.taller and _is_large(table[first:taller], block_size):
            last = taller
        listed = (table[first:last] != EMPTY).any(0)
        while last < table.shape[0]:
            following = min(last + together, table.shape[0])
            group = table[first:following] != EMPTY
            union = group.any(0)
            if not torch.equal(union, listed) or not torch.equal(group[last - first :].any(0), listed):
                few = (following - first) * q_block <= TALL
                if not few or _waste(group) > WASTE:
                    break
            last, listed = following, union
        span = slice(first * q_block, min(last * q_block, rows))
        tiles_of = listed.nonzero().flatten()
        if len(tiles_of):
            runs = tuple(column_spans(listed, kv_block, columns))
            kinds = table[first:last, tiles_of]
            height = _height(length(span), kinds, kv_block, sum(map(length, runs)), rules.whole_masks)
            for start in range(span.start, span.stop, height):
                stop = min(start + height, span.stop)
                here = kinds[start // q_block - first : tile_count(stop, q_block) - first]
                yield slice(start, stop), runs, False, here
        first = last


def _is_large(group: Tensor, block_size: tuple[int, int]) -> bool:
    """Returns whether rows of q tiles make large products without much waste."""
    listed = group != EMPTY
    sizes = listed.shape[0] * block_size[0], int(listed.any(0).sum()) * block_size[1]
    return is_large(*sizes) and _waste(listed) <= MORE_WASTE


def _waste(listed: Tensor) -> float:
    """Returns how many scores a step of these tiles computes for each that they have."""
    return listed.shape[0] * int(listed.any(0).sum()) / max(1, int(listed.sum()))


def _squares(table: Tensor) -> dict[int, tuple[range, int]]:
    """Finds squares of tiles that may be causal: full below the diagonal, partial on it, the rest empty.

    Returns by their first q tile all their q tiles and their first kv tile. The rows of a square attend to
    nothing else.
    """
    listed = table != EMPTY
    count, full = listed.sum(1).tolist(), (table == FULL).sum(1).tolist()
    places = torch.arange(table.shape[1], device=table.device)
    start = listed.int().argmax(1).tolist()
    stop = (listed * (places + 1)).amax(1)
    ends_partial = (table.gather(1, (stop - 1).clamp(min=0)[:, None])[:, 0] == PARTIAL).tolist()
    found: dict[int, tuple[range, int]] = {}
    top = 0
    for row, last in enumerate(stop.tolist()):
        width = last - start[row]
        fits = ends_partial[row] and count[row] == full[row] + 1 == width
        if fits and width == 1:
            top = row
        elif not fits or found.get(top) != (range(top, row), start[row]) or width != row - top + 1:
            continue
        found[top] = range(top, row + 1), start[row]
    return found


def _height(rows: int, kinds: Tensor, kv_block: int, width: int, whole_masks: bool) -> int:
    """Returns how many of the rows have a mask of at most MASKED elements, 1 or more."""
    asked = sum(map(length, column_spans((kinds != FULL).any(0), kv_block, width)))
    return max(1, MASKED // (width if whole_masks else asked)) if asked else rows


def column_spans(flags: Tensor, kv_block: int, width: int) -> Iterator[slice]:
    """Yields ranges of columns, up to `width`, for each run of True among the tiles of a row."""
    edges = torch.nn.functional.pad(flags.to(torch.int8), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    for first, last in zip(starts.tolist(), stops.tolist(), strict=True):
        yield slice(first * kv_block, min(last * kv_block, width))


def element_kinds(kinds: Tensor, rows: slice, width: int, block_size: tuple[int, int]) -> Tensor:
    """Returns each element's tile kind, [rows, width], from the kinds of the rows' tiles."""
    tile = torch.arange(rows.start, rows.stop, device=kinds.device) // block_size[0]
    return _spread(kinds[tile - rows.start // block_size[0]], 1, block_size[1], width)
