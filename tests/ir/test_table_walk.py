"""Every row of the table over special values: Triton text, evaluator, derivative and interval rule."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from table_walk import (
    DTYPES,
    SOURCES,
    Source,
    check,
    graph_of,
    held_to,
    pairs,
    rows_of,
    special_values,
    truth,
)
from torch import Tensor

from flexmod.ir import bounds
from flexmod.ir.bounds import ROUNDED, UNKNOWN
from flexmod.ir.evaluate import evaluate
from flexmod.ir.ops import OPS, Op

CPU = torch.device("cpu")
CASES = [
    pytest.param(row, dtype, source, id=f"{row.name}-{str(dtype)[6:]}-{source}")
    for dtype in DTYPES
    for source in (SOURCES if dtype == torch.float32 else SOURCES[:1])
    for row in rows_of(dtype)
]


def test_every_row_takes_some_dtype() -> None:
    assert {row.name for dtype in DTYPES for row in rows_of(dtype)} == set(OPS)


@pytest.mark.parametrize(("row", "dtype", "source"), CASES)
def test_triton_text_does_what_torch_does(row: Op, dtype: torch.dtype, source: Source) -> None:
    check(row, dtype, source, CPU)


@pytest.mark.parametrize("on_chip", [False, True], ids=["interpreter", "chip"])
def test_most_of_it_is_held_to_torch(on_chip: bool) -> None:
    """What differs is the lesser part of the pairs, of every row, for every dtype."""
    for row, dtype, source in (case.values for case in CASES):
        _, kept = held_to(row, dtype, source, on_chip)
        assert kept.float().mean() > 0.5, (row.name, dtype, source)


@pytest.mark.parametrize(
    ("row", "dtype"), [pytest.param(*case.values[:2], id=case.id) for case in CASES if "score" not in case.id]
)
def test_the_evaluator_does_what_torch_does(row: Op, dtype: torch.dtype) -> None:
    """Bit for bit, signs of zeros too, on tensors of one size: torch's own rounding may depend on it."""
    x = y = special_values(dtype)
    expected = truth(row, dtype)
    places = dict.fromkeys(("b", "h"), torch.zeros(1, 1, dtype=torch.int64))
    queries, keys = torch.meshgrid(torch.arange(len(x)), torch.arange(len(y)), indexing="ij")
    places |= {"q_idx": queries, "kv_idx": keys}
    (found,) = evaluate(graph_of(row, dtype, "captured"), (x, y), **places)
    found = found.expand(expected.shape)
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=0, atol=0, equal_nan=True)
    if expected.is_floating_point():
        number = ~expected.isnan()
        assert torch.equal(found.signbit()[number], expected.signbit()[number])


DIVISIONS = ("floor_divide", "trunc_divide", "remainder", "fmod")
TORCHS = {
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "trunc_divide": partial(torch.div, rounding_mode="trunc"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[1:6], ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_of_whole_numbers_are_torchs(name: str, dtype: torch.dtype) -> None:
    """By 0 it is that by 1; the smallest number divided by -1 wraps, where torch's may end the process."""
    a, b = pairs(dtype)
    found = OPS[name].torch(a, b)
    undefined = (b == 0) | ((a < 0) & (a == -a) & (b == -1 if dtype.is_signed else b < 0))
    one = torch.ones_like(b)
    assert torch.equal(found[~undefined], TORCHS[name](a, torch.where(undefined, one, b))[~undefined])
    assert torch.equal(found[b == 0], TORCHS[name](a, one)[b == 0])
    smallest = undefined & (b != 0)
    assert torch.equal(found[smallest], (-a if "divide" in name else a * 0)[smallest])


# derivatives

DIFFERENTIABLE = [row for row in rows_of(torch.float64) if row.derivative]
ORDINARY = torch.tensor(
    [0.0, 1e-3, 0.1, 0.3, 0.625, 0.99, 1.01, 1.6, 2.3, 3.3, 5.7, 12.3, 31.4], dtype=torch.float64
)


def applied(row: Op, arguments: list[Tensor]) -> tuple[Any, ...]:
    """`where` decides by place: half of all pairs each."""
    size = len(arguments[0])
    first = (torch.arange(size)[:, None] > torch.arange(size),) if row.name == "where" else ()
    return (*first, *arguments)


def derivatives(row: Op, arguments: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The rule's answer for each argument; None stands for 0."""
    whole = applied(row, arguments)
    assert row.derivative is not None
    parts = row.derivative(grad, row.torch(*whole), *whole)[len(whole) - len(arguments) :]
    zero = torch.zeros_like(grad)
    return [zero if part is None else part + zero for part in parts]


@pytest.mark.parametrize("row", DIFFERENTIABLE, ids=lambda r: r.name)
def test_derivative_is_that_of_finite_differences(row: Op) -> None:
    """By differences on both sides, in float64, wherever these agree: not at a corner, nor at a jump."""
    values = torch.cat([-ORDINARY.flip(0), ORDINARY[1:]])
    a, b = values[:, None].repeat(1, len(values)), values.repeat(len(values), 1) + 0.017
    arguments = [a, b][: min(row.arity, 2)]
    grad = torch.full_like(a, 0.7)
    for place, mine in enumerate(derivatives(row, arguments, grad)):
        x = arguments[place]
        step = 1e-6 * x.abs().clamp(min=1e-3)

        def at(
            offset: Tensor, row: Op = row, place: int = place, arguments: list[Tensor] = arguments
        ) -> Tensor:
            moved = [y + offset if i == place else y for i, y in enumerate(arguments)]
            return row.torch(*applied(row, moved)).double()

        middle = at(torch.zeros_like(x))
        left, right = (middle - at(-step)) / step, (at(step) - middle) / step
        far_left, far_right = (middle - at(-2 * step)) / (2 * step), (at(2 * step) - middle) / (2 * step)
        slope = (left + right) / 2
        curve = (far_left + far_right - left - right).abs() + 1e-15 * middle.abs() / step
        limit = 1e-6 * slope.abs() + 10 * curve + 1e-9
        smooth = slope.isfinite() & ((right - left).abs() <= 1e-2 * slope.abs() + 1e-6) & middle.isfinite()
        far_off = ((mine - grad * slope).abs() > limit) & smooth
        assert not far_off.any(), (x[far_off][:5], mine[far_off][:5], (grad * slope)[far_off][:5])
        assert smooth.float().mean() > 0.3


@pytest.mark.parametrize("row", [r for r in DIFFERENTIABLE if r.torch_names], ids=lambda r: r.name)
def test_derivative_at_special_values_is_autograds(row: Op) -> None:
    """At zeros, denormals, limits, infinities and what is no number; the smaller of nan and 1 has none."""
    a, b = (x.double() for x in pairs(torch.float32))
    arguments = [a, b][: min(row.arity, 2)]
    grad = torch.full_like(a, 0.7)
    wanted = [x.clone().requires_grad_() for x in arguments]
    y = row.torch(*applied(row, wanted))
    expected: tuple[Any, ...] = (None,) * len(wanted)
    if y.requires_grad and row.name != "floor_divide":  # which torch does not differentiate
        expected = torch.autograd.grad(y, wanted, grad, allow_unused=True)
    kept = ~(a.isnan() | b.isnan()) if row.name in ("minimum", "maximum") else torch.ones_like(a) > 0
    for mine, torchs in zip(derivatives(row, arguments, grad), expected, strict=True):
        theirs = torch.zeros_like(grad) if torchs is None else torchs
        torch.testing.assert_close(mine[kept], theirs[kept], rtol=1e-8, atol=1e-11, equal_nan=True)


# intervals

WHOLE = [-(2**31), -(2**31) + 1, -65536, -46341, -33, -8, -1, 0, 1, 2, 7, 31, 63, 46341, 2**31 - 2, 2**31 - 1]
FLOATS = [0.0, 1e-45, 1.2e-38, 1e-3, 0.3, 1.0, 2.5, 49.0, 1e10, 3.4e38, math.inf]


def whole_result(row: Op, *values: int) -> int | float | bool:
    """Exact, where int64 is wide enough for it or Python's numbers are used."""
    a, b = values[0], values[-1]
    if row.name == "shift_left":
        return a << b if 0 <= b < 64 else 0
    if row.name == "pow":
        return a**b if b >= 0 else 0 if a == 0 else int(a**b)
    floats = row.name == "hypot" or row.dtype(torch.int64, torch.int64).is_floating_point
    number = torch.float64 if floats else torch.int64
    dtypes = [torch.bool, number, number] if row.name == "where" else [number] * len(values)
    at = row.argument_dtypes(dtypes, number)
    return row.torch(*(torch.tensor(v, dtype=d) for v, d in zip(values, at, strict=True))).item()


def intervals(ends: list[Any]) -> list[bounds.Bounds]:
    return [(low, high) for low, high in itertools.product(ends, ends) if low <= high]


def allowed(row: Op, place: int) -> list[bounds.Bounds]:
    """Bounds of an argument; those of one end alone too, the other unknown."""
    if row.at == "bool" or (row.name == "where" and place == 0):
        return [(False, False), (False, True), (True, True)]
    if row.name == "pow":
        return intervals([-46341, -7, -2, -1, 0, 1, 2, 3] if place == 0 else [-1, 0, 1, 2, 7, 20, 64])
    ends = [x for x in WHOLE if x >= -64 or place == 0] if row.name.startswith("shift") else WHOLE
    ends = ends if place == 0 or row.name == "where" else ends[1::2]
    unbounded = [UNKNOWN, *((-math.inf, e) for e in ends[::5]), *((e, math.inf) for e in ends[::5])]
    return intervals(ends[:: 1 if row.arity == 1 else 2]) + unbounded


def values_within(ends: bounds.Bounds) -> list[int]:
    """Both ends, what lies beside them, and what of the special values lies between."""
    low, high = (max(ends[0], -(2**31)), min(ends[1], 2**31 - 1))
    inner = [v for v in (-65536, -8, -1, 0, 1, 7, 46341) if low < v < high]
    return sorted({int(low), int(high), *(int(v) for v in inner), int(min(low + 1, high))})


@pytest.mark.parametrize("row", [r for r in OPS.values() if r.interval], ids=lambda r: r.name)
def test_interval_of_whole_numbers_holds_every_value(row: Op) -> None:
    """At the limits of int32, in exact arithmetic."""
    assert row.interval is not None
    results: dict[tuple[int, ...], Any] = {}
    wrong, looked_at = [], 0
    for ends in itertools.product(*(allowed(row, place) for place in range(row.arity))):
        low, high = row.interval(*ends)
        for values in itertools.product(*map(values_within, ends)):
            if (row.name in ("div", *DIVISIONS) and values[1] == 0) or (
                row.name == "pow" and values[0] == 0 > values[1]
            ):
                continue
            if values not in results:
                results[values] = whole_result(row, *values)
            result = results[values]
            looked_at += 1
            if not math.isnan(result) and not low <= result <= high:
                wrong.append((ends, values, result, (low, high)))
    assert not wrong, wrong[:5]
    assert looked_at > 20 if row.at != "bool" else looked_at >= 4


@pytest.mark.parametrize(
    "row",
    [r for r in OPS.values() if r.interval in ROUNDED or r.interval in (bounds.within_one, bounds.share)],
    ids=lambda r: r.name,
)
def test_interval_of_floats_holds_every_value(row: Op) -> None:
    """Infinities, denormals and zeros of float32 among the ends; the ends are rounded as the operation is."""
    assert row.interval is not None

    @cache
    def single(x: float) -> float:
        return torch.tensor(float(x)).item()

    @cache
    def result_of(*values: float) -> float:
        return row.torch(*map(torch.tensor, values)).item()

    numbers = sorted({single(x) for f in FLOATS[:: row.arity] for x in (f, -f)})
    spans = intervals(numbers)
    first = [(False, False), (False, True), (True, True)] if row.name == "where" else []
    wrong = []
    for ends in itertools.product(*([first] if first else []), *[spans] * min(row.arity, 2)):
        low, high = map(single, row.interval(*ends))
        chosen = [sorted({e[0], e[1], *(n for n in (0.0, 1.0) if e[0] <= n <= e[1])}) for e in ends]
        for values in itertools.product(*chosen):
            result = result_of(*values)
            # inf - inf: nothing is known of an end that is no number
            if low > result or result > high:
                wrong.append((ends, values, result, (low, high)))
    assert not wrong, wrong[:5]
