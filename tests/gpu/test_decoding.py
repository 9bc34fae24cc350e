"""Few queries on many keys, by the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch
from decoding_cases import CASES, check, fill

from flexmod import flex_attention, quantize
from flexmod.calls.float8 import Scales
from gpu.poison import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]


@pytest.mark.parametrize(
    ("name", "processors"),
    [(name, number) for name, few in CASES.items() for number in (132, 1) if number > 1 or few.m <= 64],
)
def test_attention(name: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One processor does not make few tiles of more than 64 queries."""
    fill(monkeypatch, processors)
    few = CASES[name]
    shape = few.batch, few.heads, few.m
    poison(*(torch.empty(*shape, dim, device="cuda") for dim in (1, few.dims[1])))
    check(name, "cuda", processors > 1 or None, monkeypatch, BACKEND="TRITON_DECODE")


@pytest.mark.parametrize("by", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float8_keys_and_values(by: str, dtype: torch.dtype) -> None:
    """Kernels convert them, and read no copy."""
    q = torch.randn(2, 8, 2, 64, device="cuda", dtype=dtype)
    (k, of_key), (v, of_value) = (
        quantize(torch.randn(2, 2, 3000, 64, device="cuda"), by=by) for _ in range(2)
    )
    scales = Scales(key=of_key, value=of_value)
    exact = flex_attention(
        q.double(), k, v, scales=scales, enable_gqa=True, kernel_options={"BACKEND": "REFERENCE"}
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flex_attention(q, k, v, scales=scales, enable_gqa=True)
    copied = k.nbytes if by == "block" else 0
    assert torch.cuda.max_memory_allocated() - before < 2 * copied + k.nbytes
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("by", ["tensor", "head", "block"])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 3])
def test_float8_queries(by: str, out_dtype: torch.dtype, queries: int) -> None:
    tensors, scales = zip(
        *(
            quantize(torch.randn(2, heads, length, 64, device="cuda"), by=by)
            for heads, length in ((8, queries), (2, 3000), (2, 3000))
        ),
        strict=True,
    )
    given = {"scales": Scales(*scales), "out_dtype": out_dtype, "enable_gqa": True}
    exact, out = (
        flex_attention(*tensors, **given, kernel_options={"BACKEND": backend})
        for backend in ("REFERENCE", "TRITON_DECODE")
    )
    assert out.dtype == out_dtype
    error = (out.double() - exact.double()).norm() / exact.double().norm()
    assert error < (6e-3 if out_dtype == torch.bfloat16 or by == "block" else 1e-3)


def tensors() -> tuple[torch.Tensor, ...]:
    sizes = (8, 1), (2, 9000), (2, 9000)
    return tuple(torch.randn(2, h, n, 64, device="cuda", dtype=torch.float16) for h, n in sizes)


def test_a_cuda_graph_replays_with_new_values() -> None:
    q, k, v = tensors()
    flex_attention(q, k, v, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, enable_gqa=True)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(out, flex_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("queries", [1, 20])
def test_the_same_bits_in_any_batch(queries: int) -> None:
    """In a deterministic call."""
    q, k, v = (
        torch.randn(40, h, n, 64, device="cuda", dtype=torch.bfloat16)
        for h, n in ((8, queries), (2, 3000), (2, 3000))
    )
    options = {"deterministic": True}
    whole = flex_attention(q, k, v, enable_gqa=True, kernel_options=options)
    for part in (slice(7, 8), slice(3, 30)):
        alone = flex_attention(q[part], k[part], v[part], enable_gqa=True, kernel_options=options)
        assert torch.equal(alone, whole[part])


def test_the_same_bits_again() -> None:
    q, k, v = tensors()
    first = flex_attention(q, k, v, enable_gqa=True)
    assert all(torch.equal(first, flex_attention(q, k, v, enable_gqa=True)) for _ in range(20))
