"""Gradients on the GPU: edges beside float64, memory, and what torch's autograd does around a call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference_case import Case, expected, make_case
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flexmod import BlockMask, create_block_mask, errors, flex_attention
from gpu.poison import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
# of the norm of the error over that of the truth
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-6}
MIB = 2**20
# bit for bit: the backward made for Hopper adds up dQ in any order
FIXED = {"kernel_options": {"deterministic": True}}


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def dead_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A whole block of queries, every third of the others, and all keys of one head but one see nothing."""
    return (q_idx % 3 != 1) & ((q_idx < 128) | (q_idx >= 256)) & ((h != 1) | (kv_idx == 0))


def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Empty, partial and full tiles."""
    return (q_idx + 30 >= kv_idx) & (q_idx - kv_idx <= 300)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def holes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """-inf where a mask could say it, and where the score decides."""
    far = torch.where((q_idx + kv_idx) % 3 == 0, -math.inf, score * 0.5)
    return torch.where(score > -1.0, far, -math.inf)


MODS: dict[str, tuple[Any, Any]] = {
    "dead rows": (capped, dead_rows),
    "band": (None, band),
    "infinite scores": (holes, None),
    "infinite scores in a band": (holes, band),
}
EDGES = [(1, 1), (1, 129), (127, 1), (129, 127), (255, 257), (385, 640), (513, 300)]


def mask_of(mask_mod: Any, rows: int, columns: int, heads: int | None = None) -> BlockMask | None:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, None, heads, rows, columns, device=DEVICE)


def close(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    """The same infinities, and near by the norm of the difference."""
    for number, (x, exact) in enumerate(zip(found, wanted, strict=True)):
        finite = exact.isfinite()
        assert x.shape == exact.shape
        assert torch.equal(x[~finite].double(), exact[~finite]), number
        error = (x.double() - exact)[finite].norm()
        # dq and dk of a single key are 0: the rounding of two terms near 1 is left
        size = exact[finite].norm() + 0.1 * math.sqrt(max(1, exact[finite].numel()))
        assert error <= TOLERANCE[dtype] * size, (number, float(error / size))


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), EDGES, ids=lambda n: str(n))
@pytest.mark.parametrize("name", MODS)
def test_edges(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Out, lse and the gradients through both, with shared keys, from memory that held NaN."""
    case = make_case(
        batch=2, kv_batch=1, heads=4, kv_heads=2, q_len=rows, kv_len=columns, head_dim=72, value_dim=40,
        dtype=dtype, device=DEVICE,
    )  # fmt: skip
    score_mod, mask_mod = MODS[name]
    mask = mask_of(mask_mod, rows, columns, 4)
    leaves = [x.requires_grad_() for x in case.inputs]
    statistics = torch.empty(2, 4, rows, device=DEVICE)
    poison(case.grad_out, statistics)
    out, lse = flex_attention(*leaves, score_mod, mask, enable_gqa=True, return_lse=True)
    grad_lse = torch.randn_like(lse)
    poison(*(x.detach() for x in leaves), statistics)
    found = out, lse, *torch.autograd.grad((out, lse), leaves, (case.grad_out, grad_lse))
    truth = expected(case, score_mod, mask, grad_lse)
    close(found, (truth.out, truth.lse, truth.dq, truth.dk, truth.dv), dtype)


@pytest.mark.parametrize("incoming", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_comes_in_for_a_dead_row_goes_no_further(dtype: torch.dtype, incoming: float) -> None:
    case = make_case(q_len=300, heads=2, dtype=dtype, device=DEVICE)
    leaves = [x.requires_grad_() for x in case.inputs]
    mask = mask_of(dead_rows, 300, 300, 2)
    gradients = []
    for value in (0.0, incoming):
        out, lse = flex_attention(*leaves, block_mask=mask, return_lse=True)
        grad_lse = torch.where(lse == -math.inf, value, 1.0)
        gradients.append(torch.autograd.grad((out, lse), leaves, (case.grad_out, grad_lse)))
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


# What is built on the lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    alive = total > -torch.inf
    share, other_share = (torch.where(alive, x - total, -torch.inf).exp() for x in (lse, other_lse))
    return share[..., None] * out + other_share[..., None] * other, total


@DTYPES
def test_two_halves_of_the_keys(dtype: torch.dtype) -> None:
    case = make_case(batch=2, heads=4, kv_heads=2, q_len=700, head_dim=64, dtype=dtype, device=DEVICE)
    q, k, v = leaves = [x.requires_grad_() for x in case.inputs]
    parts = []
    for first, last in ((0, 333), (333, 700)):
        mask = mask_of(lambda b, h, q_idx, kv_idx, at=first: q_idx >= kv_idx + at, 700, last - first)
        parts.append(
            flex_attention(
                q, k[:, :, first:last], v[:, :, first:last], capped, mask, enable_gqa=True, return_lse=True
            )
        )
    out, lse = merge(*parts[0], *parts[1])
    grad_lse = torch.randn_like(lse)
    found = out, lse, *torch.autograd.grad((out, lse), leaves, (case.grad_out.float(), grad_lse))
    truth = expected(case, capped, mask_of(causal, 700, 700), grad_lse)
    close(found, (truth.out, truth.lse, truth.dq, truth.dk, truth.dv), dtype)


# Memory


def large(length: int = 16384, **shape: Any) -> Case:
    return make_case(heads=2, q_len=length, head_dim=64, dtype=torch.float16, device=DEVICE, **shape)


def peak(work: Callable[[], Any]) -> int:
    """Bytes that `work` allocates beyond what was there, at most at a time, after a first run."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("score_mod", [None, capped])
def test_a_training_step_has_no_buffer_of_all_scores(score_mod: Any) -> None:
    """Scores would be 2 x 16384 x 16384: half a GiB as booleans of one head. An input has 4 MiB."""
    case = large()
    leaves = [x.requires_grad_() for x in case.inputs]
    mask = mask_of(causal, 16384, 16384)

    def step() -> Any:
        return torch.autograd.grad(flex_attention(*leaves, score_mod, mask), leaves, case.grad_out)

    assert peak(step) <= 32 * MIB


@pytest.mark.parametrize("template", ["portable", "auto"])
def test_q_k_v_and_an_expanded_gradient_are_not_copied(template: str) -> None:
    """Storage by position, a key batch of one: out, lse and three gradients are all there is.

    The backward made for Hopper copies the gradient, and sums dQ in float32.
    """
    case = large(batch=2, kv_batch=1, layout="bshd")
    q, k, v = leaves = [x.requires_grad_() for x in case.inputs]

    def step() -> Any:
        out = flex_attention(q, k, v, kernel_options={"TEMPLATE": template})
        return torch.autograd.grad(out.sum(), leaves)

    results = 2 * q.nbytes + k.nbytes + v.nbytes  # out and the gradients
    statistics = 3 * 4 * q[..., 0].numel()  # lse, its form for the kernels, delta: float32 each
    for_hopper = 0 if template == "portable" else 3 * q.nbytes
    assert peak(step) <= results + statistics + for_hopper + MIB


def test_without_gradients_only_the_results_stay() -> None:
    case = large()
    leaves = [x.requires_grad_() for x in case.inputs]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert peak(lambda: flex_attention(*leaves)) <= leaves[0].nbytes + MIB


# Autograd


def some_inputs(dtype: torch.dtype = torch.float16) -> list[Tensor]:
    case = make_case(batch=2, heads=2, q_len=300, head_dim=64, dtype=dtype, device=DEVICE)
    return [x.requires_grad_() for x in case.inputs]


def gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
    out = flex_attention(*leaves, capped, mask_of(causal, 300, 300), **FIXED)
    return torch.autograd.grad(out.float().square().sum(), leaves)


def equal(found: Any, wanted: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_second_derivative_is_refused_by_name() -> None:
    """The class comes through from the thread of the device."""
    leaves = some_inputs()
    (first,) = torch.autograd.grad(flex_attention(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(errors.DoubleBackwardError, match="the TRITON backend has the first alone"):
        first.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_torch_func(dtype: torch.dtype) -> None:
    leaves = some_inputs(dtype)
    mask = mask_of(causal, 300, 300)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, capped, mask, **FIXED).float().square().sum()

    plain = [x.detach() for x in leaves]
    assert equal(torch.func.grad(loss, argnums=(0, 1, 2))(*plain), gradients(leaves))
    with pytest.raises(errors.VmapError, match="torch.vmap maps over query;"):
        torch.func.vmap(loss, (0, None, None))(plain[0][:, None], *plain[1:])
    with pytest.raises(errors.ForwardModeError, match="query carries a tangent"):
        torch.func.jvp(lambda q: loss(q, *plain[1:]), (plain[0],), (plain[0],))


def test_saved_tensors_on_the_cpu() -> None:
    leaves = some_inputs()
    with torch.autograd.graph.save_on_cpu():
        out = flex_attention(*leaves, capped, mask_of(causal, 300, 300), **FIXED)
    assert equal(torch.autograd.grad(out.float().square().sum(), leaves), gradients(leaves))


def test_autocast() -> None:
    leaves = some_inputs(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flex_attention(*leaves, capped, **FIXED)
        found = torch.autograd.grad(out.float().sum(), leaves)
    assert out.dtype == torch.bfloat16 and found[0].dtype == torch.float32
    cast = flex_attention(*(x.bfloat16() for x in leaves), capped, **FIXED)
    assert equal((out, *found), (cast, *torch.autograd.grad(cast.float().sum(), leaves)))


def test_a_backward_in_another_thread() -> None:
    leaves = some_inputs()
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(gradients(leaves)))
    thread.start()
    thread.join()
    assert equal(found, gradients(leaves))


def save_products(context: Any, operation: Any, *arguments: Any, **given: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_products),
    },
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointing(kind: str) -> None:
    mask = mask_of(causal, 300, 300)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return flex_attention(x @ weight, x, x, capped, mask, **FIXED) @ weight

    found = []
    for run in (block, partial(checkpoint, block, **CHECKPOINTS[kind])):
        x = some_inputs()[0].detach().requires_grad_()
        weight = torch.eye(64, device=DEVICE, dtype=torch.float16).requires_grad_()
        run(x, weight).float().square().sum().backward()
        found.append((x.grad, weight.grad))
    assert equal(*found)
