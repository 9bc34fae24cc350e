"""The table of operations, row by row: dtypes, Triton text, derivatives and intervals against torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mod_kernel import run
from table_walk import DTYPES, TOLERANCE

from flexmod import create_mask, errors
from flexmod.ir import formulas, ops
from flexmod.ir.bounds import UNKNOWN
from flexmod.ir.derivative import differentiate
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Capture, Graph, GraphBuilder
from flexmod.ir.ops import OPS, Op
from flexmod.ir.proxy import Proxy, Tracer
from flexmod.ir.trace import trace

KINDS = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
CPU = torch.device("cpu")


rows = pytest.mark.parametrize("row", [row for row in OPS.values() if row.torch_names], ids=lambda r: r.name)


# dtypes


def operand(dtype: Any) -> Any:
    return dtype(1) if isinstance(dtype, type) else torch.tensor(1, dtype=dtype)


# of rows whose own function divides by no 0
DIVISIONS = {
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}  # fmt: skip


def torch_dtype(row: Op, dtypes: tuple[Any, ...]) -> torch.dtype | None:
    """The dtype that torch gives, None where it refuses."""
    first = [torch.tensor(True)] if row.name == "where" else []
    operands = [operand(d) for d in dtypes]
    try:
        return DIVISIONS.get(row.name, row.torch)(*first, *operands).dtype
    except TypeError:  # this function takes tensors alone: what would it be if it took numbers too?
        pass
    except (RuntimeError, NotImplementedError):
        return None
    try:
        DIVISIONS.get(row.name, row.torch)(*first, *map(torch.as_tensor, operands))
    except (RuntimeError, NotImplementedError):
        return None
    if row.dtype is ops.OPS["eq"].dtype:
        return torch.bool
    common = torch.result_type(*operands) if len(operands) > 1 else operands[0].dtype
    return row.torch(*first, *[torch.ones((), dtype=common)] * len(operands)).dtype


def traced_dtype(row: Op, dtypes: tuple[Any, ...]) -> torch.dtype | None:
    tracer = Tracer(None, CPU)
    operands = [d(1) if isinstance(d, type) else Proxy(tracer, tracer.builder.input(f"x{i}", d))
                for i, d in enumerate(dtypes)]  # fmt: skip
    if row.name == "where":
        operands.insert(0, Proxy(tracer, tracer.builder.input("condition", torch.bool)))
    try:
        return tracer.apply(row.torch_names[0], operands).dtype
    except errors.OperationArgumentError:
        return None


@rows
def test_result_dtype_is_torchs(row: Op) -> None:
    """For all pairs of dtypes and Python numbers; what torch refuses is refused."""
    wrong = []
    for dtypes in itertools.product((*DTYPES, bool, int, float), repeat=min(row.arity, 2)):
        if all(isinstance(d, type) for d in dtypes):
            continue
        if row.name == "pow" and dtypes == (torch.bool, bool):
            continue  # torch knows b ** True alone of the powers of truth values
        expected, found = torch_dtype(row, dtypes), traced_dtype(row, dtypes)
        if expected != found:
            wrong.append((dtypes, expected, found))
    assert not wrong


@pytest.mark.parametrize("condition", [torch.uint8, torch.int32, torch.float32])
def test_where_takes_a_bool_condition(condition: torch.dtype) -> None:
    tracer = Tracer(None, CPU)
    with pytest.raises(errors.OperationArgumentError):
        tracer.apply("where", [Proxy(tracer, tracer.builder.input("condition", condition)), 1, 2])


def test_every_row_has_a_test_of_its_kinds() -> None:
    for row in OPS.values():
        assert isinstance(row.triton, str) or set(row.triton) <= set(KINDS)


# Triton text

FLOATS = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 7.0, 0.1, -0.1, 10.0, -10.0, 49.0, 88.5,
     -100.0, 1e-3, -1e-3, 1e-6, 1e-30, -1e-30, 1e-40, 3e4, -3e4, 1e30, -1e30, math.inf, -math.inf, math.nan]
)  # fmt: skip
INTS = torch.tensor([0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 31, 32, 33, 64, 100, -100, 46340, 2**31 - 1, -(2**31)])


def samples(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.cat([FLOATS, torch.randn(16, generator=generator) * 3]).to(dtype)
    limits = torch.iinfo(dtype)
    known = torch.tensor([n for n in INTS.tolist() if limits.min <= n <= limits.max])
    spread = torch.randint(max(limits.min, -1000), min(limits.max, 1000), (13,), generator=generator)
    return torch.cat([known, spread]).to(dtype)


BINARY = [
    pytest.param(row, kind, id=f"{name}-{kind}")
    for name, row in OPS.items()
    for kind, dtype in KINDS.items()
    if row.arity == 2 and row.refused((dtype, dtype), row.dtype(dtype, dtype)) is None
]
NUMBERS_OF_A_KIND: dict[str, bool | int | float] = {"bool": True, "int": 3, "float": 2.5}


@pytest.mark.parametrize("promoted", [False, True], ids=["a number", "an argument"])
@pytest.mark.parametrize("number_first", [False, True], ids=["second", "first"])
@pytest.mark.parametrize(("row", "kind"), BINARY)
def test_python_numbers_as_operands(
    row: Op, kind: str, number_first: bool, promoted: bool, device: torch.device
) -> None:
    """x op 3 and 3 op x, the number in the text or a kernel's argument."""
    dtype, number = KINDS[kind], NUMBERS_OF_A_KIND[kind]
    x = samples(dtype)
    x = x[x != 0] if kind == "int" else x
    x = x[x.isfinite() & (x.abs() < 50) & (x.abs() > 0.01)] if kind == "float" else x
    builder = GraphBuilder()
    load = builder.node("load", (builder.input("q_idx", torch.int32),), dtype, 0)
    other = builder.node("param", (), type(number), 0) if promoted else builder.const(number)
    arguments = (other, load) if number_first else (load, other)
    result = builder.node(row.name, arguments, row.dtype(*(a.dtype for a in arguments)))
    graph = Graph("score", (result,), (Capture("x", dtype, 1),))
    found = run(graph, (x.to(device),), (1, 1, len(x), 1), numbers=(number,), device=device)[0, 0, :, 0].cpu()
    values = (ops.number(number, dtype), x) if number_first else (x, ops.number(number, dtype))
    expected = row.torch(*values)
    rtol, atol = TOLERANCE.get(row.name, (0.0, 0.0)) if found.is_floating_point() else (0.0, 0.0)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def positions(extents: tuple[int, ...]) -> list[torch.Tensor]:
    """b, h, q_idx and kv_idx, each along its own axis of four."""
    return [
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(extents)
    ]


CASTS = [
    (source, target)
    for source in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32)
    for target in DTYPES
    if source != target
]


@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda d: str(d).removeprefix("torch."))
def test_casts(source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    """Every value that the target can say; what a number outside a float's range becomes is the chip's."""
    x = samples(torch.float32 if source.is_floating_point else source).to(source)
    if source.is_floating_point and not target.is_floating_point and target != torch.bool:
        x = x[x.isfinite() & (x.abs() < 100)]
    builder = GraphBuilder()
    load = builder.node("load", (builder.input("q_idx", torch.int32),), source, 0)
    graph = Graph("score", (builder.node(ops.CAST, (load,), target),), (Capture("x", source, 1),))
    found = run(graph, (x.to(device),), (1, 1, len(x), 1), device=device)[0, 0, :, 0].cpu()
    expected = x.to(target)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0, equal_nan=True)


def test_positions_divide_exactly(device: torch.device) -> None:
    """floor(q_idx / 49), and the like, never miss the integer below by a rounding."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        whole = torch.floor(q_idx * 49 / 49) + torch.floor(q_idx / (kv_idx + 1))
        return whole + torch.sqrt(q_idx * q_idx) + torch.div(q_idx * 0.5, 0.5, rounding_mode="trunc")

    traced = trace(score_mod, "score")
    extents = (1, 1, 512, 64)
    found = run(traced.graph, (), extents, device=device).cpu()
    q, k = torch.arange(512)[:, None], torch.arange(64)
    torch.testing.assert_close(found[0, 0], (3 * q + q // (k + 1)).float(), rtol=0, atol=0)


# derivatives


POSITIVE_ONLY = {"log", "log2", "sqrt", "rsqrt", "pow"}


def takes_floats(row: Op) -> bool:
    return isinstance(row.triton, str) or "float" in row.triton


@pytest.mark.parametrize(
    "row", [r for r in OPS.values() if r.derivative and takes_floats(r)], ids=lambda r: r.name
)
def test_derivative_is_autograds(row: Op) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw() -> torch.Tensor:
        x = torch.rand(40, generator=generator, dtype=torch.float64) * 3 + 0.15
        return x if row.name in POSITIVE_ONLY else x * torch.where(torch.arange(40) % 2 == 0, 1, -0.3)

    arguments = [draw().requires_grad_() for _ in range(min(row.arity, 2))]
    if row.name == "where":
        arguments.insert(0, draw() > 0)
    y = row.torch(*arguments)
    grad = torch.rand(40, generator=generator, dtype=torch.float64)
    wanted = [a for a in arguments if a.requires_grad]
    expected: tuple[Any, ...] = (None,) * len(wanted)
    if y.requires_grad and row.name != "floor_divide":  # which torch does not differentiate
        expected = torch.autograd.grad(y, wanted, grad, allow_unused=True)
    with torch.no_grad():
        assert row.derivative is not None
        found = [
            g for g, a in zip(row.derivative(grad, y, *arguments), arguments, strict=True) if a.requires_grad
        ]
    for mine, torchs in zip(found, expected, strict=True):
        zero = torch.zeros_like(grad)
        torch.testing.assert_close(zero if mine is None else mine + zero, zero if torchs is None else torchs)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_a_tie_halves_the_gradient(name: str) -> None:
    a, b = (torch.zeros(3, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(OPS[name].torch(a, b).sum(), (a, b))
    rule = OPS[name].derivative
    assert rule is not None
    torch.testing.assert_close(rule(torch.ones(3), None, a.detach(), b.detach()), expected)


def derivative_of(function: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor:
    """What `differentiate` makes of a score_mod, in float64."""
    graph = differentiate(trace(lambda score, b, h, q_idx, kv_idx: function(score), "score").graph)
    b, h, q_idx, kv_idx = positions((1, 1, 1, 1))
    places = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
    return evaluate(graph, (), **places, score=x, grad=torch.ones_like(x), real=torch.float64)[0].expand(
        x.shape
    )


# what torch has a name for and other rows can say

NUMBERS = torch.cat([FLOATS[FLOATS.abs() < 1e4], torch.linspace(-4, 4, 33)])
COMPOSED: dict[str, Callable[[Any], Any]] = {
    "rsub": lambda x: torch.rsub(x, 2.0, alpha=3),
    "clamp": lambda x: torch.clamp(x, -1.0, 1.0),
    "clamp, one side": lambda x: x.clamp(min=0.5),
    "clamp, keyword input": lambda x: torch.clamp(input=x, max=0.5),
    "clip": lambda x: torch.clip(x, max=0.5),
    "clamp_min": lambda x: torch.clamp_min(x, 0.5),
    "clamp_max": lambda x: x.clamp_max(0.5),
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "softplus": F.softplus,
    "softplus, steeper": lambda x: F.softplus(x, 3.0, 4.0),
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
    "elu": F.elu,
    "elu, scaled": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 1.3),
    "selu": F.selu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.7, 1.2),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "threshold": lambda x: F.threshold(x, 0.4, 9.0),
    "nan_to_num": lambda x: torch.nan_to_num(
        torch.where(x > 2, math.inf, torch.where(x < -2, math.nan, x)), 3.0
    ),
    "logaddexp": lambda x: torch.logaddexp(x, 2 - x),
    "logaddexp, of infinities": lambda x: torch.logaddexp(
        x.where(x > 1, -math.inf), x.where(x > 2, -math.inf)
    ),
    "logaddexp2": lambda x: torch.logaddexp2(x, 2 - x),
    "xlogy": lambda x: torch.xlogy(x, x),
    "special_xlogy": lambda x: torch.special.xlogy(x, x * x),
    "special_xlog1py": lambda x: torch.special.xlog1py(x, x * x),
    "logit": torch.logit,
    "special_logit": lambda x: torch.special.logit(x, eps=0.125),
    "digamma": torch.digamma,
    "asin": torch.asin,
    "acos": torch.acos,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "frac": torch.frac,
    "signbit": lambda x: torch.where(torch.signbit(x), x, 2 * x),
    "copysign": lambda x: torch.copysign(x, -x),
    "copysign, of a number": lambda x: torch.copysign(x, -0.0),
    "fmin": lambda x: torch.fmin(torch.where(x > 2, math.nan, x), x * x),
    "fmax": lambda x: torch.fmax(torch.where(x > 2, math.nan, x), x * x),
    "log10": torch.log10,
    "isfinite": lambda x: torch.where(torch.isfinite(x), x, 0.0),
    "isposinf": lambda x: torch.where(torch.isposinf(1 / x), x, 0.0),
    "isneginf": lambda x: torch.where(torch.isneginf(1 / x), x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 5.0),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.25),
    "lerp, from the other end": lambda x: torch.lerp(x * 1e9, x, 1.0),
    "lerp, by a scalar": lambda x: torch.lerp(x, x * 2, x * 0.25),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 5.3, value=0.5),
    "positive": torch.positive,
    "clone": torch.clone,
    "contiguous": lambda x: x.contiguous(),
}


def test_functions_of_two_names() -> None:
    names = {torch.arcsin: torch.asin, torch.arccos: torch.acos, torch.arcsinh: torch.asinh}
    names |= {torch.arccosh: torch.acosh, torch.arctanh: torch.atanh}
    names |= dict.fromkeys((torch.special.digamma, torch.special.psi), torch.digamma)
    assert {function.__name__ for function in names} == set(formulas.OTHER_NAMES)
    for pair in names.items():
        one, other = (trace(lambda s, b, h, q, k, f=function: f(s), "score").graph for function in pair)
        assert one == other


def test_all_composed_functions_are_tested() -> None:
    assert {name.split(",")[0] for name in COMPOSED} == set(formulas.COMPOSED)


@pytest.mark.parametrize("function", COMPOSED.values(), ids=COMPOSED)
def test_composed_functions_and_their_derivatives(function: Callable[[Any], Any]) -> None:
    graph = trace(lambda score, b, h, q_idx, kv_idx: function(score), "score").graph
    b, h, q_idx, kv_idx = positions((1, 1, 1, 1))
    (found,) = evaluate(graph, (), b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, score=NUMBERS)
    torch.testing.assert_close(found, function(NUMBERS), rtol=1e-5, atol=1e-6, equal_nan=True)
    x = NUMBERS.double().requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    smooth = expected.abs() < 1e15  # torch's derivative of digamma is large, and none, at its poles
    torch.testing.assert_close(derivative_of(function, x.detach())[smooth], expected[smooth])


EXTREMES = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e10, -1e10, 1e30, -1e30])


@pytest.mark.parametrize("function", COMPOSED.values(), ids=COMPOSED)
def test_composed_functions_of_extreme_numbers(function: Callable[[Any], Any]) -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(score) * 1.0

    b, h, q_idx, kv_idx = positions((1, 1, 1, 1))
    graph = trace(mod, "score").graph
    (found,) = evaluate(graph, (), b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, score=EXTREMES)
    # torch's gelu of a long tensor makes nan of an infinity
    expected = torch.stack([function(x) * 1.0 for x in EXTREMES])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["asinh", "acosh"])
def test_inverse_functions_of_large_numbers(name: str, dtype: torch.dtype) -> None:
    """The square of a number may be beyond its dtype."""
    function, numbers = named_in_torch(name), torch.logspace(0, 4.5, 64, dtype=torch.float64)
    numbers = (numbers if dtype == torch.float16 else numbers**8).to(dtype)
    assert_traced(lambda s, b, h, q_idx, kv_idx: function(numbers[kv_idx]), function(numbers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_hardswish_of_a_half_type(dtype: torch.dtype) -> None:
    """6 * 60000 is beyond float16; 2.984375 + 3 is 6 in bfloat16."""
    numbers = torch.tensor([-60000.0, -2.984375, 2.984375, 12000.0, 60000.0], dtype=dtype)
    numbers = numbers.repeat(13)[:64]
    assert_traced(lambda s, b, h, q_idx, kv_idx: F.hardswish(numbers[kv_idx]), F.hardswish(numbers))
    numbers = numbers[:5]
    slope = derivative_of(lambda x: F.hardswish(x.to(dtype)), numbers.double())
    expected = torch.tensor([0.0, -0.4947916, 1.4947916, 1.0, 1.0], dtype=slope.dtype)
    torch.testing.assert_close(slope, expected, rtol=0, atol=4 * min(1e-2, torch.finfo(dtype).eps) + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["asin", "acos", "asinh", "acosh", "hardswish"])
def test_composed_functions_of_integers(name: str, dtype: torch.dtype) -> None:
    """As of float32. In uint8, -3 would be 253."""
    function = F.hardswish if name == "hardswish" else named_in_torch(name)
    table = (torch.arange(64) % 4).to(dtype)
    assert_traced(lambda s, b, h, q_idx, kv_idx: function(table[kv_idx]), function(table.float()))


ACTIVATIONS = [
    "silu", "gelu", "softplus", "logsigmoid", "mish", "elu", "celu", "selu", "hardsigmoid", "hardswish",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_half_types_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """1 + erf(-2.5) keeps no digit in a half type."""
    function, table = getattr(F, name), torch.linspace(-3, 3, 64).to(dtype)
    b, h, q_idx, kv_idx = positions((1, 1, 1, 64))
    traced = trace(lambda s, b, h, q_idx, kv_idx: function(table[kv_idx]), "score")
    (found,) = evaluate(traced.graph, traced.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
    exact = function(table.double()).float()
    assert ((found.flatten() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_acosh_near_its_end(dtype: torch.dtype) -> None:
    numbers = 1 + torch.arange(64, dtype=torch.float64) * 2.0**-23
    expected = torch.acosh(numbers).to(dtype)
    table = numbers.to(dtype)
    graph = trace(lambda s, b, h, q_idx, kv_idx: torch.acosh(table[kv_idx]), "score").graph
    b, h, q_idx, kv_idx = positions((1, 1, 1, 64))
    (found,) = evaluate(graph, (table,), b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
    torch.testing.assert_close(found.flatten(), expected.float(), rtol=1e-6, atol=0)


ENDS = {
    "asin": (-1.0, 1.0), "acos": (-1.0, 1.0),
    "asinh": (-math.inf, 1e30, math.inf), "acosh": (1.0, 1e30, math.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_derivatives_at_the_ends(name: str) -> None:
    x = torch.tensor(ENDS[name], dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(named_in_torch(name)(x).sum(), x)
    torch.testing.assert_close(derivative_of(named_in_torch(name), x.detach()), expected)


def test_digamma_is_exact_in_float64() -> None:
    """Beside values of digamma(1/2 + n), from digamma(1/2) = -gamma - 2 log 2 and its recurrence."""
    graph = trace(lambda score, b, h, q_idx, kv_idx: torch.digamma(score), "score").graph
    places = dict(zip(("b", "h", "q_idx", "kv_idx"), positions((1, 1, 1, 1)), strict=True))
    exact = [-0.5772156649015329 - 2 * math.log(2)]
    for n in range(20):
        exact.append(exact[-1] + 1 / (0.5 + n))
    score = torch.arange(21, dtype=torch.float64) + 0.5
    (found,) = evaluate(graph, (), **places, score=score, real=torch.float64)
    torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=2e-15, atol=2e-15)


MIXED = {
    torch.float32: torch.linspace(-1, 2, 64),
    torch.bfloat16: torch.linspace(2, 0.1, 64).bfloat16(),
    torch.float16: torch.linspace(0.3, 3, 64).half(),
    torch.int32: torch.arange(64, dtype=torch.int32) % 9 + 1,
}


def of_mixed_dtypes(function: Callable[..., Any]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Operands of different dtypes that torch takes, and torch's result."""
    for dtypes in (*itertools.product(MIXED, repeat=2), *itertools.product(MIXED, repeat=3)):
        operands = [MIXED[dtype] for dtype in dtypes]
        with suppress(Exception):
            expected = function(*operands)
            if len({*dtypes}) > 1 and isinstance(expected, torch.Tensor):
                yield operands, expected


def named_in_torch(name: str) -> Any:
    return getattr(torch, name, None) or getattr(torch.special, name.removeprefix("special_"), None)


@pytest.mark.parametrize("name", sorted(name for name in {*formulas.COMPOSED, *OPS} if named_in_torch(name)))
def test_operands_of_different_dtypes(name: str) -> None:
    """They are promoted first, as in torch: no part of a formula is rounded to the dtype of its operands."""
    function = named_in_torch(name)
    for operands, expected in of_mixed_dtypes(function):
        dtypes: list[torch.dtype] = []

        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            result = function(*(x[kv_idx] for x in operands))  # noqa: B023  it runs in this turn
            dtypes.append(result.dtype)  # noqa: B023
            return torch.where(result, 1.0, 0.0) if result.dtype == torch.bool else result * 1.0

        assert_traced(mod, expected, dtypes)


@pytest.mark.parametrize("name", ["xlogy", "special_xlog1py", "logaddexp2", "copysign", "addcdiv", "addcmul"])
@pytest.mark.parametrize("dtype", MIXED, ids=str)
def test_a_captured_number_is_promoted_and_read_when_a_call_runs(name: str, dtype: torch.dtype) -> None:
    function, number = named_in_torch(name), MIXED[dtype][7].clone()
    more = [MIXED[torch.float32]] if name in ("addcdiv", "addcmul") else []

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(*(x[kv_idx] for x in more), MIXED[torch.float32][kv_idx], number)

    traced = trace(mod, "score")
    assert not traced.eager and any(tensor is number for tensor in traced.tensors)
    assert_traced(mod, function(*more, MIXED[torch.float32], number.expand(64)))


def assert_traced(mod: Any, expected: torch.Tensor, dtypes: Sequence[torch.dtype] = ()) -> None:
    """`mod` gives 64 values by kv_idx, and its function results of these dtypes."""
    traced = trace(mod, "score")
    assert all(dtype == expected.dtype for dtype in dtypes), (dtypes, expected.dtype)
    b, h, q_idx, kv_idx = positions((1, 1, 1, 64))
    (found,) = evaluate(traced.graph, traced.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
    rounding = 4 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    values = found.flatten(), expected.float()
    torch.testing.assert_close(*values, rtol=rounding, atol=1e-6 + rounding, equal_nan=True)


LIMITS = {
    "a number": (math.nan, 2.0),
    "a captured number": (torch.tensor(math.nan), torch.tensor(2.0)),
    "one of a row": (torch.tensor([1.0, math.nan, 3.0, -2.0]), torch.tensor([math.nan, 4.0, 2.0, 1.0])),
}


@pytest.mark.parametrize("low, high", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("sides", ["min", "max", "both"])
def test_a_limit_that_is_nan(low: Any, high: Any, sides: str) -> None:
    """The result is nan, as torch has it: no comparison with it is true."""

    def clamped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        least, most = (limit[q_idx] if getattr(limit, "ndim", 0) else limit for limit in (low, high))
        limits = {"min": {"min": least}, "max": {"max": least}, "both": {"min": most, "max": least}}
        return torch.clamp(kv_idx * 1.0, **limits[sides]) >= q_idx

    rows, columns = torch.arange(4)[:, None], torch.arange(6)
    expected = clamped(None, None, rows, columns).expand(4, 6)
    assert torch.equal(create_mask(clamped, None, None, 4, 6, device="cpu")[0, 0], expected)


# intervals


def gives_floats(row: Op) -> bool:
    return row.name == "hypot" or row.dtype(*(torch.int64,) * row.arity).is_floating_point


def limits_of(row: Op) -> list[tuple[int, int]]:
    """Between which whole numbers arguments are drawn."""
    limits = {"where": (-40, 40), "pow": (-6, 6)}.get(row.name, (0, 1) if row.at == "bool" else (-40, 40))
    return [(0, 1) if row.name == "where" and place == 0 else limits for place in range(row.arity)]


@pytest.mark.parametrize("row", [r for r in OPS.values() if r.interval], ids=lambda r: r.name)
def test_interval_holds_every_value(row: Op) -> None:
    assert row.interval is not None
    random, looked_at = Random(row.name), 0
    number = torch.float64 if gives_floats(row) else torch.int64
    dtypes = [torch.bool if row.name == "where" and place == 0 else number for place in range(row.arity)]
    at = row.argument_dtypes(dtypes, number)
    for _ in range(200):
        drawn = [sorted((random.randint(*limits), random.randint(*limits))) for limits in limits_of(row)]
        values = [random.randint(*ends) for ends in drawn]
        if row.name in ("div", "floor_divide", "trunc_divide", "remainder", "fmod") and values[1] == 0:
            continue
        result = row.torch(*(torch.tensor(v, dtype=d) for v, d in zip(values, at, strict=True))).item()
        if math.isnan(result):
            continue
        looked_at += 1
        low, high = row.interval(*map(tuple, drawn))
        assert low <= result <= high, (drawn, values)
    assert looked_at > 20


@pytest.mark.parametrize("row", [r for r in OPS.values() if r.interval], ids=lambda r: r.name)
def test_interval_of_the_unknown(row: Op) -> None:
    """Every rule takes an argument of which nothing is known."""
    unknown, some = ((False, True), (False, False)) if row.at == "bool" else (UNKNOWN, (3, 5))
    for known in (
        (unknown,) * row.arity,
        (some, *(unknown,) * (row.arity - 1)),
        (*(unknown,) * (row.arity - 1), some),
    ):
        assert row.interval is not None
        low, high = row.interval(*known)
        assert low <= high


# folding


def test_folding_is_torchs_arithmetic() -> None:
    assert (
        ops.fold("add", (torch.float16, float), torch.float16, (0.1, 0.2))
        == (torch.tensor(0.1).half() + 0.2).item()
    )
    assert ops.fold("floor_divide", (torch.int64, int), torch.int64, (-7, 2)) == -4
    assert ops.fold("logical_and", (torch.int64, torch.bool), torch.bool, (3, True)) is True


def test_a_number_wraps_where_the_dtype_does_not_hold_it() -> None:
    assert (torch.tensor(1, dtype=torch.int8) + 300).item() == 1 + ops.number(300, torch.int8).item()
    assert ops.number(0.1, torch.float64).item() == 0.1
