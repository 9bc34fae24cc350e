"""Kernels that run before and after those for Hopper, and that no mod changes.

    round_kernel         After a backward: dQ from its float32 sums.
    values_kernel        Before a forward on float8: values by keys.
    steps_kernel         Before a forward on float8 with a mask: the steps of each tile of queries.

    B, HQ, HKV           Batch, query heads, heads of keys and values.
    M, N                 Number of queries, of keys.
    D, DV                Head dimensions of queries and keys, of values. D_TILE, DV_TILE: powers of two that
                         hold them.
    Q_BLOCK, KV_BLOCK    Queries and keys in a block of the mask.
"""

import triton
import triton.language as tl

from flexmod.codegen.device_functions.attention import tile_at, tile_of_keys, tile_of_queries, within


@triton.jit(do_not_specialize=["HQ", "M", "PITCH"])
def round_kernel(
    SUM_GRAD_Q,  # [B * HQ * PITCH / 64, ..] float32: 64 * D numbers for 64 queries, in the order of as_held
    GRAD_Q, stride_dqb, stride_dqh, stride_dqm, stride_dqd,  # [B, HQ, M, D]
    scale,
    HQ, M, PITCH,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
):
    """dQ: the sums times the scale, in the tensor's dtype, order and strides."""
    batch, head, start_m = tile_of_queries(HQ, M, 64, LAST_FIRST=False)
    in_m = start_m + tl.arange(0, 64) < M
    block = (tl.cast(batch, tl.int64) * HQ + head) * (PITCH // 64) + start_m // 64
    places = tl.arange(0, 64 * D_TILE)
    sums = SUM_GRAD_Q + block * (64 * D) + places
    if D == D_TILE:
        held = tl.load(sums)
    else:
        held = tl.load(sums, mask=places < 64 * D, other=0.0)
    parts = tl.reshape(held, (D_TILE // 8, 4, 8, 4, 2, 2))
    grad_q = tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), (64, D_TILE)) * scale
    tile = tile_at(GRAD_Q, stride_dqb, stride_dqh, stride_dqm, stride_dqd, batch, head, start_m, 64, D_TILE)
    tl.store(tile, grad_q.to(GRAD_Q.dtype.element_ty), mask=within(in_m, D, D_TILE))


@triton.jit
def values_at(base, keys, N, stride_vn, DV: tl.constexpr, DV_TILE: tl.constexpr):
    """[keys, DV_TILE] values of these keys; `base` [DV_TILE] points to the first key's."""
    rows = base[None, :] + tl.cast(keys, tl.int64)[:, None] * stride_vn
    return tl.load(rows, mask=within(keys < N, DV, DV_TILE), other=0.0)


@triton.jit(do_not_specialize=["HKV", "N"])
def values_kernel(
    V, stride_vb, stride_vh, stride_vn, stride_vd,  # [B or 1, HKV, N, DV]
    V_BY_KEYS,  # [B or 1, HKV, DV, PITCH]; PITCH is N, rounded up to whole programs of 128. Past N it is 0
    HKV, N,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
):
    """Values by keys: the matrix unit reads float8 operands along the product's inner dimension.

    Of 16 keys, a thread of the forward has the weights of keys 2i, 2i + 1, 2i + 8 and 2i + 9: see in_fours.
    They are neighbors here: key 16u + 8j + 2i + e is in column 16u + 4i + 2j + e.
    """
    batch, head, start = tile_of_keys(HKV, N, 128)
    fours = tl.arange(0, 32)
    keys = start + fours // 4 * 16 + fours % 4 * 2  # [32]: the first of each thread's four
    dims = tl.arange(0, DV_TILE)
    base = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast(head, tl.int64) * stride_vh + dims * stride_vd
    v0 = values_at(base, keys, N, stride_vn, DV, DV_TILE)
    v1 = values_at(base, keys + 1, N, stride_vn, DV, DV_TILE)
    v8 = values_at(base, keys + 8, N, stride_vn, DV, DV_TILE)
    v9 = values_at(base, keys + 9, N, stride_vn, DV, DV_TILE)
    v = tl.join(tl.join(v0, v8), tl.join(v1, v9))  # [32, DV_TILE, 2, 2]
    v = tl.permute(v, (1, 0, 2, 3)).reshape(DV_TILE, 128)
    rows = (tl.cast(batch, tl.int64) * HKV + head) * DV + dims
    places = rows[:, None] * ((N + 127) // 128 * 128) + (start + tl.arange(0, 128))[None, :]
    if DV == DV_TILE:
        tl.store(V_BY_KEYS + places, v)
    else:
        tl.store(V_BY_KEYS + places, v, mask=(dims < DV)[:, None])


@triton.jit
def kinds_in_runs(blocks, row, ROWS, RUNS):
    """What each of `blocks` is in a row of a mask of runs: 0 empty, 1 partial, 2 full."""
    kinds = tl.zeros_like(blocks)
    for full in tl.static_range(2):
        of_row = ROWS + row * 6 + 3 * full
        count = tl.load(of_row + 1)
        runs = RUNS + tl.cast(tl.load(of_row + 2), tl.int64) * 2
        for start in range(0, count, 32):
            run = start + tl.arange(0, 32)
            first = tl.load(runs + 2 * run, mask=run < count, other=0)
            stop = tl.load(runs + 2 * run + 1, mask=run < count, other=0)
            inside = (first[None, :] <= blocks[:, None]) & (blocks[:, None] < stop[None, :])
            kinds = tl.maximum(kinds, tl.max(inside.to(tl.int32), 1) * (1 + full))
    return kinds


@triton.jit
def are_listed(blocks, row, NUM_BLOCKS, INDICES, slots):
    """1 for each of `blocks` that is in a row's list, else 0."""
    found = tl.zeros_like(blocks)
    count = tl.load(NUM_BLOCKS + row)
    for start in range(0, count, 32):
        place = start + tl.arange(0, 32)
        listed = tl.load(INDICES + row * slots + place, mask=place < count, other=-1)
        found = tl.maximum(found, tl.max((listed[None, :] == blocks[:, None]).to(tl.int32), 1))
    return found


@triton.jit(do_not_specialize=["kv_slots", "full_kv_slots", "ROWS", "M", "N"])
def steps_kernel(
    KV_ROWS, KV_RUNS,  # int32 [.., rows, 2, 3], [.., 2]: see block_mask/tiles.py. Or else lists:
    KV_NUM_BLOCKS, KV_INDICES, kv_slots,  # partial blocks, int32 [.., rows], [.., rows, kv_slots]
    FULL_KV_NUM_BLOCKS, FULL_KV_INDICES, full_kv_slots,  # full blocks, or None
    KV_STEPS,  # int32 [.., tiles, 1 + ceil(N / BLOCK_N)]: the number of steps, then each
    ROWS, M, N,  # rows of blocks in a head of the mask; queries; keys
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    CONSUMERS: tl.constexpr,  # of 64 queries each, in any row of the mask's blocks
    BLOCK_N: tl.constexpr,
):
    """Writes the steps of one tile of queries: keys that one of its consumers meets.

    A step is the first key. Its lowest bits, two for each consumer, say what the block is for it: 0 empty,
    1 partial, 2 full.
    """
    tiles = (M + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    columns = (N + BLOCK_N - 1) // BLOCK_N
    line = tl.program_id(0)
    steps = KV_STEPS + tl.cast(line, tl.int64) * (1 + columns)
    count = 0
    for start in range(0, columns, 128):
        column = start + tl.arange(0, 128)
        blocks = column // (KV_BLOCK // BLOCK_N)
        kinds = tl.zeros_like(column)
        for consumer in tl.static_range(CONSUMERS):
            start_m = (line % tiles * CONSUMERS + consumer) * 64
            if start_m < M:
                row = tl.cast(line // tiles, tl.int64) * ROWS + start_m // Q_BLOCK
                if KV_ROWS is not None:
                    own = kinds_in_runs(blocks, row, KV_ROWS, KV_RUNS)
                else:
                    own = are_listed(blocks, row, KV_NUM_BLOCKS, KV_INDICES, kv_slots)
                    if FULL_KV_NUM_BLOCKS is not None:
                        full = are_listed(blocks, row, FULL_KV_NUM_BLOCKS, FULL_KV_INDICES, full_kv_slots)
                        own = tl.maximum(own, 2 * full)
                kinds += own << 2 * consumer
        met = ((kinds > 0) & (column < columns)).to(tl.int32)
        tl.store(steps + count + tl.cumsum(met, 0), column * BLOCK_N + kinds, mask=met > 0)
        count += tl.sum(met, 0)
    tl.store(steps, count)
