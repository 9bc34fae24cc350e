"""Every class of flexmod.errors: the call that raises it, and its whole message."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import call_error_rows
import other_error_rows
import pytest
import torch
from call_error_rows import call, captured_by_score, causal, x

import flexmod
from flexmod import create_block_mask, errors, flex_attention, mods
from flexmod.runtime import launch

# What tracing a mod raises: tests/ir/test_trace_errors.py has the rows, with the user's file and line.
IN_A_MOD = {
    "ModArityError", "MaskResultError", "ScoreResultError", "NotScalarError", "NoResultError",
    "ControlFlowError", "ConcreteValueError", "ForeignCaptureError",
    "ReductionError", "RandomNumberError", "MutationError",
    "UnknownAttributeError", "UnknownOperationError", "OperationArgumentError",
    "IndexDtypeError", "CaptureIndexError", "ModDtypeError", "NoDerivativeError",
}  # fmt: skip
ROWS = [*call_error_rows.ROWS, *other_error_rows.ROWS]


@pytest.mark.parametrize(("error", "mistake", "message"), ROWS, ids=[row[0].__name__ for row in ROWS])
def test_message(error: type[errors.FlexmodError], mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.FlexmodError) as raised:
        mistake()
    assert str(raised.value) == message
    assert type(raised.value) is error


def test_no_class_is_missing() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    every = {value.__name__ for value in classes if issubclass(value, errors.FlexmodError)}
    assert {row[0].__name__ for row in ROWS} | IN_A_MOD == every - {"FlexmodError"}


def test_every_class_is_public_and_goes_by_where_it_is_imported_from() -> None:
    ours = (errors.FlexmodError, errors.Where)
    classes = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, ours)]
    assert {x.__name__ for x in classes} == set(errors.__all__)
    assert {x.__module__ for x in classes} == {"flexmod.errors"}


def one_of_each() -> dict[Callable[[], object], str]:
    q, short = torch.zeros(1, 2, 8, 16), torch.zeros(1, 1, 1, 16)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8, device="cpu")

    def one(_: Any) -> Any:
        return True

    return {
        lambda: flex_attention(q, q[:, :1], q[:, :1]): "query has 2 heads but key and value have 1.",
        lambda: flex_attention(q[:, :1], q, q, enable_gqa=True): "query has 1 head, which is no multiple",
        lambda: flex_attention(q[0, 0, 0], q, q): "query has 1 dimension, shape (16,);",
        lambda: flex_attention(short, short, short, block_mask=mask): "query has 1 position and key 1.",
        lambda: flex_attention(4, q, q): "query is an int, not a torch.Tensor.",  # type: ignore[arg-type]
        lambda: flex_attention(q, q, q, mods.alibi(torch.ones(1))): "is made for 1 head (its",
        lambda: create_block_mask(one, None, None, 8, 8, device="cpu"): "takes 1 positional argument without",
        lambda: mask[0, 1]: "the number of heads is 1.",
    }


@pytest.mark.parametrize("number", range(8))
def test_a_count_of_one(number: int) -> None:
    refused, what = [*one_of_each().items()][number]
    with pytest.raises(errors.FlexmodError, match=re.escape(what)):
        refused()


# What the peers refuse, and flexmod refuses too.
REFUSALS = {
    "not 4-D": "NotFourDimensional",
    "nested tensors passed straight in": "NestedTensorInput",
    "q, k, v, the mask or a capture on another device": "DeviceMismatch",
    "head dimensions of q and k": "HeadDimMismatch",
    "heads without enable_gqa": "HeadCountMismatch",
    "heads that are no multiple": "HeadRatioError",
    "a batch or head count of the mask": "MaskBroadcastError",
    "a mask of one batch or head that reads it": "MaskReadsBroadcastIndex",
    "a mask for other lengths": "MaskLengthError",
    "the number of a mod's arguments": "ModArityError",
    "a mask mod that returns a float": "MaskResultError",
    "a result that is no scalar": "NotScalarError",
    "if, and, not, while on an index": "ControlFlowError",
    ".item()": "ConcreteValueError",
    ".sum()": "ReductionError",
    "random numbers": "RandomNumberError",
    "in-place writes": "MutationError",
    "both return_lse and return_aux": "ReturnArgumentsError",
    "an unknown option": "UnknownOption",
    "a value that an option does not take": "OptionValueError",
    "an unknown operation": "UnknownOperationError",
    "FLASH": "FlashBackendError",
    "TRITON_DECODE": "DecodeBackendError",
    "gradients of mask captures": "MaskCaptureGradientError",
    "a backward through keys of lower precision": "LowerPrecisionBackward",
}


def test_every_refusal_has_a_row() -> None:
    assert set(REFUSALS.values()) <= {row[0].__name__ for row in ROWS} | IN_A_MOD


def test_the_rows_of_mods_are_there() -> None:
    rows = (Path(__file__).parent / "ir" / "test_trace_errors.py").read_text()
    assert [name for name in sorted(IN_A_MOD) if name not in rows] == []


def test_an_error_is_also_the_builtin_that_fits() -> None:
    """So that code which catches ValueError or TypeError around torch's flex_attention goes on working."""
    kinds = (ValueError, TypeError, LookupError, NotImplementedError, RuntimeError, ImportError)
    assert all(issubclass(row[0], kinds) for row in ROWS)


def test_the_advice_of_a_wrong_length_is_a_call_that_works() -> None:
    made = create_block_mask(causal, 2, None, 64, 64, device="cpu", BLOCK_SIZE=(16, 32))
    with pytest.raises(errors.MaskLengthError) as raised:
        call(block_mask=made)
    advice = str(raised.value).split("Instead: ")[1]
    rebuilt = eval(advice, {"create_block_mask": create_block_mask, "mask_mod": made.mask_mod})
    assert (rebuilt.shape, rebuilt.BLOCK_SIZE) == ((2, 1, 32, 32), (16, 32))
    assert call(block_mask=rebuilt).shape == (2, 4, 32, 16)


def test_nothing_runs_before_the_checks() -> None:
    """A mistake in the last thing checked, a captured tensor, still launches nothing."""
    with mock.patch.object(launch, "start") as start, pytest.raises(errors.DeviceMismatch):
        captured_by_score("bias", x(4, device="meta"), kernel_options={"BACKEND": "INTERPRET"})
    start.assert_not_called()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    "mistake",
    [
        lambda device: create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device),
        lambda device: flexmod.create_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device),
        lambda device: create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, "cpu").to(device),
        lambda device: flexmod.compare("causal", device=device),
        lambda device: flexmod.masks.tile_order((8, 8), (4, 4), device),
        lambda device: flexmod.masks.morton_order((8, 8), device),
        lambda device: flexmod.mods.alibi_slopes(8, device),
        lambda device: flexmod.mods.sandwich(8, 16, device=device),
    ],
    ids=[
        "create_block_mask", "create_mask", "to", "compare",
        "tile_order", "morton_order", "alibi_slopes", "sandwich",
    ],
)
def test_a_device_that_is_not_there(mistake: Callable[[str], Any]) -> None:
    for device in ("cuda", "gpu"):
        with pytest.raises(errors.NoDeviceError, match=f"device is '{device}': "):
            mistake(device)
