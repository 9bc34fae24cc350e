"""Large finite scores on a GPU: forward and backward, in each template, in calls that are repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from large_scores import COLUMNS, DIM, FACTORS, NAMES, ROWS, Call, faults, made
from torch import Tensor

import flexmod
from flexmod import AuxRequest, create_block_mask, flex_attention

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

OPTIONS: dict[str, dict[str, Any]] = {"portable": {"TEMPLATE": "portable"}, "auto": {}}
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
KERNELS = [(template, dtype) for template in OPTIONS for dtype in (HALF, BF16)]
KERNELS.append(("portable", SINGLE))  # no other template takes float32


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


@pytest.fixture(scope="module")
def mods() -> dict[str, Callable[..., Any]]:
    return made("cuda")


def results(
    call: Call, score_mod: Any, options: dict[str, Any], scale: float, mask: Any = None
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    out, found = flex_attention(
        *leaves, score_mod, mask, scale=scale, kernel_options=options,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    return [out, found.lse, found.max_scores, *torch.autograd.grad(out, leaves, call.grad_out)]


@pytest.mark.parametrize(("template", "dtype"), KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_of_a_mod(
    name: str, template: str, dtype: torch.dtype, mods: dict[str, Callable[..., Any]]
) -> None:
    call = Call(dtype, "cuda")
    truth = call.truth(mods[name], DIM**-0.5)
    for _ in range(2):
        found = results(call, mods[name], OPTIONS[template], DIM**-0.5)
        assert not faults(found, truth, dtype, FACTORS.get(name, 1.0))


@pytest.mark.parametrize("name", ["half a row", "rows of -1e+30", "a slope", "of pairs", "times a tensor"])
@pytest.mark.parametrize("template", OPTIONS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_scores_beside_a_mask(
    dtype: torch.dtype, template: str, name: str, mods: dict[str, Callable[..., Any]]
) -> None:
    call = Call(dtype, "cuda")
    mask = create_block_mask(causal, None, None, ROWS, COLUMNS, "cuda")
    truth = call.truth(mods[name], DIM**-0.5, causal)
    found = results(call, mods[name], OPTIONS[template], DIM**-0.5, mask)
    assert not faults(found, truth, dtype, FACTORS.get(name, 1.0))


@pytest.mark.parametrize("scale", [1e3, 1e9, 1e20, -1e9])
@pytest.mark.parametrize("template", OPTIONS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_scores_without_a_mod(dtype: torch.dtype, template: str, scale: float) -> None:
    call = Call(dtype, "cuda")
    found, truth = results(call, None, OPTIONS[template], scale), call.truth(None, scale)
    assert not faults([*found[:3], *truth[3:5], found[5]], truth, dtype)
    assert not any(x.isnan().any() for x in found)


@pytest.mark.parametrize("name", ["rows of -1e+09", "a slope", "added", "a large cap"])
def test_scores_of_a_handle(name: str, mods: dict[str, Callable[..., Any]]) -> None:
    """Three calls: the later ones are known, and what the forward keeps reaches their backward."""
    call, scale = Call(BF16, "cuda"), DIM**-0.5
    truth = call.truth(mods[name], scale)
    attend = flexmod.compile(score_mod=mods[name])
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        out = attend(*leaves)
        found = [out, *truth[1:3], *torch.autograd.grad(out, leaves, call.grad_out)]
        assert not faults(found, truth, BF16)
