"""Each function of `device_functions/arithmetic.py` beside Python, torch or NumPy, on odd values too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from table_walk import special_values
from torch import Tensor

from device_functions.applied import applied, kernel, loaded

INT32 = 2**31
WHOLE = special_values(torch.int32)
SINGLE, DOUBLE = special_values(torch.float32), special_values(torch.float64)
TINY = torch.finfo(torch.float32).tiny


def wrapped(number: int) -> int:
    """As int32 holds it."""
    return (number + INT32) % 2**32 - INT32


def of_pairs(function: Callable[[int, int], int], allowed: Callable[[int, int], bool]) -> tuple[Tensor, ...]:
    """Pairs of whole numbers, and what a Python function makes of them."""
    pairs = [(a, b) for a in WHOLE.tolist() for b in WHOLE.tolist() if allowed(a, b)]
    a, b = torch.tensor(pairs, dtype=torch.int32).unbind(1)
    return a, b, torch.tensor([wrapped(function(x, y)) for x, y in pairs], dtype=torch.int32)


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def power(a: int, b: int) -> int:
    if b < 0:
        return {1: 1, -1: 1 if b % 2 == 0 else -1}.get(a, 0)
    return pow(a, b, 2**32)


def unsigned(a: int) -> int:
    return a % 2**32


# A division by 0, and one whose result int32 does not hold, are not asked of the plain functions.
DIVIDES = {"where": lambda a, b: b != 0 and (a, b) != (-INT32, -1)}
ANY = {"where": lambda a, b: True}
SIZES = {"where": lambda a, b: 0 < b < 2**30 and abs(a) < 2**30}
OF_INTEGERS: dict[str, tuple[Callable[[int, int], int], dict[str, Any]]] = {
    "floor_divide": (lambda a, b: a // b, DIVIDES),
    "remainder": (lambda a, b: a % b, DIVIDES),
    "safe_floor_divide": (lambda a, b: a // (b or 1), ANY),
    "safe_trunc_divide": (lambda a, b: truncated(a, b or 1), ANY),
    "safe_remainder": (lambda a, b: a % (b or 1), ANY),
    "safe_fmod": (lambda a, b: a - truncated(a, b or 1) * (b or 1), ANY),
    "power_int": (power, ANY),
    "shift_left": (lambda a, b: a << b if 0 <= b < 32 else 0, ANY),
    "shift_right": (lambda a, b: a >> b if 0 <= b < 32 else -(a < 0), ANY),
    "unsigned_lt": (lambda a, b: unsigned(a) < unsigned(b), ANY),
    "unsigned_max": (lambda a, b: max(unsigned(a), unsigned(b)), ANY),
    "in_range": (lambda a, b: 0 <= a < b, SIZES),
    "wrap": (lambda a, b: a + b if a < 0 else a, SIZES),
    "wrap_any": (lambda a, b: a + b if a < 0 else a, SIZES),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers(name: str, device: torch.device) -> None:
    function, pairs = OF_INTEGERS[name]
    a, b, expected = of_pairs(function, pairs["where"])
    call = f"{name}(a, b)"
    if name in ("unsigned_lt", "in_range"):
        call += ".to(tl.int32)"
    found = applied("arithmetic", call, a.to(device), b.to(device))
    if name == "wrap":  # one that lies before the start stays negative, whichever number it is
        expected, found = expected.clamp(min=-1), found.clamp(min=-1)
    assert torch.equal(found, expected)


def test_divisors() -> None:
    signed = torch.tensor([0, -1, 1, -2, 7])
    assert applied("arithmetic", "safe_divisor(a)", signed).tolist() == [1, 1, 1, -2, 7]
    unsigned = torch.tensor([0, 1, 255], dtype=torch.uint8)
    assert applied("arithmetic", "safe_divisor(a)", unsigned).tolist() == [1, 1, 255]
    quotient, b = torch.tensor([5, 5, 5]), torch.tensor([-1, 0, 2])
    assert applied("arithmetic", "negated_by_minus_one(a, b)", quotient, b).tolist() == [-5, 5, 5]


CHECK = """

@triton.jit
def run(FOUND, INDEX, LIVE, COUNT, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    inside = place < COUNT
    live = tl.load(LIVE + place, mask=inside, other=0) != 0
    check_bounds(FOUND, tl.load(INDEX + place, mask=inside, other=0), 5, live)
"""


@pytest.mark.parametrize(
    ("rows", "told"), [((0, 2), 0), ((0, 4), 19), ((4, 5), 6), ((5, 6), 0), ((0, 6), 19)], ids=str
)
def test_indices_outside_are_told(rows: tuple[int, int], told: int, device: torch.device) -> None:
    """2 * index + 1, or -2 * index of a negative one: the largest such number of a live position."""
    index = torch.tensor([0, 4, 5, 9, -3, 100], device=device)[slice(*rows)]
    live = torch.tensor([1, 1, 1, 1, 1, 0], device=device)[slice(*rows)]
    found = torch.zeros(1, dtype=torch.int64, device=device)
    kernel(loaded("arithmetic", CHECK), "run", found)[(1,)](found, index, live, len(index), BLOCK=8)
    assert found.item() == told


def near(found: Tensor, expected: Tensor, relative: float, absolute: float = 0.0) -> None:
    """Equal, both no number, or as near as the limits say; denormal results may be 0."""
    found, expected = found.double(), expected.double()
    error = (found - expected).abs()
    fine = (found == expected) | (found.isnan() & expected.isnan())
    fine |= error <= expected.abs() * relative + absolute
    assert fine.all(), [(x, y) for x, y in zip(found[~fine].tolist(), expected[~fine].tolist(), strict=True)][
        :9
    ]


def in_double(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In float64, rounded to the dtype of x."""
    return function(x.double()).to(x.dtype)


# relative and absolute errors in float32
OF_FLOATS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "trunc": (torch.trunc, 0.0, 0.0),
    "round_half_even": (torch.round, 0.0, 0.0),
    "sign": (lambda x: torch.sign(x.nan_to_num(0.0)), 0.0, 0.0),
    "logistic": (lambda x: 1 / (1 + torch.exp2(x)), 2e-6, 2e-38),
    "tanh": (torch.tanh, 0.0, 3e-7),
    "tanh_relative": (torch.tanh, 5e-7, 2e-38),
    "tanh_approximate": (torch.tanh, 0.0, 3e-7),
    "log1p": (torch.log1p, 2e-6, 2e-38),
    "expm1": (torch.expm1, 5e-6, 2e-38),
    "sinh": (torch.sinh, 1e-5, 2e-38),
    "cosh": (torch.cosh, 1e-5, 0.0),
    "erfc": (torch.erfc, 1e-5, 2e-38),
    "atan": (torch.atan, 5e-7, 0.0),
    "lgamma": (torch.lgamma, 5e-7, 1e-12),
}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_functions_of_floats(name: str, device: torch.device) -> None:
    function, relative, absolute = OF_FLOATS[name]
    x = torch.cat([SINGLE, torch.linspace(-12, 12, 997), 10.0 ** torch.linspace(-40, 38, 499)])
    found = applied("arithmetic", f"{name}(a)", x.to(device))
    near(found, in_double(function, x), relative, absolute)


@pytest.mark.parametrize("name", ["tanh_relative", "log1p", "expm1", "sinh", "cosh", "atan"])
def test_functions_of_doubles(name: str, device: torch.device) -> None:
    function = OF_FLOATS[name][0]
    x = torch.cat([torch.linspace(-12, 12, 997), 10.0 ** torch.linspace(-30, 2, 499)]).double()
    found = applied("arithmetic", f"{name}(a)", x.to(device))
    near(found, function(x), 1e-12)


def normal(*values: Tensor, device: torch.device) -> Tensor:
    """Where none is a denormal number of float32: a chip may take such a one for 0."""
    fine = [
        (x == 0) | ~(x.abs() < TINY) for x in values if device.type == "cuda" and x.dtype == torch.float32
    ]
    return torch.stack([torch.ones_like(values[0], dtype=torch.bool), *fine]).all(0)


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "values", [SINGLE, pytest.param(DOUBLE, marks=pytest.mark.long)], ids=["float32", "float64"]
)
def test_rests_are_exact(values: Tensor, device: torch.device) -> None:
    a, b = pairs_of(values)
    with np.errstate(all="ignore"):
        rest = torch.from_numpy(np.fmod(a.numpy(), b.numpy()))
        signed = torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    near(applied("arithmetic", "fmod(a, b)", a.to(device), b.to(device)), rest, 0.0)
    near(applied("arithmetic", "remainder_float(a, b)", a.to(device), b.to(device)), signed, 0.0)
    whole = torch.floor_divide(a, b)
    found = applied("arithmetic", "floor_divide_float(a, b)", a.to(device), b.to(device))
    usual = normal(a, b, whole, device=device)
    near(found[usual], whole[usual], 0.0)


def test_fewer_steps_serve_small_quotients() -> None:
    a, b = torch.linspace(-1e4, 1e4, 999), torch.tensor(0.37)
    expected = torch.from_numpy(np.fmod(a.numpy(), b.numpy()))
    assert torch.equal(applied("arithmetic", "fmod(a, b, 2)", a, b), expected)


def test_a_product_is_rounded_by_itself(device: torch.device) -> None:
    """A sum after it must not be fused with it: 1 - x * (1/x) is 0 or an ulp, never what rounding took."""
    x = torch.linspace(1, 50, 997)
    a, b, c = x, 1 / x, torch.tensor(-1.0)
    found = applied("arithmetic", "rounded_product(a, b) + c", *(t.to(device) for t in (a, b, c)))
    assert torch.equal(found, a * b + c)
    a, b = pairs_of(SINGLE)
    found = applied("arithmetic", "rounded_product(a, b)", a.to(device), b.to(device))
    near(found, a * b, 0.0, 0.0 if device.type == "cpu" else TINY)
    zero = (a * b) == 0
    assert torch.equal(found[zero].signbit(), (a * b)[zero].signbit())


def test_powers(device: torch.device) -> None:
    a, b = pairs_of(SINGLE)
    expected = (a.double() ** b.double()).float()
    edge = expected.isfinite() & (expected.abs() > 0.999 * torch.finfo(torch.float32).max)
    found = applied("arithmetic", "power(a, b)", a.to(device), b.to(device))
    usual = ~edge & normal(a, b, expected, device=device)
    near(found[usual], expected[usual], 2e-5, 2e-38)


def test_powers_of_two() -> None:
    n = torch.arange(93, dtype=torch.int32)
    found = applied("arithmetic", "power_of_two(a)", n, dtypes=(torch.float64,))
    assert found.tolist() == [math.ldexp(1.0, 23 * (k // 3)) for k in range(93)]


def test_float32_kernels_have_the_better_tanh(device: torch.device) -> None:
    x = torch.cat([SINGLE, torch.linspace(-1, 1, 999)])
    found = applied("float32_arithmetic", "tanh(a)", x.to(device))
    near(found, in_double(torch.tanh, x), 5e-7, 2e-38)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "function", "relative", "absolute"),
    [
        ("tanh_approximate(a)", torch.tanh, 2.0**-11, 1e-7),
        ("exp(a)", torch.exp, 5e-6, TINY),
        ("log(a)", torch.log, 1e-6, 3e-7),
        ("log2(a)", torch.log2, 1e-6, 3e-7),
        ("divide(1.0, 1.0 + tl.abs(a))", lambda x: 1 / (1 + x.abs()), 3e-7, TINY),
        ("logistic(a)", lambda x: 1 / (1 + torch.exp2(x)), 2e-6, 1e-18),
    ],
)
def test_functions_of_chips(
    text: str, function: Callable[[Tensor], Tensor], relative: float, absolute: float
) -> None:
    """Of numbers: the logistic treats two neighbors together, so that one that is none spoils the other."""
    x = torch.cat([SINGLE[SINGLE.isfinite()], torch.linspace(-12, 12, 997)])
    near(applied("chip_arithmetic", text, x.cuda()), in_double(function, x), relative, absolute)
