"""flex_attention among other things of torch: autocast, inference mode, torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference_case import make_case
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flexmod
from flexmod import AuxRequest, create_block_mask, create_mask, errors, flex_attention, masks

INTERPRET = {"BACKEND": "INTERPRET"}


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


MASK = create_block_mask(causal, None, None, 40, 40, device="cpu")


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in make_case(q_len=40, dtype=dtype).inputs]


def in_bfloat16(case: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """What autocast must come to: the cast written out."""
    out = flex_attention(*(x.bfloat16() for x in case), block_mask=MASK, **options)
    return out, *torch.autograd.grad(out.float().sum(), case)


@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET", "REFERENCE"])
def test_autocast_casts_and_stops_there(backend: str) -> None:
    options = {"BACKEND": backend}
    case = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(*case, block_mask=MASK, kernel_options=options)
    gradients = torch.autograd.grad(out.float().sum(), case)
    assert out.dtype == torch.bfloat16
    wanted = in_bfloat16(case, kernel_options=options)
    assert all(torch.equal(a, b) for a, b in zip((out, *gradients), wanted, strict=True))


def test_a_backward_under_autocast_stays_in_float32() -> None:
    case = inputs()
    out = flex_attention(*case, block_mask=MASK)
    plain = torch.autograd.grad(out.sum(), case, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = torch.autograd.grad(out.sum(), case)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET", "REFERENCE"])
def test_autocast_leaves_alone_what_a_mod_computes(backend: str) -> None:
    """Also in a handle, in a block mask, and in what is traced in a region and used outside of it."""
    left, right = torch.randn(40, 3), torch.randn(3, 40)
    case = [x.bfloat16() for x in inputs()]
    options = {"BACKEND": backend}

    def results() -> list[Tensor]:
        def near(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (left @ right)[q, k] > 0.01

        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + (left @ right)[q, k]

        made.append(flexmod.compile(score, near, kernel_options=options))
        mask = create_block_mask(near, None, None, 40, 40, device="cpu")
        calls = [flex_attention(*case, score, mask, kernel_options=options)]
        return [*calls, *(handle(*case) for handle in made), create_mask(near, 1, 1, 40, 40, device="cpu")]

    made: list[Any] = []
    plain, handle_made_outside, mask = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        *inside, mask_inside = results()
    assert all(torch.equal(plain, other) for other in (handle_made_outside, *inside, made[1](*case)))
    assert torch.equal(mask, mask_inside)


def test_autocast_leaves_alone_what_a_mod_computes_in_a_graph() -> None:
    left, right = torch.randn(40, 3), torch.randn(3, 40)
    case = inputs()

    def step(*tensors: Tensor) -> Any:
        near = lambda b, h, q, k: (left @ right)[q, k] > 0.01  # noqa: E731
        score = lambda s, b, h, q, k: s + (left @ right)[q, k]  # noqa: E731
        mask = create_block_mask(near, None, None, 40, 40, device="cpu")
        return flex_attention(*tensors, score, mask)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.compile(step, backend="aot_eager", fullgraph=True)(*case)
    assert torch.equal(found, step(*(x.bfloat16() for x in case)))


def test_a_block_mask_of_another_half_type_under_autocast() -> None:
    """torch.cat refuses a half type that is not autocast's."""
    table = torch.randn(200).half()

    def made() -> Tensor:
        mod = lambda b, h, q, k: table[q] + table[k] > 0.5  # noqa: E731
        return create_block_mask(mod, None, None, 200, 200, device="cpu", BLOCK_SIZE=16).to_dense()

    wanted = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made(), wanted)


def test_pictures_under_autocast() -> None:
    mask = create_block_mask(masks.sliding_window(3000), None, None, 5000, 4923, "cpu", BLOCK_SIZE=(100, 72))
    wanted = str(mask), mask.to_svg()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (str(mask), mask.to_svg()) == wanted


def test_autocast_leaves_float64_alone() -> None:
    case = inputs(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(*case).dtype == torch.float64


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
def test_without_gradients(mode: Callable[[], Any], options: Any) -> None:
    """And the mask of a score_mod, remembered there, serves a training step afterwards."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx + 1 >= kv_idx, score, -math.inf)

    case = inputs()
    with mode():
        table = torch.ones(40)
        quiet = flex_attention(*case, score_mod, kernel_options=options)
    assert not quiet.requires_grad
    out = flex_attention(*case, score_mod, kernel_options=options)
    assert torch.equal(out, quiet)
    out.sum().backward()
    scaled = flex_attention(*case, lambda s, b, h, q_idx, kv_idx: s * table[q_idx], kernel_options=options)
    scaled.sum().backward()
    assert torch.isfinite(case[0].grad).all()


def test_captured_tensors_that_want_gradients_are_fine_where_none_are_taken() -> None:
    bias = torch.randn(40, requires_grad=True)
    case = inputs()
    with torch.no_grad():
        out = flex_attention(*case, lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx])
    by_reference = flex_attention(
        *case, lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx], kernel_options={"BACKEND": "REFERENCE"}
    )
    torch.testing.assert_close(out, by_reference)
    assert torch.autograd.grad(by_reference.sum(), bias)[0].shape == (40,)


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """torch.compile without Inductor: only what Dynamo does is in question here."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="eager")
    torch._dynamo.reset()


# tests/test_library.py has torch's masks in a graph, too
@pytest.mark.parametrize("library", ["flexmod", pytest.param("torch", marks=pytest.mark.long)])
def test_torch_compile_of_flex_attention(compiled: Any, library: str) -> None:
    theirs = torch_flex.create_block_mask(causal, None, None, 40, 40, device="cpu")
    mask = MASK if library == "flexmod" else theirs
    attention = compiled(flex_attention)
    for slope in (0.1, 0.2):

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float = slope) -> Any:
            return score + by * (kv_idx - q_idx)

        case = inputs()
        out = attention(*case, score_mod=score_mod, block_mask=mask)
        plain = flex_attention(*case, score_mod=score_mod, block_mask=mask)
        assert torch.equal(out, plain)
        gradients = torch.autograd.grad(out.sum(), case)
        for a, b in zip(gradients, torch.autograd.grad(plain.sum(), case), strict=True):
            assert torch.equal(a, b)


def test_a_default_that_changes_is_seen_where_torch_guards_none(compiled: Any) -> None:
    """The mod's own, that of a function it calls, and a mask's; torch's option stays as it was."""
    config = torch._dynamo.config
    masked = compiled(lambda mask_mod: create_block_mask(mask_mod, 1, 1, 40, 40, "cpu", 16).to_dense())
    attention, case = compiled(flex_attention), inputs()
    with config.patch(skip_guards_on_constant_func_defaults=True):
        for slope in (0.1, 3.0):

            def scaled(x: Any, by: float = slope) -> Any:
                return by * x

            def own(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float = slope) -> Any:
                return score + by * (kv_idx - q_idx)

            def inner(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return score + scaled(kv_idx - q_idx)

            def near(b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float = 9 * slope) -> Any:
                return q_idx - kv_idx >= by

            for mod in (own, inner):
                assert torch.equal(attention(*case, mod), flex_attention(*case, mod))
            expected = create_block_mask(near, 1, 1, 40, 40, "cpu", 16).to_dense()
            assert torch.equal(masked(near), expected)
            assert config.skip_guards_on_constant_func_defaults


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_torch_compile_of_a_function_that_calls_it(compiled: Any) -> None:
    table = torch.linspace(-1, 1, 40)

    def block(x: Tensor, k: Tensor, v: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * slope + table[kv_idx]

        mask = create_block_mask(causal, None, None, 40, 40, device="cpu")
        out, aux = flex_attention(x * 2, k, v, score_mod, mask, return_aux=AuxRequest(lse=True))
        return out.sin() + 1, aux.lse

    fast = compiled(block)
    for slope in (1.0, 0.5, 0.25):
        case = inputs()
        results, plain = (function(*case, slope) for function in (fast, block))
        assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))
        gradients = [torch.autograd.grad(out.sum() + lse.sum(), case) for out, lse in (results, plain)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_mistakes_keep_their_class_under_torch_compile(compiled: Any) -> None:
    q, k, v = inputs()
    with pytest.raises(errors.FlashBackendError):
        compiled(flex_attention)(q, k, v, kernel_options={"BACKEND": "FLASH"})
    with pytest.raises(errors.ReturnArgumentsError):
        compiled(flex_attention)(q, k, v, return_lse=True, return_aux=AuxRequest())


def negative_view(*shape: int) -> Tensor:
    """float32 whose memory holds its negative: torch keeps the sign of a conjugate as a flag."""
    pairs = torch.linspace(-1, 1, 2 * math.prod(shape)).sin().view(*shape, 2)
    view = torch.view_as_complex(pairs).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET"])
def test_tensors_whose_sign_is_a_flag(backend: str) -> None:
    """query, what a score mod captures, what a mask captures, the gradient of the output."""
    case, bias, limits = negative_view(1, 2, 40, 16), negative_view(40), negative_view(40)
    grad_out = negative_view(1, 2, 40, 16)

    def attended(query: Tensor, bias: Tensor, limits: Tensor, grad_out: Tensor) -> list[Tensor]:
        inputs = [query.detach().requires_grad_(), bias.detach().requires_grad_()]
        mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: (limits[q_idx] > 0) | (q_idx >= kv_idx),
            None, None, 40, 40, device="cpu",
        )  # fmt: skip
        out = flex_attention(
            inputs[0], inputs[0], inputs[0], lambda s, b, h, q_idx, kv_idx: s + inputs[1][kv_idx], mask,
            kernel_options={"BACKEND": backend},
        )  # fmt: skip
        return [out, *torch.autograd.grad(out, inputs, grad_out)]

    found = attended(case, bias, limits, grad_out)
    plain = attended(*(x.resolve_neg() for x in (case, bias, limits, grad_out)))
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


def shifted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(score > 0.25, score * 1.5, score + (q_idx - kv_idx) * 0.125)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_default_dtype_changes_no_picture(dtype: torch.dtype) -> None:
    mask = create_block_mask(causal, None, None, 300, 300, device="cpu", BLOCK_SIZE=16)
    expected = mask.to_string(), mask.to_svg(), str(mask)
    torch.set_default_dtype(dtype)
    try:
        assert (mask.to_string(), mask.to_svg(), str(mask)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET", "REFERENCE"])
def test_a_default_dtype_is_that_of_the_trace(backend: str) -> None:
    """An eager call sees another one; a handle keeps that of flexmod.compile."""
    large = torch.full((40,), 2**24 + 1)

    def by_quotient(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (large[kv_idx] / 1 - 2**24) * 0.5  # 0.5 in float64, 0 in float32

    tensors, options = inputs(), {"BACKEND": backend}
    attend = flexmod.compile(by_quotient, kernel_options=options)
    plain = flex_attention(*tensors, return_lse=True, kernel_options=options)[1]
    for dtype, added in ((torch.float32, 0.0), (torch.float64, 0.5), (torch.float32, 0.0)):
        torch.set_default_dtype(dtype)
        try:
            eager = flex_attention(*tensors, by_quotient, return_lse=True, kernel_options=options)[1]
            kept = attend(*tensors, return_lse=True)[1]
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(eager, plain + added)
        torch.testing.assert_close(kept, plain)


def _rounded_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.sin((q_idx - kv_idx) * 100.37)  # of a product in the default dtype


def _by_rounded_distance(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx) * 100.37 % 7 < 4


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET"])
@pytest.mark.parametrize("mask", ["none", "inside", "torch"])
def test_a_backward_under_another_default_dtype(mask: str, backend: str) -> None:
    """A compiled graph traces its records again in its backward."""
    torch._dynamo.reset()
    options = {"BACKEND": backend}

    def attend(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
        if mask == "inside":
            block_mask = flexmod.create_block_mask(_by_rounded_distance, None, None, 40, 40, "cpu")
        return flex_attention(q, k, v, _rounded_distance, block_mask, kernel_options=options)

    tensors = inputs()
    torch.set_default_dtype(torch.bfloat16)
    try:
        block_mask = None
        if mask == "torch":
            block_mask = torch_flex.create_block_mask(_by_rounded_distance, None, None, 40, 40, "cpu")
        expected = attend(*tensors, block_mask)
        found = torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors, block_mask)
        of_expected = torch.autograd.grad(expected.square().sum(), tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    of_found = torch.autograd.grad(found.square().sum(), tensors)
    torch.testing.assert_close((found, of_found), (expected, of_expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("handle", [False, True], ids=["eager", "handle"])
@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET", "REFERENCE"])
def test_a_default_device_is_not_that_of_the_inputs(backend: str, handle: bool) -> None:
    """What a call makes lies beside its inputs, and its numbers on the host: a mask, out and gradients."""

    tensors = inputs()

    def results() -> list[Tensor]:
        options: Any = {"BACKEND": backend}
        if handle:
            out = flexmod.compile(shifted, causal, kernel_options=options)(*tensors)
        else:
            mask = create_block_mask(causal, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
            assert mask.to_string() and mask.to_svg() and mask.facts()
            out = flex_attention(*tensors, shifted, mask, kernel_options=options)
        return [out, *torch.autograd.grad(out.sum(), tensors)]

    expected = results()
    with torch.device("meta"):
        found = results()
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cpu" and torch.equal(one, other)
