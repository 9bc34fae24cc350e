"""Torch functions by name, and as formulas of other torch functions, which need no row of the table.

Signatures follow torch's.

Quotients and remainders here accept every number that a kernel may see. torch raises an error for an integer
divided by 0, and ends the process for the smallest integer divided by -1. On the CPU it returns nan as the
remainder of floats whose quotient is large.

`FUNCTIONS` are what a mod may use besides torch's functions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache, partial, reduce
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from flexmod import errors
from flexmod.errors.base import a_type
from flexmod.ir.graph import expect_size


def _safe(divide: Callable[[Any, Any], Any], *, rest: bool = False) -> Callable[[Any, Any], Any]:
    """Makes a division whose integer version takes a divisor of 0 for 1, and wraps, as kernels do."""

    def safe(a: Any, b: Any) -> Any:
        if a.dtype.is_floating_point:
            return divide(a, b)
        if not a.dtype.is_signed:
            return divide(a, torch.where(b == 0, 1, b))
        found = divide(a, torch.where((b == 0) | (b == -1), 1, b))
        return found if rest else found * torch.where(b == -1, -1, 1).to(b.dtype)

    return safe


def _differentiated(a: Any, b: Any) -> bool:
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)


def _rest(a: Any, b: Any) -> Any:
    """torch's remainder where float64 holds the quotient and 1 / b, since torch can differentiate it."""
    if not a.dtype.is_floating_point or _differentiated(a, b):
        return torch.fmod(a, b)
    rest, divisor = a.double(), b.double()
    if a.dtype == torch.float64:
        for scale in (2.0**700, 1.0):
            rest = torch.fmod(rest, divisor * 2.0**700 * scale)
        unit = torch.where(divisor.abs() < 2.0**-800, torch.full_like(divisor, 2.0**200), 1.0)
        return torch.fmod(rest * unit, divisor * unit) / unit
    return torch.fmod(rest, divisor).to(a.dtype)


def _rest_with_sign_of_divisor(a: Any, b: Any) -> Any:
    if not a.dtype.is_floating_point or _differentiated(a, b):
        return torch.remainder(a, b)
    rest = _rest(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _floor(a: Any, b: Any) -> Any:
    """The floor of a / b from the exact remainder, as torch computes it."""
    if not a.dtype.is_floating_point:
        return torch.floor_divide(a, b)
    a, b = a.detach(), b.detach()
    rest = _rest(a, b)
    quotient = (a - rest) / b
    quotient = torch.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    nearest = quotient.floor()
    nearest = torch.where(quotient - nearest > 0.5, nearest + 1, nearest)
    nearest = torch.where(quotient == 0, torch.copysign(torch.zeros_like(quotient), a / b), nearest)
    return torch.where(b == 0, a / b, nearest)


floor_divide = _safe(_floor)
trunc_divide = _safe(partial(torch.div, rounding_mode="trunc"))
remainder, fmod = _safe(_rest_with_sign_of_divisor, rest=True), _safe(_rest, rest=True)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        raise TypeError("clamp takes a min or a max")
    return _at_most(x if min is None else _at_least(x, min), max)


def _at_least(x: Any, min: Any) -> Any:
    # torch passes a float's gradient on at the limit itself; an integer's interval must end at the limit
    return _limited(x, operator.lt, operator.ge, min) if x.is_floating_point() else x.maximum(min)


def _at_most(x: Any, max: Any) -> Any:
    if max is None:
        return x
    return _limited(x, operator.gt, operator.le, max) if x.is_floating_point() else x.minimum(max)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """torch.where, of numbers on the CPU beside tensors on a GPU too.

    torch would wait for the GPU to copy such a number to it.
    """
    given = [condition, yes, no]
    devices = [x.device for x in given if isinstance(x, torch.Tensor) and x.device.type != "cpu"]
    return torch.where(*(_moved(x, devices[0]) for x in given) if devices else given)


def _moved(x: Any, device: torch.device) -> Any:
    if type(x) is torch.Tensor and x.device.type == "cpu" and not (x.dim() or x.requires_grad):
        return torch.full((), x.item(), dtype=x.dtype, device=device)
    return x


def _limited(x: Any, outside: Callable[..., Any], within: Callable[..., Any], limit: Any) -> Any:
    """Replaces x by the limit where x lies outside. A nan limit makes the result nan, as in torch.

    Compares a captured tensor's value only together with x: compared alone, it would become a constant.
    """
    if not hasattr(limit, "is_floating_point"):
        return torch.where(outside(x, limit), limit, x) if limit == limit else torch.full_like(x, limit)
    if not limit.is_floating_point():
        return torch.where(outside(x, limit), limit, x)
    return torch.where(torch.logical_not(within(x, limit)) & (x == x), limit, x)


def _relu(x: Any) -> Any:
    # the gradient at 0 is 0, as in torch
    return torch.where(x <= 0, 0, x) if x.is_floating_point() else x.maximum(0)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    if approximate != "none":
        raise TypeError(f"approximate is {approximate!r}, neither 'none' nor 'tanh'")
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    if isinstance(value, int):  # in the result's dtype, in which torch multiplies
        value = torch.full_like(x, value)
    return x + value * a * b


def _lerp(a: Any, b: Any, weight: Any) -> Any:
    # from the nearer end, as torch does: a weight of 1 gives b, however large a is
    way = b - a
    from_a, from_b = a + weight * way, b - (1 - weight) * way
    if isinstance(weight, (int, float)):
        return from_a if abs(weight) < 0.5 else from_b
    return torch.where(abs(weight) < 0.5, from_a, from_b)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    near = (scaled.maximum(0.0) + torch.log1p(torch.exp(-torch.abs(scaled)))) / beta
    return torch.where(scaled > threshold, x, near)


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    return torch.where(x > 0, x, torch.expm1(_at_most(x, 0) * input_scale) * alpha) * scale


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    low, high = torch.full_like(x, min_val), torch.full_like(x, max_val)
    return torch.where(x <= low, low, torch.where(x >= high, high, x))


def _hardswish(x: Any) -> Any:
    x = x * 1.0  # of a uint8, -3 would be 253; and -inf * 0 is nan, as in torch
    near = _hardtanh(x, -3.0, 3.0)
    return torch.where(x <= -3, x * 0.0, torch.where(x < 3, near * (near + 3.0) / 6.0, x))


def _nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    if not x.is_floating_point():
        return x
    ends = torch.finfo(x.dtype)
    low, high = (ends.min if neginf is None else neginf), (ends.max if posinf is None else posinf)
    finite = torch.where(x == math.inf, high, torch.where(x == -math.inf, low, x))
    return torch.where(torch.isnan(x), nan, finite)


def _logaddexp(a: Any, b: Any) -> Any:
    apart = torch.where(a == b, 0.0, a - b)  # of two infinities
    return torch.maximum(a, b) + torch.log1p(torch.exp(-torch.abs(apart)))


def _in_one_dtype(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Casts arguments to the result's dtype first, as torch does: otherwise a part of the formula is rounded
    to the dtype of its own arguments. Computes half types in float32, and rounds once.
    """

    def cast(*given: Any, **options: Any) -> Any:
        dtypes = [x.dtype for x in given if hasattr(x, "dtype")]
        dtype = reduce(torch.promote_types, dtypes)
        halves = dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if halves else dtype
        if any(each != wide for each in dtypes):
            given = tuple(x.to(wide) if hasattr(x, "dtype") else x for x in given)
        found = formula(*given, **options)
        return found.to(dtype) if halves else found

    return cast


def _xlogy(x: Any, y: Any, log: Callable[[Any], Any] = torch.log, zero: float = 0.0) -> Any:
    """x * log(y), and 0 where x is 0, whatever the logarithm. `zero` is log's pole."""
    safe = (x == 0) & ((y <= zero) | (y == math.inf))
    return x * log(torch.where(safe, 1.0, y))


def _logit(x: Any, eps: float | None = None) -> Any:
    x = x if eps is None else _clamp(x, eps, 1.0 - eps)
    return torch.log(x / (1.0 - x))


def _signbit(x: Any) -> Any:
    if isinstance(x, (int, float)):
        return math.copysign(1.0, x) < 0
    return (x < 0) | ((x == 0) & (1.0 / x < 0))


def _copysign(x: Any, sign: Any) -> Any:
    size = torch.abs(x) * 1.0
    return torch.where(_signbit(sign) & (size == size), -size, size)


def _root(x: Any) -> Any:
    """sqrt(1 - x * x). Two roots, so that the derivative at 1 and -1 is infinite, not nan."""
    return torch.sqrt(1.0 - x) * torch.sqrt(1.0 + x)


def _asinh(x: Any) -> Any:
    x = x * 1.0
    size = torch.where(x < 0, -x, x)  # unlike that of abs, its derivative at 0 is not 0
    near = size.minimum(_FAR)
    found = torch.log1p(near + near * (near / (1.0 + torch.hypot(near, torch.full_like(near, 1.0)))))
    found = _log_of_twice(size, found)
    return torch.where(x < 0, -found, found)


def _acosh(x: Any) -> Any:
    x = x * 1.0
    above = x.minimum(_FAR) - 1.0  # exact near 1, where log would lose digits
    # Two roots, as in `_root`. The derivative below 1 is finite, since a `where` multiplies it by 0.
    root = torch.sqrt(torch.where(above < 0, -above, above)) * torch.sqrt(torch.abs(above + 2.0))
    found = _log_of_twice(x, torch.log1p(above + root))
    return found + torch.where(x < 1, math.nan, 0.0)


def _log_of_twice(x: Any, near: Any) -> Any:
    """log(2 * x) where x is so far from 1 that asinh and acosh equal it; elsewhere `near`."""
    far = torch.log(x.maximum(_FAR)) + math.log(2.0)
    return torch.where(x <= _FAR, near, far)


# its square is a float32, and 1 is less than the square's rounding
_FAR: Any = 1e10


def _digamma(x: Any) -> Any:
    """The derivative of log(gamma(x)): an asymptotic series at 8 or more, in float64; reflected below 0.5."""
    z = x.double()
    left = z < 0.5
    y = torch.where(left, 1.0 - z, z)
    shifted, steps = y + 8.0, 1.0 / y
    for step in range(1, 8):
        steps = steps + 1.0 / (y + step)
    square = 1.0 / (shifted * shifted)
    series: Any = 0.0
    for term in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = (series + term) * square
    found = torch.log(shifted) - 0.5 / shifted - series - steps
    turn = z - torch.round(z)
    angle = math.pi * torch.where(left & (turn != 0), turn, 0.25)  # finite also where it does not count
    pole = torch.where(z < 0, math.nan, -1.0 / z)
    turned = torch.where(turn == 0, pole, found - math.pi / torch.tan(angle))
    return torch.where(left, turned, found).to((x * 1.0).dtype)


COMPOSED: dict[str, Callable[..., Any]] = {
    "rsub": lambda x, other, *, alpha=1: torch.sub(other, x, alpha=alpha),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _at_least,
    "clamp_max": _at_most,
    "relu": _relu,
    "silu": _in_one_dtype(lambda x: x * torch.sigmoid(x)),
    "gelu": _in_one_dtype(_gelu),
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "softplus": _in_one_dtype(_softplus),
    "log_sigmoid": _in_one_dtype(lambda x: x.minimum(0.0) - torch.log1p(torch.exp(-torch.abs(x)))),
    "mish": _in_one_dtype(lambda x: x * torch.tanh(_softplus(x))),
    "elu": _in_one_dtype(_elu),
    "celu": _in_one_dtype(lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1.0 / alpha)),
    "selu": _in_one_dtype(lambda x: _elu(x, 1.6732632423543772, 1.0507009873554805)),
    "leaky_relu": lambda x, negative_slope=0.01: torch.where(x > 0, x, x * negative_slope),
    "hardtanh": _hardtanh,
    "relu6": lambda x: _hardtanh(x, 0.0, 6.0),
    "hardsigmoid": _in_one_dtype(lambda x: _hardtanh(x + 3.0, 0.0, 6.0) / 6.0),
    "hardswish": _in_one_dtype(_hardswish),
    "hardshrink": lambda x, lambd=0.5: torch.where(torch.abs(x) <= lambd, 0.0, x),
    "softshrink": lambda x, lambd=0.5: torch.where(
        torch.abs(x) <= lambd, 0.0, torch.where(x < 0, x + lambd, x - lambd)
    ),
    "tanhshrink": _in_one_dtype(lambda x: x - torch.tanh(x)),
    "softsign": _in_one_dtype(lambda x: x / (torch.abs(x) + 1.0)),
    "threshold": lambda x, threshold, value: torch.where(x <= threshold, torch.full_like(x, value), x),
    "nan_to_num": _nan_to_num,
    "logaddexp": _in_one_dtype(_logaddexp),
    "logaddexp2": _in_one_dtype(
        lambda a, b: _logaddexp(a * math.log(2.0), b * math.log(2.0)) / math.log(2.0)
    ),
    "xlogy": _in_one_dtype(_xlogy),
    "special_xlogy": _in_one_dtype(_xlogy),
    "special_xlog1py": _in_one_dtype(lambda x, y: _xlogy(x, y, torch.log1p, -1.0)),
    "logit": _in_one_dtype(_logit),
    "special_logit": _in_one_dtype(_logit),
    "digamma": _digamma,
    "asin": _in_one_dtype(lambda x: torch.atan2(x, _root(x * 1.0))),
    "acos": _in_one_dtype(lambda x: torch.atan2(_root(x * 1.0), x)),
    "asinh": _in_one_dtype(_asinh),
    "acosh": _in_one_dtype(_acosh),
    "atanh": _in_one_dtype(lambda x: 0.5 * (torch.log1p(x) - torch.log1p(-x))),
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "frac": lambda x: x - torch.trunc(x),
    "signbit": _signbit,
    "copysign": _in_one_dtype(_copysign),
    "fmin": lambda a, b: torch.where(torch.isnan(a) | (b < a), b, a),
    "fmax": lambda a, b: torch.where(torch.isnan(a) | (b > a), b, a),
    "log10": _in_one_dtype(lambda x: torch.log2(x) * math.log10(2.0)),
    "isfinite": lambda x: torch.logical_not(torch.isnan(x) | torch.isinf(x)),
    "isposinf": lambda x: x == math.inf,
    "isneginf": lambda x: x == -math.inf,
    "masked_fill": lambda x, mask, value: torch.where(mask, torch.full_like(x, value), x),
    "lerp": _in_one_dtype(_lerp),
    "addcmul": _in_one_dtype(_addcmul),
    "addcdiv": _in_one_dtype(lambda x, a, b, *, value=1: x + value * (a / b)),
    "positive": lambda x: x,
    "clone": lambda x, memory_format=None: x,
    "contiguous": lambda x: x,
}
# torch has two names for each
OTHER_NAMES = {
    "arcsin": "asin", "arccos": "acos", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
    "special_digamma": "digamma", "special_psi": "digamma",
}  # fmt: skip


def tanh_approximate(x: Any) -> Any:
    """tanh(x) for use in a mod, with a relative error of up to 2^-11, about 5e-4.

    `x` is a traced scalar, or a tensor of any shape. The result has its shape and dtype; of integers,
    torch's default dtype.

    Kernels for NVIDIA's chips use one instruction, tanh.approx.f32, in float32. Other chips, the CPU, torch's
    tensors, the interpreter and standalone files compute the exact tanh. The derivative is 1 - y * y, where y
    is the function's own result. Raises OperationArgumentError for anything but a traced scalar or a tensor.

    Source: NVIDIA, Parallel Thread Execution ISA, tanh (sm_75 and newer; the error is the one stated there).

    Example:

        def softcap(score, b, h, q_idx, kv_idx):
            return 20.0 * tanh_approximate(score / 20.0)

        out = flex_attention(query, key, value, softcap)
    """
    if has_torch_function_unary(x):
        return handle_torch_function(tanh_approximate, (x,), x)
    if not isinstance(x, torch.Tensor):
        raise errors.OperationArgumentError(
            operation="flexmod.tanh_approximate", problem=a_type(x),
            advice="give it a traced scalar or a tensor, and a number to math.tanh.",
        )  # fmt: skip
    return torch.tanh(x)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (tanh_approximate, expect_size)
}


CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "bool": torch.bool,
}  # fmt: skip
FILLS = {"full_like": None, "zeros_like": 0, "ones_like": 1, "new_full": None, "new_zeros": 0, "new_ones": 1}
# an operator's method name, without underscores, to the table's operation
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "pow": "pow",
    "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
# operations whose operands may change places
COMMUTATIVE = {"add", "mul", "bitwise_and", "bitwise_or", "bitwise_xor"}
REDUCTIONS = {
    "sum", "mean", "prod", "all", "any", "amax", "amin", "argmax", "argmin", "std", "var", "norm", "cumsum",
    "cumprod", "softmax", "log_softmax", "logsumexp", "sort", "topk", "median", "nonzero", "matmul", "dot",
    "einsum", "bincount", "count_nonzero", "unique",
}  # fmt: skip
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "binomial", "multinomial", "normal", "log_normal", "poisson", "uniform", "exponential", "cauchy",
    "geometric", "random", "standard_gamma", "sample_dirichlet", "gumbel_softmax", "rrelu", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    "native_dropout",
}  # fmt: skip
# functions that do not read a tensor's values
METADATA = {
    torch.promote_types, torch.Tensor.__len__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_nested")
    ),
}  # fmt: skip


@cache
def draws(name: str) -> bool:
    """Does a torch function of this name draw random numbers?"""
    # `__rand__` is the & of a number and a tensor
    return name.strip("_") in RANDOM and not name.startswith("__")


@cache
def writes(name: str) -> bool:
    """Does a torch function of this name write in place?"""
    if not name.startswith("__"):
        return name.endswith("_")
    bare = name.strip("_")
    return name in ("__setitem__", "__set__") or bare[:1] == "i" and bare[1:] in BINARY
