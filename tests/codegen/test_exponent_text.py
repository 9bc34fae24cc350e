"""Exponents as device functions, run in the interpreter or compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mod_kernel import run_exponent

from flexmod import mods
from flexmod.codegen import device_functions
from flexmod.codegen.compiler import lower
from flexmod.codegen.spec import KernelSpec, min_fixed_max
from flexmod.codegen.term_text import write_exponent
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import Graph
from flexmod.ir.ops import LOG2_E
from flexmod.ir.trace import trace

BF16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
EXTENTS = (2, 3, 20, 24)
generator = torch.Generator().manual_seed(0)
slopes, of_row, of_column = (torch.randn(n, generator=generator) for n in (3, 64, 64))
table = torch.randn(3, 128, generator=generator)

MODS = {
    "alibi": mods.alibi(slopes),
    "softcap": mods.softcap(16.0),
    "relative": mods.relative_position(),
    "temperature": lambda s, b, h, q, k: s * slopes[h] / 3,
    "row and column": lambda s, b, h, q, k: 0.5 * (s + of_row[q] - of_column[k]),
    "table": lambda s, b, h, q, k: s + table[h, q - k + 64],
    "table, row, steps": lambda s, b, h, q, k: s + table[h, q - k + 64] + of_row[q] - 3 * k,
    "capped sum": lambda s, b, h, q, k: 30 * torch.tanh((s + slopes[h] * (q - k)) / 30) + q,
    "learned cap": lambda s, b, h, q, k: slopes[h] * torch.tanh(s / slopes[h]),
    "large cap": lambda s, b, h, q, k: 1e8 * torch.tanh(s / 1e8),
    "gate": lambda s, b, h, q, k: torch.sigmoid(s) * 3 + torch.tanh(of_row[q]),
    "no score": lambda s, b, h, q, k: q * 1.5,
    "a number": lambda s, b, h, q, k: 0.5,
}


def lowered(score_mod: Any) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    traced = trace(score_mod, "score")
    graph = lower(traced.graph, (2, 3, 64, 64), split=False).graph
    assert graph is not None
    return graph, traced.tensors


@pytest.mark.parametrize("name", MODS)
def test_the_text_says_the_score(name: str) -> None:
    graph, tensors = lowered(MODS[name])
    batch, heads, length, keys = EXTENTS
    product, scale, start = torch.randn(EXTENTS, generator=generator) * 40, 0.3, 16
    found = run_exponent(graph, tensors, EXTENTS, product, scale, start)
    (expected,) = evaluate(
        graph, tensors, score=product.double() * scale, real=torch.float64,
        b=torch.arange(batch)[:, None, None, None], h=torch.arange(heads)[:, None, None],
        q_idx=torch.arange(length)[:, None], kv_idx=start + torch.arange(keys),
    )  # fmt: skip
    expected = expected.expand(EXTENTS) * LOG2_E
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-6, atol=2e-5)


def test_the_text_of_a_softcap() -> None:
    text = write_exponent(lowered(mods.softcap(16.0))[0])
    assert text.program == "mul_bh_of_score = score_exponent_program(b, h, scale)"
    assert (text.shift, text.in_base_2, text.bounds) == ("tile", True, (-16.0, 16.0))
    assert "return logistic(score * mul_bh) * -46.16624130844683, 23.083120654223414" in text.text


def test_the_text_of_alibi() -> None:
    text = write_exponent(lowered(mods.alibi(slopes))[0])
    assert text.column == "mul_kv_of_score = score_exponent_column(b, h, kv_idx, offset, table_bh_of_score)"
    assert (text.shift, text.in_base_2, text.steep) == ("row", False, "(gl.abs(table_bh_of_score) > 8.0)")
    assert "return score * scale + mul_kv, (start.to(tl.float32) - cast_q) * table_bh" in text.text
    assert text.as_written is not None and "table_bh_1 * (" in text.as_written.text
    assert text.small is False and write_exponent(lowered(mods.softcap(16.0))[0]).small


def test_a_capture_may_have_the_name_of_what_a_kernel_gives() -> None:
    scale, offset, start = slopes, of_row, of_column
    score_mod = lambda s, b, h, q, k: torch.tanh(s * scale[h] + offset[q] + start[k]) + (q - k)  # noqa: E731
    graph, tensors = lowered(score_mod)
    text = write_exponent(graph)
    names = {p.name for p in text.parameters if p.kind == "pointer"}
    assert names == {"scale_1_of_score", "offset_1_of_score", "start_1_of_score"}
    run_exponent(graph, tensors, EXTENTS, torch.ones(EXTENTS), 1.0, 0)
    plain = write_exponent(lowered(lambda s, b, h, q, k: s * s + start[k] * s)[0])
    assert "start_of_score" in plain.column and "start_n" not in plain.column + plain.call


# Peaks and functions of targets


@pytest.mark.parametrize(
    ("dtype", "bounds", "peak"),
    [
        (BF16, (-20.0, 20.0), 20.0 * LOG2_E - 50.0),  # the largest weight is 2^50
        (BF16, (-50.0, 50.0), 50.0 * LOG2_E - 50.0),
        (BF16, (-60.0, 60.0), None),
        (BF16, (1000.0, 1020.0), 1020.0 * LOG2_E - 50.0),
        (BF16, (1e9, 1e9 + 64), None),  # a peak has too few digits
        (BF16, (-1e9, -1e9), None),
        (BF16, (-float("inf"), 20.0), None),
        (BF16, (0.0, float("inf")), None),
        (BF16, (-float("inf"), -float("inf")), None),
        (BF16, (float("inf"), float("inf")), None),
        (HALF, (-2.0, 2.0), None),
        (SINGLE, (-2.0, 2.0), None),
    ],
)
def test_a_fixed_peak_leaves_weights_in_range(dtype: Any, bounds: Any, peak: float | None) -> None:
    found = min_fixed_max(KernelSpec(dtype, dtype, dtype, 64, 64), bounds)
    assert found == (peak if peak is None else pytest.approx(peak))
    if found is not None:
        assert bounds[0] * LOG2_E - found >= -100.0 - 1e-9
        assert bounds[1] * LOG2_E - found <= 50.0


def test_a_target_has_functions_of_its_own() -> None:
    calls = "logistic(x) + tanh(x)"
    for target, count in (("", 0), ("nvidia", 1), ("hopper", 2)):
        assert device_functions.used_by(calls, target=target).count("inline_asm") == count
    assert device_functions.in_pairs("1 + logistic(x)", "hopper")
    assert not device_functions.in_pairs("tanh(x)", "hopper")
    assert not device_functions.in_pairs("logistic(x)", "nvidia")


def test_a_family_of_chips_has_functions_of_its_own() -> None:
    call = "tanh_approximate(x)"
    for target, own in (("", False), ("nvidia", True), ("hopper", True)):
        text = device_functions.used_by(call, target=target)
        assert ("tanh.approx.f32" in text, "def tanh(x)" in text) == (own, not own)
    assert "series" in device_functions.used_by(call, single=True)  # for float32 the plain one is exact


def test_approximate_tanh_stays_one() -> None:
    """Of a score's tanh the forward for Hopper makes `logistic`; this one is cheaper as it is."""
    found = lower(trace(mods.softcap(20.0, approximate=True), "score").graph, EXTENTS, split=False)
    text = found.exponent_text(positive_scale=True)
    assert text is not None and text.bounds == (-20.0, 20.0)
    assert "tanh_approximate(" in text.text and "logistic" not in text.text
