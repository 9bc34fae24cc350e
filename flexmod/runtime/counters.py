"""Gives a launch a counter in memory, which is zero before and after the launch.

Each stream has its own counter, since launches of one stream run in order and other streams may run at the
same time. So a call neither allocates nor clears a counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flexmod.internals.torch import current_stream, is_stream_capturing


class Counter:
    """Stands for the counter of the launch's stream, among the arguments of the launch."""

    def __repr__(self) -> str:
        return "counter"


COUNTER = Counter()
_kept: dict[tuple[int, int], Tensor] = {}


def counter(device: int, stream: int) -> Tensor:
    """Returns the counter, int32 [1], for a launch on the current stream of the current device."""
    # a graph may replay on any stream, so it has its own counter and clears it
    if is_stream_capturing():
        return _zero(device)
    found = _kept.get((device, stream))
    if found is None:
        found = _kept[device, stream] = _made_outside(device)
    return found


def filled(arguments: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Puts the counter into the arguments of a launch on the current stream of the current device."""
    if not any(value is COUNTER for value in arguments.values()):
        return arguments
    assert device.index is not None
    own = counter(device.index, current_stream(device.index))
    return {name: own if value is COUNTER else value for name, value in arguments.items()}


def _made_outside(device: int) -> Tensor:
    """Allocates a counter in another thread, outside of this thread's memory pool, which may be freed.

    Such pools come from `torch.cuda.use_mem_pool`, and from Inductor's runs before it records a CUDA graph.
    """

    def make() -> tuple[Tensor, torch.cuda.Event]:
        return _zero(device), torch.cuda.current_stream(device).record_event()

    with ThreadPoolExecutor(1) as other:
        zero, done = other.submit(make).result()
    torch.cuda.current_stream(device).wait_event(done)
    return zero


def _zero(device: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
