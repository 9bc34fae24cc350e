"""flexmod in models that Inductor compiles for the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flexmod import create_block_mask, flex_attention, masks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]


def block(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, ids: Tensor) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * abs(q_idx - kv_idx)

    mask_mod = masks.document(ids, causal=True)
    mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], q.device)
    out, lse = flex_attention(q * 2, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    return out * torch.sigmoid(lse)[..., None].to(out.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inductor(dtype: torch.dtype) -> None:
    """One graph, [B, M, H, D] in memory, with lengths that become symbols."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for length in (300, 500, 777):
        shapes = [(2, length, heads, 64) for heads in (4, 2, 2)]
        leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
        slopes = torch.rand(4, device="cuda", requires_grad=True)
        ids = torch.randint(0, 3, (2, length), device="cuda").sort(-1).values
        results = []
        for function in (compiled, block):
            out = function(*(x.transpose(1, 2) for x in leaves), slopes, ids)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), (*leaves, slopes))))
        for found, plain in zip(*results, strict=True):
            error = (found.float() - plain.float()).norm() / plain.float().norm()
            assert error <= (2e-2 if dtype == torch.bfloat16 else 1e-4)
    assert counter.frame_count == 2


def test_cuda_graphs_of_inductor() -> None:
    """mode="reduce-overhead" records the launches; a mask made outside is an input of the graph."""
    torch._dynamo.reset()
    mask = create_block_mask(masks.causal(), None, None, 512, 512, "cuda")
    function = torch.compile(
        lambda q, k, v: flex_attention(q + 1, k, v, block_mask=mask), fullgraph=True, mode="reduce-overhead"
    )
    with torch.no_grad():
        for _ in range(4):
            q, k, v = (torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            found = function(q, k, v).clone()
            torch.testing.assert_close(found, flex_attention(q + 1, k, v, block_mask=mask))
