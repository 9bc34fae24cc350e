"""Runs the backends in plain torch, with plans of one step: a function of a call's tensors and mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor

from flexmod.backends import cpu, reference
from flexmod.backends.arguments import captured_places, order_of, places_of_mask, results
from flexmod.backends.interface import SINGLE, BackwardInputs, Forward, Gradients, Problem
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.ir.trace import Traced
from flexmod.runtime.bound import Bound
from flexmod.runtime.plan import MASK, Place, PlanWriter, named

Tensors = Sequence[Tensor | None]
CALL = ("query", "key", "value")


@dataclass(frozen=True)
class InTorch:
    """Makes plans of calls, bound to the kinds of their tensors, like `Generated`.

    `module` has the functions of `interface`.
    """

    module: ModuleType

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
        given = self.module.forward, _without_tensors(problem), (query, key, value), captured, MASK, want_max
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
        given = self.module.backward, _without_tensors(problem), inputs[:SINGLE], captured, MASK, needs
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


ON_CPU = InTorch(cpu)
REFERENCE = InTorch(reference)
