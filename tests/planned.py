"""Plans in tests: kernels run by the plan of a call, and plans that are run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexmod.backends import arguments
from flexmod.backends.arguments import BackwardInputs, Forward, Operands, Problem, operands
from flexmod.backends.families import Family, FirstRungs, families
from flexmod.codegen.hopper import Shape
from flexmod.ir.derivative import Along
from flexmod.runtime.bound import Bound
from flexmod.runtime.plan import PlanWriter


class Mod(NamedTuple):
    """What a mod closes over."""

    tensors: Sequence[Tensor] = ()
    numbers: Sequence[bool | int | float] = ()


NOTHING = Mod()


class Gradients(NamedTuple):
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    sums: Mapping[Along, list[Tensor]]


def family_of(kernels: Any) -> Family:
    (family,) = (family for family in families() if family.name == kernels.family)
    return family


def rungs_of(kernels: Any, way: str, shape: Shape | None) -> FirstRungs:
    """The first rung of each ladder, but for a shape that is given."""
    return FirstRungs(kernels, {way: shape} if shape else {})


def forward(
    kernels: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Any = None, want_max: bool = False,
    keep: list[Tensor] | None = None, score_captured: Mod = NOTHING, shape: Shape | None = None,
    value_scale: Tensor | None = None,
) -> Forward:  # fmt: skip
    """Attention by the kernels; `keep` gets what a backward needs. `mask` is a snapshot."""
    call, tensors = _call(q, k, v, scale, mask, score_captured, value_scale)
    writer, wants = PlanWriter(), {"want_max": want_max, "keep": keep is not None}
    results = family_of(kernels).forward(writer, kernels, call, rungs_of(kernels, "forward", shape), **wants)
    plan = writer.plan(call.inputs, results)
    out, lse, largest, *kept = _run(plan, tensors, mask)
    if keep is not None:
        keep += kept
    return Forward(out, lse, largest)


def backward(
    kernels: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, needs: tuple[bool, bool, bool], kept: Sequence[Tensor] = (), *, scale: float,
    mask: Any = None, score_captured: Mod = NOTHING, shape: Shape | None = None, copied_heads: bool = False,
) -> Gradients:  # fmt: skip
    """Gradients by the kernels, and the sums for what the score_mod captures."""
    call, _ = _call(q, k, v, scale, mask, score_captured)
    call = replace(call, copied_heads=copied_heads)
    captured = tuple(score_captured.tensors)
    given = BackwardInputs(grad_out, grad_lse, q, k, v, out, lse, tuple(kept), captured)
    incoming = arguments.incoming(call, given.in_order(), len(kept))
    writer, family = PlanWriter(), family_of(kernels)
    rungs = rungs_of(kernels, "backward", shape)
    found = family.backward(writer, kernels, call, incoming, needs, rungs, k, grad_out)
    sums = [place for of in found.sums.values() for place in of]
    plan = writer.plan((*incoming.in_order(), *call.of_mask), (*found[:3], *sums))
    made = _run(plan, (*given.in_order(), *(mask.tensors if mask else ())), mask)
    rest = iter(made[3:])
    return Gradients(*made[:3], {along: [next(rest) for _ in of] for along, of in found.sums.items()})


def _call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Any, score: Mod, value_scale: Tensor | None = None
) -> tuple[Operands, tuple[Tensor, ...]]:
    of_score: Any = SimpleNamespace(tensors=tuple(score.tensors))
    numbers = mask.numbers if hasattr(mask, "numbers") else ()
    problem = Problem(of_score, None, mask, scale, value_scale=value_scale)
    call = operands(q, k, v, problem, score.numbers, numbers)
    beside = () if value_scale is None else (value_scale,)
    return call, (q, k, v, *score.tensors, *beside, *(mask.tensors if mask else ()))


def _run(plan: Any, tensors: Sequence[Tensor | None], mask: Any) -> tuple[Any, ...]:
    device = next(x.device for x in tensors if x is not None)
    processors = {"PROCESSORS": arguments.processors(device)}
    with torch.no_grad():
        return Bound(plan, tensors, device, processors).run(tensors, mask)


def reruns(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """The bound plans that are run again, once for each such run."""
    before: list[Bound] = []
    again: list[Bound] = []
    run = Bound.run

    def watch(self: Bound, *arguments: Any, **named: Any) -> Any:
        (again if self in before else before).append(self)
        return run(self, *arguments, **named)

    monkeypatch.setattr(Bound, "run", watch)
    return again
