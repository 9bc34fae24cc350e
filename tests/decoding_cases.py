"""Calls of few queries on many keys, and their check beside float64, on any device."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference_case import Case, Limit, assert_within, eager_error_bound, expected, make_case
from torch import Tensor

from flexmod import AuxRequest, BlockMask, create_block_mask, flex_attention, mods
from flexmod.backends import arguments, decoding
from flexmod.calls import prepared
from flexmod.codegen.spec import Decoding

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
Mods = tuple[Any, Any]


@dataclass(frozen=True)
class Few:
    """`mods` makes the score_mod and the mask_mod. `told_apart`: the mask has this many heads.

    `rows` and `group`: what kernels compute it by, with enough keys.
    """

    m: int = 1
    n: int = 700
    heads: int = 8
    kv_heads: int = 2
    batch: int = 1
    dims: tuple[int, int] = (32, 32)
    dtype: torch.dtype = HALF
    mods: Callable[[Few, Any], Mods] = lambda few, device: (None, None)
    told_apart: int | None = None
    block: int | tuple[int, int] = 128
    layout: str = "bhsd"
    rows: int = 16
    group: int = 4
    factor: float = 1.0


def last(few: Few, device: Any) -> Mods:
    """The queries are the last positions, causal."""
    return None, lambda b, h, q_idx, kv_idx: q_idx + (few.n - few.m) >= kv_idx


def window(few: Few, device: Any) -> Mods:
    return None, lambda b, h, q_idx, kv_idx: (q_idx + (few.n - few.m) - kv_idx).abs() < 300


def of_entries(few: Few, device: Any) -> Mods:
    """Each batch entry has a number of keys of its own, the first one none."""
    lengths = torch.arange(few.batch, device=device, dtype=torch.int32) * (few.n // few.batch)
    return None, lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def of_heads(few: Few, device: Any) -> Mods:
    return None, lambda b, h, q_idx, kv_idx: (kv_idx + h) % 3 != 0


def stripes(few: Few, device: Any) -> Mods:
    """Many runs of blocks."""
    return None, lambda b, h, q_idx, kv_idx: (kv_idx // 100 + q_idx) % 2 == 0


def dead(few: Few, device: Any) -> Mods:
    return None, lambda b, h, q_idx, kv_idx: kv_idx < q_idx * 450


def alibi(few: Few, device: Any) -> Mods:
    return mods.alibi(few.heads), None


def table(few: Few, device: Any) -> Mods:
    """A bias by head and pair, and a window."""
    bias = torch.randn(few.heads, few.m, few.n, generator=torch.Generator().manual_seed(3)).to(device)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx], window(few, device)[1]


def softcap(few: Few, device: Any) -> Mods:
    return mods.softcap(5.0), last(few, device)[1]


def holes(few: Few, device: Any) -> Mods:
    """-inf of a score_mod becomes a mask."""
    return lambda score, b, h, q_idx, kv_idx: torch.where((kv_idx + h) % 5 > 1, score, -torch.inf), None


CASES = {
    "one query": Few(),
    "one query, brain": Few(dtype=BRAIN, n=701, batch=2),
    "one head of keys": Few(heads=64, kv_heads=1, rows=64, group=64),
    "as many heads of keys": Few(heads=3, kv_heads=3, group=1),
    "three heads share": Few(heads=6, kv_heads=2, group=3, n=1000),
    "three queries": Few(m=3),
    "queries inside of heads": Few(m=3, layout="bshd", group=1),
    "half of the heads": Few(m=17, dtype=BRAIN, rows=64, group=2),
    "many queries": Few(m=64, heads=2, kv_heads=1, rows=64, group=1, dims=(64, 64)),
    "several tiles": Few(m=130, n=530, heads=2, kv_heads=1, rows=64, group=1, mods=last),
    "wide heads": Few(dims=(192, 128), heads=4, kv_heads=1, n=600),
    "odd dims": Few(dims=(24, 40), m=2),
    "causal": Few(m=4, mods=last, batch=2),
    "window": Few(m=2, n=1500, mods=window),
    "own lengths": Few(batch=4, mods=of_entries),
    "a mask of heads": Few(m=2, mods=of_heads, told_apart=8, group=1),
    "the same mask for all heads": Few(m=2, mods=last, told_apart=8),
    "stripes": Few(n=1300, mods=stripes, block=(128, 64)),
    "stripes of small blocks": Few(m=20, n=600, heads=4, mods=stripes, block=(16, 64), rows=32, group=1),
    "dead rows": Few(m=3, n=900, mods=dead),
    "ALiBi": Few(mods=alibi, m=2, dtype=BRAIN),
    "table": Few(mods=table, m=2),
    "soft-cap": Few(mods=softcap, m=4, dtype=BRAIN),
    "holes": Few(mods=holes, m=2, group=1),
    "one query, single": Few(dtype=SINGLE, n=701, batch=2),
    "three queries, single": Few(dtype=SINGLE, m=3, mods=last, dims=(64, 64)),
    "window, single": Few(dtype=SINGLE, m=2, n=1500, mods=window, dims=(128, 128)),
    "wide values, single": Few(dtype=SINGLE, dims=(96, 192), heads=4, kv_heads=1, n=600),
    "one query of wide heads, single": Few(dtype=SINGLE, dims=(128, 128), n=1000, batch=2),
    "several tiles, single": Few(
        dtype=SINGLE, m=130, n=530, heads=2, kv_heads=1, rows=64, group=1, mods=last
    ),
    "table, single": Few(dtype=SINGLE, mods=table, m=2),
    "soft-cap, single": Few(dtype=SINGLE, mods=softcap, m=4),
    "dead rows, single": Few(dtype=SINGLE, m=3, n=900, mods=dead),
    "large scores": Few(m=2, dtype=BRAIN, factor=3000.0),
    "large scores, single": Few(m=2, dtype=SINGLE, factor=3000.0),
}


def fill(monkeypatch: pytest.MonkeyPatch, processors: int, saved: int = 128) -> None:
    """A device with so many processors, which programs shall fill if each is rid of `saved` keys."""
    for module in (decoding, arguments):
        monkeypatch.setattr(module, "processors", lambda device: processors)
    monkeypatch.setattr(decoding, "SAVED", saved)
    prepared.forget()


def made(few: Few, device: Any, name: str) -> tuple[Case, Any, BlockMask | None]:
    case = make_case(
        batch=few.batch, heads=few.heads, kv_heads=few.kv_heads, q_len=few.m, kv_len=few.n,
        head_dim=few.dims[0], value_dim=few.dims[1], dtype=few.dtype, layout=few.layout, device=device,
        seed=zlib.crc32(name.encode()),
    )  # fmt: skip
    score_mod, mask_mod = few.mods(few, device)
    mask = None
    if mask_mod is not None:
        batch = few.batch if few.mods is of_entries else None
        sizes = batch, few.told_apart, few.m, few.n
        mask = create_block_mask(mask_mod, *sizes, device=device, BLOCK_SIZE=few.block)
    return replace(case, q=case.q * few.factor), score_mod, mask


def check(
    name: str, device: Any, split: bool | None, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """A call's results are right, and are computed as the case says."""
    few = CASES[name]
    case, score_mod, mask = made(few, device, name)
    found: list[Decoding] = []
    choose = decoding.decoding
    monkeypatch.setattr(decoding, "decoding", lambda *x, **y: found.append(choose(*x, **y)) or found[-1])
    both = AuxRequest(lse=True, max_scores=True)
    with torch.no_grad():
        out, aux = flex_attention(
            *case.inputs, score_mod, mask, enable_gqa=True, return_aux=both, kernel_options=options
        )
    truth = expected(case, score_mod, mask)
    limits = {
        way: Limit(limit.rms, 2 * limit.max)
        for way, limit in eager_error_bound(case, truth, score_mod, mask).items()
    }
    assert_within({"out": out}, truth, limits)
    close(aux.lse, truth.lse)
    close(aux.max_scores, truth.max_scores)
    (how,) = found
    assert how[:2] == (few.rows, few.group)
    assert split is None or how.split == split


def close(result: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(result.double(), exact, rtol=3e-6, atol=3e-6)
