"""The table of operations. Adding an operation is adding a row.

A row describes an operation completely:

        name            the Node's `op`
        torch_names     the `__name__`s of the torch functions and Tensor methods that mean it
        at              the dtype to which its arguments are cast first, see `argument_dtypes`
        dtype           the dtype of its result by torch's promotion for 0-d tensors
        triton          its Triton text: one string, or one for each kind of argument ("bool", "int",
                        "float"). A missing kind raises an error, as in torch.
        torch           its torch function, applied to arguments of the dtype `at`
        derivative      (grad, result, *arguments) -> a gradient for each argument, or None.
                        Written in plain torch, so that it runs on graph proxies and on tensors.
                        Absent: the operation has no derivative, and differentiating it raises an error.
        interval        (*(lowest, highest)) -> (lowest, highest) of the result, see `bounds.py`.
                        Absent: the result has no known bounds.
        exact           the Triton text for a float32 value that does not depend on the score. It rounds
                        correctly, so floor(q_idx / 49) equals torch's. Scores use the cheaper `triton`.
        plain           by kind of argument, cheaper texts, the cheapest first. Each has a test of the
                        arguments' bounds and the number of bits that says whether the text is equivalent.
        unmixed         its arguments before the cast must be of the kinds in `triton` too
        python          its text for torch's tensors and numbers. Absent: the first of `torch_names`.
        cost            "low": a few instructions; "high": more; "division": more, unless an integer is
                        divided by a power of two
        finite          finite arguments give finite floats, overflow aside

Torch functions that need no row are in `formulas.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import torch

from flexmod.ir import bounds, formulas
from flexmod.ir.graph import DType, Node

HALF = (torch.float16, torch.bfloat16)
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # the dtypes of Python's numbers


_default: ContextVar[torch.dtype | None] = ContextVar("_default", default=None)


def default_dtype() -> torch.dtype:
    """torch's default floating-point dtype, or the one that `with_default` gives."""
    return _default.get() or torch.get_default_dtype()


@contextmanager
def with_default(dtype: torch.dtype) -> Iterator[None]:
    """Traces mods with this default dtype. torch's own setting is for all threads, and does not change."""
    before = _default.set(dtype)
    try:
        yield
    finally:
        _default.reset(before)


def strong(dtype: DType) -> torch.dtype:
    """The torch dtype of a value; a Python number gets the default."""
    if dtype is float:
        return default_dtype()
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.bool if dtype is bool else torch.int64


def is_power_of_two(value: Any) -> bool:
    """Is it a number, of either sign, whose products are exact?"""
    return abs(math.frexp(float(value))[0]) == 0.5


def is_ordinary(value: Any) -> bool:
    """Are the number and its inverse normal float32 numbers, which have all digits?"""
    return 2.0**-126 <= abs(float(value)) <= 2.0**126


def category(dtype: DType) -> int:
    if dtype in (bool, torch.bool):
        return 0
    return 2 if dtype is float or (isinstance(dtype, torch.dtype) and dtype.is_floating_point) else 1


def promote(*dtypes: DType) -> torch.dtype:
    """The dtype that torch.result_type gives for 0-d tensors and Python numbers."""
    tensors: list[torch.dtype] = [d for d in dtypes if isinstance(d, torch.dtype)]
    result: torch.dtype = tensors[0] if tensors else strong(dtypes[0])
    for d in tensors[1:]:
        result = _promoted(result, d)
    for weak in dtypes:
        if not isinstance(weak, torch.dtype) and category(weak) > category(result):
            result = strong(weak)
    return result


# during a trace, torch.result_type would go through the tracer
_promoted = cache(torch.promote_types)


def promote_float(*dtypes: DType) -> torch.dtype:
    """Like `promote`, but integers become the default floating-point dtype."""
    result = promote(*dtypes)
    return result if result.is_floating_point else default_dtype()


def _bool(*dtypes: DType) -> torch.dtype:
    return torch.bool


def _branches(condition: DType, *branches: DType) -> torch.dtype:
    return promote(*branches)


def _first(first: DType, *rest: DType) -> torch.dtype:
    return strong(first)


Derivative = Callable[..., tuple[Any, ...]]
Cheaper = tuple[str, Callable[[bounds.Bounds, bounds.Bounds, int], bool]]
Strong = torch.dtype  # `torch` is a field of Op


@dataclass(frozen=True)
class Op:
    name: str
    torch_names: tuple[str, ...]
    at: str
    dtype: Callable[..., torch.dtype]
    triton: str | dict[str, str]
    torch: Callable[..., Any]
    derivative: Derivative | None = None
    interval: Callable[..., bounds.Bounds] | None = None
    exact: str | None = None
    plain: Mapping[str, Sequence[Cheaper]] = field(default_factory=dict)
    unmixed: bool = False
    python: str | None = None
    cost: Literal["low", "high", "division"] = "low"
    finite: bool = False

    @cached_property
    def arity(self) -> int:
        return next(count for count in (3, 2, 1) if f"{{{count - 1}}}" in str(self.triton))

    def argument_dtypes(self, dtypes: Sequence[DType], result: DType) -> tuple[Strong, ...]:
        """The dtype to which each argument is cast.

        "result": the result's. "common": the arguments' promoted dtype. "bool": bool. "where": bool, then the
        result's. "own": no cast.
        """
        out = strong(result)
        if self.at == "result":
            return (out,) * len(dtypes)
        if self.at == "common":
            return (promote(*dtypes),) * len(dtypes)
        if self.at == "bool":
            return (torch.bool,) * len(dtypes)
        if self.at == "where":
            return (torch.bool, out, out)
        return tuple(strong(d) for d in dtypes)

    def arguments(self, node: Node) -> list[tuple[Node, Strong]]:
        """A node's arguments, each with the dtype to which it is cast or, as a number, rounded."""
        at = self.argument_dtypes([a.dtype for a in node.args], node.dtype)
        pairs = zip(node.args, at, strict=True)
        return [(a, self.number_dtype(d) if a.op in ("const", "param") else d) for a, d in pairs]

    def number_dtype(self, at: Strong) -> Strong:
        """The dtype to which a Python number is rounded: torch keeps it in float32 in half arithmetic."""
        return torch.float32 if at in HALF and self.name in ("add", "sub", "mul", "div") else at

    def refused(self, dtypes: Sequence[DType], result: DType) -> DType | None:
        """The first argument dtype that the operation does not take, as in torch; None if it takes all."""
        at = self.argument_dtypes(dtypes, result)
        if self.at == "where":
            return None if strong(dtypes[0]) == torch.bool else dtypes[0]
        if isinstance(self.triton, str):
            return None
        judged = (*dtypes, *at) if self.unmixed else at
        return next((d for d in judged if kind(strong(d)) not in self.triton), None)

    @property
    def jumps(self) -> bool:
        """May the last digit of an argument decide the result: a comparison, a rounding, a remainder?"""
        return self.derivative is _zero or self.name in ("remainder", "fmod")

    def text(self, dtype: Strong) -> str:
        """The Triton text for arguments of this dtype."""
        if isinstance(self.triton, str):
            return self.triton
        return self.triton[kind(dtype)]


def kind(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def _divided(operator: str, function: str, of_floats: str) -> dict[str, list[Cheaper]]:
    """Cheaper texts for a division that rounds down."""
    return {
        "int": [(operator, bounds.are_positive), (function, bounds.divides_safely)],
        "float": [(of_floats, bounds.few_turns)],
    }


def _zero(grad: Any, result: Any, *args: Any) -> tuple[Any, ...]:
    """Zero gradients, for a piecewise constant function."""
    return (None,) * len(args)


def _pick(first: Any, second: Any, grad: Any) -> tuple[Any, Any]:
    """Gradients of a minimum or maximum: `first` where the first argument won, half each where they tie."""
    tie = ~(first | second)
    half = torch.where(tie, grad * 0.5, 0.0)
    return torch.where(first, grad, half), torch.where(second, grad, half)


def _pow_derivative(g: Any, y: Any, x: Any, n: Any) -> tuple[Any, Any]:
    by_base = torch.where(n == 0.0, 0.0, g * n * torch.pow(x, n + -1.0))  # `-` takes no bool
    wide = torch.promote_types(y.dtype, torch.float32)  # the logarithm in a half type is too coarse
    by_exponent = torch.where((x == 0.0) & (n >= 0.0), 0.0, g * y * torch.log(x.to(wide)))
    return by_base, by_exponent


def _atan2_derivative(g: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    wide = torch.promote_types(y.dtype, torch.float32)  # the square of an int8, or of a float16, is too large
    a, b = a.to(wide), b.to(wide)
    square = a * a + b * b
    inverse = 1.0 / torch.where(square == 0, 1.0, square)
    return g * b * inverse, -g * a * inverse


def _unsigned_lt(a: Any, b: Any) -> Any:
    return (a < b) ^ (a < 0) ^ (b < 0)


def _bits(text: str) -> dict[str, str]:
    """A text for integers only."""
    return {"bool": text, "int": text}


_ROWS = [
    # arithmetic
    Op("add", ("add",), "result", promote,
       {"bool": "{0} | {1}", "int": "{0} + {1}", "float": "{0} + {1}"},
       torch.add, lambda g, y, a, b: (g, g), bounds.add, python="{0} + {1}", finite=True),
    Op("sub", ("sub", "subtract"), "result", promote, {"int": "{0} - {1}", "float": "{0} - {1}"},
       torch.sub, lambda g, y, a, b: (g, -g), bounds.sub, unmixed=True, python="{0} - {1}", finite=True),
    Op("mul", ("mul", "multiply"), "result", promote,
       {"bool": "{0} & {1}", "int": "{0} * {1}", "float": "{0} * {1}"},
       torch.mul, lambda g, y, a, b: (g * b, g * a), bounds.mul, python="{0} * {1}", finite=True),
    Op("div", ("div", "divide", "true_divide", "truediv"), "result", promote_float, "divide({0}, {1})",
       torch.div, lambda g, y, a, b: (g / b, -g * y / b), bounds.div, exact="tl.div_rn({0}, {1})",
       python="{0} / {1}", cost="high"),
    Op("floor_divide", ("floor_divide", "floordiv"), "result", promote,
       {"int": "safe_floor_divide({0}, {1})", "float": "floor_divide_float({0}, {1})"},
       formulas.floor_divide, _zero, bounds.floor_divide, python="{0} // {1}", cost="division",
       plain=_divided("{0} // {1}", "floor_divide({0}, {1})", "floor_divide_float({0}, {1}, 2)")),
    Op("trunc_divide", ("trunc_divide",), "result", promote,
       {"int": "safe_trunc_divide({0}, {1})", "float": "trunc({0} / {1})"},
       formulas.trunc_divide, _zero, bounds.trunc_divide,
       exact="trunc(tl.div_rn({0}, {1}))", python='torch.div({0}, {1}, rounding_mode="trunc")',
       cost="division", plain={"int": [("{0} // {1}", bounds.divides_safely)]}),
    Op("remainder", ("remainder", "mod"), "result", promote,
       {"int": "safe_remainder({0}, {1})", "float": "remainder_float({0}, {1})"},
       formulas.remainder, lambda g, y, a, b: (g, -g * torch.floor_divide(a, b)), bounds.remainder,
       python="{0} % {1}", cost="division",
       plain=_divided("{0} % {1}", "remainder({0}, {1})", "remainder_float({0}, {1}, 2)")),
    Op("fmod", ("fmod",), "result", promote, {"int": "safe_fmod({0}, {1})", "float": "fmod({0}, {1})"},
       formulas.fmod, lambda g, y, a, b: (g, -g * torch.trunc(a / b)), bounds.fmod, cost="division",
       plain={"int": [("{0} % {1}", bounds.divides_safely)],
              "float": [("fmod({0}, {1}, 2)", bounds.few_turns)]}),
    Op("pow", ("pow", "float_power"), "result", promote,
       {"int": "power_int({0}, {1})", "float": "power({0}, {1})"},
       torch.pow, _pow_derivative, bounds.power, python="{0} ** {1}", cost="high"),
    Op("neg", ("neg", "negative"), "result", _first, {"int": "-{0}", "float": "-{0}"},
       torch.neg, lambda g, y, x: (-g,), bounds.neg, python="-{0}", finite=True),
    Op("abs", ("abs", "absolute"), "result", _first, {"int": "tl.abs({0})", "float": "tl.abs({0})"},
       torch.abs, lambda g, y, x: (g * torch.sign(x),), bounds.absolute, finite=True),
    Op("sign", ("sign", "sgn"), "result", _first, {"int": "sign({0})", "float": "sign({0})", "bool": "{0}"},
       torch.sign, _zero, bounds.sign, finite=True),
    Op("minimum", ("minimum", "min"), "result", promote,
       {"bool": "{0} & {1}", "int": "tl.minimum({0}, {1})",
        "float": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"},
       torch.minimum, lambda g, y, a, b: _pick(a < b, b < a, g), bounds.minimum, finite=True),
    Op("maximum", ("maximum", "max"), "result", promote,
       {"bool": "{0} | {1}", "int": "tl.maximum({0}, {1})",
        "float": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"},
       torch.maximum, lambda g, y, a, b: _pick(a > b, b > a, g), bounds.maximum, finite=True),
    Op("where", ("where",), "where", _branches, "tl.where({0}, {1}, {2})", formulas.where,
       lambda g, y, c, a, b: (None, torch.where(c, g, 0.0), torch.where(c, 0.0, g)), bounds.where,
       python="torch.where({0}, {1}, {2})", finite=True),
    # comparisons
    Op("eq", ("eq",), "common", _bool, "{0} == {1}", torch.eq, _zero, bounds.eq, python="{0} == {1}"),
    Op("ne", ("ne", "not_equal"), "common", _bool, "{0} != {1}", torch.ne, _zero, bounds.ne,
       python="{0} != {1}"),
    Op("lt", ("lt", "less"), "common", _bool, "{0} < {1}", torch.lt, _zero, bounds.lt, python="{0} < {1}"),
    Op("le", ("le", "less_equal"), "common", _bool, "{0} <= {1}", torch.le, _zero, bounds.le,
       python="{0} <= {1}"),
    Op("gt", ("gt", "greater"), "common", _bool, "{0} > {1}", torch.gt, _zero, bounds.gt, python="{0} > {1}"),
    Op("ge", ("ge", "greater_equal"), "common", _bool, "{0} >= {1}", torch.ge, _zero, bounds.ge,
       python="{0} >= {1}"),
    # compares 32-bit numbers as unsigned, for `integers.py`; torch has no name for it
    Op("unsigned_lt", (), "common", _bool, {"int": "unsigned_lt({0}, {1})"}, _unsigned_lt, _zero),
    Op("unsigned_max", (), "result", promote, {"int": "unsigned_max({0}, {1})"},
       lambda a, b: torch.where(_unsigned_lt(a, b), b, a), _zero),
    # logic and bits
    Op("logical_and", ("logical_and",), "bool", _bool, "{0} & {1}", torch.logical_and, _zero, bounds.both,
       python="{0} & {1}"),
    Op("logical_or", ("logical_or",), "bool", _bool, "{0} | {1}", torch.logical_or, _zero, bounds.either,
       python="{0} | {1}"),
    Op("logical_xor", ("logical_xor",), "bool", _bool, "{0} ^ {1}", torch.logical_xor, _zero, bounds.one_of,
       python="{0} ^ {1}"),
    Op("logical_not", ("logical_not",), "bool", _bool, "{0} == 0", torch.logical_not, _zero, bounds.invert,
       python="~{0}"),
    Op("bitwise_and", ("bitwise_and", "and"), "result", promote, _bits("{0} & {1}"),
       torch.bitwise_and, _zero, bounds.bitwise_and, python="{0} & {1}"),
    Op("bitwise_or", ("bitwise_or", "or"), "result", promote, _bits("{0} | {1}"),
       torch.bitwise_or, _zero, bounds.bitwise_or, python="{0} | {1}"),
    Op("bitwise_xor", ("bitwise_xor", "xor"), "result", promote, _bits("{0} ^ {1}"),
       torch.bitwise_xor, _zero, bounds.bitwise_xor, python="{0} ^ {1}"),
    Op("bitwise_not", ("bitwise_not", "invert"), "result", _first, _bits("~{0}"),
       torch.bitwise_not, _zero, bounds.bitwise_not, python="~{0}"),
    Op("shift_left", ("bitwise_left_shift", "lshift"), "result", promote, {"int": "shift_left({0}, {1})"},
       torch.bitwise_left_shift, _zero, bounds.shift_left, python="{0} << {1}",
       plain={"int": [("{0} << {1}", bounds.shift_within)]}),
    Op("shift_right", ("bitwise_right_shift", "rshift"), "result", promote,
       {"int": "shift_right({0}, {1})"}, torch.bitwise_right_shift, _zero, bounds.shift_right,
       python="{0} >> {1}", plain={"int": [("{0} >> {1}", bounds.shift_within)]}),
    # exponentials and their like
    Op("exp", ("exp",), "result", promote_float, "exp({0})", torch.exp, lambda g, y, x: (g * y,),
       cost="high"),
    Op("exp2", ("exp2", "special_exp2"), "result", promote_float, "tl.exp2({0})",
       torch.exp2, lambda g, y, x: (g * y * LN_2,), cost="high"),
    Op("expm1", ("expm1", "special_expm1"), "result", promote_float, "expm1({0})",
       torch.expm1, lambda g, y, x: (g * (y + 1.0),), cost="high"),
    Op("log", ("log",), "result", promote_float, "log({0})", torch.log, lambda g, y, x: (g / x,),
       cost="high"),
    Op("log2", ("log2",), "result", promote_float, "log2({0})",
       torch.log2, lambda g, y, x: (g * LOG2_E / x,), cost="high"),
    Op("log1p", ("log1p", "special_log1p"), "result", promote_float, "log1p({0})",
       torch.log1p, lambda g, y, x: (g / (x + 1.0),), cost="high"),
    Op("sqrt", ("sqrt",), "result", promote_float, "tl.sqrt({0})",
       torch.sqrt, lambda g, y, x: (g * 0.5 / y,), bounds.square_root, exact="tl.sqrt_rn({0})", cost="high"),
    Op("rsqrt", ("rsqrt",), "result", promote_float, "tl.rsqrt({0})",
       torch.rsqrt, lambda g, y, x: (g * (-0.5) * y * y * y,), cost="high"),
    Op("sin", ("sin",), "result", promote_float, "tl.sin({0})",
       torch.sin, lambda g, y, x: (g * torch.cos(x),), bounds.within_one, cost="high", finite=True),
    Op("cos", ("cos",), "result", promote_float, "tl.cos({0})",
       torch.cos, lambda g, y, x: (-g * torch.sin(x),), bounds.within_one, cost="high", finite=True),
    Op("tan", ("tan",), "result", promote_float, "tl.sin({0}) / tl.cos({0})",
       torch.tan, lambda g, y, x: (g * (1.0 + y * y),), cost="high"),
    Op("atan", ("atan", "arctan"), "result", promote_float, "atan({0})",
       torch.atan, lambda g, y, x: (g / (x * x + 1.0),), lambda x: (-1.571, 1.571), cost="high", finite=True),
    Op("atan2", ("atan2", "arctan2"), "result", promote_float, "atan2({0}, {1})", torch.atan2,
       _atan2_derivative, lambda a, b: (-3.142, 3.142), cost="high", finite=True),
    Op("hypot", ("hypot",), "result", promote, {"float": "hypot({0}, {1})"},
       torch.hypot, lambda g, y, a, b: (g * (a / y), g * (b / y)), bounds.hypot, cost="high", finite=True),
    Op("sinh", ("sinh",), "result", promote_float, "sinh({0})",
       torch.sinh, lambda g, y, x: (g * torch.cosh(x),), cost="high"),
    Op("cosh", ("cosh",), "result", promote_float, "cosh({0})",
       torch.cosh, lambda g, y, x: (g * torch.sinh(x),), cost="high"),
    Op("tanh", ("tanh",), "result", promote_float, "tanh({0})",
       torch.tanh, lambda g, y, x: (g * (1.0 - y * y),), bounds.within_one, cost="high", finite=True),
    # for a tanh times a large number, see `exponents.py`; torch has no other name for it
    Op("tanh_relative", (), "result", promote_float, "tanh_relative({0})",
       torch.tanh, lambda g, y, x: (g * (1.0 - y * y),), bounds.within_one, python="torch.tanh({0})",
       cost="high", finite=True),
    # for weights in float8, see `exponents.py`
    Op("tanh_approximate", ("tanh_approximate",), "result", promote_float, "tanh_approximate({0})",
       torch.tanh, lambda g, y, x: (g * (1.0 - y * y),), bounds.within_one, python="torch.tanh({0})",
       cost="high", finite=True),
    Op("sigmoid", ("sigmoid", "special_expit"), "result", promote_float, "divide(1.0, 1.0 + exp(-{0}))",
       torch.sigmoid, lambda g, y, x: (g * y * (1.0 - y),), bounds.share, cost="high", finite=True),
    # replaces tanh and sigmoid of a score, see `exponents.py`; torch has no name for it
    Op("logistic", (), "result", promote_float, "logistic({0})", lambda x: 1.0 / (1.0 + torch.exp2(x)),
       lambda g, y, x: (g * LN_2 * y * (y - 1.0),), bounds.share, cost="high", finite=True),
    Op("erf", ("erf", "special_erf"), "result", promote_float, "tl.erf({0})",
       torch.erf, lambda g, y, x: (g * (2.0 / math.sqrt(math.pi)) * torch.exp(-x * x),), bounds.within_one,
       cost="high", finite=True),
    Op("erfc", ("erfc", "special_erfc"), "result", promote_float, "erfc({0})",
       torch.erfc, lambda g, y, x: (g * (-2.0 / math.sqrt(math.pi)) * torch.exp(-x * x),),
       lambda x: (0.0, 2.0), cost="high", finite=True),
    Op("lgamma", ("lgamma", "special_gammaln"), "result", promote_float, "lgamma({0})",
       torch.lgamma, lambda g, y, x: (g * torch.digamma(x),), cost="high"),
    # rounding
    Op("floor", ("floor",), "result", _first, {"int": "{0}", "float": "tl.floor({0})"}, torch.floor, _zero,
       bounds.floor, finite=True),
    Op("ceil", ("ceil",), "result", _first, {"int": "{0}", "float": "tl.ceil({0})"}, torch.ceil, _zero,
       bounds.ceil, finite=True),
    Op("round", ("round",), "result", _first, {"int": "{0}", "float": "round_half_even({0})"},
       torch.round, _zero, bounds.nearest, finite=True),
    Op("trunc", ("trunc", "fix"), "result", _first, {"int": "{0}", "float": "trunc({0})"},
       torch.trunc, _zero, bounds.trunc, finite=True),
    # tests
    Op("isnan", ("isnan",), "own", _bool, {"int": "{0} != {0}", "bool": "{0} != {0}", "float": "{0} != {0}"},
       torch.isnan, _zero),
    Op("isinf", ("isinf",), "own", _bool,
       {"int": "{0} != {0}", "bool": "{0} != {0}", "float": 'tl.abs({0}) == float("inf")'},
       torch.isinf, _zero),
]  # fmt: skip

OPS: dict[str, Op] = {row.name: row for row in _ROWS}

CAST = "cast"
"""A Node of its own kind, whose dtype is the target. Differentiable between floating-point dtypes."""

BY_TORCH_NAME: dict[str, Op] = {name: row for row in _ROWS for name in row.torch_names}
COMPARISONS = frozenset(row.name for row in _ROWS if row.at == "common" and row.torch_names)


def fold(op: str, dtypes: Sequence[DType], result: DType, values: Sequence[Any]) -> bool | int | float:
    """Computes an operation on numbers, as torch does on 0-d tensors.

    A float64 call reads float32 as float64. So a number keeps float64's digits until an operation that
    `jumps`, a text or a tensor uses it.
    """
    row = OPS[op]
    at = row.argument_dtypes(dtypes, result)
    found = row.torch(*map(number, values, at))
    if result == torch.float32 and not row.jumps and found.isfinite():
        found = row.torch(*map(number, values, (torch.float64 if d == result else d for d in at)))
    return found.item()


def number(value: bool | int | float, dtype: torch.dtype) -> torch.Tensor:
    """A Python number as a 0-d tensor; a number beyond an integer dtype wraps, as in torch."""
    return torch.tensor(value, dtype=NUMBER_DTYPES[type(value)], device="cpu").to(dtype)
