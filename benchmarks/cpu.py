"""flexmod beside SDPA on the CPU, forward and backward apart, in turns in one process.

    python -m benchmarks.cpu [--lengths 512 2048] [--dtypes float32] [--rows causal] [--passes 4]
    python -m benchmarks.cpu --host

Each pass over the table adds rounds to each cell, so that a busy minute of a shared host does not decide a
row. A cell has the best and the median round. "of SDPA" is the ratio of the best rounds, and for a score mod
"of plain" the ratio to the row without it. GFLOP/s count the products of kept tiles of 128 x 128: two of a
forward, five of a backward. MiB is the peak of the process above its size before the call. `--host` times
eager calls of one row, whose arithmetic takes no time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

import flexmod
from benchmarks.rows import document_ids
from flexmod import masks, mods

DIM = 64
HEADS = {512: 4, 2048: 4, 4096: 8, 8192: 2}
LEAST = 3  # rounds


class CpuRow(NamedTuple):
    """`mask` and `score` make a row's mods from the length and the number of heads.

    `sizes` are B and H of its block mask; `plain` is the row without its score mod.
    """

    mask: Callable[[int, int], Any] | None = None
    score: Callable[[int, int], Any] | None = None
    sizes: tuple[bool, bool] = (False, False)
    batch: int = 1
    plain: str = ""


def _causal(length: int, heads: int) -> Any:
    return masks.causal()


def _windows_of_heads(length: int, heads: int) -> Any:
    return masks.sliding_window(torch.arange(1, heads + 1) * (length // (2 * heads)))


def _documents_of_batch(length: int, heads: int) -> Any:
    ids = torch.stack([document_ids(length, count, torch.device("cpu")) for count in (3, 9)])
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)


def _with_hole(length: int, heads: int) -> Any:
    """Causal without pairs of one hash, so that each tile below the diagonal is partial."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx * 7919 + kv_idx * 104729) % 65521 != 0)


def _table(length: int, heads: int) -> Any:
    bias = torch.randn(heads, 2 * length, generator=torch.Generator().manual_seed(1))
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + length]


def _alibi(length: int, heads: int) -> Any:
    return mods.alibi(torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads))


ROWS = {
    "no-op": CpuRow(),
    "causal": CpuRow(_causal),
    "window 512": CpuRow(lambda length, heads: masks.sliding_window(512)),
    "documents": CpuRow(
        lambda length, heads: masks.document(document_ids(length, 8, torch.device("cpu")), causal=True)
    ),
    "prefix": CpuRow(lambda length, heads: masks.prefix_lm(length // 4)),
    "NATTEN 7 x 7": CpuRow(lambda length, heads: masks.natten((length // 32, 32), 7)),
    "windows of heads": CpuRow(_windows_of_heads, sizes=(False, True)),
    "documents of batch": CpuRow(_documents_of_batch, sizes=(True, False), batch=2),
    "hashed hole": CpuRow(_with_hole),
    "ALiBi + causal": CpuRow(_causal, _alibi, plain="causal"),
    "table": CpuRow(None, _table, plain="no-op"),
    "soft-cap + causal": CpuRow(_causal, lambda length, heads: mods.softcap(20.0), plain="causal"),
}
SDPA = {"no-op": False, "causal": True}


class Times(NamedTuple):
    """Seconds of rounds."""

    forward: list[float]
    backward: list[float]


def timed(run: Callable[..., Tensor], tensors: list[Tensor], grad_out: Tensor, into: Times) -> None:
    """Times a forward and its backward."""
    start = time.perf_counter()
    out = run(*tensors)
    middle = time.perf_counter()
    torch.autograd.grad(out, tensors, grad_out)
    into.forward.append(middle - start)
    into.backward.append(time.perf_counter() - middle)


def peak_mib(run: Callable[[], object]) -> float:
    """The peak of the process above its size before; Linux only."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


def measured(name: str, length: int, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Runs flexmod and SDPA in turns."""
    row, heads = ROWS[name], HEADS[length]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(row.batch, heads, length, DIM, generator=generator).to(dtype).requires_grad_()
        for _ in range(3)
    ]
    grad_out = torch.randn(row.batch, heads, length, DIM, generator=generator).to(dtype)
    mask, kept = None, row.batch * heads * (-(-length // 128)) ** 2
    if row.mask is not None:
        sizes = [size if own else None for size, own in zip((row.batch, heads), row.sizes, strict=True)]
        mask = flexmod.create_block_mask(row.mask(length, heads), *sizes, length, length, device="cpu")
        kept = int((mask.table() != 0).expand(row.batch, heads, -1, -1).sum())
    score = None if row.score is None else row.score(length, heads)
    causal = SDPA.get(name, False)
    runs: dict[str, Callable[..., Tensor]] = {
        "flexmod": lambda q, k, v: flexmod.flex_attention(q, k, v, score, mask),
        "sdpa": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    }
    if name not in SDPA:
        del runs["sdpa"]
    found = {each: Times([], []) for each in runs}
    for each, run in runs.items():
        timed(run, tensors, grad_out, Times([], []))  # warm up
        found[each] = Times([], [])
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(found["flexmod"].forward) < LEAST:
        for each, run in runs.items():
            timed(run, tensors, grad_out, found[each])
    peaks = {
        each: peak_mib(lambda run=run: timed(run, tensors, grad_out, Times([], [])))  # type: ignore[misc]
        for each, run in runs.items()
    }
    return {"times": found, "kept": kept, "mib": peaks}


def table(lengths: list[int], dtypes: list[str], rows: list[str], seconds: float, passes: int) -> str:
    cells = list(itertools.product(dtypes, lengths, rows))
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for cell in cells * passes:
        dtype, length, name = cell
        new = measured(name, length, getattr(torch, dtype), seconds)
        for each, times in found.get(cell, {"times": {}})["times"].items():
            new["times"][each].forward.extend(times.forward)
            new["times"][each].backward.extend(times.backward)
        found[cell] = new
    lines = [_line(found, *cell) for cell in cells]
    header = ["row", "B x H x S", "dtype"]
    for direction in ("forward", "backward"):
        header += [f"{direction} ms", "of SDPA, of plain", "GFLOP/s"]
    return tabulate(lines, [*header, "peak MiB"], tablefmt="github")


def _line(found: dict[tuple[str, int, str], dict[str, Any]], dtype: str, length: int, name: str) -> list[Any]:
    cell = found[dtype, length, name]
    plain = found.get((dtype, length, ROWS[name].plain))
    times = cell["times"]["flexmod"]
    beside = cell["times"].get("sdpa") or (plain and plain["times"]["flexmod"])
    line: list[Any] = [name, f"{ROWS[name].batch}x{HEADS[length]}x{length}", dtype]
    for direction, products in (("forward", 4), ("backward", 10)):
        own, flops = getattr(times, direction), cell["kept"] * 128 * 128 * DIM * products
        line += [f"{min(own) * 1e3:.2f} / {statistics.median(own) * 1e3:.2f}"]
        line += [f"{min(own) / min(getattr(beside, direction)):.2f}" if beside else "-"]
        line += [f"{flops / min(own) / 1e9:.0f}"]
    mib = cell["mib"]
    return [*line, f"{mib['flexmod']:.0f}" + (f" / {mib['sdpa']:.0f}" if "sdpa" in mib else "")]


def host() -> str:
    """Microseconds of eager calls of 16 rows: the best of 40 rounds of 50 calls."""
    tensors = [torch.randn(1, 1, 16, 16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    mask, slopes = flexmod.create_block_mask(masks.causal(), None, None, 16, 16, device="cpu"), torch.ones(1)
    cases: dict[str, Callable[[], Any]] = {
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(*tensors),
        "no-op": lambda: flexmod.flex_attention(*tensors),
        "causal": lambda: flexmod.flex_attention(*tensors, block_mask=mask),
        "causal, ALiBi": lambda: flexmod.flex_attention(*tensors, mods.alibi(slopes), mask),
        "causal, soft-cap": lambda: flexmod.flex_attention(*tensors, mods.softcap(20.0), mask),
        "causal, with autograd": lambda: flexmod.flex_attention(*leaves, block_mask=mask),
        "causal, with backward": lambda: flexmod.flex_attention(*leaves, block_mask=mask).sum().backward(),
    }
    lines = []
    for name, run in cases.items():
        rounds = []
        for _ in range(40):
            start = time.perf_counter()
            for _ in range(50):
                run()
            rounds.append((time.perf_counter() - start) / 50 * 1e6)
        lines.append([name, f"{min(rounds):.1f}"])
    return tabulate(lines, ["eager call", "us"], tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seconds", type=float, default=0.8, help="of rounds for each cell and pass")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--host", action="store_true", help="the host cost of calls alone")
    asked = parser.parse_args()
    cells = asked.lengths, asked.dtypes, asked.rows
    print(host() if asked.host else table(*cells, asked.seconds, asked.passes))


if __name__ == "__main__":
    main()
