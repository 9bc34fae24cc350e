"""What is measured: shapes, and mods that flexmod and torch's flex_attention both take."""

from __future__ import annotations

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
    "memory": [
        Row("memory: causal", causal, batch=1, length=32768, memory=True),
        Row("memory: learned ALiBi + causal", LEARNED_ALIBI, batch=1, length=32768, memory=True),
        Row("memory: 8 documents + causal", documents, batch=1, length=32768, memory=True),
    ],
}


def find(name: str) -> Row:
    return next(row for rows in SETS.values() for row in rows if row.name == name)
