"""The kernels made for Hopper, insisted on: each shape against float64, and what only they do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_case import make_case

from benchmarks import workers
from flexmod import AuxRequest, create_block_mask, errors, flex_attention, mods
from flexmod.codegen import compiler
from gpu.hopper_cases import CASES, HopperCase, measure

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By case, what went wrong. All selected cases run at once, in processes that compile side by side."""
    groups: dict[Any, list[HopperCase]] = {}
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, HopperCase):
            groups.setdefault(case.kernels, []).append(case)
    ordered = sorted(groups.values(), key=len, reverse=True)
    count = min(14, os.cpu_count() or 1)
    found = {}
    for outcome in workers.run(measure, ordered, workers=count, case_seconds=90, total_seconds=400):
        found[str(outcome.case)] = [outcome.error] if outcome.error else outcome.value
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "hopper.json").write_text(json.dumps(found, indent=1))
    return found


@ON_HOPPER
@pytest.mark.alone
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error(case: HopperCase, outcomes: dict[str, Any]) -> None:
    assert outcomes[str(case)] == []


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def attend(length: int = 2048, **options: Any) -> list[torch.Tensor]:
    case = make_case(batch=2, heads=4, q_len=length, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    leaves = [x.requires_grad_() for x in case.inputs]
    mask = create_block_mask(causal, None, None, length, length, device=DEVICE)
    out, lse = flex_attention(*leaves, block_mask=mask, return_lse=True, kernel_options=options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, case.grad_out)]


@ON_HOPPER
def test_only_dq_depends_on_the_order_of_programs() -> None:
    runs = [attend(TEMPLATE="hopper") for _ in range(4)]
    for number in (0, 1, 3, 4):
        assert all(torch.equal(run[number], runs[0][number]) for run in runs)
    for run in runs:
        torch.testing.assert_close(run[2], runs[0][2], rtol=0.02, atol=1e-3)


def test_deterministic_runs_agree_bit_for_bit() -> None:
    first, second = (attend(deterministic=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(map(torch.equal, attend(), first))
    finally:
        torch.use_deterministic_algorithms(before)


@ON_HOPPER
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_a_tensor_that_the_tma_unit_cannot_address(way: str) -> None:
    """The portable template takes it, and the option that insists says why."""
    packed = torch.randn(1, 2, 300, 3 * 64 + 1, device=DEVICE, dtype=torch.float16)
    q, k, v = (packed[..., 64 * i : 64 * i + 64].requires_grad_() for i in range(3))
    flex_attention(q, k, v).sum().backward()
    with pytest.raises(errors.TemplateError, match="query's rows, heads or storage are not at"):
        flex_attention(q, k, v, kernel_options={f"{way}_TEMPLATE": "hopper"}).sum().backward()


@ON_HOPPER
def test_in_a_cuda_graph() -> None:
    """A step of training is captured and replayed with other inputs."""
    case = make_case(heads=2, q_len=300, head_dim=64, dtype=torch.float16, device=DEVICE)
    leaves = [x.requires_grad_() for x in case.inputs]
    options = {"TEMPLATE": "hopper"}

    def step() -> list[torch.Tensor]:
        out = flex_attention(*leaves, kernel_options=options)
        return [out, *torch.autograd.grad(out, leaves, case.grad_out)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    for replayed, plain in zip(captured, step(), strict=True):
        torch.testing.assert_close(replayed, plain, rtol=2e-3, atol=2e-3)


@ON_HOPPER
@pytest.mark.parametrize("cap", [3.0, 50.0, 1000.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("template", ["hopper", "portable"])
def test_largest_scores_of_a_bounded_score(
    cap: float, masked: bool, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that takes no maximum takes one where it is asked for."""
    monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())  # so that the cap is a constant
    case = make_case(heads=2, q_len=300, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    mask = create_block_mask(causal, None, None, 300, 300, device=DEVICE) if masked else None
    _, aux = flex_attention(
        *case.inputs, mods.softcap(cap), mask, return_aux=AuxRequest(lse=True, max_scores=True),
        kernel_options={"TEMPLATE": template},
    )  # fmt: skip
    scores = cap * torch.tanh(case.q.double() @ case.k.double().mT * case.scale / cap)
    if masked:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    error = max(1e-4, 1e-6 * cap)  # that of tanh is near 1e-6
    torch.testing.assert_close(aux.max_scores.double(), scores.amax(-1), rtol=1e-4, atol=error)
    torch.testing.assert_close(aux.lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=error)


@ON_HOPPER
def test_a_masked_key_that_is_no_number_spoils_nobody() -> None:
    """The soft-cap takes neighbours in a row together."""
    case = make_case(heads=2, q_len=300, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    even = create_block_mask(lambda b, h, q, k: k % 2 == 0, None, None, 300, 300, device=DEVICE)
    q, k, v = case.inputs
    expected = flex_attention(q, k, v, mods.softcap(3.0), even, kernel_options={"TEMPLATE": "hopper"})
    k[:, :, 1::2] = torch.nan
    found = flex_attention(q, k, v, mods.softcap(3.0), even, kernel_options={"TEMPLATE": "hopper"})
    assert torch.equal(found, expected)


@ON_HOPPER
def test_a_query_that_is_no_number_spoils_no_other() -> None:
    case = make_case(heads=2, q_len=300, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = case.inputs
    expected = flex_attention(q, k, v, mods.softcap(3.0), kernel_options={"TEMPLATE": "hopper"})
    q[:, :, ::4] = torch.nan
    found = flex_attention(q, k, v, mods.softcap(3.0), kernel_options={"TEMPLATE": "hopper"})
    assert found[:, :, ::4].isnan().all()
    expected[:, :, ::4] = torch.nan
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
