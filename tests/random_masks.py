"""Random mask graphs from the op table, for tests that hold a proof about masks against brute force.

Numbers and tables are full of infinities, zeros of both signs, denormals and nan.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from flexmod import errors
from flexmod.ir.graph import Capture, Graph
from flexmod.ir.ops import OPS, Op
from flexmod.ir.proxy import Proxy, Tracer
from flexmod.ir.trace import Traced
from flexmod.ir.vectors import indexed

CPU = torch.device("cpu")
CAST_TO = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
           torch.bfloat16, torch.float32, torch.float64)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 5, 7, -1, -4, 16, 100, 40000, 2**31 - 1, -(2**31), 0.5, 1.5, -2.25, 3e9, True, False,
           0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3e38, 1e300)  # fmt: skip
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3.4e38, -3.4e38, 65504.0, 1.0, -1.0)
# what a mask is likely to be made of is drawn more often
LIKELY = ("add", "sub", "mul", "floor_divide", "remainder", "abs", "minimum", "maximum", "where", "eq", "lt",
          "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_not")  # fmt: skip
NAMED = sorted(name for name, row in OPS.items() if row.torch_names)
SIZE = 12


def tables() -> list[torch.Tensor]:
    """What masks capture here: values near 0, ascending ones, far ones, no numbers; of ranks 0 to 3."""
    random = torch.Generator().manual_seed(3)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    special = torch.randn(SIZE, generator=random) * 5
    special[3], special[5], special[8] = torch.nan, torch.inf, -torch.inf
    padded = torch.tensor([0.0] * 5 + [math.inf] * (SIZE - 5))
    return [
        drawn(-4, 5, SIZE).int(), drawn(0, 4, SIZE).sort().values, drawn(0, 2, SIZE).bool(),
        drawn(-(2**31), 2**31, SIZE).int(), drawn(-(2**62), 2**62, SIZE) * 2,
        drawn(-128, 128, SIZE).to(torch.int8),
        torch.randn(SIZE, generator=random), special, torch.randn(SIZE, generator=random).half(),
        padded, padded.half(), -padded.bfloat16(), torch.tensor(EDGES), torch.tensor(EDGES).half(),
        drawn(-3, 9, 3, SIZE).int(), drawn(0, 12, SIZE, 2), drawn(0, 2, SIZE, SIZE).bool(),
        drawn(0, 9, 2, 3, SIZE).short(), torch.tensor(5, dtype=torch.int32),
    ]  # fmt: skip


TABLES = tables()


def _of(pool: list[Any]) -> Any:
    """One of the pool, by index: Hypothesis would hash the proxies, and each refusal writes a long error."""
    return st.sampled_from(range(len(pool))).map(pool.__getitem__)


@st.composite
def random_masks(draw: Any, steps: int = 9) -> Traced:
    """A mask of a few operations on positions, numbers and captured tensors, chosen at random."""
    tracer = Tracer(None, CPU)
    pool: list[Any] = [tracer.position(name) for name in ("q_idx", "kv_idx", "b", "h")]
    pool.append(pool[0] - pool[1])
    for _ in range(draw(st.integers(2, steps))):
        found = _step(draw, tracer, pool)
        if found is not None:
            pool.append(found)
    truths = [p for p in pool if isinstance(p, Proxy) and p.dtype == torch.bool]
    mask = draw(_of(truths[-3:])) if truths else pool[-1] > draw(st.integers(-3, 9))
    mask = mask & draw(_of(truths)) if len(truths) > 1 and draw(st.booleans()) else mask
    names = tuple(Capture(f"table{i}", t.dtype, t.dim()) for i, t in enumerate(tracer.tensors))
    return Traced(Graph("mask", (mask._node,), names), tuple(tracer.tensors))


def _step(draw: Any, tracer: Tracer, pool: list[Any]) -> Any:
    kind = draw(st.sampled_from(["operation"] * 7 + ["load"] * 2 + ["cast"]))
    if kind == "load":
        table = draw(st.sampled_from(TABLES))
        index = tuple(_index(draw, tracer, pool, size) for size in table.shape)
        return indexed(tracer, table, index if index else ())
    if kind == "cast":
        return tracer.cast(_recent(draw, pool), draw(st.sampled_from(CAST_TO)))
    row = OPS[draw(st.one_of(st.sampled_from(LIKELY), st.sampled_from(NAMED)))]
    operands = [_recent(draw, pool)]
    operands += [_operand(draw, pool) for _ in range(row.arity - 1)]
    if row.arity == 2 and draw(st.booleans()):
        operands.reverse()
    return _applied(row, tracer, operands)


def _applied(row: Op, tracer: Tracer, operands: list[Any]) -> Any:
    if row.name == "where":
        operands[0] = operands[0] > 2 if isinstance(operands[0], Proxy) else operands[0] is True
    try:
        return tracer.apply(row.torch_names[0], operands)
    except errors.FlexmodError:
        return None


def _recent(draw: Any, pool: list[Any]) -> Any:
    return draw(st.one_of(_of(pool[-3:]), _of(pool)))


def _operand(draw: Any, pool: list[Any]) -> Any:
    return draw(st.one_of(_of(pool), _of(pool[:5]), st.sampled_from(NUMBERS)))


def _index(draw: Any, tracer: Tracer, pool: list[Any], size: int) -> Any:
    value = draw(st.one_of(_of(pool[:4]), _integers(pool)))
    bounded = torch.remainder(value.long(), size)
    return bounded - size if draw(st.integers(0, 5)) == 0 else bounded


def _integers(pool: list[Any]) -> Any:
    return _of([p for p in pool if p.dtype != torch.bool and not p.dtype.is_floating_point])
