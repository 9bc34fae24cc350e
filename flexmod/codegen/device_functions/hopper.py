"""The functions that the kernels for Hopper call."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexmod.runtime.gluon import add_tile, store_tile, stores_read


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers in shared memory. A phase is over after ARRIVALS and the bytes that are expected."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(made.index(place), count=ARRIVALS)
    return made


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers, which flips after the last slot."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def in_sections(number, tiles, batches, heads, SECTION: gl.constexpr):
    """A tile's head, counted over all batch entries, and its place in it. SECTION heads run together."""
    section = number // (SECTION * tiles) * SECTION
    together = gl.minimum(SECTION, batches * heads - section)
    rest = number - section * tiles
    return section + rest % together, rest // together


@gluon.jit
def count_tiles(mask, length, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """The number of tiles of a head. If rows of blocks are sorted, the last row counts as whole."""
    ORDER, ROWS, RUNS, stride_mask_b, stride_mask_h = mask
    tiles = (length + TILE - 1) // TILE
    if ORDER is not None:
        tiles = (length + BLOCK - 1) // BLOCK * (BLOCK // TILE)
    return tiles


@gluon.jit
def nth_tile(place, otherwise, mask, batch, head, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """The start of the tile at this place in a head's order, or `otherwise` without an order."""
    ORDER, ROWS, RUNS, stride_mask_b, stride_mask_h = mask
    start = otherwise
    if ORDER is not None:
        mask_row = gl.cast(batch, gl.int64) * stride_mask_b + gl.cast(head, gl.int64) * stride_mask_h
        row = gl.load(ORDER + mask_row + place // (BLOCK // TILE))
        start = row * BLOCK + place % (BLOCK // TILE) * TILE
    return start


@gluon.jit
def first_tile(mask, batch, head, row, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """A row of blocks: its number of partial tiles, its number of tiles, the first full run. Then the first
    tile: its run, its start, the run's end."""
    ORDER, ROWS, RUNS, stride_mask_b, stride_mask_h = mask
    mask_row = gl.cast(batch, gl.int64) * stride_mask_b + gl.cast(head, gl.int64) * stride_mask_h
    entry = ROWS + (mask_row + row) * 6
    partial_steps = gl.load(entry) * (BLOCK // TILE)
    steps = partial_steps + gl.load(entry + 3) * (BLOCK // TILE)
    full_run = RUNS + gl.cast(gl.load(entry + 5), gl.int64) * 2
    run = gl.where(partial_steps > 0, RUNS + gl.cast(gl.load(entry + 2), gl.int64) * 2, full_run)
    start = gl.load(run, mask=steps > 0, other=0) * BLOCK
    stop = gl.load(run + 1, mask=steps > 0, other=0) * BLOCK
    return (partial_steps, steps, full_run), run, start, stop


@gluon.jit
def next_tile(step, of_row, run, start, stop, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """The tile of a step, from the previous step's tile: its run, its start, the run's end."""
    partial_steps, steps, full_run = of_row
    start += TILE
    ended = (start == stop) & (step < steps)
    run = gl.where(ended, gl.where(step == partial_steps, full_run, run + 2), run)
    start = gl.where(ended, gl.load(run, mask=ended, other=0) * BLOCK, start)
    stop = gl.where(ended, gl.load(run + 1, mask=ended, other=0) * BLOCK, stop)
    return run, start, stop


@gluon.jit
def listed(mask, batch, head, row, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """A row of blocks: its number of partial tiles, its number of tiles, the starts of its two lists."""
    NUM_BLOCKS, INDICES, slots, FULL_NUM_BLOCKS, FULL_INDICES, full_slots, stride_mask_b, stride_mask_h = mask
    mask_row = gl.cast(batch, gl.int64) * stride_mask_b + gl.cast(head, gl.int64) * stride_mask_h + row
    partial_steps = gl.load(NUM_BLOCKS + mask_row) * (BLOCK // TILE)
    steps = partial_steps
    partial_blocks = INDICES + mask_row * slots
    full_blocks = partial_blocks
    if FULL_NUM_BLOCKS is not None:
        steps += gl.load(FULL_NUM_BLOCKS + mask_row) * (BLOCK // TILE)
        full_blocks = FULL_INDICES + mask_row * full_slots
    return partial_steps, steps, partial_blocks, full_blocks


@gluon.jit
def listed_tile(step, of_row, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """The start of a step's tile."""
    partial_steps, steps, partial_blocks, full_blocks = of_row
    partial = step < partial_steps
    blocks = gl.where(partial, partial_blocks, full_blocks)
    place = gl.where(partial, step, step - partial_steps)
    block = gl.load(blocks + place // (BLOCK // TILE), mask=step < steps, other=0)
    return block * BLOCK + place % (BLOCK // TILE) * TILE


@gluon.jit
def steps_of(mask, batch, head, tile, length, BLOCK_N: gl.constexpr):
    """The number of steps of a tile of queries, and where they are. `length`: of the keys."""
    KV_STEPS, stride_mask_b, stride_mask_h = mask
    line = gl.cast(batch, gl.int64) * stride_mask_b + gl.cast(head, gl.int64) * stride_mask_h + tile
    of_tile = KV_STEPS + line * (1 + (length + BLOCK_N - 1) // BLOCK_N)
    return gl.load(of_tile), of_tile + 1


@gluon.jit
def step_at(step, steps, of_tile):
    """A step: its first key, and in the lowest bits what its block is for each consumer."""
    return gl.load(of_tile + step, mask=step < steps, other=0)


@gluon.jit
def write_message(note, number):
    """Writes a number, in the producer."""
    note.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_message(note):
    """Reads a number, in a consumer."""
    return gl.max(note.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def by_row(numbers, layout: gl.constexpr):
    """A number for each row of a tile in this layout, as a column."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def in_fours(weights):
    """Of 16 columns a thread has two pairs: they become four neighbors. values_kernel orders keys alike."""
    rows: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = weights.shape[1]
    pairs = weights.reshape([rows, columns // 16, 2, 4, 2])
    return gl.permute(pairs, (0, 1, 3, 2, 4)).reshape([rows, columns])


@gluon.jit
def sums_by_thread(weights):
    """The sums of each row in the four threads that share it, [rows, 4]."""
    rows: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = weights.shape[1]
    pairs = weights.reshape([rows, columns // 8, 4, 2])
    return gl.sum(gl.permute(pairs, (0, 2, 1, 3)).reshape([rows, 4, columns // 4]), 2)


@gluon.jit
def less_row_max(score, row_maxima):
    """Scores [keys, queries] less the row_max of each query.

    The forward fuses a product with a sum, so a score may round differently here. The minimum keeps it at
    most row_max. A row whose lse is not large has 0 in `row_maxima`.
    """
    queries = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
    row_max = gl.load(row_maxima + queries)
    highest = gl.where(row_max == 0.0, float("inf"), row_max)
    return gl.minimum(score, highest[None, :]) - row_max[None, :]


@gluon.jit
def quarters(tile, layout: gl.constexpr):
    """A tile's columns in four parts, each in this layout. They stay in their threads' registers."""
    parts = tile.reshape([tile.shape[0], 2, 2, tile.shape[1] // 4])
    even, odd = gl.split(gl.permute(parts, (0, 3, 1, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, layout),
        gl.convert_layout(second, layout),
        gl.convert_layout(third, layout),
        gl.convert_layout(fourth, layout),
    )


@gluon.jit
def joined(parts, layout: gl.constexpr):
    """The tile of four parts, in this layout: see quarters."""
    rows: gl.constexpr = parts[0].shape[0]
    columns: gl.constexpr = parts[0].shape[1] * 4
    tile = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    return gl.convert_layout(gl.permute(tile, (0, 2, 3, 1)).reshape([rows, columns]), layout)


@gluon.jit
def add_diagonals(term, distance, SUMS, line, M, N):
    """Adds the sums of a tile's diagonals to SUMS [B, HQ, M + N - 1], at `line` and distance q_idx - kv_idx.

    `term` [64, queries] float32; its first element has distance `distance`.
    """
    # By warp, key of the warp, 32 queries, query. Rotates a key's row in its lanes, until a diagonal is a
    # column.
    PARTS: gl.constexpr = term.shape[1] // 32
    layout: gl.constexpr = gl.BlockedLayout([1, 16, PARTS, 1], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0])
    of_sums: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.convert_layout(term.reshape([4, 16, PARTS, 32]), layout)
    key = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    query = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    source = key[None, :, None, None] + query[None, None, None, :]
    turned = gl.gather(row, source % 32 + gl.full([4, 16, PARTS, 32], 0, gl.int32, layout), 3)
    ahead = gl.sum(gl.where(source < 32, turned, 0.0), 1)  # [4, PARTS, 32]
    behind = gl.sum(gl.where(source < 32, 0.0, turned), 1)
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_sums)))
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_sums)))
    query = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_sums)))
    place = distance + query[None, None, :] + 32 * part[None, :, None] - 16 * warp[:, None, None]
    gl.atomic_add(SUMS + line + place, ahead, mask=(place > -N) & (place < M), sem="relaxed")
    place -= 32
    gl.atomic_add(SUMS + line + place, behind, mask=(place > -N) & (place < M), sem="relaxed")


@gluon.jit
def place_keys(mask, BLOCK: gl.constexpr, SECTION: gl.constexpr, sizes, BLOCK_N: gl.constexpr):
    """Batch entry and head of keys, and first key, of this program.

    BLOCK: the keys in a block of `mask`, which is one of runs; 0 for another mask, or none. SECTION: how many
    heads run side by side; 0 if all tiles take equally long. A head of all batch entries runs together: they
    share captured tensors, and the sums of their gradients.
    """
    scale, B, KV_B, HQ, HKV, M, N, PITCH = sizes
    program = gl.program_id(0)
    tiles = (N + BLOCK_N - 1) // BLOCK_N
    if BLOCK > 0:
        tiles = count_tiles(mask, N, BLOCK_N, BLOCK)
    if SECTION == 0:
        number = program // tiles
        start_n = program % tiles * BLOCK_N
    else:
        # The first keys first, which under a causal mask most queries read, or in the mask's order.
        number, place = in_sections(program, tiles, KV_B, HKV, SECTION)
        start_n = place * BLOCK_N
    batch, head = number % KV_B, number // KV_B
    if BLOCK > 0:
        start_n = nth_tile(place, start_n, mask, batch, head * (HQ // HKV), BLOCK_N, BLOCK)
    return batch, head, start_n


@gluon.jit
def as_held(tile, ROW: gl.constexpr):
    """[64, columns] as rows of ROW numbers, in the order of four warps' registers.

    By eight columns: warp, thread // 4, thread % 4, row // 8 % 2, column % 2. round_kernel inverts it.
    """
    columns: gl.constexpr = tile.shape[1]
    parts = tile.reshape([4, 2, 8, columns // 8, 4, 2])
    return gl.permute(parts, (3, 0, 2, 4, 1, 5)).reshape([64 // ROW * columns, ROW])


@gluon.jit
def add_to_sum(SUM_GRAD_Q, block, first: gl.constexpr, grad_q, own_grad_q, ROW: gl.constexpr):
    """Adds [64, columns] of dQ, from column `first` on, to the sums of a block of 64 queries."""
    stores_read()
    own_grad_q.reshape([64 // ROW * grad_q.shape[1], ROW]).store(as_held(grad_q, ROW))
    fence_async_shared()
    add_tile(SUM_GRAD_Q, [block, 64 // ROW * first, 0], own_grad_q)


@gluon.jit
def add_part(
    SUM_GRAD_Q, block, first: gl.constexpr, all_grad, all_k, nothing, own_grad_q, ROW: gl.constexpr
):
    """Adds the product of gradients [keys, 64] with as many columns of keys as `nothing` has, zeros."""
    some_k = all_k.slice(first, nothing.shape[1], 1)
    grad_q = warpgroup_mma(all_grad.permute((1, 0)), some_k, nothing, use_acc=False, is_async=True)
    grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
    add_to_sum(SUM_GRAD_Q, block, first, grad_q, own_grad_q, ROW)


@gluon.jit
def summand(x, dtype: gl.constexpr, NUMBER: gl.constexpr):
    """x in a dtype (number 0), or the rest of x (number 1): both together have twice the digits."""
    rounded = x.to(dtype)
    if NUMBER == 1:
        rest = x - rounded
        rounded = gl.where(rest - rest == 0.0, rest, 0.0).to(dtype)  # infinity has no rest
    return rounded


@gluon.jit
def store_sums(
    GRAD_K, GRAD_V, at, CONSUMER: gl.constexpr, k_tiles, v_tiles, parts_of_grad_k, grad_v, scale, done,
    SUMMANDS: gl.constexpr,
):  # fmt: skip
    """Stores dK and dV of a consumer's 64 keys, which are `at` (batch, head, key), as SUMMANDS heads each.

    When both consumers are done with keys and values, the results take their place. A part of dK has up to
    128 columns.
    """
    own_k = k_tiles.index(0).reshape([128, k_tiles.shape[4]]).slice(CONSUMER * 64, 64, 0)
    own_v = v_tiles.index(0).reshape([128, v_tiles.shape[4]]).slice(CONSUMER * 64, 64, 0)
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    for number in gl.static_range(SUMMANDS):
        for place in gl.static_range(len(parts_of_grad_k)):
            part = parts_of_grad_k[place]
            own_k.slice(place * 128, part.shape[1], 1).store(summand(part * scale, k_tiles.dtype, number))
        own_v.store(summand(grad_v, v_tiles.dtype, number))
        fence_async_shared()
        head = at[1] * SUMMANDS + number
        store_tile(GRAD_K, [at[0], head, at[2], 0], k_tiles.index(0).slice(CONSUMER * 64, 64, 2))
        store_tile(GRAD_V, [at[0], head, at[2], 0], v_tiles.index(0).slice(CONSUMER * 64, 64, 2))
        stores_read()


@gluon.jit
def store_columns(
    GRAD_K, GRAD_V, at, CONSUMER: gl.constexpr, k_tiles, v_tiles, own, grad_k, grad_v, done,
    SUMMANDS: gl.constexpr,
):  # fmt: skip
    """Stores dK and dV of 64 keys, like `store_sums`, of consumers that each have some columns of both.

    `own`: the place of these columns in the tiles. One consumer stores dK, the other dV.
    """
    own_k, own_v = own
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    for number in gl.static_range(SUMMANDS):
        own_k.store(summand(grad_k, k_tiles.dtype, number))
        own_v.store(summand(grad_v, v_tiles.dtype, number))
        fence_async_shared()
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, 1)
        head = at[1] * SUMMANDS + number
        if CONSUMER == 0:
            store_tile(GRAD_K, [at[0], head, at[2], 0], k_tiles.index(0))
        else:
            store_tile(GRAD_V, [at[0], head, at[2], 0], v_tiles.index(0))
        stores_read()
        if number + 1 < SUMMANDS:
            mbarrier.arrive(done, count=1)
            mbarrier.wait(done, 0)
