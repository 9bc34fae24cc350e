"""What the texts of learned terms say of themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flexmod.codegen.compiler import capture_texts, lower
from flexmod.ir.trace import trace

slopes = torch.rand(4, requires_grad=True)

FINITE = {
    "distance": lambda q_idx, kv_idx: kv_idx - q_idx,
    "of floats": lambda q_idx, kv_idx: abs(kv_idx * 0.5 - q_idx).clamp(max=30.0),
    "rounded": lambda q_idx, kv_idx: torch.floor((kv_idx - q_idx) * 0.3),
    "bounded": lambda q_idx, kv_idx: torch.tanh((kv_idx - q_idx) * 0.1),
    "chosen": lambda q_idx, kv_idx: torch.where(kv_idx > q_idx, 1.5, torch.sin(kv_idx * 0.1)),
}
NOT_FINITE = {
    "logarithm": lambda q_idx, kv_idx: torch.log((kv_idx - q_idx) * 1.0),
    "quotient": lambda q_idx, kv_idx: 1.0 / (kv_idx - q_idx),
    "exponential": lambda q_idx, kv_idx: torch.exp(kv_idx - q_idx),
    "constant": lambda q_idx, kv_idx: torch.where(kv_idx > q_idx, math.inf, 1.0),
}


@pytest.mark.parametrize("name", [*FINITE, *NOT_FINITE])
def test_a_gradient_of_zero_leaves_zeros(name: str) -> None:
    """Only where a term is the gradient times what is finite everywhere."""
    factor = (FINITE | NOT_FINITE)[name]

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * factor(q_idx, kv_idx)

    graph = lower(trace(mod, "score").graph, (1, 4, 64, 64), split=False).graph
    assert graph is not None
    text = capture_texts(graph, (0,), reduce_in_backward=True).column
    assert text is not None
    assert text.keeps_zeros == (name in FINITE)


pairs, keys = (torch.rand(64, n, requires_grad=True) for n in (64, 1))

# What a fused backward may add itself: elements that the score_mod adds, and nothing else that it learns.
ADDED = {
    "a bias": lambda s, q, k: s + pairs[q, k],
    "multiples of elements": lambda s, q, k: s + 0.5 * pairs[q, k] * (k + 1) - pairs[k, q],
    "at the ends": lambda s, q, k: s + pairs[q - 1, (k + 3).clamp(max=60)],
}
APART = {
    "times the score": lambda s, q, k: s * pairs[q, k],
    "a scaled score": lambda s, q, k: 2.0 * s + pairs[q, k],
    "a function of elements": lambda s, q, k: s + torch.exp(pairs[q, k]),
    "beside a sum by column": lambda s, q, k: s + pairs[q, k] + keys[k, 0],
    "costly places": lambda s, q, k: s + pairs[q % 7, torch.log1p(k * (q + 1.0)).int()],
}


@pytest.mark.parametrize("name", [*ADDED, *APART])
def test_which_terms_a_fused_backward_adds(name: str) -> None:
    mod = (ADDED | APART)[name]
    traced = trace(lambda s, b, h, q, k: mod(s, q, k), "score")
    graph = lower(traced.graph, (1, 4, 64, 64), split=False).graph
    assert graph is not None
    wanted = tuple(range(len(traced.tensors)))
    fused = capture_texts(graph, wanted, reduce_in_backward=True)
    assert (fused.added is not None, fused.element is not None) == (name in ADDED, name in APART)
    apart = capture_texts(graph, wanted)
    assert apart.element is not None and apart.added is None
