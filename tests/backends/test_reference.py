"""The dense reference against torch's attention in float64, and against its contract where torch has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_case import Case, make_case, problem_of
from torch import Tensor

import flexmod
from flexmod.backends import in_torch
from flexmod.block_mask.format import BlockMask


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Causal, and the first five rows attend to nothing."""
    return (q_idx >= kv_idx) & (q_idx >= 5)


def dead_row(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx != 2)


def run(case: Case, score_mod: Any = None, mask: BlockMask | None = None) -> Any:
    return in_torch.dense(problem_of(case, score_mod, mask), *case.inputs, want_max=True)


def by_torch(case: Case, mask: Tensor | None = None) -> Tensor:
    group = case.q.shape[1] // case.k.shape[1]
    k, v = (x.expand(len(case.q), -1, -1, -1).repeat_interleave(group, 1) for x in (case.k, case.v))
    return torch.nn.functional.scaled_dot_product_attention(case.q, k, v, attn_mask=mask, scale=case.scale)


SHAPES: list[dict[str, Any]] = [
    {},
    {"q_len": 1, "kv_len": 7},
    {"q_len": 33, "kv_len": 65, "value_dim": 5},
    {"heads": 6, "kv_heads": 2, "head_dim": 3},
    {"batch": 3, "kv_batch": 1, "heads": 4, "kv_heads": 1, "scale": 0.7},
    {"layout": "bshd", "batch": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_torchs_attention(shape: dict[str, Any]) -> None:
    case = make_case(dtype=torch.float64, **shape)
    result = run(case)
    torch.testing.assert_close(result.out, by_torch(case))
    group = case.q.shape[1] // case.k.shape[1]
    scores = case.scale * case.q @ case.k.repeat_interleave(group, 1).mT
    torch.testing.assert_close(result.lse, scores.logsumexp(-1))
    torch.testing.assert_close(result.max_scores, scores.amax(-1))


def test_mask_and_score_mod() -> None:
    case = make_case(dtype=torch.float64, batch=2, heads=4, q_len=37, kv_len=37)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    mask = flexmod.create_block_mask(causal, None, None, 37, 37, device="cpu", BLOCK_SIZE=16)
    distance = torch.arange(37) - torch.arange(37)[:, None]
    bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
    torch.testing.assert_close(run(case, alibi, mask).out, by_torch(case, bias[None]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    result = run(case)
    assert (result.out.dtype, result.lse.dtype, result.max_scores.dtype) == (
        dtype,
        torch.float32,
        torch.float32,
    )
    exact = Case(*(x.double() for x in (*case.inputs, case.grad_out)), case.scale)
    assert (result.out - run(exact).out).abs().max() <= 4 * torch.finfo(dtype).eps


def test_maximum_only_when_asked() -> None:
    case = make_case()
    assert in_torch.dense(problem_of(case), *case.inputs, want_max=False).max_scores is None


def test_lists_decide_before_the_mask_mod() -> None:
    """A tile not listed is skipped though the mask mod keeps it; a full one counts though it does not."""

    def upper(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx <= kv_idx

    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    partial = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[0, 1]]], dtype=torch.int32)
    full = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, partial, full_counts, full, 8, upper, seq_lengths=(13, 13))
    rows, columns = torch.arange(13)[:, None], torch.arange(13)
    same_tile = rows // 8 == columns // 8
    dense = (same_tile & (rows <= columns)) | ((rows >= 8) & (columns < 8))
    case = make_case(dtype=torch.float64, q_len=13)
    torch.testing.assert_close(run(case, None, mask).out, by_torch(case, dense))


def test_dead_rows() -> None:
    case = make_case(dtype=torch.float64, q_len=20)
    mask = flexmod.create_block_mask(late, None, None, 20, 20, device="cpu", BLOCK_SIZE=4)
    q, k, v = (x.requires_grad_() for x in case.inputs)
    result = in_torch.dense(problem_of(case, None, mask), q, k, v, want_max=True)
    out, lse, largest = result.out, result.lse, result.max_scores
    assert out[:, :, :5].eq(0).all()
    assert lse[:, :, :5].eq(-torch.inf).all() and largest[:, :, :5].eq(-torch.inf).all()
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (case.grad_out, torch.ones_like(lse)))
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert dq[:, :, :5].eq(0).all()


def test_infinite_derivative_under_the_mask() -> None:
    """The derivative of a square root is infinite at 0: where that is masked, nothing of it comes through."""
    case = make_case(dtype=torch.float64, q_len=9)
    q, k, v = (x.abs().requires_grad_() for x in case.inputs)

    def root(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sqrt(score * torch.where(q_idx >= kv_idx, 1.0, 0.0))

    mask = flexmod.create_block_mask(causal, None, None, 9, 9, device="cpu")
    out = in_torch.dense(problem_of(case, root, mask), q, k, v, want_max=False).out
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("mask_mod", [None, pytest.param(causal, marks=pytest.mark.long), dead_row])
def test_gradients_of_first_and_second_order(mask_mod: Any) -> None:
    case = make_case(dtype=torch.float64, batch=2, heads=2, kv_heads=1, kv_batch=1, q_len=4, head_dim=2)
    table = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    mask = None
    if mask_mod is not None:
        mask = flexmod.create_block_mask(mask_mod, None, None, 4, 4, device="cpu", BLOCK_SIZE=3)

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3 * torch.tanh((score + table[kv_idx]) / 3)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        result = in_torch.dense(problem_of(case, capped, mask), q, k, v, want_max=False)
        return result.out, torch.exp(result.lse)

    inputs = (*(x.requires_grad_() for x in case.inputs), table)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_a_half_table_are_summed_in_float32(dtype: torch.dtype) -> None:
    case, found = make_case(heads=4, q_len=128, head_dim=16), {}
    for kind in (torch.float64, dtype):
        table = torch.zeros(4, 11, dtype=kind, requires_grad=True)

        def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Tensor = table) -> Any:
            return score + table[h, (q_idx - kv_idx).clamp(-5, 5) + 5]

        out = flexmod.flex_attention(*case.inputs, near, kernel_options={"BACKEND": "REFERENCE"})
        (found[kind],) = torch.autograd.grad(out.square().sum(), table)
    error = (found[dtype].double() - found[torch.float64]).norm() / found[torch.float64].norm()
    assert error < 0.01


def test_masked_scores_do_not_reach_captured_tensors() -> None:
    case = make_case(heads=2, q_len=40, head_dim=16)
    learned = torch.rand(2, 40, requires_grad=True)
    mask = flexmod.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx > kv_idx, None, None, 40, 40, "cpu")

    def root(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.sqrt((q_idx - kv_idx) * learned[h, kv_idx])

    leaves = [x.requires_grad_() for x in case.inputs]
    found = []
    for options in ({"BACKEND": "REFERENCE"}, None):
        out = flexmod.flex_attention(*leaves, root, mask, kernel_options=options)
        found.append(torch.autograd.grad(out.square().sum(), [*leaves, learned]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
