"""Few queries on many keys, by the kernels of a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from decoding_cases import CASES, check, fill
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import BlockMask, flex_attention, quantize
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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
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
    copied = k.nbytes * dtype.itemsize if by == "block" else 0
    assert torch.cuda.max_memory_allocated() - before < copied + k.nbytes
    error = (out.double() - exact).norm() / exact.norm()
    assert error < {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]


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


def test_float8_values_alone() -> None:
    q, k = (torch.randn(2, h, n, 64, device="cuda", dtype=torch.float16) for h, n in ((8, 2), (2, 3000)))
    v, scale = quantize(torch.randn(2, 2, 3000, 64, device="cuda"), by="head")
    given: dict[str, Any] = {"scales": Scales(value=scale), "enable_gqa": True}
    exact = flex_attention(q.double(), k.double(), v, **given, kernel_options={"BACKEND": "REFERENCE"})
    out = flex_attention(q, k, v, **given)
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


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


def test_a_cuda_graph_replays_with_other_pages() -> None:
    """Writes to the lists and to captured tensors of a mask of pages are seen, as in an eager call."""
    page, total = 128, 40
    q, k, v = (torch.randn(b, h, n, 64, device="cuda").half() for b, h, n in ((2, 8, 1), *2 * [(1, 2, 5120)]))
    block = torch.zeros(2, total, device="cuda", dtype=torch.int32)
    length = torch.zeros(2, device="cuda", dtype=torch.int32)
    counts, pages = length[:, None, None].clone(), block[:, None, None].clone()

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return block[b, kv_idx // page] * page + kv_idx % page < length[b]

    def write(lengths: list[int]) -> None:
        order = torch.randperm(total, device="cuda", dtype=torch.int32)
        steps = torch.arange(total, device="cuda", dtype=torch.int32)
        for b, (n, first) in enumerate(zip(lengths, (0, total // 2), strict=True)):
            pages[b, 0, 0] = order.roll(first)
            block[b, order.roll(first).long()] = steps
            length[b], counts[b] = n, -(-n // page)

    def exact(lengths: list[int]) -> Tensor:
        outs = []
        for b, n in enumerate(lengths):
            at = torch.arange(n, device="cuda")
            rows = pages[b, 0, 0].long()[at // page] * page + at % page
            keys, values = (x[:, :, rows].double() for x in (k, v))
            outs.append(scaled_dot_product_attention(q[b : b + 1].double(), keys, values, enable_gqa=True))
        return torch.cat(outs)

    write([2500, 700])
    mask = BlockMask.from_kv_blocks(
        counts, pages, mask_mod=mask_mod, seq_lengths=(1, total * page), compute_q_blocks=False
    )
    attend = partial(flex_attention, q, k, v, block_mask=mask, enable_gqa=True)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lengths in ([100, 2400], [2560, 129]):
        write(lengths)
        graph.replay()
        for result in (out, attend()):
            torch.testing.assert_close(result.double(), exact(lengths), atol=2e-3, rtol=2e-3)


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
