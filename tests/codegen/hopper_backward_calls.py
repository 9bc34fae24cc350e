"""Calls of the generated Hopper backward, run as plain Python beside dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import planned
import torch
from learned_mods import learned_mods, random
from plain_gluon import on_python
from torch import Tensor

from flexmod import BlockMask, create_block_mask, flex_attention, masks, mods
from flexmod.backends import captured
from flexmod.backends.arguments import Problem
from flexmod.backends.triton import kernel_spec
from flexmod.codegen.compiler import capture_terms, kernels_for, lower
from flexmod.codegen.hopper import BackwardShape, HopperKernels, chunked, spec_obstacle
from flexmod.codegen.variant import pair_tile
from flexmod.ir.offsets import Positions
from flexmod.ir.trace import trace

REFERENCE = {"BACKEND": "REFERENCE"}
EXACT = torch.float64  # in place of a half type: nothing is rounded, but sums in memory to float32
APART = BackwardShape(64, ahead=True, shared_operand=True, late=False)
DELAYED = BackwardShape(64, ahead=None, shared_operand=None, late=None, chunks=1)
CHUNKS = replace(DELAYED, chunks=4)
APART_CHUNKS = BackwardShape(64, ahead=False, shared_operand=True, late=True, chunks=4)
TOGETHER = BackwardShape(64, ahead=True, shared_operand=None, late=False, block_n=64)


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 90 == kv_idx // 90) & (q_idx >= kv_idx)


def holes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Queries that see nothing, by themselves and as blocks."""
    return (q_idx % 3 != 0) & ((q_idx < 100) | (q_idx >= 260)) & (kv_idx <= q_idx)


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx + 64 * h) & (kv_idx < 100 + 70 * b)


def gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No finite number for what lies past the ends; a derivative that reads the score."""
    return score * torch.log2(260.0 - q_idx) + torch.sqrt(199.0 - kv_idx) + torch.tanh(score + h)


def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A query sees one key, wherever it is."""
    return (q_idx - kv_idx) % 5 == 0


IDS = torch.arange(2000) // 70


def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Documents whose numbers are loaded: by query a thread each, see `shared_out`."""
    return IDS[q_idx] == IDS[kv_idx]


MASKS: dict[str, Any] = {
    "": None, "causal": masks.causal(), "window": masks.sliding_window(70), "documents": documents,
    "listed": listed, "same": same, "holes": holes, "by head": by_head,
    "causal at 90": Positions(90, 7).mask(masks.causal()),
    "listed at 90": Positions(90, 7).mask(listed),
    "nothing": lambda b, h, q_idx, kv_idx: kv_idx < 0,
}  # fmt: skip


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The first of four heads."""
    return mods.alibi(4)(score, b, h + 0, q_idx, kv_idx)


PAIRS = torch.randn(4, 304, 304, generator=torch.Generator().manual_seed(3)).bfloat16()


def pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + PAIRS[h, q_idx, kv_idx]


def times_pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * PAIRS[0, q_idx, kv_idx] + (kv_idx - q_idx) * 0.01


SCORES: dict[str, Any] = {
    "": None, "pairs": pairs, "times pairs": times_pairs,
    "softcap": mods.softcap(20.0), "alibi": alibi, "gate": gate,
}  # fmt: skip
SCORES |= {
    "alibi at 90": Positions(90, 7).score(alibi),
    "alibi at a tensor": Positions(torch.tensor([90, 4]), torch.tensor(7)).score(alibi),
}


@dataclass(frozen=True)
class Case:
    """A call. `score` may also name a row of `learned_mods`, whose captures get gradients. `heads` and
    `batch` have two numbers: for queries and for keys."""

    mask: str = ""
    score: str = ""
    shape: BackwardShape = APART
    dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (260, 199)
    heads: tuple[int, int] = (1, 1)
    batch: tuple[int, int] = (1, 1)
    form: str = "runs"
    ordered: bool = False
    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = EXACT
    scale: float = 0.125
    grad_lse: bool = False

    def __str__(self) -> str:
        numbers = (self.dims, self.lengths, self.heads, self.batch, self.block)
        sizes = [f"{a}-{b}" for a, b in numbers]
        words = [self.mask, self.score, str(self.shape), *sizes, self.form, str(self.dtype)[6:], self.scale]
        words += [name for name in ("ordered", "grad_lse") if getattr(self, name)]
        return "-".join(str(x) for x in words if x)


@dataclass
class Call:
    """Inputs of a case: q, k, v, the gradients of out and lse, and what the score_mod learns."""

    case: Case
    inputs: tuple[Tensor, ...] = field(init=False)
    grad_out: Tensor = field(init=False)
    grad_lse: Tensor | None = field(init=False)
    learned: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        (rows, columns), (heads, kv_heads), (batch, kv_batch) = case.lengths, case.heads, case.batch
        sizes = (batch, heads, rows), (kv_batch, kv_heads, columns), (kv_batch, kv_heads, columns)
        dims = (case.dims[0], *case.dims)
        self.inputs = tuple(
            random(*size, dim, dtype=case.dtype, seed=n)
            for n, (size, dim) in enumerate(zip(sizes, dims, strict=True))
        )
        self.grad_out = random(*sizes[0], case.dims[1], dtype=case.dtype, seed=4)
        self.grad_lse = random(*sizes[0], dtype=torch.float32, seed=5) if case.grad_lse else None
        self._make, shapes = lambda: SCORES[case.score], []
        if case.score not in SCORES:
            self._make, shapes = learned_mods(batch, heads, rows, columns)[case.score]
        learned = [random(*shape, dtype=torch.float32, seed=7 + n) for n, shape in enumerate(shapes)]
        self.learned = [x.requires_grad_() for x in learned]
        self.score_mod, self.mask_mod = self._make(*self.learned), MASKS[case.mask]

    def mask(self) -> BlockMask | None:
        if self.mask_mod is None:
            return None
        sizes = (self.case.batch[0], self.case.heads[0]) if self.case.mask == "by head" else (None, None)
        mask = create_block_mask(self.mask_mod, *sizes, *self.case.lengths, "cpu", BLOCK_SIZE=self.case.block)
        if self.case.form == "runs":
            return mask
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return BlockMask.from_kv_blocks(*lists, self.case.block, self.mask_mod, self.case.lengths)

    def truth(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse, and the gradients of q, k, v and of what is learned, in float64."""
        leaves = [x.double().detach().requires_grad_() for x in self.inputs]
        out, lse = flex_attention(
            *leaves, self.score_mod, self.mask(), scale=self.case.scale, enable_gqa=True, return_lse=True,
            kernel_options=REFERENCE,
        )  # fmt: skip
        results, incoming = [out], [self.grad_out.double()]
        if self.grad_lse is not None:
            results, incoming = [out, lse], [*incoming, self.grad_lse.double()]
        wanted = [*leaves, *self.learned]
        gradients = torch.autograd.grad(results, wanted, incoming, allow_unused=True, materialize_grads=True)
        return out.detach(), lse.detach(), list(gradients)

    def kept(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What a forward may leave: the lse is at least a row's largest score, and serves as its peak."""
        dead = lse == -torch.inf
        raw = self.score_mod is None and self.case.scale > 0
        peak = torch.where(dead, 0.0, lse / self.case.scale if raw else lse).float()
        return peak, torch.where(dead, torch.inf, 0.0).float()

    def run(
        self, out: Tensor, lse: Tensor, changed: Callable[[str], str] = lambda text: text, seed: int = 0,
        copied_heads: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients that the kernels make, in the order of the truth's."""
        case = self.case
        q, k, v = self.inputs
        traced = {
            kind: trace(mod, kind) if mod else None
            for kind, mod in (("score", self.score_mod), ("mask", self.mask_mod))
        }
        extents = (case.batch[0], case.heads[0], *case.lengths)
        lowered = {kind: lower(x.graph, extents, split=False) if x else None for kind, x in traced.items()}
        half = torch.bfloat16 if case.dtype == EXACT else case.dtype
        block_mask = self.mask()
        mask = None if block_mask is None else block_mask.snapshot()
        problem = Problem(None, None, mask, case.scale)
        spec = kernel_spec(*(x.to(half) for x in self.inputs), problem, backward=True)
        spec = replace(spec, short=0)
        assert spec_obstacle(spec, "backward") is None
        tensors = traced["score"].tensors if traced["score"] else ()
        score = lowered["score"].graph if lowered["score"] else None
        spec = replace(spec, pair_tile=pair_tile(spec, score, tensors))
        wanted = tuple(n for n, x in enumerate(tensors) if x.requires_grad)
        portable = kernels_for(
            spec, lowered["score"], lowered["mask"], grad_captures=wanted, reduce_in_backward=True
        )
        of_score = planned.Mod([t.detach() for t in tensors])
        kernels, shape = HopperKernels(portable), case.shape
        if shape.chunks is None and chunked(spec, kernels.score, portable.captures):
            shape = replace(shape, chunks=1)
        with on_python(changed, seed, case.ordered):
            found = planned.backward(
                kernels, q, k, v, out.to(case.dtype), lse.float(), self.grad_out,
                self.grad_lse, (True, True, True), self.kept(lse), scale=case.scale, mask=mask,
                shape=shape, score_captured=of_score, copied_heads=copied_heads,
            )  # fmt: skip
        gradients = [found.query, found.key, found.value]
        if wanted:
            graph = lowered["score"].graph
            terms = capture_terms(graph, wanted, True)
            of_captures = captured.gradients(graph, terms, found.sums, tensors, (), extents)
            places = [number for x in self.learned for number in wanted if tensors[number] is x]
            gradients += [of_captures[number] for number in places]
        return gradients


def faults(found: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> list[str]:
    """Gradients that are wrong, by the norm of what differs."""
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, EXACT: 4e-5}[dtype]
    wrong = []
    for number, (own, truth) in enumerate(zip(found, exact, strict=True)):
        assert own.shape == truth.shape
        error, size = float((own.double() - truth).norm()), float(truth.norm())
        if not error <= tolerance * (size + 1.0):
            wrong.append(f"gradient {number}: {error:.3g} of {size:.3g}")
    return wrong
