"""Extents at their ends: nothing, one token, tables and grids whose numbers need more than 31 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod import AuxRequest, masks, mods
from flexmod.backends.arguments import grid

INTERPRET = {"BACKEND": "INTERPRET"}
BACKENDS = ["AUTO", "INTERPRET", "REFERENCE"]
NOTHING = [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0)]


def tensors(batch: int, heads: int, length: int, keys: int) -> list[Tensor]:
    shapes = [(batch, heads, length, 16), (batch, heads, keys, 16), (batch, heads, keys, 8)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", NOTHING, ids=str)
def test_nothing(sizes: tuple[int, int, int, int], backend: str) -> None:
    """No batch, heads, queries or keys: out 0, lse -inf, gradients 0, where there is an element at all."""
    slopes = torch.ones(2, requires_grad=True)

    def causal_alibi(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx + b >= kv_idx, s - slopes[h] * kv_idx, -float("inf"))

    for score_mod in (None, causal_alibi):
        inputs = tensors(*sizes)
        options = {"BACKEND": backend}
        for _ in range(3):  # a call that is known does the same
            out, aux = flexmod.flex_attention(
                *inputs, score_mod, return_aux=AuxRequest(lse=True, max_scores=True), kernel_options=options
            )
            assert out.shape == (*sizes[:3], 8) and (out == 0).all()
            for statistic in (aux.lse, aux.max_scores):
                assert statistic.shape == sizes[:3] and (statistic == -torch.inf).all()
            wanted = [*inputs, *([slopes] if score_mod else [])]
            for gradient, x in zip(torch.autograd.grad(out.sum(), wanted), wanted, strict=True):
                assert gradient.shape == x.shape and (gradient == 0).all()
        with torch.no_grad():
            assert flexmod.flex_attention(*inputs, score_mod, kernel_options=options).shape == out.shape


@pytest.mark.parametrize("kv_batch", [0, 1])
def test_an_empty_batch_with_a_mask(kv_batch: int) -> None:
    query, key = torch.randn(0, 2, 8, 16), torch.randn(kv_batch, 2, 8, 16)
    mask = flexmod.create_block_mask(masks.causal(), None, None, 8, 8, device="cpu")
    assert flexmod.flex_attention(query, key, key, block_mask=mask).shape == (0, 2, 8, 16)


@pytest.mark.covering(1, long=1)
@pytest.mark.timeout(120)  # blocks were walked to their end, 2^30 keys on
@pytest.mark.parametrize("form", ["runs", "lists"])
@pytest.mark.parametrize("block", [1 << 30, (1 << 30, 16), (16, 1 << 30), (304, 144)], ids=str)
def test_one_block_for_all(block: int | tuple[int, int], form: str) -> None:
    def built(block: int | tuple[int, int]) -> flexmod.BlockMask:
        return flexmod.create_block_mask(masks.causal(), None, None, 90, 77, "cpu", BLOCK_SIZE=block)

    def gradients(mask: flexmod.BlockMask, backend: str) -> list[Tensor]:
        options = {"BACKEND": backend}
        out = flexmod.flex_attention(*inputs, mods.softcap(9.0), mask, kernel_options=options)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    inputs, mask = tensors(1, 1, 90, 77), built(block)
    if form == "lists":
        mask.kv_indices = mask.kv_indices.clone()
    assert mask.storage.form == form
    truth = gradients(built(16), "REFERENCE")
    for backend in BACKENDS:
        for found, expected in zip(gradients(mask, backend), truth, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]])
def test_no_packed_tokens(offsets: list[int]) -> None:
    x = torch.randn(0, 4, 16)
    out = flexmod.varlen_attention(x, x, x, torch.tensor(offsets), mask_mod=masks.causal())
    assert out.shape == (0, 4, 16)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3]])
def test_nested_sequences_without_tokens(lengths: list[int]) -> None:
    rows = [torch.randn(length, 4, 16) for length in lengths]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    out = flexmod.nested_attention(nested, nested, nested, mask_mod=masks.causal())
    assert [x.shape[1] for x in out.unbind()] == lengths


def test_nothing_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flexmod.flex_attention, backend="aot_eager", fullgraph=True)
    query = torch.randn(0, 2, 8, 16, requires_grad=True)
    out: Any = compiled(query, query, query)
    out.sum().backward()
    assert out.shape == (0, 2, 8, 16) and query.grad is not None and query.grad.shape == query.shape


@pytest.mark.parametrize("lengths", [(1, 1), (1, 37), (37, 1)])
@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET"])
def test_one_token(backend: str, lengths: tuple[int, int]) -> None:
    inputs = tensors(2, 2, *lengths)
    found = []
    for name in (backend, "REFERENCE"):
        out = flexmod.flex_attention(
            *inputs, lambda s, b, h, q_idx, kv_idx: s + 0.1 * kv_idx, kernel_options={"BACKEND": name}
        )
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


def test_one_token_with_itself_is_its_value() -> None:
    query, key, value = tensors(1, 2, 1, 1)
    assert torch.equal(flexmod.flex_attention(query, key, value, kernel_options=INTERPRET), value)


def test_a_table_beyond_31_bits() -> None:
    """2^31 + 64 elements; memory that nobody touches is none."""
    table = torch.empty(2**31 + 64, dtype=torch.int8)
    table[2**31 :] = torch.arange(64, dtype=torch.int8)
    inputs = tensors(1, 2, 40, 40)
    few = torch.arange(64, dtype=torch.int8)
    out = flexmod.flex_attention(
        *inputs, lambda s, b, h, q_idx, kv_idx: s + 0.1 * table[kv_idx + 2**31], kernel_options=INTERPRET
    )
    expected = flexmod.flex_attention(
        *inputs, lambda s, b, h, q_idx, kv_idx: s + 0.1 * few[kv_idx], kernel_options=INTERPRET
    )
    assert torch.equal(out, expected)


def test_grids_have_one_dimension() -> None:
    """The second and third end at 65535."""
    assert grid(300, 256, 1, 64) == 76800
