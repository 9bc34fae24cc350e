"""differentiate(): the derivative graph against autograd, and its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table_walk import graph_of, rows_of

from flexmod.codegen.compiler import capture_grad
from flexmod.ir.derivative import differentiate, differentiate_captures
from flexmod.ir.evaluate import evaluate
from flexmod.ir.ops import Op
from flexmod.ir.passes import optimize, promote_constants
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


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
def test_a_derivative_reads_the_numbers_of_parameters(mod: Callable[..., Any]) -> None:
    traced = trace(mod, "score")
    _, numbers = traced.graph.skeleton
    of_parameters = promote_constants(traced.graph, frozenset(range(len(numbers))))
    assert not any(node.is_const for node in of_parameters.nodes)
    score = torch.linspace(-2, 2, 120, dtype=torch.float64).view(EXTENTS)
    arguments = {**PLACES, "score": score, "grad": score + 5, "real": torch.float64, "numbers": numbers}
    found, expected = (
        evaluate(differentiate(graph), traced.tensors, **arguments)  # type: ignore[arg-type]
        for graph in (of_parameters, traced.graph)
    )
    torch.testing.assert_close(found, expected)


def test_a_power_of_a_truth_value_has_a_derivative() -> None:
    graph = trace(lambda s, b, h, q, k: (s + 3) ** True, "score").graph
    score = torch.linspace(-2, 2, 120).view(EXTENTS)
    (found,) = evaluate(differentiate(graph), (), **PLACES, score=score, grad=score)
    torch.testing.assert_close(found, score)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_change_a_derivative(dtype: torch.dtype) -> None:
    graph = trace(lambda s, b, h, q, k: (s.abs() + 0.5) ** 1.3, "score").graph
    expected = optimize(differentiate(graph))
    try:
        torch.set_default_dtype(dtype)
        assert optimize(differentiate(graph)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_halves_are_differentiated_through_their_rounding() -> None:
    graph = trace(lambda s, b, h, q, k: s.half() * 2, "score").graph
    score = torch.linspace(-2, 2, 120).view(EXTENTS)
    (found,) = evaluate(differentiate(graph), (), **PLACES, score=score, grad=torch.full(EXTENTS, 0.1))
    torch.testing.assert_close(found, (torch.full(EXTENTS, 0.1).half() * 2).float(), rtol=0, atol=0)


@pytest.mark.parametrize("optimized", [False, True], ids=["as traced", "optimized"])
@pytest.mark.parametrize("name", ["free of the score", "alibi", "clamp", "captures"])
def test_captures(name: str, optimized: bool) -> None:
    """A term for each load; added up where its indices say, they are what autograd has."""
    traced = trace(MODS[name], "score")
    wide = [t.double().requires_grad_() for t in traced.tensors]
    numbers = tuple(range(len(wide)))
    found = (capture_grad if optimized else differentiate_captures)(traced.graph, numbers)
    score = torch.linspace(-2, 2, 120, dtype=torch.float64).view(EXTENTS)
    grad = torch.linspace(1, 3, 120, dtype=torch.float64).view(EXTENTS)
    (result,) = evaluate(traced.graph, wide, **PLACES, score=score, real=torch.float64)
    expected = torch.autograd.grad(result, wide, grad.sum_to_size(result.shape))
    sums = [torch.zeros_like(t) for t in wide]
    arguments = {**PLACES, "score": score, "grad": grad, "real": torch.float64}
    _, *values = evaluate(found.graph, [t.detach() for t in wide], **arguments)
    assert len(values) == 2 * len(found.loads)
    for number, term, index in zip(found.loads, values[::2], values[1::2], strict=True):
        sums[number].index_put_((index.expand(EXTENTS),), term.expand(EXTENTS), accumulate=True)
    torch.testing.assert_close(sums, list(expected))


def test_captures_share_the_pass_with_the_score() -> None:
    graph = trace(lambda s, b, h, q, k: torch.tanh(s * slopes[h] + bias[q]), "score").graph
    found = capture_grad(graph, (0, 1))
    assert found.loads == (0, 1)
    assert [n.op for n in found.graph.nodes].count("tanh") == 1
    (only,) = differentiate_captures(graph, (1,)).loads
    assert only == 1


def test_a_load_is_not_differentiated_by_its_index() -> None:
    graph = trace(lambda s, b, h, q, k: s + bias[s.round().int()], "score").graph
    assert differentiate(graph).result.value == "grad"


def test_what_only_decides_has_no_term() -> None:
    graph = trace(lambda s, b, h, q, k: torch.where(bias[q] > 0, s, 0.0), "score").graph
    assert differentiate_captures(graph, (0,)).loads == ()


def test_the_term_of_a_half_is_not_rounded() -> None:
    half = torch.ones(4).half()
    graph = trace(lambda s, b, h, q, k: s * half[q], "score").graph
    assert differentiate_captures(graph, (0,)).graph.results[1].dtype == torch.float32


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


WITH_A_RULE = [row for row in rows_of(torch.float32) if row.derivative]


@pytest.mark.parametrize("row", WITH_A_RULE, ids=lambda row: row.name)
def test_a_rule_runs_where_torch_functions_are_off(row: Op) -> None:
    graph = graph_of(row, torch.float32, "score")
    expected = differentiate(graph)
    for off in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
        with off():
            assert differentiate(graph) == expected
