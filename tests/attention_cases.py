"""What the kernel tests share: mods written out by hand, mask lists from a dense mask, a float64 truth.

The mods stand in as the compiler would write them, so that the kernels can be tested apart from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.block_mask import tiles
from flexmod.block_mask.storage import MaskSnapshot, TileStorage
from flexmod.codegen.kernels import ModText, Parameter
from flexmod.ir.graph import Capture, Graph
from flexmod.ir.trace import Traced

CAUSAL = ModText(
    """@triton.jit
def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx""",
    "mask_mod(b, h, q_idx, kv_idx)",
)

# doc[q_idx] == doc[kv_idx], for a captured doc [S]
DOCUMENT = ModText(
    """@triton.jit
def mask_mod_doc(index, doc, doc_size, doc_stride):
    return tl.load(doc + index * doc_stride, mask=index < doc_size, other=-1)


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, doc_q, doc_kv):
    return doc_q == doc_kv""",
    "mask_mod(b, h, q_idx, kv_idx, doc_q, doc_kv)",
    row="doc_q = mask_mod_doc(q_idx, doc, doc_size, doc_stride)",
    column="doc_kv = mask_mod_doc(kv_idx, doc, doc_size, doc_stride)",
    parameters=(
        Parameter("doc", "pointer", 0, comment="captured, int32 [S]"),
        Parameter("doc_size", "size", 0),
        Parameter("doc_stride", "stride", 0),
    ),
)

# score + slopes[h] * (kv_idx - q_idx), for captured slopes [HQ]
ALIBI = ModText(
    """@triton.jit
def score_mod_slope(h, slopes, slopes_stride):
    return tl.load(slopes + h * slopes_stride)


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, slope):
    return score + slope * tl.cast(kv_idx - q_idx, tl.float32)""",
    "score_mod(score, b, h, q_idx, kv_idx, slope)",
    program="slope = score_mod_slope(h, slopes, slopes_stride)",
    parameters=(
        Parameter("slopes", "pointer", 0, comment="captured, float32 [HQ]"),
        Parameter("slopes_stride", "stride", 0),
    ),
)
ALIBI_GRAD = ModText(
    """@triton.jit
def score_grad(grad, score, b, h, q_idx, kv_idx):
    return grad""",
    "score_grad(grad, score, b, h, q_idx, kv_idx)",
)

# cap * tanh(score / cap), for a promoted number cap
SOFTCAP = ModText(
    """@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, cap):
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 / cap))))""",
    "score_mod(score, b, h, q_idx, kv_idx, cap)",
    parameters=(Parameter("cap", "number", 0, comment="a number of the mod"),),
)
SOFTCAP_GRAD = ModText(
    """@triton.jit
def score_grad(grad, score, b, h, q_idx, kv_idx, cap):
    t = 1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 / cap)))
    return grad * (1.0 - t * t)""",
    "score_grad(grad, score, b, h, q_idx, kv_idx, cap)",
    parameters=(Parameter("cap", "number", 0, comment="a number of the mod"),),
)

# score where (q_idx + kv_idx) % 3 > 0, else -inf; row 0 keeps nothing
HOLES = ModText(
    """@triton.jit
def score_mod(score, b, h, q_idx, kv_idx):
    return tl.where(((q_idx + kv_idx) % 3 > 0) & (q_idx > 0), score, float("-inf"))""",
    "score_mod(score, b, h, q_idx, kv_idx)",
)
HOLES_GRAD = ModText(
    """@triton.jit
def score_grad(grad, score, b, h, q_idx, kv_idx):
    return tl.where(((q_idx + kv_idx) % 3 > 0) & (q_idx > 0), grad, 0.0)""",
    "score_grad(grad, score, b, h, q_idx, kv_idx)",
)


class Lists:
    """The eight lists of a mask. `form` is what a call launches from, "lists" or "runs"."""

    def __init__(self, **parts: Any) -> None:
        self.form = "lists"
        self.__dict__.update(parts)

    def snapshot(self, captured: Sequence[Tensor] = ()) -> MaskSnapshot:
        """As a call has it; the mask_mod captures these tensors."""
        names = {name: getattr(self, name) for name in tiles.LISTS}
        held = TileStorage.of_lists(names)
        if self.form == "runs":
            by_axis: Any = {axis: self._runs(axis) for axis in ("kv", "q")}
            separate = self.full_kv_indices is not None
            held = TileStorage(held.batch, held.grid, by_axis, {}, separate)
        captures = tuple(Capture(f"t{n}", x.dtype, x.dim(), False) for n, x in enumerate(captured))
        traced = Traced(Graph("mask", (), captures), tuple(captured))
        return MaskSnapshot(held, self.seq_lengths, self.BLOCK_SIZE, self.full_tiles_padded, traced)

    def _runs(self, axis: str) -> tiles.Runs | None:
        if getattr(self, f"{axis}_indices") is None:
            return None
        counts, indices = getattr(self, f"{axis}_num_blocks"), getattr(self, f"{axis}_indices")
        full = getattr(self, f"full_{axis}_num_blocks"), getattr(self, f"full_{axis}_indices")
        columns = indices.shape[-1]
        table = tiles.dense((counts, indices), columns).to(torch.int8)
        if full[0] is not None:
            table.masked_fill_(tiles.dense(full, columns), tiles.FULL)
        return tiles.of_table(table)


def block_lists(dense: Tensor, block: tuple[int, int], separate_full: bool = True) -> Lists:
    """The lists of a dense mask [Bm, Hm, M, N] of bool."""
    q_block, kv_block = block
    m, n = dense.shape[2:]
    padded = torch.nn.functional.pad(dense, (0, -n % kv_block, 0, -m % q_block))
    tiles = padded.unflatten(3, (-1, kv_block)).unflatten(2, (-1, q_block))
    kept = tiles.sum((3, 5))
    full = (kept == q_block * kv_block) & separate_full
    lists: dict[str, object] = {"BLOCK_SIZE": block, "seq_lengths": (m, n), "full_tiles_padded": False}
    for prefix, chosen in (("", (kept > 0) & ~full), ("full_", full)):
        for axis, of in (("kv", chosen), ("q", chosen.transpose(2, 3))):
            absent = prefix and not separate_full
            lists[f"{prefix}{axis}_num_blocks"] = None if absent else of.sum(3, dtype=torch.int32)
            order = torch.argsort(of.to(torch.int32), dim=3, descending=True, stable=True).to(torch.int32)
            lists[f"{prefix}{axis}_indices"] = None if absent else order
    return Lists(**lists)


class Truth(NamedTuple):
    """In float64; gradients None without a grad_out."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    grad_q: Tensor | None = None
    grad_k: Tensor | None = None
    grad_v: Tensor | None = None


def truth(q, k, v, scale, dense=None, score_mod=None, grad_out=None, grad_lse=None) -> Truth:  # type: ignore[no-untyped-def]
    """Dense attention in float64. `score_mod` takes the natural scores [B, HQ, M, N] and gives new ones."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = scale * (q @ k.repeat_interleave(group, 1).transpose(2, 3))
    if score_mod is not None:
        scores = score_mod(scores)
    if dense is not None:
        scores = scores.masked_fill(~dense, float("-inf"))
    peak = scores.amax(3)
    alive = peak > float("-inf")
    p = (scores - torch.where(alive, peak, 0.0).detach()[..., None]).exp()
    total = p.sum(3)
    out = (p / torch.where(alive, total, 1.0)[..., None]) @ v.repeat_interleave(group, 1)
    lse = torch.where(
        alive, torch.where(alive, total, 1.0).log() + torch.where(alive, peak, 0.0).detach(), -torch.inf
    )
    if grad_out is None:
        return Truth(out.detach(), lse.detach(), peak.detach())
    loss = (out * grad_out.double()).sum()
    if grad_lse is not None:
        loss = loss + (torch.where(alive, lse, 0.0) * grad_lse.double()).sum()
    return Truth(out.detach(), lse.detach(), peak.detach(), *torch.autograd.grad(loss, (q, k, v)))
