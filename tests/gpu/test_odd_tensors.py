"""Tensors that are not plain, on a GPU: no kernel gets memory that is not theirs, and the device survives.

The kinds are in tests/odd_tensors.py. Each test ends with a plain call: after an illegal memory access it
would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import odd_tensors as odd
import pytest
import torch
from reference_case import make_case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import flexmod
from flexmod import create_block_mask, errors, flex_attention, masks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
LENGTH = 256
PLACES = ("query", "key", "value", "bias")
TEMPLATES = pytest.mark.parametrize("template", ["portable", "auto"])
NAMED = (
    errors.TensorKindError, errors.FreedStorageError, errors.NestedTensorInput, errors.NotStrided,
    errors.UnsupportedDtype, errors.ModDtypeError, errors.DeviceMismatch,
)  # fmt: skip


@pytest.fixture(autouse=True)
def the_device_survives() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    tensors = list(given().values())[:3]
    assert torch.isfinite(flex_attention(*tensors)).all()


def given() -> dict[str, Tensor]:
    case = make_case(q_len=LENGTH, heads=4, head_dim=64, dtype=torch.bfloat16, device=DEVICE, seed=0)
    bias = torch.linspace(-1, 1, LENGTH, device=DEVICE)
    return {**dict(zip(PLACES, case.inputs, strict=False)), "bias": bias}


def attended(form: str, template: str, **changed: Tensor) -> Any:
    parts = given() | changed
    bias = parts["bias"]

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    options = {"TEMPLATE": template}
    tensors = parts["query"], parts["key"], parts["value"]
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=DEVICE)
    if form == "handle":
        return flexmod.compile(biased, kernel_options=options)(*tensors, mask)
    return flex_attention(*tensors, biased, mask, kernel_options=options)


@TEMPLATES
@pytest.mark.parametrize("form", ["eager", "handle"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", odd.TAKEN)
def test_dispatched_or_read(kind: str, place: str, form: str, template: str) -> None:
    wanted = attended(form, template)
    found = attended(form, template, **{place: odd.TAKEN[kind](given()[place])})
    torch.testing.assert_close(odd.plain(found), wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [kind for kind in odd.REFUSED if kind not in ("mkldnn", "quantized", "csr")])
def test_refused(kind: str, place: str) -> None:
    changed = {place: odd.REFUSED[kind](given()[place])}
    for form in ("eager", "handle"):
        with pytest.raises(NAMED):
            attended(form, "auto", **changed)


def gradients(made: Callable[[Tensor], Tensor], template: str) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in given().values()]
    tensors = [made(x) for x in leaves]
    bias = tensors[3]
    out = flex_attention(
        *tensors[:3], lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx], kernel_options={"TEMPLATE": template}
    )
    places = [x if x.is_leaf else leaf for x, leaf in zip(tensors, leaves, strict=True)]
    return [odd.plain(x).float() for x in torch.autograd.grad(out.float().square().sum(), places)]


@TEMPLATES
@pytest.mark.parametrize("kind", [kind for kind in odd.TAKEN if kind != "functional"])
def test_gradients(kind: str, template: str) -> None:
    wanted, found = gradients(lambda x: x, template), gradients(odd.TAKEN[kind], template)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@TEMPLATES
@pytest.mark.parametrize("form", ["eager", "handle"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [0, 64])
def test_storage_that_shrinks_after_a_recorded_call(size: int, place: str, form: str, template: str) -> None:
    parts = given()
    bias, options = parts["bias"], {"TEMPLATE": template}

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    handle = flexmod.compile(biased, kernel_options=options)

    def run() -> Any:
        tensors = parts["query"], parts["key"], parts["value"]
        if form == "handle":
            return handle(*tensors)
        return flex_attention(*tensors, biased, kernel_options=options)

    for _ in range(4):
        run()
    torch.cuda.synchronize()
    parts[place].untyped_storage().resize_(size)
    with pytest.raises(errors.FreedStorageError):
        run()


@TEMPLATES
@pytest.mark.parametrize("made", [odd.freed, odd.shrunk, odd.Wrapper, odd.Stored])
def test_gradients_of_the_output_of_other_kinds(made: Callable[[Tensor], Tensor], template: str) -> None:
    query, key, value, _ = given().values()
    out = flex_attention(query.requires_grad_(), key, value, kernel_options={"TEMPLATE": template})
    ones = torch.ones_like(out)
    for _ in range(3):
        torch.autograd.grad(out, query, ones, retain_graph=True)
    with pytest.raises((errors.TensorKindError, errors.FreedStorageError)):
        torch.autograd.grad(out, query, made(ones))


def test_saved_and_then_freed() -> None:
    query, key, value, _ = given().values()
    out = flex_attention(query.requires_grad_(), key, value)
    torch.cuda.synchronize()
    key.untyped_storage().resize_(0)
    with pytest.raises(errors.FreedStorageError):
        out.sum().backward()


@pytest.mark.parametrize("made", [odd.Wrapper, odd.Stored, odd.freed])
def test_what_a_mask_captures(made: Callable[[Tensor], Tensor]) -> None:
    documents = made(torch.arange(LENGTH, device=DEVICE) // 100)
    with pytest.raises((errors.TensorKindError, errors.FreedStorageError)):
        create_block_mask(
            lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx],
            None, None, LENGTH, LENGTH, device=DEVICE,
        )  # fmt: skip


def test_a_wrapper_of_two_compiled() -> None:
    query, key, value, _ = given().values()
    wanted = [flex_attention(query * by, key * by, value * by) for by in (1, 2)]
    compiled = torch.compile(flex_attention, fullgraph=True)
    for attend in (flex_attention, compiled):
        found = attend(*(TwoTensor(x, x * 2) for x in (query, key, value)))
        torch.testing.assert_close([found.a, found.b], wanted, rtol=0, atol=1e-2)


def test_a_wrapper_of_a_tensor_elsewhere() -> None:
    lie = odd.Wrapper(given()["key"].cpu(), device=DEVICE)
    with pytest.raises(errors.DeviceMismatch):
        attended("eager", "auto", key=lie)


def test_fake_tensors_and_make_fx() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=DEVICE)
        return flex_attention(query, key, value, None, mask)

    tensors = list(given().values())[:3]
    wanted = attend(*tensors)
    with FakeTensorMode() as mode:
        fake = attend(*map(mode.from_tensor, tensors))
    assert (fake.shape, fake.stride(), fake.device) == (wanted.shape, wanted.stride(), wanted.device)
    recorded = make_fx(attend)(*tensors)
    doubled = [x * 2 for x in tensors]
    torch.testing.assert_close(recorded(*doubled), attend(*doubled), rtol=0, atol=1e-2)


def test_distributed_tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tensors = list(given().values())[:3]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,))
        spread = [distribute_tensor(x, mesh, [Replicate()]) for x in tensors]
        with pytest.raises(NotImplementedError, match=r"flexmod\.attention\.default"):
            flex_attention(*spread)
        assert torch.isfinite(flex_attention(*(x.to_local() for x in spread))).all()
    finally:
        torch.distributed.destroy_process_group()
