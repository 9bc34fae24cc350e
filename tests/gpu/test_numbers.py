"""0-d CPU tensors in calls on a GPU: read by each call, in recorded ones too; captures that are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexmod
from flexmod import create_block_mask, errors, flex_attention, masks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
LENGTH = 320
OPTIONS = {"portable": {"TEMPLATE": "portable"}, "auto": {}, "reference": {"BACKEND": "REFERENCE"}}
TEMPLATES = ["portable", "auto"]
WAYS = ["eager", "handle"]

SCORES: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "before": lambda t: lambda s, b, h, q, k: t * s,
    "mul": lambda t: lambda s, b, h, q, k: torch.mul(s, t),
    "where": lambda t: lambda s, b, h, q, k: torch.where(q - k >= 30, s, t),
    "minimum": lambda t: lambda s, b, h, q, k: torch.minimum(t, s),
    "soft cap": lambda t: lambda s, b, h, q, k: t * torch.tanh(s / t),
    "float64": lambda t: lambda s, b, h, q, k: (s * t.double()).float(),
    "an element": lambda t: lambda s, b, h, q, k: t.view(1)[0] * s,
    "item": lambda t: lambda s, b, h, q, k: s * t.item(),
    "-inf": lambda t: lambda s, b, h, q, k: torch.where((q - k).abs() <= 50 * t, s, -math.inf),
}


def inputs(grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, 4, LENGTH, 64, generator=generator) for _ in range(3)]
    return [x.to(DEVICE, dtype).requires_grad_(grad) for x in made]


def truth(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None, mask_mod: Any = None) -> Tensor:
    """Attention in float64, with the mods as plain functions of torch."""
    q, k, v = q.double(), k.double(), v.double()
    sizes = (1, 4, LENGTH, LENGTH)
    places = [
        torch.arange(size, device=DEVICE).view([-1 if axis == own else 1 for axis in range(4)])
        for own, size in enumerate(sizes)
    ]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if score_mod is not None:
        scores = score_mod(scores, *places).double()
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), -math.inf)
    return torch.softmax(scores, -1) @ v


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm())


def attention(way: str, options: Any, score_mod: Any = None) -> Callable[..., Any]:
    """A function of tensors and a block mask."""
    if way == "handle":
        return flexmod.compile(score_mod, kernel_options=options)

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any = None) -> Any:
        return flex_attention(q, k, v, score_mod, block_mask, kernel_options=options)

    return attend


def window_mask(window: Tensor) -> tuple[Callable[..., Any], Any]:
    def near_ones(b: Any, h: Any, q: Any, k: Any) -> Any:
        return window >= (q - k).abs()

    return near_ones, create_block_mask(near_ones, None, None, LENGTH, LENGTH, DEVICE)


@pytest.mark.parametrize("form", SCORES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_each_call_reads_the_number(options: str, way: str, form: str, direct: list[Any]) -> None:
    t = torch.tensor(1.5)
    attend = attention(way, OPTIONS[options], SCORES[form](t))
    tensors = inputs()
    for value in (1.5, 1.5, 1.5, 3.0, 0.5, 2.0):
        t.fill_(value)
        assert near(attend(*tensors), truth(*tensors, SCORES[form](t))), value
    assert direct or options == "reference" or form in ("float64", "an element", "item", "-inf")


@pytest.mark.parametrize("form", ["before", "soft cap", "where"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_number_on_the_cpu_learns(options: str, way: str, form: str) -> None:
    """The gradient arrives on the CPU, by the number that the forward had."""
    t = nn.Parameter(torch.tensor(1.5))
    attend = attention(way, OPTIONS[options], SCORES[form](t))
    tensors = inputs(True, torch.float32)
    grad_out = torch.randn_like(tensors[0])
    optimizer = torch.optim.SGD([t], lr=0.01)
    for _ in range(5):
        found, wanted = attend(*tensors), truth(*tensors, SCORES[form](t))
        assert near(found, wanted)
        expected = torch.autograd.grad(wanted, (*tensors, t), grad_out.double())
        grads = torch.autograd.grad(found, (*tensors, t), grad_out)
        assert grads[-1].device.type == "cpu" and grads[-1].shape == ()
        for one, other in zip(grads, expected, strict=True):
            assert near(one, other), (one, other)
        t.grad = torch.tensor(20.0)
        optimizer.step()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_backward_has_the_number_of_its_forward(template: str) -> None:
    t, tensors = torch.tensor(2.0), inputs(grad=True)
    window = torch.tensor(40)
    mask_mod, mask = window_mask(window)
    for value in (2.0, 3.0, 1.0, 2.0, 0.5):
        t.fill_(value)
        window.fill_(int(20 * value))
        found = flex_attention(*tensors, SCORES["before"](t), mask, kernel_options={"TEMPLATE": template})
        wanted = truth(*tensors, SCORES["before"](t), mask_mod)
        grad_out = torch.randn_like(found)
        expected = torch.autograd.grad(wanted, tensors, grad_out.double())
        t.fill_(100.0)
        window.fill_(3)
        assert all(map(near, torch.autograd.grad(found, tensors, grad_out), expected)), value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_a_mask_reads_its_number(options: str, way: str, direct: list[Any]) -> None:
    """The kernels of partial tiles, and the tiles, which are found again."""
    window, tensors = torch.tensor(40), inputs()
    mask_mod, mask = window_mask(window)
    attend = attention(way, OPTIONS[options])
    of_mask = flexmod.compile(mask_mod=mask_mod, kernel_options=OPTIONS[options])
    for value in (40, 40, 40, 200, 200, 5, 5, 5, 70):
        window.fill_(value)
        wanted = truth(*tensors, None, mask_mod)
        assert near(attend(*tensors, mask), wanted), value
        assert near(of_mask(*tensors), wanted), value
        fresh = create_block_mask(
            masks.sliding_window(value + 1, causal=False), None, None, LENGTH, LENGTH, DEVICE
        )
        assert torch.equal(mask.table(), fresh.table())
        assert str(mask).splitlines()[1:] == str(fresh).splitlines()[1:]
        assert torch.equal((~mask).table(), (~fresh).table())
    assert direct or options == "reference"


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_nothing_waits_for_the_device(way: str) -> None:
    t, window, tensors = torch.tensor(2.0), torch.tensor(40), inputs()
    mask_mod, mask = window_mask(window)
    attend = attention(way, {}, SCORES["before"](t))
    for _ in range(4):
        attend(*tensors, mask)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        t.fill_(3.0)
        attend(*tensors, mask)
        window.fill_(30)
        found = attend(*tensors, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert near(found, truth(*tensors, SCORES["before"](t), mask_mod))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("template", TEMPLATES)
@torch.no_grad()
def test_a_graph_keeps_the_number_that_it_was_captured_with(template: str, way: str) -> None:
    """One on the GPU is read by each replay."""
    t, window, on_gpu = torch.tensor(2.0), torch.tensor(40), torch.tensor(1.0, device=DEVICE)
    tensors = inputs()
    mask_mod, mask = window_mask(window)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return t * s + on_gpu * torch.sin(q - k)

    attend = attention(way, {"TEMPLATE": template}, score_mod)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            attend(*tensors, mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors, mask)
    for value in (1.0, 2.0, 3.0):
        on_gpu.fill_(value)
        graph.replay()
        t.fill_(2.0)
        window.fill_(40)
        assert near(out, truth(*tensors, score_mod, mask_mod))
        t.fill_(7.0)
        window.fill_(90)
    assert near(attend(*tensors, mask), truth(*tensors, score_mod, mask_mod))


@torch.no_grad()
def test_a_graph_keeps_the_tiles_that_it_reads() -> None:
    """A call after the capture finds other tiles; the memory of the old ones is not given away."""
    doc, tensors = documents(2), inputs()
    mask = create_block_mask(lambda b, h, q, k: doc[q] == doc[k], None, None, LENGTH, LENGTH, DEVICE)
    wanted = truth(*tensors, None, lambda b, h, q, k: doc[q] == doc[k])
    for _ in range(3):
        flex_attention(*tensors, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(*tensors, block_mask=mask)
    for count in (5, 10):
        doc.copy_(documents(count))
        flex_attention(*tensors, block_mask=mask)
    filled = [torch.full((64,), -1, dtype=torch.int32, device=DEVICE) for _ in range(1000)]
    doc.copy_(documents(2))
    graph.replay()
    assert near(out, wanted)
    del filled


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_read_the_number(backend: str) -> None:
    """Inputs of the graph; a mask made inside is built of the number at each call."""
    torch._dynamo.reset()
    t, window = nn.Parameter(torch.tensor(1.5)), torch.tensor(40)
    score_mod = SCORES["before"](t)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return window >= (q - k).abs()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, q.device)
        return flex_attention(q, k, v, score_mod, mask)

    outside = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, DEVICE)
    inside = torch.compile(attend, backend=backend, fullgraph=True)
    given = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod, outside), backend=backend, fullgraph=True
    )
    tensors = inputs(True, torch.float32)
    for value in (1.5, 3.0, 0.5):
        with torch.no_grad():
            t.fill_(value)
        wanted = truth(*tensors, score_mod, mask_mod)
        grad_out = torch.randn_like(tensors[0])
        expected = torch.autograd.grad(wanted, (*tensors, t), grad_out.double())
        for function in (inside, given):
            found = function(*tensors)
            assert near(found, wanted), value
            grads = torch.autograd.grad(found, (*tensors, t), grad_out)
            assert grads[-1].device.type == "cpu"
            assert all(map(near, grads, expected)), value
    for size in (100, 20):
        window.fill_(size)
        assert near(inside(*tensors), truth(*tensors, score_mod, mask_mod)), size


def test_tensors_with_dimensions_stay_refused() -> None:
    slopes, doc, tensors = torch.rand(4), torch.zeros(LENGTH), inputs()
    with pytest.raises(errors.DeviceMismatch, match="slopes"):
        flex_attention(*tensors, lambda s, b, h, q, k: s * slopes[h])
    with pytest.raises(errors.DeviceMismatch, match="doc"):
        create_block_mask(lambda b, h, q, k: doc[q] == doc[k], None, None, LENGTH, LENGTH, DEVICE)
    one = torch.tensor(2.0, device=DEVICE)
    with pytest.raises(errors.DeviceMismatch, match="one"):
        flex_attention(*(x.cpu().float() for x in tensors), lambda s, b, h, q, k: s * one)
    window = torch.tensor(4.0, requires_grad=True)
    with pytest.raises(errors.MaskCaptureGradientError, match="window"):
        flex_attention(*inputs(grad=True), block_mask=window_mask(window)[1])


# captures that are written to, or replaced


def documents(count: int) -> Tensor:
    return torch.arange(LENGTH, device=DEVICE) // (LENGTH // count)


def assign_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other


def assign_data_of_another_dtype(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda tensor, other: tensor.copy_(other),
    "data": assign_data,
    "data of another dtype": assign_data_of_another_dtype,
    "swap": torch.utils.swap_tensors,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("template", TEMPLATES)
@torch.no_grad()
def test_what_becomes_of_captured_tensors_is_seen(template: str, change: str, direct: list[Any]) -> None:
    doc, tensors = documents(2), inputs()

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return doc[q] == doc[k]

    options = {"TEMPLATE": template}
    attend = flexmod.compile(mask_mod=same, kernel_options=options)
    biased = flexmod.compile(lambda s, b, h, q, k: s + doc[k], kernel_options=options)
    mask = create_block_mask(same, None, None, LENGTH, LENGTH, DEVICE)
    for count in (2, 2, 2, 5, 5, 5, 10, 4):
        CHANGES[change](doc, documents(count))
        wanted = truth(*tensors, None, same)
        assert near(attend(*tensors), wanted), count
        assert near(flex_attention(*tensors, block_mask=mask, kernel_options=options), wanted), count
        assert near(biased(*tensors), truth(*tensors, lambda s, b, h, q, k: s + doc[k])), count
    assert direct


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.attend = flexmod.compile(lambda s, b, h, q, k: s * self.temperature)


def test_a_handle_in_a_module_that_moves() -> None:
    """Its number is on the CPU, on the GPU, and on the CPU again."""
    module, tensors = Temperature(), inputs(grad=True)
    for place in ("cpu", "cpu", "cuda", "cuda", "cpu"):
        module.to(place)
        for value in (1.0, 2.0, 3.0):
            module.load_state_dict({"temperature": torch.tensor(value)})
            found = module.attend(*tensors)
            wanted = truth(*tensors, lambda s, b, h, q, k: s * module.temperature)
            assert near(found, wanted)
            found.sum().backward()
            grad = module.temperature.grad
            assert grad is not None and grad.device.type == place
            module.temperature.grad = None


ENDS = [torch.tensor(value, dtype=torch.int32) for value in (2**31 - 1, 2**31 - 6, -(2**31))]
SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "i + t >= j": lambda t, i, j: i + t >= j,
    "i >= j - t": lambda t, i, j: i >= j - t,
    "i * t >= j": lambda t, i, j: i * t >= j,
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", SUMS)
def test_numbers_at_the_ends_of_int32(name: str, template: str) -> None:
    """Arithmetic with a captured int32 wraps as torch's: in the kernels and in the builder's bounds."""
    length = 64
    zeros = torch.zeros(1, 1, length, 64, device=DEVICE, dtype=torch.bfloat16)
    ones = torch.eye(length, device=DEVICE, dtype=torch.bfloat16).view(1, 1, length, length)
    i, j = (torch.arange(length, dtype=torch.int32, device=DEVICE).view(shape) for shape in ((-1, 1), (-1,)))
    for number in ENDS:
        wanted = SUMS[name](number.to(DEVICE).expand(1, 1), i, j).expand(length, length)
        for captured in (number, number.to(DEVICE)):

            def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, t: Tensor = captured) -> Any:
                return SUMS[name](t, q_idx, kv_idx)

            mask = create_block_mask(mask_mod, None, None, length, length, device=DEVICE, BLOCK_SIZE=16)
            handle = flexmod.compile(None, mask_mod, kernel_options=OPTIONS[template])
            for out in (
                flex_attention(zeros, zeros, ones, block_mask=mask, kernel_options=OPTIONS[template]),
                handle(zeros, zeros, ones),
            ):
                assert isinstance(out, Tensor)
                assert torch.equal(out[0, 0] > 0, wanted)
