"""What a call takes on the GPU: the host's part is left out, whatever it is.

Events around a call also count the GPU's wait for the host where the host launches slower than the GPU works.
So before the first event the GPU is given more to do than the host needs to launch the call: it clears its
cache, and waits in a kernel. The wait is the same for all that are compared, see `wait_for`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MEASURED_MS = 100  # of calls and waits that a median is taken of
CALLS = 5, 50  # at least, at most
LONG_MS = 500  # a call that takes longer is made once
CACHE_BYTES = 256 << 20  # more than any L2 holds


def milliseconds(call: Callable[[], Any], wait_ms: float | None = None) -> float:
    """Median time of a call on the GPU, with a cold L2. `wait_ms` None: what `wait_for` says of this call.

    Without a GPU: the wall-clock time of one call.
    """
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    wait_ms = wait_for(call) if wait_ms is None else wait_ms
    once = _timed(call, wait_ms, 1)[0]
    if once > LONG_MS:
        return once
    calls = min(max(CALLS[0], round(MEASURED_MS / (once + wait_ms))), CALLS[1])
    return statistics.median(_timed(call, wait_ms, calls))


def wait_for(call: Callable[[], Any]) -> float:
    """Milliseconds that the GPU must be kept busy for the host to launch the call meanwhile."""
    if not torch.cuda.is_available():
        return 0.0
    times = []
    begun = time.perf_counter()
    while len(times) < 3 and time.perf_counter() - begun < LONG_MS / 1e3:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
    return 1.5 * statistics.median(times) + 0.1


def _timed(call: Callable[[], Any], wait_ms: float, calls: int) -> list[float]:
    found = []
    cycles = int(wait_ms * _cycles_per_millisecond())
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _larger_than_cache().zero_()
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
        found.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in found]


@cache
def _larger_than_cache() -> Tensor:
    return torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")


@cache
def _cycles_per_millisecond() -> float:
    """Of the clock that the waiting kernel counts."""
    cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)
