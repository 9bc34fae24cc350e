"""Times of one or a few queries on many keys, as in decoding, beside torch's flex_attention and SDPA.

    python -m benchmarks.decoding [--rows NAME ...] [--rounds 3]

No gradients. The queries are the last positions of the keys. All tensors are in bfloat16 but for "float8". In
"paged" all batch entries share a cache of pages in random order, as `docs/recipes/paged_cache.md` has it.
The limit is the memory: GB/s counts keys and values that the mask leaves, once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from tabulate import tabulate
from torch import Tensor

import flexmod
from benchmarks.dense import Mods
from benchmarks.gpu_time import milliseconds, wait_for
from benchmarks.measure_row import compiled_flex, noted
from flexmod import mods

PEERS = ("flexmod", "flex", "SDPA")


@dataclass(frozen=True)
class Row:
    """One line: a call of `queries` on `keys` of each batch entry.

    `kept`: keys that a query attends to. `by_entry`: each batch entry has a mask of its own. `float8`: the
    tensors of this type, "q", "k" and "v". `page`: keys of a page of the cache, or 0.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    keys: int
    queries: int = 1
    dim: int = 128
    mods: Callable[[Row], Mods] = lambda row: Mods()
    kept: int = 0
    by_entry: bool = False
    float8: str = ""
    page: int = 0


def causal(row: Row) -> Mods:
    first = row.keys - row.queries
    return Mods(mask_mod=lambda b, h, q_idx, kv_idx: q_idx + first >= kv_idx)


def window(row: Row, size: int = 1024) -> Mods:
    first = row.keys - row.queries
    return Mods(
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + first >= kv_idx) & (q_idx + first - kv_idx < size)
    )


def lengths(row: Row) -> Mods:
    """A cache in which each batch entry has its own number of keys, 3/4 of them on average."""
    steps = torch.arange(row.batch, device="cuda", dtype=torch.int32)
    last = row.keys // 2 + (steps + 1) * (row.keys // 2 // row.batch) - 1
    return Mods(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= last[b])


def alibi(row: Row) -> Mods:
    first = row.keys - row.queries
    slopes = torch.exp2(-8.0 * torch.arange(1, row.heads + 1, device="cuda") / row.heads)
    return Mods(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx - first))


def softcap(row: Row) -> Mods:
    return Mods(mods.softcap(20.0))


ROWS = [
    Row("1 x 1024", 1, 32, 8, 1024),
    Row("1 x 8192", 1, 32, 8, 8192),
    Row("1 x 65536", 1, 32, 8, 65536),
    Row("8 x 4096", 8, 32, 8, 4096),
    Row("8 x 8192", 8, 32, 8, 8192),
    Row("8 x 32768", 8, 32, 8, 32768),
    Row("64 x 2048", 64, 32, 8, 2048),
    Row("64 x 8192", 64, 32, 8, 8192),
    Row("16 x 32768, 64/8", 16, 64, 8, 32768),
    Row("128 x 2048, 16/16", 128, 16, 16, 2048),
    Row("8 x 8192, 32/1", 8, 32, 1, 8192),
    Row("D64, 8 x 8192", 8, 32, 8, 8192, dim=64),
    Row("D256, 8 x 8192, 16/4", 8, 16, 4, 8192, dim=256),
    Row("4 queries, causal, 8 x 8192", 8, 32, 8, 8192, 4, mods=causal),
    Row("16 queries, causal, 8 x 8192", 8, 32, 8, 8192, 16, mods=causal),
    Row("64 queries, causal, 8 x 8192", 8, 32, 8, 8192, 64, mods=causal),
    Row("window 1024, 8 x 32768", 8, 32, 8, 32768, mods=window, kept=1024),
    Row("own lengths, 16 x 16384", 16, 32, 8, 16384, mods=lengths, kept=12288, by_entry=True),
    Row("ALiBi, 8 x 8192", 8, 32, 8, 8192, mods=alibi),
    Row("soft-cap, 8 x 8192", 8, 32, 8, 8192, mods=softcap),
    Row("float8 keys and values, 8 x 8192", 8, 32, 8, 8192, float8="kv"),
    Row("float8, 8 x 8192", 8, 32, 8, 8192, float8="qkv"),
    Row("pages of 128, 8 x 8192", 8, 32, 8, 8192, page=128),
    Row("pages of 16, 8 x 8192", 8, 32, 8, 8192, page=16),
]


def paged_mask(row: Row, block_mask: Any) -> Any:
    """A mask of the class `block_mask` for sequences whose last page lacks 5 keys."""
    blocks, length = row.keys // row.page, row.keys - 5
    order = torch.randperm(row.batch * blocks, generator=torch.Generator().manual_seed(0))
    pages = order.to("cuda", torch.int32).view(row.batch, blocks)
    steps = torch.arange(blocks, device="cuda", dtype=torch.int32).expand_as(pages)
    block = pages.new_zeros(row.batch, row.batch * blocks).scatter_(1, pages.long(), steps)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return block[b, kv_idx // row.page] * row.page + kv_idx % row.page < length

    one = pages.new_ones(row.batch, 1, 1)
    lists = one, pages.roll(1, 1)[:, None, None], one * (blocks - 1), pages[:, None, None]
    return block_mask.from_kv_blocks(
        *lists, (128, row.page), mask_mod, (row.queries, row.batch * row.keys), compute_q_blocks=False
    )


def tensors(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    of_keys = (1, row.kv_heads, row.batch * row.keys) if row.page else (row.batch, row.kv_heads, row.keys)
    sizes = {"q": (row.batch, row.heads, row.queries), "k": of_keys, "v": of_keys}
    query, key, value = (
        torch.randn(*size, row.dim, device="cuda", dtype=torch.bfloat16).to(
            torch.float8_e4m3fn if name in row.float8 else torch.bfloat16
        )
        for name, size in sizes.items()
    )
    return query, key, value


def calls(row: Row, faults: dict[str, str]) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The calls of each peer that has the row, compiled, and their errors. `faults` gets flex's failure."""
    query, key, value = tensors(row)
    of_row = row.mods(row)
    mask = _mask(flexmod, row, of_row)
    given = partial(_call, query, key, value, of_row.score_mod)
    found = {"flexmod": given(mask, flexmod.flex_attention)}
    compiled, _ = compiled_flex()
    with noted(faults, "flex"):
        flex = given(_mask(torch_flex, row, of_row), compiled)
        flex()
        found["flex"] = flex
    if of_row == Mods() and not row.float8 and not row.page:
        found["SDPA"] = partial(
            torch.nn.functional.scaled_dot_product_attention, query, key, value, enable_gqa=True
        )
    exact = partial(flexmod.flex_attention, kernel_options={"BACKEND": "REFERENCE"})
    truth = _call(query.double(), key.double(), value.double(), of_row.score_mod, mask, exact)()
    errors = {name: ((call().double() - truth).norm() / truth.norm()).item() for name, call in found.items()}
    return found, errors


def _call(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, attend: Callable[..., Any]
) -> Callable[[], Any]:
    return partial(attend, query, key, value, score_mod, mask, enable_gqa=True)


def _mask(library: Any, row: Row, of_row: Mods) -> Any:
    """The mask of flexmod, or of torch's module."""
    if row.page:
        return paged_mask(row, library.BlockMask)
    if of_row.mask_mod is None:
        return None
    batch = row.batch if row.by_entry else None
    return library.create_block_mask(of_row.mask_mod, batch, None, row.queries, row.keys, device="cuda")


def line(row: Row, rounds: int) -> list[str]:
    faults: dict[str, str] = {}
    with torch.no_grad():
        found, errors = calls(row, faults)
        wait = max(map(wait_for, found.values()))
        times: dict[str, list[float]] = {name: [] for name in found}
        for name in rounds * tuple(found):
            times[name].append(milliseconds(found[name], wait))
    ms = {name: statistics.median(each) for name, each in times.items()}
    read = 2 * row.batch * row.kv_heads * (row.kept or row.keys) * row.dim * (1 if row.float8 else 2)
    own = ms["flexmod"]
    ratios = [f"{own / ms[peer]:.2f}" if peer in ms else "-" for peer in PEERS[1:]]
    cells = [f"{ms[peer] * 1e3:.1f}" if peer in ms else "-" for peer in PEERS]
    of_both = [f"{errors[peer]:.1e}" if peer in errors else "-" for peer in PEERS[:2]]
    for peer, fault in faults.items():
        print(f"{peer}: {fault[:300]}")
    return [row.name, *cells, *ratios, f"{read / own / 1e6:.0f}", *of_both]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", choices=[row.name for row in ROWS])
    parser.add_argument("--rounds", type=int, default=3, help="turns that each peer takes at each row")
    options = parser.parse_args()
    header = ["batch x keys", *(f"{peer}, µs" for peer in PEERS), *(f"to {peer}" for peer in PEERS[1:])]
    header += ["GB/s", "error", "flex's"]
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    lines = []
    for row in rows:
        lines.append(line(row, options.rounds))
        print(row.name, flush=True)
    print(tabulate(lines, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
