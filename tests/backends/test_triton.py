"""The generated kernels in the interpreter against dense float64: out, lse, row maximum, gradients.

All memory that the backend allocates is full of NaN first, so that an element left unwritten shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import planned
import pytest
import torch
from attention_cases import (
    ALIBI,
    ALIBI_GRAD,
    CAUSAL,
    DOCUMENT,
    HOLES,
    HOLES_GRAD,
    SOFTCAP,
    SOFTCAP_GRAD,
    block_lists,
    truth,
)  # fmt: skip
from planned import NOTHING, Gradients, Mod
from tiers import long_but
from torch import Tensor

from flexmod import flex_attention
from flexmod.backends import arguments, triton
from flexmod.backends.arguments import Forward, Problem
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.codegen import cache
from flexmod.codegen.kernels import Kernels, ModText
from flexmod.codegen.ladder import ENDS_SOON, short_length
from flexmod.codegen.render import render
from flexmod.codegen.variant import variant
from flexmod.errors import BlockMaskPartsError
from flexmod.runtime.plan import PlanWriter

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {HALF: 2e-3, BFLOAT: 1.5e-2, SINGLE: 5e-6}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


THREE = (3, 1)
both_forms = pytest.mark.parametrize("form", ["runs", "lists"])
mostly_runs = pytest.mark.parametrize("form", long_but({"runs"}, ["runs", "lists"]))

WITHIN = ModText(
    """@triton.jit
def mask_mod(b, h, q_idx, kv_idx):
    return q_idx % 32 >= kv_idx % 32""",
    "mask_mod(b, h, q_idx, kv_idx)",
)


@dataclass
class Case:
    """One attention. `dense` is the mask, [Bm, Hm, M, N], in blocks of `block`; `eager` is the score_mod."""

    q: Tensor
    k: Tensor
    v: Tensor
    dense: Tensor | None = None
    block: tuple[int, int] = (64, 64)
    separate_full: bool = True
    form: str = "runs"
    mask: ModText | None = None
    score: ModText | None = None
    grad: ModText | None = None
    eager: Any = None
    score_captured: Mod = NOTHING
    mask_captured: tuple[Tensor, ...] = ()
    scale: float = 0.25
    options: Any = None

    def __post_init__(self) -> None:
        self.lists: Any = None
        if self.dense is not None:
            self.lists = block_lists(self.dense, self.block, self.separate_full)
            self.lists.form = self.form

    def snapshot(self) -> MaskSnapshot | None:
        return self.lists.snapshot(self.mask_captured) if self.lists else None

    def kernels(self, backward: bool) -> Kernels:
        problem = Problem(None, None, self.snapshot(), self.scale)
        spec = triton.kernel_spec(self.q, self.k, self.v, problem, backward=backward)
        score, mask, grad = self.score, self.mask, self.grad
        return Kernels(
            spec, lambda s: cache.load(render(s, score, mask, grad), "case"), score, mask, grad,
            self.options or {}, interpreted=True,
        )  # fmt: skip

    def forward(self, want_max: bool = True) -> Forward:
        self.kept: list[Tensor] = []
        return planned.forward(
            self.kernels(False), self.q, self.k, self.v, scale=self.scale, mask=self.snapshot(),
            want_max=want_max, keep=self.kept, score_captured=self.score_captured,
        )  # fmt: skip

    def backward(
        self, forward: Forward, grad_out: Tensor, grad_lse: Tensor | None, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        return planned.backward(
            self.kernels(True), self.q, self.k, self.v, forward.out, forward.lse, grad_out, grad_lse, needs,
            self.kept, scale=self.scale, mask=self.snapshot(), score_captured=self.score_captured,
        )  # fmt: skip

    def check(self, backward: bool = True, grad_out: Tensor | None = None) -> None:
        forward = self.forward()
        assert forward.out.dtype == self.q.dtype and forward.lse.dtype == torch.float32
        if grad_out is None:
            grad_out = torch.randn_like(forward.out)
        grad_lse = torch.randn_like(forward.lse)
        expected = truth(self.q, self.k, self.v, self.scale, self.dense, self.eager, grad_out, grad_lse)
        tolerance = TOLERANCE[self.k.dtype]
        close(forward.out, expected.out, tolerance)
        close(forward.lse, expected.lse, 1e-5)
        close(forward.max_scores, expected.max_scores, 1e-5)
        if backward:
            found = self.backward(forward, grad_out, grad_lse, (True, True, True))
            close(found.query, expected.grad_q, tolerance)
            close(found.key, expected.grad_k, tolerance)
            close(found.value, expected.grad_v, tolerance)


def close(found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Infinities in the same places, and elsewhere within `tolerance` of the largest magnitude."""
    assert found is not None and expected is not None and found.shape == expected.shape
    finite = torch.isfinite(expected)
    assert torch.equal(found.double()[~finite], expected[~finite])
    error = (found.double() - expected)[finite].abs()
    assert (
        bool((error <= tolerance * expected[finite].abs().clamp(min=1.0).max()).all()) if len(error) else True
    )


def random(
    m: int, n: int, d: int = 16, dv: int = 16, *,
    heads: tuple[int, int] = (1, 1), batch: tuple[int, int] = (1, 1), dtype: torch.dtype = SINGLE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v; `heads` and `batch` are pairs of a number for q and one for k and v."""
    torch.manual_seed(m * 1000 + n)
    q = torch.randn(batch[0], heads[0], m, d).to(dtype)
    return (
        q,
        torch.randn(batch[1], heads[1], n, d).to(dtype),
        torch.randn(batch[1], heads[1], n, dv).to(dtype),
    )


def positions(m: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(m)[:, None], torch.arange(n)[None, :]


def causal(m: int, n: int) -> Tensor:
    i, j = positions(m, n)
    return (i >= j)[None, None]


def documents(m: int, n: int) -> tuple[Tensor, Tensor]:
    """Document numbers of the positions, and the mask."""
    doc = (torch.arange(max(m, n)) * 3 // max(m, n)).to(torch.int32)
    return doc, (doc[:m, None] == doc[None, :n])[None, None]


@pytest.mark.parametrize(
    "m, n, d, dv", [(1, 1, 16, 16), (33, 130, 24, 16), (130, 65, 64, 40), (64, 128, 16, 64)]
)
def test_lengths_and_head_dims(m: int, n: int, d: int, dv: int) -> None:
    Case(*random(m, n, d, dv)).check()


@pytest.mark.covering(1, long=1, costly=(THREE,))
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), THREE], ids=str)
def test_causal_blocks(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    Case(*random(130, 130, 24, heads=heads, dtype=dtype), dense=causal(130, 130), mask=CAUSAL).check()


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_causal_lists(dtype: torch.dtype) -> None:
    case = Case(*random(130, 130, 24, dtype=dtype), dense=causal(130, 130), mask=CAUSAL, form="lists")
    case.check()


@mostly_runs
def test_blocks_without_full_ones(form: str) -> None:
    Case(*random(65, 130), dense=causal(65, 130), mask=CAUSAL, separate_full=False, form=form).check()


@both_forms
def test_full_tiles_that_reach_over_the_end(form: str) -> None:
    case = Case(*random(65, 65), dense=torch.ones(1, 1, 65, 65, dtype=torch.bool), form=form)
    for axis in ("kv", "q"):
        partial, full = f"{axis}_num_blocks", f"full_{axis}_num_blocks"
        setattr(case.lists, full, getattr(case.lists, full) + getattr(case.lists, partial))
        getattr(case.lists, partial).zero_()
        getattr(case.lists, f"full_{axis}_indices").copy_(torch.arange(2).expand(1, 1, 2, 2))
    case.lists.full_tiles_padded = True
    case.check()


@mostly_runs
def test_blocks_of_several_tiles_and_of_unequal_sides(form: str) -> None:
    options = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32)
    Case(
        *random(130, 130), dense=causal(130, 130), mask=CAUSAL, block=(64, 128), options=options, form=form
    ).check()


@both_forms
def test_rows_of_several_runs(form: str) -> None:
    """Gaps of all widths in a row, full and partial blocks in turn, more than one kernel tile to a block."""
    kinds = torch.tensor([[1, 0, 2, 2, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0, 2], [2, 1, 2, 1, 2, 1, 2, 1]])
    dense = (kinds > 0).repeat_interleave(32, 0).repeat_interleave(32, 1)
    i, j = positions(96, 256)
    dense &= (kinds == 2).repeat_interleave(32, 0).repeat_interleave(32, 1) | (i % 32 >= j % 32)
    options = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16)
    case = Case(
        *random(96, 256), dense=dense[None, None], mask=WITHIN, block=(32, 32), options=options, form=form
    )
    case.check()


@both_forms
def test_mask_of_each_batch_entry_and_head(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(2, 2, 3, 2, generator=generator) > 0.5
    dense = dense.repeat_interleave(64, 2).repeat_interleave(64, 3)
    dense[0, 1] = False  # a head that sees nothing: its rows are dead
    Case(*random(192, 128, heads=(2, 2), batch=(2, 2)), dense=dense, form=form).check()


def test_expanded_lists_are_read_once() -> None:
    case = Case(*random(65, 65, heads=(2, 2), batch=(2, 2)), dense=causal(65, 65), mask=CAUSAL, form="lists")
    for name, value in vars(case.lists).items():
        if isinstance(value, Tensor):
            setattr(case.lists, name, value.expand(2, 2, *value.shape[2:]))
    snapshot = case.snapshot()
    assert snapshot is not None
    places = snapshot.with_tensors(arguments.places_of_mask(snapshot))  # type: ignore[arg-type]
    assert arguments.mask_arguments(PlanWriter(), places, "kv")["stride_mask_b"] == 0
    case.check()


def test_document_mask_loads_by_row_and_column() -> None:
    doc, dense = documents(130, 100)
    captured = doc.repeat_interleave(2)[::2]
    Case(*random(130, 100), dense=dense, mask=DOCUMENT, mask_captured=(captured,)).check()


def test_alibi_with_documents() -> None:
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0])
    doc, dense = documents(100, 100)
    i, j = positions(100, 100)
    Case(
        *random(100, 100, heads=(4, 2)),
        dense=dense, mask=DOCUMENT, score=ALIBI, grad=ALIBI_GRAD,
        eager=lambda s: s + slopes.double()[:, None, None] * (j - i),
        score_captured=Mod((slopes,)), mask_captured=(doc,),
    ).check()  # fmt: skip


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
def test_softcap_with_a_promoted_number(dtype: torch.dtype) -> None:
    Case(
        *random(70, 65, dtype=dtype), score=SOFTCAP, grad=SOFTCAP_GRAD, score_captured=Mod((), (2.0,)),
        eager=lambda s: 2 * torch.tanh(s / 2),
    ).check()  # fmt: skip


def test_score_mod_that_returns_minus_infinity() -> None:
    i, j = positions(65, 65)
    Case(
        *random(65, 65), score=HOLES, grad=HOLES_GRAD,
        eager=lambda s: torch.where(((i + j) % 3 > 0) & (i > 0), s, -torch.inf),
    ).check()  # fmt: skip


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scale_that_is_not_positive(scale: float) -> None:
    Case(*random(40, 65), dense=causal(40, 65), mask=CAUSAL, scale=scale).check()


def test_keys_shared_by_the_batch() -> None:
    Case(*random(65, 40, heads=(2, 1), batch=(3, 1)), dense=causal(65, 40), mask=CAUSAL).check()


def test_any_strides() -> None:
    m = n = 65
    q = torch.randn(2, m, 2, 24).transpose(1, 2)
    k = torch.randn(2, 2, 24, n).transpose(2, 3)
    v = torch.randn(2, 2, 2 * n, 32)[:, :, ::2, ::2]
    case = Case(q, k, v, dense=causal(m, n), mask=CAUSAL)
    case.check(grad_out=torch.randn(1, 1, 1, 1).expand(2, 2, m, 16))
    assert case.forward().out.transpose(1, 2).is_contiguous(), "the output lies in memory as the query does"


def test_lower_precision_keys() -> None:
    q, k, v = random(65, 65)
    Case(q, k.to(BFLOAT), v.to(BFLOAT)).check(backward=False)


def test_only_the_gradients_that_are_needed() -> None:
    case = Case(*random(33, 33))
    forward = case.forward(want_max=False)
    assert forward.max_scores is None
    found = case.backward(forward, torch.ones_like(forward.out), None, (False, False, True))
    assert found.query is None and found.key is None and found.value is not None
    found = case.backward(forward, torch.ones_like(forward.out), None, (True, 0, 0))
    assert found.query is not None and found.key is None and found.value is None


def test_reruns_agree_bit_for_bit() -> None:
    case = Case(*random(65, 65, heads=(2, 1)), dense=causal(65, 65), mask=CAUSAL)
    grad_out = torch.randn(1, 2, 65, 16)
    runs = []
    for _ in range(2):
        forward = case.forward()
        runs.append((*forward, *case.backward(forward, grad_out, None, (True, True, True))[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_backward_without_lists_by_column_is_refused() -> None:
    case = Case(*random(33, 33), dense=causal(33, 33), mask=CAUSAL)
    case.lists.q_num_blocks = case.lists.q_indices = None
    forward = case.forward()
    with pytest.raises(BlockMaskPartsError, match="block_mask has no q_num_blocks and q_indices"):
        case.backward(forward, forward.out, None, (False, True, False))
    assert case.backward(forward, forward.out, None, (True, 0, 0)).query is not None


@pytest.mark.parametrize(
    ("lengths", "dim", "dtype", "options", "forward", "backward"),
    [
        ((64, 64), 64, BFLOAT, {}, 64, 64),
        ((1, 49), 16, HALF, {"BLOCK_M": 32}, 64, 64),
        ((16, 9), 128, BFLOAT, {}, 16, 16),
        ((17, 32), 80, BFLOAT, {}, 32, 32),
        ((1, 16), 136, BFLOAT, {}, 0, 0),
        ((65, 64), 64, BFLOAT, {}, 256, 128),
        ((64, 128), 64, BFLOAT, {}, 256, 128),
        ((64, 129), 16, BFLOAT, {}, 256, 0),
        ((257, 1), 16, BFLOAT, {}, 0, 0),
        ((64, 64), 128, BFLOAT, {}, 0, 64),
        ((65, 1), 128, BFLOAT, {}, 0, 0),
        ((64, 64), 64, SINGLE, {}, 0, 0),
        ((64, 64), 64, torch.float8_e4m3fn, {}, 0, 0),
        ((64, 64), 64, BFLOAT, {"TEMPLATE": "hopper"}, 0, 0),
        ((64, 64), 64, BFLOAT, {"bwd_TEMPLATE": "portable"}, 64, 0),
        ((64, 64), 64, BFLOAT, {"fwd_tuned": True}, 0, 64),
    ],
)
def test_which_calls_are_short(
    lengths: tuple[int, int], dim: int, dtype: torch.dtype, options: dict[str, Any], forward: int,
    backward: int,
) -> None:  # fmt: skip
    q, kv = (torch.empty(1, 1, length, dim, dtype=dtype, device="meta") for length in lengths)
    problem = Problem(None, None, None, 1.0, options=tuple(options.items()))
    found = [triton.kernel_spec(q, kv, kv, problem, backward=way).short for way in (False, True)]
    assert found == [forward, backward]
    ahead = replace(variant(head_dim=dim, dtype=dtype), options=problem.options)
    for way, short in (("forward", forward), ("backward", backward)):
        assert ahead.of_length(max(lengths), way).spec.short == short


def test_masked_calls_of_more_than_64_queries_have_a_hopper_forward() -> None:
    """Its kernels take less time for them. They have a shape for rows that end soon."""
    case = Case(*random(65, 65, dtype=BFLOAT), dense=causal(65, 65), mask=CAUSAL)
    specs = [case.kernels(way).spec for way in (False, True)]
    assert [spec.short for spec in specs] == [ENDS_SOON, 128]
    for length, short in ((1024, ENDS_SOON), (1025, 0)):
        assert short_length(specs[0], length, {}) == short
        assert short_length(replace(specs[0], value_dim=65), length, {}) == 0
        assert short_length(replace(specs[0], mask_block=None), length, {}) == 0


def after_the_last(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Infinite for the key after the last one, which the tile has too."""
    return score / (kv_idx - 50.0)


def nothing_for_some(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Rows without a key, whose lse is -inf."""
    return score + torch.log(q_idx % 3)


SLOPES = torch.tensor([0.5, 2.0], requires_grad=True)
TABLE = torch.linspace(-1, 1, 256).view(2, 128).requires_grad_()
ALL = "dq statistics"


@pytest.mark.parametrize(
    ("lengths", "dims", "key_heads", "score_mod", "learned", "options", "spared"),
    [
        pytest.param((64, 64), (64, 64), 2, None, [], {}, ALL, marks=pytest.mark.long),
        ((37, 50), (24, 40), 2, after_the_last, [], {}, ALL),
        ((1, 64), (16, 16), 1, None, [], {}, ALL),
        ((30, 20), (32, 32), 2, nothing_for_some, [], {}, ALL),
        pytest.param(
            (64, 49), (128, 128), 1, lambda s, b, h, q, k: s + SLOPES.detach()[h] * (k - q), [], {}, ALL,
            marks=pytest.mark.long,
        ),
        ((49, 64), (64, 64), 2, lambda s, b, h, q, k: s * SLOPES[k % 2], [SLOPES], {}, ALL),
        ((49, 64), (64, 64), 2, lambda s, b, h, q, k: s * SLOPES[q % 2], [SLOPES], {}, ""),
        ((64, 64), (64, 64), 2, None, [], {"bwd_BLOCK_N1": 32}, ""),
        pytest.param((100, 128), (64, 64), 2, None, [], {}, "dq", marks=pytest.mark.long),
        ((20, 31), (32, 32), 2, lambda s, b, h, q, k: s * SLOPES[k % 2], [SLOPES], {}, ALL),
        ((16, 7), (64, 128), 1, None, [], {}, ALL),
        ((40, 50), (32, 32), 1, lambda s, b, h, q, k: s + TABLE[h, q - k + 64], [TABLE], {}, "dq"),
    ],
)
def test_short_backwards(
    lengths: tuple[int, int], dims: tuple[int, int], key_heads: int, score_mod: Any, learned: list[Tensor],
    options: dict[str, Any], spared: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """If a tile has all keys, the kernel for dK and dV makes dQ too; if no other one reads it, delta too.

    `spared` are the kernels that the backward does without.
    """
    inputs = random(*lengths, *dims, heads=(2, key_heads), batch=(2, 2), dtype=BFLOAT)
    grad_out, grad_lse = torch.randn(2, 2, lengths[0], dims[1]), torch.randn(2, 2, lengths[0])
    launched: list[str] = []
    launch = PlanWriter.launch

    def noted(self: PlanWriter, source: Any, kernel: str, *arguments: Any) -> None:
        launched.append(kernel)
        launch(self, source, kernel, *arguments)

    monkeypatch.setattr(PlanWriter, "launch", noted)
    found = []
    for backend, dtype in (("INTERPRET", BFLOAT), ("REFERENCE", torch.float64)):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        out, lse = flex_attention(
            *given, score_mod, enable_gqa=key_heads == 1, return_lse=True,
            kernel_options={"BACKEND": backend, **options},
        )  # fmt: skip
        grads = grad_out.to(out.dtype), grad_lse.to(lse.dtype)
        found.append((out, *torch.autograd.grad((out, lse), [*given, *learned], grads)))
    assert {"dq", "statistics"} - set(launched) == set(spared.split())
    for ours, exact in zip(*found, strict=True):
        close(ours, exact.double(), TOLERANCE[BFLOAT])
