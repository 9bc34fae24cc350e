"""differentiate(): the derivative graph against autograd, and its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexmod.ir.derivative import differentiate
from flexmod.ir.evaluate import evaluate
from flexmod.ir.passes import optimize
from flexmod.ir.trace import trace

bias = torch.linspace(-1, 1, 12)
slopes = torch.linspace(0.1, 1, 3)
EXTENTS = (2, 3, 4, 5)
PLACES = {
    name: torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
    for axis, (name, n) in enumerate(zip(("b", "h", "q_idx", "kv_idx"), EXTENTS, strict=True))
}

MODS: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, k: s,
    "constant": lambda s, b, h, q, k: 3.0,
    "free of the score": lambda s, b, h, q, k: (q - k) * slopes[h],
    "alibi": lambda s, b, h, q, k: s + (q - k) * slopes[h],
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "many uses": lambda s, b, h, q, k: s * s + torch.exp(s * 0.1) * s - s / (1 + s * s),
    "shared": lambda s, b, h, q, k: (lambda t: t * t + t)(torch.sin(s)),
    "where": lambda s, b, h, q, k: (
        torch.where(q >= k, s * 2, torch.sigmoid(s)) + torch.where(s > 0, s, 0.1 * s)
    ),
    "clamp": lambda s, b, h, q, k: s.clamp(-1, 1) + F.relu(s) + torch.minimum(s, bias[k]),
    "powers": lambda s, b, h, q, k: (s.abs() + 0.5) ** 1.5 + 2.0**s + s**3,
    "activations": lambda s, b, h, q, k: (
        F.gelu(s) + F.silu(s) + F.softplus(s) + torch.erf(s) + torch.log1p(s * s)
    ),
    "casts": lambda s, b, h, q, k: s.double().float() * 2 + s.int() + (s > 0).float(),
    "rounding": lambda s, b, h, q, k: s.floor() + torch.remainder(s, 0.7) + torch.fmod(s, 0.7),
    "division": lambda s, b, h, q, k: (q + 1) / (s * s + 1) + s / (k + 1),
    "captures": lambda s, b, h, q, k: s * bias[q + k] + torch.maximum(s, bias[q]),
    "tests": lambda s, b, h, q, k: torch.where(torch.isnan(s) | torch.isinf(s), 0.0, s),
    "negations": lambda s, b, h, q, k: -abs(-s) * 3 - s,
}


@pytest.mark.parametrize("optimized", [False, True], ids=["as traced", "optimized"])
@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
def test_derivative(mod: Callable[..., Any], optimized: bool) -> None:
    traced = trace(mod, "score")
    graph = optimize(traced.graph) if optimized else traced.graph
    derivative = differentiate(graph)
    derivative = optimize(derivative) if optimized else derivative
    assert derivative.kind == "grad"
    assert len(derivative.results) == 1
    score = torch.linspace(-2, 2, 120, dtype=torch.float64).view(EXTENTS).requires_grad_()
    grad = torch.linspace(1, 3, 120, dtype=torch.float64).view(EXTENTS)
    (result,) = evaluate(graph, traced.tensors, **PLACES, score=score, real=torch.float64)
    expected = torch.zeros_like(score)
    if result.requires_grad:
        (expected,) = torch.autograd.grad(result, score, grad.expand_as(result))
    arguments = {**PLACES, "score": score.detach(), "grad": grad, "real": torch.float64}
    (found,) = evaluate(derivative, traced.tensors, **arguments)
    torch.testing.assert_close(found.expand(EXTENTS), expected)


def test_halves_are_differentiated_through_their_rounding() -> None:
    graph = trace(lambda s, b, h, q, k: s.half() * 2, "score").graph
    score = torch.linspace(-2, 2, 120).view(EXTENTS)
    (found,) = evaluate(differentiate(graph), (), **PLACES, score=score, grad=torch.full(EXTENTS, 0.1))
    torch.testing.assert_close(found, (torch.full(EXTENTS, 0.1).half() * 2).float(), rtol=0, atol=0)


def test_text_and_lines() -> None:
    graph = trace(lambda s, b, h, q, k: 20 * torch.tanh(s / 20), "score").graph
    derivative = optimize(differentiate(optimize(graph)))
    lines = [line.partition("  #")[0].strip() for line in str(derivative).splitlines()]
    assert lines == [
        "grad():",
        "%0: float32 = mul(grad, 20)",
        "%1: float32 = mul(score, 0.05)",
        "%2: float32 = tanh(%1)",
        "%3: float32 = mul(%2, %2)",
        "%4: float32 = sub(1.0, %3)",
        "%5: float32 = mul(%0, %4)",
        "%6: float32 = mul(%5, 0.05)",
        "return %6",
    ]
    assert all(n.where is not None and n.where.file == __file__ for n in derivative.nodes if n.args)


def test_a_derivative_that_is_zero_is_a_constant() -> None:
    graph = trace(lambda s, b, h, q, k: (q > k) * 1.0, "score").graph
    assert str(optimize(differentiate(graph))) == "grad():\n  return 0.0"
