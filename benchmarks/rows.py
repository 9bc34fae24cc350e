"""What is measured: shapes, and mods that flexmod and torch's flex_attention both take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.dense import MaskMod, Mods
from flexmod import masks, mods


@dataclass(frozen=True)
class Row:
    """One line of a table.

        sdpa      the equivalent fused form of SDPA, "full", "causal" or none
        constant  the row with the same mod and no gradients of captured tensors
        memory    measures the peak of memory, not the time
    """

    name: str
    mods: Callable[[Row, torch.device], Mods]
    sdpa: str = ""
    batch: int = 4
    heads: int = 16
    kv_heads: int = 16
    length: int = 8192
    head_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    constant: str = ""
    memory: bool = False


def noop(row: Row, device: torch.device) -> Mods:
    return Mods()


def causal(row: Row, device: torch.device) -> Mods:
    return Mods(mask_mod=masks.causal())


def window(row: Row, device: torch.device) -> Mods:
    return Mods(mask_mod=masks.sliding_window(row.length // 8))


def prefix(row: Row, device: torch.device) -> Mods:
    return Mods(mask_mod=masks.prefix_lm(row.length // 4))


def document_ids(length: int, count: int, device: torch.device) -> Tensor:
    """int32 [length], ascending, with the same random borders in every run."""
    borders = torch.randperm(length - 1, generator=torch.Generator().manual_seed(count))[: count - 1] + 1
    starts = torch.zeros(length, dtype=torch.int32)
    starts[borders] = 1
    return starts.cumsum(0, dtype=torch.int32).to(device)


def documents(row: Row, device: torch.device) -> Mods:
    return Mods(mask_mod=masks.document(document_ids(row.length, 8, device), causal=True))


def alibi(row: Row, device: torch.device, learn: bool = False) -> Mods:
    slopes = torch.exp2(-8.0 * torch.arange(1, row.heads + 1, device=device) / row.heads)
    slopes.requires_grad_(learn)
    return Mods(mods.alibi(slopes), masks.causal(), (slopes,) if learn else ())


def table(row: Row, device: torch.device, learn: bool = False, mask_mod: MaskMod | None = None) -> Mods:
    """A bias for each head and each relative position, float32 [heads, 2 * length]."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(row.heads, 2 * row.length, generator=generator).to(device).requires_grad_(learn)
    middle = row.length

    def relative_table(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, q_idx - kv_idx + middle]

    return Mods(relative_table, mask_mod, (bias,) if learn else ())


def learned_pairs(row: Row, device: torch.device) -> Mods:
    """A learned bias [heads, length, length]: each element has a place of its own."""
    bias = torch.zeros(row.heads, row.length, row.length, device=device, dtype=row.dtype, requires_grad=True)
    return Mods(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx], None, (bias,))


def softcap(row: Row, device: torch.device) -> Mods:
    return Mods(mods.softcap(20.0), masks.causal())


def natten(row: Row, device: torch.device) -> Mods:
    """Over a square image."""
    side = round(row.length**0.5)
    return Mods(mask_mod=masks.natten((side, side), 7))


def image(row: Row, device: torch.device) -> Mods:
    """Stand-alone self-attention over an image 128 wide, 8 pixels to each side."""
    return Mods(mask_mod=masks.standalone_window(row.length // 128, 128, 9))


def relative(row: Row, device: torch.device) -> Mods:
    return Mods(mods.relative_position())


def causal_score(row: Row, device: torch.device) -> Mods:
    return Mods(mods.causal_score())


def dense_mask(row: Row, device: torch.device) -> Mods:
    """A truth value for each pair of positions, half of them true."""
    generator = torch.Generator(device).manual_seed(2)
    allowed = torch.rand(row.length, row.length, generator=generator, device=device) < 0.5
    return Mods(mask_mod=lambda b, h, q_idx, kv_idx: allowed[q_idx, kv_idx])


def pairs(row: Row, device: torch.device, share: int = 1, dense: bool = False, twice: bool = False) -> Mods:
    """A constant bias for each pair of positions; `share` heads have the same one."""
    generator = torch.Generator(device).manual_seed(1)
    bias, other = (
        torch.randn(count, row.length, row.length, generator=generator, device=device).to(row.dtype)
        for count in (-(-row.heads // share), row.batch)
    )

    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score + bias[h // share if share > 1 else h, q_idx, kv_idx]
        return score + other[b, q_idx, kv_idx] if twice else score

    return Mods(add, dense_mask(row, device).mask_mod if dense else None)


def t5(row: Row, device: torch.device, learn: bool = False) -> Mods:
    """T5's buckets, computed by the mod itself."""
    table = torch.randn(row.heads, 32, generator=torch.Generator().manual_seed(1)).to(device)
    table.requires_grad_(learn)

    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        far = torch.where(kv_idx > q_idx, 16, 0)
        apart = torch.abs(kv_idx - q_idx)
        grown = 8 + (torch.log(apart / 8) / math.log(128 / 8) * 8).to(torch.int32)
        return score + table[h, far + torch.where(apart < 8, apart, torch.clamp(grown, max=15))]

    return Mods(add, None, (table,) if learn else ())


def cosine(row: Row, device: torch.device) -> Mods:
    """A cosine of each distance times the score."""
    return Mods(lambda score, b, h, q_idx, kv_idx: score * torch.cos((q_idx - kv_idx) / 100))


def kerple(row: Row, device: torch.device) -> Mods:
    slopes = torch.rand(row.heads, generator=torch.Generator().manual_seed(1)).to(device)

    def fall(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * torch.log1p(torch.abs(q_idx - kv_idx).to(torch.float32))

    return Mods(fall, masks.causal())


def paths(row: Row, device: torch.device) -> Mods:
    """A bias for each length of a path in a graph, as Graphormer has."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (row.batch, row.length, row.length)
    apart = torch.randint(0, 32, shape, generator=generator, device=device, dtype=torch.int32)
    table = torch.randn(row.heads, 32, generator=generator, device=device)
    return Mods(lambda score, b, h, q_idx, kv_idx: score + table[h, apart[b, q_idx, kv_idx]])


ALIBI = Row("ALiBi + causal", alibi)
LEARNED_ALIBI = partial(alibi, learn=True)
CAUSAL_TABLE = partial(table, mask_mod=masks.causal())
LEARNED_TABLE = partial(table, learn=True)
LEARNED_CAUSAL_TABLE = partial(table, learn=True, mask_mod=masks.causal())

D128 = [
    Row("no-op", noop, "full"),
    Row("causal", causal, "causal"),
    Row("window 1024 + causal", window),
    Row("prefix 2048", prefix),
    Row("8 documents + causal", documents),
    ALIBI,
    Row("soft-cap + causal", softcap),
    Row("NATTEN 7x7", natten, length=90 * 90),
    Row("image window 8", image),
    Row("relative position", relative),
    Row("causal as score mod", causal_score),
]
SHORT = {"batch": 2048, "heads": 4, "kv_heads": 4, "length": 64}
NARROW = {"batch": 8, "head_dim": 64, "value_dim": 64, "dtype": torch.float16}

SETS: dict[str, list[Row]] = {
    "D128": D128,
    "D64": [replace(row, name=f"D64 {row.name}", **NARROW) for row in D128],  # type: ignore[arg-type]
    "shapes": [
        Row("GQA 32/8", causal, "causal", batch=2, heads=32, kv_heads=8),
        Row("D256", causal, "causal", heads=8, kv_heads=8, head_dim=256, value_dim=256),
        Row("D192/Dv128", causal, "causal", batch=2, head_dim=192),
        Row("D80", causal, "causal", batch=2, head_dim=80, value_dim=80),
        Row("S512 D64", causal, "causal", batch=64, length=512, head_dim=64, value_dim=64),
    ],
    "lengths": [
        Row(f"S{length} causal", causal, "causal", batch=32768 // length, length=length)
        for length in (1024, 2048, 4096, 16384, 32768)
    ],
    "learned": [
        ALIBI,
        Row("learned ALiBi + causal", LEARNED_ALIBI, constant=ALIBI.name),
        Row("table", table, length=4096),
        Row("learned table", LEARNED_TABLE, length=4096, constant="table"),
        Row("table + causal", CAUSAL_TABLE, length=4096),
        Row("learned table + causal", LEARNED_CAUSAL_TABLE, length=4096, constant="table + causal"),
        Row("learned pairs", learned_pairs, length=2048),
    ],
    "written": [
        Row("dense mask", dense_mask, length=4096),
        Row("pairs + dense mask", partial(pairs, dense=True), length=2048),
        Row("pairs of groups", partial(pairs, share=4), length=2048),
        Row("pairs twice", partial(pairs, twice=True), length=2048),
        Row("paths", paths, length=2048),
        Row("T5 by hand", t5, length=4096),
        Row("learned T5 by hand", partial(t5, learn=True), length=4096, constant="T5 by hand"),
        Row("cosine of distance", cosine, length=4096),
        Row("Kerple + causal", kerple, length=4096),
        Row("S16 D64", noop, batch=4096, heads=4, kv_heads=4, length=16, head_dim=64, value_dim=64),
        Row("S32 D32 pairs", pairs, batch=4096, heads=4, kv_heads=4, length=32, head_dim=32, value_dim=32),
        Row("S64 D32 pairs", pairs, **SHORT, head_dim=32, value_dim=32),  # type: ignore[arg-type]
        Row("S64 D64", noop, **SHORT, head_dim=64, value_dim=64),  # type: ignore[arg-type]
        Row("S64 D128", noop, **SHORT),  # type: ignore[arg-type]
        Row("S128 D64", noop, batch=1024, heads=4, kv_heads=4, length=128, head_dim=64, value_dim=64),
        Row("S256 D64", noop, batch=512, heads=4, kv_heads=4, length=256, head_dim=64, value_dim=64),
        Row("S256 D32 pairs", pairs, batch=256, heads=4, kv_heads=4, length=256, head_dim=32, value_dim=32),
        Row("S49 D32 pairs", pairs, batch=2048, heads=4, kv_heads=4, length=49, head_dim=32, value_dim=32),
        Row("S197 D64 pairs", pairs, batch=128, heads=12, kv_heads=12, length=197, head_dim=64, value_dim=64),
        Row("S1025 D64 pairs", pairs, batch=16, length=1025, head_dim=64, value_dim=64),
        Row("D32 causal", causal, length=4096, head_dim=32, value_dim=32),
    ],
    "memory": [
        Row("memory: causal", causal, batch=1, length=32768, memory=True),
        Row("memory: learned ALiBi + causal", LEARNED_ALIBI, batch=1, length=32768, memory=True),
        Row("memory: 8 documents + causal", documents, batch=1, length=32768, memory=True),
    ],
}


def find(name: str) -> Row:
    return next(row for rows in SETS.values() for row in rows if row.name == name)
