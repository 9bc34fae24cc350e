"""What tests of any backend share: a random call, its float64 truth, and the errors allowed beside it.

Nothing here asks which device or backend it is for:

    case = make_case(q_len=129, dtype=torch.bfloat16, device=device)
    truth = expected(case, score_mod, block_mask)
    limits = eager_error_bound(case, truth, score_mod, block_mask)
    assert_within({"out": out, "dq": q.grad}, truth, limits)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexmod.backends import in_torch
from flexmod.backends.arguments import Problem
from flexmod.block_mask.format import BlockMask
from flexmod.ir.derivative import differentiate
from flexmod.ir.trace import trace

ScoreMod = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One call: q [B, Hq, M, D], k [B or 1, Hkv, N, D], v [B or 1, Hkv, N, Dv], grad_out [B, Hq, M, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    scale: float

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


class Truth(NamedTuple):
    """out, lse and max_scores as in `arguments.Forward`, and the gradients of q, k and v."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class LargestTensor(TorchDispatchMode):
    """Sees every operation's results."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


class Limit(NamedTuple):
    """What the root mean square and the largest of the errors may be."""

    rms: float
    max: float


def make_case(
    *,
    batch: int = 1,
    heads: int = 2,
    q_len: int = 64,
    head_dim: int = 16,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    value_dim: int | None = None,
    kv_batch: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "bhsd",
    scale: float | None = None,
    seed: int = 0,
) -> Case:
    """Normal random inputs, the same on any device for one seed. What is None is as it is for the queries.

    `layout` "bshd" keeps heads inside of positions in memory, so that no input is contiguous.
    """
    kv_heads, kv_len, kv_batch = kv_heads or heads, kv_len or q_len, kv_batch or batch
    value_dim = value_dim or head_dim
    generator = torch.Generator().manual_seed(seed)

    def random(b: int, h: int, length: int, dim: int) -> Tensor:
        x = torch.randn(b, h, length, dim, generator=generator).to(device, dtype)
        return x if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)

    return Case(
        random(batch, heads, q_len, head_dim),
        random(kv_batch, kv_heads, kv_len, head_dim),
        random(kv_batch, kv_heads, kv_len, value_dim),
        random(batch, heads, q_len, value_dim),
        head_dim**-0.5 if scale is None else scale,
    )


def problem_of(case: Case, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None) -> Problem:
    """The problem as backends get it, with the derivative."""
    traced = None if score_mod is None else trace(score_mod, "score", case.q.device)
    mask = None if block_mask is None else block_mask.snapshot()
    return Problem(traced, differentiate(traced.graph) if traced else None, mask, case.scale)


def expected(
    case: Case,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    grad_lse: Tensor | None = None,
) -> Truth:
    """The truth in float64, from the inputs as they are in the case's dtype."""
    q, k, v = inputs = tuple(x.detach().double().requires_grad_() for x in case.inputs)
    result = in_torch.dense(problem_of(case, score_mod, block_mask), q, k, v, want_max=True)
    out, lse, largest = result.out, result.lse, result.max_scores
    results, grads = [out], [case.grad_out.double()]
    if grad_lse is not None:
        results, grads = [out, lse], [*grads, grad_lse.double()]
    gradients = torch.autograd.grad(results, inputs, grads, allow_unused=True, materialize_grads=True)
    assert largest is not None
    return Truth(out.detach(), lse.detach(), largest, *gradients)


def eager(case: Case, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None) -> Truth:
    """Dense attention computed wholly in the case's dtype: each result of each step is rounded to it.

    Mods see the rounded scores as float32, as users' code would, and their result is rounded again.
    """
    q, k, v = inputs = tuple(x.detach().requires_grad_() for x in case.inputs)
    group = q.shape[1] // k.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ key.mT) * case.scale
    scores = in_torch.modified(problem_of(case, score_mod, block_mask), scores.float()).to(q.dtype)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    out = weights @ value
    gradients = torch.autograd.grad(out, inputs, case.grad_out, allow_unused=True, materialize_grads=True)
    lse = torch.logsumexp(scores.detach(), -1)
    return Truth(out.detach(), lse, scores.detach().amax(-1), *gradients)


def eager_error_bound(
    case: Case, truth: Truth, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None
) -> dict[str, Limit]:
    """The limits for out, dq, dk and dv beside `eager`."""
    return limits_beside(eager(case, score_mod, block_mask), case, truth)


def limits_beside(yardstick: Truth, case: Case, truth: Truth) -> dict[str, Limit]:
    """The limits for out, dq, dk and dv beside attention computed wholly in the case's dtype.

    Half dtypes: RMS error 0.8 times and maximum 0.9 times that of `yardstick`; float32: 1.2 times both. To
    each comes a sixteenth of a rounding of the largest element, so that rounding the result is never a fault.
    """
    factors = (1.2, 1.2) if case.q.dtype == torch.float32 else (0.8, 0.9)
    limits = {}
    for name in ("out", "dq", "dk", "dv"):
        floor = _floor(case, truth, name)
        rms, largest = error_size(getattr(yardstick, name), getattr(truth, name))
        limits[name] = Limit(factors[0] * rms + floor, factors[1] * largest + floor)
    return limits


def assert_within(results: Mapping[str, Tensor], truth: Truth, limits: Mapping[str, Limit]) -> None:
    """Every result has the truth's shape and is within its limit; NaN never is."""
    for name, result in results.items():
        exact, limit = getattr(truth, name), limits[name]
        assert result.shape == exact.shape, f"{name}: {tuple(result.shape)}, not {tuple(exact.shape)}"
        rms, largest = error_size(result, exact)
        assert rms <= limit.rms, f"{name}: RMS error {rms:.3g}, limit {limit.rms:.3g}"
        assert largest <= limit.max, f"{name}: largest error {largest:.3g}, limit {limit.max:.3g}"


def _floor(case: Case, truth: Truth, name: str) -> float:
    eps = torch.finfo(case.q.dtype).eps
    largest = getattr(truth, name).abs().max().item()
    if largest or name not in ("dq", "dk"):
        return eps * largest / 16
    # dq and dk of a single key are 0, the difference of two equal terms: the terms set the size.
    other = case.k if name == "dq" else case.q
    terms = (truth.out * case.grad_out).abs().sum(-1).max().item() * case.scale
    return eps * terms * other.abs().max().item() * (case.q.shape[1] // case.k.shape[1])


def error_size(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and maximum of the error."""
    error = result.double() - exact
    return error.square().mean().sqrt().item(), error.abs().max().item()
