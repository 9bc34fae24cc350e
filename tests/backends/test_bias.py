"""Biases that score mods add to the score, as flash attention on the CPU gets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_case import make_case, problem_of
from torch import Tensor

from backends.test_cpu import block_mask, causal, check, late
from flexmod.backends import in_torch
from flexmod.backends.bias import Bias
from flexmod.runtime.private_torch import flash_on_cpu

pytestmark = pytest.mark.skipif(flash_on_cpu() is None, reason="this torch has no flash attention on the CPU")


@pytest.mark.parametrize("mask_mod", [causal, late, None])
@pytest.mark.parametrize(
    ("dtype", "far"),
    [(torch.float32, 199), (torch.bfloat16, 199), (torch.float32, 59), (torch.float64, 199)],
    ids=str,
)
def test_negligible_weights_are_left_out(
    dtype: torch.dtype, far: int, mask_mod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Denormal ones take Intel's processors a hundred times the time, in float32, as of half precision."""
    biases: list[Tensor] = []

    def watch(real: Any) -> Any:
        def seen(*given: Any) -> Tensor | None:
            found: Tensor | None = real(*given)
            biases.extend([] if found is None else [found])
            return found

        return seen

    for name in ("of", "from_last_row"):
        monkeypatch.setattr(Bias, name, watch(getattr(Bias, name)))
    case = make_case(dtype=dtype, heads=2, kv_heads=2, q_len=200, kv_len=200, head_dim=4)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 1.0 * (q_idx - kv_idx).abs().clamp(max=far)

    check(case, mod, None if mask_mod is None else block_mask(case, mask_mod))
    bound = case.scale * float(case.q.float().norm(dim=-1).max() * case.k.float().norm(dim=-1).max())
    least = -far if dtype == torch.float64 or far < 60 else -46 - 2 * bound
    assert bound < 20
    assert least <= min(float(x[x.isfinite()].min()) for x in biases) < least + 1


def test_a_bias_that_is_not_a_number() -> None:
    """It is not left out, as a small number is."""
    case = make_case(dtype=torch.float32, heads=1, kv_heads=1, q_len=100, kv_len=100)
    table = torch.linspace(0.0, -200.0, 100)
    table[40] = torch.nan
    problem = problem_of(case, lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    assert bool(in_torch.forward(problem, *case.inputs, want_max=False).out.isnan().all())


def test_a_float_of_a_far_position_has_no_line() -> None:
    """float32 rounds the position, so the bias changes along a diagonal."""
    case = make_case(dtype=torch.float32, heads=1, kv_heads=1, q_len=200, kv_len=200)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + 0.1 * ((q_idx + 2**30).float() - kv_idx.float() - 2.0**30)

    given = (torch.zeros(1), torch.tensor(0), torch.tensor(0), torch.arange(200)[:, None], torch.arange(200))
    scores = case.q[0, 0].double() @ case.k[0, 0].double().T * case.scale + mod(*given)
    expected = scores.softmax(-1) @ case.v[0, 0].double()
    out = in_torch.forward(problem_of(case, mod), *case.inputs, want_max=False).out[0, 0]
    assert float((out - expected).abs().max()) < 1e-5
