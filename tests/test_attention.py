"""flex_attention as a user calls it: what it returns, what the semantics promise, what torch's returns."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_case import Case, expected, make_case
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flexmod
from flexmod import AuxOutput, AuxRequest, create_block_mask, errors, flex_attention
from flexmod.codegen import cache

INTERPRET = {"BACKEND": "INTERPRET"}
BACKENDS = pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def causal_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -math.inf)


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def every_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Two rows of three attend to nothing."""
    return (q_idx % 3 == 1) & (q_idx >= kv_idx)


def block_mask(
    mod: Any, q_len: int, kv_len: int | None = None, B: int | None = None, H: int | None = None
) -> Any:
    return create_block_mask(mod, B, H, q_len, kv_len or q_len, device="cpu", BLOCK_SIZE=32)


def leaves(case: Case) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in case.inputs]


def check(
    case: Case, score_mod: Any = None, mask: Any = None, tolerance: float = 2e-6, **arguments: Any
) -> None:
    """Output, lse and gradients against float64."""
    inputs = leaves(case)
    out, lse = flex_attention(
        *inputs, score_mod=score_mod, block_mask=mask, scale=case.scale, return_lse=True, **arguments
    )
    truth = expected(case, score_mod, mask)
    results = out, lse, *torch.autograd.grad(out, inputs, case.grad_out)
    wanted = truth.out, truth.lse, truth.dq, truth.dk, truth.dv
    for result, exact in zip(results, wanted, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=tolerance * (1 + exact_size(exact)))


def exact_size(exact: Tensor) -> float:
    return torch.where(exact.isfinite(), exact, 0.0).abs().max().item()


def test_the_signature_is_torchs() -> None:
    """And some keywords more."""
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (flex_attention, torch_flex.flex_attention)
    )
    own = {"layout": "bhsd", "q_offset": None, "kv_offset": None, "scales": None, "out_dtype": None}
    assert ours == [*theirs, *((name, inspect.Parameter.KEYWORD_ONLY, x) for name, x in own.items())]


@pytest.mark.parametrize("name", ["AuxRequest", "AuxOutput"])
def test_the_tuples_are_torchs(name: str) -> None:
    ours, theirs = getattr(flexmod, name), getattr(torch_flex, name)
    assert (ours._fields, ours._field_defaults) == (theirs._fields, theirs._field_defaults)


@BACKENDS
def test_what_is_returned(options: Any) -> None:
    q, k, v = make_case(q_len=33).inputs
    out = flex_attention(q, k, v, kernel_options=options)
    assert isinstance(out, Tensor)
    with_lse = flex_attention(q, k, v, return_lse=True, kernel_options=options)
    assert type(with_lse) is tuple
    assert torch.equal(with_lse[0], out)
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), AuxRequest(True, True)):
        result, aux = flex_attention(q, k, v, return_aux=request, kernel_options=options)
        assert isinstance(aux, AuxOutput)
        assert torch.equal(result, out)
        assert (aux.lse is not None, aux.max_scores is not None) == tuple(request)
    assert torch.equal(aux.lse, with_lse[1])


@BACKENDS
def test_the_lse_is_a_natural_logarithm_and_the_largest_score_that_of_the_mods(options: Any) -> None:
    case = make_case(batch=2, q_len=20, kv_len=35, dtype=torch.bfloat16)
    mask = block_mask(lambda b, h, q_idx, kv_idx: kv_idx != 7, 20, 35)
    _, aux = flex_attention(
        *case.inputs, soft_cap, mask, return_aux=AuxRequest(True, True), kernel_options=options
    )
    scores = 2 * torch.tanh(case.q.float() @ case.k.float().mT * case.scale / 2)
    scores[..., 7] = -math.inf
    assert aux.lse.dtype == aux.max_scores.dtype == torch.float32
    torch.testing.assert_close(aux.lse, torch.logsumexp(scores, -1))
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))


@pytest.mark.parametrize("options", [None, INTERPRET, {"BACKEND": "REFERENCE"}])
def test_what_is_differentiable(options: Any) -> None:
    inputs = leaves(make_case(q_len=9))
    out, aux = flex_attention(*inputs, return_aux=AuxRequest(True, True), kernel_options=options)
    assert (out.requires_grad, aux.lse.requires_grad, aux.max_scores.requires_grad) == (True, True, False)


def test_float64_on_the_cpu_has_float64_statistics() -> None:
    q, k, v = make_case(q_len=9, dtype=torch.float64).inputs
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(True, True))
    assert out.dtype == aux.lse.dtype == aux.max_scores.dtype == torch.float64


@BACKENDS
@pytest.mark.parametrize("use_out", [True, False], ids=["lse-and-out", "lse-alone"])
def test_the_gradient_through_the_lse(options: Any, use_out: bool) -> None:
    case = make_case(heads=2, kv_heads=1, q_len=37)
    mask = block_mask(every_third, 37)
    grad_lse = torch.randn(1, 2, 37, generator=torch.Generator().manual_seed(1))
    if not use_out:
        case.grad_out.zero_()
    inputs = leaves(case)
    out, lse = flex_attention(
        *inputs, soft_cap, mask, case.scale, enable_gqa=True, return_lse=True, kernel_options=options
    )
    outputs, grads = ((out, lse), (case.grad_out, grad_lse)) if use_out else ((lse,), (grad_lse,))
    gradients = torch.autograd.grad(outputs, inputs, grads)
    truth = expected(case, soft_cap, mask, grad_lse)
    for gradient, exact in zip(gradients, (truth.dq, truth.dk, truth.dv), strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("scale", [None, 0.3, -0.7, 0.0])
@pytest.mark.parametrize("score_mod", [None, soft_cap], ids=["plain", "soft_cap"])
def test_scale(options: Any, scale: float | None, score_mod: Any) -> None:
    case = make_case(q_len=33, kv_len=40, scale=scale)
    assert case.scale == (0.25 if scale is None else scale)
    check(case, score_mod, block_mask(causal, 33, 40), kernel_options=options)


@BACKENDS
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1)])
def test_groups_of_query_heads(options: Any, heads: int, kv_heads: int) -> None:
    case = make_case(batch=2, heads=heads, kv_heads=kv_heads, q_len=20)

    def by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + h * (kv_idx - q_idx) * 0.01

    check(case, by_head, block_mask(causal, 20), enable_gqa=True, kernel_options=options)


@BACKENDS
def test_keys_and_values_of_batch_1_are_shared(options: Any) -> None:
    case = make_case(batch=3, kv_batch=1, heads=2, q_len=20)
    check(case, None, block_mask(causal, 20), kernel_options=options)
    check(case, soft_cap, None, kernel_options=options)


@BACKENDS
@pytest.mark.parametrize("by", ["mask", "score_mod", "everything"])
def test_rows_that_attend_to_nothing(options: Any, by: str) -> None:
    """Output 0, lse and largest score -inf, gradients 0; what comes in for their lse goes no further."""
    inputs = leaves(make_case(q_len=40, heads=2))
    if by == "mask":
        mods: dict[str, Any] = {"block_mask": block_mask(every_third, 40)}
    elif by == "everything":
        mods = {"block_mask": block_mask(lambda b, h, q_idx, kv_idx: q_idx < 0, 40)}
    else:
        keep = torch.arange(40) % 3 == 1
        mods = {"score_mod": lambda s, b, h, q_idx, kv_idx: torch.where(keep[q_idx], s, -math.inf)}
    out, aux = flex_attention(*inputs, **mods, return_aux=AuxRequest(True, True), kernel_options=options)
    dead = torch.ones(40, dtype=torch.bool) if by == "everything" else torch.arange(40) % 3 != 1
    assert (out[:, :, dead] == 0).all()
    assert (aux.lse[:, :, dead] == -math.inf).all()
    assert (aux.max_scores[:, :, dead] == -math.inf).all()
    gradients = torch.autograd.grad((out, aux.lse), inputs, (torch.ones_like(out), torch.ones_like(aux.lse)))
    assert (gradients[0][:, :, dead] == 0).all()
    for result in (out, *gradients):
        assert torch.isfinite(result).all()
        assert bool((result != 0).any()) == (by != "everything")


@BACKENDS
def test_torchs_block_mask_works_too(options: Any) -> None:
    q, k, v = make_case(batch=2, q_len=65).inputs
    theirs = torch_flex.create_block_mask(causal, 2, None, 65, 65, device="cpu", BLOCK_SIZE=32)
    of_subclass = copy.copy(theirs)
    of_subclass.__class__ = type("OwnMask", (torch_flex.BlockMask,), {})
    expected = flex_attention(q, k, v, block_mask=block_mask(causal, 65), kernel_options=options)
    for mask in (theirs, of_subclass):
        assert torch.equal(flex_attention(q, k, v, block_mask=mask, kernel_options=options), expected)


@BACKENDS
@pytest.mark.parametrize(("B", "H"), [(None, None), (2, None), (None, 2), (2, 2)])
def test_a_mask_is_broadcast(options: Any, B: int | None, H: int | None) -> None:
    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = q_idx >= kv_idx
        if B:
            kept = kept & (kv_idx >= 5 * b)
        return kept & (kv_idx != h) if H else kept

    case = make_case(batch=2, q_len=40)
    check(case, None, block_mask(mod, 40, B=B, H=H), kernel_options=options)


@BACKENDS
def test_infinite_branches_of_a_score_mod_are_a_mask(options: Any) -> None:
    q, k, v = make_case(q_len=70).inputs
    by_mask = flex_attention(q, k, v, block_mask=block_mask(causal, 70), kernel_options=options)
    by_score = flex_attention(q, k, v, causal_score, kernel_options=options)
    torch.testing.assert_close(by_score, by_mask, rtol=1e-5, atol=1e-6)


@BACKENDS
def test_infinite_branches_and_a_mask_together(options: Any) -> None:
    case = make_case(q_len=50)
    check(case, causal_score, block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 4, 50), kernel_options=options)


@BACKENDS
def test_a_switch_that_turns_every_score_off(options: Any) -> None:
    """The second value of a captured number makes it an argument of the kernel; the mask must know it too."""

    def switched(on: bool) -> Callable[..., Any]:
        flag = torch.tensor(on)
        return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx >= kv_idx) & flag, score, -math.inf)

    q, k, v = make_case(q_len=20).inputs
    for on in (True, False, True):
        out = flex_attention(q, k, v, switched(on), kernel_options=options)
        assert bool((out == 0).all()) != on
        if on:
            torch.testing.assert_close(out, flex_attention(q, k, v, block_mask=block_mask(causal, 20)))


def test_a_new_value_of_a_closure_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first value is a constant of its kernels, the second makes it an argument, the rest ride along."""
    loaded: list[str] = []
    load = cache.load
    monkeypatch.setattr(cache, "load", lambda text, name: loaded.append(text) or load(text, name))

    def window(reach: int, slope: float) -> Callable[..., Any]:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.where(q_idx - kv_idx <= reach, score * slope, -math.inf)

        return score_mod

    case = make_case(q_len=33)
    counts = []
    for reach, slope in ((5, 0.5), (9, 0.25), (0, 1.5), (40, -2.0)):
        check(case, window(reach, slope), kernel_options=INTERPRET)
        counts.append(len(loaded))
    assert counts[0] > 0
    assert counts[1] == counts[-1]


@BACKENDS
@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_keys_and_values_of_lower_precision(options: Any, lower: torch.dtype) -> None:
    q, k, v = make_case(q_len=33).inputs
    out = flex_attention(q, k.to(lower), v.to(lower), kernel_options=options)
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        out, flex_attention(q, k.to(lower).float(), v.to(lower).float()), rtol=1e-5, atol=1e-5
    )


@BACKENDS
def test_two_runs_agree_bit_for_bit(options: Any) -> None:
    case = make_case(batch=2, heads=2, kv_heads=1, q_len=40)

    def run() -> list[Tensor]:
        inputs = leaves(case)
        out, lse = flex_attention(
            *inputs,
            soft_cap,
            block_mask(causal, 40),
            enable_gqa=True,
            return_lse=True,
            kernel_options=options,
        )
        return [out, lse, *torch.autograd.grad(out, inputs, case.grad_out)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_a_captured_tensor_that_changes_before_the_backward_is_refused() -> None:
    bias = torch.zeros(20)
    q, k, v = leaves(make_case(q_len=20))
    out = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * bias[q_idx])
    bias.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


OFFSETS = torch.tensor([0, 12, 17, 40])
DOCUMENT = torch.repeat_interleave(torch.arange(3), OFFSETS.diff())
TABLE = torch.linspace(-1, 1, 80)
SLOPES = torch.exp2(-torch.arange(1, 5, dtype=torch.float32))
TORCH_CAUSAL_DOCUMENTS = torch_flex.and_masks(causal, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv])
EXAMPLES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal mask": {"mask": causal},
    "causal score": {"score_mod": causal_score},
    "relative position": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx)},
    "relative position table": {"score_mod": lambda score, b, h, q, kv: score + TABLE[q - kv + 40]},
    "alibi": {"score_mod": lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q), "mask": causal},
    "soft cap": {"score_mod": soft_cap, "mask": causal},
    "sliding window": {"mask": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 6)},
    "prefix": {"mask": torch_flex.or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < 9)},
    "document": {"mask": TORCH_CAUSAL_DOCUMENTS},
    "noop": {"mask": torch_flex.noop_mask, "score_mod": lambda score, b, h, q_idx, kv_idx: score},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", EXAMPLES)
def test_torchs_documented_examples(name: str) -> None:
    """The same calls, with the module swapped."""
    case = make_case(batch=2, heads=4, q_len=40)
    mods = EXAMPLES[name]
    results = []
    for library in (torch_flex, flexmod):
        mask = None
        if "mask" in mods:
            mask = library.create_block_mask(mods["mask"], None, None, 40, 40, device="cpu")
        results.append(library.flex_attention(*case.inputs, mods.get("score_mod"), mask))
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [None, {"BACKEND": "REFERENCE"}], ids=["cpu", "reference"])
def test_an_error_names_the_line_of_this_mod(options: Any) -> None:
    """Equal graphs share what is made of them, but not their lines."""
    query, key, value = (torch.randn(1, 1, 20, 16) for _ in range(3))
    bias, own_bias, keep, own_keep = functions_of_a_table()
    flex_attention(query, key, value, bias(torch.randn(20)), kernel_options=options)
    create_block_mask(keep(torch.randn(20)), None, None, 20, 20, "cpu")
    table = torch.randn(10)
    for call, function in (
        (lambda: flex_attention(query, key, value, own_bias(table), kernel_options=options), own_bias),
        (lambda: create_block_mask(own_keep(table), None, None, 20, 20, "cpu"), own_keep),
    ):
        with pytest.raises(errors.CaptureBoundsError) as caught:
            call()
        assert f":{function.__code__.co_firstlineno + 1}:" in str(caught.value)


def functions_of_a_table() -> tuple[Any, ...]:
    def bias(table: torch.Tensor) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]

    def own_bias(table: torch.Tensor) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]

    def keep(table: torch.Tensor) -> Any:
        return lambda b, h, q_idx, kv_idx: table[kv_idx] > 0

    def own_keep(table: torch.Tensor) -> Any:
        return lambda b, h, q_idx, kv_idx: table[kv_idx] > 0

    return bias, own_bias, keep, own_keep
