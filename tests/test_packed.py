"""Packed and nested sequences: each against attention of that sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learned_mods import random

from flexmod import create_block_mask, errors, flex_attention, masks, mods, nested_attention, varlen_attention

INTERPRET = {"BACKEND": "INTERPRET"}
H, HKV, D, DV = 4, 2, 8, 6
LENGTHS, KV_LENGTHS = [7, 1, 20, 3], [5, 9, 20, 1]
SLOPES, PREFIXES = random(H), torch.tensor([2, 0, 5, 1])
MODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask_mod": masks.causal()},
    "a prefix for each": {"mask_mod": masks.prefix_lm(PREFIXES)},
    "a window for each head": {"mask_mod": masks.sliding_window(torch.tensor([1, 2, 3, 30]))},
    "scores": {"score_mod": mods.chain(mods.alibi(SLOPES), lambda s, b, h, q, k: s / (1 + b))},
    "both": {"score_mod": mods.relative_position(), "mask_mod": ~masks.causal() | masks.prefix_lm(1)},
}


def sequences(own_lengths, dtype=torch.float64):
    """Query, key and value of each batch entry, [heads, length, head_dim]."""
    keys = KV_LENGTHS if own_lengths else LENGTHS
    return [
        [random(heads, n, d, seed=10 * i + j).to(dtype) for j, (heads, n, d) in enumerate(shapes)]
        for i, shapes in enumerate(
            ((H, m, D), (HKV, n, D), (HKV, n, DV)) for m, n in zip(LENGTHS, keys, strict=True)
        )
    ]


def alone(number, tensors, score_mod=None, mask_mod=None):
    """(out, lse, gradients) of one sequence; its mods are told that they see batch entry `number`."""
    leaves = [x[None].requires_grad_() for x in tensors]
    score, mask = score_mod, mask_mod
    if score_mod is not None:

        def score(s, b, h, q, k):
            return score_mod(s, b + number, h, q, k)

    if mask_mod is not None:

        def shifted(b, h, q, k):
            return mask_mod(b + number, h, q, k)

        mask = create_block_mask(shifted, None, H, tensors[0].shape[1], tensors[1].shape[1], "cpu")
    out, lse = flex_attention(*leaves, score, mask, enable_gqa=True, return_lse=True)
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.clamp(min=-9).sum(), leaves)


def truth(own_lengths, given):
    return [alone(i, tensors, **given) for i, tensors in enumerate(sequences(own_lengths))]


def close(found, expected, tolerance=1e-12):
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("own_lengths", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("name", MODS)
def test_varlen(name, own_lengths):
    check_varlen(MODS[name], own_lengths, None, torch.float64, 1e-11)


def test_varlen_in_the_kernel():
    check_varlen(MODS["scores"] | {"mask_mod": masks.causal()}, False, INTERPRET, torch.float32, 1e-4)


def check_varlen(given, own_lengths, options, dtype, tolerance):
    columns = zip(*sequences(own_lengths, dtype), strict=True)
    leaves = [torch.cat(column, 1).transpose(0, 1).contiguous().requires_grad_() for column in columns]
    offsets, kv_offsets = (
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (LENGTHS, KV_LENGTHS)
    )
    out, lse = varlen_attention(
        *leaves, offsets, kv_offsets if own_lengths else None, **given,
        enable_gqa=True, return_lse=True, kernel_options=options,
    )  # fmt: skip
    gradients = torch.autograd.grad(out.square().sum() + lse.clamp(min=-9).sum(), leaves)
    expected = [torch.cat(column, 2)[0] for column in zip(*truth(own_lengths, given), strict=True)]
    wanted = [x if i == 1 else x.transpose(0, 1) for i, x in enumerate(expected)]
    close((out, lse, *gradients), wanted, tolerance)


def nested(tensors):
    """[B, heads, length, head_dim], of tensors [heads, length, head_dim]."""
    rows = [x.transpose(0, 1) for x in tensors]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("own_lengths", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("name", MODS)
def test_nested(name, own_lengths):
    """Key and value have offsets of their own making, which are equal."""
    leaves = [[x.requires_grad_() for x in column] for column in zip(*sequences(own_lengths), strict=True)]
    out, lse = nested_attention(*map(nested, leaves), **MODS[name], enable_gqa=True, return_lse=True)
    gradients = torch.autograd.grad(
        out.values().square().sum() + lse.values().clamp(min=-9).sum(), [x for leaf in leaves for x in leaf]
    )
    expected = truth(own_lengths, MODS[name])
    close(out.unbind(), [x[0][0] for x in expected])
    close(lse.unbind(), [x[1][0] for x in expected])
    close(gradients, [x[2 + part][0] for part in range(3) for x in expected], 1e-11)


def test_nested_results_go_on_with_their_inputs():
    query = nested([x[0] for x in sequences(False)])
    out = nested_attention(query, query, query)
    assert (query + out).shape == query.shape
    assert out.offsets() is query.offsets()


def test_one_mask_for_several_calls():
    query = nested([x[0] for x in sequences(False)])
    total = sum(LENGTHS)
    block_mask = create_block_mask(
        masks.jagged(query.offsets(), masks.causal()), None, None, total, total, "cpu"
    )
    found, again = (
        nested_attention(query, query, query, **given)
        for given in ({"mask_mod": masks.causal()}, {"block_mask": block_mask})
    )
    assert torch.equal(found.values(), again.values())
    packed = query.values().transpose(0, 1)
    third = varlen_attention(packed, packed, packed, query.offsets(), block_mask=block_mask)
    assert torch.equal(third, found.values().transpose(0, 1))


def mods_by_batch_entry(count):
    prefix = masks.prefix_lm(torch.ones(count, dtype=torch.int32))
    rope = mods.mla_rope(torch.zeros(count, 1, 12, 1), torch.zeros(count, 12, 1), 1.0)
    return {"mask_mod": prefix}, {"mask_mod": prefix & masks.causal()}, {"score_mod": rope}


def check_a_mod_by_batch_entry(attend, count, given, options):
    """One entry more is for the positions after the last sequence."""
    offsets, query = torch.tensor([0, 4, 9, 12]), random(12, 1, 16).float()

    def call():
        return attend(query, query, query, offsets, kernel_options=options, **given)

    if count in (3, 4):
        assert call().shape == query.shape
    else:
        with pytest.raises(errors.CallSizeError, match="but the packing has 3 sequences"):
            call()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("options", [{}, INTERPRET], ids=["CPU", "INTERPRET"])
def test_a_mod_by_batch_entry_fits_the_number_of_sequences(count, options):
    for given in mods_by_batch_entry(count):
        check_a_mod_by_batch_entry(varlen_attention, count, given, options)


@pytest.mark.parametrize(
    ("count", "number"),
    [(2, 0), (4, 1), *(pytest.param(count, 2, marks=pytest.mark.long) for count in (1, 3))],
)
def test_a_mod_by_batch_entry_fits_the_number_of_sequences_in_a_graph(count, number):
    torch.compiler.reset()
    compiled = torch.compile(varlen_attention, backend="eager", dynamic=False)
    check_a_mod_by_batch_entry(compiled, count, mods_by_batch_entry(count)[number], {})


def test_positions_after_the_last_sequence_are_one_more():
    packed = torch.randn(9, H, D, dtype=torch.float64)
    out = varlen_attention(packed, packed, packed, torch.tensor([0, 4]))
    rest = flex_attention(*[packed[4:].transpose(0, 1)[None]] * 3)[0].transpose(0, 1)
    torch.testing.assert_close(out[4:], rest)


def with_holes():
    return torch.nested.narrow(
        torch.randn(2, 6, 4, 8), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged
    ).transpose(1, 2)


ROWS = [torch.randn(n, H, D) for n in (3, 5)]
JAGGED = torch.nested.nested_tensor(ROWS, layout=torch.jagged)
ONE = torch.nested.nested_tensor(ROWS[:1], layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nested_attention(*[torch.zeros(1, 2, 3, 4)] * 3),
            errors.NestedLayoutError,
            "query is not a nested tensor of jagged layout; .*\n"
            r"  Instead: make it with torch.nested.nested_tensor\(list_of_tensors, layout=torch.jagged\)",
        ),
        (
            lambda: nested_attention(JAGGED, JAGGED, JAGGED),
            errors.NestedLayoutError,
            r"query has 4 dimensions, of which dimension 1 is ragged; .*\n.*query.transpose\(1, 2\)",
        ),
        (
            lambda: nested_attention(*[with_holes()] * 3),
            errors.NestedLayoutError,
            r"query has holes between its sequences; .*\n.*query.transpose\(1, 2\).contiguous\(\)",
        ),
        (
            lambda: nested_attention(JAGGED.transpose(1, 2), ONE, ONE),
            errors.BatchMismatch,
            "query has batch 2 but key has 1 and value has 1",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 2, ROWS[1], torch.tensor([0, 3])),
            errors.LengthMismatch,
            r"key has length 3 but value has 5.\n.* the same number of positions \(dimension 0\)",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 3, torch.tensor([0.0, 3.0])),
            errors.LibraryArgumentError,
            r"varlen_attention: cu_seqlens is torch.float32 \[2\]; it must be an integer tensor",
        ),
        (
            lambda: varlen_attention(
                *ROWS[:1] * 3, torch.tensor([0, 3]), torch.zeros(1, 1, dtype=torch.int32)
            ),
            errors.LibraryArgumentError,
            r"varlen_attention: cu_seqlens_kv is torch.int32 \[1, 1\]; it must be an integer tensor",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 3, torch.tensor([1, 3])),
            errors.LibraryArgumentError,
            "varlen_attention: cu_seqlens is 1 at index 0; it must be ascending from 0 to at most 3, the ",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 3, torch.tensor([0, 2, 1, 3], dtype=torch.uint8)),
            errors.LibraryArgumentError,
            "cu_seqlens is 1 at index 2; it must be ascending from 0 to at most 3",
        ),
        (
            lambda: varlen_attention(*ROWS, ROWS[1], torch.tensor([0, 3]), torch.tensor([0, 6])),
            errors.LibraryArgumentError,
            "cu_seqlens_kv is 6 at index 1; it must be ascending from 0 to at most 5",
        ),
        (
            lambda: varlen_attention(ROWS[1], *ROWS[:1] * 2, torch.tensor([0, 5])),
            errors.LibraryArgumentError,
            "cu_seqlens is 5 at index 1; it must be ascending from 0 to at most 3",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 3, torch.tensor([0, 3]), torch.tensor([0, 1, 3])),
            errors.LibraryArgumentError,
            "varlen_attention: cu_seqlens_kv is for 2 sequences; it must be for 1, as cu_seqlens is",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 3, torch.empty(0, dtype=torch.int32)),
            errors.LibraryArgumentError,
            r"cu_seqlens is torch.int32 \[0\]; it must be an integer tensor of shape \[n \+ 1\]",
        ),
        (
            lambda: varlen_attention(*ROWS[:1] * 3, torch.empty(2, dtype=torch.int32, device="meta")),
            errors.DeviceMismatch,
            r"query is on cpu but cu_seqlens is on meta.\n  Instead: make cu_seqlens on cpu;",
        ),
        (
            lambda: varlen_attention(
                *ROWS[:1] * 3, torch.tensor([0, 3]), torch.empty(2, dtype=torch.int32, device="meta")
            ),
            errors.DeviceMismatch,
            r"query is on cpu but cu_seqlens_kv is on meta.\n  Instead: make cu_seqlens_kv on cpu;",
        ),
        (
            lambda: nested_attention(ONE, ONE.to("meta"), ONE.to("meta")),
            errors.DeviceMismatch,
            r"query is on cpu but key is on meta.\n  Instead: make key on cpu;",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
