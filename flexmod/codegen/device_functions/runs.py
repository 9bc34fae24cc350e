"""Finds runs of tiles in a table of the tiles' kinds. Written by flexmod.

A program computes LINES rows of tiles, or LINES columns.

    KINDS                uint8 [groups, Qb, KVb]: 0 empty, 1 partial, 2 full
    KV_ROWS, Q_ROWS      int32 [groups, Qb, 2, 3] and [groups, KVb, 2, 3]: see block_mask/tiles.py
    KV_SPANS, Q_SPANS    int32 [.., 2]
    KV_ORDER, Q_ORDER    int32 [groups, Qb], [groups, KVb]: rows and columns, longest first
    kv_slots, q_slots    most runs of one kind in each row, in each column

With PLACED, ROWS already has the place of each row's runs in SPANS. Otherwise each row gets its slots.
Without SPANS, the kernel only counts tiles and runs. A row's place in the order is the number of rows before
it.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


@triton.jit
def lines_of(Qb, KVb, LINES: tl.constexpr):
    """A program's work: its group, whether it computes rows or columns of tiles, and the first of them."""
    row_programs = (Qb + LINES - 1) // LINES
    programs = row_programs + (KVb + LINES - 1) // LINES
    part = tl.program_id(0) % programs
    of_rows = part < row_programs
    return tl.program_id(0) // programs, of_rows, tl.where(of_rows, part, part - row_programs) * LINES


@triton.jit
def write_runs(
    kinds, stride, length, line, there, lines, ROWS, SPANS, slots,
    PLACED: tl.constexpr, LINES: tl.constexpr, TILES: tl.constexpr,
):
    """Writes the runs of LINES rows of `length` tiles, `stride` apart, with first tiles at `kinds` [LINES].

    `line` [LINES] numbers the rows among the `lines` of all groups. `there` [LINES]: does the row exist?
    """
    entry = ROWS + line * 6
    if PLACED:
        partial_first = tl.load(entry + 2, mask=there, other=0)
        full_first = tl.load(entry + 5, mask=there, other=0)
    else:
        partial_first = line * slots
        full_first = (lines + line) * slots
    partial_runs = tl.zeros([LINES], tl.int32)  # so far
    full_runs = tl.zeros([LINES], tl.int32)
    partial_tiles = tl.zeros([LINES, TILES], tl.int32)  # at this place of each step
    full_tiles = tl.zeros([LINES, TILES], tl.int32)
    for start in range(0, length, TILES):
        tile = start + tl.arange(0, TILES)[None, :]  # [1, TILES]
        at = kinds[:, None] + tl.cast(tile, tl.int64) * stride
        inside = there[:, None] & (tile < length)
        here = tl.load(at, mask=inside, other=EMPTY)
        before = tl.load(at - stride, mask=inside & (tile > 0), other=EMPTY)
        after = tl.load(at + stride, mask=inside & (tile < length - 1), other=EMPTY)
        begins = (here != EMPTY) & (before != here)
        ends = (here != EMPTY) & (after != here)
        # Count both kinds at once: partial runs in the lower half of a number, full runs in the upper half.
        begun = tl.where(begins, tl.where(here == FULL, 1 << 16, 1), 0)
        if SPANS is not None:
            up_to = tl.cumsum(begun, 1)
            of_partial = (partial_first + partial_runs)[:, None] + (up_to & 0xFFFF)
            of_full = (full_first + full_runs)[:, None] + (up_to >> 16)
            span = SPANS + 2 * tl.cast(tl.where(here == FULL, of_full, of_partial) - 1, tl.int64)
            tiles = tl.broadcast_to(tile, [LINES, TILES])
            tl.store(span, tiles, mask=begins)
            tl.store(span + 1, tiles + 1, mask=ends)
        number = tl.sum(begun, 1)
        partial_runs += number & 0xFFFF
        full_runs += number >> 16
        partial_tiles += (here == PARTIAL).to(tl.int32)
        full_tiles += (here == FULL).to(tl.int32)
    if PLACED == 0:
        tl.store(entry + 0, tl.sum(partial_tiles, 1), mask=there)
        tl.store(entry + 1, partial_runs, mask=there)
        tl.store(entry + 2, partial_first, mask=there)
        tl.store(entry + 3, tl.sum(full_tiles, 1), mask=there)
        tl.store(entry + 4, full_runs, mask=there)
        tl.store(entry + 5, full_first, mask=there)


@triton.jit(do_not_specialize=["groups", "Qb", "KVb", "kv_slots", "q_slots"])
def runs_kernel(
    KINDS,  # uint8 [groups, Qb, KVb]
    KV_ROWS, KV_SPANS,  # int32 [groups, Qb, 2, 3], [.., 2] or None
    Q_ROWS, Q_SPANS,  # int32 [groups, KVb, 2, 3], [.., 2] or None
    groups, Qb, KVb, kv_slots, q_slots,
    PLACED: tl.constexpr,
    LINES: tl.constexpr,
    TILES: tl.constexpr,
):
    group, of_rows, first = lines_of(Qb, KVb, LINES)
    kinds = KINDS + tl.cast(group, tl.int64) * Qb * KVb
    if of_rows:
        row = first + tl.arange(0, LINES)
        write_runs(
            kinds + tl.cast(row, tl.int64) * KVb, 1, KVb, group * Qb + row, row < Qb, groups * Qb,
            KV_ROWS, KV_SPANS, kv_slots, PLACED, LINES, TILES,
        )
    else:
        column = first + tl.arange(0, LINES)
        write_runs(
            kinds + column, KVb, Qb, group * KVb + column, column < KVb, groups * KVb,
            Q_ROWS, Q_SPANS, q_slots, PLACED, LINES, TILES,
        )


@triton.jit
def write_order(ROWS, ORDER, length, group, first, LINES: tl.constexpr, TILES: tl.constexpr):
    """Writes the places of LINES rows of a group, from row `first` on, in the order of its `length` rows."""
    entries = ROWS + tl.cast(group, tl.int64) * length * 6
    line = first + tl.arange(0, LINES)
    there = line < length
    own = tl.load(entries + line * 6, mask=there, other=0)
    own += tl.load(entries + line * 6 + 3, mask=there, other=0)
    place = tl.zeros([LINES], tl.int32)
    for start in range(0, length, TILES):
        other = start + tl.arange(0, TILES)
        inside = other < length
        count = tl.load(entries + other * 6, mask=inside, other=-1)
        count += tl.load(entries + other * 6 + 3, mask=inside, other=0)
        before = count[None, :] > own[:, None]  # [LINES, TILES]
        before |= (count[None, :] == own[:, None]) & (other[None, :] < line[:, None])
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(ORDER + tl.cast(group, tl.int64) * length + place, line, mask=there)


@triton.jit(do_not_specialize=["groups", "Qb", "KVb"])
def order_kernel(
    KV_ROWS, Q_ROWS,  # int32 [groups, Qb, 2, 3], [groups, KVb, 2, 3]
    KV_ORDER, Q_ORDER,  # int32 [groups, Qb], [groups, KVb]
    groups, Qb, KVb,
    LINES: tl.constexpr,
    TILES: tl.constexpr,
):
    group, of_rows, first = lines_of(Qb, KVb, LINES)
    if of_rows:
        write_order(KV_ROWS, KV_ORDER, Qb, group, first, LINES, TILES)
    else:
        write_order(Q_ROWS, Q_ORDER, KVb, group, first, LINES, TILES)
