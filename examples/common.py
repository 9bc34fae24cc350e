"""What the examples share: random inputs, and a report on two attentions that must agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

QKV = tuple[Tensor, Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE_SDPA = "SDPA with the dense mask"


def random_qkv(length: int = 1024, heads: int = 4) -> QKV:
    """Random q, k and v, [1, heads, length, 64] in float32, that want gradients."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, 64, device=DEVICE)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def report(ours: Attention, reference: Attention, qkv: QKV, reference_name: str = DENSE_SDPA) -> None:
    """Run both forward and backward; print the largest differences and the times; insist on agreement."""
    (mine, my_time), (theirs, their_time) = run(ours, qkv), run(reference, qkv)
    print(f"flexmod against {reference_name}:")
    names = ("out", "grad of q", "grad of k", "grad of v")
    for name, result, expected in zip(names, mine, theirs, strict=True):
        print(f"  {name:<10} largest difference {float((result - expected).abs().max()):.1e}")
        torch.testing.assert_close(result, expected, atol=2e-3, rtol=2e-3)
    print(f"  forward and backward in {my_time:.1f} ms; {reference_name} in {their_time:.1f} ms\n")


def run(attention: Attention, qkv: QKV) -> tuple[list[Tensor], float]:
    """out and the gradients of q, k and v for a gradient of ones; the median milliseconds of three runs."""
    times = []
    for _ in range(4):  # the first compiles, and does not count
        start = time.perf_counter()
        out = attention(*qkv)
        gradients = torch.autograd.grad(out.sum(), qkv)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return [out.detach(), *gradients], statistics.median(times[1:])
