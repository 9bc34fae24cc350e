"""The first mask of a mask_mod on a GPU: torch finds its tiles, and a thread compiles its kernels.

The kernels take a second or more to compile, torch takes some milliseconds. The thread starts late, since the
first attention kernels are needed earlier. The second mask of the mask_mod waits until its kernels are
compiled.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch

from flexmod.block_mask import generated
from flexmod.block_mask.storage import is_captured
from flexmod.block_mask.tiles import MaskLayout, groups_of
from flexmod.ir.trace import Traced
from flexmod.runtime import config
from flexmod.runtime.locks import Lock
from flexmod.runtime.private_triton import start_compiler
from flexmod.runtime.side_by_side import later, threads

# Seconds. By then the kernels of a forward and a backward are mostly past their Python part.
DELAY = 2.0
# Seconds. A waiting thread checks this often whether the process ends.
PAUSE = 0.05
# Torch needs much time and memory for masks of more tiles.
MOST_TILES = 1 << 22
REMEMBERED = 1024


_turn = Lock()  # held by a thread whose kernels nobody waits for; of many mask_mods, one compiles at a time


class _Ahead:
    """A thread that runs a job after DELAY seconds in its turn, or at once if its result is needed."""

    def __init__(self, job: Callable[[], object]) -> None:
        self.needed = threading.Event()
        self.thread = later(partial(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        start_compiler()
        end = time.monotonic() + DELAY
        while not self.needed.wait(PAUSE):
            if not threading.main_thread().is_alive():
                return
            if time.monotonic() >= end and _turn.take():
                try:
                    job()
                finally:
                    _turn.release()
                return
        job()

    def finish(self) -> None:
        self.needed.set()
        if self.thread.is_alive():
            self.thread.join()


_known: OrderedDict[object, _Ahead | None] = OrderedDict()  # by the graph without its numbers, and device
_guard = Lock()


def is_first(traced: Traced, layout: MaskLayout) -> bool:
    """Should torch find the tiles, since this is the first mask of the mask_mod? Starts the kernels' compile.

    If a thread compiles the kernels, waits for it. Kernels alone find tiles without reading values, check
    indices, and find the tiles of very large masks.
    """
    key = traced.graph.skeleton[0], layout.device.index
    with _guard:
        known = key in _known
        ahead = _known[key] = _known.pop(key, None)
        if not known and _torch_can(traced, layout):
            _known[key] = _Ahead(partial(generated.compile_ahead, traced, layout))
            return True
        while len(_known) > REMEMBERED:
            _known.popitem(last=False)
    if ahead is not None:
        ahead.finish()
    return False


def _torch_can(traced: Traced, layout: MaskLayout) -> bool:
    if threads() == 1 or config.check_bounds() or is_captured(layout.device):
        return False
    if torch.cuda.get_sync_debug_mode():
        return False
    return math.prod((*groups_of(traced, layout.sizes), *layout.grid())) <= MOST_TILES
