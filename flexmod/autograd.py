"""Attention as torch's autograd sees it: two Functions, the attention and its gradient.

Both are of the kind that torch.func can take apart (`setup_context`): all tensors that may carry a gradient
are arguments of their own, and what the backward needs is an argument or a result. The reference backend has
no part in this: it is differentiable torch itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmod import transforms
from flexmod.backends import cpu, generated, reference
from flexmod.backends.interface import Forward, Problem
from flexmod.compiler import capture_grad
from flexmod.errors import DoubleBackwardError, ForwardModeError, VmapError
from flexmod.ir.graph import used_captures
from flexmod.ir.trace import Traced

BACKENDS: Mapping[str, Any] = {
    "triton": generated.ON_GPU,
    "interpret": generated.INTERPRETED,
    "cpu": cpu,
    "reference": reference,
}
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Call:
    """A call apart from its tensors: the score mod of `problem` holds none, `whole` gives them back."""

    problem: Problem
    backend: str
    want_max: bool

    def whole(self, captured: Sequence[Tensor], wanted: Sequence[bool] = ()) -> Problem:
        """The problem with the tensors of its score mod, and the derivatives by those `wanted`."""
        score = self.problem.score
        if score is None:
            return self.problem
        numbers = tuple(number for number, want in enumerate(wanted) if want)
        return replace(
            self.problem,
            score=Traced(score.graph, tuple(captured)),
            capture_grad=capture_grad(score.graph, numbers) if numbers else None,
        )


def run(
    problem: Problem, backend: str, query: Tensor, key: Tensor, value: Tensor, *, want_max: bool, track: bool
) -> Forward:
    """The results of a backend; `track`: autograd shall know where they come from."""
    if backend == "reference" or not track:
        return BACKENDS[backend].forward(problem, query, key, value, want_max=want_max)
    captured: tuple[Tensor, ...] = ()
    if problem.score is not None:
        graph, tensors = problem.score.graph, problem.score.tensors
        used = used_captures(graph.nodes)
        captured = tuple(t if n in used else t.detach() for n, t in enumerate(tensors))
        problem = replace(problem, score=Traced(graph))
    return Forward(*Attention.apply(Call(problem, backend, want_max), query, key, value, *captured)[:3])


class Attention(torch.autograd.Function):
    """apply(call, query, key, value, *captured)"""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """out, lse, the row maximum or None, and what the backend keeps for its backward."""
        call, query, key, value, *captured = arguments
        keep: list[Tensor] = []
        result: Forward = BACKENDS[call.backend].forward(
            call.whole(captured), query, key, value, want_max=call.want_max, keep=keep
        )
        return (*result, *keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, query, key, value, *captured = inputs
        out, lse, max_scores, *kept = output
        ctx.call, ctx.kept = call, len(kept)
        # A tensor made in inference mode can be read, but autograd cannot save it.
        ctx.captured = [t if t.is_inference() else None for t in captured]
        saved = [t for t in captured if not t.is_inference()]
        # Saved, those of the mask too: autograd then refuses a backward after one was changed in place.
        of_mask = call.problem.mask.traced.tensors if call.problem.mask is not None else ()
        watched = [t for t in of_mask if not t.is_inference()]
        ctx.save_for_backward(query, key, value, out, lse, *kept, *saved, *watched)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (max_scores, *kept) if t is not None))

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *rest = ctx.saved_tensors
        if grad_out is None:  # only the lse was used
            grad_out = out.new_zeros(()).expand_as(out)
        kept, saved = rest[: ctx.kept], iter(rest[ctx.kept :])
        captured = [next(saved) if t is None else t for t in ctx.captured]
        arguments = (
            ctx.call, ctx.needs_input_grad[1:], ctx.kept,
            grad_out, grad_lse, query, key, value, out, lse, *kept, *captured,
        )  # fmt: skip
        again = torch.is_grad_enabled() or transforms.active() or transforms.is_batched(grad_out)
        return (None, *(Gradient.apply(*arguments) if again else Gradient.forward(*arguments)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ForwardModeError(name="query, key, value or a captured tensor")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise VmapError(name="query, key, value or a captured tensor")


class Gradient(torch.autograd.Function):
    """The backward of Attention, itself a node: who differentiates it again hears that there is no more.

    apply(call, needs, how many are kept, grad_out, grad_lse, query, key, value, out, lse, *kept, *captured)
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and each captured tensor; None where `needs` does not ask."""
        call, needs, kept, grad_out, grad_lse, query, key, value, out, lse, *rest = arguments
        if transforms.is_batched(grad_out):
            raise VmapError(name="the gradient of the output")
        problem = call.whole(rest[kept:], needs[3:])
        with no_autocast(query.device.type):
            found = BACKENDS[call.backend].backward(
                problem, query, key, value, out, lse, grad_out, grad_lse, needs[:3], tuple(rest[:kept])
            )
        asked = zip(found.captures or (None,) * len(needs[3:]), needs[3:], strict=True)
        return (*found[:3], *(gradient if need else None for gradient, need in asked))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.backend = inputs[0].backend

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise DoubleBackwardError(backend=ctx.backend.upper())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ForwardModeError(name="the gradient of the output")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise VmapError(name="the gradient of the output")


# torch asks for the signature at every call; known beforehand it costs a tenth.
for function in (Attention, Gradient):
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]


def no_autocast(kind: str) -> AbstractContextManager[None]:
    """What a backend computes in float32 stays float32."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
