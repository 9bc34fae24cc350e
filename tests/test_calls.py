"""Repeated calls: what is checked, traced and launched once more, what is run from a plan, and the results.

Each change follows a call that ran from a plan, and the next result is compared with the reference backend.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import numpy as np
import planned
import pytest
import torch
from reference_case import make_case
from torch import Tensor

import flexmod
from flexmod import AuxRequest, BlockMask, create_block_mask, errors, flex_attention, masks, mods
from flexmod.backends.options import parse
from flexmod.calls import prepared
from flexmod.runtime import config

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}
LENGTH = 24
LIMIT = 2.0


def inputs(grad: bool = False, **other: Any) -> tuple[Tensor, ...]:
    case = make_case(**{"q_len": LENGTH, "heads": 2, "head_dim": 16, **other})
    return tuple(x.requires_grad_(grad) for x in case.inputs)


def block_mask(mask_mod: Any = None, length: int = LENGTH) -> BlockMask:
    mod = mask_mod or masks.causal()
    return create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=16)


def slope(table: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return LIMIT * torch.tanh(score / LIMIT)


class Seen:
    """Counts calls that launch kernels: how many were checked once more, and how many ran from a plan."""

    def __init__(self) -> None:
        self.anew = 0
        self.again: list[Any] = []

    @property
    def played(self) -> int:
        return sum(bool([*bound.plan.launches()]) for bound in self.again)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    attend = prepared._check_and_attend

    def checked(*arguments: Any) -> Any:
        found.anew += arguments[4].options.backend != "REFERENCE"
        return attend(*arguments)

    monkeypatch.setattr(prepared, "_check_and_attend", checked)
    found.again = planned.reruns(monkeypatch)
    return found


def close(
    tensors: tuple[Tensor, ...],
    score_mod: Any = None,
    mask: Any = None,
    leaves: tuple[Tensor, ...] = (),
    **other: Any,
) -> None:
    """Kernels in the interpreter and the reference agree, in gradients too where there are any."""
    found = []
    for options in (INTERPRET, REFERENCE):
        out, lse = flex_attention(*tensors, score_mod, mask, return_lse=True, kernel_options=options, **other)
        results = [out, lse]
        if out.requires_grad:
            generator = torch.Generator().manual_seed(0)
            grad_out = torch.randn(out.shape, generator=generator, dtype=out.dtype)
            results += torch.autograd.grad(out, (*(t for t in tensors if t.requires_grad), *leaves), grad_out)
        found.append(results)
    for one, other_one in zip(*found, strict=True):
        torch.testing.assert_close(one, other_one, rtol=1e-4, atol=1e-4)


def warm(*arguments: Any, **options: Any) -> None:
    for _ in range(3):
        close(*arguments, **options)


# Known calls


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("masked", [False, True], ids=["open", "causal"])
def test_a_known_call_is_played(grad: bool, masked: bool, seen: Seen) -> None:
    mask = block_mask() if masked else None
    for seed in range(5):
        close(inputs(grad, seed=seed), mods.softcap(3.0), mask)
    assert (seen.anew, seen.played) == (1, 8 if grad else 4)


def test_a_mod_made_anew_for_each_call(seen: Seen) -> None:
    mask = block_mask()
    for seed in range(5):
        table = torch.rand(2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        close(inputs(True, seed=seed), slope(table), mask, (table,))
    assert (seen.anew, seen.played) == (1, 8)


def test_other_results_are_asked_for(seen: Seen) -> None:
    q, k, v = inputs()
    for _ in range(4):
        out, aux = flex_attention(
            q, k, v, return_aux=AuxRequest(lse=True, max_scores=True), kernel_options=INTERPRET
        )
        assert aux.max_scores.shape == aux.lse.shape == out.shape[:3]
        flex_attention(q, k, v, kernel_options=INTERPRET)
    assert seen.anew == 2 and seen.played == 6


def test_one_tensor_three_times_and_then_three(seen: Seen) -> None:
    q, k, v = inputs()
    warm((q, q, q))
    close((q, k, v))
    assert seen.anew == 1 and seen.played == 3


def test_a_backward_with_other_needs(seen: Seen) -> None:
    mask = block_mask()
    warm(inputs(True, heads=1), None, mask)
    for wanted in ((0,), (1,), (2,), (0, 2)):
        tensors = tuple(x.requires_grad_(n in wanted) for n, x in enumerate(inputs(heads=1)))
        warm(tensors, None, mask)


# What must not be taken for known


Change = tuple[tuple[Tensor, ...], Any, Any]


def changes() -> dict[str, Callable[[], Change]]:
    shifted = torch.empty(2 * 2 * LENGTH * 16 + 1)[1:].view(2, 2, LENGTH, 16).copy_(inputs()[0])

    def half(x: Tensor) -> Tensor:
        return x.half()

    return {
        "length": lambda: (inputs(q_len=17), None, None),
        "heads": lambda: (inputs(heads=3), None, None),
        "dtype": lambda: (tuple(map(half, inputs())), None, None),
        "strides": lambda: (
            tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs()),
            None,
            None,
        ),
        "expanded": lambda: ((inputs()[0], *(x[:, :, :1].expand_as(x) for x in inputs()[1:])), None, None),
        "alignment": lambda: ((shifted, *inputs()[1:]), None, None),
        "gradient": lambda: (inputs(True), None, None),
        "score mod": lambda: (inputs(), mods.softcap(3.0), None),
        "mask": lambda: (inputs(), None, block_mask()),
    }


@pytest.mark.parametrize("name", changes())
def test_another_call(name: str, seen: Seen) -> None:
    warm(inputs())
    tensors, score_mod, mask = changes()[name]()
    if name == "dtype":
        out = flex_attention(*tensors, kernel_options=INTERPRET)
        assert out.dtype == torch.float16
    else:
        close(tensors, score_mod, mask)
    assert seen.anew == 2


def test_a_number_that_changed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(inputs(), capped)
    for limit in (3.0, 4.0, 2.0):
        monkeypatch.setitem(globals(), "LIMIT", limit)
        close(inputs(), capped)
    assert seen.anew == 3  # 2.0 is known


def test_a_captured_tensor_of_another_kind(seen: Seen) -> None:
    table = torch.rand(4)
    warm(inputs(), slope(table[:2]))
    for other in (table[::2], table[1:3], table[:2].double()):
        close(inputs(), slope(other))
    assert seen.anew == 4


def test_a_captured_tensor_changed_in_place(seen: Seen) -> None:
    table = torch.rand(2)
    mod = slope(table)
    warm(inputs(), mod)
    table.mul_(-2)
    close(inputs(), mod)
    assert seen.anew == 1
    table.resize_(3)
    close(inputs(), mod)
    assert seen.anew == 2


def test_a_captured_tensor_that_wants_a_gradient_now(seen: Seen) -> None:
    table = torch.rand(2)
    mod = slope(table)
    warm(inputs(), mod)
    close(inputs(), mod, None, (table.requires_grad_(),))
    assert seen.anew == 2


def test_options_scale_and_heads(seen: Seen) -> None:
    tensors = inputs()
    warm(tensors)
    for other in ({"scale": 0.5}, {"scale": 2}, {"enable_gqa": True}):
        close(tensors, **other)
    flex_attention(*tensors, kernel_options={**INTERPRET, "BLOCK_M": 32})
    assert seen.anew == 5
    with pytest.raises(errors.OptionValueError):
        flex_attention(*tensors, kernel_options={**INTERPRET, "BLOCK_M": 31})


class Names(str, Enum):
    """A program's own names of options."""

    BACKEND = "INTERPRET"
    TEMPLATE = "portable"
    FLASH = "FLASH"


def test_a_member_of_an_enum_names_an_option_also_in_a_compiled_graph() -> None:
    options = {"BACKEND": Names.BACKEND, "TEMPLATE": Names.TEMPLATE}
    tensors = inputs()
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    for attend in (flex_attention, compiled):
        torch.testing.assert_close(attend(*tensors, kernel_options=options), flex_attention(*tensors))
    assert {type(value) for _, value in parse(options).tiles} == {type(parse(options).backend)} == {str}
    with pytest.raises(errors.FlashBackendError):
        parse({"BACKEND": Names.FLASH})


@pytest.mark.parametrize("name", ["BACKEND", "TEMPLATE"])
@pytest.mark.parametrize("value", [np.array("auto"), np.array(["AUTO", "auto"]), ["auto"]])
def test_only_a_string_names_an_option(name: str, value: object) -> None:
    with pytest.raises(errors.OptionValueError):
        flex_attention(*inputs(), kernel_options={name: value})


NUMBERS = {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2, "kpack": 1, "waves_per_eu": 0}


@pytest.mark.parametrize("name", [*NUMBERS, "tuned"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_is_no_number_of_an_option(name: str, shape: tuple[int, ...]) -> None:
    """It may change, and a kernel is compiled for the number."""
    value = torch.tensor(NUMBERS.get(name, True)).reshape(shape)
    for make in (parse, lambda options: flexmod.compile(kernel_options=options)):
        with pytest.raises(errors.OptionValueError):
            make({name: value})


def test_an_integer_of_numpy_is_a_number_of_an_option_in_a_compiled_graph() -> None:
    tensors, size = inputs(), np.int64(32)
    attend = torch.compile(
        lambda *tensors: flex_attention(*tensors, kernel_options={"BLOCK_M": size}),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    torch.testing.assert_close(attend(*tensors), flex_attention(*tensors))


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_of_numpy_is_a_number_of_an_option(name: str) -> None:
    options = {name: np.int64(NUMBERS[name]), "tuned": np.bool_(False)}
    assert {name: type(value) for name, value in parse(options).tiles} == {name: int, "tuned": bool}
    for wrong in (True, np.bool_(True), False):
        with pytest.raises(errors.OptionValueError):
            parse({name: wrong})


def test_a_tensor_is_no_number_of_an_option_in_a_compiled_graph() -> None:
    tensors = inputs()
    compiled = torch.compile(flex_attention, backend="aot_eager")
    with pytest.raises(errors.OptionValueError, match=r"kernel option BLOCK_M is tensor\(64\)"):
        compiled(*tensors, kernel_options={"BLOCK_M": torch.tensor(64)})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_torch(name: str, seen: Seen) -> None:
    tensors = inputs(True)
    warm(tensors)
    outside = flex_attention(*tensors, kernel_options=INTERPRET)
    with STATES[name]():
        inside = [flex_attention(*tensors, kernel_options=INTERPRET) for _ in range(4)]
    assert seen.anew == 2
    assert all(torch.equal(x, inside[0]) for x in inside)
    assert all(x.requires_grad == (name != "no_grad") for x in inside)
    assert inside[0].dtype == (torch.bfloat16 if name == "autocast" else torch.float32)
    assert torch.equal(flex_attention(*tensors, kernel_options=INTERPRET), outside)


def test_inference_mode(seen: Seen) -> None:
    tensors = inputs()
    warm(tensors)
    with torch.inference_mode():
        out = flex_attention(*tensors, kernel_options=INTERPRET)
    assert out.is_inference() and torch.equal(out, flex_attention(*tensors, kernel_options=INTERPRET))
    assert not flex_attention(*tensors, kernel_options=INTERPRET).is_inference()


def test_transforms_and_debugging_are_not_known(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    warm((q, k, v))

    def loss(query: Tensor) -> Tensor:
        return flex_attention(query, k, v, kernel_options=INTERPRET).sum()

    for _ in range(3):
        torch.func.grad(loss)(q)
    assert seen.anew == 4
    monkeypatch.setattr(config, "debug_level", lambda: 1)
    flex_attention(q, k, v, kernel_options=INTERPRET)
    assert seen.anew == 5


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda q, k, v: (q, k[:, :, :3], v), errors.LengthMismatch),
        (lambda q, k, v: (q, k.half(), v), errors.MixedDtypes),
        (lambda q, k, v: (q, None, v), errors.NotATensor),
        (lambda q, k, v: (q[0], k, v), errors.NotFourDimensional),
        (lambda q, k, v: (q, k.to("meta"), v), errors.DeviceMismatch),
    ],
)
def test_checks_hold_after_known_calls(wrong: Any, error: type[Exception]) -> None:
    tensors = inputs()
    warm(tensors)
    for _ in range(2):
        with pytest.raises(error):
            flex_attention(*wrong(*tensors), kernel_options=INTERPRET)


# Masks


def test_a_mask_that_is_changed(seen: Seen) -> None:
    tensors, mask = inputs(), block_mask()
    warm(tensors, None, mask)
    mask.mask_mod = masks.sliding_window(3)
    close(tensors, None, mask)
    assert seen.anew == 2
    assert mask.kv_num_blocks is not None
    mask.kv_num_blocks.zero_()  # only full tiles are left: the lower left one
    close(tensors, None, mask)
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    close(tensors, None, mask)
    out = flex_attention(*tensors, block_mask=mask, kernel_options=INTERPRET)
    assert not out.any()


def test_masks_that_differ_in_values_alone(seen: Seen) -> None:
    tensors, one = inputs(True, heads=1), torch.ones(1, 1, 2).int()
    for end in (7, 9, 11):
        close(tensors, None, block_mask(masks.document((torch.arange(LENGTH) >= end).int())))
    assert seen.anew == 1
    for columns in ((0, 1), (1, 0), (1, 1)):
        indices = torch.tensor(columns).int().view(1, 1, 2, 1)
        lengths = {"BLOCK_SIZE": 16, "seq_lengths": (LENGTH, LENGTH)}
        close(tensors, None, BlockMask.from_kv_blocks(one, indices, **lengths))
    assert seen.anew == 2
    close(tensors, None, block_mask(masks.sliding_window(9)))
    close(tensors, None, block_mask(masks.sliding_window(10)))
    assert seen.anew == 4


def test_a_list_of_another_kind(seen: Seen) -> None:
    tensors = inputs()
    counts, indices = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(LENGTH, LENGTH))
    warm(tensors, None, mask)
    mask.kv_indices = indices.expand(1, 2, 2, 2)
    mask.kv_num_blocks = torch.tensor([[[1, 2], [1, 1]]]).int()
    close(tensors, None, mask)


def test_what_a_mask_captures(seen: Seen) -> None:
    tensors = inputs()
    limits = torch.full((LENGTH,), 20)

    def below(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < limits[q_idx]) & (q_idx >= kv_idx)

    mask = block_mask(below)
    warm(tensors, None, mask)
    limits.fill_(18)
    close(tensors, None, mask)
    assert seen.anew == 1
    limits.resize_(LENGTH + 1)
    close(tensors, None, mask)
    assert seen.anew == 2


def test_a_mask_in_the_score_mod(seen: Seen) -> None:
    def causal(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx >= kv_idx, score, -torch.inf)

    warm(inputs(True), causal)
    assert seen.anew == 1 and seen.played == 4


def test_a_mask_in_the_score_mod_that_reads_a_tensor(seen: Seen) -> None:
    limits = torch.full((LENGTH,), 20)

    def below(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx < limits[q_idx], score, -torch.inf)

    for limit in (20, 3, 24, 9):
        limits.fill_(limit)
        close(inputs(), below)
    assert seen.anew == 4


def test_a_mask_is_not_kept_alive(seen: Seen) -> None:
    mask = block_mask()
    warm(inputs(True), None, mask)
    alive = weakref.ref(mask)
    gc.disable()  # no cycle holds it
    try:
        del mask
        assert alive() is None
    finally:
        gc.enable()


def test_captured_tensors_are_not_kept_alive(seen: Seen) -> None:
    table = torch.rand(2, requires_grad=True)
    warm(inputs(), slope(table), None, (table,))
    alive = weakref.ref(table)
    del table
    gc.collect()
    assert alive() is None


def test_the_oldest_call_is_forgotten(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "KNOWN", 2)
    for length in (3, 4, 5, 5, 4, 3):
        flex_attention(*inputs(q_len=length), kernel_options=INTERPRET)
    assert seen.anew == 4


# The rest of torch


def test_saved_tensors_that_come_back_elsewhere(seen: Seen) -> None:
    """Hooks may hand the backward tensors of other strides and alignment."""

    def moved(x: Tensor) -> Tensor:
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)

    mask = block_mask()
    warm(inputs(True), None, mask)
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, moved))
        warm(inputs(True), None, mask)


def test_a_second_derivative_is_refused_still() -> None:
    q, k, v = inputs(True)
    warm((q, k, v))
    (gradient,) = torch.autograd.grad(
        flex_attention(q, k, v, kernel_options=INTERPRET).sum(), q, create_graph=True
    )
    with pytest.raises(errors.DoubleBackwardError):
        gradient.sum().backward()
