"""Calls for the kernels made for Hopper, in each of their shapes: errors beside those of eager attention.

`measure` runs in worker processes, so it takes plain data and returns plain text.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from reference_case import Limit, eager_error_bound, error_size, expected, make_case
from torch import Tensor

from flexmod import create_block_mask, flex_attention
from flexmod.calls import autograd
from flexmod.codegen.hopper import BackwardShape, ForwardShape
from flexmod.runtime import launch
from gpu.poison import poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class HopperCase:
    """A call. `mods` names a row of `mods_of`; `rung`: which shape of the ladders, the last where it ends."""

    mods: str
    dims: tuple[int, int] = (128, 128)
    lengths: tuple[int, int] = (777, 777)
    heads: tuple[int, int] = (4, 4)
    batch: tuple[int, int] = (2, 2)
    dtype: str = "bfloat16"
    layout: str = "bhsd"
    block: int = 128
    scale: float | None = None
    grad_lse: bool = False
    rung: int = 0

    def __str__(self) -> str:
        sizes = f"D{self.dims[0]}-{self.dims[1]}-{self.lengths[0]}x{self.lengths[1]}"
        heads = f"H{self.heads[0]}-{self.heads[1]}-B{self.batch[0]}-{self.batch[1]}"
        rest = [self.dtype, self.layout, f"block{self.block}", *(["grad_lse"] if self.grad_lse else [])]
        scale = [] if self.scale is None else [f"scale{self.scale}"]
        return "-".join([self.mods.replace(" ", "_"), sizes, heads, *rest, *scale, f"rung{self.rung}"])

    @property
    def kernels(self) -> tuple[Any, ...]:
        """Cases that agree in this share compiled kernels, or nearly so."""
        return self.mods, self.dims


def mods_of(name: str, heads: int, rows: int, columns: int) -> tuple[Any, Any, bool]:
    """score_mod, mask_mod, and whether the mask reads b and h."""
    slopes = 2.0 ** -torch.arange(1, heads + 1, device=DEVICE)
    longest = max(rows, columns)
    ids = torch.arange(longest, device=DEVICE) * 7 // longest
    draw = torch.Generator().manual_seed(1)
    by_row, by_column = (torch.randn(longest, generator=draw).to(DEVICE) for _ in range(2))
    table = torch.randn(heads, 257, generator=draw).to(DEVICE)
    ends = torch.tensor([200, 400, 150, 600], device=DEVICE)
    # rows at multiples of 16 bytes
    pitch = (columns + 7) // 8 * 8
    of_pairs = torch.randn(heads, rows, pitch, generator=draw).to(DEVICE, torch.bfloat16)[..., :columns]
    odd_rows = torch.randn(heads, rows, columns, generator=draw).to(DEVICE, torch.bfloat16)
    pairs_of_batch = torch.randn(4, 1, rows, pitch, generator=draw).to(DEVICE)[..., :columns]

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 130)

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    def neighborhood(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((q_idx // 32 - kv_idx // 32).abs() <= 3) & ((q_idx % 32 - kv_idx % 32).abs() <= 3)

    def holes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx % 3 != 0) & ((q_idx < 130) | (q_idx >= 300)) & (kv_idx <= q_idx)

    def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 0

    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx + 64 * h) & (kv_idx < ends[b])

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3.0 * torch.tanh(score / 3.0)

    def wide_softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 50.0 * torch.tanh(score * 40.0 / 50.0)

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (q_idx - kv_idx)

    def capped_sum(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 4.0 * torch.tanh((score + slopes[h] * (kv_idx - q_idx)) / 4.0) + by_row[q_idx]

    def gelu(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Much work for each element."""
        return torch.nn.functional.gelu(score)

    def gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score * slopes[h]) * 3.0 + by_column[kv_idx]

    def two_ways(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Elements that would each need a factor for base 2, beside what is added to a row."""
        near = torch.where(q_idx > kv_idx, score * slopes[h], score + slopes[h] ** 2)
        return near + 0.3 * (kv_idx - q_idx) + by_row[q_idx]

    def near_ones(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Asks what the mask asks."""
        return torch.where(window(b, h, q_idx, kv_idx), score * slopes[h], score + 2.0)

    def loads(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx).clamp(-128, 128) + 128
        return score * (1.5 + by_row[q_idx].sin()) + by_column[kv_idx] + table[h, near]

    def buckets(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        far = (torch.log1p((q_idx - kv_idx).abs().float()) / math.log(2) * 8 + 0.3).int()
        return score + table[h, far] + torch.where(torch.sin(kv_idx - q_idx) > 0, ends[b] * 0.01, 0.0)

    def cosines(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * torch.cos((q_idx - kv_idx) * 0.1) + by_column[kv_idx]

    def risky(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """No finite number for what lies past the lengths."""
        return score * torch.log2(1.0 + (rows - 1 - q_idx)) + torch.sqrt(1.0 * (columns - 1 - kv_idx))

    def lowest(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """A mask as people write it; each query sees its own key, or the last."""
        seen = (q_idx - kv_idx).abs() <= 70
        return torch.where(seen | (kv_idx == columns - 1), score, torch.finfo(torch.float32).min)

    def infinite(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(score > -1.0, score, -math.inf)

    def pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + of_pairs[h, q_idx, kv_idx]

    def odd_pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + odd_rows[h, q_idx, kv_idx]

    def capped_pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 4.0 * torch.tanh(score * of_pairs[h, q_idx, kv_idx] / 4.0)

    def float_pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx) + pairs_of_batch[b, 0, q_idx, kv_idx]

    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + 100 >= kv_idx

    table_of_mods: dict[str, tuple[Any, Any, bool]] = {
        "plain": (None, None, False),
        "causal": (None, causal, False),
        "window": (None, window, False),
        "documents": (None, documents, False),
        "neighborhood": (None, neighborhood, False),
        "holes": (None, holes, False),
        "nothing": (None, nothing, False),
        "by head": (None, by_head, True),
        "alibi": (alibi, causal, False),
        "softcap": (softcap, None, False),
        "softcap shifted": (softcap, shifted, False),
        "softcap holes": (softcap, holes, False),
        "wide softcap": (wide_softcap, causal, False),
        "relative": (relative, None, False),
        "capped sum": (capped_sum, causal, False),
        "gelu": (gelu, causal, False),
        "gate": (gate, window, False),
        "two ways": (two_ways, causal, False),
        "near ones": (near_ones, window, False),
        "loads": (loads, causal, False),
        "buckets": (buckets, causal, False),
        "cosines": (cosines, None, False),
        "risky": (risky, None, False),
        "lowest": (lowest, None, False),
        "infinite": (infinite, causal, False),
        "pairs": (pairs, None, False),
        "odd pairs": (odd_pairs, None, False),
        "capped pairs": (capped_pairs, holes, False),
        "float pairs": (float_pairs, causal, False),
    }
    return table_of_mods[name]


ALL = (
    "plain",
    "causal",
    "window",
    "documents",
    "neighborhood",
    "alibi",
    "softcap",
    "softcap shifted",
    "loads",
)
CASES = [
    *(HopperCase(name, (dim, dim), rung=rung) for name in ALL for dim in (128, 64) for rung in range(3)),
    *(HopperCase(name, (64, 64), rung=rung) for name in ("plain", "alibi", "softcap") for rung in (3, 4)),
    *(HopperCase("gelu", (dim, dim), rung=rung) for dim in (128, 64) for rung in range(3)),
    # wide heads, of which the backward's consumers share the keys
    *(HopperCase(name, (256, 256), rung=rung) for name in ALL for rung in range(3)),
    *(HopperCase(name, (192, 128)) for name in ALL),
    *(HopperCase(name, (192, 128), rung=1) for name in ("alibi", "softcap holes", "loads", "gate", "risky")),
    *(
        HopperCase("softcap shifted", dims)
        for dims in ((192, 192), (160, 224), (64, 256), (256, 128), (200, 64))
    ),
    *(HopperCase("risky", (192, 128), lengths) for lengths in ((1, 1), (1, 700), (129, 65), (300, 77))),
    HopperCase("loads", (192, 128), heads=(6, 2), batch=(3, 1), lengths=(500, 500)),
    HopperCase("by head", (256, 256), heads=(4, 2), batch=(4, 4)),
    HopperCase("causal", (192, 192), layout="bshd", dtype="float16", grad_lse=True),
    *(HopperCase(name, (192, 128)) for name in ("holes", "softcap holes", "nothing", "infinite")),
    # scores as exponents: bounded ones, and float16, which has no room for a fixed peak
    *(
        HopperCase(name, (dim, dim), dtype=dtype)
        for name in ("softcap", "wide softcap", "relative", "capped sum", "gate", "two ways", "near ones")
        for dim in (128, 64)
        for dtype in ("bfloat16", "float16")
    ),
    # lengths
    *(
        HopperCase(name, (dim, dim), lengths)
        for name in ("plain", "softcap shifted", "risky")
        for dim in (128, 64)
        for lengths in ((1, 1), (1, 700), (129, 65), (513, 1025), (300, 77))
    ),
    # heads and batch entries that share keys
    HopperCase("plain", (64, 64), heads=(6, 2), batch=(2, 1)),
    HopperCase("causal", heads=(8, 2)),
    HopperCase("alibi", heads=(8, 1)),
    HopperCase("softcap", heads=(4, 2), batch=(3, 1), lengths=(500, 500)),
    HopperCase("loads", (64, 64), heads=(4, 2)),
    # what is computed once for each distance
    *(
        HopperCase(name, (dim, dim), lengths, heads=(4, 2))
        for name in ("buckets", "cosines")
        for dim in (128, 64)
        for lengths in ((777, 777), (1, 700), (300, 77), (129, 65))
    ),
    HopperCase("buckets", batch=(4, 1), layout="bshd", dtype="float16", grad_lse=True),
    HopperCase("cosines", (192, 128), (500, 500), batch=(4, 4)),
    HopperCase("by head", batch=(4, 4)),
    HopperCase("by head", (64, 64), heads=(4, 2), batch=(4, 4)),
    # head dimensions
    *(HopperCase("causal", dims) for dims in ((64, 128), (128, 64), (96, 96), (40, 40), (80, 112))),
    *(HopperCase("causal", dims) for dims in ((64, 8), (128, 16), (256, 32))),
    # storage, scale, lse
    *(HopperCase("causal", (dim, dim), layout="bshd", dtype="float16") for dim in (128, 64)),
    HopperCase("plain", (80, 80), layout="bshd"),
    HopperCase("causal", scale=-0.1),
    HopperCase("plain", scale=-0.1),
    HopperCase("softcap", (64, 64), scale=-0.1),
    HopperCase("causal", grad_lse=True),
    HopperCase("plain", (64, 64), grad_lse=True, dtype="float16"),
    HopperCase("causal", block=256, lengths=(1100, 1100)),
    # a block's tiles past the last query, where p would overflow with the next head's numbers
    *(
        HopperCase("causal", (dim, dim), (300, 300), dtype="float16", block=256, scale=3.0)
        for dim in (128, 256)
    ),
    # tiles of a captured tensor come with the keys
    *(
        HopperCase(name, (dim, dim), rung=rung)
        for name, dims in (("pairs", (64, 128, 256)), ("capped pairs", (64, 128)), ("float pairs", (64, 128)))
        for dim in dims
        for rung in range(3)
    ),
    *(HopperCase("pairs", (128, 64), lengths) for lengths in ((1, 1), (1, 700), (129, 65), (513, 1025))),
    HopperCase("float pairs", (192, 128), heads=(4, 2), batch=(4, 1), grad_lse=True),
    # what a plan copies: a bias whose rows are not aligned, heads of keys that many queries share
    *(HopperCase("odd pairs", (dim, dim), (513, 1025), batch=(4, 4)) for dim in (128, 64)),
    HopperCase("causal", (64, 64), (1000, 1000), heads=(8, 1), layout="bshd", grad_lse=True),
    HopperCase("alibi", lengths=(1000, 1000), heads=(8, 2), batch=(2, 1)),
    # queries that see nothing
    *(HopperCase(name, (dim, dim)) for name in ("holes", "softcap holes", "nothing") for dim in (128, 64)),
    *(HopperCase(name, (dim, dim), (1000, 1000)) for name in ("lowest", "infinite") for dim in (128, 64)),
]


def measure(case: HopperCase) -> list[str]:
    """What is wrong, in words."""
    call = make_case(
        batch=case.batch[0], kv_batch=case.batch[1], heads=case.heads[0], kv_heads=case.heads[1],
        q_len=case.lengths[0], kv_len=case.lengths[1], head_dim=case.dims[0], value_dim=case.dims[1],
        dtype=getattr(torch, case.dtype), device=DEVICE, layout=case.layout, scale=case.scale,
        seed=zlib.crc32(str(case).encode()),
    )  # fmt: skip
    score_mod, mask_mod, apart = mods_of(case.mods, case.heads[0], *case.lengths)
    mask = None
    if mask_mod is not None:
        sizes = (case.batch[0], case.heads[0]) if apart else (None, None)
        mask = create_block_mask(mask_mod, *sizes, *case.lengths, device=DEVICE, BLOCK_SIZE=case.block)
    grad_lse = torch.randn(call.q.shape[:3], device=DEVICE) if case.grad_lse else None
    options = {"TEMPLATE": "hopper"}
    leaves = [x.detach().requires_grad_() for x in call.inputs]
    statistics = torch.empty(call.q.shape[:3], device=DEVICE)
    with (
        mock.patch.object(launch, "choose_tile", at_rung(case.rung)),
        # a call of another rung is the same call
        mock.patch.object(autograd, "_has_kinds", lambda mask: False),
    ):
        poison(call.grad_out, statistics)
        out, lse = flex_attention(
            *leaves, score_mod, mask, scale=case.scale, enable_gqa=True, return_lse=True,
            kernel_options=options,
        )  # fmt: skip
        if grad_lse is None:
            results, incoming = (out,), (call.grad_out,)
        else:
            results, incoming = (out, lse), (call.grad_out, grad_lse)
        poison(*call.inputs, call.q.float(), statistics)
        gradients = torch.autograd.grad(results, leaves, incoming)

    truth = expected(call, score_mod, mask, grad_lse)
    # without the gradient of the lse, which eager attention here has not: near enough for its error
    limits = eager_error_bound(call, expected(call, score_mod, mask), score_mod, mask)
    size = max(1.0, truth.lse[truth.lse.isfinite()].abs().max().item() if truth.lse.isfinite().any() else 1.0)
    limits["lse"] = Limit(*[size * torch.finfo(call.q.dtype).eps / 16] * 2)
    faults = []
    for name, found in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
        faults += fault(name, found, getattr(truth, name), limits[name])
    return faults


def fault(name: str, found: Tensor, truth: Tensor, limit: Limit) -> list[str]:
    finite = truth.isfinite()
    if not torch.equal(found[~finite].double(), truth[~finite]):
        return [f"{name}: other infinities"]
    rms, largest = error_size(found.where(finite, 0.0), truth.where(finite, 0.0))
    if rms <= limit.rms and largest <= 2 * limit.max:
        return []
    return [f"{name}: RMS error {rms:.3g} of {limit.rms:.3g}, largest {largest:.3g} of {limit.max:.3g}"]


def at_rung(rung: int) -> Any:
    def choose_tile(kernels: Any, way: Any, device: Any, arguments: Any) -> ForwardShape | BackwardShape:
        shapes = kernels.ladder(way)
        return shapes[min(rung, len(shapes) - 1)]  # type: ignore[no-any-return]

    return choose_tile
