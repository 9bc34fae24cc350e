"""Captured tensors that are written to, replaced or moved: what a handle and a block mask keep of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexmod
from flexmod import flex_attention
from flexmod.ir.watched import Watched

LENGTH = 40
BACKENDS = {"cpu": {}, "interpret": {"BACKEND": "INTERPRET"}, "reference": {"BACKEND": "REFERENCE"}}


def documents(count: int) -> Tensor:
    return torch.arange(LENGTH) // (LENGTH // count)


def assign_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other


def assign_data_of_another_dtype(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64)


def assign_longer_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = torch.cat([other, other[:7]])


def resize(tensor: Tensor, other: Tensor) -> None:
    tensor.resize_(LENGTH + 9)[:LENGTH].copy_(other)


def through_a_view(tensor: Tensor, other: Tensor) -> None:
    tensor[:].copy_(other)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda tensor, other: tensor.copy_(other),
    "through a view": through_a_view,
    "data": assign_data,
    "data of another dtype": assign_data_of_another_dtype,
    "longer data": assign_longer_data,
    "swap": torch.utils.swap_tensors,
    "set_": lambda tensor, other: tensor.set_(other),
    "resize_": resize,
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 16, generator=generator) for _ in range(3)]


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() < 1e-5)


def truth(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias[:LENGTH]
    doc = doc[:LENGTH]
    return torch.softmax(scores.masked_fill(doc[:, None] != doc, -math.inf), -1) @ v


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_handle_sees_what_becomes_of_its_mask(backend: str, change: str) -> None:
    doc, tensors = documents(2), inputs()
    attend = flexmod.compile(
        mask_mod=lambda b, h, q, k: doc[q] == doc[k], kernel_options=BACKENDS[backend]
    )
    for count in (2, 2, 2, 5, 4, 10, 2):
        CHANGES[change](doc, documents(count))
        assert near(attend(*tensors), truth(*tensors, doc)), count
        assert near(attend(*tensors), truth(*tensors, doc)), count


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_handle_sees_what_becomes_of_its_score_mod(backend: str, change: str) -> None:
    bias, tensors = documents(2), inputs()
    attend = flexmod.compile(
        lambda s, b, h, q, k: s + bias[k] / 7 * (bias.shape[0] - LENGTH + 1),
        kernel_options=BACKENDS[backend],
    )
    one = torch.zeros(LENGTH)
    for count in (2, 2, 2, 5, 4):
        CHANGES[change](bias, documents(count))
        added = bias / 7 * (bias.shape[0] - LENGTH + 1)
        assert near(attend(*tensors), truth(*tensors, one, added)), count


@torch.no_grad()
def test_a_handle_sees_the_size_of_a_tensor_that_it_does_not_load() -> None:
    table, tensors = torch.zeros(4), inputs()
    attend = flexmod.compile(lambda s, b, h, q, k: s * table.shape[0])
    for size in (4, 4, 2, 1):
        table.data = torch.zeros(size)
        wanted = flex_attention(*tensors, lambda s, b, h, q, k, size=size: s * size)
        assert near(attend(*tensors), wanted)


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doc", documents(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.attend = flexmod.compile(self.score, self.same)

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.temperature

    def same(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.doc[q_idx] == self.doc[kv_idx]


def load(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    module.load_state_dict({"doc": doc, "temperature": temperature})


def param_data(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    module.temperature.data = temperature
    module.doc.data = doc


def rounded(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    load(module, doc, temperature)
    module.to(torch.float64 if module.temperature.dtype == torch.float32 else torch.float32)


def swapped(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(module, doc, temperature)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("change", [load, param_data, rounded, swapped])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_handle_sees_what_a_module_does(backend: str, change: Callable[..., None]) -> None:
    module, tensors = Windowed(), inputs()
    module.attend = flexmod.compile(module.score, module.same, kernel_options=BACKENDS[backend])
    for count, temperature in ((2, 1.0), (2, 1.0), (2, 1.0), (5, 2.0), (4, 0.5)):
        change(module, documents(count), torch.tensor(temperature))
        found = module.attend(*tensors)
        assert near(found, truth(tensors[0] * temperature, *tensors[1:], documents(count)))
        (grad,) = torch.autograd.grad(found.sin().sum(), module.temperature)
        t = torch.tensor(temperature, requires_grad=True)
        wanted = truth(tensors[0] * t, *tensors[1:], documents(count)).sin().sum()
        assert torch.allclose(grad.float(), torch.autograd.grad(wanted, t)[0], rtol=1e-3, atol=1e-4)


def test_what_watched_sees() -> None:
    for change in CHANGES.values():
        doc = documents(2)
        watched = Watched([doc])
        assert watched.unchanged() and watched.unchanged()
        change(doc, documents(5))
        assert not watched.unchanged()
    with torch.inference_mode():
        uncounted = documents(2)
    assert not Watched([uncounted]).unchanged()


def test_an_address_that_is_used_again() -> None:
    """The memory is kept while it is watched: no other tensor can be taken for it."""
    doc = torch.zeros(1 << 16)
    watched = Watched([doc])
    for _ in range(20):
        doc.data = torch.ones(1)
        doc.data = torch.zeros(1 << 16)
        assert not watched.unchanged()


@torch.no_grad()
def test_memory_of_stale_masks_is_let_go() -> None:
    doc, tensors = documents(2), inputs()
    attend = flexmod.compile(mask_mod=lambda b, h, q, k: doc[q] == doc[k])
    for count in (2, 4, 5, 10) * 2:
        doc.data = documents(count)
        for length in (LENGTH, LENGTH // 2):
            attend(*(x[:, :, :length] for x in tensors))
            attend(*(x[:, :, :length] for x in tensors))
    (variant,) = attend._on.values()
    assert len(variant._masks._by_sizes) == len(attend._bound) == 2
    assert len({id(bound.watched) for bound in attend._bound.values()}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_a_handle_stay(backend: str) -> None:
    cap = 2.0

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * cap

    tensors = inputs()
    attend = flexmod.compile(score_mod, kernel_options=BACKENDS[backend])
    wanted = attend(*tensors)
    cap = 3.0
    assert torch.equal(attend(*tensors), wanted)
