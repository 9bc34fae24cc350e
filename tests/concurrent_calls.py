"""Calls that many workers make at once: some with the same mods, others that differ in numbers or in kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexmod
from flexmod import masks, mods

WORKERS = 16


def results(number: int, device: str, backend: str, length: int = 40, head_dim: int = 16) -> list[Tensor]:
    """out and the gradient of a worker's call. Workers that agree modulo 8 have the same one."""
    number %= 8
    ids = torch.arange(length, device=device) // (3 + number)

    def shifted(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + 0.1 * number * (kv_idx - q_idx)

    score_mod = (mods.softcap(2.0 + number), shifted)[number % 2]
    mask_mod = (masks.causal(), masks.sliding_window(5 + number), masks.document(ids), masks.prefix_lm(7))
    mask = flexmod.create_block_mask(
        mask_mod[number // 2],
        None,
        None,
        length,
        length,
        device=device,
        BLOCK_SIZE=32 if device == "cpu" else 128,
    )
    dtype = torch.float32 if device == "cpu" else torch.float16
    query = torch.linspace(-1, 1, length * head_dim, device=device).view(1, 1, length, head_dim)
    query = (query * 100).sin().to(dtype).requires_grad_()
    options = {"BACKEND": backend, "deterministic": True}
    out = flexmod.flex_attention(query, query, query, score_mod, mask, kernel_options=options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), query)]


def squares(found: list[Tensor]) -> list[float]:
    """A number for each tensor, in which nothing cancels."""
    return [x.double().square().sum().item() for x in found]


def of_threads(work: Callable[[int], list[list[Tensor]]]) -> dict[int, list[list[Tensor]]]:
    """work(number) by number: each worker in a thread of its own, all let go together."""
    together = threading.Barrier(WORKERS)
    found: dict[int, list[list[Tensor]]] = {}

    def run(number: int) -> None:
        together.wait()
        found[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(WORKERS))
    return found


# It ends without Python's shutdown: the thread of torch's autograd may still be dropping the last objects
# of the backward, and then torch ends the process (pytorch/pytorch issue 190489).
SCRIPT = """
import os
import sys
from concurrent_calls import results, squares

number, device, backend, length, head_dim = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
found = results(int(number), device, backend, int(length), int(head_dim))
print(squares(found), flush=True)
os._exit(0)
"""
