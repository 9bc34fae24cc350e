"""The backends in plain torch: the default for CPU tensors, and the dense reference for tests.

`flash` runs torch's flash attention for each step of the mask's tiles, on the CPU. It serves calls without a
score mod, or with one that adds a bias to the score. `blocks` serves all other calls there:

    any other score mod; the largest scores; gradients of captured tensors; scores too large for one lse;
    masked scores that are not finite; a torch without that operation

The reference computes the whole score matrix. Plans of both have one step: a function of a call's tensors and
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmod.backends import blocks, flash
from flexmod.backends.arguments import (
    SINGLE,
    BackwardInputs,
    Forward,
    Gradients,
    Problem,
    captured_places,
    dtype_of_sums,
    order_of,
    places_of_mask,
    results,
)
from flexmod.backends.bias import added_to_score
from flexmod.backends.tiles import element_table, in_order_of
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.block_mask.tiles import FULL, PARTIAL, positions_on_axes
from flexmod.ir.evaluate import evaluate
from flexmod.ir.trace import Traced
from flexmod.runtime.bound import Bound
from flexmod.runtime.plan import MASK, Place, PlanWriter, named
from flexmod.runtime.private_torch import flash_on_cpu
from flexmod.runtime.tensor_kinds import has_no_values

Tensors = Sequence[Tensor | None]
CALL = ("query", "key", "value")


@dataclass(frozen=True)
class InTorch:
    """Makes plans of calls, bound to the kinds of their tensors, like `Generated`.

    `attend` and `differentiate` are the functions of `arguments`; autograd differentiates the reference.
    """

    attend: Callable[..., Forward]
    differentiate: Callable[..., Gradients] | None = None

    def forward(
        self, problem: Problem, tensors: Tensors, *, want_max: bool, keep: bool, meanwhile: object = None
    ) -> Bound:
        """See `Generated.forward`. It keeps nothing for a backward and compiles nothing."""
        first = tensors[0]
        assert first is not None
        inputs, captured = _inputs(CALL, problem, tensors)
        query, key, value, *_ = inputs
        assert query is not None and value is not None
        writer, made = PlanWriter(), results(query, value.shape[3], order_of(first), want_max=want_max)
        given = self.attend, _without_tensors(problem), (query, key, value), captured, MASK, want_max
        writer.call(attention, given, made)
        return Bound(writer.plan(inputs, made), tensors, first.device)

    def backward(
        self, problem: Problem, tensors: Tensors, needs: tuple[bool, bool, bool], kept: int
    ) -> Bound:
        """See `Generated.backward`."""
        first = tensors[0]
        assert first is not None
        inputs, captured = _inputs(BackwardInputs._fields[:SINGLE], problem, tensors)
        wanted = (*needs, *[problem.capture_grad is not None] * len(captured))
        of_call = zip((*inputs[2:5], *captured), wanted, strict=True)
        made = [replace(x, name=f"grad_{x.name}") if x is not None and need else None for x, need in of_call]
        given = self.differentiate, _without_tensors(problem), inputs[:SINGLE], captured, MASK, needs
        writer = PlanWriter()
        writer.call(gradients, given, made)
        return Bound(writer.plan(inputs, made), tensors, first.device)


def attention(
    attend: Callable[..., Forward],
    problem: Problem,
    tensors: Sequence[Tensor],
    captured: Sequence[Tensor],
    mask: MaskSnapshot | None,
    want_max: bool,
) -> Forward:
    """Runs a forward; `problem` comes without tensors."""
    return attend(_with_tensors(problem, captured, mask), *tensors, want_max=want_max)


def gradients(
    differentiate: Callable[..., Gradients],
    problem: Problem,
    tensors: Sequence[Any],
    captured: Sequence[Tensor],
    mask: MaskSnapshot | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Runs a backward; `problem` comes without tensors."""
    found = differentiate(_with_tensors(problem, captured, mask), BackwardInputs(*tensors), needs)
    return (*found[:3], *(found.captures or [None] * len(captured)))


def _inputs(
    names: Sequence[str], problem: Problem, tensors: Tensors
) -> tuple[tuple[Place | None, ...], tuple[Place, ...]]:
    """Returns the places of a plan's tensors, `names` first, and the places of the score_mod's captures."""
    given = zip(names, tensors, strict=False)
    first = [None if tensor is None else named(name, tensor) for name, tensor in given]
    captured = captured_places("score", problem.score)
    of_mask = () if problem.mask is None else places_of_mask(problem.mask)
    return (*first, *captured, *of_mask), captured


def _without_tensors(problem: Problem) -> Problem:
    score = None if problem.score is None else Traced(problem.score.graph)
    return replace(problem, score=score, mask=None)


def _with_tensors(problem: Problem, captured: Sequence[Tensor], mask: MaskSnapshot | None) -> Problem:
    if problem.score is None and mask is None:
        return problem
    score = None if problem.score is None else Traced(problem.score.graph, tuple(captured))
    return replace(problem, score=score, mask=mask)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs a forward, see `arguments`. Computes half precision in float32 and rounds at the end."""
    found = flash.forward(problem, q, k, v) if serves(problem) else None
    if found is None:
        return blocks.forward(problem, q, k, v, want_max=want_max)
    return found._replace(max_scores=blocks.largest_scores(problem, q, k)) if want_max else found


def backward(problem: Problem, given: BackwardInputs, needs: tuple[bool, bool, bool]) -> Gradients:
    """Runs a backward, see `arguments`. Two runs agree bit for bit."""
    by_flash = problem.capture_grad is None and serves(problem)
    found = flash.backward(problem, given, needs) if by_flash else None
    return blocks.backward(problem, given, needs) if found is None else found


def serves(problem: Problem) -> bool:
    """Returns whether flash attention computes this variant."""
    added = problem.score is None or added_to_score(problem.score.graph) is not None
    return added and flash_on_cpu() is not None


def dense(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, want_max: bool) -> Forward:
    """Runs the reference's forward, in float32, or in float64 if q is float64.

    It is slow and takes any float dtype and any device. torch's autograd computes gradients of every order,
    also of captured tensors. It needs memory for several copies of the whole score matrix.
    """
    real = dtype_of_sums(q.dtype)
    group = q.shape[1] // k.shape[1]
    key, value = (x.to(real).repeat_interleave(group, 1) for x in (k, v))
    scores = problem.scale * (q.to(real) @ key.mT)
    scores = modified(problem, scores)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    alive = scores.masked_fill(dead, 0.0)
    weights = torch.softmax(alive, -1).masked_fill(dead, 0.0)
    # torch's derivative of logsumexp, exp(score - lse), is no softmax where lse rounds the sum away
    top = alive.detach().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    sums = torch.logsumexp(alive - top, -1, keepdim=True) + top
    lse = sums.masked_fill(dead, -torch.inf).squeeze(-1)
    largest = scores.detach().amax(-1) if want_max else None
    return Forward(in_order_of((weights @ value).to(q.dtype), q), lse, largest)


def modified(problem: Problem, scores: Tensor) -> Tensor:
    """Applies the score mod and the mask to scores [B, Hq, M, N], in their dtype, float32 or float64."""
    keep = None if problem.mask is None else _allowed(problem.mask, scores.shape, scores.device)
    learned = problem.score is not None and any(x.requires_grad for x in problem.score.tensors)
    if problem.score is not None and keep is not None and learned and not has_no_values(scores):
        # of masked scores 0 * inf must not reach the captured tensors either
        b, h, q_idx, kv_idx = kept = keep.expand(scores.shape).nonzero(as_tuple=True)
        (result,) = evaluate(
            problem.score.graph, problem.score.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx,
            score=scores[kept], real=scores.dtype,
        )  # fmt: skip
        return torch.full_like(scores, -torch.inf).index_put(kept, result.expand(len(kept[0])))
    if problem.score is not None:
        # The mod's derivative may be infinite where the mask is False; 0 * inf must not reach q and k.
        seen = scores if keep is None else torch.where(keep, scores, scores.detach())
        positions = positions_on_axes(scores.shape, scores.device, torch.int64)
        (result,) = evaluate(
            problem.score.graph, problem.score.tensors, **positions, score=seen, real=scores.dtype
        )
        scores = result.expand(scores.shape)
    return scores if keep is None else torch.where(keep, scores, -torch.inf)


def _allowed(mask: MaskSnapshot, shape: torch.Size, device: torch.device) -> Tensor:
    """Returns the mask as a bool tensor that broadcasts to `shape` [B, Hq, M, N]."""
    tiles = element_table(mask, shape[2], shape[3])
    positions = positions_on_axes(shape, device, torch.int64)
    (said,) = evaluate(mask.traced.graph, mask.traced.tensors, **positions)
    return (tiles == FULL) | ((tiles == PARTIAL) & said)


ON_CPU = InTorch(forward, backward)
REFERENCE = InTorch(dense)
