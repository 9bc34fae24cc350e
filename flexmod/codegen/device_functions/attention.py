"""What portable kernels share: functions that they call, and the first kernel of a backward.

A grid is flat. The tiles of one head are consecutive, so that programs that run together share its keys and
values in the L2; heads of one group are neighbors for the same reason. With a mask, long rows (causal: the
last queries, the first keys) go first, so that short rows fill the tail.

The last functions are for kernels that build block masks.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# e^x = 2^n * e^(x - n * ln(2)). ln(2) is LN2_HIGH, whose 14 bits times n are exact, and LN2_LOW.
LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.69317626953125)
LN2_LOW = tl.constexpr(-2.9088971304713773e-05)


@triton.jit
def tile_of_queries(HQ, length, TILE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Batch entry, query head and first query of this program's tile of `length` queries."""
    program = tl.program_id(0)
    tiles = (length + TILE - 1) // TILE
    if LAST_FIRST:
        start = (tiles - 1 - program % tiles) * TILE
    else:
        start = (program % tiles) * TILE
    head = program // tiles % HQ
    batch = program // tiles // HQ
    return batch, head, start


@triton.jit
def tile_of_keys(HKV, N, TILE: tl.constexpr):
    """Batch entry, head and first key of this program's tile of keys."""
    program = tl.program_id(0)
    tiles = (N + TILE - 1) // TILE
    start = (program % tiles) * TILE
    head = program // tiles % HKV
    batch = program // tiles // HKV
    return batch, head, start


@triton.jit
def diagonal_of_tiles(HQ, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Batch entry and query head of this program, and its diagonal of tiles: start_n - start_m, its number,
    and the number of diagonals.

    Neighboring programs read the same queries with neighboring keys at the same time.
    """
    program = tl.program_id(0)
    key_tiles = (N + BLOCK_N - 1) // BLOCK_N
    diagonals = key_tiles + ((M + BLOCK_M - 1) // BLOCK_M - 1) * (BLOCK_M // BLOCK_N)
    diagonal = program % diagonals
    offset = (key_tiles - 1 - diagonal) * BLOCK_N
    head = program // diagonals % HQ
    batch = program // diagonals // HQ
    return batch, head, offset, diagonal, diagonals


@triton.jit
def first_of_runs(of_row, RUNS, FIRST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tiles in a row's runs of blocks, and the first tile: its run, its start, the run's end.

    of_row [6]  the row's entry of ROWS, which describes the runs from number FIRST on
    """
    steps = tl.load(of_row + FIRST) * (BLOCK // TILE)
    run = RUNS + tl.cast(tl.load(of_row + (FIRST + 2)), tl.int64) * 2
    start = tl.load(run, mask=steps > 0, other=0) * BLOCK
    stop = tl.load(run + 1, mask=steps > 0, other=0) * BLOCK
    return steps, run, start, stop


@triton.jit
def next_of_runs(step, steps, run, start, stop, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The next step's tile, one step before its use: its run, its start, the run's end."""
    following = start + TILE
    ended = (following == stop) & (step + 1 < steps)
    run += tl.where(ended, 2, 0)
    following = tl.where(ended, tl.load(run, mask=ended, other=0) * BLOCK, following)
    stop = tl.where(ended, tl.load(run + 1, mask=ended, other=0) * BLOCK, stop)
    return run, following, stop


@triton.jit
def part_of_steps(part, PARTS, steps):
    """The first step of a part, and the one after its last; (0, 0) for an empty part."""
    each = (steps + PARTS - 1) // PARTS
    first = part * each
    stop = tl.minimum(first + each, steps)
    return tl.where(first < stop, first, 0), tl.where(first < stop, stop, 0)


@triton.jit
def part_of_runs(part, PARTS, steps, run, start, stop, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the tiles in a row's runs: how many, and the first one, as `first_of_runs` gives them."""
    before, last = part_of_steps(part, PARTS, steps)
    steps = last - before
    while start + before * TILE >= stop and before > 0:
        before -= (stop - start) // TILE
        run += 2
        start = tl.load(run) * BLOCK
        stop = tl.load(run + 1) * BLOCK
    return steps, run, start + before * TILE, stop


@triton.jit
def tile_at(
    tensor, stride_b, stride_h, stride_m, stride_d, batch, head, start, ROWS: tl.constexpr, DIMS: tl.constexpr
):
    """Addresses of ROWS rows of one head from row `start` on: [ROWS, DIMS], in 64-bit arithmetic."""
    base = tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    base += tl.cast(start, tl.int64) * stride_m
    rows = tl.cast(tl.arange(0, ROWS), tl.int64)[:, None] * stride_m
    dims = tl.cast(tl.arange(0, DIMS), tl.int64)[None, :] * stride_d
    return tensor + base + rows + dims


@triton.jit
def within(inside, DIMS: tl.constexpr, TILE: tl.constexpr):
    """Which elements of a tile [rows, TILE] exist, if `inside` [rows] says so of rows. DIMS columns do."""
    inside = inside[:, None]
    if DIMS != TILE:
        inside = inside & (tl.arange(0, TILE) < DIMS)[None, :]
    return inside


@triton.jit
def delta_of(total, dead, GRAD_LSE, stride_lb, stride_lh, stride_lm, batch, head, rows, M):
    """delta of `rows`: their rowsum `total`, minus the gradient of the lse; 0 where `dead`."""
    if GRAD_LSE is not None:
        base = tl.cast(batch, tl.int64) * stride_lb + tl.cast(head, tl.int64) * stride_lh
        total -= tl.load(GRAD_LSE + base + tl.cast(rows, tl.int64) * stride_lm, mask=rows < M, other=0.0)
    return tl.where(dead, 0.0, total)


@triton.jit
def in_base_2(lse):
    """Converts a natural lse to base 2; -inf, of a dead row, becomes +inf, so that its weights are 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit(do_not_specialize=["HQ", "M", "PITCH"])
def statistics_kernel(
    OUT, stride_ob, stride_oh, stride_om, stride_od,  # [B, HQ, M, DV]
    GRAD_OUT, stride_gb, stride_gh, stride_gm, stride_gd,  # [B, HQ, M, DV]
    LSE,  # [B, HQ, M] float32, natural logarithm
    GRAD_LSE, stride_lb, stride_lh, stride_lm,  # [B, HQ, M] float32, or None
    LSE2,  # [B, HQ, PITCH] float32, or None
    DELTA,  # [B, HQ, PITCH] float32
    ROW_MAX, REST,  # [B, HQ, M] float32, as the forward leaves them, or None
    ROW_MAXIMA,  # [B, HQ, PITCH] float32, or None
    LARGE,  # [B, HQ] float32, zeros at first; or None
    HQ, M, PITCH,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One number each a query.

        LSE2        the lse in base 2, +inf for a dead row and past the last one
        DELTA       rowsum(out * grad_out) - grad_lse, 0 there
        ROW_MAXIMA  ROW_MAX of rows with an lse above FROM, for which one float32 has too few digits; else 0.
                    The LSE2 of such a row is REST, which is smaller by it
        LARGE       not 0 where a head has such a row; None, with the three above, if there can be none
        PITCH       the distance of two heads in LSE2 and DELTA
    """
    batch, head, start_m = tile_of_queries(HQ, PITCH, BLOCK_M, LAST_FIRST=False)
    rows = start_m + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_m = rows < M
    out_tile = tile_at(
        OUT, stride_ob, stride_oh, stride_om, stride_od, batch, head, start_m, BLOCK_M, DV_TILE
    )
    grad_tile = tile_at(
        GRAD_OUT, stride_gb, stride_gh, stride_gm, stride_gd, batch, head, start_m, BLOCK_M, DV_TILE
    )
    out = tl.load(out_tile, mask=within(in_m, DV, DV_TILE), other=0.0)
    grad_out = tl.load(grad_tile, mask=within(in_m, DV, DV_TILE), other=0.0)
    # + 0.0 rounds the products, or two threads might fuse them differently
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32) + 0.0, 1)  # [BLOCK_M]

    heads_before = tl.cast(batch, tl.int64) * HQ + head
    lse2 = tl.load(LSE + heads_before * M + rows, mask=in_m, other=float("-inf")) * LOG2E
    dead = lse2 == float("-inf")
    delta = delta_of(delta, dead, GRAD_LSE, stride_lb, stride_lh, stride_lm, batch, head, rows, M)
    statistics = heads_before * PITCH + rows
    tl.store(DELTA + statistics, delta, mask=rows < PITCH)
    if LSE2 is not None:
        if LARGE is not None:
            large = (tl.abs(lse2) > FROM) & (lse2 > float("-inf"))
            row_max = tl.load(ROW_MAX + heads_before * M + rows, mask=large, other=0.0)
            lse2 = tl.where(large, tl.load(REST + heads_before * M + rows, mask=large, other=0.0), lse2)
            tl.store(ROW_MAXIMA + statistics, row_max, mask=rows < PITCH)
            tl.store(LARGE + heads_before, 1.0, mask=tl.max(large.to(tl.int32), 0) > 0)
        tl.store(LSE2 + statistics, tl.where(dead, float("inf"), lse2), mask=rows < PITCH)


@triton.jit(do_not_specialize=["HQ", "M", "PARTS"])
def combine_kernel(
    PART_OUT,  # [B, PARTS, HQ, M, DV] float32
    ROW_MAX, REST, TOTAL, PART_MAX,  # [B, PARTS, HQ, M] float32, the forward. All but ROW_MAX may be None.
    OUT, stride_ob, stride_oh, stride_om, stride_od,  # [B, HQ, M, DV]
    LSE,  # [B, HQ, M] float32, natural logarithm
    MAX_SCORES,  # [B, HQ, M] float32, or None
    unit,  # a score is so many times as large as ROW_MAX
    HQ, M, PARTS,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,  # columns at a time
    BITS: tl.constexpr,  # there are up to 2^BITS parts
):
    """Merges the parts of a query by their lse in base 2, which is ROW_MAX * unit * LOG2E + REST.

    Exact kernels keep TOTAL instead, which is 2^REST, and 0 for an empty part.
    """
    batch, head, row = tile_of_queries(HQ, M, 1, LAST_FIRST=False)
    parts = tl.arange(0, 2**BITS)
    there = parts < PARTS
    of_parts = ((tl.cast(batch, tl.int64) * PARTS + parts) * HQ + head) * M + row  # [2^BITS]
    row_max = tl.load(ROW_MAX + of_parts, mask=there, other=0.0)
    if TOTAL is None:
        rest = tl.load(REST + of_parts, mask=there, other=float("inf"))
        alive = rest != float("inf")
    else:
        sums = tl.load(TOTAL + of_parts, mask=there, other=0.0)
        alive = sums != 0.0
    # The difference of two large scores is exact; two large lse would lose it.
    base = tl.max(tl.where(alive, row_max, float("-inf")), 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    dead = tl.max(alive.to(tl.int32), 0) == 0
    lse2 = (row_max - base) * (unit * LOG2E)
    if TOTAL is None:
        lse2 = tl.where(alive, lse2 + rest, float("-inf"))
        shift = tl.where(dead, 0.0, tl.max(lse2, 0))
        weights = tl.exp2(lse2 - shift)
    else:
        shift = 0.0  # the largest lse2
        weights = tl.where(alive, tl.exp2(lse2) * sums, 0.0)
    total = tl.where(dead, 1.0, tl.sum(weights, 0))
    weights = tl.div_rn(weights, tl.broadcast_to(total, weights.shape))
    for first in range(0, DV, WIDTH):
        dims = first + tl.arange(0, WIDTH)
        inside = dims < DV
        tile = PART_OUT + of_parts[:, None] * DV + dims[None, :]  # [2^BITS, WIDTH]
        part_out = tl.load(tile, mask=there[:, None] & inside[None, :], other=0.0)
        out = tl.sum(part_out * weights[:, None], 0)
        to = OUT + tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
        to += tl.cast(row, tl.int64) * stride_om + dims * stride_od
        tl.store(to, out.to(OUT.dtype.element_ty), mask=inside)
    place = (tl.cast(batch, tl.int64) * HQ + head) * M + row
    lse = base * unit + (shift + tl.log2(total)) * LN2
    tl.store(LSE + place, tl.where(dead, float("-inf"), lse))
    if MAX_SCORES is not None:
        largest = tl.load(PART_MAX + of_parts, mask=there, other=float("-inf"))
        tl.store(MAX_SCORES + place, highest_float(largest))


@triton.jit
def compensated(total, lost, term):
    """total + term, and its rounding error, which the next term corrects (Kahan's sum)."""
    restored = term - lost
    grown = total + restored
    return grown, (grown - total) - restored


@triton.jit
def products_of_rows(a, b, PRECISION: tl.constexpr):
    """a [M, D] times the transpose of b [N, D]; sums of 32 products each are added up in a tree.

    One sum of D products has the errors of D additions. A product of one row, in torch, has fewer.
    """
    if a.shape[1] <= 32:
        product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    else:
        a0, a1 = tl.split(tl.reshape(a, [a.shape[0], a.shape[1] // 2, 2]))
        b0, b1 = tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))
        product = products_of_rows(a0, b0, PRECISION) + products_of_rows(a1, b1, PRECISION)
    return product


@triton.jit
def exponential(x):
    """e^x up to 1, more accurate than the chip's: 2^n exactly, times a series for the rest of x."""
    x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)  # e^-200 is 0; removes -inf
    # no weight exceeds 1, even if another kernel rounds a large score differently
    x = tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.floor(x * LOG2E + 0.5)
    # Cody and Waite: the first fma is exact. Written out, since the compiler may fuse any product.
    rest = tl.fma(-whole, LN2_LOW, tl.fma(-whole, LN2_HIGH, x))
    series = 1.9841269841269841e-04 * rest + 1.3888888888888889e-03
    series = series * rest + 8.3333333333333333e-03
    series = series * rest + 4.1666666666666667e-02
    series = series * rest + 1.6666666666666667e-01
    series = series * rest + 0.5
    series = series * rest + 1.0
    return tl.exp2(whole) * (series * rest + 1.0)


@triton.jit
def unfused(score, unbounded):
    """Returns the score: `unbounded` is +inf, which the compiler does not know. So it cannot fuse the score's
    last product with the next subtraction, and a row's largest score is its row_max in every kernel."""
    return tl.minimum(score, unbounded, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add_elements(terms, places, keep, SUMS, FIXED, LARGEST, room):
    """Adds the terms where `keep` is true to the elements at these places.

    SUMS alone        float32 sums in any order
    LARGEST [1]       first of two passes that agree bit for bit: the bits of the largest finite |term|, int32
    FIXED as well     second pass: int64 sums of integers, equal in any order. A term has `room` bits there.
                      Terms that are not finite go to SUMS, where their order does not matter.
    """
    if LARGEST is None:
        tl.atomic_add(SUMS + places, terms, mask=keep, sem="relaxed")
    else:
        size = tl.abs(terms)
        finite = size < float("inf")
        if FIXED is None:
            bits = tl.where(keep & finite, size, 0.0).to(tl.int32, bitcast=True)
            tl.atomic_max(LARGEST, tl.max(tl.max(bits, 1), 0), sem="relaxed")
        else:
            # All terms are below 2^(exponent - 126). The unit is the least normal number, or larger.
            exponent = tl.load(LARGEST) >> 23
            shift = tl.minimum(room + 126 - exponent, 126)
            scaled = terms * ((shift + 127) << 23).to(tl.float32, bitcast=True)
            whole = tl.where(finite, scaled + tl.where(scaled < 0, -0.5, 0.5), 0.0).to(tl.int64)
            tl.atomic_add(FIXED + places, whole, mask=keep & finite, sem="relaxed")
            tl.atomic_add(SUMS + places, terms, mask=keep & (finite == 0), sem="relaxed")


@triton.jit
def lowest(x):
    return tl.min(x, 0)


@triton.jit
def highest(x):
    return tl.max(x, 0)


@triton.jit
def lowest_float(x):
    """The lowest element; nan if any element is nan."""
    return tl.where(tl.max((x != x).to(tl.int32), 0) != 0, float("nan"), tl.min(x, 0))


@triton.jit
def highest_float(x):
    return tl.where(tl.max((x != x).to(tl.int32), 0) != 0, float("nan"), tl.max(x, 0))


@triton.jit
def over_diagonals(counts, q_low, q_high, kv_low, kv_high, N):
    """Is a term of q_idx - kv_idx true at all differences in a rectangle, and at any?"""
    lowest = q_low - kv_high
    highest = q_high - kv_low
    number = tl.load(counts + (highest + N)) - tl.load(counts + (lowest + N - 1))
    return number == highest - lowest + 1, number > 0
