"""Kernels that start before the kernels of earlier launches have ended: what each reads is complete.

A result has the same bits whether the GPU waits for each launch or not, for any kernel before or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flexmod import Scales, create_block_mask, flex_attention, masks, mods, quantize
from flexmod.runtime import direct

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
WAITS = torch.cuda.get_device_capability(0) >= (9, 0)
ROUNDS = 40  # calls, one on the result of the one before


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    made = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=made).to(dtype)


def rescaled(x: Tensor) -> Tensor:
    """Keeps a chain of results from fading; a kernel of torch's between two of ours."""
    return x / x.float().square().mean().sqrt().to(x.dtype).clamp(min=1e-3)


KEY = normal(2, 2, 4096, 64, seed=1)


def few_queries(x: Tensor) -> Tensor:
    return flex_attention(x, KEY, KEY.flip(2), mods.softcap(20.0), enable_gqa=True)


def causal(x: Tensor) -> Tensor:
    mask = create_block_mask(masks.causal(), None, None, x.shape[2], x.shape[2], device=DEVICE)
    return flex_attention(x, x.flip(1), x.flip(3), block_mask=mask)


def step(x: Tensor) -> Tensor:
    """The gradients of a forward, which a backward's kernels make of each other's results."""
    leaves = [part.detach().requires_grad_() for part in (x, x.flip(1), x.flip(3))]
    mask = create_block_mask(masks.causal(), None, None, x.shape[2], x.shape[2], device=DEVICE)
    with torch.enable_grad():
        out = flex_attention(*leaves, block_mask=mask, kernel_options={"deterministic": True})
        grads = torch.autograd.grad(out, leaves, x)
    return out.detach() + sum(rescaled(grad) for grad in grads)


def float8(x: Tensor) -> Tensor:
    (q, q_scale), (k, k_scale), (v, v_scale) = (quantize(part, by="head") for part in (x, x.flip(1), x))
    mask = create_block_mask(masks.sliding_window(200), None, None, x.shape[2], x.shape[2], device=DEVICE)
    return flex_attention(q, k, v, block_mask=mask, scales=Scales(q_scale, k_scale, v_scale))


CHAINS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]] = {
    "few queries": (few_queries, (2, 8, 1, 64), torch.bfloat16),
    "causal": (causal, (2, 4, 700, 64), torch.float16),
    "causal, D=128": (causal, (1, 2, 1100, 128), torch.bfloat16),
    "float32": (causal, (1, 2, 300, 32), torch.float32),
    "a step": (step, (1, 4, 500, 64), torch.bfloat16),
    "a step, D=128": (step, (1, 2, 700, 128), torch.float16),
    "a step in float32": (step, (1, 2, 260, 64), torch.float32),
    "float8": (float8, (1, 4, 900, 128), torch.bfloat16),
}


def chain(call: Callable[[Tensor], Tensor], x: Tensor, wait: bool) -> list[Tensor]:
    found = []
    for _ in range(ROUNDS):
        x = rescaled(call(x))
        found.append(x)
        if wait:
            torch.cuda.synchronize()
    return found


@torch.no_grad()
@pytest.mark.parametrize(("call", "shape", "dtype"), CHAINS.values(), ids=CHAINS)
def test_a_chain_of_calls(call: Callable[[Tensor], Tensor], shape: Any, dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype)
    launched: list[bool] = []
    options_of = direct.options_of

    def watched(function: Any) -> dict[str, Any]:
        found = options_of(function)
        launched.append(bool(found.get("launch_pdl")))
        return found

    with mock.patch.object(direct, "options_of", watched):
        expected = chain(call, x, wait=True)
    assert not WAITS or any(launched)
    assert all(bool(one.isfinite().all()) for one in expected)
    assert not any(torch.equal(one, other) for one, other in pairwise(expected))
    for _ in range(5):
        for one, other in zip(expected, chain(call, x, wait=False), strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("name", ["few queries", "a step", "float8"])
def test_a_chain_in_a_graph(name: str) -> None:
    """Beside copies and fills, on a stream that other streams wait for."""
    call, shape, dtype = CHAINS[name]
    x, results = normal(*shape, dtype=dtype), torch.empty(8, *shape, dtype=dtype, device=DEVICE)
    wanted = []
    found = x
    for _ in range(8):
        found = rescaled(call(found.clone()))
        wanted.append(found.clone())
        torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = x
        for number in range(8):
            found = rescaled(call(found.clone()))  # a copy of memory is before the call, and a fill
            results[number].zero_()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results[number].copy_(found)
            torch.cuda.current_stream().wait_stream(stream)
    for _ in range(10):
        results.fill_(float("nan"))
        graph.replay()
        for one, other in zip(wanted, results, strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
def test_chains_on_two_streams() -> None:
    """Their launches come in turn, and each stream reads what the other made."""
    call, shape, dtype = CHAINS["few queries"]
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = normal(*shape, dtype=dtype)
    expected = chain(call, x, wait=True)
    torch.cuda.synchronize()
    for _ in range(5):
        found, event = x, None
        for number, wanted in enumerate(expected):
            with torch.cuda.stream(streams[number % 2]):
                if event is not None:
                    streams[number % 2].wait_event(event)
                found = rescaled(call(found))
                event = streams[number % 2].record_event()
                found.record_stream(streams[(number + 1) % 2])
            if number % 16 == 15:
                streams[number % 2].synchronize()
                assert torch.equal(found, wanted)
