"""Makes the steps of a call on the CPU: heads, rows, all their columns, and the elements that a mask forbids.

Heads are laid out as [Z, G, length, dim], see `tiles.Heads`. Steps stay with the mask for later calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, product
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.tiles import (
    Heads,
    StepRules,
    as_slice,
    chunks,
    column_spans,
    element_kinds,
    length,
    shared_part,
    steps_of_table,
)
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.block_mask.tiles import FULL, PARTIAL, tile_count
from flexmod.ir.evaluate import evaluate
from flexmod.ir.fingerprint import remember

Forbidden = tuple[tuple[slice, Tensor], ...]
ALIGNED = 64  # columns of a piece but the last are a multiple of it
# An integer dtype of the same width, and the bits of -inf in it.
BITS = {torch.float32: (torch.int32, -(1 << 23)), torch.float64: (torch.int64, -(1 << 52))}
KEPT = 8  # lists of steps of one mask
KEPT_BYTES = 1 << 26  # of forbidden elements in one list


@dataclass(frozen=True, eq=False)
class Step:
    """Some heads, as ranges of Z and G, rows, and all columns that any of the rows attends to.

    `columns` are ascending ranges. `causal`: row i attends to the first i + 1 columns.
    `forbidden`: ranges of the step's columns, and bool tensors that are True where the mask is False. Each
    broadcasts to [z, g, rows, width of the range]. `shift`: if the step differs from the one before by its
    place alone, by how many columns; its rows follow. Otherwise 0.
    """

    heads: Heads
    z: range
    g: range
    row_span: slice
    columns: tuple[slice, ...]
    causal: bool = False
    forbidden: Forbidden = ()
    shift: int = 0

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores: [z, g, rows, columns]."""
        return len(self.z), len(self.g), length(self.row_span), sum(map(length, self.columns))

    @cached_property
    def rows(self) -> tuple[slice, slice, slice]:
        """The indices of this step's rows in a tensor laid out by query."""
        return as_slice(self.z), as_slice(self.g), self.row_span

    def columns_of(self, x: Tensor) -> Tensor:
        """Returns this step's columns, [z, columns, dim], from a tensor [Z, N, dim]."""
        x = x[as_slice(self.z)]
        runs = [x[:, run] for run in self.columns]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)

    def add_to_columns(self, target: Tensor, found: Tensor) -> None:
        """Adds [z, columns, dim] to the columns of `target` [Z, N, dim]."""
        target = target[as_slice(self.z)]
        parts = found.split([*map(length, self.columns)], 1)
        for run, part in zip(self.columns, parts, strict=True):
            target[:, run] += part

    @cached_property
    def positions(self) -> dict[str, Any]:
        """b and h [z, g, 1, 1], q_idx [rows, 1] and kv_idx [columns]."""
        here = as_slice(self.z), as_slice(self.g)
        b, h = (x[here][..., None, None] for x in self.heads.positions())
        runs = (self.row_span, *self.columns)
        q_idx, *kv_idx = (torch.arange(run.start, run.stop, device=self.heads.device) for run in runs)
        return {"b": b, "h": h, "q_idx": q_idx[:, None], "kv_idx": torch.cat(kv_idx)}

    @cached_property
    def dead(self) -> Tensor | None:
        """True for rows whose every element is forbidden, [1 or z, 1 or g, rows]; None without such rows."""
        if sum(length(span) for span, _ in self.forbidden) < self.shape[3] or not self.forbidden:
            return None
        dead = torch.stack(torch.broadcast_tensors(*(x.all(-1) for _, x in self.forbidden))).all(0)
        return dead if bool(dead.any()) else None

    @cached_property
    def diagonals(self) -> Tensor | None:
        """The forbidden elements by diagonal, bool [1 or z, 1 or g, rows + columns - 1].

        The last row comes first, then the last column upwards. None if a diagonal has both kinds.
        """
        heads = [max(sizes) for sizes in zip(*(x.shape[:2] for _, x in self.forbidden), strict=True)]
        whole = torch.zeros(*heads, *self.shape[2:], dtype=torch.bool, device=self.heads.device)
        for span, forbidden in self.forbidden:
            whole[..., span] = forbidden
        if not torch.equal(whole[..., 1:, 1:], whole[..., :-1, :-1]):
            return None
        return torch.cat([whole[..., -1, :], whole[..., :-1, -1].flip(-1)], -1)

    def forbid(self, x: Tensor, value: float) -> None:
        """Writes 0 or -inf where the mask is False into x [z, g, rows, columns].

        Into words of float32 and float64, for which torch's `masked_fill_` takes 4 times as long.
        """
        integer, infinity = BITS.get(x.dtype, (None, 0))
        for span, forbidden in self.forbidden:
            if integer is None:
                x[..., span].masked_fill_(forbidden, value)
                continue
            kept = forbidden.to(integer).sub_(1)  # -1, or 0 where it is forbidden
            words = x[..., span].view(integer).bitwise_and_(kept)
            if value:
                words.bitwise_or_(kept.bitwise_not_().bitwise_and_(infinity))

    def cut(self, budget: int, height: int, apart: bool = False) -> Iterator[Step]:
        """Yields steps of at most `budget` scores, or one row, and at most `height` rows.

        `apart`: all heads of a step share their keys.
        """
        _, _, rows, columns = self.shape
        height = max(1, min(height, rows, budget // columns))
        count = budget // (height * columns)
        if apart:
            count = min(count, len(self.g))
        if height == rows and len(self.z) * len(self.g) <= count:
            yield self
            return
        pieces = list(chunks(range(len(self.z)), range(len(self.g)), count))
        for start in range(0, rows, height):
            part = slice(start, min(start + height, rows))
            row_span = slice(self.row_span.start + part.start, self.row_span.start + part.stop)
            for z, g in pieces:
                here = as_slice(z), as_slice(g), part
                forbidden = tuple((span, _narrowed(x, here)) for span, x in self.forbidden)
                of_heads = self.z[here[0]], self.g[here[1]]
                yield Step(self.heads, *of_heads, row_span, self.columns, self.causal, forbidden)

    def across(self, width: int) -> Iterator[Step]:
        """Yields steps of the same rows, and of at most `width` columns, a multiple of ALIGNED."""
        count = self.shape[3]
        pieces = math.ceil(count / width)
        if pieces == 1:
            yield self
            return
        width = math.ceil(count / pieces / ALIGNED) * ALIGNED
        starts = accumulate(map(length, self.columns), initial=0)
        runs = [*zip(starts, self.columns, strict=False)]
        for part in (slice(i, min(i + width, count)) for i in range(0, count, width)):
            here = [(run.start - start, _common(part, start, length(run))) for start, run in runs]
            columns = tuple(slice(first + x.start, first + x.stop) for first, x in here if length(x) > 0)
            spans = [(_common(part, span.start, length(span)), span.start, x) for span, x in self.forbidden]
            forbidden = tuple(
                (slice(inside.start - part.start, inside.stop - part.start), _columns(x, inside, start))
                for inside, start, x in spans
                if length(inside) > 0
            )
            yield replace(self, columns=columns, forbidden=forbidden, shift=0)


def _common(part: slice, start: int, size: int) -> slice:
    """Returns what a slice has of `size` places from `start` on; of length 0 or less for nothing."""
    return slice(max(part.start, start), min(part.stop, start + size))


def _columns(x: Tensor, part: slice, start: int) -> Tensor:
    """Returns the columns of a slice from x [..., width or 1], whose first column is `start`."""
    return x if x.shape[-1] == 1 else x[..., part.start - start : part.stop - start]


def _narrowed(x: Tensor, here: tuple[slice, ...]) -> Tensor:
    """Indexes the dimensions that have more than one entry."""
    return x[tuple(part if size > 1 else slice(None) for part, size in zip(here, x.shape, strict=False))]


@dataclass(frozen=True)
class OneStep:
    """A step as a batch of the kernel: [z, g, rows or columns, dim]."""

    step: Step

    def rows_of(self, x: Tensor) -> Tensor:
        """Returns a view of the rows of [Z, G, M, ...], as [z, g, rows, ...]."""
        return x if x.shape[:3] == self.step.shape[:3] else x[self.step.rows]

    def write_rows(self, target: Tensor, found: Tensor) -> None:
        """Writes [z, g, rows, ...] into the rows of `target` [Z, G, M, ...]."""
        target[self.step.rows] = found

    def columns_of(self, x: Tensor) -> Tensor:
        """Returns the columns of [Z, N, dim], as [z, g, columns, dim]."""
        step = self.step
        found = x if x.shape[:2] == (step.shape[0], step.shape[3]) else step.columns_of(x)
        return found[:, None].expand(-1, len(step.g), -1, -1) if len(step.g) > 1 else found[:, None]

    def add_to_columns(self, target: Tensor, found: Tensor) -> None:
        """Adds [z, g, columns, dim] to the columns of `target` [Z, N, dim]."""
        self.step.add_to_columns(target, over_group(found))


def over_group(x: Tensor) -> Tensor:
    """Sums [z, g, ...] over the heads that share keys."""
    return x.sum(1) if x.shape[1] > 1 else x[:, 0]


@dataclass(frozen=True)
class EqualSteps:
    """Some heads of a run of equal steps as a batch of the kernel: [heads, steps, rows or columns, dim].

    `z` or `g` has one entry. Has the methods of OneStep, with these shapes.
    """

    z: range
    g: range
    run: Sequence[Step]

    @property
    def step(self) -> Step:
        return self.run[0]

    def rows_of(self, x: Tensor) -> Tensor:
        first, last = self.step.row_span, self.run[-1].row_span
        found = x[as_slice(self.z), as_slice(self.g), first.start : last.stop]
        return found.squeeze(1 if len(self.g) == 1 else 0).unflatten(1, (len(self.run), length(first)))

    def write_rows(self, target: Tensor, found: Tensor) -> None:
        self.rows_of(target).copy_(found)

    def columns_of(self, x: Tensor) -> Tensor:
        """Returns a view, whose steps may overlap."""
        first, last = self.step.columns[0], self.run[-1].columns[0]
        found = x[as_slice(self.z), first.start : last.stop].unfold(1, length(first), self.run[1].shift).mT
        return found if len(self.g) == 1 else found.expand(len(self.g), -1, -1, -1)

    def add_to_columns(self, target: Tensor, found: Tensor) -> None:
        if len(self.g) > 1:
            found = found.sum(0, keepdim=True)
        first, steps, shift = self.step.columns[0], len(self.run), self.run[1].shift
        for start in range(0, length(first), shift):
            place = first.start + start
            part = target[as_slice(self.z), place : place + steps * shift]
            part.unflatten(1, (steps, shift)).add_(found[:, :, start : start + shift])


def runs_of_equal(steps: Iterable[Step], columns: int) -> Iterator[list[Step]]:
    """Groups equal steps. A run of several has at most `columns` columns, counted for each step and head."""
    run: list[Step] = []
    for step in steps:
        size = len(step.z) * len(step.g) * step.shape[3]
        continues = step.shift > 0 and (len(run) == 1 or step.shift == run[-1].shift)
        if run and not (continues and (len(run) + 1) * size <= columns):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def batches_of(run: Sequence[Step]) -> Iterator[OneStep | EqualSteps]:
    """Yields a run as batches of the kernel."""
    z, g = run[0].z, run[0].g
    if len(run) == 1:
        yield OneStep(run[0])
    elif len(z) < len(g):
        yield from (EqualSteps(z[i : i + 1], g, run) for i in range(len(z)))
    else:
        yield from (EqualSteps(z, g[i : i + 1], run) for i in range(len(g)))


def _shift(last: Step, step: Step) -> int:
    """Returns `Step.shift` of a step that comes after `last`."""
    kinds = [(x.z, x.g, x.shape, x.causal, len(x.columns)) for x in (last, step)]
    if kinds[0] != kinds[1] or len(step.columns) > 1 or step.forbidden is not last.forbidden:
        return 0
    if step.row_span.start != last.row_span.stop or any(x.shape[:2] != (1, 1) for _, x in step.forbidden):
        return 0
    shift = step.columns[0].start - last.columns[0].start
    return shift if shift > 0 and step.shape[3] % shift == 0 else 0


def steps_of(
    mask: MaskSnapshot | None, heads: Heads, rows: int, columns: int, rules: StepRules
) -> Iterable[Step]:
    """Returns the steps of a call; rows that attend to nothing may be in no step."""
    if mask is None:
        return (Step(heads, *heads.where(None, None), slice(0, rows), (slice(0, columns),)),)
    if mask.in_inference_mode:
        return _steps(mask, heads, rows, columns, rules)
    key = ("steps", heads, rows, columns, rules, *mask.states())
    known: list[Step] | None = mask.derived.get(key)
    return _remembered(mask, key, _steps(mask, heads, rows, columns, rules)) if known is None else known


def _remembered(mask: MaskSnapshot, key: object, steps: Iterator[Step]) -> Iterable[Step]:
    """Returns the steps; they stay with the mask if their forbidden elements do not take much memory."""
    found: list[Step] = []
    sizes: dict[int, int] = {}
    for step in steps:
        found.append(step)
        sizes |= {id(x): x.numel() for _, x in step.forbidden}
        if sum(sizes.values()) > KEPT_BYTES:
            return chain(found, steps)
    remember(mask.derived, key, found, KEPT)
    return found


def _steps(mask: MaskSnapshot, heads: Heads, rows: int, columns: int, rules: StepRules) -> Iterator[Step]:
    table = shared_part(mask.table())
    for b, h in product(range(table.shape[0]), range(table.shape[1])):
        z, g = heads.where(b if table.shape[0] > 1 else None, h if table.shape[1] > 1 else None)
        of_heads = Step(heads, z, g, slice(0, 0), (slice(0, 0),))
        is_causal = partial(_is_causal, mask, of_heads, (rows, columns))
        last: Forbidden = ()
        previous: Step | None = None
        found_steps = steps_of_table(table[b, h], mask.BLOCK_SIZE, rows, columns, rules, is_causal)
        for span, runs, causal, kinds in found_steps:
            step = Step(heads, z, g, span, runs, causal)
            found = tuple(_forbidden(mask, step, kinds))
            last = last if _same(found, last) else found  # equal ones are one object
            step = replace(step, forbidden=last)
            previous = step if previous is None else replace(step, shift=_shift(previous, step))
            yield previous


def _same(one: Forbidden, other: Forbidden) -> bool:
    return len(one) == len(other) and all(
        a == b and torch.equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _forbidden(mask: MaskSnapshot, step: Step, kinds: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields `Step.forbidden`, from the kinds of the step's tiles."""
    kv_block = mask.BLOCK_SIZE[1]
    for span in column_spans((kinds != FULL).any(0), kv_block, step.shape[3]):
        here = {**step.positions, "kv_idx": step.positions["kv_idx"][span]}
        (allowed,) = evaluate(mask.traced.graph, mask.traced.tensors, **here)
        of_span = kinds[:, span.start // kv_block : tile_count(span.stop, kv_block)]
        if not bool((of_span == PARTIAL).all()):
            elements = element_kinds(of_span, step.row_span, length(span), mask.BLOCK_SIZE)
            allowed = (elements == FULL) | ((elements == PARTIAL) & allowed)
        yield span, ~allowed[(None,) * (4 - allowed.dim())]


def _is_causal(
    mask: MaskSnapshot, of_heads: Step, lengths: tuple[int, int], q_tiles: range, first: int
) -> bool:
    """Returns whether row i attends to the first i + 1 columns in the tiles of a diagonal.

    They begin with tile `first` of the columns. Rows and columns beyond the lengths do not count.
    """
    size, (rows, columns) = mask.BLOCK_SIZE[0], lengths
    device = of_heads.heads.device
    place = torch.arange(size, device=device)
    q_idx = (torch.arange(q_tiles.start, q_tiles.stop, device=device)[:, None] * size + place)[..., None]
    tiles = torch.arange(first, first + len(q_tiles), device=device)
    kv_idx = (tiles[:, None] * size + place)[:, None]
    inside = (q_idx < rows) & (kv_idx < columns)
    b, h = (of_heads.positions[name][..., None] for name in ("b", "h"))
    (said,) = evaluate(
        mask.traced.graph, mask.traced.tensors,
        b=b, h=h, q_idx=q_idx.clamp(max=rows - 1), kv_idx=kv_idx.clamp(max=columns - 1),
    )  # fmt: skip
    return bool(((said == (place[:, None] >= place)) | ~inside).all())
