"""Many different calls in one process: memory and time a call must end flat.

    python -m benchmarks.long_run [--calls 20000] [--only cpu|stubbed]

Calls on the CPU backend, and as many with launches that do nothing (`host_path`), each with a fresh closure,
and with other constants, masks, lengths or formulas. Twenty lines: resident memory, objects that Python's
collector knows, modules, and the CPU time of a call of each kind. The last line compares the last quarter of
the calls with the second one. A call follows from its number alone: two runs do the same.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import flexmod
from benchmarks.host_path import on_an_h200
from flexmod import masks, mods

LENGTHS = range(8, 72)  # of positions
FORMULAS = 13  # steps that a formula may have, each there or not: 2 ** 13 graphs
PAGE = os.sysconf("SC_PAGE_SIZE")


def tensors(number: int, dtype: torch.dtype, heads: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
    length = LENGTHS[number * 7 % len(LENGTHS)] if length is None else length
    return tuple(torch.ones(1, heads, length, 16, dtype=dtype) for _ in range(3))


def mask_of(mask_mod: Any, length: int) -> flexmod.BlockMask:
    return flexmod.create_block_mask(mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=128)


def constant(number: int, dtype: torch.dtype) -> Any:
    """Another number in a closure of one formula."""
    cap = 5.0 + number / 7
    return flexmod.flex_attention(*tensors(number, dtype), lambda s, b, h, q, k: cap * torch.tanh(s / cap))


def window(number: int, dtype: torch.dtype) -> Any:
    """Another block mask, by a number."""
    query, key, value = tensors(number, dtype)
    length = query.shape[2]
    block_mask = mask_of(masks.causal() & masks.sliding_window(1 + number % 4093), length)
    return flexmod.flex_attention(query, key, value, block_mask=block_mask)


def documents(number: int, dtype: torch.dtype) -> Any:
    """Another block mask, by a captured tensor."""
    query, key, value = tensors(number, dtype)
    length = query.shape[2]
    ids = torch.arange(length) // (1 + number % 50)
    block_mask = mask_of(masks.document(ids, causal=True), length)
    return flexmod.flex_attention(query, key, value, block_mask=block_mask)


def split(number: int, dtype: torch.dtype) -> Any:
    """A score mod with -inf branches, whose mask is another in each call."""
    query, key, value = tensors(number, dtype)
    near = number % 4091
    return flexmod.flex_attention(
        query, key, value, lambda s, b, h, q, k: torch.where((q >= k) & (q - k <= near), s, -math.inf)
    )


def split_by_tensor(number: int, dtype: torch.dtype) -> Any:
    """The same with a captured tensor: its mask is built in each call."""
    query, key, value = tensors(number, dtype, length=64)
    ids = torch.arange(64) // (1 + number % 50)
    return flexmod.flex_attention(
        query, key, value, lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -math.inf)
    )


def handle(number: int, dtype: torch.dtype) -> Any:
    """A handle that is made, called and dropped."""
    slopes = torch.arange(2.0) / (number + 1)
    return flexmod.compile(mods.alibi(slopes), masks.causal())(*tensors(number, dtype, heads=2))


def formula(number: int, dtype: torch.dtype) -> Any:
    """Another graph: with a launch, another module. As long in the last calls as in the first."""
    chosen = number * 5077 % 2**FORMULAS
    bits = [bit for bit in range(FORMULAS) if chosen >> bit & 1]

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for bit in bits:
            s = s + (q >> bit) * 0.125 if bit % 2 else s * 0.5 + (k & bit)
        return s

    return flexmod.flex_attention(*tensors(number, dtype, length=64), score_mod)


def backward(number: int, dtype: torch.dtype) -> Any:
    """Another number, with gradients."""
    leaves = [x.requires_grad_() for x in tensors(number, dtype, length=64)]
    rate = number / 7
    out: Any = flexmod.flex_attention(*leaves, lambda s, b, h, q, k: s + rate * (q - k))
    return torch.autograd.grad(out.sum(), leaves)


KINDS: tuple[Callable[[int, torch.dtype], Any], ...] = (
    constant, window, documents, split, split_by_tensor, handle, formula, backward,
)  # fmt: skip


def memory() -> float:
    """Resident memory, MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE / 2**20


def run(calls: int, dtype: torch.dtype, step: int = 1000) -> list[dict[str, float]]:
    """A row for each `step` calls."""
    rows = []
    for first in range(0, calls, step):
        spent: defaultdict[str, float] = defaultdict(float)
        for number in range(first, min(first + step, calls)):
            kind = KINDS[number % len(KINDS)]
            start = time.process_time()
            kind(number // len(KINDS), dtype)
            spent[kind.__name__] += time.process_time() - start
        gc.collect()
        row = {"calls": first + step, "MiB": memory(), "objects": len(gc.get_objects())}
        row["modules"] = sum(name.startswith("flexmod_generated.") for name in sys.modules)
        row["ms a call"] = sum(spent.values()) / step * 1e3
        names = [kind.__name__ for kind in KINDS]
        rows.append(row | {name: len(KINDS) * spent[name] / step * 1e3 for name in names})
    return rows


def table(rows: Iterable[dict[str, float]]) -> str:
    return tabulate([list(row.values()) for row in rows], list(next(iter(rows))), "github", floatfmt=".3g")


def quarters(rows: list[dict[str, float]]) -> dict[str, float]:
    """The last quarter by the second one: 1 is flat."""
    quarter = len(rows) // 4
    second, last = rows[quarter : 2 * quarter], rows[-quarter:]
    return {
        name: sum(row[name] for row in last) / max(sum(row[name] for row in second), 1e-9)
        for name in rows[0]
        if name != "calls"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--only", choices=("cpu", "stubbed"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, context, dtype in (
        ("cpu", nullcontext(), torch.float32), ("stubbed", on_an_h200(), torch.float16)
    ):  # fmt: skip
        if given.only in (None, name):
            with context:
                rows = run(given.calls, dtype, max(1, given.calls // 20))
            print(f"\n{name}\n{table(rows)}\n\nthe last quarter by the second one:", flush=True)
            print(table([quarters(rows)]), flush=True)


if __name__ == "__main__":
    main()
