"""Computes gradients of captured tensors from the terms of each load.

A term is the gradient of one loaded element for each score. First each term is summed over the positions that
the load's index does not read: one number for each head for slopes of heads, one for each column for a bias
of keys. Then these sums are added to the elements in a fixed order, so that two runs agree bit for bit.

`CaptureSums` takes terms tile by tile, on the CPU; `gradients` takes the sums from kernels, in a plan that
`write_gradients` ends.
`sums_along_diagonals` and `sums_of_elements` write the launches of kernels that make only such sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.arguments import Arguments, Operands, Problem, diagonal_count, grid, mask_strides
from flexmod.block_mask.storage import Form, MaskSnapshot, TileStorage, columns_of
from flexmod.block_mask.tiles import EMPTY, FULL, LISTS, PARTIAL, Runs, ordered, tile_count
from flexmod.codegen.compiler import capture_terms
from flexmod.codegen.kernels import Kernels, ModText
from flexmod.codegen.spec import Tile, option
from flexmod.codegen.variant import Variant
from flexmod.ir.derivative import Along, GradientTerm
from flexmod.ir.evaluate import evaluate, wrapped
from flexmod.ir.graph import Graph
from flexmod.ir.passes import Extents
from flexmod.runtime.plan import Extent, Keep, Place, PlanWriter, bits, contiguous

Sums = Mapping[Along, Sequence[Tensor]]
"""What kernels make of terms, float32, for each term in order:

    row         [B, Hq, M]
    column      [B, Hq, N]
    diagonal    [B, Hq, M + N - 1], by the distance q_idx - kv_idx, from 1 - N on
    element     the sums of a captured tensor's elements, flat, and a 0; one for each tensor in order
"""


class CaptureSums:
    """Sums the terms of one backward; `problem.capture_grad` lists the terms."""

    def __init__(self, problem: Problem, real: torch.dtype) -> None:
        assert problem.score is not None and problem.capture_grad is not None
        self._loads = problem.capture_grad.loads
        self._tensors = problem.score.tensors
        self._totals = {number: _Total(self._tensors[number], real) for number in self._loads}

    def add(self, values: Sequence[Tensor], shape: tuple[int, ...], forbid: Callable[[Tensor], None]) -> None:
        """Adds the terms of a tile of scores with this shape.

        `values` are the graph's results except the first. It writes terms in place: `forbid` sets a term to 0
        where the mask is False.
        """
        rest = iter(values)
        for number in self._loads:
            term = next(rest)
            indices = [next(rest) for _ in self._tensors[number].shape]
            if term.shape != shape:  # a constant
                term = term.expand(shape).clone()
            forbid(term)
            self._totals[number].add(term, indices)

    def result(self) -> tuple[Tensor | None, ...]:
        """Returns each captured tensor's gradient, in its shape and dtype, or None without a term."""
        return _results(self._totals, len(self._tensors))


def gradients(
    graph: Graph,
    terms: Sequence[GradientTerm],
    sums: Sums,
    tensors: Sequence[Tensor],
    numbers: Sequence[bool | int | float],
    extents: Extents,
) -> tuple[Tensor | None, ...]:
    """Returns each captured tensor's gradient, in its shape and dtype, or None without a term.

    `graph` is the graph of the terms, `numbers` has the values of its parameters, `extents` are B, Hq, M, N.
    """
    left = {along: iter(found) for along, found in sums.items()}
    scattered = dict.fromkeys(term.capture for term in terms if term.along == "element")
    totals = {n: _Total(tensors[n], torch.float32, next(left["element"])) for n in scattered}
    for term in terms:
        if term.along != "element":
            if term.capture not in totals:
                totals[term.capture] = _Total(tensors[term.capture], torch.float32)
            b, h, q_idx, kv_idx = _positions(term.along, extents, tensors[term.capture].device)
            indices = evaluate(
                graph.of(term.indices), tensors,
                b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, numbers=numbers, guarded=True,
            )  # fmt: skip
            totals[term.capture].add(next(left[term.along]), indices, torch.float64)
    return _results(totals, len(tensors))


def write_gradients(
    writer: PlanWriter,
    call: Operands,
    sums: Mapping[Along, Sequence[Place]],
    variant: Variant,
    reduce_in_backward: bool,
) -> tuple[Place | None, ...]:
    """Writes the gradients of captured tensors from a backward's sums; returns one for each capture, or None.

    `reduce_in_backward`: the backward made the sums itself.
    """
    score, captured = variant.score.graph if variant.score else None, call.score_captured
    if score is None:
        return ()
    terms = capture_terms(score, variant.learned, reduce_in_backward)
    grads = [
        Place(f"grad_{place.name}", place.shape, contiguous(place.shape), place.dtype)
        if number in variant.learned
        else None
        for number, place in enumerate(captured.tensors)
    ]
    given = (score, terms, sums, tuple(captured.tensors), tuple(captured.numbers or ()), call.extents)
    return writer.call(gradients, given, grads)


def _positions(along: Along, extents: Extents, device: torch.device) -> tuple[Tensor, ...]:
    """Returns b [B, 1, 1], h [Hq, 1], q_idx and kv_idx [length] for sums along this axis.

    A position that the sum covers has a representative value.
    """
    batch, heads, length, keys = extents
    first, last = {"row": (0, length), "column": (0, keys), "diagonal": (1 - keys, length)}[along]
    place = torch.arange(first, last, device=device)
    b, h = (torch.arange(size, device=device) for size in (batch, heads))
    kv_idx = place if along == "column" else (-place).clamp(min=0)
    return b[:, None, None], h[:, None], place.clamp(min=0), kv_idx


class _Total:
    """Accumulates a captured tensor's gradient in float32 or wider; rounds once at the end."""

    def __init__(self, tensor: Tensor, real: torch.dtype, sums: Tensor | None = None) -> None:
        self._tensor = tensor
        dtype = torch.promote_types(real, tensor.dtype)
        # one more element takes terms whose index lies outside of the tensor
        size = tensor.numel() + 1
        self._sums = torch.zeros(size, dtype=dtype, device=tensor.device) if sums is None else sums.to(dtype)

    def add(self, term: Tensor, indices: Sequence[Tensor], wide: torch.dtype | None = None) -> None:
        """Adds each element of `term` to the element at the indices, which broadcast to the term's shape.

        Sums over dimensions that the indices do not read use the dtype `wide`, or else the sum's dtype.
        """
        place = self._place(indices)
        part = term.to(wide or self._sums.dtype).sum_to_size(place.shape).to(self._sums.dtype)
        place, part = place.expand(part.shape).flatten(), part.flatten()
        if part.is_cuda:
            self._sums += _sorted_sums(place, part, self._sums.numel())
        else:
            self._sums.index_add_(0, place, part)

    def result(self) -> Tensor:
        return self._sums[:-1].view(self._tensor.shape).to(self._tensor.dtype)

    def _place(self, indices: Sequence[Tensor]) -> Tensor:
        """Returns the loaded elements' offsets in a contiguous tensor of the same sizes, int64."""
        sizes, device = self._tensor.shape, self._sums.device
        place = torch.zeros((), dtype=torch.int64, device=device)
        inside = torch.ones((), dtype=torch.bool, device=device)
        for axis, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            index, within = wrapped(index, size)
            place = place + index * math.prod(sizes[axis + 1 :])
            inside = inside & within
        return torch.where(inside, place, self._tensor.numel())


def _sorted_sums(place: Tensor, part: Tensor, size: int) -> Tensor:
    """Returns the sums of `part` by place, in a fixed order: index_add_ would use atomics, this sorts.

    One thread adds up all numbers of a place, one after the other. So elements of many numbers, as T5's
    buckets for large distances, have several places.
    """
    shares = max(1, min(LARGEST_SHARES, part.numel() // size))
    if shares > 1:
        place = place * shares + torch.arange(place.numel(), device=place.device) % shares
    sums = torch.zeros(size * shares, dtype=part.dtype, device=part.device)
    return sums.index_put_((place,), part, accumulate=True).view(size, shares).sum(1)


def _results(totals: Mapping[int, _Total], count: int) -> tuple[Tensor | None, ...]:
    return tuple(totals[number].result() if number in totals else None for number in range(count))


LARGEST_SHARES = 64
# Bits of a 64-bit sum without its sign and one spare bit for the rounding of terms.
FIXED_BITS = 62
# The dtypes of what `add_elements` adds to.
SUMMED_AS = {"_BY_ELEMENT": torch.float32, "_FIXED": torch.int64, "_LARGEST": torch.int32}


def sums_along_diagonals(
    writer: PlanWriter, kernels: Kernels, call: Operands, shared: Arguments, tile: Tile
) -> list[Place]:
    """Writes each term's sums by q_idx - kv_idx, [B, Hq, M + N - 1] float32.

    `shared` has the arguments that do not depend on the tile.
    """
    text = kernels.captures.diagonal
    assert text is not None
    batch, heads, length, keys = call.extents
    diagonals = diagonal_count(length, keys, tile.block_m, tile.block_n)
    names = [term.sums.lower() for term in text.terms]
    shape = (batch, heads, diagonals, 2 * tile.block_m)
    windows = [writer.empty(f"{name}_windows", shape) for name in names]
    arguments = {
        **shared,
        **{name.upper(): window for name, window in zip(names, windows, strict=True)},
        **_diagonal_lists(writer, call.mask, tile, diagonals),
    }
    writer.launch(kernels, "diagonal", grid(batch, heads, diagonals, 1), arguments, tile)
    sums = [Place(name, (batch, heads, length + keys - 1), (0, 0, 1), torch.float32) for name in names]
    for window, made in zip(windows, sums, strict=True):
        writer.call(joined_windows, (window, tile.block_m, tile.block_n, length, keys), (made,))
    return sums


def joined_windows(windows: Tensor, block_m: int, block_n: int, length: int, keys: int) -> tuple[Tensor]:
    """Adds the overlapping sums of neighboring diagonals of tiles: [B, Hq, M + N - 1]."""
    batch, heads, count, width = windows.shape
    parts = windows.view(batch, heads, count, width // block_n, block_n)
    joined = windows.new_zeros((batch, heads, count + width // block_n - 1, block_n))
    for number in range(width // block_n):
        joined[:, :, number : number + count] += parts[:, :, :, number]
    first = block_m + (tile_count(keys, block_n) - 1) * block_n  # minus the first window's least distance
    return (joined.flatten(2)[:, :, first + 1 - keys : first + length],)


def _diagonal_lists(
    writer: PlanWriter, mask: MaskSnapshot | None, tile: Tile, diagonals: Extent
) -> Arguments:
    """Returns the mask's tiles on each diagonal, see `diagonal_lists`. The mask caches them."""
    if mask is None:
        return {}
    storage, parts = mask.storage, mask.storage.by_row()
    rows = tile_count(mask.seq_lengths[0], tile.block_m)
    shape = (*_batch_of(parts), diagonals)
    names = ("diagonal_counts", "diagonal_tiles", "full_diagonal_counts", "full_diagonal_tiles")
    made: dict[str, Place] = {}
    for name in names if storage.separate else names[:2]:
        sides = (*shape, rows) if name.endswith("tiles") else shape
        made[name.upper()] = Place(name, sides, (), torch.int32)
    lengths, block = mask.seq_lengths, mask.BLOCK_SIZE
    layout = (storage.form, columns_of(storage, lengths, block), lengths, block, storage.separate)
    writer.call(diagonal_lists, (parts, *layout, tile.block_m, tile.block_n), tuple(made.values()), Keep)
    return {**dict.fromkeys(map(str.upper, names)), **made, "tile_slots": rows, **mask_strides(shape)}


def _batch_of(parts: Sequence[Any]) -> tuple[Extent, ...]:
    """Returns the tile table's batch entries and heads: 1 if all are the same, see `TileStorage.table`."""
    return tuple(
        1 if all(part.strides[dim] == 0 for part in parts) else parts[0].shape[dim] for dim in (0, 1)
    )


def diagonal_lists(
    parts: Sequence[Tensor],
    form: Form,
    columns: int,
    lengths: tuple[int, int],
    block: tuple[int, int],
    separate: bool,
    block_m: int,
    block_n: int,
) -> tuple[Tensor, ...]:
    """Lists tiles of queries by diagonal: counts [.., diagonals], indices [.., diagonals, tiles], int32.

    `parts` come from `TileStorage.by_row`. A diagonal has the tiles (m, m * block_m / block_n + constant);
    constants descend, as in `diagonal_of_tiles`. Indices ascend. Separate full tiles come last. The function
    does not wait for the device.
    """
    (length, keys), (q_block, kv_block) = lengths, block
    rows, across = tile_count(length, block_m), tile_count(keys, block_n)
    blocks = _table(parts, form, columns)
    device = blocks.device
    row = torch.arange(rows, device=device)
    count = diagonal_count(length, keys, block_m, block_n)
    diagonal = torch.arange(count, device=device)[:, None]  # type: ignore[arg-type]
    column = across - 1 - diagonal + row * (block_m // block_n)
    outside = (column < 0) | (column >= across)
    block_row, block_column = row * block_m // q_block, column.clamp(0, across - 1) * block_n // kv_block
    table = blocks[:, :, block_row, block_column].masked_fill_(outside, EMPTY)
    return (*ordered(table == PARTIAL), *(ordered(table == FULL) if separate else ()))


def _table(parts: Sequence[Tensor], form: Form, columns: int) -> Tensor:
    if form == "runs":
        return Runs(*parts).table(columns)
    return TileStorage.of_lists({**dict.fromkeys(LISTS), **dict(zip(LISTS, parts, strict=False))}).table(
        columns
    )


def sums_of_elements(
    writer: PlanWriter, kernels: Kernels, call: Operands, shared: Arguments, tile: Tile
) -> list[Place]:
    """Writes the sums of all elements of each captured tensor with such terms, flat float32, and a 0.

    Atomics add in float32. A deterministic result takes two passes: the first finds the largest term, the
    second adds in a fixed-point format with room for that term, which needs no rounding.
    """
    text = kernels.captures.element
    assert text is not None
    batch, heads, length, keys = call.extents
    summands = batch * heads * length * keys * len(text.terms)
    room = FIXED_BITS - bits(summands)
    buffers = partial(element_buffers, writer, text, call)
    names = list(dict.fromkeys(term.into for term in text.terms))
    absent = {name.upper() + suffix: None for name in names for suffix in SUMMED_AS}

    def add(made: Mapping[str, Place]) -> None:
        """Writes one pass, which adds to the places in `made`."""
        given = {**shared, **absent, **made, "room": room}
        writer.launch(kernels, "scatter", grid(batch, heads, length, tile.block_m), given, tile)

    deterministic = torch.are_deterministic_algorithms_enabled()
    if not (deterministic or option(kernels.options, "scatter", "deterministic", False)):
        made = buffers()
        add(made)
        return list(made.values())
    largest = buffers("_LARGEST")
    add(largest)
    found = {**buffers(note="_first"), **buffers("_FIXED"), **largest}
    add(found)
    sums = []
    for name in names:
        of = [found[name.upper() + suffix] for suffix in SUMMED_AS]
        made_sum = Place(f"{name}_by_element", of[0].shape, (1,), torch.float32)
        writer.call(sum_of_fixed, (*of, room), (made_sum,))
        sums.append(made_sum)
    return sums


def element_buffers(
    writer: PlanWriter, text: ModText, call: Operands, suffix: str = "_BY_ELEMENT", note: str = ""
) -> dict[str, Place]:
    """Allocates zeros for a text's sums by element: an element for each of a tensor, and one more."""
    tensors: Sequence[Any] = call.score_captured.tensors
    made = {}
    for into, number in {term.into: term.capture for term in text.terms}.items():
        size = 1 if suffix == "_LARGEST" else tensors[number].numel() + 1
        name = (into + suffix + note).lower()
        made[into.upper() + suffix] = writer.empty(name, (size,), SUMMED_AS[suffix], zeros=True)
    return made


def sum_of_fixed(rest: Tensor, fixed: Tensor, largest: Tensor, room: int) -> tuple[Tensor]:
    """Adds fixed-point sums and `rest` in float32. See `add_elements` in `device_functions`."""
    shift = (room + 126 - (largest >> 23)).clamp(max=126)
    unit = (1023 - shift.long() << 52).view(torch.float64)
    return (rest + (fixed.double() * unit).float(),)
