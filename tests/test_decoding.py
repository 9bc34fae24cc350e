"""Few queries on many keys: rows of several heads in one tile, and programs that share its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_cases import BRAIN, CASES, HALF, SINGLE, check, fill
from torch import Tensor

from flexmod import AuxRequest, BlockMask, create_block_mask, errors, flex_attention, masks, mods
from flexmod.backends.arguments import Problem
from flexmod.backends.decoding import decoding, is_decoding, packed_graph
from flexmod.backends.families import INTERPRETED
from flexmod.calls import prepared
from flexmod.codegen.spec import Decoding
from flexmod.ir.passes import optimize
from flexmod.ir.trace import trace


@pytest.mark.parametrize("name", CASES)
def test_programs_share_the_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, 16)
    check(name, "cpu", True, monkeypatch, BACKEND="INTERPRET")


@pytest.mark.parametrize("name", ["one query", "three queries", "window", "table", "dead rows"])
def test_a_program_has_all_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, 1)
    check(name, "cpu", False, monkeypatch, BACKEND="INTERPRET")


def empty(*shape: int, dtype: torch.dtype = BRAIN) -> Tensor:
    return torch.empty(1, dtype=dtype).expand(shape)


PLAIN = Problem(None, None, None, 1.0)
SAME = Problem(None, None, None, 1.0, (("deterministic", True),))
FORCED = Problem(None, None, None, 1.0, (("FORCE_USE_FLEX_ATTENTION", True),))
PORTABLE = Problem(None, None, None, 1.0, (("fwd_TEMPLATE", "portable"),))


@pytest.mark.parametrize(
    ("sizes", "dim", "problem", "found"),
    [
        # batch, heads, heads of keys, queries, keys
        ((1, 32, 8, 1, 8192), 128, PLAIN, Decoding(16, 4, True)),
        ((64, 32, 8, 1, 8192), 128, PLAIN, Decoding(16, 4, False)),
        ((1, 32, 8, 1, 512), 128, PLAIN, Decoding(16, 4, False)),
        ((1, 32, 8, 1, 64), 128, PLAIN, None),
        ((2, 32, 8, 65, 8192), 128, PLAIN, None),
        ((1, 32, 8, 65, 8192), 128, PLAIN, Decoding(64, 1, True)),
        ((1, 32, 8, 65, 3000), 128, PLAIN, None),
        ((2, 32, 8, 1, 1024), 128, PLAIN, Decoding(16, 4, True)),
        ((16, 32, 8, 1, 1024), 128, PLAIN, Decoding(16, 4, False)),
        ((2, 32, 8, 65, 8192), 64, PLAIN, Decoding(64, 1, True)),
        ((1, 2, 2, 2048, 4096), 128, PLAIN, Decoding(64, 1, True)),
        ((1, 2, 2, 2048, 4096), 128, SAME, None),
        ((1, 32, 8, 32, 8192), 128, PLAIN, Decoding(64, 2, True)),
        ((8, 32, 32, 17, 8192), 128, PLAIN, None),
        ((8, 32, 32, 16, 8192), 128, PLAIN, Decoding(16, 1, False)),
        ((8, 32, 32, 17, 8192), 64, PLAIN, Decoding(32, 1, False)),
        ((2, 32, 32, 17, 8192), 128, PLAIN, Decoding(32, 1, True)),
        ((64, 32, 8, 1, 8192), 128, SAME, Decoding(16, 4, True)),
        ((2, 32, 32, 17, 8192), 128, SAME, None),
        ((1, 32, 8, 1, 8192), 128, FORCED, None),
        ((1, 32, 8, 1, 8192), 128, PORTABLE, None),
    ],
    ids=str,
)
def test_which_calls_have_few_queries(
    sizes: tuple[int, ...], dim: int, problem: Problem, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, 132, saved=768)
    batch, heads, kv_heads, m, n = sizes
    q, k = torch.empty(batch, heads, m, dim, dtype=BRAIN, device="meta"), empty(batch, kv_heads, n, dim)
    options = dict(problem.options)
    assert is_decoding(q, k, options, keep=False) == (found is not None)
    assert found is None or decoding(q, k, problem.mask, options) == found
    assert not is_decoding(q, k, options, keep=True)
    assert not is_decoding(q.double(), k, options, keep=False)


def test_a_row_knows_its_head_and_position() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + h * (q_idx - kv_idx)

    graph = trace(mod, "score").graph
    lines = str(packed_graph(graph, 4, 3)).splitlines()
    assert [line.split("#")[0].strip() for line in lines] == [
        "score():",
        "%0: int32 = mul(h, 4)",
        "%1: int32 = floor_divide(q_idx, 3)",
        "%2: int32 = add(%0, %1)",
        "%3: int32 = remainder(q_idx, 3)",
        "%4: int32 = sub(%3, kv_idx)",
        "%5: int32 = mul(%2, %4)",
        "%6: float32 = add(score, %5)",
        "return %6",
    ]
    single = str(optimize(packed_graph(graph, 4, 1)))
    assert "add(" in single and "remainder" not in single and "floor_divide" not in single


def agrees_with_the_reference(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None) -> None:
    results = [
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options={"BACKEND": backend})
        for backend in ("INTERPRET", "REFERENCE")
    ]
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("step", [16, 32])
def test_queries_of_overlapping_windows(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output has its batch entries between a head's rows and the next head."""
    fill(monkeypatch, 40)
    q = torch.randn(500, dtype=HALF).as_strided((2, 4, 3, 16), (step, 48, 16, 1))
    k, v = (torch.randn(2, 2, 700, 16, dtype=HALF) for _ in range(2))
    agrees_with_the_reference(q, k, v)


def test_heads_with_one_number_of_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the counts of a user's lists are an expanded view."""
    fill(monkeypatch, 40)
    counts = torch.full((1, 1, 1), 3, dtype=torch.int32).expand(1, 4, 1)
    orders = torch.stack([torch.randperm(6, dtype=torch.int32) for _ in range(4)])[None, :, None]
    mask = BlockMask.from_kv_blocks(counts, orders, seq_lengths=(2, 700), compute_q_blocks=False)
    q, k, v = (torch.randn(1, h, n, 16, dtype=HALF) for h, n in ((4, 2), (2, 700), (2, 700)))
    agrees_with_the_reference(q, k, v, mask)


def test_a_nan_stays_in_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, 40)
    q, k, v = (torch.randn(1, h, n, 16, dtype=HALF) for h, n in ((4, 1), (2, 700), (2, 700)))
    k[0, 1, 333] = torch.nan
    out, aux = flex_attention(
        q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True),
        kernel_options={"BACKEND": "INTERPRET"},
    )  # fmt: skip
    for result in (out[..., 0], aux.lse, aux.max_scores):
        assert result.isnan().flatten().tolist() == [False, False, True, True]


def test_the_same_call_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the usual kernels, and the same results but for rounding."""
    fill(monkeypatch, 40)
    q, k, v = (torch.randn(1, h, n, 16, dtype=HALF) for h, n in ((4, 2), (2, 700), (2, 700)))
    mask = create_block_mask(masks.causal(), None, None, 2, 700, device="cpu", q_offset=600)
    options: Any = {"enable_gqa": True, "kernel_options": {"BACKEND": "INTERPRET"}}
    plain = flex_attention(q, k, v, mods.alibi(4), mask, **options)
    tracked = flex_attention(q.clone().requires_grad_(), k, v, mods.alibi(4), mask, **options)
    (gradient,) = torch.autograd.grad(tracked.float().sum(), tracked.grad_fn.next_functions[0][0].variable)
    assert gradient.isfinite().all()
    torch.testing.assert_close(tracked.detach(), plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("keep", "keys", "dim", "dtype", "why"),
    [
        (True, 700, 16, HALF, "gradients are wanted"),
        (False, 64, 16, HALF, "it has 2 queries, 64 keys and heads of 16 columns in float16"),
        (False, 700, 129, SINGLE, "it has 2 queries, 700 keys and heads of 129 columns in float32"),
    ],
)
def test_a_call_that_asks_for_these_kernels(
    keep: bool, keys: int, dim: int, dtype: torch.dtype, why: str
) -> None:
    q, k, v = (torch.randn(1, 2, n, dim, dtype=dtype) for n in (2, keys, keys))
    problem = Problem(None, None, None, 1.0, (("BACKEND", "TRITON_DECODE"),))
    if keep:
        INTERPRETED.forward(problem, (q, k, v), want_max=False, keep=False)
    with pytest.raises(errors.DecodeBackendError, match=f"cannot run this call: {why}"):
        INTERPRETED.forward(problem, (q, k, v), want_max=False, keep=keep)


@pytest.mark.parametrize("dim", [32, 64])
def test_float32_queries_on_float8_keys_and_values(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels read float8, and convert it to the queries' dtype."""
    fill(monkeypatch, 16)
    q = torch.randn(1, 4, 2, dim)
    k, v = (torch.randn(1, 2, 700, dim).to(torch.float8_e4m3fn) for _ in range(2))
    call = INTERPRETED.forward(Problem(None, None, None, 0.2), (q, k, v), want_max=False, keep=False)
    out = call.run((q, k, v))[0]
    key, value = (x.double().repeat_interleave(2, 1) for x in (k, v))
    exact = torch.softmax(q.double() @ key.mT * 0.2, -1) @ value
    assert out is not None and (out.double() - exact).norm() < 3e-7 * exact.norm()


def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("score_mod", [None, scaled, mods.softcap(5.0)])
@pytest.mark.parametrize("first", [0, 500])
def test_a_query_of_nan(
    dtype: torch.dtype, score_mod: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chip's maximum ignores nan; some programs see a mask that keeps nothing."""
    fill(monkeypatch, 16)
    q, k, v = (torch.randn(1, 2, n, 32, dtype=dtype) for n in (2, 700, 700))
    q[0, 1, 1, 3] = torch.nan
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= first, 1, 1, 2, 700, device="cpu")
    results = [
        flex_attention(
            q, k, v, score_mod, mask,
            return_aux=AuxRequest(lse=True, max_scores=True), kernel_options={"BACKEND": backend},
        )
        for backend in ("INTERPRET", "REFERENCE")
    ]  # fmt: skip
    (out, aux), (exact, exact_aux) = results
    for found, expected in ((out, exact), (aux.lse, exact_aux.lse), (aux.max_scores, exact_aux.max_scores)):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_float32_queries_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels keep the same numbers for the merge as kernels for half types."""
    fill(monkeypatch, 16)
    monkeypatch.setattr(prepared, "float32_precision", lambda: "tf32")
    q, k, v = (torch.randn(1, heads, n, 32) for heads, n in ((4, 2), (2, 700), (2, 700)))
    agrees_with_the_reference(q, k, v)
