"""Defines the arguments and results of every backend.

A backend makes the plan of a call, bound to the kinds of its tensors:

    forward(problem, tensors, *, want_max, keep) -> Bound
    backward(problem, tensors, needs, kept) -> Bound

The `tensors` are q, k, v and the score mod's captures, or a `BackwardInputs` in order; then the mask's
tensors. Backends in plain torch (`in_torch`) have plans of one step, which calls one of these functions;
the reference has only the first:

    forward(problem, q, k, v, *, want_max) -> Forward
    backward(problem, given, needs) -> Gradients        with the tensors of a `BackwardInputs`

    q          [B, Hq, M, D]
    k          [B or 1, Hkv, N, D]        Hq is a multiple of Hkv
    v          [B or 1, Hkv, N, Dv]
    out        [B, Hq, M, Dv]             in q's dtype; `grad_out` has its shape
    lse        [B, Hq, M]                 natural log; float32, or float64 when q is float64
    grad_lse   like lse, or None when lse was not used
    needs      whether q, k and v get a gradient; captured tensors do if `problem.capture_grad` is set
    keep       whether a backward will follow: the forward then also returns `kept` tensors for it

The caller has checked all shapes, dtypes and devices, so a backend does not check again. Scores are
`scale * q.k` after the score mod, and -inf where the mask is False. A row that attends to nothing has out 0,
lse -inf and gradients 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from flexmod.block_mask.storage import MaskSnapshot
from flexmod.ir.derivative import CaptureGrad
from flexmod.ir.graph import Graph
from flexmod.ir.trace import Traced


@dataclass(frozen=True)
class Problem:
    """The attention variant: how a call changes its scores, without its tensors.

        score         the score mod after the graph passes, None if it changes nothing
        score_grad    its derivative, with inputs score, grad, b, h, q_idx, kv_idx and the captures of
                      `score`; None if a call needs no gradients
        capture_grad  the same with derivatives by captured elements; None without gradients of captures
        options       the checked kernel options
        precision     of float32 products
        out_dtype     of the output, for queries in float8; None for the queries' dtype
        value_scale   the scale of the values, float32 [] or [B or 1, Hkv]; None for 1

    Only generated kernels use the last four. Before a call has its tensors, True stands for the scale.
    """

    score: Traced | None
    score_grad: Graph | None
    mask: MaskSnapshot | None
    scale: float
    options: tuple[tuple[str, Any], ...] = ()
    precision: Literal["ieee", "tf32"] = "ieee"
    capture_grad: CaptureGrad | None = None
    out_dtype: torch.dtype | None = None
    value_scale: Any = None


SINGLE: Final = 7  # inputs of a backward before `kept` and `captured`


class BackwardInputs(NamedTuple):
    """The inputs of a backward except the mask, as places in a plan. A run takes tensors in the same order.

    Shapes as above. `grad_lse` may be None. `kept` comes from the forward; `captured` has the score mod's
    captured tensors.
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
        """Returns all inputs as one tuple, in order."""
        return (*self[:SINGLE], *self.kept, *self.captured)


class Forward(NamedTuple):
    """The results of a forward.

    The tensor `max_scores` [B, Hq, M], in lse's dtype, has each row's largest score after the score mod and
    the mask, -inf for a row that attends to nothing. It is None if the call did not ask for it.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None


class Gradients(NamedTuple):
    """The gradients, in the shapes and dtypes of their tensors; None where `needs` is False.

    `captures` belongs to the captures of `problem.score`. An entry is None if the call needs no gradient, or
    if the score does not depend on the tensor differentiably. Empty without a `problem.capture_grad`.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    captures: tuple[Tensor | None, ...]
