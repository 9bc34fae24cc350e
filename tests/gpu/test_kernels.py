"""What only a GPU shows: strides, large offsets, unwritten memory, reruns, recompilation, the disk cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

import flexmod
from benchmarks.dense import Attention, Mods, attention, differentiated
from flexmod.codegen.ladder import ENDS_SOON, SHORT
from gpu.poison import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-6}


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def holes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every third query sees nothing, and all of queries 130 to 299."""
    return (q_idx % 3 != 0) & ((q_idx < 130) | (q_idx >= 300)) & (kv_idx <= q_idx)


def window(size: int) -> Any:
    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return sliding_window


def document(ids: Tensor) -> Any:
    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx] == ids[kv_idx]

    return same_document


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20.0 * torch.tanh(score / 20.0)


def block_mask(mask_mod: Any, q_len: int, kv_len: int | None = None) -> flexmod.BlockMask:
    return flexmod.create_block_mask(mask_mod, None, None, q_len, kv_len or q_len, device=DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def run(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mods: Mods, **options: Any) -> Attention:
    """flexmod's results, with NaN left in freed memory first."""
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    mask = None
    if mods.mask_mod is not None:
        mask = block_mask(mods.mask_mod, query.shape[2], key.shape[2])
    statistics = torch.empty(query.shape[:3], device=DEVICE)
    poison(grad_out, statistics)
    out, lse = flexmod.flex_attention(
        *inputs, mods.score_mod, mask, enable_gqa=True, return_lse=True, **options
    )
    poison(query, key, value, statistics)
    return Attention(out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out))


def agree(ours: Attention, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mods: Mods) -> None:
    """Each result is near float64's, by the norm of the difference over its own."""
    truth = differentiated(*(x.double() for x in (query, key, value, grad_out)), mods)
    for name in Attention._fields:
        close(getattr(ours, name), getattr(truth, name), query.dtype, name)


def close(ours: Tensor, truth: Tensor, dtype: torch.dtype, name: str = "") -> None:
    assert ours.shape == truth.shape, name
    finite = torch.isfinite(truth)
    assert torch.equal(ours[~finite].double(), truth[~finite]), f"{name}: infinities differ"
    difference = (ours.double() - truth)[finite].norm()
    relative = (difference / truth[finite].norm().clamp_min(1e-30)).item()
    assert relative < TOLERANCE[dtype], f"{name}: {relative:.2e}"


CAUSAL = Mods(mask_mod=causal)


def check(query: Tensor, key: Tensor, value: Tensor, mods: Mods = CAUSAL, **options: Any) -> None:
    grad_out = random(*query.shape[:3], value.shape[3], dtype=query.dtype)
    ours = run(query, key, value, grad_out, mods, **options)
    agree(ours, query, key, value, grad_out, mods)


def test_poison_reaches_the_next_allocation() -> None:
    like = torch.zeros(3, 5, 333, 64, device=DEVICE, dtype=torch.float16)
    poison(like)
    assert torch.empty_like(like).isnan().all()


# Layouts and shapes


def test_storage_by_position_then_head() -> None:
    query, key, value = (random(2, 300, 4, 64).transpose(1, 2) for _ in range(3))
    check(query, key, value)


def test_last_dimension_not_contiguous() -> None:
    query, key, value = (random(1, 2, 64, 200).transpose(2, 3) for _ in range(3))
    check(query, key, value)


def test_slices_of_one_projection() -> None:
    """q, k and v as cut from one linear layer: aligned to nothing in particular."""
    packed = random(2, 250, 3 * 2 * 72 + 1)[..., 1:].view(2, 250, 3, 2, 72)
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    check(query, key, value)


def test_expanded_gradient() -> None:
    query, key, value = (random(1, 2, 300, 64) for _ in range(3))
    grad_out = torch.ones((), device=DEVICE, dtype=torch.float16).expand(query.shape)
    agree(run(query, key, value, grad_out, CAUSAL), query, key, value, grad_out, CAUSAL)


def test_key_batch_of_one() -> None:
    check(random(3, 4, 260, 64), random(1, 2, 260, 64), random(1, 2, 260, 64))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 96), (80, 48), (40, 256), (5, 3)])
def test_other_value_dim(head_dim: int, value_dim: int) -> None:
    check(random(1, 4, 270, head_dim), random(1, 2, 270, head_dim), random(1, 2, 270, value_dim))


@pytest.mark.parametrize("score_mod", [None, softcap])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(64, 16), (80, 2), (128, 32), (33, 2), (128, 8), (32, 16), (16, 64), (32, 128)],
)
def test_values_in_other_rows_than_keys(head_dim: int, value_dim: int, score_mod: Any) -> None:
    """The ptxas of Triton 3.6 loses addresses of tiles in unlike layouts on Hopper."""
    query, key, value = random(1, 4, 270, head_dim), random(1, 2, 270, head_dim), random(1, 2, 270, value_dim)
    check(query, key, value, Mods(score_mod), kernel_options={"TEMPLATE": "portable"})


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 700), (300, 77), (77, 300), (513, 1025)])
def test_other_key_length(q_len: int, kv_len: int) -> None:
    mods = Mods(softcap, lambda b, h, q_idx, kv_idx: q_idx + 100 >= kv_idx)
    check(random(2, 2, q_len, 64), random(2, 2, kv_len, 64), random(2, 2, kv_len, 64), mods)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_head_dim_of_512(dtype: torch.dtype) -> None:
    query, key, value = (random(1, 2, 200, 512, dtype=dtype) for _ in range(3))
    check(query, key, value)


def test_chosen_tiles() -> None:
    query, key, value = (random(1, 2, 500, 64) for _ in range(3))
    tiles = {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 32,
        "BLOCK_M1": 32,
        "BLOCK_N1": 64,
        "BLOCK_M2": 64,
        "BLOCK_N2": 32,
    }
    check(query, key, value, kernel_options={**tiles, "num_warps": 4, "num_stages": 2})


# Large offsets


def far_apart(stride: int, shape: tuple[int, ...], axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with `stride` elements between neighbors along `axis`, one after the other in one buffer."""
    strides = list(torch.empty(shape, device="meta").stride())
    gap = torch.Size(shape).numel()
    strides[axis] = stride
    buffer = torch.empty(stride * (shape[axis] - 1) + 4 * gap, device=DEVICE, dtype=torch.float16)
    tensors = [buffer.as_strided(shape, strides, i * gap) for i in range(3)]
    for x in tensors:
        x.copy_(torch.randn(shape, device=DEVICE))
    return tensors[0], tensors[1], tensors[2]


def test_batch_past_two_to_the_31() -> None:
    check(*far_apart(2**31 + 16, (2, 2, 200, 64), axis=0))


def test_rows_past_two_to_the_31() -> None:
    check(*far_apart(2**24, (1, 1, 260, 64), axis=2))


def test_index_arithmetic_past_two_to_the_31() -> None:
    """A million times a position does not fit 32 bits."""
    query, key, value = (random(1, 1, 4096, 64) for _ in range(3))
    grad_out = random(1, 1, 4096, 64)
    wide = Mods(mask_mod=lambda b, h, q_idx, kv_idx: q_idx * 1_000_000 >= kv_idx * 1_000_000)
    fixed = {"deterministic": True}
    ours, expected = (
        run(query, key, value, grad_out, mods, kernel_options=fixed) for mods in (wide, CAUSAL)
    )
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)


# Results


@pytest.mark.parametrize("score_mod", [None, softcap])
def test_queries_that_see_nothing(score_mod: Any) -> None:
    query, key, value, grad_out = (random(1, 2, 400, 64) for _ in range(4))
    mods = Mods(score_mod, holes)
    ours = run(query, key, value, grad_out, mods)
    agree(ours, query, key, value, grad_out, mods)
    dead = torch.arange(400, device=DEVICE) % 3 == 0
    dead[130:300] = True
    assert (ours.out[:, :, dead] == 0).all()
    assert (ours.lse[:, :, dead] == -torch.inf).all()
    assert ours.dq is not None and (ours.dq[:, :, dead] == 0).all()


def test_mask_that_keeps_nothing() -> None:
    query, key, value, grad_out = (random(1, 2, 300, 64) for _ in range(4))
    ours = run(query, key, value, grad_out, Mods(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0))
    assert (ours.lse == -torch.inf).all()
    for x in (ours.out, ours.dq, ours.dk, ours.dv):
        assert x is not None and (x == 0).all()


def test_lse_and_max_scores() -> None:
    query, key, value = (random(1, 2, 300, 64) for _ in range(3))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    request = flexmod.AuxRequest(lse=True, max_scores=True)
    out, aux = flexmod.flex_attention(*inputs, block_mask=block_mask(causal, 300), return_aux=request)
    weight = random(1, 2, 300, dtype=torch.float32)
    ours = torch.autograd.grad((out.float() * weight[..., None]).sum() + (aux.lse * weight).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_out, exact_lse = attention(*exact, Mods(mask_mod=causal))
    truth = torch.autograd.grad((exact_out * weight[..., None]).sum() + (exact_lse * weight).sum(), exact)
    for mine, other, name in zip(ours, truth, ("dq", "dk", "dv"), strict=True):
        close(mine, other, torch.float16, name)
    scores = exact[0] @ exact[1].mT / 8
    allowed = torch.ones(300, 300, dtype=torch.bool, device=DEVICE).tril()
    close(aux.max_scores, scores.masked_fill(~allowed, -torch.inf).amax(-1).detach(), torch.float16)


def test_two_runs_agree_bit_for_bit() -> None:
    ids = torch.arange(2048, device=DEVICE) // 300
    query, grad_out = (random(2, 8, 2048, 64) for _ in range(2))
    key, value = (random(2, 2, 2048, 64) for _ in range(2))
    mods = Mods(softcap, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx]))
    fixed = {"deterministic": True}
    first, second = (run(query, key, value, grad_out, mods, kernel_options=fixed) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_runs_on_the_current_stream() -> None:
    """Elsewhere it would read `late` before that is written."""
    query, key, value = (random(1, 4, 2048, 64) for _ in range(3))
    mask = block_mask(causal, 2048)
    expected = flexmod.flex_attention(query, key, value, block_mask=mask)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(query)
        torch.cuda._sleep(100_000_000)
        late.copy_(query)
        ours = flexmod.flex_attention(late, key, value, block_mask=mask)
    stream.synchronize()
    assert torch.equal(ours, expected)


def test_under_torch_compile() -> None:
    """The mod's numbers are the first ones of its operations: numbers that vary become arguments."""

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 20.0 * torch.tanh(score / 20.0 - 0.01 * abs(q_idx - kv_idx))

    query, key, value = (random(1, 2, 300, 64) for _ in range(3))
    mask = block_mask(causal, 300)
    compiled = torch.compile(flexmod.flex_attention)
    expected = flexmod.flex_attention(query, key, value, capped, mask)
    assert torch.equal(compiled(query, key, value, capped, mask), expected)


# Compilation


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels for which Triton makes another variant, from disk or anew."""
    found: list[str] = []

    def hook(**facts: Any) -> None:
        found.append(facts["repr"])

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def train(mods: Mods, length: int, heads: int = 2) -> None:
    """Runs a step, and waits for the kernels of the next mask, which threads compile meanwhile."""
    query, key, value, grad_out = (random(1, heads, length, 64) for _ in range(4))
    run(query, key, value, grad_out, mods)
    for thread in threading.enumerate():
        if thread.name.startswith("flexmod compiles"):
            thread.join()


def test_new_lengths_compile_nothing() -> None:
    """Short calls have kernels of their own, up to lengths that the ladder names."""
    with compilations() as first:
        for length in (2000, ENDS_SOON, *sorted({row.positions for row in SHORT})):
            train(Mods(softcap, causal), length)
    assert first
    with compilations() as later:
        for length in (1001, 1, 9, 16, 17, 31, 50, 65, 128, 129, 256, 777, 2048, 4097):
            train(Mods(softcap, causal), length)
        train(Mods(softcap, causal), 2000, heads=5)
    assert not later


def test_new_documents_compile_nothing() -> None:
    """Each with a tensor of its own; 1000 and 777 are lengths that 16 does not divide."""

    def ids(length: int) -> Tensor:
        return torch.randint(0, 7, (length,), device=DEVICE).sort().values

    train(Mods(mask_mod=document(ids(1000))), 1000)
    with compilations() as later:
        for length in (1000, 1000, 777, 129, 1024):
            train(Mods(mask_mod=document(ids(length))), length)
    assert not later


def test_new_constants_compile_once_more_at_most() -> None:
    """A constant is one until another value comes; then it is an argument."""
    train(Mods(mask_mod=window(100)), 1000)
    train(Mods(mask_mod=window(200)), 1000)
    with compilations() as later:
        for size in (300, 301, 1, 0, 16, 999):
            train(Mods(mask_mod=window(size)), 1000)
    assert not later


SCRIPT = """
import json, torch, triton, flexmod

hits = []
triton.knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
like = {"device": "cuda", "dtype": torch.float16, "requires_grad": True}
q, k, v = (torch.ones(1, 2, 300, 64, **like) for _ in range(3))
mask = flexmod.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 300, 300, "cuda")
out = flexmod.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * 0.125, mask)
out.sum().backward()
print(json.dumps({"hits": sum(hits), "misses": len(hits) - sum(hits), "out": out.double().sum().item()}))
"""


def process(folder: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLEXMOD_CACHE_DIR": str(folder / "flexmod"),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(started: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = started.communicate(timeout=100)
    finally:
        started.kill()
    assert started.returncode == 0, err[-2000:]
    return dict(json.loads(out.splitlines()[-1]))


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = answer(process(tmp_path)), answer(process(tmp_path))
    assert first["misses"] > 0
    assert second["misses"] == 0 < second["hits"]  # it may end before kernels of the backward are asked for
    assert second["out"] == first["out"]


def test_two_processes_compile_the_same_at_once(tmp_path: Path) -> None:
    started = [process(tmp_path) for _ in range(2)]
    one, other = (answer(each) for each in started)
    assert one["out"] == other["out"]


@pytest.mark.parametrize("template", ["portable", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_approximate_softcap_is_as_near_as_it_says(dtype: torch.dtype, template: str) -> None:
    """A score is off by up to cap / 2048, so a weight, like the sum that it is divided by, by that share."""
    cap = 20.0
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 500, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = flexmod.flex_attention(
        *exact, flexmod.mods.softcap(cap), scale=3.0, kernel_options={"BACKEND": "REFERENCE"}
    )
    errors = {}
    for approximate in (False, True):
        mod = flexmod.mods.softcap(cap, approximate)
        out = flexmod.flex_attention(q, k, v, mod, scale=3.0, kernel_options={"TEMPLATE": template})
        errors[approximate] = (out.double() - truth).abs().max().item()
    limit = 2 * cap / 2048 * v.abs().max().item()
    assert errors[True] <= limit
    if dtype == torch.float32:  # otherwise the rounding of the operands hides it
        assert errors[False] < 5e-6 < errors[True]  # the instruction is there
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wanted = torch.autograd.grad(truth, exact, torch.ones_like(truth))
    for found, true in zip(grads, wanted, strict=True):
        assert (found.double() - true).norm() <= 5 * cap / 2048 * true.norm()
