"""[B, S, H, D] by layout="bshd": the results of views, and nothing is copied on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flexmod
from flexmod import AuxRequest, create_block_mask, errors, flex_attention, masks, mods
from flexmod.backends import arguments, hopper
from flexmod.calls import library
from flexmod.runtime import launch
from flexmod.runtime.plan import fixed

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}
M, N = 21, 25


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[2, M, 4, 16], [2, N, 2, 16], [2, N, 2, 8]"""
    shapes = ((2, M, 4, 16), (2, N, 2, 16), (2, N, 2, 8))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, options: Any = None, **other: Any) -> Any:
    mask = create_block_mask(masks.causal(), None, None, M, N, device="cpu", BLOCK_SIZE=16)
    given = {"enable_gqa": True, "kernel_options": options, **other}
    return flex_attention(q, k, v, mods.alibi(4), mask, **given)


@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"])
def test_results_gradients_and_storage(options: Any) -> None:
    tensors = inputs()
    views = [x.transpose(1, 2) for x in tensors]
    out, aux = attend(*tensors, options, layout="bshd", return_aux=AuxRequest(True, True))
    wanted, lse = attend(*views, options, return_lse=True)
    assert out.shape == (2, M, 4, 8) and out.is_contiguous()
    assert torch.equal(out, wanted.transpose(1, 2)) and torch.equal(aux.lse, lse)
    assert aux.lse.shape == aux.max_scores.shape == (2, 4, M)
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad((out, aux.lse), tensors, (grad_out, torch.ones_like(lse)))
    truth = torch.autograd.grad((wanted, lse), tensors, (grad_out.transpose(1, 2), torch.ones_like(lse)))
    assert all(map(torch.equal, found, truth))


@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"])
def test_the_output_lies_as_query_does(options: Any) -> None:
    """Whatever the layout says: [B, H, S, D] storage seen as [B, S, H, D], and parts of a projection."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    out = attend(q, k, v, options, layout="bshd")
    assert out.transpose(1, 2).is_contiguous() and not out.is_contiguous()
    packed = torch.randn(2, N, 3, 4, 16)
    out = flex_attention(*packed.unbind(2), layout="bshd", kernel_options=options)
    assert out.is_contiguous()
    wanted = flex_attention(*(x.transpose(1, 2) for x in packed.unbind(2)), kernel_options=REFERENCE)
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_kernels_get_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is given is the caller's memory, and what it writes is what the caller gets."""
    launches: list[dict[str, Any]] = []
    start = launch.start
    monkeypatch.setattr(launch, "start", lambda *given: launches.append(dict(given[-1])) or start(*given))
    q, k, v = inputs()
    out = attend(q, k, v, INTERPRET, layout="bshd")
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    named = {"Q": q, "K": k, "V": v, "OUT": out, "GRAD_OUT": grad_out}
    named |= dict(zip(("GRAD_Q", "GRAD_K", "GRAD_V"), grads, strict=True))
    seen: dict[str, set[int]] = {}
    for given in launches:
        for name in named.keys() & given.keys():
            seen.setdefault(name, set()).add(given[name].data_ptr())
            assert given[name].shape == named[name].transpose(1, 2).shape
            assert given[name].stride() == named[name].transpose(1, 2).stride()
    assert seen == {name: {tensor.data_ptr()} for name, tensor in named.items()}


def test_the_tma_unit_addresses_it() -> None:
    """Views of [B, S, H, D] storage are what Hopper's kernels take; and so is what comes out."""
    q, k, v = (torch.empty(2, 50, 4, 64, dtype=torch.float16).transpose(1, 2) for _ in range(3))
    assert hopper.call_obstacle(q, k, v) is None
    strides = arguments.strides_in_order(q.shape, 64, arguments.order_of(q))
    out = torch.empty_strided(q.shape, strides, dtype=q.dtype)
    descriptor = hopper.tiles(fixed("out", out), 64, 64)
    assert out.transpose(1, 2).is_contiguous() and hopper.addressable(out)
    assert (descriptor.shape, descriptor.strides) == ((2, 4, 50, 64), (50 * 256, 64, 256, 1))


def test_a_handle() -> None:
    q, k, v = inputs()
    handle = flexmod.compile(mods.alibi(4), masks.causal(), enable_gqa=True, layout="bshd")
    out, lse = handle(q, k, v, return_lse=True)
    wanted, wanted_lse = attend(q, k, v, return_lse=True, layout="bshd")
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    with pytest.raises(errors.LayoutError):
        flexmod.compile(layout="sbhd")  # type: ignore[arg-type]
    with pytest.raises(errors.LengthMismatch) as raised:
        handle(q, k, v[:, 1:])
    assert "(dimension 1 of layout 'bshd')" in str(raised.value)
    with pytest.raises(errors.NoStandaloneError) as refused:
        handle.save("mine.py")
    assert str(refused.value) == (
        "this handle cannot be saved as a file of its own: its layout is 'bshd', and a file takes [batch, "
        "heads, length, head_dim].\n"
        "  Instead: save a handle without layout, and give the file's attention views, x.transpose(1, 2)."
    )


@pytest.mark.parametrize(
    "options", [pytest.param(None, marks=pytest.mark.long), INTERPRET], ids=["cpu", "interpret"]
)
def test_in_a_compiled_graph(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, and what the interpreted kernels write is what the graph goes on with."""

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k, v, options, layout="bshd").flatten(2) * 3

    placed: list[bool] = []
    of = library._ResultLayout.of

    def laid_out(layout: Any, found: Tensor | None, like: Tensor) -> Tensor:
        if found is not None:
            placed.append(found.stride() == tuple(layout.strides))
        return of(layout, found, like)

    monkeypatch.setattr(library._ResultLayout, "of", laid_out)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    tensors = inputs()
    found, wanted = compiled(*tensors), block(*tensors)
    assert torch.equal(found, wanted) and counter.frame_count == 1
    grads = [torch.autograd.grad(out.sin().sum(), tensors) for out in (found, wanted)]
    assert all(map(torch.equal, *grads))
    assert placed and (all(placed) or options is None)


@pytest.mark.long
def test_a_mistake_in_a_compiled_graph() -> None:
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, layout="bshd"), backend="eager")
    q, k, v = inputs()
    with pytest.raises(errors.LengthMismatch):
        compiled(q, k, v[:, 1:])
