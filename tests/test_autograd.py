"""flex_attention as a citizen of torch.autograd: graphs, hooks, checkpoints, threads, second derivatives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from biased_attention import DOCUMENTS, LENGTH, BiasedAttention
from reference_case import make_case
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flexmod import AuxRequest, backends, create_block_mask, errors, flex_attention, mods
from flexmod.codegen import render
from flexmod.runtime import launch

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}
KERNELS = pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
HEADS = 2


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


MASK = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.requires_grad_() for x in make_case(q_len=LENGTH, heads=HEADS, dtype=dtype).inputs)
    return q, k, v


def equal(found: Any, wanted: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Names of the kernels that run."""
    names: list[str] = []
    start = launch.start

    def watch(kernels: Any, name: str, *arguments: Any) -> int:
        names.append(name)
        return start(kernels, name, *arguments)

    with mock.patch("flexmod.runtime.launch.start", watch):
        yield names


# Second derivatives


@KERNELS
def test_a_second_derivative_is_refused_when_it_is_taken(options: Any) -> None:
    """create_graph alone is fine: the first derivative is as without it, and a part of further graphs."""
    q, k, v = inputs()
    out = flex_attention(q, k, v, soft_cap, MASK, kernel_options=options)
    plain = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    gradients = torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)
    assert equal(gradients, plain)
    backend = "INTERPRET" if options else "CPU"
    with pytest.raises(errors.DoubleBackwardError, match=f"the {backend} backend has the first alone"):
        gradients[0].square().sum().backward()


def test_a_second_derivative_by_what_came_in_is_refused_too() -> None:
    q, k, v = inputs()
    weight = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad((flex_attention(q, k, v) * weight).sum(), q, create_graph=True)
    with pytest.raises(errors.DoubleBackwardError):
        torch.autograd.grad(gradient.sum(), weight)


def test_a_gradient_penalty_by_the_reference() -> None:
    """The gradient of a squared gradient, by q, k, v and a captured tensor, beside finite differences."""
    q, k, v = (x[:, :, :5, :2].detach().requires_grad_() for x in inputs(torch.float64))
    slopes = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx != 2), None, None, 5, 5)

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flex_attention(
            *x[:3], mods.alibi(x[3]), mask, return_lse=True, kernel_options=REFERENCE
        )  # fmt: skip
        return out, torch.exp(lse)

    assert torch.autograd.gradgradcheck(call, (q, k, v, slopes))


# Graphs


@KERNELS
def test_two_backwards_of_one_graph(options: Any) -> None:
    q, k, v = inputs()
    out = flex_attention(q, k, v, soft_cap, MASK, kernel_options=options)
    out.sum().backward(retain_graph=True)
    once = [x.grad.clone() for x in (q, k, v)]
    out.sum().backward()
    assert equal([x.grad for x in (q, k, v)], [2 * x for x in once])
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@KERNELS
def test_gradients_of_micro_batches_add_up(options: Any) -> None:
    """As in data-parallel training with accumulation: `.grad` holds the sum over several calls."""
    parts = [make_case(q_len=LENGTH, seed=seed).inputs for seed in (1, 2)]
    weight = torch.eye(16).requires_grad_()

    def loss(part: tuple[Tensor, ...]) -> Tensor:
        q, k, v = part
        return flex_attention(q @ weight, k @ weight, v, None, MASK, kernel_options=options).square().sum()

    for part in parts:
        loss(part).backward()
    accumulated, weight.grad = weight.grad, None
    sum(map(loss, parts)).backward()
    torch.testing.assert_close(accumulated, weight.grad)


@KERNELS
@pytest.mark.parametrize("number", [0, 1, 2], ids=["query", "key", "value"])
def test_an_input_that_changes_before_the_backward_is_refused(options: Any, number: int) -> None:
    q, k, v = (x.detach() + 0 * x for x in inputs())
    out = flex_attention(q, k, v, kernel_options=options)
    (q, k, v)[number].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@KERNELS
@pytest.mark.parametrize("result", ["out", "lse"])
def test_a_result_that_changes_before_the_backward_is_refused(options: Any, result: str) -> None:
    """At once for a view, otherwise in the backward."""
    q, k, v = inputs()
    out, lse = flex_attention(q, k, v, return_lse=True, kernel_options=options)
    with pytest.raises(RuntimeError, match="modified inplace|modified by an inplace operation"):
        (out if result == "out" else lse).mul_(2.0)
        (out.sum() + lse.sum()).backward()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_only_the_kernels_that_are_needed(wanted: str, launched: list[str]) -> None:
    q, k, v = tensors = [
        x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs(), strict=True)
    ]
    flex_attention(q, k, v, soft_cap, MASK, kernel_options=INTERPRET).sum().backward()
    assert [name for name, x in zip("qkv", tensors, strict=True) if x.grad is not None] == list(wanted)
    assert ("dq_kernel" in launched) == ("q" in wanted)
    assert ("dkdv_kernel" in launched) == ("k" in wanted or "v" in wanted)


@KERNELS
def test_a_backward_in_another_thread(options: Any) -> None:
    q, k, v = inputs()
    out = flex_attention(q, k, v, soft_cap, MASK, kernel_options=options)
    plain = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out.sum(), (q, k, v))))
    thread.start()
    thread.join()
    assert equal(found, plain)


def test_calls_in_several_threads_at_once() -> None:
    q, k, v = inputs()
    plain = torch.autograd.grad(flex_attention(q, k, v, soft_cap, MASK).sum(), (q, k, v))
    found: list[Any] = [None] * 4

    def train(number: int) -> None:
        found[number] = torch.autograd.grad(flex_attention(q, k, v, soft_cap, MASK).sum(), (q, k, v))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(gradients, plain) for gradients in found)


# What is saved


@KERNELS
def test_saved_tensors_go_through_the_hooks(options: Any) -> None:
    """Those of a user who keeps them elsewhere: what comes back is another tensor with the same numbers."""
    q, k, v = inputs()
    table = torch.linspace(0.5, 1.5, LENGTH)
    shapes: list[torch.Size] = []

    def pack(x: Tensor) -> Any:
        shapes.append(x.shape)
        return x.numpy(force=True).copy()

    def attend() -> Tensor:
        return flex_attention(
            q, k, v, lambda s, b, h, q_idx, kv_idx: s * table[q_idx], MASK, kernel_options=options
        )

    plain = torch.autograd.grad(attend().sum(), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        out = attend()
    assert {q.shape, out.shape[:3], table.shape} <= set(shapes)
    assert equal(torch.autograd.grad(out.sum(), (q, k, v)), plain)


@pytest.mark.parametrize("dispatched", [False, True])
@KERNELS
def test_hooks_may_change_strides(options: Any, dispatched: bool) -> None:
    """Of the log-sum-exp and of a mask's tiles too, of which kernels take no strides."""
    q, k, v = inputs()
    mask_mod = lambda b, h, q_idx, kv_idx: q_idx + 17 * h >= kv_idx  # noqa: E731
    mask = create_block_mask(mask_mod, None, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def pack(x: Tensor) -> Tensor:
        return x.detach().mT.contiguous().mT if x.dim() > 1 else x

    def gradients(*around: Any) -> Any:
        with ExitStack() as stack:
            for context in around:
                stack.enter_context(context)
            out, lse = flex_attention(q, k, v, soft_cap, mask, return_lse=True, kernel_options=options)
        return torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v))

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    mode = FlopCounterMode(display=False) if dispatched else nullcontext()
    assert equal(gradients(hooks, mode), gradients())


def test_captured_tensors_live_in_the_saved_ones_alone() -> None:
    """A bias that was computed on the way is freed where hooks, or a checkpoint, let go of it."""
    q, k, v = inputs()
    bias = torch.randn(LENGTH, LENGTH)
    copies = []

    def pack(x: Tensor) -> int:
        copies.append(x.detach().clone())
        return len(copies) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, copies.__getitem__):
        out = flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx, t=bias: s + t[q_idx, kv_idx], MASK)
    watch = weakref.ref(bias)
    del bias
    assert watch() is None
    out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@KERNELS
def test_without_gradients_nothing_is_made_for_them(options: Any, mode: Any, launched: list[str]) -> None:
    """No backward kernel is rendered, no node, nothing saved, nothing kept."""
    q, k, v = inputs()
    slopes = torch.rand(HEADS, requires_grad=True)
    kept: list[Any] = []
    backend = backends.backend("interpret" if options else "cpu")
    forward = type(backend).forward
    rendered: list[bool] = []
    render_text = render.render

    def watch(*arguments: Any, **given: Any) -> Any:
        kept.append(given.get("keep"))
        return forward(*arguments, **given)

    def watch_render(spec: Any, *arguments: Any, **given: Any) -> str:
        rendered.append(spec.backward)
        return render_text(spec, *arguments, **given)

    refuse = mock.Mock(side_effect=AssertionError("something was saved"))
    with (
        mock.patch.object(type(backend), "forward", watch),
        mock.patch("flexmod.codegen.compiler.render", watch_render),
        mock.patch("flexmod.calls.autograd.Attention.apply", refuse),
        torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
        mode(),
    ):
        out = flex_attention(
            q, k, v, lambda s, b, h, q_idx, kv_idx: s * 1.25 + slopes[h], MASK, kernel_options=options
        )
    assert not out.requires_grad and out.grad_fn is None
    assert kept == [False]
    assert set(launched) <= {"forward_kernel"} and not any(rendered)


# Checkpoints


def block(x: Tensor, weight: Tensor, slopes: Tensor | None, options: Any = None) -> Tensor:
    """Attention between two matrix products, on x [1, HEADS, LENGTH, 16]."""
    projected = x @ weight
    score_mod = soft_cap if slopes is None else mods.alibi(slopes)
    return flex_attention(projected, x, projected, score_mod, MASK, kernel_options=options) @ weight


def gradients(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Into `.grad`, as checkpoints with use_reentrant=True want it."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    run(*leaves).square().sum().backward()
    return [x.grad for x in leaves]  # type: ignore[misc]


def some_leaves() -> list[Tensor]:
    return [inputs()[0], torch.eye(16).add(0.1).requires_grad_(), torch.rand(HEADS).requires_grad_()]


@KERNELS
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(options: Any, reentrant: bool) -> None:
    x, weight, slopes = some_leaves()
    leaves = [x, weight, *([] if options else [slopes])]

    def run(*given: Tensor) -> Tensor:
        x, weight, *rest = given
        return block(x, weight, rest[0] if rest else None, options)

    again = gradients(lambda *given: checkpoint(run, *given, use_reentrant=reentrant), leaves)
    assert equal(again, gradients(run, leaves))


def save_products(context: Any, operation: Any, *arguments: Any, **given: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


@KERNELS
def test_selective_checkpointing(options: Any) -> None:
    """The products around are saved, attention is computed again."""
    x, weight, slopes = some_leaves()
    leaves = [x, weight, *([] if options else [slopes])]

    def run(*given: Tensor) -> Tensor:
        x, weight, *rest = given
        return block(x, weight, rest[0] if rest else None, options)

    contexts = partial(create_selective_checkpoint_contexts, save_products)
    again = gradients(
        lambda *given: checkpoint(run, *given, use_reentrant=False, context_fn=contexts), leaves
    )
    assert equal(again, gradients(run, leaves))


# Modules


def test_a_module_with_captured_parameters_trains() -> None:
    module = BiasedAttention()
    wanted = [p.detach().clone() for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    q, k, v = (x.detach() for x in inputs())
    for _ in range(2):
        optimizer.zero_grad()
        module(q, k, v, DOCUMENTS).square().sum().backward()
        by_hand = torch.autograd.grad(
            module(q, k, v, DOCUMENTS, REFERENCE).square().sum(), list(module.parameters())
        )
        wanted = [x - 0.1 * gradient for x, gradient in zip(wanted, by_hand, strict=True)]
        optimizer.step()
    for parameter, value in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-4, atol=1e-5)


def test_largest_scores_are_not_differentiable() -> None:
    q, k, v = inputs()
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    with pytest.raises(RuntimeError, match="does not require grad"):
        aux.max_scores.sum().backward()
    (out.sum() + aux.lse.sum() + aux.max_scores.sum()).backward()
    assert q.grad is not None


@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"])
def test_results_may_be_written_to(options: Any) -> None:
    case = make_case(heads=HEADS, q_len=20, head_dim=16)
    leaves = [x.requires_grad_() for x in case.inputs]
    out, lse = flex_attention(*leaves, return_lse=True, kernel_options=options)
    expected = out.detach() + 1
    out += 1
    lse.add_(1)
    assert torch.equal(out, expected)
    flex_attention(*leaves, kernel_options=options).detach_()
