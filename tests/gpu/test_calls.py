"""Calls that are played again on a GPU: launched directly, on the current stream, within CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_case import make_case
from torch import Tensor

import flexmod
from flexmod import create_block_mask, flex_attention, masks, mods
from flexmod.calls import prepared
from flexmod.codegen import compiler
from flexmod.runtime import direct as counters

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
LENGTH = 320
REFERENCE = {"BACKEND": "REFERENCE"}
TEMPLATES = ["portable", "auto"]


def inputs(length: int = LENGTH, grad: bool = False, seed: int = 0) -> list[Tensor]:
    case = make_case(q_len=length, heads=4, head_dim=64, dtype=torch.bfloat16, device=DEVICE, seed=seed)
    return [x.requires_grad_(grad) for x in case.inputs]


def slope(slopes: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def code(text: str) -> str:
    """Without comments: what ran may quote another function, which does the same."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm())


@pytest.mark.parametrize("template", TEMPLATES)
def test_played_calls_agree_with_the_reference(template: str, direct: list[Any]) -> None:
    """Lengths, alignment, strides and captures take turns, each with other values."""
    lengths = (LENGTH, 190)
    causal = {n: create_block_mask(masks.causal(), None, None, n, n, device=DEVICE) for n in lengths}
    for seed in range(4):
        for length in lengths:
            slopes = torch.rand(4, device=DEVICE, requires_grad=True)
            odd = torch.empty(5, device=DEVICE)[1:].copy_(slopes.detach()).requires_grad_()
            q, k, v = inputs(length, True, seed)
            shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape)
            shifted = shifted.copy_(q.detach()).requires_grad_()
            apart = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
            grad_out = torch.randn_like(v)  # not of an output: its values would depend on the strides
            for query, table in ((q, slopes), (q, odd), (shifted, slopes), (apart, slopes)):
                found = []
                for options in ({"TEMPLATE": template}, REFERENCE):
                    out = flex_attention(query, k, v, slope(table), causal[length], kernel_options=options)
                    grads = torch.autograd.grad(out, (query, k, v, table), grad_out)
                    found.append((out, *grads))
                for name, ours, wanted in zip(("out", "dq", "dk", "dv", "slopes"), *found, strict=True):
                    assert near(ours, wanted), (name, seed, length, ours, wanted)
    assert direct


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("handle", [False, True], ids=["eager", "handle"])
@torch.no_grad()
def test_a_graph_of_a_forward(template: str, handle: bool, direct: list[Any]) -> None:
    options = {"TEMPLATE": template}
    slopes = torch.rand(4, device=DEVICE)
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=DEVICE)
    tensors = inputs()
    compiled = flexmod.compile(slope(slopes), kernel_options=options)

    def attend() -> Any:
        if handle:
            return compiled(*tensors, mask)
        return flex_attention(*tensors, slope(slopes), mask, kernel_options=options)

    out = recorded(attend)
    assert direct
    for seed in range(1, 4):
        for tensor, other in zip(
            (*tensors, slopes), (*inputs(seed=seed), torch.rand_like(slopes)), strict=True
        ):
            tensor.copy_(other)
        out.graph.replay()
        assert near(out.result, flex_attention(*tensors, slope(slopes), mask, kernel_options=REFERENCE))


class Recorded:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: Any) -> None:
        self.graph, self.result = graph, result


def recorded(run: Callable[[], Any]) -> Recorded:
    """A graph of run(), after it has run on a stream of its own as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return Recorded(graph, result)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_graph_of_a_training_step(template: str) -> None:
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=DEVICE)
    tensors = inputs(grad=True)
    grad_out = torch.randn_like(tensors[0])

    def step(options: Any) -> Any:
        out = flex_attention(*tensors, block_mask=mask, kernel_options=options)
        return (out, *torch.autograd.grad(out, tensors, grad_out))

    out = recorded(lambda: step({"TEMPLATE": template}))
    for seed in range(1, 3):
        with torch.no_grad():
            for tensor, other in zip(tensors, inputs(seed=seed), strict=True):
                tensor.copy_(other)
        out.graph.replay()
        assert all(map(near, out.result, step(REFERENCE)))


@torch.no_grad()
def test_a_call_that_is_new_to_a_graph() -> None:
    """Its kernels are loaded already; what is known of it comes about while the graph is recorded."""
    tensors = inputs()

    def twice(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 1.75

    flex_attention(*tensors, twice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # prepared, then by its plan
            out = flex_attention(*tensors, twice, scale=0.25)
    graph.replay()
    assert near(out, flex_attention(*tensors, twice, scale=0.25, kernel_options=REFERENCE))


@torch.no_grad()
def test_the_current_stream_is_taken() -> None:
    tensors = inputs()
    for _ in range(4):
        flex_attention(*tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        tensors[2].neg_()
        out = flex_attention(*tensors)
    stream.synchronize()
    assert near(out, flex_attention(*tensors, kernel_options=REFERENCE))


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_handle_shows_is_what_ran(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the modules that ran, also before they run, and PTX for the chip."""
    monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())  # so that the cap is no argument
    attend = flexmod.compile(
        mods.softcap(15.0), masks.causal(), kernel_options={"TEMPLATE": template},
        dtype=torch.bfloat16, head_dim=64,
    )  # fmt: skip
    described = attend.source
    started: list[str] = []
    start = counters.start
    monkeypatch.setattr(
        counters, "start", lambda of, *rest: started.append(of.fn.__code__.co_filename) or start(of, *rest)
    )
    attend(*inputs(grad=True)).sum().backward()
    ran = {code(Path(file).read_text()) for file in started if "attention" in file}
    assert described == attend.source and {code(text) for text in described.values()} == ran
    texts = attend.ptx
    chip = torch.cuda.get_device_capability(DEVICE)
    assert all(f".target sm_{chip[0]}{chip[1]}" in text for text in texts.values())
    assert set(texts) in ({"forward", "backward"}, {"forward", "dq", "dkdv"})


@pytest.mark.parametrize("handle", [False, True], ids=["eager", "handle"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_positions_before_heads(template: str, handle: bool) -> None:
    """[B, S, H, D] as it lies in memory: no copy, out and gradients in the same order, and they are right."""
    options = {"TEMPLATE": template}
    attend = flexmod.compile(mask_mod=masks.causal(), kernel_options=options, layout="bshd")
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=DEVICE)
    for seed in range(4):
        views = [x.detach() for x in inputs(seed=seed)]
        tensors = [x.transpose(1, 2).contiguous().requires_grad_() for x in views]
        before = torch.cuda.memory_allocated()
        if handle:
            out = attend(*tensors)
        else:
            out = flex_attention(*tensors, block_mask=mask, kernel_options=options, layout="bshd")
        if seed == 3:  # a call that is played
            made = torch.cuda.memory_allocated() - before
            assert made < 2 * out.numel() * out.element_size()
        assert out.is_contiguous()
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, tensors, grad_out)
        leaves = [x.requires_grad_() for x in views]
        truth = flex_attention(*leaves, block_mask=mask, kernel_options=REFERENCE)
        wanted = torch.autograd.grad(truth, leaves, grad_out.transpose(1, 2))
        for found, exact in zip((out, *grads), (truth, *wanted), strict=True):
            assert found.is_contiguous() and near(found, exact.transpose(1, 2))


@torch.no_grad()
def test_counters_are_left_as_they_were() -> None:
    """Launches of many sizes on two streams at once, and graphs of them in between: every row is computed."""
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("only the forward for Hopper counts")
    cases = []
    for length in (64, 190, 1000, 5000):
        mask = create_block_mask(masks.causal(), None, None, length, length, device=DEVICE)
        case = make_case(
            q_len=length, heads=40, head_dim=64, dtype=torch.bfloat16, device=DEVICE, seed=length
        )
        wanted = flex_attention(*case.inputs, block_mask=mask, kernel_options={"TEMPLATE": "portable"})
        cases.append((case.inputs, mask, wanted))
    graph = recorded(lambda: flex_attention(*cases[2][0], block_mask=cases[2][1]))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [(flex_attention(*x, block_mask=mask), wanted) for x, mask, wanted in cases]
        graph.graph.replay()
        found.append((graph.result.clone(), cases[2][2]))
    torch.cuda.synchronize()
    assert all(near(out, wanted) for out, wanted in found)
    assert counters._kept and not any(int(counter) for counter in counters._kept.values())


@pytest.mark.parametrize("where", ["mask_mod", "score_mod"])
@pytest.mark.parametrize("template", TEMPLATES)
@torch.no_grad()
def test_a_graph_keeps_the_tiles_that_a_handle_lets_go(template: str, where: str) -> None:
    """A replay reads the tiles of its capture, after the handle has made others and memory is used again."""
    window, tensors = torch.tensor(40, device=DEVICE), inputs()

    def near_ones(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() <= window

    def far_ones(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx - kv_idx).abs() <= 40, s, -torch.inf)

    mods = (None, near_ones) if where == "mask_mod" else (far_ones, None)
    attend = flexmod.compile(*mods, kernel_options={"TEMPLATE": template})
    wanted = attend(*tensors).clone()
    out = recorded(lambda: attend(*tensors))
    window.fill_(200)
    attend(*tensors)
    attend._bound = {}
    prepared.forget()
    prepared._remembered_mask.cache_clear()
    window.fill_(40)
    garbage = [torch.full((size,), 2**30, dtype=torch.int32, device=DEVICE) for size in range(1, 4096, 7)]
    out.result.zero_()
    out.graph.replay()
    torch.cuda.synchronize()
    del garbage
    assert torch.equal(out.result, wanted) or near(out.result, wanted)


@torch.no_grad()
def test_a_mask_that_a_handle_makes_in_a_graph_is_for_the_graph_alone() -> None:
    tensors = inputs()
    warm = flexmod.compile(None, masks.sliding_window(50))
    wanted = warm(*tensors)
    attend = flexmod.compile(None, masks.sliding_window(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors)
    assert near(attend(*tensors), wanted)  # before any replay
    graph.replay()
    assert near(out, wanted)
