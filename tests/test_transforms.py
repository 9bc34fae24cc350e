"""flex_attention under torch.func: grad and vjp work, the rest is refused, the reference does it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from biased_attention import DOCUMENTS, LENGTH, BiasedAttention
from reference_case import make_case
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import flexmod
from flexmod import BlockMask, create_block_mask, errors, flex_attention
from flexmod.calls import autograd

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}
KERNELS = pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])


def tensors(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return make_case(batch=1, heads=2, q_len=length, head_dim=16, dtype=dtype).inputs


def mask_of(documents: Tensor) -> BlockMask:
    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    return create_block_mask(same, None, None, len(documents), len(documents), device="cpu", BLOCK_SIZE=16)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def loss(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, options: Any) -> Tensor:
    """Out and lse, with a mask that is built inside from an argument."""
    out, lse = flex_attention(
        q, k, v, capped, mask_of(documents), return_lse=True, kernel_options=options
    )  # fmt: skip
    return out.square().sum() + lse.sin().sum()


def by_autograd(options: Any) -> tuple[Tensor, ...]:
    leaves = [x.requires_grad_() for x in tensors()]
    return torch.autograd.grad(loss(*leaves, DOCUMENTS, options), leaves)


def same(found: Any, wanted: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@KERNELS
def test_grad(options: Any) -> None:
    q, k, v = tensors()
    found, value = grad_and_value(loss, argnums=(0, 1, 2))(q, k, v, DOCUMENTS, options)
    assert same(found, by_autograd(options))
    assert torch.equal(value, loss(q, k, v, DOCUMENTS, options))


@KERNELS
def test_vjp_after_its_level_is_over(options: Any) -> None:
    _, back = vjp(lambda q, k, v: loss(q, k, v, DOCUMENTS, options), *tensors())
    assert same(back(torch.ones(())), by_autograd(options))


@KERNELS
def test_grad_by_one_of_them(options: Any) -> None:
    q, k, v = tensors()
    assert torch.equal(grad(loss, argnums=1)(q, k, v, DOCUMENTS, options), by_autograd(options)[1])


@KERNELS
def test_grad_where_nothing_of_attention_is_asked_for(options: Any) -> None:
    """q, k and v are wrapped, as arguments, and want no gradient."""
    q, k, v = tensors()

    def scaled(weight: Tensor, q: Tensor) -> Tensor:
        return (weight * flex_attention(q, k, v, kernel_options=options)).sum()

    found = grad(scaled)(torch.ones(()), q)
    torch.testing.assert_close(found, flex_attention(q, k, v, kernel_options=options).sum())


def test_functional_call_of_a_module_with_captured_parameters() -> None:
    module, (q, k, v) = BiasedAttention(), tensors()
    state = {name: x.detach() for name, x in module.state_dict().items() if x.is_floating_point()}

    def loss(state: Any) -> Tensor:
        return functional_call(module, state, (q, k, v, DOCUMENTS)).square().sum()

    found = grad(loss)(state)
    module(q, k, v, DOCUMENTS).square().sum().backward()
    assert dict.fromkeys(state, True) == {
        name: torch.equal(found[name], parameter.grad) for name, parameter in module.named_parameters()
    }


def test_a_captured_tensor_that_also_decides() -> None:
    """The -inf branches become a mask, which asks a tensor that has a gradient elsewhere."""
    q, k, v = tensors()

    def loss(table: Tensor) -> Tensor:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.where(table[kv_idx] > 0, score + table[kv_idx], -float("inf"))

        return flex_attention(q, k, v, score_mod).square().sum()

    table = torch.linspace(-1, 1, LENGTH)
    leaf = table.clone().requires_grad_()
    assert torch.equal(grad(loss)(table), torch.autograd.grad(loss(leaf), leaf)[0])


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=["float8", "bfloat16"])
def test_a_call_inside_a_transform_that_needs_no_gradient(options: Any, dtype: torch.dtype) -> None:
    q, k, v = tensors()
    low = [x.to(dtype) for x in (k, v)]

    def attend(x: Tensor, *of: Tensor) -> Tensor:
        return flex_attention(x, *of, kernel_options=options)

    wanted = attend(q, *low) * attend(q, k, v)
    found = grad(lambda x: (x * (attend(x.detach(), *low) * attend(q, k, v))).sum())(q)
    assert torch.equal(found, wanted)
    assert torch.equal(jvp(lambda x: x * (attend(q, *low) * attend(q, k, v)), (q,), (q,))[1], q * wanted)

    def without_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = attend(x, *low) * attend(x, k, v)
        return (x * factor).sum()

    assert torch.equal(grad(without_grad)(q), wanted)


def test_float8_names_the_tensor_that_needs_a_gradient() -> None:
    q, k, v = tensors()
    low, one = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.tensor(1.0)
    with pytest.raises(errors.Float8GradientError, match="^query requires a gradient"):
        grad(lambda x: flex_attention(x, *low).sum())(q)
    # the inner level's tensor needs none, the outer's does
    with pytest.raises(errors.Float8GradientError, match="^query requires a gradient"):
        grad(lambda x: grad(lambda y: y * flex_attention(x * 1, *low).sum())(one))(q)
    mapped = vmap(lambda x: flex_attention(x, *low, kernel_options=REFERENCE))(q[None])
    assert torch.equal(mapped[0], flex_attention(q, *low, kernel_options=REFERENCE))


def test_a_mask_outlives_the_transform_it_was_built_in() -> None:
    made: list[BlockMask] = []
    q, k, v = tensors()

    def loss(q: Tensor, documents: Tensor) -> Tensor:
        made.append(mask_of(documents))
        return flex_attention(q, k, v, None, made[-1], kernel_options=INTERPRET).sum()

    grad(loss)(q, DOCUMENTS)
    found = [flex_attention(q, k, v, None, mask) for mask in (made[0], mask_of(DOCUMENTS))]
    assert torch.equal(*found)


def test_a_mask_has_no_gradient_there_either() -> None:
    def loss(limit: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < limit[q_idx], None, None, 9, 9, "cpu")
        return flex_attention(*tensors(length=9), block_mask=mask).sum()

    with pytest.raises(errors.MaskCaptureGradientError, match="limit, captured by mask_mod, requires grad"):
        grad(loss)(torch.arange(9.0))


@KERNELS
def test_gradients_of_gradients_are_refused(options: Any) -> None:
    q, k, v = tensors()

    def penalty(q: Tensor) -> Tensor:
        return grad(loss)(q, k, v, DOCUMENTS, options).square().sum()

    with pytest.raises(errors.DoubleBackwardError):
        grad(penalty)(q)


@KERNELS
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f, q: vmap(f)(q[:, None]), "torch.vmap maps over query;"),
        (lambda f, q: vmap(grad(lambda q: f(q).sum()))(q[:, None]), "torch.vmap maps over query;"),
        (lambda f, q: jacrev(f)(q), "torch.vmap maps over the gradient of the output;"),
    ],
    ids=["vmap", "gradients of samples", "jacrev"],
)
def test_vmap_is_refused(options: Any, transform: Callable[..., Any], message: str) -> None:
    q, k, v = tensors(length=9)
    with pytest.raises(errors.VmapError, match=message):
        transform(lambda q: flex_attention(q, k[:1], v[:1], kernel_options=options), q)


@KERNELS
def test_batches_of_gradients_are_refused(options: Any) -> None:
    q, k, v = tensors(length=9)
    out = flex_attention(q.requires_grad_(), k, v, kernel_options=options)
    with pytest.raises(errors.VmapError, match="torch.vmap maps over the gradient of the output;"):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


def test_vmap_over_a_captured_tensor_or_a_mask_is_refused() -> None:
    q, k, v = tensors(length=9)

    def by_slopes(slopes: Tensor) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s * slopes[h])

    with pytest.raises(errors.VmapError, match="torch.vmap maps over slopes, captured by score_mod;"):
        vmap(by_slopes)(torch.ones(3, 2))
    with pytest.raises(errors.VmapError, match="torch.vmap maps over documents, captured by mask_mod;"):
        vmap(lambda documents: flex_attention(q, k, v, block_mask=mask_of(documents)))(DOCUMENTS[None, :9])


@KERNELS
def test_forward_mode_is_refused(options: Any) -> None:
    q, k, v = tensors(length=9)
    with pytest.raises(errors.ForwardModeError, match="value carries a tangent"):
        jvp(lambda v: flex_attention(q, k, v, kernel_options=options), (v,), (v,))
    with pytest.raises(errors.ForwardModeError, match="carries a tangent"):
        jacfwd(lambda q: flex_attention(q, k, v, kernel_options=options).sum())(q)
    with forward_ad.dual_level(), pytest.raises(errors.ForwardModeError, match="key carries a tangent"):
        flex_attention(q, forward_ad.make_dual(k, k), v, kernel_options=options)


def test_forward_over_reverse_is_refused() -> None:
    q, k, v = tensors(length=9)
    with pytest.raises(errors.ForwardModeError, match="query, key, value or a captured tensor carries"):
        jvp(grad(lambda q: flex_attention(q, k, v).sum()), (q,), (q,))


@pytest.mark.parametrize(
    ("known", "backend"),
    [
        (True, "eager"),
        pytest.param(False, "aot_eager", marks=pytest.mark.long),
        pytest.param(False, "eager", marks=pytest.mark.every),
        pytest.param(True, "aot_eager", marks=pytest.mark.every),
    ],
)
def test_forward_mode_of_a_compiled_call_is_refused(known: bool, backend: str) -> None:
    """An operation of torch.library would drop the tangent."""
    torch._dynamo.reset()
    q, k, v = tensors(length=9)

    def attend(query: Tensor) -> Any:
        return flex_attention(query, k, v, capped)

    compiled = torch.compile(attend, backend=backend)
    if known:
        compiled(q)
    with forward_ad.dual_level(), pytest.raises(errors.ForwardModeError, match="query carries a tangent"):
        compiled(forward_ad.make_dual(q, q))
    with pytest.raises(errors.ForwardModeError, match="query carries a tangent"):
        torch.compile(lambda x: jvp(attend, (x,), (x,)), backend=backend)(q)
    with pytest.raises(errors.VmapError, match="torch.vmap maps over query"):
        torch.compile(lambda x: vmap(attend)(x), backend=backend)(q[None])


def test_grad_in_a_graph_breaks_it() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(length=9)

    def slope(query: Tensor) -> Any:
        return grad(lambda x: flex_attention(x, k, v, capped).square().sum())(query)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="see no derivative of an operation"):
        torch.compile(slope, backend="aot_eager", fullgraph=True)(q)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(slope, backend="aot_eager")(q), slope(q))


def test_a_second_derivative_of_the_operation_is_refused() -> None:
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in tensors(length=9))
    out = torch.compile(lambda *x: flex_attention(*x, capped), backend="eager")(q, k, v)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(errors.DoubleBackwardError, match="the CPU backend has the first alone"):
        torch.autograd.grad(first.sum(), k)


def test_a_backward_in_a_compiled_function_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo would compile each of its functions, for ten seconds."""
    torch._dynamo.reset()
    attend, compiling = flexmod.compile(capped), []
    backward = autograd.PreparedCall.backward

    def spied(*arguments: Any) -> Any:
        compiling.append(torch.compiler.is_compiling())
        return backward(*arguments)

    monkeypatch.setattr(autograd.PreparedCall, "backward", spied)
    q, k, v = (x.requires_grad_() for x in tensors(length=9))

    def step() -> None:
        attend(q, k, v).square().sum().backward()

    torch.compile(step, backend="aot_eager")()
    assert compiling == [False] and q.grad is not None


def test_the_reference_does_it_all() -> None:
    q, k, v = tensors(torch.float64, length=5)
    mask = mask_of(torch.tensor([0, 0, 0, 1, 1]))

    def attend(q: Tensor, k: Tensor = k, v: Tensor = v) -> Any:
        return flex_attention(q, k, v, capped, mask, kernel_options=REFERENCE)

    whole = attend(q)
    assert torch.allclose(vmap(attend)(q[:, None], k[:, None], v[:, None])[:, 0], whole)
    by_column, by_row = jacfwd(attend)(q), jacrev(attend)(q)
    torch.testing.assert_close(by_column, by_row)
    small = q[:1, :1, :, :2]
    second = hessian(lambda x: attend(x, k[:1, :1, :, :2], v[:1, :1]).square().sum())(small)
    assert torch.allclose(second, second.permute(4, 5, 6, 7, 0, 1, 2, 3))
    step = torch.randn_like(q) * 1e-6
    change = jvp(attend, (q,), (step,))[1]
    torch.testing.assert_close(attend(q + step) - attend(q - step), 2 * change, rtol=1e-4, atol=1e-12)
