"""The block-sparse CPU backend against the float64 reference, by flash attention and in blocks of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from odd_tensors import Renamed
from reference_case import (
    Case,
    LargestTensor,
    Limit,
    Truth,
    assert_within,
    eager_error_bound,
    expected,
    limits_beside,
    make_case,
    problem_of,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flexmod
from flexmod.backends import blocks, flash, in_torch, products, tiles
from flexmod.backends.arguments import BackwardInputs, Forward, Gradients
from flexmod.block_mask.format import BlockMask

ALL = (True, True, True)


@pytest.fixture(params=["flash", "blocks"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs twice: by flash attention where it serves, and without it. All products are torch's."""
    monkeypatch.setattr(products, "_has_quick_product", lambda: False)
    if request.param == "blocks":
        monkeypatch.setattr(in_torch, "serves", lambda problem: False)
    return str(request.param)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


def sinks_and_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Columns with a gap."""
    return (kv_idx < 20) | ((q_idx >= kv_idx) & (q_idx - kv_idx <= 20))


def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Dead rows: a whole tile and a part of the next."""
    return (q_idx >= kv_idx) & (q_idx >= 37)


REACH = torch.tensor([3, 50, 17, 90, 1, 30])
DOCUMENT = torch.stack([torch.arange(200) // 30, torch.arange(200) // 77, torch.arange(200) // 50])


def reach_of_the_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= REACH[h]


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return document(b, h, q_idx, kv_idx) & reach_of_the_head(b, h, q_idx, kv_idx)


SLOPES = 2.0 ** -torch.arange(1.0, 7.0)
RELATIVE = torch.randn(6, 399, generator=torch.Generator().manual_seed(3))
BIAS = torch.randn(3, 6, 200, generator=torch.Generator().manual_seed(1))


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A bias along diagonals."""
    return score + RELATIVE[h, q_idx - kv_idx + 199]


def distant(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A bias that removes keys."""
    return torch.where((q_idx - kv_idx).abs() % 5 < 3 + b, score + (BIAS[b, h, kv_idx] - 0.1 * h), -torch.inf)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2 * torch.tanh(score / 2)


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * score + BIAS[b, h, kv_idx]


def holes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((q_idx + kv_idx) % 3 == h % 3, score, -float("inf"))


def constant(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(kv_idx > 3, 1.0, 2.0)


BIASED = [alibi, relative, distant]


def block_mask(case: Case, mask_mod: Any, block: int | tuple[int, int] = 32) -> BlockMask:
    batch, heads, rows, _ = case.q.shape
    return flexmod.create_block_mask(
        mask_mod, batch, heads, rows, case.k.shape[2], device="cpu", BLOCK_SIZE=block
    )


def run(
    case: Case,
    score_mod: Any = None,
    mask: BlockMask | None = None,
    grad_lse: Tensor | None = None,
    needs: Any = ALL,
) -> tuple[Forward, Gradients]:
    problem = problem_of(case, score_mod, mask)
    result = in_torch.forward(problem, *case.inputs, want_max=False)
    largest = in_torch.forward(problem, *case.inputs, want_max=True)
    torch.testing.assert_close(largest.lse, result.lse)
    result = result._replace(max_scores=largest.max_scores)
    gradients = in_torch.backward(
        problem, BackwardInputs(case.grad_out, grad_lse, *case.inputs, result.out, result.lse), needs
    )
    return result, gradients


def check(case: Case, score_mod: Any = None, mask: BlockMask | None = None) -> None:
    """out and gradients within the limits of the case's dtype; lse and the maximum within float32's."""
    truth = expected(case, score_mod, mask)
    result, grads = run(case, score_mod, mask)
    assert grads.query is not None and grads.key is not None and grads.value is not None
    found = {"out": result.out, "dq": grads.query, "dk": grads.key, "dv": grads.value}
    assert {x.dtype for x in found.values()} == {case.q.dtype}
    assert all(x is not None and x.is_contiguous() for x in grads[:3])
    if case.q.dtype == torch.float64:
        for name, x in found.items():
            torch.testing.assert_close(x, getattr(truth, name), rtol=1e-11, atol=1e-11)
    else:
        limits = eager_error_bound(case, truth, score_mod, mask)
        if case.q.dtype == torch.float32:
            # Sums have another order than eager's.
            limits = {name: Limit(1.25 * limit.rms, 2 * limit.max) for name, limit in limits.items()}
        if case.q.shape[2] == 1 and score_mod is mask is None:
            # The weights of one row have the error of its rounded lse in common, as in SDPA.
            beside_sdpa = limits_beside(of_sdpa(case, truth), case, truth)
            limits = {name: Limit(*map(max, limits[name], beside_sdpa[name])) for name in limits}
        assert_within(found, truth, limits)
    wanted = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    assert result.max_scores is not None and (result.lse.dtype, result.max_scores.dtype) == (wanted, wanted)
    for x, exact in ((result.lse, truth.lse), (result.max_scores, truth.max_scores)):
        torch.testing.assert_close(x.double(), exact, rtol=3e-6, atol=3e-6)


def of_sdpa(case: Case, truth: Truth) -> Truth:
    q, k, v = inputs = [x.detach().requires_grad_() for x in case.inputs]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=case.scale)
    return Truth(out.detach(), truth.lse, truth.max_scores, *torch.autograd.grad(out, inputs, case.grad_out))


SHAPES: list[dict[str, Any]] = [
    {"q_len": 1},
    {"q_len": 1, "kv_len": 150},
    {"q_len": 129, "kv_len": 1},
    {"q_len": 200, "kv_len": 77, "value_dim": 40},
    {"q_len": 77, "kv_len": 200, "head_dim": 5, "scale": 0.3},
    {"heads": 6, "kv_heads": 2, "q_len": 130, "batch": 2},
    {"heads": 6, "kv_heads": 2, "q_len": 50, "batch": 3, "kv_batch": 1},
    {"heads": 3, "kv_heads": 1, "q_len": 140, "layout": "bshd", "batch": 2},
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask_mod", [None, causal])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: dict[str, Any], mask_mod: Any, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, **shape)
    check(case, None, None if mask_mod is None else block_mask(case, mask_mod))


LAYOUTS: list[dict[str, Any]] = [
    {"batch": 3, "heads": 6, "q_len": 150},
    {"batch": 3, "heads": 6, "kv_heads": 2, "q_len": 150},
    {"batch": 3, "heads": 6, "kv_heads": 3, "kv_batch": 1, "q_len": 150},
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask_mod", [window, sinks_and_window, late, reach_of_the_head, document, both])
def test_masks(mask_mod: Any, layout: dict[str, Any]) -> None:
    case = make_case(dtype=torch.float64, **layout)
    check(case, None, block_mask(case, mask_mod))


@pytest.mark.covering(2)
@pytest.mark.parametrize("block", [16, 128, 512, (16, 64), (256, 32)], ids=str)
@pytest.mark.parametrize("mask_mod", [causal, sinks_and_window, both])
def test_block_sizes(mask_mod: Any, block: int | tuple[int, int]) -> None:
    case = make_case(dtype=torch.float64, batch=2, heads=2, q_len=190, kv_len=150)
    check(case, capped, block_mask(case, mask_mod, block))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask_mod", [None, late, both])
@pytest.mark.parametrize("score_mod", [*BIASED, capped, biased, holes, constant])
def test_score_mods(score_mod: Any, mask_mod: Any, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, batch=2, heads=6, kv_heads=2, q_len=77, kv_len=101)
    check(case, score_mod, None if mask_mod is None else block_mask(case, mask_mod))


@pytest.mark.covering(2, long=2)
@pytest.mark.parametrize("budget", [1, 300, 2000, 20000])
@pytest.mark.parametrize("mask_mod", [None, sinks_and_window, document])
def test_any_budget(mask_mod: Any, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, batches and heads are cut apart as the budget asks, a single row at the least."""
    monkeypatch.setattr(blocks, "BUDGET", budget)
    monkeypatch.setattr(flash, "BIASES", budget)
    monkeypatch.setattr(tiles, "MASKED", budget)
    case = make_case(dtype=torch.float64, batch=2, heads=6, kv_heads=2, q_len=36)
    for block in ((64, 16), (16, 16)):  # tiles that the end cuts, and full ones beside partial ones
        check(case, alibi, None if mask_mod is None else block_mask(case, mask_mod, block))


def test_lists_decide_before_the_mask_mod() -> None:
    """In one group of q tiles, a column of tiles may be full, partial and not listed."""
    generator = torch.Generator().manual_seed(2)
    kinds = torch.randint(0, 3, (2, 1, 7, 6), generator=generator)
    lists = []
    for kind in (1, 2):
        chosen = (kinds == kind).int()
        lists += [
            chosen.sum(-1, dtype=torch.int32),
            chosen.argsort(dim=-1, descending=True, stable=True).int(),
        ]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(100, 90))
    check(make_case(dtype=torch.float64, batch=2, q_len=100, kv_len=90), None, mask)


def test_lists_without_full_tiles() -> None:
    mask = flexmod.create_block_mask(causal, 1, 1, 90, 90, "cpu", 32, separate_full_blocks=False)
    check(make_case(dtype=torch.float64, q_len=90), None, mask)


def test_dead_rows() -> None:
    case = make_case(q_len=100)
    result, grads = run(case, None, block_mask(case, late), torch.full((1, 2, 100), torch.nan))
    assert result.out[:, :, :37].eq(0).all() and result.lse[:, :, :37].eq(-torch.inf).all()
    assert result.max_scores is not None and result.max_scores[:, :, :37].eq(-torch.inf).all()
    assert grads.query is not None and grads.query[:, :, :37].eq(0).all()


def test_nothing_is_attended() -> None:
    case = make_case(q_len=40)
    mask = block_mask(case, lambda b, h, q_idx, kv_idx: q_idx < 0)
    result, grads = run(case, None, mask)
    assert result.out.eq(0).all() and result.lse.eq(-torch.inf).all()
    assert all(x is not None and x.eq(0).all() for x in (grads.query, grads.key, grads.value))


def test_infinite_derivative_under_the_mask() -> None:
    case = make_case(dtype=torch.float64, q_len=40)

    def root(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sqrt((score * score + 1) * torch.where(q_idx >= kv_idx, 1.0, 0.0))

    check(case, root, block_mask(case, causal))


@pytest.mark.parametrize("mask_mod", [None, late])
@pytest.mark.parametrize("score_mod", [None, relative, capped])
@pytest.mark.parametrize("value_dim", [16, 24])
def test_gradient_through_lse(value_dim: int, score_mod: Any, mask_mod: Any) -> None:
    case = make_case(dtype=torch.float64, heads=4, kv_heads=2, q_len=60, value_dim=value_dim)
    mask = None if mask_mod is None else block_mask(case, mask_mod)
    grad_lse = torch.randn(1, 4, 60, dtype=torch.float64)
    truth = expected(case, score_mod, mask, grad_lse)
    _, grads = run(case, score_mod, mask, grad_lse)
    for x, exact in zip(grads[:3], (truth.dq, truth.dk, truth.dv), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_what_is_needed(needs: tuple[int, int, int]) -> None:
    case = make_case(q_len=40)
    _, everything = run(case, capped)
    _, some = run(case, capped, needs=tuple(map(bool, needs)))
    for need, x, whole in zip(needs, some[:3], everything[:3], strict=True):
        assert torch.equal(x, whole) if need else x is None
    assert some.captures == ()


def test_maximum_only_when_asked() -> None:
    case = make_case()
    assert in_torch.forward(problem_of(case), *case.inputs, want_max=False).max_scores is None


def test_two_runs_agree_bit_for_bit() -> None:
    case = make_case(batch=2, heads=6, kv_heads=2, q_len=300, head_dim=32)
    first, second = (run(case, alibi, block_mask(case, sinks_and_window)) for _ in range(2))
    for x, y in zip((*first[0], *first[1][:3]), (*second[0], *second[1][:3]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("mask_mod", [None, late, reach_of_the_head])
def test_gradcheck(mask_mod: Any) -> None:
    case = make_case(dtype=torch.float64, batch=2, kv_batch=1, heads=2, kv_heads=1, q_len=40, head_dim=2)
    mask = None if mask_mod is None else block_mask(case, mask_mod, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flexmod.flex_attention(
            q, k, v, score_mod=capped, block_mask=mask, enable_gqa=True, return_lse=True
        )
        return out, torch.exp(lse)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in case.inputs), fast_mode=True)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, where scores would be 1024 x 1024, no tensor is larger than the budget or an input."""
    monkeypatch.setattr(blocks, "BUDGET", 1 << 14)
    case = make_case(q_len=1024, heads=1)
    with LargestTensor() as seen:
        run(case, capped)
    assert seen.elements <= max(1 << 14, case.q.numel())


def test_empty_tiles_are_skipped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel multiplies all queries of a call by all its keys, below the diagonal where it is causal.

    A tall step may compute a few empty tiles.
    """
    case, scores = make_case(q_len=1024, heads=2), 0
    kernels = flash.flash_on_cpu()
    assert kernels is not None

    def counted(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, **rest: Any) -> Any:
        nonlocal scores
        rows, columns = query.shape[2], key.shape[2]
        assert not causal or rows == columns == 1024
        scores += query.shape[:2].numel() * (rows * (rows + 128) // 2 if causal else rows * columns)
        return kernels[0](query, key, value, dropout, causal, **rest)

    monkeypatch.setattr(flash, "flash_on_cpu", lambda: (counted, kernels[1]))

    def work(mask: BlockMask | None) -> int:
        nonlocal scores
        scores = 0
        with FlopCounterMode(display=False) as counter:
            in_torch.forward(problem_of(case, None, mask), *case.inputs, want_max=False)
        return scores if path == "flash" else counter.get_total_flops()

    whole = work(None)
    for mask_mod in (causal, window, sinks_and_window):
        mask = block_mask(case, mask_mod, 128)
        share = 1 - mask.sparsity() / 100
        assert share - 1e-3 <= work(mask) / whole <= tiles.WASTE * share


def calls_of_flash(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Notes `is_causal`, and whether there is a mask, of each call of the kernels."""
    calls: list[tuple[bool, bool]] = []
    kernels = flash.flash_on_cpu()
    assert kernels is not None

    def noted(number: int) -> Any:
        def call(*given: Any, **rest: Any) -> Any:
            calls.append((given[-1], rest["attn_mask"] is not None))
            return kernels[number](*given, **rest)

        return call

    monkeypatch.setattr(flash, "flash_on_cpu", lambda: (noted(0), noted(1)))
    return calls


def almost_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Causal but for one element on the diagonal of tiles."""
    return (q_idx >= kv_idx) & ((q_idx != 140) | (kv_idx != 139))


def causal_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Documents that end with tiles of 32."""
    return (q_idx >= kv_idx) & (q_idx // 64 == kv_idx // 64)


@pytest.mark.parametrize(
    ("mask_mod", "scale", "wanted"),
    [
        (None, 0.3, [(False, False)] * 3),
        (causal, 0.3, [(True, False)] * 3),
        (causal, -0.3, None),  # the kernel multiplies its -inf by the scale
        (causal, 0.0, None),
        (almost_causal, 0.3, None),
        (causal_documents, 0.3, [(True, False)] * 3),  # equal steps are one call
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_causal_is_what_the_elements_say(
    mask_mod: Any, scale: float, wanted: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of_flash(monkeypatch)
    case = make_case(dtype=torch.float64, q_len=192, scale=scale)
    check(case, None, None if mask_mod is None else block_mask(case, mask_mod))
    if path == "blocks":
        assert not calls
    elif wanted is None:
        assert calls and not any(causal for causal, _ in calls)
    else:
        assert calls == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_lse_is_no_yardstick(dtype: torch.dtype) -> None:
    """Its rounding would change the weights of equal keys."""
    case = make_case(dtype=dtype, q_len=40, kv_len=3, scale=1e7)
    case.k[:] = case.k[:, :, :1]
    _, grads = run(case)
    rtol = 8 * torch.finfo(dtype).eps
    assert grads.value is not None
    wanted = case.grad_out.sum(2, keepdim=True).expand_as(grads.value) / 3
    torch.testing.assert_close(grads.value, wanted, rtol=rtol, atol=8 * rtol)


def window_with_dead_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The last two rows of each tile attend to nothing."""
    return ((q_idx - kv_idx).abs() <= 20) & (q_idx % 32 < 30)


def equal_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 32 == kv_idx // 32) & (q_idx >= kv_idx)


RUNS: list[dict[str, Any]] = [
    {"batch": 2, "heads": 3},
    {"batch": 2, "heads": 6, "kv_heads": 2, "value_dim": 24},
    {"heads": 6, "kv_heads": 1, "value_dim": 40},
    {"batch": 3, "heads": 4, "kv_heads": 2, "kv_batch": 1},
    {"batch": 2, "heads": 3, "layout": "bshd", "dtype": torch.bfloat16},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("limit", [1 << 21, 1 << 14, 1])
@pytest.mark.parametrize("mask_mod", [window_with_dead_rows, equal_documents, reach_of_the_head])
@pytest.mark.parametrize("shape", RUNS, ids=str)
def test_equal_steps_run_as_one(
    shape: dict[str, Any], mask_mod: Any, limit: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that differ by their place alone are one call, in as many parts as memory asks for."""
    monkeypatch.setattr(flash, "RUN", limit)
    monkeypatch.setattr(tiles, "ROWS", 32)
    monkeypatch.setattr(tiles, "TALL", 32)
    case = make_case(**{"dtype": torch.float64, "q_len": 333, **shape})
    mask = block_mask(case, mask_mod)
    check(case, None, mask)
    calls = calls_of_flash(monkeypatch)
    if case.q.dtype == torch.float64:
        grad_lse = torch.randn(case.q.shape[:3], dtype=torch.float64)
        truth = expected(case, None, mask, grad_lse)
        _, grads = run(case, None, mask, grad_lse)
        for found, exact in zip(grads[:3], (truth.dq, truth.dk, truth.dv), strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11)
        if mask_mod is not reach_of_the_head and path == "flash" and limit != 1 << 14:
            assert (len(calls) > 20) == (limit == 1)


@pytest.mark.parametrize("score_mod", [None, *BIASED])
def test_biases_run_in_flash(score_mod: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_flash(monkeypatch)
    case = make_case(heads=6, q_len=150)
    run(case, score_mod, block_mask(case, late))
    assert bool(calls) == (path == "flash")


def test_two_sums_with_the_score_round_twice(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are no bias: (score + 1e9) - 1e9 is not the score, as tests/test_large_scores.py asks."""

    def twice(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (score + BIAS[b, h, kv_idx]) - 0.5

    calls = calls_of_flash(monkeypatch)
    case = make_case(heads=6, q_len=150)
    check(case, twice, block_mask(case, late))
    assert not calls


def early(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(kv_idx < 70, score, -torch.inf)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e160])
@pytest.mark.parametrize("score_mod", [None, relative, early])
def test_garbage_under_the_mask(score_mod: Any, garbage: float) -> None:
    """Keys that no query attends to may be no numbers, as their values' gradients show.

    They may also be so large that their scores overflow.
    """
    case = make_case(dtype=torch.float64, q_len=128)
    everything = score_mod is early
    mask = block_mask(case, lambda b, h, q_idx, kv_idx: (kv_idx < 70) | everything)
    case.q[:, :, 5] = 1e160
    clean, of_clean = run(case, score_mod, mask)
    case.k[:, :, 70:] = garbage
    found, grads = run(case, score_mod, mask)
    torch.testing.assert_close(found.out, clean.out)
    torch.testing.assert_close(grads.value, of_clean.value)


def test_large_scores_keep_their_weights() -> None:
    """One float32 lse of a row would lose digits."""
    case = make_case(q_len=100)
    case.q[..., 0] = 1e4
    case.k[..., 0] = 10.0
    check(case, None, block_mask(case, late))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_known_steps(shape: dict[str, Any]) -> None:
    """The second call takes its steps from the mask."""
    case = make_case(dtype=torch.float64, **shape)
    mask = block_mask(case, window)
    check(case, None, mask)
    check(case, None, mask)


def test_steps_follow_writes() -> None:
    """A write to a tensor that the mask captures reaches the elements of partial tiles."""
    case, reach = make_case(dtype=torch.float64, q_len=100), torch.tensor(20)
    mask = block_mask(case, lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= reach)
    check(case, None, mask)
    reach.fill_(21)
    check(case, None, mask)


def test_functions_of_renamed_captures() -> None:
    """A class without behavior of its own is that of a plain tensor, in functions of oneDNN too."""
    case = make_case(dtype=torch.float32, heads=3, q_len=40)
    leaves = [x.requires_grad_() for x in case.inputs]

    def run(table: Tensor) -> list[Tensor]:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.tanh(score + table[h]) * table[q_idx % 3]

        out = flexmod.flex_attention(*leaves, mod)
        return [out, *torch.autograd.grad(out, leaves, case.grad_out)]

    plain = torch.rand(3)
    assert all(map(torch.equal, run(plain), run(plain.as_subclass(Renamed))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two(dtype: torch.dtype) -> None:
    """The negligible ones are 0: some processors take a hundred times the time for denormal numbers."""
    least = -66.0 if dtype == torch.float32 else -95.0
    some = [0.0, 3.0, least + 0.5, least - 0.5, -140.0, -torch.inf, torch.inf, torch.nan]
    x = torch.tensor(some, dtype=dtype)
    wanted = torch.exp2(x.double()).masked_fill(x < least, 0.0)
    blocks.powers_of_two(x)
    torch.testing.assert_close(x.double(), wanted, rtol=3e-7, atol=0.0, equal_nan=True)
