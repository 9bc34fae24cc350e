"""evaluate(): dtypes, shapes, index widths, float64, and replay()."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexmod.ir.evaluate import evaluate
from flexmod.ir.passes import optimize, promote_constants, widen
from flexmod.ir.replay import replay
from flexmod.ir.trace import Traced, trace

docs = torch.tensor([0, 0, 1, 1])
heads = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)


def place(*sizes: int, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """b, h, q_idx and kv_idx, each along its own axis."""
    names = ("b", "h", "q_idx", "kv_idx")
    return {
        name: torch.arange(n, dtype=dtype).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, n) in enumerate(zip(names, sizes, strict=True))
    }


def value(traced: Traced, **inputs: Any) -> torch.Tensor:
    (result,) = evaluate(traced.graph, traced.tensors, **inputs)
    return result


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_positions_of_any_integer_dtype(dtype: torch.dtype) -> None:
    traced = trace(lambda b, h, q, k: q - k > -2, "mask")
    expected = torch.arange(4)[:, None] - torch.arange(5) > -2
    assert torch.equal(value(traced, **place(1, 1, 4, 5, dtype=dtype))[0, 0], expected)


def test_results_are_as_large_as_what_they_read() -> None:
    sizes = place(2, 3, 4, 5)
    assert value(trace(lambda b, h, q, k: q > 1, "mask"), **sizes).shape == (1, 1, 4, 1)
    assert value(trace(lambda b, h, q, k: (q > 1) & (b == h), "mask"), **sizes).shape == (2, 3, 4, 1)
    assert value(trace(lambda b, h, q, k: True, "mask"), **sizes).shape == ()
    assert value(trace(lambda b, h, q, k: docs[1] == 0, "mask"), **sizes).shape == ()


def test_result_dtypes() -> None:
    sizes = place(1, 1, 2, 2)
    assert value(trace(lambda b, h, q, k: True, "mask"), **sizes).dtype == torch.bool
    score = trace(lambda s, b, h, q, k: q, "score")
    assert value(score, **sizes).dtype == torch.float32
    (wide,) = evaluate(score.graph, (), **sizes, real=torch.float64)
    assert wide.dtype == torch.float64


def test_int32_wraps_until_it_is_widened() -> None:
    graph = trace(lambda b, h, q, k: q * 2**20 > 0, "mask").graph
    (narrow,) = evaluate(graph, (), **place(1, 1, 2049, 1))
    (wide,) = evaluate(widen(graph), (), **place(1, 1, 2049, 1))
    assert not narrow[0, 0, 2048]
    assert wide[0, 0, 2048]


def test_float64_is_the_truth() -> None:
    """Floats of every dtype become float64, numbers are exact."""
    traced = trace(lambda s, b, h, q, k: s * 0.1 + heads[h] + torch.tensor(0.3), "score")
    score = torch.full((1, 2, 1, 1), 0.7, dtype=torch.float64)
    (found,) = evaluate(traced.graph, traced.tensors, **place(1, 2, 1, 1), score=score, real=torch.float64)
    expected = 0.7 * 0.1 + heads.double() + torch.tensor(0.3).double()
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-15, atol=0)


def test_optimized_graphs_say_the_same() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where((q >= k) & True, s**2 * 1.0 + 0.0, -(s.neg()) / 4) + docs[q] * 1

    traced = trace(mod, "score")
    score = torch.randn(1, 1, 4, 4)
    before = evaluate(traced.graph, traced.tensors, **place(1, 1, 4, 4), score=score)
    after = evaluate(optimize(traced.graph), traced.tensors, **place(1, 1, 4, 4), score=score)
    torch.testing.assert_close(before, after)


def test_gradients_flow_to_captures() -> None:
    weights = torch.randn(4, requires_grad=True)
    traced = trace(lambda s, b, h, q, k: s * weights[q] + weights[k], "score")
    (result,) = evaluate(traced.graph, traced.tensors, **place(1, 1, 4, 4), score=torch.ones(1, 1, 4, 4))
    (found,) = torch.autograd.grad(result.sum(), weights)
    torch.testing.assert_close(found, torch.full((4,), 8.0))


def test_several_results() -> None:
    traced = trace(lambda b, h, q, k: (q > 1) & (k > 0), "mask")
    left, right = traced.graph.result.args
    graph = type(traced.graph)("mask", (left, right))
    q, k = evaluate(graph, (), **place(1, 1, 3, 2))
    assert q.flatten().tolist() == [False, False, True]
    assert k.flatten().tolist() == [False, True]


# replay


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (docs[q] == docs[k]) & (q - k <= 2) & (k - q <= 2)


def test_replay_on_tensors() -> None:
    traced = trace(same_document, "mask")
    places = place(1, 1, 4, 4)
    assert torch.equal(replay(traced)(**places), value(traced, **places))


def test_replay_traces_to_the_same_graph() -> None:
    traced = trace(same_document, "mask")
    again = trace(replay(traced), "mask")
    assert again.graph == traced.graph
    assert again.graph.skeleton == traced.graph.skeleton
    assert str(again.graph) == str(traced.graph), "names and lines too"
    assert again.tensors[0] is docs


def test_replay_inside_another_mod() -> None:
    inner = replay(trace(same_document, "mask"))
    traced = trace(lambda b, h, q, k: inner(b, h, q + 1, k) & (docs[k] > 0), "mask")
    assert [c.name for c in traced.graph.captures] == ["docs"]
    expected = [[bool(same_document(0, 0, q + 1, k) & (docs[k] > 0)) for k in range(4)] for q in range(3)]
    assert value(traced, **place(1, 1, 3, 4))[0, 0].tolist() == expected


def test_numbers_for_parameters() -> None:
    graph = trace(lambda s, b, h, q, k: s * 0.5 + q * 3, "score").graph
    promoted = promote_constants(graph, frozenset(range(2)))
    sizes = place(1, 1, 4, 1)
    score = torch.ones(1, 1, 4, 1)
    (expected,) = evaluate(graph, (), **sizes, score=score)
    (found,) = evaluate(promoted, (), **sizes, score=score, numbers=graph.skeleton[1])
    assert torch.equal(found, expected)
    (other,) = evaluate(promoted, (), **sizes, score=score, numbers=(2.0, 1))
    assert other.flatten().tolist() == [2.0, 3.0, 4.0, 5.0]


def test_guarded_loads() -> None:
    """Outside is 0, as in a kernel; negative indices count from the end."""
    table = torch.arange(1, 13, dtype=torch.float32).view(3, 4)
    traced = trace(lambda s, b, h, q, k: table[q - 4, k] + docs[k], "score")
    sizes = place(1, 1, 8, 5)
    (found,) = evaluate(traced.graph, traced.tensors, **sizes, guarded=True)
    padded = torch.zeros(8, 5)
    padded[1:4, :4], padded[4:7, :4] = table, table
    assert torch.equal(found[0, 0], padded + torch.tensor([0, 0, 1, 1, 0]))
    with pytest.raises(IndexError):
        evaluate(traced.graph, traced.tensors, **sizes)


SLOPES = torch.tensor([0.5, -0.25])
MODS = {
    "soft-cap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
    "the score twice": lambda s, b, h, q, k: torch.tanh(s) * s + s,
    "a shared value": lambda s, b, h, q, k: torch.exp(torch.tanh(s)) + torch.tanh(s) * 0.5,
    "rows first": lambda s, b, h, q, k: torch.tanh(q * 0.01) + SLOPES[h] * k + s,
    "no score": lambda s, b, h, q, k: torch.tanh(q * 0.01 - k),
    "unchanged": lambda s, b, h, q, k: s,
    "in half precision": lambda s, b, h, q, k: torch.tanh(s.bfloat16()).float() * s,
    "selected": lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s), -torch.inf),
}


class Subclass(torch.Tensor):
    """An operation on one returns another object than the memory that it was given."""


def test_a_subclass_does_not_use_spare_memory_twice() -> None:
    """As a derivative does: of two terms, each as large as the score."""
    slope = torch.ones(()).as_subclass(Subclass)
    traced = trace(lambda s, b, h, q, k: torch.exp(s * slope) * s + torch.tanh(s * (slope + 1.0)), "score")
    score = torch.randn(1, 1, 70, 65)
    given = {**place(1, 1, 70, 65), "score": score}
    expected = torch.exp(score) * score + torch.tanh(score * 2.0)
    (found,) = evaluate(traced.graph, traced.tensors, **given, overwrite="", spare=torch.empty_like(score))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("overwrite", ["", "score"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mod", MODS)
def test_results_may_share_memory(mod: str, dtype: torch.dtype, overwrite: str) -> None:
    """What is not to be overwritten keeps its values; the spare memory is used where a result fits."""
    traced, sizes = trace(MODS[mod], "score"), place(1, 2, 70, 65)
    score = torch.randn(1, 2, 70, 65, dtype=dtype) * 30
    expected = value(traced, **sizes, score=score, real=dtype)
    given, spare = score.clone(), torch.full_like(score, torch.nan)
    (found,) = evaluate(
        traced.graph, traced.tensors, **sizes, score=given, real=dtype,
        quick=True, overwrite=overwrite, spare=spare,
    )  # fmt: skip
    rounding = 8 * torch.finfo(dtype).eps
    largest = expected[expected.isfinite()].abs().max().item()
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding * largest)
    assert overwrite or torch.equal(given, score)
    assert given.shape == spare.shape == score.shape
    if mod == "soft-cap" and dtype == torch.float32:
        assert found is (given if overwrite else spare)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 0.1, 1.0, 9.0, 1e4])
def test_the_quick_tanh(size: float, dtype: torch.dtype) -> None:
    traced = trace(lambda s, b, h, q, k: torch.tanh(s), "score")
    score = (torch.rand(1, 1, 128, 64, dtype=torch.float64) * 2 - 1).mul_(size).to(dtype)
    score[0, 0, 0, :7] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40])
    given = {**place(1, 1, 128, 64), "real": dtype, "quick": True}
    (found,) = evaluate(traced.graph, (), **given, score=score.clone(), overwrite="score")
    (alone,) = evaluate(traced.graph, (), **given, score=score[:, :, :1])
    assert torch.equal(alone.nan_to_num(), found[:, :, :1].nan_to_num()), "the same for any size"
    exact = torch.tanh(score.double())
    error = (found - exact).abs() / (exact.abs() * torch.finfo(dtype).eps + 1e-39)
    assert error[~exact.isnan()].max() <= 0.75
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.signbit()[~exact.isnan()], exact.signbit()[~exact.isnan()])


def test_the_quick_tanh_of_a_scalar() -> None:
    gate = torch.tensor(3.0)
    traced = trace(lambda s, b, h, q, k: s * torch.tanh(s.new_full((), 0.5) * gate), "score")
    score = torch.randn(1, 2, 40, 24)
    (found,) = evaluate(traced.graph, traced.tensors, **place(1, 2, 40, 24), score=score, quick=True)
    torch.testing.assert_close(found, score * torch.tanh(torch.tensor(1.5)))
