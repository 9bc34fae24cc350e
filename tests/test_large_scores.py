"""The softmax of a row depends on differences alone: scores may be as large as float32 holds, or as small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from large_scores import COLUMNS, DIM, FACTORS, NAMES, ROWS, Call, faults, made
from plain_gluon import on_python
from plain_gluon.tiles import single
from torch import Tensor

import flexmod
from flexmod import AuxRequest, create_block_mask, flex_attention
from flexmod.codegen.compiler import lower
from flexmod.ir.trace import trace

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
MODS = made()
EVERY = pytest.mark.every


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


@contextmanager
def options(backend: str) -> Iterator[dict[str, Any]]:
    """HOPPER: the kernels for that chip as plain Python, in float32."""
    if backend != "HOPPER":
        yield {"BACKEND": backend} if backend != "CPU" else {}
        return
    with on_python(), single():
        yield {"BACKEND": "INTERPRET", "TEMPLATE": "hopper"}


def results(
    call: Call, score_mod: Callable[..., Any] | None, backend: str, scale: float, keep: Any = None
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    mask = create_block_mask(keep, None, None, ROWS, COLUMNS, "cpu") if keep else None
    with options(backend) as given:
        out, found = flex_attention(
            *leaves, score_mod, mask, scale=scale, kernel_options=given,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        gradients = torch.autograd.grad(out, leaves, call.grad_out)
    return [out, found.lse, found.max_scores, *gradients]


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("CPU", SINGLE), ("CPU", HALF), ("REFERENCE", BF16), ("INTERPRET", HALF), ("INTERPRET", BF16),
        ("INTERPRET", SINGLE), ("HOPPER", HALF), ("HOPPER", BF16),
    ],
)  # fmt: skip
def test_scores_of_a_mod(name: str, backend: str, dtype: torch.dtype) -> None:
    call = Call(dtype)
    truth = call.truth(MODS[name], DIM**-0.5)
    found = results(call, MODS[name], backend, DIM**-0.5)
    assert not faults(found, truth, dtype, FACTORS.get(name, 1.0))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["half a row", "rows of -1e+30", "a slope", "of pairs", "times a tensor"])
@pytest.mark.parametrize("backend", ["CPU", "INTERPRET", "HOPPER"])
def test_scores_beside_a_mask(name: str, backend: str) -> None:
    call = Call(HALF)
    truth = call.truth(MODS[name], DIM**-0.5, causal)
    found = results(call, MODS[name], backend, DIM**-0.5, causal)
    assert not faults(found, truth, HALF, FACTORS.get(name, 1.0))


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", [1e3, 1e9, 1e20, -1e9])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("REFERENCE", SINGLE), ("INTERPRET", HALF), ("INTERPRET", SINGLE), ("HOPPER", HALF), ("HOPPER", BF16)],
)
def test_scores_without_a_mod(backend: str, dtype: torch.dtype, scale: float) -> None:
    """Products of large queries and keys. Gradients of these are as large as the scale."""
    call = Call(dtype)
    found, truth = results(call, None, backend, scale), call.truth(None, scale)
    assert not faults([*found[:3], *truth[3:5], found[5]], truth, dtype)
    assert not any(x.isnan().any() for x in found)


@pytest.mark.parametrize(
    "name",
    ["rows of -1e+09", pytest.param("a slope", marks=EVERY), pytest.param("added", marks=EVERY)],
)
def test_scores_of_a_handle_and_in_a_compiled_graph(name: str) -> None:
    """What the forward keeps for the backward passes through both."""
    call, scale = Call(HALF), DIM**-0.5
    truth = call.truth(MODS[name], scale)
    attend = flexmod.compile(score_mod=MODS[name], kernel_options={"BACKEND": "INTERPRET"})

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, MODS[name], kernel_options={"BACKEND": "INTERPRET"})

    for run in (attend, graph):
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        for _ in range(3):
            out = run(*leaves)
            gradients = torch.autograd.grad(out, leaves, call.grad_out)
        assert not faults([out, *truth[1:3], *gradients], truth, HALF)


@pytest.mark.parametrize("backend", ["INTERPRET", "HOPPER"])
def test_backwards_after_a_number_became_an_argument(backend: str) -> None:
    """A soft-cap's scores are small as long as the cap is a constant: other caps come before a backward."""

    def capped(cap: float) -> Callable[..., Any]:
        return lambda s, b, h, q, k: cap * torch.tanh(s / cap)

    call, scale = Call(HALF, size=4.0), 1.0
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    caps = (17.0, 23.0, 29.0)
    with options(backend) as given:
        outs = [flex_attention(*leaves, capped(cap), scale=scale, kernel_options=given) for cap in caps]
        for cap, out in zip(caps, outs, strict=True):
            gradients = torch.autograd.grad(out, leaves, call.grad_out)
            truth = call.truth(capped(cap), scale)
            assert not faults([out, *truth[1:3], *gradients], truth, HALF), cap


@pytest.mark.parametrize("dtype", [HALF, pytest.param(SINGLE, marks=EVERY)])
def test_small_scores_in_a_compiled_graph(dtype: torch.dtype) -> None:
    call, scale = Call(dtype), DIM**-0.5

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 12.0 * torch.tanh(s / 12.0)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, capped, kernel_options={"BACKEND": "INTERPRET"})

    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    truth = call.truth(capped, scale)
    out = graph(*leaves)
    found = [out, *truth[1:3], *torch.autograd.grad(out, leaves, call.grad_out)]
    assert not faults(found, truth, dtype)


# tanh


@pytest.mark.parametrize(
    ("score_mod", "relative"),
    [
        (lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), False),
        (lambda s, b, h, q, k: 1000.0 * torch.tanh(s / 1000.0) + q, False),
        (lambda s, b, h, q, k: torch.tanh(s) - 7.0, False),
        (lambda s, b, h, q, k: torch.where(q > k, -torch.tanh(s), 0.0) / 0.01, False),
        (lambda s, b, h, q, k: 1e8 * torch.tanh(s / 1e8), True),
        (lambda s, b, h, q, k: torch.tanh(s / 1e4) / 1e-4, True),
        (lambda s, b, h, q, k: SLOPES[h] * torch.tanh(s / SLOPES[h]), True),
        (lambda s, b, h, q, k: torch.exp(torch.tanh(s)), True),
    ],
)
def test_a_tanh_that_is_multiplied_by_much_is_relative(
    score_mod: Callable[..., Any], relative: bool
) -> None:
    graph = lower(trace(score_mod, "score").graph, (1, 2, 64, 64), split=False).graph
    assert graph is not None
    assert any(n.op == "tanh_relative" for n in graph.nodes) == relative


SLOPES = torch.tensor([30.0, 1e8])


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["INTERPRET", "HOPPER"])
@pytest.mark.parametrize("caps", [(30.0, 50.0, 1e8), (1e8, 30.0, 20.0)])
def test_a_cap_that_changes_from_call_to_call(backend: str, caps: tuple[float, ...]) -> None:
    """A number that has become an argument: a large one takes the other tanh."""
    call, scale = Call(HALF, size=4.0), 1.0
    for cap in caps:

        def capped(s: Any, b: Any, h: Any, q: Any, k: Any, cap: float = cap) -> Any:
            return cap * torch.tanh(s / cap)

        found, truth = results(call, capped, backend, scale), call.truth(capped, scale)
        assert not faults([*found[:3], *truth[3:]], truth, HALF), cap


def test_the_error_of_a_large_cap() -> None:
    """13 under a cap of 1e8 is 13: an absolute error of tanh would make it 0."""
    q = torch.full((1, 1, 1, 64), 13.0 / 8)
    k = torch.ones(1, 1, 1, 64)
    for backend in ("CPU", "INTERPRET"):
        options = {"BACKEND": backend} if backend != "CPU" else {}
        for dtype in (HALF, SINGLE):
            _, lse = flex_attention(
                *(x.to(dtype) for x in (q, k, k)), lambda s, b, h, i, j: 1e8 * torch.tanh(s / 1e8),
                return_lse=True, kernel_options=options,
            )  # fmt: skip
            torch.testing.assert_close(lse, torch.full_like(lse, 13.0), rtol=1e-6, atol=1e-5)
