"""Gluon as plain Python: runs a generated Hopper forward on numpy arrays, each partition of warps a thread.

Copies come late and in any order, shared memory holds NaN until they do, and a wait that does not end fails.
So a protocol that hangs, or reads what has not come, is found without a GPU. Arithmetic is float64; layouts
mean nothing here.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

SECONDS = 20  # that a wait may take
LATEST = 0.001  # seconds until a copy has come
_here = threading.local()
_memory = threading.Lock()


class Stuck(Exception):
    """A wait that nobody ends."""


class Tile(np.ndarray):
    """A tensor."""

    def to(self, dtype: str) -> Tile:
        return _unsigned(self) if dtype == "uint32" else self


def tile(x: Any) -> Any:
    return np.asarray(x).view(Tile) if np.ndim(x) else x


def _unsigned(x: Any) -> Any:
    return tile(np.asarray(x).astype(np.int64) & 0xFFFFFFFF)


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.count = self.missing = self.bytes = 0

    def add(self, arrivals: int = 0, expected: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += expected
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if not self.missing and not self.bytes:
                self.phase += 1
                self.missing = self.count
                self.changed.notify_all()


class Shared:
    """Shared memory; `barriers` lie in it, or numbers."""

    def __init__(self, array: np.ndarray, layout: Any = None, barriers: list[Barrier] | None = None) -> None:
        self.array, self.layout, self.barriers, self.dtype = array, layout, barriers, "float"

    @property
    def barrier(self) -> Barrier:
        assert isinstance(self.barriers, Barrier)
        return self.barriers

    def index(self, place: int) -> Shared:
        return Shared(self.array[place], self.layout, self.barriers and self.barriers[place])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.array.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order))

    def slice(self, start: int, count: int, axis: int) -> Shared:
        return Shared(self.array.take(range(start, start + count), axis))

    def store(self, value: Any) -> None:
        self.array[...] = value

    def load(self, layout: Any) -> Any:
        return tile(self.array.copy())


class Descriptor:
    """A tensor descriptor; tiles are clipped at the ends of the array."""

    def __init__(self, array: np.ndarray, rows: int, width: int) -> None:
        self.array, self.block, self.layout, self.dtype = array, (1, 1, rows, width), None, "float"
        self.block_type = SimpleNamespace(nbytes=2 * rows * width)

    def place(self, start: list[int]) -> tuple[Any, ...]:
        batch, head, row, column = map(int, start)
        assert row >= 0 and column >= 0, "the TMA unit takes no store in front of a tensor"
        return batch, head, slice(row, row + self.block[2]), slice(column, column + self.block[3])


class Pointer:
    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.array, self.offset + steps)


# What the kernel calls


def load_tile(of: Descriptor, start: list[int], barrier: Shared, to: Shared) -> None:
    to.array[...] = np.nan

    def come() -> None:
        time.sleep(random.random() * LATEST)
        found, part = np.zeros(of.block), of.array[of.place(start)]
        found[0, 0, : part.shape[0], : part.shape[1]] = part
        to.array[...] = found
        barrier.barrier.add(expected=-of.block_type.nbytes)

    threading.Thread(target=come).start()


def store_tile(of: Descriptor, start: list[int], source: Shared) -> None:
    _here.stores = [*getattr(_here, "stores", []), (of, start, source)]


def stores_read() -> None:
    """Now they read: until here the tile must stay as it is."""
    for of, start, source in getattr(_here, "stores", []):
        part = of.array[of.place(start)]
        part[...] = source.array.reshape(of.block[2:])[: part.shape[0], : part.shape[1]]
    _here.stores = []


def warpgroup_mma(a: Any, b: Any, c: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    a, b = (x.array if isinstance(x, Shared) else x for x in (a, b))
    return tile(a @ b + c if use_acc else a @ b)


def _wait(barrier: Shared, phase: int) -> None:
    with barrier.barrier.changed:
        ended = lambda: barrier.barrier.phase & 1 != phase & 1  # noqa: E731
        if not barrier.barrier.changed.wait_for(ended, SECONDS):
            raise Stuck(threading.current_thread().name)


def _init(barrier: Shared, count: int) -> None:
    barrier.barrier.count = barrier.barrier.missing = count


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer) or not any(map(np.ndim, (condition, a, b))):
        return a if condition else b
    return tile(np.where(condition, a, b))


def _load(of: Pointer, mask: Any = True, other: Any = 0) -> Any:
    if np.ndim(of.offset) == 0:
        return of.array[of.offset].item() if mask else other
    return tile(np.where(mask, of.array[np.where(mask, of.offset, 0)], other))


def _store(of: Pointer, value: Any, mask: Any = True) -> None:
    if np.ndim(of.offset) == 0:
        if mask:
            of.array[of.offset] = value
        return
    of.array[of.offset[mask]] = value[mask]


def _atomic_add(of: Pointer, value: int, sem: str) -> int:
    with _memory:
        before = int(of.array[of.offset])
        of.array[of.offset] += value
        return before


def _shared(dtype: str, shape: list[int], layout: Any) -> Shared:
    if dtype == "int64":
        return Shared(np.zeros(shape), layout, [Barrier() for _ in range(shape[0])])
    return Shared(np.full(shape, -12345) if dtype == "int32" else np.full(shape, np.nan), layout)


def _maximum(a: Any, b: Any) -> Any:
    return tile(np.maximum(a, b)) if np.ndim(a) or np.ndim(b) else max(a, b)


def _max(x: Any, axis: int) -> Any:
    return tile(x.max(axis=axis)) if x.ndim > 1 else x.max().item()


def _specialize(partitions: Any, warps: Any, registers: Any) -> None:
    program, failed = _here.program, _here.failed

    def run(function: Any, arguments: Any) -> None:
        _here.program, _here.stores = program, []
        try:
            function(*arguments)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=each, name=f"partition {number} of program {program}")
        for number, each in enumerate(partitions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _jit(function: Any = None, **options: Any) -> Any:
    return function or (lambda named: named)


def _language(programs: int) -> SimpleNamespace:
    nothing = {
        name: lambda *given: None
        for name in ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
                     "SwizzledSharedLayout")
    }  # fmt: skip
    return SimpleNamespace(
        **nothing, constexpr=lambda x: x, static_range=range, to_tensor=lambda x: x,
        float32="float", int32="int32", int64="int64", uint32="uint32",
        program_id=lambda axis: _here.program, num_programs=lambda axis: programs,
        where=_where, maximum=_maximum, minimum=min, max=_max, sum=lambda x, axis: tile(x.sum(axis=axis)),
        exp2=lambda x: tile(np.exp2(x)), log2=lambda x: tile(np.log2(x)),
        cast=lambda x, dtype: _unsigned(x) if dtype == "uint32" else x, convert_layout=lambda x, layout: x,
        arange=lambda start, stop, layout=None: tile(np.arange(start, stop)),
        full=lambda shape, value, dtype, layout=None: tile(
            np.full(shape, value, dtype=np.int64 if dtype == "int32" else np.float64)
        ),
        allocate_shared_memory=_shared, atomic_add=_atomic_add, load=_load, store=_store,
        warp_specialize=_specialize,
        # the one text for a chip that a forward may have: the logistic
        inline_asm_elementwise=lambda text, operands, given, *_, **named: tile(1 / (1 + np.exp2(given[0]))),
    )  # fmt: skip


def run(text: str, arguments: Mapping[str, Any], programs: int) -> None:
    """Run `forward_kernel` of a generated module; raises the first error of any thread."""
    gl = _language(programs)
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=_init, wait=_wait,
        expect=lambda barrier, size: barrier.barrier.add(arrivals=1, expected=size),
        arrive=lambda barrier, count=1: barrier.barrier.add(arrivals=count),
    )  # fmt: skip
    scope: dict[str, Any] = {
        "gl": gl, "tl": gl, "gluon": SimpleNamespace(jit=_jit), "triton": SimpleNamespace(jit=_jit),
        "mbarrier": mbarrier, "warpgroup_mma": warpgroup_mma, "fence_async_shared": lambda: None,
        "warpgroup_mma_wait": lambda pending, deps: deps[0], "made_anew": lambda number: number,
        "load_tile": load_tile, "store_tile": store_tile, "stores_read": stores_read,
    }  # fmt: skip
    behind_imports = text[text.index("LOG2E = ") :]
    # numbers have no methods here
    behind_imports = re.sub(r"(\w+|\([^()]*\))\.to\((tl\.\w+)\)", r"tl.cast(\1, \2)", behind_imports)
    exec(compile(behind_imports, "forward", "exec"), scope)
    failed: list[BaseException] = []

    def program(number: int) -> None:
        _here.program, _here.failed = number, failed
        try:
            scope["forward_kernel"](**arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=program, args=(number,)) for number in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
