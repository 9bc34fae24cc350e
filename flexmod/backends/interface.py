"""What every backend is given and what it hands back.

A backend makes the plan of a call, bound to the kinds of its tensors:

    forward(problem, tensors, *, want_max, keep) -> Bound
    backward(problem, tensors, needs, kept) -> Bound

`tensors` are q, k, v and what the score mod captures, or a `BackwardInputs` in order; then those of the mask.
Those in plain torch (`in_torch`) have plans of one step, which calls one of these; `reference` has the first:

    forward(problem, q, k, v, *, want_max) -> Forward
    backward(problem, q, k, v, out, lse, grad_out, grad_lse, needs) -> Gradients

    q          [B, Hq, M, D]
    k          [B or 1, Hkv, N, D]        Hq is a multiple of Hkv
    v          [B or 1, Hkv, N, Dv]
    out        [B, Hq, M, Dv]             in q's dtype; `grad_out` has its shape
    lse        [B, Hq, M]                 natural log; float32, or float64 when q is float64
    grad_lse   like lse, or None when lse was not used
    needs      whether q, k and v want a gradient; captured tensors do where `problem.capture_grad` is there
    keep       whether a backward will come: what the forward keeps for it comes back, `kept` tensors

The caller has checked all shapes, dtypes and devices, so a backend does not check again. Scores are
`scale * q.k`, changed by the score mod, -inf where the mask says no. A row with nothing to attend to gives
out 0, lse -inf and gradients 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from flexmod.block_mask.launched import MaskSnapshot
from flexmod.ir.derivative import CaptureGrad
from flexmod.ir.graph import Graph
from flexmod.ir.trace import Traced


@dataclass(frozen=True)
class Problem:
    """The attention variant: what is done to the scores, apart from the tensors of the call.

    `score` is the score mod after the graph passes, None where it changes nothing. `score_grad` is its
    derivative (inputs score, grad, b, h, q_idx, kv_idx; the captures of `score`), filled only where gradients
    are asked for; `capture_grad` has the derivatives by captured elements as well, filled where a backward is
    to give gradients of captured tensors. For the generated kernels: `options`, the checked kernel options,
    and `precision`, that of float32 products.
    """

    score: Traced | None
    score_grad: Graph | None
    mask: MaskSnapshot | None
    scale: float
    options: tuple[tuple[str, Any], ...] = ()
    precision: Literal["ieee", "tf32"] = "ieee"
    capture_grad: CaptureGrad | None = None


class BackwardInputs(NamedTuple):
    """What a backward is run on, but for the mask: tensors, or their places in a plan. Shapes as above.

    `grad_lse` may be None. `kept` comes from the forward, `captured` are those of the score mod.
    """

    grad_out: Any
    grad_lse: Any
    query: Any
    key: Any
    value: Any
    out: Any
    lse: Any
    kept: tuple[Any, ...] = ()
    captured: tuple[Any, ...] = ()

    def in_order(self) -> tuple[Any, ...]:
        """One after the other."""
        return (*self[:7], *self.kept, *self.captured)

    @classmethod
    def of(cls, given: Sequence[Any], kept: int, captured: int | None = None) -> BackwardInputs:
        """From what stands in order; all after the kept ones is captured, or so many."""
        first = 7 + kept
        last = None if captured is None else first + captured
        grad_out, grad_lse, query, key, value, out, lse = given[:7]
        rest = tuple(given[7:first]), tuple(given[first:last])
        return cls(grad_out, grad_lse, query, key, value, out, lse, *rest)


class Forward(NamedTuple):
    """Results of a forward.

    `max_scores` [B, Hq, M], in lse's dtype, is the largest score of each row after the score mod and the mask
    (-inf for a row with nothing to attend to); None unless asked for.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None


class Gradients(NamedTuple):
    """Gradients in the shapes and dtypes of their tensors; None where `needs` did not ask.

    `captures` belongs to the tensors of `problem.score`: None where no gradient was asked for and where the
    score does not depend on the tensor differentiably. Empty without a `problem.capture_grad`.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    captures: tuple[Tensor | None, ...]
