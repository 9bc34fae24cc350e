"""Gradients at every edge: ragged lengths, dead rows, -inf from a score mod; layouts without copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from reference_case import LargestTensor, expected, make_case
from torch import Tensor

from flexmod import create_block_mask, flex_attention
from flexmod.backends import blocks
from flexmod.runtime import launch

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}
BLOCK = 16
TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_M1": 16, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 16}

# (queries, keys): one, one short of a tile, a tile, one more; tiles that are partial at one side or at both
EDGES = [(1, 1), (1, 17), (15, 16), (17, 1), (16, 17), (16, 15), (17, 16), (33, 31), (48, 32), (31, 33)]


def dead_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A whole tile of queries, every third of the others, and all keys of head 1 but one see nothing."""
    return (q_idx % 3 != 1) & ((q_idx < 16) | (q_idx >= 32)) & ((h == 0) | (kv_idx == 0))


def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Empty, partial and full tiles."""
    return (q_idx + 3 >= kv_idx) & (q_idx - kv_idx <= 20)


def holes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """-inf from a score mod that a mask cannot see: it comes from the score itself, too."""
    far = torch.where((q_idx + kv_idx) % 3 == 0, -math.inf, score * score)
    return torch.where(score > -2.0, far, -math.inf)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "dead rows": (capped, dead_rows),
    "band": (None, band),
    "infinite scores": (holes, None),
    "infinite scores in a band": (holes, band),
}
EVERY_EDGE = pytest.mark.parametrize(("rows", "columns"), EDGES, ids=lambda n: str(n))
EVERY_MOD = pytest.mark.parametrize("name", MODS)


def mods_of(name: str, rows: int, columns: int) -> tuple[Any, Any]:
    score_mod, mask_mod = MODS[name]
    if mask_mod is None:
        return score_mod, None
    return score_mod, create_block_mask(mask_mod, None, 2, rows, columns, device="cpu", BLOCK_SIZE=BLOCK)


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.covering(2, long=2)
@EVERY_EDGE
@EVERY_MOD
@pytest.mark.parametrize("options", [None, REFERENCE], ids=["cpu", "reference"])
def test_gradcheck(options: Any, name: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of out and lse, in float64, in steps of a few rows."""
    monkeypatch.setattr(blocks, "BUDGET", 600)
    monkeypatch.setattr("flexmod.backends.tiles.MASKED", 600)
    case = make_case(
        batch=2, kv_batch=1, heads=2, kv_heads=1, q_len=rows, kv_len=columns, head_dim=3, value_dim=2,
        dtype=torch.float64,
    )  # fmt: skip
    score_mod, mask = mods_of(name, rows, columns)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flex_attention(
            q, k, v, score_mod, mask, enable_gqa=True, return_lse=True, kernel_options=options
        )
        return out, torch.exp(lse)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in case.inputs), fast_mode=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rows", "columns"), EDGES[1::2], ids=lambda n: str(n))
@EVERY_MOD
@pytest.mark.parametrize("options", [None, {**INTERPRET, **TILES}], ids=["cpu", "interpret"])
@pytest.mark.usefixtures("unwritten_memory_is_nan")
def test_against_float64(options: Any, name: str, rows: int, columns: int) -> None:
    case = make_case(batch=2, kv_batch=1, heads=2, kv_heads=1, q_len=rows, kv_len=columns)
    score_mod, mask = mods_of(name, rows, columns)
    leaves = [x.requires_grad_() for x in case.inputs]
    out, lse = flex_attention(
        *leaves, score_mod, mask, enable_gqa=True, return_lse=True, kernel_options=options
    )
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2))
    found = out, lse, *torch.autograd.grad((out, lse), leaves, (case.grad_out, grad_lse))
    truth = expected(case, score_mod, mask, grad_lse)
    for x, exact in zip(found, (truth.out, truth.lse, truth.dq, truth.dk, truth.dv), strict=True):
        finite = exact[exact.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=4e-6 * (1 + size))


@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
@pytest.mark.parametrize("incoming", [math.nan, math.inf, -math.inf], ids=str)
def test_what_comes_in_for_a_dead_row_goes_no_further(options: Any, incoming: float) -> None:
    """A log-sum-exp of -inf makes NaN in what is built on it; that of dead rows stops here."""
    case = make_case(q_len=33, heads=2)
    mask = mods_of("dead rows", 33, 33)[1]
    gradients = []
    for value in (0.0, incoming):
        leaves = [x.requires_grad_() for x in case.inputs]
        out, lse = flex_attention(*leaves, block_mask=mask, return_lse=True, kernel_options=options)
        grad_lse = torch.where(lse == -math.inf, value, 1.0)
        gradients.append(torch.autograd.grad((out, lse), leaves, (case.grad_out, grad_lse)))
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.fixture
def arguments() -> Iterator[dict[str, dict[str, Any]]]:
    """What each kernel was launched with, by its name."""
    found: dict[str, dict[str, Any]] = {}
    start = launch.start

    def watch(kernels: Any, name: str, device: Any, grid: Any, given: Any) -> int:
        found[name] = dict(given)
        return start(kernels, name, device, grid, given)

    with mock.patch("flexmod.runtime.launch.start", watch):
        yield found


def by_position(batch: int, heads: int, length: int) -> Tensor:
    """[B, H, S, D] in storage [B, S, H, D], as a projection leaves it."""
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(batch, length, heads, 16, generator=generator).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_read_q_k_v_where_they_lie(arguments: dict[str, dict[str, Any]], dtype: torch.dtype) -> None:
    """Storage by position, an expanded key batch, the expanded gradient of a sum: nothing is copied."""
    q = by_position(2, 4, 33).to(dtype).requires_grad_()
    k, v = (by_position(1, 2, 33).to(dtype).requires_grad_() for _ in range(2))
    out = flex_attention(q, k, v, enable_gqa=True, kernel_options=INTERPRET)
    out.sum().backward()
    # dkdv_kernel makes dQ and delta too in a short call in a half type
    beside = {"delta_kernel", "dq_kernel"} if dtype == torch.float32 else set()
    assert set(arguments) == {"forward_kernel", "dkdv_kernel", *beside}
    for name, given in arguments.items():
        for argument, tensor in (("Q", q), ("K", k), ("V", v)):
            assert given[argument].data_ptr() == tensor.data_ptr(), (name, argument)
            assert given[argument].stride() == tensor.stride()
        if name != "forward_kernel":
            assert set(given["GRAD_OUT"].stride()) == {0}, "the gradient of a sum is one number"
    grad_k, grad_v = (arguments["dkdv_kernel"][name] for name in ("GRAD_K", "GRAD_V"))
    assert grad_k.shape == k.shape and grad_v.shape == v.shape, "heads and batch are summed in the kernel"


@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
@pytest.mark.parametrize("layout", ["by position", "last dimension apart", "expanded", "slices"])
def test_layouts(options: Any, layout: str) -> None:
    """The gradients equal contiguous tensors', also where q, k, v and grad_out overlap themselves."""
    whole = torch.randn(2, 33, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = {
        "by position": lambda: [whole[:, :, i].transpose(1, 2) for i in range(3)],
        "last dimension apart": lambda: [whole[:, :, i].permute(0, 2, 3, 1).mT for i in range(3)],
        "expanded": lambda: [whole[:, :, i, :1].transpose(1, 2).expand(-1, 2, -1, -1) for i in range(3)],
        "slices": lambda: [whole[:, ::2, i, :, 1::2].transpose(1, 2) for i in range(3)],
    }[layout]()
    found = []
    for tensors in ([q, k, v], [x.contiguous() for x in (q, k, v)]):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = flex_attention(*leaves, capped, kernel_options=options)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
@pytest.mark.parametrize("name", ["plain", "band", "infinite scores"])
def test_no_buffer_of_all_scores(options: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole training step, mask and all: nothing beyond a few times an input."""
    monkeypatch.setattr(blocks, "BUDGET", 1 << 14)
    monkeypatch.setattr("flexmod.backends.tiles.MASKED", 1 << 14)
    monkeypatch.setattr("flexmod.block_mask.refine.AT_ONCE", 1 << 14)
    case = make_case(q_len=512, heads=2)
    leaves = [x.requires_grad_() for x in case.inputs]
    with LargestTensor() as seen:
        score_mod, mask = mods_of(name, 512, 512)
        out, lse = flex_attention(*leaves, score_mod, mask, return_lse=True, kernel_options=options)
        torch.autograd.backward((out, lse), (case.grad_out, torch.ones_like(lse)))
    assert seen.elements <= 2 * case.q.numel() < 512 * 512 / 4


@pytest.mark.parametrize("options", [{}, INTERPRET], ids=["cpu", "kernels"])
@pytest.mark.parametrize(("dtype", "number"), [(torch.int8, 16), (torch.float16, 300), (torch.bfloat16, 1.7)])
def test_squares_of_a_table_in_a_derivative(dtype: torch.dtype, number: float, options: Any) -> None:
    """The square of an int8 of 16 would be 0, of a float16 of 300 infinite, of a bfloat16 rounded."""
    table = torch.full((17,), number).to(dtype)
    q, k, v = (torch.randn(1, 1, 17, 16, generator=torch.Generator().manual_seed(3)) for _ in range(3))
    q.requires_grad_()

    def found_with(table: Tensor, options: Any) -> Tensor:
        def angle(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.atan2(score * number, table[kv_idx])

        out = flex_attention(q, k, v, angle, kernel_options=options)
        return torch.autograd.grad(out.square().sum(), q)[0]

    torch.testing.assert_close(found_with(table, options), found_with(table.double(), REFERENCE))
