"""flexmod.compile: the same results as flex_attention, of mods as they were when it was called."""

from __future__ import annotations

from typing import Any

import planned
import pytest
import torch
from reference_case import make_case
from torch import Tensor

import flexmod
from flexmod import AuxRequest, create_block_mask, errors, flex_attention, masks, mods
from flexmod.calls import prepared
from flexmod.ir import trace as tracing

INTERPRET = {"BACKEND": "INTERPRET"}
LENGTH = 24


def inputs(grad: bool = False, **other: Any) -> tuple[Tensor, ...]:
    case = make_case(**{"q_len": LENGTH, "heads": 2, "head_dim": 16, **other})
    return tuple(x.requires_grad_(grad) for x in case.inputs)


@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
def test_results_and_gradients(options: Any) -> None:
    table = torch.rand(2, requires_grad=True)

    def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h] * (kv_idx - q_idx)

    attend = flexmod.compile(slope, masks.causal(), scale=0.3, kernel_options=options)
    for seed in range(4):
        tensors = inputs(True, seed=seed)
        mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device="cpu")
        found = []
        for out, lse in (
            attend(*tensors, return_lse=True),
            flex_attention(*tensors, slope, mask, 0.3, return_lse=True, kernel_options=options),
        ):
            found.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (*tensors, table))])
        assert all(map(torch.equal, *found))


def test_its_plan_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plays = planned.reruns(monkeypatch)
    attend = flexmod.compile(mods.softcap(2.0), masks.causal(), kernel_options=INTERPRET)
    for _ in range(5):
        attend(*inputs())
    assert len(plays) == 4


def test_a_known_call_looks_at_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of tensor, a mask that is given, autocast, what a mod captures: these are looked into."""
    looked = []
    attend = prepared.attend
    monkeypatch.setattr(prepared, "attend", lambda *given: looked.append(given) or attend(*given))
    slopes, documents = torch.rand(2), torch.arange(LENGTH) // 9
    handle = flexmod.compile(mods.alibi(slopes), masks.document(documents), kernel_options=INTERPRET)
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device="cpu")

    def right(*tensors: Tensor, given: Any = None, new: int) -> None:
        looked.clear()
        found = handle(*tensors, given)
        assert len(looked) == new
        of = given or create_block_mask(masks.document(documents), None, None, LENGTH, LENGTH, device="cpu")
        wanted = flex_attention(*tensors, mods.alibi(slopes), of, kernel_options=INTERPRET)
        assert torch.equal(found, wanted)

    right(*inputs(), new=1)
    for seed in range(4):
        right(*inputs(seed=seed), new=0)
    right(*inputs(True), new=1)
    right(*inputs(True), new=0)
    right(*inputs(), given=mask, new=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            right(*inputs(), new=1)
    slopes.mul_(2)
    right(*inputs(), new=0)
    documents[5:] += 1
    right(*inputs(), new=1)
    right(*inputs(), new=0)
    slopes.set_(torch.rand(2, 3)[:, 1])
    right(*inputs(), new=1)
    right(*inputs(), new=0)


def test_a_number_stays_what_it_was() -> None:
    cap = 2.0

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    attend, tensors = flexmod.compile(capped), inputs()
    before = attend(*tensors)
    cap = 4.0
    assert torch.equal(attend(*tensors), before)
    assert not torch.equal(flexmod.compile(capped)(*tensors), before)


@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
def test_a_tensor_may_change_and_be_replaced(options: Any) -> None:
    table = torch.rand(2)

    def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h] * (kv_idx - q_idx)

    attend, tensors = flexmod.compile(slope, kernel_options=options), inputs()
    for _ in range(4):
        before = attend(*tensors)
    table.mul_(3)
    found = attend(*tensors)
    assert torch.equal(found, flex_attention(*tensors, slope, kernel_options=options))
    assert not torch.equal(found, before)
    table = torch.zeros(3)
    assert torch.equal(attend(*tensors), flex_attention(*tensors, kernel_options=options))


def test_a_mask_follows_its_tensors() -> None:
    documents = torch.zeros(LENGTH, dtype=torch.int32)
    attend, tensors = flexmod.compile(mask_mod=masks.document(documents)), inputs()
    assert torch.equal(attend(*tensors), flex_attention(*tensors))
    documents[10:] = 1
    mask = create_block_mask(masks.document(documents), None, None, LENGTH, LENGTH, device="cpu")
    wanted = flex_attention(*tensors, block_mask=mask)
    assert torch.equal(attend(*tensors), wanted) and torch.equal(attend(*tensors), wanted)


def test_a_tensor_of_inference_mode_says_nothing_of_writes() -> None:
    with torch.inference_mode():
        documents = torch.zeros(LENGTH, dtype=torch.int32)
        attend, tensors = flexmod.compile(mask_mod=masks.document(documents)), inputs()
        attend(*tensors)
        documents[10:] = 1
        mask = create_block_mask(masks.document(documents), None, None, LENGTH, LENGTH, device="cpu")
        assert torch.equal(attend(*tensors), flex_attention(*tensors, block_mask=mask))


def test_masks_by_lengths_batch_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    create = create_block_mask

    def watch(mask_mod: Any, *sizes: Any, **other: Any) -> Any:
        built.append(sizes)
        return create(mask_mod, *sizes, **other)

    monkeypatch.setattr("flexmod.calls.compiled.create_block_mask", watch)
    windows = torch.tensor([1, 4])
    attend = flexmod.compile(mask_mod=masks.sliding_window(windows))
    for length in (LENGTH, 17, LENGTH, 17):
        tensors = inputs(q_len=length)
        mask = create(masks.sliding_window(windows), None, 2, length, length, device="cpu")
        assert torch.equal(attend(*tensors), flex_attention(*tensors, block_mask=mask))
    assert built == [(None, 2, LENGTH, LENGTH), (None, 2, 17, 17)]


def test_another_mask_may_be_given() -> None:
    tensors = inputs()
    mask = create_block_mask(masks.sliding_window(2), None, None, LENGTH, LENGTH, device="cpu")
    found = flexmod.compile(mask_mod=masks.causal())(*tensors, mask)
    assert torch.equal(found, flex_attention(*tensors, block_mask=mask))


def test_what_is_asked_for() -> None:
    tensors = inputs(kv_heads=1)
    attend = flexmod.compile(enable_gqa=True)
    out, aux = attend(*tensors, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores.shape == out.shape[:3]
    with pytest.raises(errors.ReturnArgumentsError):
        attend(*tensors, return_lse=True, return_aux=AuxRequest())
    with pytest.raises(errors.HeadCountMismatch):
        flexmod.compile()(*tensors)


def test_mistakes_are_told_when_it_is_compiled() -> None:
    with pytest.raises(errors.ModArityError):
        flexmod.compile(masks.causal())
    with pytest.raises(errors.MaskResultError):
        flexmod.compile(mask_mod=lambda b, h, q_idx, kv_idx: q_idx)
    with pytest.raises(errors.UnknownOption):
        flexmod.compile(kernel_options={"BLOCKS": 3})


@pytest.mark.parametrize("wrong", [3, torch.zeros(3)])
def test_mistakes_of_a_call(wrong: Any) -> None:
    q, k, v = inputs()
    attend = flexmod.compile(mods.softcap(2.0), masks.causal())
    for tensors in ((wrong, k, v), (q, wrong, v), (q, k, wrong)):
        with pytest.raises((errors.NotATensor, errors.NotFourDimensional)):
            attend(*tensors)


def test_the_mods_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        runs.append(score)
        return score * 2

    attend = flexmod.compile(mod)
    for length in (LENGTH, 7):
        attend(*inputs(q_len=length))
    assert len(runs) == 1 and isinstance(runs[0], tracing.Proxy)


@pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
def test_a_mask_without_queries_or_keys(options: Any) -> None:
    query, key, value = inputs()
    attend = flexmod.compile(None, masks.causal(), kernel_options=options)
    assert attend(query[:, :, :0], key, value).shape == (*query.shape[:2], 0, 16)
    out, lse = attend(query, key[:, :, :0], value[:, :, :0], return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_an_error_names_the_line_of_its_own_handle() -> None:
    """Although a handle before it has an equal graph."""
    first, second = torch.tensor([5, 6]), torch.tensor([5, 6])

    def one(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < first[b]

    def other(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < second[b]

    few, many = torch.randn(2, 1, 7, 16), torch.randn(3, 1, 7, 16)
    flexmod.compile(None, one)(few, few, few)
    with pytest.raises(errors.CaptureBoundsError, match=r"return kv_idx < second\[b\]"):
        flexmod.compile(None, other)(many, many, many)
