"""Gradients of tensors that a score_mod captures, on the CPU: gradcheck, and against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learned_mods import causal, every_third, learned_mods, random
from reference_case import LargestTensor, make_case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmod import create_block_mask, flex_attention, mods
from flexmod.backends import blocks

REFERENCE = {"BACKEND": "REFERENCE"}
BATCH, HEADS, ROWS, COLUMNS = 2, 4, 13, 11


LEARNED = learned_mods(BATCH, HEADS, ROWS, COLUMNS)
MASKS = pytest.mark.parametrize("mask_mod", [None, causal, every_third])


def mask_of(mask_mod: Any, rows: int = ROWS, columns: int = COLUMNS) -> Any:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, None, None, rows, columns, device="cpu", BLOCK_SIZE=4)


def small_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    case = make_case(
        batch=BATCH, kv_batch=1, heads=HEADS, kv_heads=2, q_len=ROWS, kv_len=COLUMNS, head_dim=3, dtype=dtype
    )
    return case.inputs


@pytest.mark.covering(1, long=1)
@MASKS
@pytest.mark.parametrize("name", LEARNED)
def test_gradcheck(name: str, mask_mod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of q, k, v and what is learned, through out and lse, with grouped heads and in several steps."""
    monkeypatch.setattr(blocks, "BUDGET", 250)
    make, shapes = LEARNED[name]
    mask = mask_of(mask_mod)

    def call(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flex_attention(q, k, v, make(*learned), block_mask=mask, enable_gqa=True, return_lse=True)
        return out, torch.exp(lse)

    learned = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    inputs = [x.requires_grad_() for x in (*small_case(), *learned)]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def gradients(
    make: Callable[..., Any], learned: list[Tensor], mask: Any, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, ...]:
    """Of q, k, v and of what is learned."""
    inputs = [x.requires_grad_() for x in small_case(dtype)]
    out, lse = flex_attention(*inputs, make(*learned), mask, enable_gqa=True, return_lse=True, **options)
    grad = random(*out.shape).to(dtype), random(*lse.shape).to(lse.dtype)
    return torch.autograd.grad([out, lse.nan_to_num(neginf=0.0)], [*inputs, *learned], grad)


@MASKS
@pytest.mark.parametrize("name", LEARNED)
def test_against_the_reference(name: str, mask_mod: Any) -> None:
    make, shapes = LEARNED[name]
    mask = mask_of(mask_mod)
    learned = [random(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    found = gradients(make, learned, mask, torch.float64)
    exact = gradients(make, learned, mask, torch.float64, kernel_options=REFERENCE)
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LEARNED)
def test_captures_of_lower_precision(name: str, dtype: torch.dtype) -> None:
    """A half capture's gradient is rounded once, at the end, where the mod computes in float32."""
    make, shapes = LEARNED[name]
    mask = mask_of(causal)
    rounded = [random(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
    learned = [x.clone().requires_grad_() for x in rounded]
    found = gradients(make, learned, mask, torch.float32)
    exact = gradients(
        make, [x.double().requires_grad_() for x in rounded], mask, torch.float64, kernel_options=REFERENCE
    )
    # tables that a half is computed with before it meets the score round more than once
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[dtype]
    for x, truth, tensor in zip(found[3:], exact[3:], learned, strict=True):
        assert x.dtype == tensor.dtype and x.shape == tensor.shape
        assert float((x.double() - truth).norm()) <= tolerance * float(truth.norm()) + 1e-6


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float16"])
def test_a_half_gradient_is_summed_in_float32(double: bool) -> None:
    """A sum of this many ones would stop at 2048 in float16; `double`: the mod computes in it, too."""
    table = torch.zeros(1, dtype=torch.float16, requires_grad=True)
    q, k, v = torch.zeros(3, 1, 1, 3001, 4)

    def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (table[h] + table[h] if double else table[h])

    out, lse = flex_attention(q, k, v, biased, return_lse=True)
    lse[:, :, ::2].sum().backward()
    assert table.grad is not None
    assert float(table.grad) == pytest.approx(1501 * (2 if double else 1), rel=1e-3)


@pytest.mark.parametrize("options", [None, {"BACKEND": "INTERPRET"}], ids=["cpu", "interpret"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_terms_of_half_expressions_are_summed_in_float32(dtype: torch.dtype, options: Any) -> None:
    of_row, base = (random(ROWS, seed=n).abs().add(0.5).to(dtype).requires_grad_() for n in range(2))
    exponent = random(COLUMNS, dtype=torch.float32, seed=2).requires_grad_()

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + of_row[q_idx] ** 3 + base[q_idx] ** exponent[kv_idx]

    def gradients_of(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * out).sum(), (of_row, exponent))

    q, k, v = small_case(torch.float32)
    found = gradients_of(flex_attention(q, k, v, mod, enable_gqa=True, kernel_options=options))
    bias = of_row.double()[:, None] ** 3 + base.double()[:, None] ** exponent.double()
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    weights = torch.softmax(q.double() @ k.mT / 3**0.5 + bias, -1)
    wanted = gradients_of(weights @ v)
    # the same number for a whole row changes no weight
    assert found[0].abs().max() < 1e-5
    assert (found[1] - wanted[1]).abs().max() < 1e-5 * wanted[1].abs().max()


@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided"])
def test_captures_of_any_strides(layout: str) -> None:
    leaf = random(ROWS, COLUMNS).requires_grad_()
    base = random(1, COLUMNS).requires_grad_()
    wide = random(2 * ROWS, 3 * COLUMNS).requires_grad_()
    source, view = {
        "expanded": (base, lambda x: x.expand(ROWS, -1)),
        "transposed": (leaf, lambda x: x.T.contiguous().T),
        "strided": (wide, lambda x: x[::2, ::3]),
    }[layout]

    def gradient(**options: Any) -> Tensor:
        bias = view(source)
        out = flex_attention(*small_case(), lambda s, b, h, q, k: s + bias[q, k], enable_gqa=True, **options)
        return torch.autograd.grad(out.square().sum(), source)[0]

    torch.testing.assert_close(gradient(), gradient(kernel_options=REFERENCE), rtol=1e-11, atol=1e-11)


def test_an_expanded_leaf_has_a_gradient_for_each_element() -> None:
    bias = random(1, COLUMNS).expand(ROWS, -1).requires_grad_()
    out = flex_attention(*small_case(), lambda s, b, h, q, k: s + bias[q, k], enable_gqa=True)
    (found,) = torch.autograd.grad(out.square().sum(), bias)
    assert found.shape == bias.shape and bool((found[0] != found[1]).any())


def test_only_captures_require_grad() -> None:
    slopes = torch.nn.Parameter(random(HEADS))
    temperature = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    out = flex_attention(
        *small_case(), lambda s, b, h, q, k: s * temperature + slopes[h] * (k - q), enable_gqa=True
    )
    out.square().sum().backward()
    assert slopes.grad is not None and bool((slopes.grad != 0).all())
    assert temperature.grad is not None and temperature.grad.shape == () and float(temperature.grad) != 0


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []
    backward = blocks.backward

    def watch(problem: Any, *args: Any, **options: Any) -> Any:
        result = backward(problem, *args, **options)
        asked.append(tuple(x is not None for x in (*result[:3], *result.captures)))
        return result

    monkeypatch.setattr(blocks, "backward", watch)
    q, k, v = small_case()
    table, slopes, fixed = random(ROWS), random(HEADS), random(COLUMNS)
    for wanted in ([q], [v], [slopes], [table, k]):
        for x in (q, k, v, table, slopes):
            x.requires_grad_(any(x is y for y in wanted))
        out = flex_attention(
            q, k, v, lambda s, b, h, q, k: s * table[q] + slopes[h] * fixed[k], enable_gqa=True
        )
        out.sum().backward()
    assert asked == [
        (True, False, False),
        (False, False, True),
        (False, False, False, False, True, False),
        (False, True, False, True, False, False),
    ]


def test_a_capture_that_only_decides_gets_no_gradient() -> None:
    table, bias = random(COLUMNS).requires_grad_(), random(COLUMNS).requires_grad_()
    out = flex_attention(
        *small_case(), lambda s, b, h, q, k: torch.where(table[k] > 0, s + bias[k], s), enable_gqa=True
    )
    found, other = torch.autograd.grad(out.sum(), [table, bias], allow_unused=True)
    assert found is None and other is not None


def test_infinite_derivative_under_the_mask() -> None:
    """sqrt of 0 where the mask says no: 0 * inf reaches nothing."""
    table = random(ROWS).abs().requires_grad_()

    def root(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.sqrt(table[q] * torch.where(q >= k, 1.0, 0.0))

    out = flex_attention(*small_case(), root, mask_of(causal), enable_gqa=True)
    (found,) = torch.autograd.grad(out.square().sum(), table)
    assert bool(torch.isfinite(found).all())


def test_a_tensor_in_a_module_that_computes_its_bias() -> None:
    """The gradient goes on to what the captured tensor was computed from."""
    weights = random(HEADS, 2).requires_grad_()

    def gradient(**options: Any) -> Tensor:
        slopes = torch.nn.functional.softplus(weights).sum(1)
        out = flex_attention(*small_case(), mods.alibi(slopes), enable_gqa=True, **options)
        return torch.autograd.grad(out.square().sum(), weights)[0]

    torch.testing.assert_close(gradient(), gradient(kernel_options=REFERENCE), rtol=1e-11, atol=1e-11)


def test_two_runs_agree_bit_for_bit() -> None:
    table, slopes = random(599).float().requires_grad_(), random(4).float().requires_grad_()
    case = make_case(batch=2, heads=4, kv_heads=2, q_len=300, head_dim=16)
    mask = mask_of(causal, 300, 300)

    def run() -> tuple[Tensor, ...]:
        out = flex_attention(
            *case.inputs, lambda s, b, h, q, k: s * slopes[h] + table[q - k + 299], mask, enable_gqa=True
        )
        return torch.autograd.grad(out, [table, slopes], case.grad_out)

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))


def test_gradients_of_q_k_v_are_the_same_beside_a_learned_table() -> None:
    q, k, v = (x.requires_grad_() for x in small_case(torch.float32))
    table = random(ROWS).float()

    def gradient() -> tuple[Tensor, ...]:
        out = flex_attention(q, k, v, lambda s, b, h, q, k: s * table[q] + table[q], enable_gqa=True)
        return torch.autograd.grad(out.square().sum(), [q, k, v, *([table] if table.requires_grad else [])])

    alone = gradient()
    table.requires_grad_()
    assert all(torch.equal(x, y) for x, y in zip(alone, gradient()[:3], strict=True))


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, where scores would be 2048 x 2048, no tensor is larger than the budget or an input."""
    monkeypatch.setattr(blocks, "BUDGET", 1 << 14)
    case = make_case(q_len=2048, heads=1)
    table = torch.zeros(1, 4095, requires_grad=True)
    out = flex_attention(*case.inputs, lambda s, b, h, q, k: s + table[h, q - k + 2047])
    with LargestTensor() as seen:
        out.backward(case.grad_out)
    assert seen.elements <= max(1 << 14, case.q.numel())


def test_checkpointing() -> None:
    slopes = random(HEADS).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, mods.alibi(slopes), enable_gqa=True)

    inputs = [x.requires_grad_() for x in small_case()]
    plain = torch.autograd.grad(attend(*inputs).square().sum(), [*inputs, slopes])
    again = checkpoint(attend, *inputs, use_reentrant=False)
    found = torch.autograd.grad(again.square().sum(), [*inputs, slopes])
    assert all(torch.equal(x, y) for x, y in zip(plain, found, strict=True))


def test_a_learned_tensor_that_changes_before_the_backward_is_refused() -> None:
    slopes = random(HEADS).requires_grad_()
    out = flex_attention(*small_case(), mods.alibi(slopes), enable_gqa=True)
    with torch.no_grad():
        slopes.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("options", [None, {"BACKEND": "INTERPRET"}, REFERENCE], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_a_derivative_of_zero_is_a_gradient_of_zeros(options: Any, grad: bool) -> None:
    case = make_case(heads=1, q_len=20, head_dim=16)
    leaves = [x.requires_grad_(grad) for x in case.inputs]
    steps, slopes = (torch.rand(20, requires_grad=True) for _ in range(2))

    def stairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.floor(steps[kv_idx]) + slopes[kv_idx]

    out = flex_attention(*leaves, stairs, kernel_options=options)
    of_steps, of_slopes = torch.autograd.grad(out.square().sum(), (steps, slopes))
    assert torch.equal(of_steps, torch.zeros(20)) and of_slopes.any()
    out = flex_attention(*leaves, lambda s, b, h, q, k: s + torch.round(steps[k]), kernel_options=options)
    (of_steps,) = torch.autograd.grad(out.sum(), steps)
    assert torch.equal(of_steps, torch.zeros(20))
