"""Texts for each row of the table of operations, and for what flexmod composes of rows; and casts.

A text keeps to arguments where the operation has a finite value and derivative: log(|x| + 0.5). Operations
that jump are marked: they are drawn of values that may jump (see `values.py`). A test holds this file to
the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzz.choices import Drawn
from fuzz.values import FLOATS, INTEGERS, Pool, Value, half_of, pick

Sizes = Callable[..., float]


@dataclass(frozen=True)
class Form:
    """`takes`: a letter for each operand, f(loat), i(nt), b(ool), n(umber: f or i); a capital: no literal.

    `kind` "" is the operands'. `size` is a function of the operands' sizes, `grain` one of their grains, or
    None: the result is rounded.
    """

    text: str
    takes: str
    kind: str
    size: Sizes
    grain: Callable[..., int] | None = None
    jumps: bool = False
    masks_only: bool = False  # torch has no derivative of it


def _one(*sizes: float) -> float:
    return 1.0


def _sum(*sizes: float) -> float:
    return sum(sizes)


def _same(*sizes: float) -> float:
    return max(sizes)


def _bounded(size: float) -> Sizes:
    return lambda *sizes: size


def _rounded(text: str, size: Sizes | float, takes: str = "n") -> Form:
    """A float that is rounded."""
    return Form(text, takes, "float", size if callable(size) else _bounded(size))


def _piece(text: str, size: Sizes | float, takes: str = "n", kind: str = "", grain: Any = None) -> Form:
    """What is constant, or linear, between jumps."""
    size = size if callable(size) else _bounded(size)
    return Form(text, takes, kind, size, grain or (lambda *g: max(g)), True)


def _exact(text: str, takes: str, size: Sizes, grain: Any = None, kind: str = "") -> Form:
    return Form(text, takes, kind, size, grain or (lambda *g: max(g)))


def _compare(sign: str) -> list[Form]:
    return [_piece(f"{{0}} {sign} {{1}}", 1.0, takes, "bool") for takes in ("nn", "in")]


def _bits(sign: str, size: Sizes) -> list[Form]:
    return [
        _exact(f"{{0}} {sign} {{1}}", "bb", _one),
        _exact(f"{{0}} {sign} {{1}}", "ii", size),
    ]


def _logical(name: str) -> list[Form]:
    return [Form(f"torch.{name}({{0}}, {{1}})", takes, "bool", _one, lambda *g: 0) for takes in ("bb", "ib")]


def _product(x: float, y: float) -> float:
    return x * y


def _whole(*grains: int) -> int:
    return 0


FORMS: dict[str, list[Form]] = {
    "add": [
        _exact("{0} + {1}", "nn", _sum),
        _exact("torch.add({0}, {1}, alpha=2)", "nn", lambda x, y: x + 2 * y),
        _exact("{0} + {1}", "bN", _sum),
    ],
    "sub": [_exact("{0} - {1}", "nn", _sum)],
    "mul": [
        _exact("{0} * {1}", "nn", _product, lambda x, y: x + y),
        _exact("{0} * {1}", "bN", _product, lambda x, y: x + y),
    ],
    "div": [
        _rounded("{0} / 3.0", lambda x: x / 3),
        _rounded("{0} / -7", lambda x: x / 7),
        _rounded("{0} / ({1}.abs() + 0.5)", lambda x, y: 2 * x, "nN"),
        _rounded("1.5 / ({0}.abs() + 1)", 1.5),
    ],
    "floor_divide": [
        _piece("{0} // 3", lambda x: x / 3 + 1, "i"),
        _piece("{0} // -5", lambda x: x / 5 + 1, "i"),
        _piece("{0} // ({1}.abs() + 1)", lambda x, y: x + 1, "iI"),
        Form("{0} // 0.75", "f", "float", lambda x: x / 0.75 + 1, _whole, jumps=True, masks_only=True),
    ],
    "trunc_divide": [
        _piece('torch.div({0}, 4, rounding_mode="trunc")', lambda x: x / 4 + 1, "i"),
        _piece('torch.div({0}, 0.75, rounding_mode="trunc")', lambda x: x / 0.75 + 1, "f", grain=_whole),
    ],
    "remainder": [
        _piece("{0} % 5", 5.0, "i"),
        _piece("{0} % -3", 3.0, "i"),
        _piece("torch.remainder({0}, {1}.abs() + 1)", lambda x, y: y + 1, "iI"),
        _piece("{0} % 1.5", 1.5, "f"),
    ],
    "fmod": [
        _piece("torch.fmod({0}, 3)", 3.0, "i"),
        _piece("torch.fmod({0}, 1.5)", 1.5, "f"),
    ],
    "pow": [
        _exact("{0} ** 2", "n", lambda x: x * x, lambda g: 2 * g),
        _rounded("({0}.abs() + 0.5) ** 1.5", lambda x: (x + 0.5) ** 1.5),
        _rounded("2.0 ** {0}.clamp(-3, 3)", 8.0),
        _rounded("torch.pow({0}.abs() + 1.0, {1}.clamp(-1, 1))", lambda x, y: x + 1, "fF"),
        _rounded("torch.float_power({0}, 2)", lambda x: x * x),
    ],
    "neg": [_exact("-{0}", "n", _same)],
    "abs": [_exact("{0}.abs()", "n", _same), _exact("torch.abs({0})", "n", _same)],
    "sign": [_piece("torch.sign({0})", 1.0, "n", grain=_whole), _piece("{0}.sgn()", 1.0, "f", grain=_whole)],
    "minimum": [_exact("torch.minimum({0}, {1})", "nN", _same), _exact("{0}.minimum({1})", "nN", _same)],
    "maximum": [_exact("torch.maximum({0}, {1})", "nN", _same), _exact("torch.max({0}, {1})", "nN", _same)],
    "where": [
        _exact("torch.where({0}, {1}, {2})", "bnn", _same),
        _exact("{1}.where({0}, {2})", "bFf", _same),
    ],
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "logical_and": _logical("logical_and"),
    "logical_or": _logical("logical_or"),
    "logical_xor": _logical("logical_xor"),
    "logical_not": [
        Form("torch.logical_not({0})", "b", "bool", _one, _whole),
        Form("torch.logical_not({0})", "i", "bool", _one, _whole),
    ],
    "bitwise_and": _bits("&", lambda x, y: 2 * max(x, y) + 1),
    "bitwise_or": _bits("|", lambda x, y: 2 * max(x, y) + 1),
    "bitwise_xor": _bits("^", lambda x, y: 2 * max(x, y) + 1),
    "bitwise_not": [_exact("~{0}", "b", _one), _exact("~{0}", "i", lambda x: x + 1)],
    "shift_left": [_exact("{0} << 2", "i", lambda x: 4 * x), _exact("1 << ({0} & 3)", "i", _bounded(8.0))],
    "shift_right": [_exact("{0} >> 1", "i", _same), _exact("{0} >> ({1} & 3)", "ii", _same)],
    "exp": [_rounded("torch.exp({0}.clamp(max=2.0))", 8.0), _rounded("torch.exp(-{0}.abs())", 1.0)],
    "exp2": [_rounded("torch.exp2({0}.clamp(max=3.0))", 8.0)],
    "expm1": [_rounded("torch.expm1({0}.clamp(max=2.0))", 8.0)],
    "log": [_rounded("torch.log({0}.abs() + 0.5)", lambda x: math.log(x + 1) + 1)],
    "log2": [_rounded("torch.log2({0}.abs() + 1)", lambda x: math.log2(x + 1))],
    "log1p": [_rounded("torch.log1p({0}.abs())", lambda x: math.log(x + 1))],
    "sqrt": [_rounded("torch.sqrt({0}.abs() + 0.25)", lambda x: math.sqrt(x + 1))],
    "rsqrt": [_rounded("torch.rsqrt({0}.abs() + 0.5)", 1.5)],
    "sin": [_rounded("torch.sin({0})", 1.0, "f"), _rounded("torch.sin({0} * 0.125)", 1.0, "i")],
    "cos": [_rounded("torch.cos({0})", 1.0, "f"), _rounded("torch.cos({0} * 0.125)", 1.0, "i")],
    "tan": [_rounded("torch.tan({0}.clamp(-1, 1))", 2.0)],
    "sinh": [_rounded("torch.sinh({0}.clamp(-2, 2))", 4.0, "f")],
    "cosh": [_rounded("torch.cosh({0}.clamp(-2, 2))", 4.0, "f")],
    "tanh": [_rounded("torch.tanh({0})", 1.0), _rounded("3.0 * torch.tanh({0} / 3.0)", 3.0)],
    "sigmoid": [_rounded("torch.sigmoid({0})", 1.0), _rounded("{0}.sigmoid()", 1.0, "f")],
    "erf": [_rounded("torch.erf({0})", 1.0)],
    "erfc": [_rounded("torch.special.erfc({0})", 2.0)],
    "atan": [_rounded("torch.atan({0})", 1.6)],
    # for a uint8 in the first place, torch's derivative has 251 instead of -5
    "atan2": [_rounded("torch.atan2({0}, {1}.abs() + 0.5)", 3.2, "fF")],
    "hypot": [_rounded("torch.hypot({0}, {1}.abs() + 0.5)", lambda x, y: x + y + 1, "FF")],
    "lgamma": [_rounded("torch.lgamma({0}.abs() + 0.5)", lambda x: (x + 1) * math.log(x + 2))],
    "floor": [
        _piece("torch.floor({0})", lambda x: x + 1, "f", grain=_whole),
        # exact of whole numbers, since flexmod's division of what is free of the score is torch's
        Form("torch.floor({0} / 7)", "i", "float", lambda x: x / 7 + 1, _whole),
    ],
    "ceil": [_piece("torch.ceil({0})", lambda x: x + 1, "f", grain=_whole)],
    "round": [_piece("torch.round({0} * 2)", lambda x: 2 * x + 1, "f", grain=_whole)],
    "trunc": [_piece("torch.trunc({0})", _same, "f", grain=_whole), _piece("torch.fix({0})", _same, "f")],
    "isnan": [Form("torch.isnan({0})", "n", "bool", _one, lambda *g: 0)],
    "isinf": [Form("torch.isinf({0})", "n", "bool", _one, lambda *g: 0)],
    # composed of rows
    "rsub": [_exact("torch.rsub({0}, 1.5)", "f", lambda x: x + 1.5, lambda g: max(g, 1))],
    "clamp": [
        _exact("{0}.clamp(-2, 2)", "n", _bounded(2.0)),
        _exact("torch.clamp({0}, max=1.5)", "f", _same, lambda g: max(g, 1)),
    ],
    "clip": [_exact("{0}.clip(-1, 3)", "n", _bounded(3.0))],
    "clamp_min": [_exact("torch.clamp_min({0}, -1)", "n", lambda x: max(x, 1.0))],
    "clamp_max": [_exact("torch.clamp_max({0}, 1)", "n", lambda x: max(x, 1.0))],
    "relu": [_exact("torch.relu({0})", "n", _same), _exact("F.relu({0})", "f", _same)],
    "silu": [_rounded("F.silu({0})", _same, "f")],
    "gelu": [_rounded("F.gelu({0})", _same, "f"), _rounded('F.gelu({0}, approximate="tanh")', _same, "f")],
    "square": [_exact("torch.square({0})", "n", lambda x: x * x, lambda g: 2 * g)],
    "reciprocal": [_rounded("torch.reciprocal({0}.abs() + 0.5)", 2.0)],
    "log_sigmoid": [_rounded("F.logsigmoid({0})", lambda x: x + 1, "f")],
    "mish": [_rounded("F.mish({0})", _same, "f")],
    "elu": [_rounded("F.elu({0}, 0.5)", _same, "f")],
    "celu": [_rounded("F.celu({0}, 1.5)", lambda x: x + 1, "f")],
    "selu": [_rounded("F.selu({0})", lambda x: 1.1 * x + 1, "f")],
    "leaky_relu": [_rounded("F.leaky_relu({0}, 0.25)", _same, "f")],
    "hardtanh": [_piece("F.hardtanh({0}, -1.5, 2.0)", 2.0, "f", grain=lambda g: max(g, 1))],
    "relu6": [_piece("F.relu6({0})", 6.0, "f")],
    "hardsigmoid": [_rounded("F.hardsigmoid({0})", 1.0, "f")],
    "hardswish": [_rounded("F.hardswish({0})", _same, "f")],
    "hardshrink": [_piece("F.hardshrink({0}, 0.25)", _same, "f")],
    "softshrink": [_piece("F.softshrink({0}, 0.25)", _same, "f", grain=lambda g: max(g, 2))],
    "tanhshrink": [_rounded("F.tanhshrink({0})", _same, "f")],
    "softsign": [_rounded("F.softsign({0})", 1.0, "f")],
    "threshold": [_piece("F.threshold({0}, 0.5, 2.0)", lambda x: x + 2, "f", grain=lambda g: max(g, 1))],
    "nan_to_num": [_exact("torch.nan_to_num({0})", "n", _same)],
    "logaddexp": [_rounded("torch.logaddexp({0}, {1})", lambda x, y: max(x, y) + 1, "FF")],
    "logaddexp2": [_rounded("torch.logaddexp2({0}, {1})", lambda x, y: max(x, y) + 1, "FF")],
    "xlogy": [_rounded("torch.xlogy({0}, {1}.abs() + 0.5)", lambda x, y: x * (y + 1), "fF")],
    "special_xlogy": [_rounded("torch.special.xlogy({0}, {1}.abs() + 0.5)", lambda x, y: x * (y + 1), "fF")],
    "special_xlog1py": [_rounded("torch.special.xlog1py({0}, {1}.abs())", lambda x, y: x * (y + 1), "fF")],
    "logit": [_rounded("torch.logit({0}.clamp(0.125, 0.875))", 2.0)],
    "special_logit": [_rounded("torch.special.logit({0}, eps=0.125)", 2.0, "f")],
    "digamma": [_rounded("torch.digamma({0}.abs() + 0.5)", lambda x: math.log(x + 2) + 2)],
    "asin": [_rounded("torch.asin({0}.clamp(-0.75, 0.75))", 1.6)],
    "acos": [_rounded("torch.acos({0}.clamp(-0.75, 0.75))", 3.2)],
    "asinh": [_rounded("torch.asinh({0})", _same)],
    "acosh": [_rounded("torch.acosh({0}.abs() + 1.5)", lambda x: x + 1)],
    "atanh": [_rounded("torch.atanh({0}.clamp(-0.75, 0.75))", 1.0)],
    "deg2rad": [_rounded("torch.deg2rad({0})", _same)],
    "rad2deg": [_rounded("torch.rad2deg({0} * 0.0625)", lambda x: 4 * x)],
    "frac": [_piece("torch.frac({0})", 1.0, "f")],
    "signbit": [_piece("torch.signbit({0})", 1.0, "n", "bool", lambda g: 0)],
    "copysign": [_piece("torch.copysign({0}, {1})", _same, "Fn", grain=lambda g, _: g)],
    "fmin": [_exact("torch.fmin({0}, {1})", "FF", _same)],
    "fmax": [_exact("torch.fmax({0}, {1})", "FF", _same)],
    "addcdiv": [_rounded("torch.addcdiv({0}, {0}, {1}.abs() + 0.5, value=0.125)", lambda x, y: 2 * x, "fF")],
    "softplus": [_rounded("F.softplus({0}.clamp(max=8))", lambda x: x + 1, "f")],
    "log10": [_rounded("torch.log10({0}.abs() + 1)", lambda x: math.log10(x + 1) + 1)],
    "isfinite": [Form("torch.isfinite({0})", "n", "bool", _one, lambda *g: 0)],
    "isposinf": [Form("torch.isposinf({0})", "n", "bool", _one, lambda *g: 0)],
    "isneginf": [Form("torch.isneginf({0})", "n", "bool", _one, lambda *g: 0)],
    "masked_fill": [_exact("{0}.masked_fill({1}, 0.5)", "fb", _same, lambda g, _: max(g, 1))],
    "lerp": [_rounded("torch.lerp({0}, {0}, 0.25)", _same, "f")],
    "addcmul": [_rounded("torch.addcmul({0}, {0}, {0}, value=0.125)", lambda x: x + x * x / 8, "f")],
    "positive": [_exact("+{0}", "n", _same)],
    "clone": [_exact("torch.clone({0})", "n", _same)],
    "contiguous": [_exact("{0}.contiguous()", "n", _same)],
}  # fmt: skip

CASTS: list[tuple[str, str, str]] = [
    (".to(FLOAT32)", "float", ""),
    (".double()", "float", ""),
    (".to(FLOAT16)", "float", "float16"),
    (".to(BFLOAT16)", "float", "bfloat16"),
    (".int()", "int", ""),
    (".long()", "int", ""),
    (".short()", "int", ""),
    (".to(torch.int8)", "int", ""),
    (".bool()", "bool", ""),
]
FILLS = [("torch.full_like({0}, 2)", 2), ("torch.zeros_like({0})", 0), ("{0}.new_ones(())", 1)]

# what mods are likely to be made of is drawn more often
LIKELY = {
    "score": ("add", "mul", "sub", "tanh", "where", "clamp", "minimum", "exp", "ge", "floor_divide",
              "remainder"),
    "mask": ("sub", "le", "ge", "lt", "eq", "abs", "floor_divide", "remainder", "bitwise_and", "bitwise_or",
             "bitwise_not", "where", "minimum"),
}  # fmt: skip
# operations of rounded floats decide nothing in a mask, which is exact
ROUNDED = {name for name, forms in FORMS.items() if all(f.kind == "float" and f.grain is None for f in forms)}


def operation(draw: Drawn, pool: Pool, which: str) -> Value | None:
    """One more value, of an operation drawn at random; None where the pool has no operands for it."""
    names = sorted(FORMS.keys() - ROUNDED if which == "mask" else FORMS)
    name = draw.one(LIKELY[which] if draw.flag() else names)
    form = draw.one([form for form in FORMS[name] if which == "mask" or not form.masks_only])
    operands: list[Value] = []
    for place, letter in enumerate(form.takes):
        found = _operand(draw, pool, letter, form.jumps, literal=place > 0 and not operands[-1].weak)
        if found is None:
            return None
        operands.append(found)
    return apply(pool, form, operands)


def _operand(draw: Drawn, pool: Pool, letter: str, jumps: bool, literal: bool) -> Value | None:
    kinds = {"f": ("float",), "i": ("int",), "b": ("bool",), "n": ("float", "int")}[letter.lower()]
    if literal and letter in "fin" and draw.rarely(4):
        numbers = [v for v in pool.values if v.weak and v.kind in kinds]
        literals = (FLOATS if "float" in kinds else []) + (INTEGERS if "int" in kinds else [])
        return draw.one(literals + numbers)  # type: ignore[no-any-return]
    fits = [v for v in pool.values if v.kind in kinds and not v.weak and (v.may_jump or not jumps)]
    by_score = [v for v in fits if v.score]
    # half of what a score mod does is done to the score
    return pick(draw, by_score if by_score and draw.flag() else fits)


def apply(pool: Pool, form: Form, operands: list[Value]) -> Value:
    kind = form.kind or ("float" if any(v.kind == "float" for v in operands) else operands[-1].kind)
    grains = [v.grain for v in operands]
    exact = form.grain is not None and all(g is not None for g in grains)
    # the place where a rounded value jumps is rounded; what lies between jumps is exact if it is whole
    exact = exact or form.grain is _whole or kind != "float"
    grain = None if not exact else form.grain(*(g or 0 for g in grains)) if form.grain else 0
    return pool.add(
        form.text.format(*(v.text for v in operands)), operands, kind=kind,
        size=form.size(*(max(v.size, 0.0) for v in operands)) if kind != "bool" else 1.0,
        grain=grain if kind == "float" else 0, half=half_of(operands) if kind == "float" else "",
    )  # fmt: skip


def cast(draw: Drawn, pool: Pool) -> Value | None:
    """A cast, or a constant of another value's dtype."""
    value = pick(draw, [v for v in pool.values if not v.weak])
    assert value is not None
    if draw.rarely(6):
        text, number = draw.one(FILLS)
        facts = {"kind": value.kind, "size": number, "grain": 0, "half": value.half}
        return pool.add(text.format(value.text), [value], **facts) if value.kind != "bool" else None
    text, kind, half = draw.one(CASTS)
    whole = kind != "float"
    if whole and value.kind == "float" and not value.may_jump:
        return None
    if value.size > {".to(torch.int8)": 100, ".short()": 30000}.get(text, math.inf):
        return None
    size = 1.0 if kind == "bool" else value.size
    grain = 0 if whole else value.grain
    return pool.add(value.text + text, [value], kind=kind, size=size, grain=grain, half=half)
