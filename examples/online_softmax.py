"""Online softmax in four small Triton kernels: the recurrence in every kernel of flexmod.

softmax(score) = 2^(score - peak) / total. Scores are multiplied by log2(e) first; `peak` is a row's largest,
`total` the sum of its 2^(score - peak). Without the peak, 2^score would overflow.

    three loops   The peak, then the total, then the weights: the kernel reads a row three times.
    two loops     Peak and total in one loop: when the peak grows, the total so far shrinks by `decay`.
    one loop      Attention needs only the weights' product with v, which shrinks by `decay` too.
    tiles         The same for a tile of queries, with matrix products, and a mask that skips whole tiles.

Next read templates/forward.jinja, which uses the same names and completes the last kernel. Without a GPU,
flexmod runs the same kernels in Triton's interpreter.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import create_mask
from flexmod.runtime.interpreter import interpreted

from common import DEVICE

LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x * log2(e)), and 2^x is one instruction of a GPU


@triton.jit
def three_loops(SCORE, WEIGHT, N, BLOCK_N: tl.constexpr):
    """A program makes the softmax of one row: SCORE, WEIGHT [rows, N], float32."""
    row = tl.program_id(0) * N

    peak = tl.full([1], float("-inf"), tl.float32)
    for start_n in tl.range(0, N, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        score = tl.load(SCORE + row + columns, mask=columns < N, other=float("-inf")) * LOG2E
        peak = tl.maximum(peak, tl.max(score, 0))

    total = tl.full([1], 0.0, tl.float32)
    for start_n in tl.range(0, N, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        score = tl.load(SCORE + row + columns, mask=columns < N, other=float("-inf")) * LOG2E
        total += tl.sum(tl.exp2(score - peak), 0)  # past the end of the row: 2^-inf = 0

    for start_n in tl.range(0, N, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        score = tl.load(SCORE + row + columns, mask=columns < N, other=float("-inf")) * LOG2E
        tl.store(WEIGHT + row + columns, tl.exp2(score - peak) / total, mask=columns < N)


@triton.jit
def two_loops(SCORE, WEIGHT, N, BLOCK_N: tl.constexpr):
    """The same in two loops: what was summed for a smaller peak is corrected when a larger one comes."""
    row = tl.program_id(0) * N

    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    for start_n in tl.range(0, N, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        score = tl.load(SCORE + row + columns, mask=columns < N, other=float("-inf")) * LOG2E
        new_peak = tl.maximum(peak, tl.max(score, 0))
        decay = tl.exp2(peak - new_peak)  # 1 while the peak stays; 0 in the first step, where it was -inf
        total = total * decay + tl.sum(tl.exp2(score - new_peak), 0)
        peak = new_peak

    for start_n in tl.range(0, N, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        score = tl.load(SCORE + row + columns, mask=columns < N, other=float("-inf")) * LOG2E
        tl.store(WEIGHT + row + columns, tl.exp2(score - peak) / total, mask=columns < N)


@triton.jit
def one_loop(Q, K, V, OUT, N, BLOCK_N: tl.constexpr):
    """Attention of one query and N keys that are numbers: Q, OUT [queries], K, V [N], float32.

    No score and no weight is stored: the second loop is gone, since `out` is corrected as `total` is.
    """
    q = tl.load(Q + tl.program_id(0)) * LOG2E

    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    out = tl.full([1], 0.0, tl.float32)
    for start_n in tl.range(0, N, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        score = q * tl.load(K + columns, mask=columns < N, other=0.0)
        score = tl.where(columns < N, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 0))
        p = tl.exp2(score - new_peak)
        decay = tl.exp2(peak - new_peak)
        peak = new_peak
        total = total * decay + tl.sum(p, 0)
        out = out * decay + tl.sum(p * tl.load(V + columns, mask=columns < N, other=0.0), 0)

    tl.store(OUT + tl.program_id(0) + tl.arange(0, 1), out / total)


@triton.jit
def tiles(Q, K, V, OUT, scale, M, WINDOW, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program makes the attention of BLOCK_M queries to themselves and to the WINDOW keys before each.

    Q, K, V, OUT [M, D], float32. A tile of keys that no query of the program may see is never loaded. In
    flexmod `keep` is the user's mask_mod, and the block mask says which tiles the loop visits.
    """
    start_m = tl.program_id(0) * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, D)  # [D]
    q = tl.load(Q + rows[:, None] * D + dims[None, :], mask=rows[:, None] < M, other=0.0)  # [BLOCK_M, D]

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    out = tl.full([BLOCK_M, D], 0.0, tl.float32)
    first = tl.maximum(start_m - WINDOW, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(start_m + BLOCK_M, M)
    for start_n in tl.range(first, last, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        in_n = columns[:, None] < M
        k = tl.load(K + columns[:, None] * D + dims[None, :], mask=in_n, other=0.0)  # [BLOCK_N, D]
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        q_idx, kv_idx = rows[:, None], columns[None, :]
        keep = (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)
        score = tl.where(keep, score * LOG2E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A row that has met nothing but -inf has its peak there; inf - inf is no number, so 0 stands in.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - shift[:, None])
        decay = tl.exp2(peak - shift)
        peak = new_peak
        total = total * decay + tl.sum(p, 1)
        v = tl.load(V + columns[:, None] * D + dims[None, :], mask=in_n, other=0.0)  # [BLOCK_N, D]
        out = tl.dot(p, v, out * decay[:, None], input_precision="ieee")

    tl.store(OUT + rows[:, None] * D + dims[None, :], out / total[:, None], mask=rows[:, None] < M)


def kernels() -> Any:
    """This file's kernels: compiled on a GPU, interpreted elsewhere."""
    module = importlib.import_module(Path(__file__).stem)
    return module if DEVICE.type == "cuda" else interpreted(module)


def check(name: str, result: Tensor, expected: Tensor) -> None:
    print(f"{name:<12} largest difference to torch {float((result - expected).abs().max()):.1e}")
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def main() -> None:
    torch.manual_seed(0)
    run = kernels()

    score = 100 + 3 * torch.randn(3, 1000, device=DEVICE)  # e^100 is beyond float32
    weight = torch.empty_like(score)
    run.three_loops[(3,)](score, weight, 1000, BLOCK_N=128)
    check("three loops", weight, score.softmax(1))
    weight = torch.empty_like(score)
    run.two_loops[(3,)](score, weight, 1000, BLOCK_N=128)
    check("two loops", weight, score.softmax(1))

    q, k, v = torch.randn(10, device=DEVICE), *torch.randn(2, 1000, device=DEVICE)
    out = torch.empty_like(q)
    run.one_loop[(10,)](q, k, v, out, 1000, BLOCK_N=128)
    check("one loop", out, (q[:, None] * k).softmax(1) @ v)

    length, dim, window = 300, 32, 100
    q, k, v = torch.randn(3, length, dim, device=DEVICE)
    out = torch.empty_like(q)
    grid = (triton.cdiv(length, 64),)
    run.tiles[grid](q, k, v, out, dim**-0.5, length, window, D=dim, BLOCK_M=64, BLOCK_N=32)
    keep = create_mask(
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= window),
        None, None, length, length, device=DEVICE,
    )  # fmt: skip
    check("tiles", out, scaled_dot_product_attention(q[None], k[None], v[None], keep[0])[0])


if __name__ == "__main__":
    main()
