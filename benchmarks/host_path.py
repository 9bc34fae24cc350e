"""What a known call costs the CPU, where there is no GPU: Hopper's kernels, by a launcher that does nothing.

    python -m benchmarks.host_path [--profile CASE] [--portable]

Tensors lie on the CPU; all else is what a call on an H200 does on the host, but for the driver's own work.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor
from triton.compiler import CompiledKernel

import flexmod
from flexmod import masks, mods
from flexmod.backends import arguments, families
from flexmod.block_mask import build
from flexmod.block_mask import generated as builder
from flexmod.calls import prepared
from flexmod.codegen.spec import Verdict
from flexmod.runtime import direct, launch, side_by_side
from flexmod.runtime.direct import Direct
from flexmod.runtime.target import Target

H200 = Target("sm_90", "cuda", 227 << 10, processors=132)
LENGTH, HEADS, DIM = 128, 1, 64
ROUNDS, CALLS = 40, 100


class CudaLauncher:
    """Takes what Triton's launcher takes."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self) -> None:
        launch = _Launch()

        def wrapped(*arguments: Any) -> None:
            launcher(*arguments)

        launcher = launch
        self.launch = wrapped


class _Launch:
    def __call__(self, *arguments: Any) -> None: ...


def make_tensordesc_arg(descriptor: Any, meta: object, *others: None) -> list[Any]:
    return [descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides]


def _compiled(*_: Any) -> Any:
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.module, kernel.function, kernel.packed_metadata = None, 1, (4, 1, 0)
    kernel._run = CudaLauncher()
    kernel.metadata, kernel.n_spills, kernel.asm = SimpleNamespace(tensordesc_meta=[object()] * 16), 0, {}
    return kernel


@contextmanager
def on_an_h200() -> Iterator[None]:
    """Makes calls in the block treat CPU tensors as an H200's tensors."""
    made = {"_cuda_getDevice": lambda: 0, "_cuda_getCurrentRawStream": lambda index: 0}
    made["_cuda_isCurrentStreamCapturing"] = lambda: False  # type: ignore[assignment]
    with mock.patch.multiple(torch._C, create=True, **made), mock.patch.multiple(
        direct, start=_compiled, compiled=_compiled
    ), mock.patch.object(
        launch, "Direct", lambda compiled, device, *rest: Direct(compiled, torch.device("cuda", 0), *rest)
    ), mock.patch.object(prepared, "backend_of", lambda options, query: "triton"), mock.patch.object(
        families, "target_of", lambda device: H200
    ), mock.patch.object(arguments, "processors", lambda device: H200.processors), mock.patch.object(
        launch, "verdict", lambda *_: Verdict()
    ), mock.patch.object(
        direct, "_made_outside", lambda _: torch.zeros(1, dtype=torch.int32)
    ), mock.patch.object(side_by_side, "threads", lambda: 1), mock.patch.object(
        build, "has_kernels", lambda device: True
    ), mock.patch.object(builder, "target_of", lambda device: H200):  # fmt: skip
        yield


def cases(options: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    query, key, value = (torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = flexmod.create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device="cpu")
    slopes, grad_out = torch.rand(HEADS), torch.randn_like(query)
    plain = flexmod.compile(mask_mod=masks.causal(), kernel_options=options)
    alibi = flexmod.compile(mods.alibi(slopes), masks.causal(), kernel_options=options)
    rows = flexmod.compile(mask_mod=masks.causal(), kernel_options=options, layout="bshd")

    def attend(tensors: Sequence[Tensor], score_mod: Any = None) -> Any:
        return flexmod.flex_attention(*tensors, score_mod, mask, kernel_options=options)

    def compiled(*tensors: Tensor) -> Any:
        return flexmod.flex_attention(*tensors, None, mask, kernel_options=options)

    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    given = (query, key, value)
    turned = tuple(x.transpose(1, 2).contiguous() for x in given)
    return {
        "flex_attention": lambda: attend(given),
        "flex_attention, alibi": lambda: attend(given, mods.alibi(slopes)),
        "flex_attention, in a graph of torch.compile": lambda: graph(*given),
        "handle": lambda: plain(*given),
        "handle, alibi": lambda: alibi(*given),
        "handle, bshd": lambda: rows(*turned),
        "handle, with autograd": lambda: plain(*leaves),
        "handle, with backward": lambda: torch.autograd.grad(plain(*leaves), leaves, grad_out),
        "one torch.empty_like": lambda: torch.empty_like(query),
    }


def mask_cases() -> dict[str, Callable[[], Any]]:
    """Block masks of functions made for each: another number, or another tensor, at each call."""
    numbers = itertools.count(1)
    tensors = itertools.cycle([torch.arange(LENGTH) // size for size in range(2, 32)])

    def built(mask_mod: Any) -> Any:
        return flexmod.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")

    def window(size: int) -> Any:
        return lambda b, h, q, k: (q >= k) & (q - k <= size)

    def documents(ids: Tensor) -> Any:
        return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])

    return {
        "mask, the same": lambda: built(window(40)),
        "mask, another tensor": lambda: built(documents(next(tensors))),
        "mask, another number": lambda: built(window(next(numbers))),
        "mask, another sliding_window": lambda: built(masks.sliding_window(next(numbers))),
    }


def microseconds(run: Callable[[], Any]) -> float:
    """The best of some rounds: other work on the machine only adds to it."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", help="a case whose functions are listed by their own time")
    parser.add_argument("--portable", action="store_true", help="the portable kernels")
    asked = parser.parse_args()
    with on_an_h200():
        found = cases({"TEMPLATE": "portable" if asked.portable else "hopper"}) | mask_cases()
        if asked.profile:
            run = found[asked.profile]
            microseconds(run)
            with cProfile.Profile() as profile:
                for _ in range(2000):
                    run()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            return
        print(
            tabulate([[name, microseconds(run)] for name, run in found.items()], ["", "us"], floatfmt=".1f")
        )


if __name__ == "__main__":
    main()
