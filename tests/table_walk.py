"""The table of operations over special values: every row that takes a dtype, in one kernel, on all pairs.

A kernel's values come from captured tensors, or from the score, where a row's text may be another. What torch
makes of the same values on the CPU is the truth; `TOLERANCE`, `DIFFERENCES` and `SIGN_OF_ZERO_LOST` say what
may differ from it. docs/operations.md says the same to users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from typing import Literal

import torch
from torch import Tensor

from flexmod.codegen import cache as modules
from flexmod.codegen import device_functions
from flexmod.codegen.triton_text import TritonWriter
from flexmod.ir.graph import Capture, Graph, GraphBuilder
from flexmod.ir.ops import HALF, OPS, Op
from flexmod.runtime.interpreter import interpreted

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Source = Literal["captured", "score", "score of a float32 kernel", "score on sm_90"]
SOURCES: tuple[Source, ...] = ("captured", "score", "score of a float32 kernel")

# row: (relative, absolute) errors of float32; exact where a row is missing
TOLERANCE = {
    "div": (2.5e-7, 0.0),
    "pow": (2e-5, 2e-38),
    "exp": (5e-6, 2e-38), "exp2": (1e-6, 2e-38), "expm1": (5e-6, 1e-38),
    "log": (1e-6, 3e-7), "log2": (1e-6, 3e-7), "log1p": (2e-6, 1e-38),
    "sqrt": (2e-7, 1e-22), "rsqrt": (4e-7, 0.0),
    "sin": (1e-6, 3e-7), "cos": (1e-6, 3e-7), "tan": (2e-5, 3e-7),
    "tanh": (0.0, 3e-7), "tanh_relative": (5e-7, 2e-38), "sigmoid": (5e-6, 2e-38), "logistic": (2e-6, 2e-38),
    "erf": (1e-6, 2e-7), "sinh": (1e-5, 2e-38), "cosh": (1e-5, 0.0), "erfc": (1e-5, 2e-38),
    "tanh_approximate": (0.0, 3e-7),
    "atan": (1e-6, 0.0), "atan2": (1e-6, 2e-38), "hypot": (1e-6, 0.0), "lgamma": (1e-5, 1e-5),
}  # fmt: skip
# the chip's own texts; the logistic stops at 2^-60
TOLERANCE_ON_SM_90 = {"tanh": (0.0, 5e-7), "logistic": (2e-6, 1e-18), "tanh_approximate": (2.0**-11, 1e-7)}
# what the compiler makes, of int32 alone
OF_INT32 = {"unsigned_lt", "unsigned_max"}
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # what lies at a tie may go either way

# Triton's -x is 0 - x; others meet 0 on their way to a result that is 0
SIGN_OF_ZERO_LOST = {"neg", "round", "floor_divide", "trunc_divide", "remainder", "fmod", "pow", "tanh",
                     "tanh_relative", "tanh_approximate", "atan2", "lgamma"}  # fmt: skip
# which of 0.0 and -0.0 is the smaller is the chip's; so is the sign of what is too small for it
SIGN_OF_ZERO_IS_A_CHIPS = SIGN_OF_ZERO_LOST | {"minimum", "maximum", "sin", "tan", "erf", "expm1", "log1p"}


@dataclass(frozen=True)
class Difference:
    """Where a kernel's result may be another than torch's on the CPU.

    `where` takes the arguments and torch's result.
    """

    rows: tuple[str, ...]
    reason: str
    where: Callable[[Tensor, Tensor, Tensor], Tensor]
    on_chips_alone: bool = False
    of_scores_alone: bool = False

    @property
    def place(self) -> str:
        """In words, for docs/operations.md."""
        return ("a GPU" if self.on_chips_alone else "everywhere") + ", of a score" * self.of_scores_alone

    def holds(self, row: Op, source: Source, on_chip: bool) -> bool:
        of_score = source != "captured" or not self.of_scores_alone
        return row.name in self.rows and of_score and (on_chip or not self.on_chips_alone)


def _whole(x: Tensor) -> bool:
    return not x.is_floating_point()


def _near_whole(x: Tensor) -> Tensor:
    return (x - x.round()).abs() <= 1e-6 * x.abs()


def _large(x: Tensor) -> Tensor:
    return x.double().abs() > 2.0**126


def _denormal(x: Tensor) -> Tensor:
    return (x != 0) & (x.double().abs() < torch.finfo(torch.float32).tiny)


def _nowhere(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bool)


DIFFERENCES = (
    Difference(
        ("pow",),
        "a result within 0.1 % of the largest number may be infinite",
        lambda a, b, y: (
            y.isfinite() & (y.abs() > 0.999 * torch.finfo(y.dtype).max)
            if y.is_floating_point()
            else _nowhere(a)
        ),
    ),
    Difference(
        ("sin", "cos", "tan"),
        "angles above 1e5",
        lambda a, b, y: a.float().abs() > 1e5,
        on_chips_alone=True,
    ),
    Difference(
        ("div", "trunc_divide"),
        "a divisor above 2^126",
        lambda a, b, y: _large(b),
        on_chips_alone=True,
        of_scores_alone=True,
    ),
    Difference(
        ("trunc_divide",),
        "a quotient within 1e-6 of a whole number",
        lambda a, b, y: _near_whole(a.double() / b.double()),
        on_chips_alone=True,
        of_scores_alone=True,
    ),
    Difference(
        (
            "div", "floor_divide", "trunc_divide", "pow", "exp", "exp2", "expm1", "log", "log2", "log1p",
            "sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "tanh_relative", "sigmoid",
            "logistic", "erf", "erfc", "atan", "atan2", "hypot", "lgamma", "floor", "ceil",
        ),
        "denormal numbers of float32, which may count as 0",
        lambda a, b, y: _denormal(a) | _denormal(b) | _denormal(y)
        if y.dtype == torch.float32
        else _nowhere(a),
        on_chips_alone=True,
    ),
)  # fmt: skip


def rows_of(dtype: torch.dtype, source: Source = "captured") -> list[Op]:
    """The rows that take this dtype; those with a text of the chip's own."""
    rows = [row for row in OPS.values() if dtype == torch.int32 or row.name not in OF_INT32]
    rows = [row for row in rows if row.refused(_arguments(row, dtype), _result(row, dtype)) is None]
    return [row for row in rows if _has_chip_text(row)] if source == "score on sm_90" else rows


def _has_chip_text(row: Op) -> bool:
    texts = [row.triton] if isinstance(row.triton, str) else row.triton.values()
    return device_functions.used_by(*texts, target="hopper") != device_functions.used_by(*texts)


def _arguments(row: Op, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (torch.bool, dtype, dtype) if row.name == "where" else (dtype,) * row.arity


def _result(row: Op, dtype: torch.dtype) -> torch.dtype:
    return row.dtype(*_arguments(row, dtype))


@cache
def special_values(dtype: torch.dtype) -> Tensor:
    """Zeros, ones, limits, denormals, infinities, no number, and what lies about the steps of functions."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        facts = torch.finfo(dtype)
        ends = [facts.smallest_normal, facts.smallest_normal * facts.eps, facts.smallest_normal / 2,
                facts.max, facts.eps, 1 + facts.eps, 1 - facts.eps / 2, inf]  # fmt: skip
        known = [1e-20, 1e-8, 1e-5, 0.01, 0.05, 5.0, 20.0, 40.0, 89.2,
                 0.1, 0.25, 0.5, 0.625, 1.0, 1.5, 2.0, 2.5, 3.0, 7.0, 10.0, 31.0, 49.0, 88.6, 88.8, 104.0,
                 127.9, 150.0, 710.0, 1e-6, 1e-3, 0.99, 2.0**24, 2.0**31, 1e-30,
                 1e30]  # fmt: skip
        size = torch.tensor([0.0, *ends, *known], dtype=torch.float64).to(dtype)
        bits = torch.cat([size, -size, torch.tensor([nan], dtype=dtype)]).view(BITS[dtype.itemsize])
        return bits.unique().view(dtype)  # 0.0 and -0.0 are two
    limits = torch.iinfo(dtype)
    known = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 255, 46340, 46341, 2**31 - 1, 2**31]
    ends = [limits.min, limits.min + 1, limits.max - 1, limits.max]
    numbers = {n for k in known for n in (k, -k) if limits.min <= n <= limits.max}
    return torch.tensor(sorted(numbers.union(ends)), dtype=dtype)


def graph_of(row: Op, dtype: torch.dtype, source: Source) -> Graph:
    """The operation on x[q_idx], or the score, and y[kv_idx]."""
    builder = GraphBuilder()
    q_idx, kv_idx = builder.input("q_idx", torch.int32), builder.input("kv_idx", torch.int32)
    captured = builder.node("load", (q_idx,), dtype, 0)
    x = captured if source == "captured" else builder.input("score", torch.float32)
    y = builder.node("load", (kv_idx,), dtype, 1)
    condition = builder.node("gt", (q_idx, kv_idx), torch.bool)
    arguments = (condition, x, y) if row.name == "where" else (x, y)[: row.arity]
    result = builder.node(row.name, arguments, _result(row, dtype))
    return Graph("score", (result,), (Capture("x", dtype, 1), Capture("y", dtype, 1)))


def source_of(dtype: torch.dtype, source: Source) -> str:
    """A module with one kernel, `walk`, that stores what each row makes of x[q_idx] and y[kv_idx]."""
    rows = rows_of(dtype, source)
    mods = {row.name: TritonWriter(graph_of(row, dtype, source), f"op_{row.name}").write() for row in rows}
    texts = "\n\n".join(mod.text for mod in mods.values())
    target = "hopper" if source == "score on sm_90" else ""
    known = device_functions.used_by(texts, single=source == "score of a float32 kernel", target=target)
    lines = [
        line
        for name, mod in mods.items()
        for line in (mod.row, mod.column, f"tl.store(OUT_{name} + at, {mod.call}, mask=inside)")
        if line
    ]
    body = "\n    ".join(lines)
    outs = ", ".join(f"OUT_{name}" for name in mods)
    return f"""
import triton
import triton.language as tl


{known}

{texts}

@triton.jit
def walk({outs}, SCORE, x, y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    b, h = 0, 0
    x_of_score, x_size0_of_score, x_stride0_of_score = x, M, 1
    y_of_score, y_size0_of_score, y_stride0_of_score = y, N, 1
    q_idx = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    kv_idx = tl.arange(0, BLOCK_N)[None, :]
    inside = (q_idx < M) & (kv_idx < N)
    at = q_idx * N + kv_idx
    score = tl.load(SCORE + at, mask=inside, other=0.0)
    {body}
"""


@cache
def results(dtype: torch.dtype, source: Source, device: torch.device) -> dict[str, Tensor]:
    """By row, [values, values]: x along the first, y along the second. Halves come as float32."""
    values = special_values(dtype).to(device)
    size = len(values)
    outs = {}
    for row in rows_of(dtype, source):
        result = _result(row, dtype)
        held = torch.float32 if result in HALF else result
        outs[row.name] = torch.empty(size, size, dtype=held, device=device)
    module = modules.load(source_of(dtype, source), "table_walk")
    kernel = (module if device.type == "cuda" else interpreted(module)).walk
    score = values[:, None].expand(size, size).contiguous() if source != "captured" else values
    width = 1 << (size - 1).bit_length()
    height = width if device.type == "cpu" else 4  # a thread of a chip holds few
    kernel[(-(-size // height),)](*outs.values(), score, values, values, size, size, height, width)
    return {name: out.cpu() for name, out in outs.items()}


def truth(row: Op, dtype: torch.dtype) -> Tensor:
    """What torch says for all pairs; of whole numbers divided by 0, what it says of 1.

    Halves are computed in float32 and rounded, as torch's own functions do it; of whole quotients torch
    rounds the quotient first.
    """
    a, b = pairs(dtype)
    wide = [x.float() if dtype in HALF else x for x in (a, b)]
    places = torch.arange(len(a))
    arguments = (places[:, None] > places, *wide) if row.name == "where" else wide[: row.arity]
    expected = row.torch(*arguments)
    if expected.is_floating_point():
        expected = expected.to(_result(row, dtype))
        expected = expected.float() if dtype in HALF else expected
    return expected


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = special_values(dtype)
    return values[:, None].repeat(1, len(values)), values.repeat(len(values), 1)


def held_to(row: Op, dtype: torch.dtype, source: Source, on_chip: bool) -> tuple[Tensor, Tensor]:
    """What a kernel is held to, and where: all but what `DIFFERENCES` lists."""
    expected = truth(row, dtype)
    kept = torch.ones_like(expected, dtype=torch.bool)
    for difference in DIFFERENCES:
        if difference.holds(row, source, on_chip):
            kept = kept & ~difference.where(*pairs(dtype), expected)
    return expected, kept


def check(row: Op, dtype: torch.dtype, source: Source, device: torch.device) -> None:
    """A row's results against torch's; the sign of a zero too."""
    found, on_chip = results(dtype, source, device)[row.name], device.type == "cuda"
    expected, kept = held_to(row, dtype, source, on_chip)
    assert found.dtype == expected.dtype
    good = found == expected
    if found.is_floating_point():
        known = TOLERANCE | (TOLERANCE_ON_SM_90 if source == "score on sm_90" else {})
        relative, absolute = known.get(row.name, (0.0, 0.0))
        finer = 2e-8 if found.dtype == torch.float64 else 1.0
        relative = max(relative * finer, ROUNDING.get(dtype, 0.0) if relative + absolute else 0.0)
        near = (found - expected).abs() <= absolute * finer + relative * expected.abs()
        good = good | (near & found.isfinite()) | (found.isnan() & expected.isnan())
        if row.name not in (SIGN_OF_ZERO_IS_A_CHIPS if on_chip else SIGN_OF_ZERO_LOST):
            good &= (expected != 0) | (found != 0) | (found.signbit() == expected.signbit())
    wrong = (~good & kept).nonzero().tolist()
    a, b = pairs(dtype)
    samples = [f"{a[p]!s} {b[p]!s}: {found[p]!s}, not {expected[p]!s}" for p in map(tuple, wrong[:5])]
    assert not wrong, f"{row.name} {dtype} {source}: {len(wrong)} of {int(kept.sum())}: {'; '.join(samples)}"
