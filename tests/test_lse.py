"""What is built on (out, lse): parts of the keys merged as in ring attention, and attention sinks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from reference_case import Case, expected, make_case
from torch import Tensor

from flexmod import AuxOutput, AuxRequest, apply_sink, create_block_mask, errors, flex_attention

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}
# by option and dtype: how far from float64, of values near 1
PATHS = pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        (None, torch.float64, 1e-13),
        (None, torch.float32, 3e-6),
        (REFERENCE, torch.float64, 1e-13),
        (INTERPRET, torch.float32, 3e-6),
        (INTERPRET, torch.float16, 4e-3),
    ],
    ids=["cpu-float64", "cpu-float32", "reference-float64", "interpret-float32", "interpret-float16"],
)
LENGTH = 53


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys, from the attention to each: out [B, H, M, D] and lse [B, H, M]."""
    total = torch.logaddexp(lse, other_lse)
    alive = total > -torch.inf
    share, other_share = (torch.where(alive, x - total, -torch.inf).exp() for x in (lse, other_lse))
    return share[..., None] * out + other_share[..., None] * other, total


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def kept(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Causal; queries 7 and 20 attend to nothing in any part."""
    return (q_idx >= kv_idx) & (q_idx != 7) & (q_idx != 20)


def mask_of_keys(first: int, last: int) -> Any:
    """The mask of a part of the keys: its positions start at `first`."""
    return create_block_mask(
        lambda b, h, q_idx, kv_idx: kept(b, h, q_idx, kv_idx + first), None, None, LENGTH, last - first,
        device="cpu", BLOCK_SIZE=16,
    )  # fmt: skip


def close(found: Any, wanted: Any, tolerance: float) -> None:
    for x, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=tolerance * (1 + largest(exact)))


def largest(x: Tensor) -> float:
    return x[x.isfinite()].abs().max().item()


@pytest.mark.covering(1)
@PATHS
@pytest.mark.parametrize("borders", [(0, 32, LENGTH), (0, 5, 37, LENGTH)], ids=str)
def test_a_ring_of_parts_of_the_keys(
    borders: tuple[int, ...], options: Any, dtype: torch.dtype, tolerance: float
) -> None:
    """Out, lse and the gradients through both, as of one call on all keys; most parts have dead rows."""
    case = make_case(heads=4, kv_heads=2, q_len=LENGTH, dtype=dtype)
    q, k, v = leaves = [x.requires_grad_() for x in case.inputs]
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(dtype, torch.float32))
    for first, last in pairwise(borders):
        part = flex_attention(
            q, k[:, :, first:last], v[:, :, first:last], capped, mask_of_keys(first, last),
            enable_gqa=True, return_lse=True, kernel_options=options,
        )  # fmt: skip
        out, lse = merge(out, lse, *part)
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(5)).to(lse.dtype)
    gradients = torch.autograd.grad((out, lse), leaves, (case.grad_out.to(out.dtype), grad_lse))
    truth = expected(case, capped, mask_of_keys(0, LENGTH), grad_lse)
    close((out, lse, *gradients), (truth.out, truth.lse, truth.dq, truth.dk, truth.dv), tolerance)
    assert out[:, :, [7, 20]].eq(0).all() and gradients[0][:, :, [7, 20]].eq(0).all()


@PATHS
def test_a_sink_of_each_head(options: Any, dtype: torch.dtype, tolerance: float) -> None:
    """A learned score with no value beside it, in every row's softmax: gradients reach it through the lse."""
    case = make_case(heads=4, kv_heads=2, q_len=LENGTH, dtype=dtype)
    real = torch.promote_types(dtype, torch.float32)
    leaves = [x.requires_grad_() for x in case.inputs]
    sink = torch.tensor([-1.0, 0.0, 1.5, 4.0], dtype=real, requires_grad=True)
    out, lse = flex_attention(
        *leaves, block_mask=mask_of_keys(0, LENGTH), enable_gqa=True, return_lse=True, kernel_options=options
    )
    out, _ = apply_sink(out, lse, sink)
    found = out, *torch.autograd.grad(out, (*leaves, sink), case.grad_out)
    close(found, dense_with_sink(case, sink), tolerance)


def test_a_sink_in_the_lse() -> None:
    """It counts as one more key, of rows that have none too; gradients come through both results."""
    out, lse = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    lse[:, :, 2], out[:, :, 2] = -torch.inf, 0.0
    sink = torch.tensor([-1.0, 0.5, 30.0], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (out, lse, sink)]
    found, total = apply_sink(*leaves)
    terms = torch.stack((lse, sink[:, None].expand_as(lse)), -1).detach()
    torch.testing.assert_close(total, terms.logsumexp(-1))
    torch.testing.assert_close(found, out * terms.softmax(-1)[..., :1])
    gradients = torch.autograd.grad(found.sum() + total.sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)
    torch.testing.assert_close(gradients[1][:, :, 2], torch.zeros(2, 3, dtype=torch.float64))


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also beside a row that attends to nothing."""
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    lse[:, :, 1], out[:, :, 1] = -torch.inf, 0.0
    leaves = [x.requires_grad_() for x in (out, lse, torch.tensor([-torch.inf, 0.0]))]
    found, total = apply_sink(*leaves)
    assert torch.equal(found[:, 0], out[:, 0]) and torch.equal(total[:, 0], lse[:, 0])
    assert found[:, 1, 1].eq(0).all() and total[:, 1, 1].eq(0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(found.sum() + total.sum(), leaves))


@pytest.mark.parametrize("sink", [0.0, torch.zeros(2), torch.zeros(1, 3), torch.zeros(3, dtype=torch.int64)])
def test_what_is_no_sink(sink: Any) -> None:
    with pytest.raises(errors.LibraryArgumentError, match=r"apply_sink: sink is .*shape \[3\], one number"):
        apply_sink(torch.zeros(1, 3, 5, 4), torch.zeros(1, 3, 5), sink)


@pytest.mark.parametrize(
    ("out", "lse", "facts"),
    [
        (torch.zeros(3, 5, 4), torch.zeros(3, 5), "out is torch.float32 [3, 5, 4]; it must be a floating"),
        (None, torch.zeros(1, 3, 5), "out is a NoneType; it must be a floating-point tensor [B, Hq, M, Dv]"),
        (torch.zeros(1, 3, 5, 4).int(), torch.zeros(1, 3, 5), "out is torch.int32 [1, 3, 5, 4]; it must"),
        (torch.zeros(1, 3, 5, 4), AuxOutput(torch.zeros(1, 3, 5)), "lse is an AuxOutput; it must be"),
        (
            torch.zeros(1, 3, 5, 4),
            torch.zeros(1, 5, 3),
            "lse is torch.float32 [1, 5, 3]; it must be a floating-point tensor of out's [B, Hq, M], "
            "[1, 3, 5]",
        ),
        (
            torch.zeros(1, 3, 5, 4),
            torch.zeros(1, 3, 5, dtype=torch.int32),
            "lse is torch.int32 [1, 3, 5]; it must be a floating-point tensor of out's [B, Hq, M], [1, 3, 5]",
        ),
    ],
)
def test_what_is_no_result_of_attention(out: Any, lse: Any, facts: str) -> None:
    with pytest.raises(errors.LibraryArgumentError) as caught:
        apply_sink(out, lse, torch.zeros(3))
    assert str(caught.value).startswith(f"apply_sink: {facts}")
    assert str(caught.value).endswith("write out, lse = flex_attention(query, key, value, return_lse=True).")


def dense_with_sink(case: Case, sink: Tensor) -> tuple[Tensor, ...]:
    """In float64, with the sink as a column more; then the gradients of q, k, v and the sink."""
    leaves = [x.detach().double().requires_grad_() for x in (*case.inputs, sink)]
    q, k, v, sink = leaves
    group = q.shape[1] // k.shape[1]
    scores = case.scale * q @ k.repeat_interleave(group, 1).mT
    q_idx, kv_idx = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    scores = scores.masked_fill(~kept(None, None, q_idx, kv_idx), -torch.inf)
    column = sink[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    out = weights @ v.repeat_interleave(group, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, case.grad_out.double())


@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"])
def test_a_penalty_of_the_lse_by_either_name(options: Any) -> None:
    """As a z-loss takes it: return_lse and return_aux give the same gradient, in one call or with out."""
    case = make_case(q_len=33)
    gradients = []
    for given in ({"return_lse": True}, {"return_aux": AuxRequest(lse=True, max_scores=True)}):
        leaves = [x.detach().requires_grad_() for x in case.inputs]
        _, aux = flex_attention(*leaves, capped, kernel_options=options, **given)
        lse = aux if isinstance(aux, Tensor) else aux.lse
        gradients.append(torch.autograd.grad(lse.square().sum(), leaves, allow_unused=True))
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert gradients[0][0].abs().sum() > 0


@pytest.mark.parametrize("options", [None, REFERENCE, INTERPRET], ids=["cpu", "reference", "interpret"])
@pytest.mark.parametrize("score", [1e5, 3e6, 1e20])
def test_gradient_of_the_lse_of_large_scores(options: Any, score: float) -> None:
    """Four equal scores, of which float32 rounds the logarithm of their sum."""
    query = torch.ones(1, 1, 2, 16, requires_grad=True)
    key, value = torch.full((1, 1, 4, 16), score), torch.randn(1, 1, 4, 16)
    _, lse = flex_attention(query, key, value, scale=1 / 16, return_lse=True, kernel_options=options)
    (found,) = torch.autograd.grad(lse.sum(), query)
    torch.testing.assert_close(found, key[:, :, :2] / 16)


@pytest.mark.parametrize("options", [None, REFERENCE, INTERPRET], ids=["cpu", "reference", "interpret"])
def test_a_row_of_nan_is_no_empty_row(options: Any) -> None:
    query, key, value = make_case(heads=1, q_len=LENGTH, head_dim=16).inputs
    key[0, 0, 30] = float("nan")
    mask = create_block_mask(late, None, None, LENGTH, LENGTH, "cpu")
    wanted = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(query, key, value, block_mask=mask, return_aux=wanted, kernel_options=options)
    for found in (aux.lse, aux.max_scores):
        assert found[0, 0, 5:30].isfinite().all() and found[0, 0, 30:].isnan().all()
        assert (found[0, 0, :5] == -torch.inf).all()
    assert not out[0, 0, :5].any()


def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Causal, and the first five rows attend to nothing."""
    return (q_idx >= kv_idx) & (q_idx >= 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [None, "INTERPRET", "REFERENCE"])
@pytest.mark.parametrize("key", [0, 38])
def test_an_infinite_score_spoils_its_own_row_alone(
    key: int, backend: str | None, dtype: torch.dtype
) -> None:
    q, k, v = (x.to(dtype) for x in torch.randn(3, 1, 1, 39, 16, generator=torch.Generator().manual_seed(0)))
    options: Any = {"BACKEND": backend} if backend else None

    def infinite(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx == 1) & (kv_idx == key), torch.inf, score)

    out, lse = flex_attention(q, k, v, infinite, return_lse=True, kernel_options=options)
    plain, of_plain = flex_attention(q, k, v, return_lse=True, kernel_options=options)
    others = torch.arange(39) != 1
    assert out[0, 0, 1].isnan().all()
    assert lse[0, 0, 1].isinf() if backend == "REFERENCE" else lse[0, 0, 1].isnan()
    torch.testing.assert_close(out[:, :, others], plain[:, :, others])
    torch.testing.assert_close(lse[:, :, others], of_plain[:, :, others])
