"""Which operands a plan copies, and that the results stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod import create_block_mask, flex_attention, masks
from flexmod.backends import arguments, copies, families
from flexmod.backends.copies import aligned as empty_aligned
from flexmod.backends.copies import copies_of_heads, is_copied
from flexmod.backends.hopper import HopperFamily
from flexmod.calls import prepared
from flexmod.codegen.spec import Direction
from flexmod.codegen.variant import variant
from flexmod.runtime.plan import Call, Plan
from flexmod.tools.ahead import VariantCall

INTERPRET = {"BACKEND": "INTERPRET"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that plans call, by name, after "plan" for each plan."""
    names: list[str] = []
    made = families.Bound

    def bind(plan: Plan, *rest: Any) -> Any:
        names.append("plan")
        names.extend(step.function.__name__ for step in plan.steps if isinstance(step, Call))
        return made(plan, *rest)

    monkeypatch.setattr(families, "Bound", bind)
    return names


def pairs(*shape: int) -> Tensor:
    """A bias for each pair of positions."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def aligned(bias: Tensor) -> Tensor:
    """The same numbers, in rows that begin at multiples of 16 elements."""
    return torch.nn.functional.pad(bias.detach(), (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]


# Portable kernels, which serve short calls, know of multiples of 16 elements alone: "rows of 8".
BIASES: Mapping[str, tuple[Tensor, dict[str, Any], bool]] = {
    "odd rows": (pairs(2, 70, 71), {}, True),
    "rows of 8": (pairs(2, 70, 72), {"lengths": (70, 72)}, True),
    "odd start": (pairs(2, 70, 81)[..., 1:72], {}, True),
    "across": (pairs(2, 71, 70).mT, {}, True),
    "of all heads": (pairs(70, 71), {"batch": 2}, True),
    "expanded": (pairs(70, 71).expand(2, 70, 71), {}, False),
    "windows of a row": (pairs(2, 140).unfold(1, 71, 1), {}, False),
    "an expanded row": (pairs(2, 1, 71).expand(2, 70, 71), {}, False),
    "an expanded column": (pairs(2, 70, 1).expand(2, 70, 71), {}, False),
    "aligned": (aligned(pairs(2, 70, 71)), {}, False),
    "small batch": (pairs(2, 70, 71), {"batch": 3}, False),
    "larger than the call": (pairs(2, 300, 301), {}, False),
    "of each entry": (pairs(4, 2, 70, 71), {}, False),
    "deterministic": (pairs(2, 70, 71), {"deterministic": True}, False),
    "masked": (pairs(2, 70, 71), {"batch": 15, "mask": masks.causal()}, False),
    "masked, of many": (pairs(70, 71), {"batch": 8, "mask": masks.causal()}, True),
    "few positions": (pairs(2, 64, 63), {"lengths": (64, 63)}, False),
    "integers": (pairs(2, 70, 71).to(torch.int32), {}, False),
    "of float32 calls": (pairs(2, 70, 71), {"dtype": torch.float32}, False),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_copied_to_aligned_rows(name: str, calls: list[str]) -> None:
    bias, facts, copied = BIASES[name]
    lengths, dtype = facts.get("lengths", (70, 71)), facts.get("dtype", torch.bfloat16)
    options = {**INTERPRET, "deterministic": facts.get("deterministic", False)}
    shape = facts.get("batch", 4), 2
    mask = create_block_mask(facts["mask"], None, None, *lengths, device="cpu") if "mask" in facts else None
    inputs = [
        torch.randn(*shape, lengths[of > 0], 16, dtype=dtype, requires_grad=True) for of in range(3)
    ]

    def results(bias: Tensor) -> list[Tensor]:
        learned = bias.detach().requires_grad_(bias.is_floating_point())

        def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + learned[(*(b, h)[4 - learned.dim() :], q_idx, kv_idx)]

        out: Any = flex_attention(*inputs, add, mask, kernel_options=options)
        return [out, *torch.autograd.grad(out.sum(), inputs + [learned] * learned.requires_grad)]

    found = results(bias)
    assert calls.count("in_aligned_rows") == 2 * copied
    if copied:  # or the tiles may differ
        for ours, expected in zip(found, results(aligned(bias)), strict=True):
            assert torch.equal(ours, expected)


def test_a_deterministic_call_copies_no_bias() -> None:
    """Alone, an entry reads each element four times; of two entries, each reads its own elements."""
    tensors = [torch.randn(2, 4, length, 16).bfloat16() for length in (70, 71, 71, 70)]
    together = *tensors, pairs(2, 1, 70, 71)

    def results(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, bias: Tensor) -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]

        def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[b, h // 4, q_idx, kv_idx]

        out: Any = flex_attention(*inputs, add, kernel_options={**INTERPRET, "deterministic": True})
        return [out, *torch.autograd.grad(out, inputs, grad_out)]

    alone = results(*(tensor[1:].clone() for tensor in together))
    for of_two, of_one in zip(results(*together), alone, strict=True):
        assert torch.equal(of_two[1:], of_one)


@pytest.mark.parametrize(
    ("heads", "shape", "entries", "processors", "count"),
    [
        ((8, 1), (8192, 8192), 1, 132, 4),
        ((8, 2), (8192, 8192), 1, 132, 2),
        ((16, 4), (2048, 2048), 4, 132, 1),  # 256 programs
        ((12, 4), (1024, 1024), 1, 132, 3),
        ((8, 1), (383, 8192), 1, 132, 1),  # few queries
        ((8, 8), (8192, 8192), 1, 132, 1),
        ((6, 1), (2048, 1), 1, 132, 6),
        ((8, 1), (8192, 8192), 1, 1, 1),
        ((71, 1), (8192, 8192), 3, 132, 1),  # 71 copies would be far too many
        ((71, 1), (8192, 512), 1, 132, 71),
        ((8, 1), (8192, 0), 1, 132, 1),
    ],
)
def test_how_many_copies_of_a_head(
    heads: tuple[int, int], shape: tuple[int, int], entries: int, processors: int, count: int
) -> None:
    query, key = (torch.empty(entries, *size, 64, device="meta") for size in zip(heads, shape, strict=True))
    assert copies_of_heads(query, key, False, processors) == count
    of_one = copies_of_heads(query[:1], key[:1], False, processors)
    assert copies_of_heads(query, key, True, processors) == of_one


SLOPES = torch.tensor([0.5, 2.0, 1.0, 0.25], requires_grad=True)
HEADS: Mapping[str, tuple[Any, Any, tuple[Tensor, ...], torch.dtype]] = {
    "plain": (None, None, (), torch.bfloat16),
    "causal": (None, masks.causal(), (), torch.float16),
    "learned": (lambda score, b, h, q, k: score * SLOPES[h] + SLOPES[k % 4], None, (SLOPES,), torch.float16),
    "float32": (None, None, (), torch.float32),
}


@pytest.mark.parametrize("entries_of_keys", [1, 2])
@pytest.mark.parametrize("name", HEADS)
def test_copies_of_heads(
    name: str, entries_of_keys: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of each of two heads serve two query heads."""
    monkeypatch.setattr(arguments, "processors", lambda device: 5 - entries_of_keys)
    monkeypatch.setattr("flexmod.backends.copies.QUERIES", 0)
    summed, sum_heads = [], copies.sum_heads

    def watch(grad: Tensor, sums: Tensor) -> tuple[()]:
        summed.append(grad.dtype)
        return sum_heads(grad, sums)

    monkeypatch.setattr(copies, "sum_heads", watch)
    score_mod, mask_mod, learned, dtype = HEADS[name]
    sizes = ((2, 50, 4), (entries_of_keys, 60, 2), (entries_of_keys, 60, 2))
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(*size, 16, generator=generator).to(dtype).transpose(1, 2) for size in sizes]
    mask = create_block_mask(mask_mod, None, None, 50, 60, device="cpu") if mask_mod else None
    grad_out, found = torch.randn(2, 4, 50, 16, generator=generator).to(dtype), []
    for options, precision in ((INTERPRET, dtype), ({"BACKEND": "REFERENCE"}, torch.float64)):
        given = [x.to(precision).requires_grad_() for x in inputs]
        out: Any = flex_attention(*given, score_mod, mask, enable_gqa=True, kernel_options=options)
        grads = torch.autograd.grad(out, (*given, *learned), grad_out.to(precision))
        found.append((out, *grads))
    assert [grad.stride() for grad in found[0][1:4]] == [x.stride() for x in inputs]
    made = [name for name in calls if name.endswith(("rows", "watch"))]
    assert made == ["in_aligned_rows"] * 2 + ["watch"] * 2
    assert summed == [torch.float32] * 2  # a copy's gradient is not rounded
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).norm() < limit * exact.norm()


def test_a_deterministic_backward_has_the_same_copies_for_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arguments, "processors", lambda device: 4)
    monkeypatch.setattr("flexmod.backends.copies.QUERIES", 0)
    q, k, v = (torch.randn(8, heads, 60, 16, dtype=torch.bfloat16) for heads in (8, 1, 1))

    def grads(entries: slice) -> list[Tensor]:
        given = [x[entries].requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        options = {**INTERPRET, "deterministic": True}
        out: Any = flex_attention(*given, enable_gqa=True, kernel_options=options)
        return list(torch.autograd.grad(out.sum(), given))

    for whole, alone in zip(grads(slice(8)), grads(slice(3, 4)), strict=True):
        assert torch.equal(whole[3:4], alone)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).half()


# The forward's and the backward's copies, of query, key and value, and of the output's gradient.
ROWS: Mapping[str, tuple[Tensor, Tensor, int]] = {
    "whole": (rows(1, 2, 64, 16), rows(1, 2, 64, 16), 0),
    "by position": (rows(1, 64, 2, 16).transpose(1, 2), rows(1, 65, 2, 16).transpose(1, 2), 0),
    "24 columns": (rows(1, 2, 64, 24), rows(1, 2, 65, 24), 3 + 4),
    "24 columns in float32": (rows(1, 2, 64, 24).float(), rows(1, 2, 65, 24).float(), 3 + 4),
    "odd rows": (rows(1, 2, 64, 17)[..., :16], rows(1, 2, 64, 17)[..., 1:], 3 + 3),
    "odd heads": (rows(1, 2, 64 * 16 + 8)[..., 8:].unflatten(2, (64, 16)), rows(1, 2, 64, 16), 1 + 1),
    "across": (rows(1, 2, 64, 16), rows(1, 2, 16, 72).mT, 2 + 2),
    "across and aligned": (rows(1, 2, 64, 16), rows(1, 2, 16, 64).mT, 0),
    "broadcast": (rows(1, 2, 64, 16), rows(1, 1, 64, 16).expand(1, 2, 64, 16), 0),
    "windows of a row": (rows(1, 2, 64, 16), rows(1, 2, 205).unfold(2, 16, 3), 0),
    "few queries": (rows(1, 2, 63, 24), rows(1, 2, 70, 24), 0),
    "a long cache": (rows(1, 1, 64, 24), rows(1, 1, 140, 24), 0),
    "few keys": (rows(1, 2, 70, 24), rows(1, 2, 63, 24), 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_aligned(name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, copies = ROWS[name]
    found = []
    for long in (64, 1000):
        monkeypatch.setattr("flexmod.backends.copies.LONG", long)
        prepared.forget()
        given = [x.detach().requires_grad_() for x in (query, key, key)]
        out: Any = flex_attention(*given, kernel_options=INTERPRET)
        found.append((out, *torch.autograd.grad(out, given, torch.ones_like(out) * 0.5)))
    assert (calls.count("in_aligned_rows"), calls.count("plan")) == (copies, 4)
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected) and ours.stride() == expected.stride()


@pytest.mark.parametrize(
    ("dtype", "columns", "portable", "hopper"),
    [
        (torch.float16, 16, False, False),
        (torch.float16, 72, True, False),
        (torch.bfloat16, 100, True, True),
        (torch.float32, 24, True, False),
        (torch.float32, 48, False, False),
        (torch.float8_e4m3fn, 48, False, False),
        (torch.float8_e4m3fn, 72, True, True),
        # no vector load takes such a row
        (torch.float16, 65, False, False),
        (torch.float16, 1, False, False),
    ],
)
def test_which_rows_are_copied(dtype: torch.dtype, columns: int, portable: bool, hopper: bool) -> None:
    tensor = torch.empty(2, 2, 512, columns, dtype=dtype, device="meta")
    made = HopperFamily(), families.PORTABLE
    copied = [is_copied(tensor, tensor, tensor, family.aligned_bytes(dtype)) for family in made]
    assert copied == [hopper, portable]
    assert not is_copied(empty_aligned(tensor.shape, dtype), tensor, tensor, made[1].aligned_bytes(dtype))


@pytest.mark.parametrize("direction", get_args(Direction))
def test_a_call_without_tensors_copies_none(direction: Direction, tmp_path: Path) -> None:
    """A file of `save` has no copies, whose kernels take rows of any start."""
    made = variant(head_dim=24, value_dim=40)
    plan = VariantCall(made).plan(direction, made.kernels(direction))
    assert not any(isinstance(step, Call) for step in plan.steps)
    flexmod.compile().save(tmp_path / "attend.py", head_dim=24, value_dim=40, dtype=torch.float16)
