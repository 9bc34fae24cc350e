"""Which statements of a mod are worth running once for a row or a column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexmod import tanh_approximate
from flexmod.codegen.compiler import lower
from flexmod.codegen.triton_text import write
from flexmod.ir.trace import trace

table = torch.randn(64)

FEW = {
    "sum": lambda kv_idx: kv_idx * 3 + 1,
    "power of two": lambda kv_idx: kv_idx // 128 + kv_idx % 32,
    "shift": lambda kv_idx: kv_idx >> 3,
    "exact quotient": lambda kv_idx: kv_idx / 8,
    "rounding": lambda kv_idx: torch.floor(kv_idx * 0.1),
}
MANY = {
    "load": lambda kv_idx: table[kv_idx],
    "division": lambda kv_idx: kv_idx // 49,
    "by a position": lambda kv_idx: 64 % (kv_idx + 1),
    "quotient": lambda kv_idx: kv_idx / 9,
    "float": lambda kv_idx: (kv_idx * 0.5) % 8,
    "power": lambda kv_idx: (kv_idx * 0.5) ** 1.5,
    "erfc": lambda kv_idx: torch.erfc(kv_idx * 0.1),
    "tanh": lambda kv_idx: torch.tanh(kv_idx * 0.1),
    "tanh_approximate": lambda kv_idx: tanh_approximate(kv_idx * 0.1),
}


@pytest.mark.parametrize("name", [*FEW, *MANY])
def test_what_a_column_needs(name: str) -> None:
    of_key = (FEW | MANY)[name]

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + of_key(kv_idx)

    graph = lower(trace(mod, "score").graph, (1, 1, 64, 64), split=False).graph
    assert graph is not None
    assert ("column" in write(graph).expensive) == (name in MANY)
