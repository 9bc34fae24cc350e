"""A number in memory that the programs of a launch count with: zero before it, and left zero by it.

Each stream has its own, since launches of one stream follow one another and others may run at the same time.
So a call neither allocates one nor clears it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flexmod.internals.torch import current_stream, is_stream_capturing


class Counter:
    """Stands among the arguments of a launch for the counter of the stream that it goes to."""

    def __repr__(self) -> str:
        return "counter"


COUNTER = Counter()
_kept: dict[tuple[int, int], Tensor] = {}


def counter(device: int, stream: int) -> Tensor:
    """int32 [1], for a launch on this stream of the device, both of which are current."""
    # a graph may be replayed on any stream: it has a counter of its own, which it clears
    if is_stream_capturing():
        return _zero(device)
    found = _kept.get((device, stream))
    if found is None:
        found = _kept[device, stream] = _made_outside(device)
    return found


def filled(arguments: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """The arguments of a launch on the current stream of a device, which is current."""
    if not any(value is COUNTER for value in arguments.values()):
        return arguments
    assert device.index is not None
    own = counter(device.index, current_stream(device.index))
    return {name: own if value is COUNTER else value for name, value in arguments.items()}


def _made_outside(device: int) -> Tensor:
    """Of no memory pool that this thread's allocations go to now: such a pool's owner may take it back.

    Inductor's runs before it records a CUDA graph have a pool, as `torch.cuda.use_mem_pool` has.
    """

    def make() -> tuple[Tensor, torch.cuda.Event]:
        return _zero(device), torch.cuda.current_stream(device).record_event()

    with ThreadPoolExecutor(1) as other:
        zero, done = other.submit(make).result()
    torch.cuda.current_stream(device).wait_event(done)
    return zero


def _zero(device: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
