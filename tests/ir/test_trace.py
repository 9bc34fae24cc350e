"""A traced mod says what the mod itself says of 0-d tensors."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexmod import errors
from flexmod.codegen.variant import variant
from flexmod.ir.evaluate import evaluate
from flexmod.ir.source import mod_kind
from flexmod.ir.trace import trace

EXTENTS = (2, 3, 5, 6)
GLOBAL_BIAS = torch.linspace(-1, 1, 6)


def grid() -> dict[str, Tensor]:
    names = ("b", "h", "q_idx", "kv_idx")
    return {
        name: torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, n) in enumerate(zip(names, EXTENTS, strict=True))
    }


def score_tile() -> Tensor:
    return torch.linspace(-3, 3, math.prod(EXTENTS)).view(EXTENTS)


def traced_values(mod: Callable[..., Any], kind: str) -> Tensor:
    traced = trace(mod, kind)
    score = score_tile() if kind == "score" else None
    (result,) = evaluate(traced.graph, traced.tensors, **grid(), score=score)
    return result.expand(EXTENTS)


def eager_values(mod: Callable[..., Any], kind: str) -> Tensor:
    """The mod called with 0-d tensors, once for each place."""
    score = score_tile()
    values = []
    for place in itertools.product(*map(range, EXTENTS)):
        arguments = [torch.tensor(p, dtype=torch.int32) for p in place]
        values.append(torch.as_tensor(mod(*([score[place]] if kind == "score" else []), *arguments)))
    return torch.stack(values).view(EXTENTS)


def check(mod: Callable[..., Any], kind: str) -> None:
    expected = eager_values(mod, kind)
    expected = expected if kind == "mask" else expected.float()
    torch.testing.assert_close(traced_values(mod, kind), expected, equal_nan=True)


# operators, functions and methods: x is the score, q and k positions

t = torch.tensor
FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "arithmetic": lambda x, q, k: (x + q - k * 2) / 3 + 2 * x - 1 + 7 / (q + 1),
    "floor division": lambda x, q, k: (q - k) // 2 + (q - 7) // 3 + x // 0.7 + 9 // (q + 1),
    "remainder": lambda x, q, k: (q - k) % 4 + x % 0.7 + 9 % (q + 2),
    "powers": lambda x, q, k: x**2 + q**3 + 2**q + abs(x) ** 0.5 + 2.0**x + torch.pow(2, x),
    "signs": lambda x, q, k: -x + +x * 2 + abs(q - k) + (-q).neg() + x.sign() + torch.sgn(x),
    "comparisons": lambda x, q, k: torch.where((q >= k) & (x < 1) | (q == 3) ^ (k != 2), x, q < 3),
    "comparisons, other side": lambda x, q, k: torch.where((2 <= q) & (3.5 > k) & (1 != k), x, 0),  # noqa: SIM300
    "bits": lambda x, q, k: (q & 3) + (k | 4) + (q ^ k) + (~q) + (7 & q) + (1 | q) + (2 ^ k),
    "bits of truths": lambda x, q, k: torch.where(~(q > k) & True | False, x, -x),
    "shifts": lambda x, q, k: (q << 2) + (100 >> k) + (1 << q) + (-q >> 1) + torch.bitwise_left_shift(q, k),
    "logic": lambda x, q, k: torch.where(
        torch.logical_and(q, k > 1) | torch.logical_xor(q, k) & torch.logical_not(q) & torch.logical_or(q, k),
        x, 1.0
    ),
    "minimum": lambda x, q, k: torch.minimum(q, k) + torch.maximum(x, x * 2) + torch.min(q, k) + q.max(k),
    "clamp": lambda x, q, k: torch.clamp(q - k, -2, 2) + x.clamp(max=1.0) + x.clip(-1, 1) + q.clamp(min=2),
    "exponentials": lambda x, q, k: torch.exp(x) + x.exp2() + torch.expm1(x) + torch.special.exp2(x),
    "logarithms": lambda x, q, k: (x.abs() + 1).log() + torch.log2(q + 1) + torch.log1p(q) + (k + 1).log10(),
    "roots": lambda x, q, k: torch.sqrt(q) + torch.rsqrt(k + 1) + x.abs().sqrt(),
    "angles": lambda x, q, k: torch.sin(x) + x.cos() + torch.tan(x * 0.1) + torch.sinh(x) + torch.cosh(x),
    "squashing": lambda x, q, k: x.tanh() + x.sigmoid() + x.erf() + F.sigmoid(x) + torch.special.expit(x),
    "activations": lambda x, q, k: (
        F.relu(x) + F.gelu(x) + F.silu(x) + F.gelu(x, approximate="tanh") + F.softplus(x)
    ),
    "rounding": lambda x, q, k: x.floor() + torch.ceil(x) + torch.round(x * 2) + x.trunc() + torch.fix(x),
    "rounding modes": lambda x, q, k: (
        torch.div(q - k, 2, rounding_mode="floor") + torch.div(x, 0.7, rounding_mode="trunc")
        + torch.div(q - k, 2, rounding_mode="trunc") + (q - k).div(2, rounding_mode=None)
    ),
    "fmod": lambda x, q, k: torch.remainder(q - k, 3) + torch.fmod(q - k, 3) + x.fmod(0.7),
    "tests": lambda x, q, k: torch.where(torch.isnan(x / 0 * 0) | torch.isinf(x / (q - q)), 1.0, x),
    "alpha": lambda x, q, k: torch.add(x, q, alpha=3) + torch.sub(x, k, alpha=2) + torch.rsub(x, 1.0),
    "alpha of other dtypes": lambda x, q, k: (
        torch.add(q, k.to(torch.int8), alpha=1000) + torch.rsub(k.to(torch.int8), q, alpha=1000)
        + torch.add(k.to(torch.int8), 100, alpha=100) + torch.sub(k.to(torch.int16), 7, alpha=9999)
    ),
    "alpha of bools": lambda x, q, k: (
        x + torch.add(q > k, k > q, alpha=2) * 1.5 + torch.add(q > k, True, alpha=False)
    ),
    "alpha beside other numbers": lambda x, q, k: (
        torch.rsub(x, np.float32(2), alpha=3) + torch.rsub(q, 0.5, alpha=2**40)
    ),
    "addcmul of other dtypes": lambda x, q, k: (
        torch.addcmul(q, q.to(torch.int8), k.to(torch.int8), value=300)
    ),
    "casts": lambda x, q, k: (
        q.float() / 3 + x.int() + x.long() + q.double() + k.half() * 0.3 + x.bfloat16() + (q - 1).bool()
        + k.short()
    ),
    "casts by name": lambda x, q, k: (
        q.to(torch.float16) + x.to(dtype=torch.int8) + x.type(torch.int64) + q.type_as(x) + k.to(x)
    ),
    "to the device": lambda x, q, k: (
        x.to(x.device) + q.to(q.device, torch.float32) + k.to("cpu", non_blocking=True)
    ),
    "constants": lambda x, q, k: (
        x * torch.tensor(0.5) + torch.tensor(3) * q + torch.tensor(0.1, dtype=torch.float64) + torch.ones(())
    ),
    "copies": lambda x, q, k: torch.as_tensor(q) + torch.clone(x) + x.contiguous(),
    "fills": lambda x, q, k: (
        torch.full_like(x, 2.5) + torch.zeros_like(q) + torch.ones_like(k, dtype=torch.float32)
        + torch.full_like(q, fill_value=7) + torch.full_like(q, 2.9)
    ),
    "new": lambda x, q, k: (
        x.new_ones(()) + q.new_zeros((), dtype=torch.float32) + k.new_full((), 3)
        + x.new_full(size=(), fill_value=2)
    ),
    "dtypes": lambda x, q, k: x.to(x.dtype) + (x.dtype == torch.float32) + (q.dtype == torch.int32) * 2,
    "facts": lambda x, q, k: x + x.dim() + len(x.shape) + x.ndim + (1 if x.is_floating_point() else 0),
    "facts by functions": lambda x, q, k: (
        x * x.numel() + torch.numel(q) + (3 if torch.is_floating_point(q) else 5) + k.nelement()
    ),
    "where of numbers": lambda x, q, k: torch.where(q > k, 1, 0) * 2**33 * 0.5 + torch.where(q > 2, 0.5, 1),
    "where by keyword": lambda x, q, k: torch.where(condition=q > k, input=x, other=-x),
    "where, a method": lambda x, q, k: x.where(q > k, 2.0),
    "truths add": lambda x, q, k: (q > 1) + (k > 1) + (q > k) * 3 + (q > 2) * (k > 2),
    "half types": lambda x, q, k: x.half() * 0.1 + x.bfloat16() * 3 + x.half() * q,
    "half and bfloat16": lambda x, q, k: x.half() + x.bfloat16() / 3,
    "rounding of half types": lambda x, q, k: (x.bfloat16() * 1.01 + 1).float() * 100,
    "small integers": lambda x, q, k: (q.to(torch.int8) * 100 + k.to(torch.uint8) * 200 + 300).float(),
    "small integers and numbers": lambda x, q, k: torch.where(q.to(torch.int8) + 127 > k, x, 2 * x),
    "numpy numbers": lambda x, q, k: (
        x * np.float32(0.5) + np.int64(3) * q + np.float64(0.1) * x + np.float32(2) * k + np.bool_(True)
    ),
    "Python's pow and abs": lambda x, q, k: pow(abs(x), 2) + abs(q - 3),
    "doubles": lambda x, q, k: (q.double() * 0.1 + 1e-12).float(),
    "float_power": lambda x, q, k: torch.float_power(q, 2) + torch.special.expm1(x),
    "masked_fill": lambda x, q, k: x.masked_fill(q > k, 0.25) + torch.masked_fill(x, q < k, 1.0),
    "masked_fill keeps the dtype": lambda x, q, k: (
        q.masked_fill(q > k, 2.7) + q.double().masked_fill(q > k, x) / 7
        + x.half().masked_fill(q > k, x * 1.01) + (q * 2**25 + 1).masked_fill(q > k, 0.5) % 2
    ),
    "limits of integers": lambda x, q, k: (
        F.threshold(q, 1, 2.7) + F.relu6(q * 3) / 7 + F.hardtanh(q - k, -1.5, 1.5) + F.threshold(x, 0.1, 2)
    ),
    "special": lambda x, q, k: torch.special.log1p(x.abs()) + torch.special.erf(x) + torch.lerp(x, -x, 0.3),
    "operands by keyword": lambda x, q, k: (
        torch.clamp_min(x, min=-1) + x.clamp_max(max=q) + x.lerp(weight=k, end=q * 0.5)
        + torch.addcmul(x, tensor1=x, tensor2=q, value=2) + x.addcdiv(tensor2=k + 1.0, tensor1=x)
        + torch.xlogy(x, other=q + 1) + torch.fmax(x, other=-x) + torch.copysign(x, other=q - k)
    ),
    "numpy numbers in formulas": lambda x, q, k: (
        torch.lerp(x, -x, np.float32(0.25)) + torch.xlogy(x, np.int64(3)) + F.softplus(x, np.float64(2))
        + torch.logaddexp(x, q * np.float32(0.5))
    ),
    "unary on truths": lambda x, q, k: torch.exp(q > 1) + torch.sigmoid(k > 2),
    "inline inf": lambda x, q, k: torch.where(q >= k, x, -float("inf")),
    "int and bool of constants": lambda x, q, k: x + int(torch.tensor(3)) + float(torch.tensor(0.5)),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(function: Callable[..., Any]) -> None:
    check(lambda score, b, h, q_idx, kv_idx: function(score, q_idx, kv_idx), "score")


class Colour(enum.IntEnum):
    RED = 2


def test_an_enum_is_its_number() -> None:
    graph = trace(lambda s, b, h, q, k: s + Colour.RED, "score").graph
    assert graph == trace(lambda s, b, h, q, k: s + 2, "score").graph


# captured tensors

docs = torch.tensor([0, 0, 1, 1, 2, 2])
table = torch.arange(24.0).view(2, 3, 4)
heads = torch.linspace(0, 1, 3)
image = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.uint8)
intervals = torch.tensor([[0, 3], [1, 4], [2, 6]], dtype=torch.int32)
CAPTURES: dict[str, Callable[..., Any]] = {
    "one dimension": lambda s, b, h, q, k: torch.where(docs[q] == docs[k], s, 0.0),
    "by two positions": lambda s, b, h, q, k: s + table[0].T.expand(4, 3)[q % 4, k % 3],
    "three dimensions": lambda s, b, h, q, k: s + table[b, h, q % 4],
    "positions and numbers": lambda s, b, h, q, k: s * table[1, h, -1] + table[b, -1, k % 4],
    "partial": lambda s, b, h, q, k: s + table[b][h][k % 4],
    "partial, kept": lambda s, b, h, q, k: (
        s * heads[h] + (lambda row: row[0] + row[1])(intervals[image[k].long()])
    ),
    "unpacked": lambda s, b, h, q, k: s + (lambda low, high: high - low)(*intervals[q % 3]),
    "ellipsis": lambda s, b, h, q, k: s + table[..., q % 4][b, h] + table[b, ..., 0][h] + table[b, h, ..., 1],
    "all of a dimension": lambda s, b, h, q, k: s + table[b, :, k % 4][h] + table[:, h][b][2],
    "negative": lambda s, b, h, q, k: s + heads[-1] + docs[q - 5] + table[-1, -2, -(k % 4) - 1],
    "index of an index": lambda s, b, h, q, k: s + heads[docs[docs[k]]],
    "0-d": lambda s, b, h, q, k: s * torch.tensor(0.3) + docs.sum(),
    "0-d index": lambda s, b, h, q, k: (
        s + heads[torch.tensor(1)] + heads[np.int64(2)] + docs[q.new_full((), 3)]
    ),
    "strides": lambda s, b, h, q, k: (
        s + table.transpose(0, 2)[k % 4, h, b] + docs.flip(0)[q] + heads.expand(5, 3)[q, h]
    ),
    "every second": lambda s, b, h, q, k: s + docs[::2][h] + docs[1:][q],
    "a parameter": lambda s, b, h, q, k: s + PARAMETER[h],
    "half types": lambda s, b, h, q, k: s + heads.half()[h] * 0.1 + heads.bfloat16()[h],
    "truths": lambda s, b, h, q, k: torch.where((docs > 0)[q], s, 1.0),
    "sums of captures": lambda s, b, h, q, k: s + heads.sum() + heads[1:].mean() * table[0, 0, 1],
    "a list of tensors": lambda s, b, h, q, k: s + [heads, heads * 2][1][h],
    "numbers of captures": lambda s, b, h, q, k: s + heads.shape[0] + docs.numel(),
}
PARAMETER = torch.nn.Parameter(torch.linspace(0, 1, 3))


def test_unpacking_makes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an iteration is none: from Python 3.12 on, an error that Python catches has a traceback,
    as one has that a mod catches."""
    monkeypatch.setattr(errors, "CaptureIndexError", None)
    check(CAPTURES["unpacked"], "score")
    check(lambda s, b, h, q, k: s + sum(row * 2 for row in intervals[q % 3]), "score")


@pytest.mark.parametrize("mod", CAPTURES.values(), ids=CAPTURES)
def test_captures(mod: Callable[..., Any]) -> None:
    with torch.no_grad():
        check(mod, "score")


def test_small_integers_index_as_integers() -> None:
    """uint8 would be a mask to torch; int8 it refuses."""
    for dtype in (torch.uint8, torch.int8, torch.int16):
        small = image.to(dtype)
        found = traced_values(lambda s, b, h, q, k, small=small: s * 0 + heads[small[k]], "score")
        torch.testing.assert_close(found, heads[image.long()].expand(EXTENTS))


def test_one_tensor_is_one_capture() -> None:
    traced = trace(lambda b, h, q, k: (docs[q] == docs[k]) & (docs[b] == 0), "mask")
    assert len(traced.tensors) == 1
    assert traced.tensors[0] is docs


@pytest.mark.parametrize("grad", [False, True])
def test_a_0d_tensor_is_captured(grad: bool) -> None:
    slope = torch.tensor(0.5, requires_grad=grad)
    traced = trace(lambda s, b, h, q, k: s * slope, "score")
    assert traced.tensors == (slope,)
    assert traced.graph.captures[0].rank == 0
    assert not traced.eager


# what can be a mod


def window_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, window: int = 2, offset: int = 0) -> Any:
    return abs(q_idx - kv_idx + offset) <= window


def positional(window: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx <= window


class Window:
    def __init__(self, window: int) -> None:
        self.window = window
        self.table = torch.arange(6)

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.table[q_idx] - kv_idx <= self.window

    __call__ = mask

    @staticmethod
    def static(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx > kv_idx

    @classmethod
    def of_class(cls, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx > kv_idx + 1


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor([0.0, 2.0, 4.0]))
        self.register_buffer("limit", torch.tensor([2, 4]))
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (self.bias[h] + self.inner.weight[b, h] > kv_idx) & (q_idx < self.limit[b])


def with_default(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: int = 2, keys: Tensor = docs) -> Any:
    return abs(q_idx - keys[kv_idx]) <= window


@functools.wraps(with_default)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return with_default(*args, **kwargs)


def closure(window: int) -> Callable[..., Any]:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= window

    return mask


def with_augmented_assignments(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    distance = q_idx - kv_idx
    distance *= 5
    distance //= 3
    near = distance >= 0
    near &= kv_idx < 6
    return near


MODS: dict[str, Callable[..., Any]] = {
    "lambda": lambda b, h, q, k: q >= k,
    "closure": closure(1),
    "defaults": with_default,
    "keyword-only": window_mask,
    "partial": functools.partial(window_mask, window=1),
    "partial of a partial": functools.partial(functools.partial(window_mask, window=1), offset=1),
    "partial, positional": functools.partial(positional, 1),
    "method": Window(1).mask,
    "static method": Window.static,
    "class method": Window.of_class,
    "callable": Window(2),
    "module": Module(),
    "wrapped": wrapped,
    "constant": lambda b, h, q, k: True,
    "augmented assignments": with_augmented_assignments,
    "conditions of Python": lambda b, h, q, k: (q >= k) if docs.numel() > 3 else (q < k),
}


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
def test_mods(mod: Callable[..., Any]) -> None:
    assert mod_kind(mod) == "mask"
    with torch.no_grad():
        check(mod, "mask")


class OfAnyArguments(torch.nn.Module):
    def forward(self, *args: Any) -> Any:
        return with_default(*args)

    def method(self, b: Any, *others: Any) -> Any:
        return with_default(b, *others)


ANY_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "function": lambda *args: with_default(*args),
    "partial": functools.partial(lambda window, *args: closure(window)(*args), 3),
    "module": OfAnyArguments(),
    "method": OfAnyArguments().method,
}


@pytest.mark.parametrize("mod", ANY_ARGUMENTS.values(), ids=ANY_ARGUMENTS)
def test_mods_that_pass_their_arguments_on(mod: Callable[..., Any]) -> None:
    """As a decorator's function does; torch's score_mod may do so too."""
    check(mod, "mask")
    check(lambda score, *positions: torch.where(mod(*positions), score, 0.0), "score")


class Tables(torch.nn.ModuleList):
    """A mod that Python takes for False, as any container without entries."""

    def forward(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + GLOBAL_BIAS[kv_idx]


@pytest.mark.parametrize("mod", [Tables(), torch.compile(Tables(), backend="eager")], ids=["empty", "graph"])
def test_the_truth_of_a_mod_is_not_asked_for(mod: Callable[..., Any]) -> None:
    """An object of torch.compile has a length, which raises."""
    check(mod, "score")
    assert variant(mod).score is not None


def test_score_mods_are_told_from_mask_mods() -> None:
    assert mod_kind(lambda s, b, h, q, k: s) == "score"
    assert mod_kind(functools.partial(lambda s, b, h, q, k, *, slope: s, slope=1)) == "score"


def test_proxies_say_the_device_they_are_told() -> None:
    seen = []
    trace(lambda b, h, q, k: (seen.append(q.device), q >= k)[1], "mask", torch.device("meta"))
    assert seen == [torch.device("meta")]


def test_a_mod_that_raises_raises() -> None:
    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(mod, "mask")


# names of captures


def names(mod: Callable[..., Any], kind: str = "mask") -> list[str]:
    return [c.name for c in trace(mod, kind).graph.captures]


def test_names() -> None:
    document, score = torch.arange(6), torch.arange(6)
    holder = Window(1)
    settings = {"lengths": torch.arange(6)}

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[q] == GLOBAL_BIAS[k]) & (score[q] > 0)

    assert names(mask) == ["document", "GLOBAL_BIAS", "score"]
    assert names(holder.mask) == ["table"]
    assert names(holder) == ["table"]
    assert names(lambda b, h, q, k: holder.table[q] > k) == ["table"]
    assert names(lambda b, h, q, k: settings["lengths"][b] > k) == ["lengths"]
    assert names(with_default) == ["keys"]
    assert names(Module()) == ["bias", "weight", "limit"]
    assert names(lambda b, h, q, k: (document * 2)[q] > k) == ["captured0"]
    assert names(functools.partial(lambda b, h, q, k, doc: doc[q] > k, doc=torch.arange(6))) == ["doc"]
    assert names(functools.partial(mask)) == ["document", "GLOBAL_BIAS", "score"]


def test_names_that_clash_or_are_no_names() -> None:
    def inner(doc: Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: doc[q] == doc[k]

    first, second = inner(torch.arange(6)), inner(torch.arange(6))
    assert names(lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)) == ["doc", "doc_1"]

    weird = {
        "class": torch.arange(6),
        "2nd": torch.arange(6),
        "a b\n; import os": torch.arange(6),
        "é": torch.arange(6),
    }

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q >= k
        for tensor in weird.values():
            result = result & (tensor[q] > k)
        return result

    assert names(mask) == ["captured_class", "captured_2nd", "a_b___import_os", "captured3"]


# other libraries' combinators


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return docs[q_idx] == docs[kv_idx]


@pytest.mark.parametrize("name", ["and_masks", "or_masks"])
def test_torchs_combinators(name: str) -> None:
    combine = getattr(pytest.importorskip("torch.nn.attention.flex_attention"), name)
    check(combine(causal, same_document, closure(1)), "mask")
    assert names(combine(causal, same_document)) == ["docs"]


@pytest.mark.parametrize("name", ["and_masks", "or_masks"])
def test_hugging_faces_combinators(name: str) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    check(getattr(masking, name)(causal, same_document), "mask")
    check(getattr(masking, name)(masking.sliding_window_overlay(2), masking.causal_mask_function), "mask")


def test_hugging_faces_masks() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    check(masking.sliding_window_causal_mask_function(2), "mask")
    check(masking.chunked_causal_mask_function(2, torch.tensor([0, 1])), "mask")
    packed = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    check(
        masking.and_masks(masking.causal_mask_function, masking.packed_sequence_mask_function(packed)), "mask"
    )
    check(masking.padding_mask_function(packed.bool()), "mask")


def test_torch_functions_of_keywords() -> None:
    q_idx, kv_idx = (x.expand(6, 6) for x in (torch.arange(6)[:, None], torch.arange(6)))
    zero = torch.zeros(6, 6, dtype=torch.int64)
    for mod in (
        lambda b, h, q, k: torch.zeros_like(input=q) <= k - 3,
        lambda b, h, q, k: torch.full_like(input=q, fill_value=3) <= k,
        lambda b, h, q, k: torch.as_tensor(data=q) >= k,
    ):
        (found,) = evaluate(trace(mod, "mask").graph, (), b=zero, h=zero, q_idx=q_idx, kv_idx=kv_idx)
        assert torch.equal(found.expand(6, 6), mod(zero, zero, q_idx, kv_idx))
