"""What a generated module calls, under the names that it has there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from plain_gluon import products
from plain_gluon.memory import Descriptor, Pointer, Shared
from plain_gluon.order import Actor, Barrier, Program, Race, here, source_line
from plain_gluon.tiles import plain, real, tile

UNKNOWN_NUMBER = -12345  # in shared memory that nobody has written


class Ring(list):
    """Barriers side by side."""

    def index(self, place: int) -> Barrier:  # type: ignore[override]
        return self[place]


# Shared memory and what goes there


def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype == "int64":
        barriers = Ring(here.program.barrier() for _ in range(shape[0]))
        return barriers if len(shape) > 1 else barriers[0]
    return Shared.new(dtype, shape, layout, UNKNOWN_NUMBER if dtype == "int32" else math.nan)


def load_tile(of: Descriptor, start: Sequence[int], barrier: Barrier, to: Shared) -> None:
    assert to.array.shape == of.block
    to.written(here.actor, here.actor.tick(), by=barrier)
    to.array[...] = np.nan
    barrier.copies += 1

    def come() -> None:
        to.array[...] = of.read(start)
        barrier.come(of.block_type.nbytes)

    here.program.tasks.event(come)


def send_tile(of: Descriptor, start: Sequence[int], source: Shared, add: bool) -> None:
    assert source.array.shape == of.block
    line = source_line()
    issued = here.actor.tick()

    def look() -> None:
        if not source.written_before(issued, by_a_unit=True):
            raise Race(f"{here.actor.name} sends what is not there, or no more: {line}")

    def read() -> None:
        look()
        source.read(here.actor)
        of.write(start, source.array, add)

    look()
    here.actor.stores.append(read)


def stores_read() -> None:
    """Now they read: until here the tiles must stay as they are."""
    here.actor.tick()
    for read in here.actor.stores:
        read()
    here.actor.stores.clear()
    here.actor.tick()


def wait(barrier: Barrier, phase: int, pred: Any = True) -> None:
    if not pred:
        return
    here.program.tasks.pause(lambda: barrier.over(phase), source_line())
    here.actor.hear(barrier.read_message)


def arrive(barrier: Barrier, count: int = 1, expected: int = 0, pred: Any = True) -> None:
    if pred:
        here.program.tasks.pause()
        barrier.arrive(here.actor, count, expected)


def multiply(a: Any, b: Any, c: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    return products.multiply(here.actor, a, b, c, use_acc, is_async)


MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: None, wait=wait, arrive=arrive,
    init=lambda barrier, count: barrier.init(count),
    expect=lambda barrier, size: arrive(barrier, expected=size),
)  # fmt: skip


# Programs and their partitions


def specialize(partitions: Any, warps: Any, registers: Any) -> None:
    program = here.program

    def partition(actor: Actor, function: Callable[..., Any], given: Sequence[Any]) -> Callable[[], None]:
        def run() -> None:
            here.program, here.actor = program, actor
            with np.errstate(all="ignore"):
                function(*given)
            if actor.products or actor.stores:
                raise Race(f"{actor.name} ends before what it has begun")

        return run

    started = [
        program.tasks.start(actor.name, partition(actor, *each))
        for number, each in enumerate(partitions)
        for actor in [Actor(program.actors, f"partition {number} of program {program.number}")]
    ]
    program.tasks.pause(lambda: all(task.ended for task in started), "warp_specialize")


def jit(function: Any = None, **options: Any) -> Any:
    return function or (lambda named: named)


# Numbers, tiles and memory


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer) or not any(map(np.ndim, (condition, a, b))):
        return a if condition else b
    return tile(np.where(*map(plain, (condition, a, b))))


def load(of: Pointer, mask: Any = True, other: Any = 0) -> Any:
    return tile(of.load(plain(mask), plain(other)))


def store(of: Pointer, value: Any, mask: Any = True) -> None:
    of.store(plain(value), plain(mask))


def atomic_add(of: Pointer, value: Any, mask: Any = True, sem: str = "") -> Any:
    here.program.tasks.pause()
    return of.add(plain(value), plain(mask))


def full(shape: Sequence[int], value: Any, dtype: str, layout: Any = None) -> Any:
    return tile(np.full(shape, value, dtype=np.float64 if dtype.startswith("float") else np.int64))


def permute(of: Any, order: Sequence[int]) -> Any:
    return tile(plain(of).transpose(order))


def split(of: Any) -> tuple[Any, Any]:
    return tile(plain(of)[..., 0]), tile(plain(of)[..., 1])


def join(first: Any, second: Any) -> Any:
    return tile(np.stack([plain(first), plain(second)], -1))


def gather(of: Any, places: Any, axis: int) -> Any:
    return tile(np.take_along_axis(plain(of), plain(places), axis))


def reduced(function: Callable[..., Any]) -> Callable[[Any, int], Any]:
    def reduce(x: Any, axis: int) -> Any:
        found = function(plain(x), axis=axis)
        return tile(found) if np.ndim(found) else found.item()

    return reduce


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: tile(function(*map(plain, given)))


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return np.asarray(real(a), np.float64) * real(b) + c


LAYOUTS = (
    "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout",
)  # fmt: skip
TYPES = ("float32", "int32", "int64")


def language(programs: int) -> SimpleNamespace:
    """`gl`, in a launch of so many programs."""
    return SimpleNamespace(
        **{name: elementwise(getattr(np, name)) for name in ("abs", "ceil", "exp2", "log2")},
        **dict.fromkeys(LAYOUTS, lambda *given: None), **{name: name for name in TYPES},
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *given: None),
        constexpr=lambda x: x, static_range=range, to_tensor=lambda x: x,
        program_id=lambda axis: here.program.number, num_programs=lambda axis: programs,
        where=where, load=load, store=store, atomic_add=atomic_add, full=full, gather=gather, permute=permute,
        split=split, join=join,
        minimum=elementwise(np.fmin), maximum=elementwise(np.fmax), fma=elementwise(fused),
        max=reduced(np.fmax.reduce), sum=reduced(np.sum),
        cast=lambda x, dtype: x, convert_layout=lambda x, layout: x,
        arange=lambda start, stop, layout=None: tile(np.arange(start, stop)),
        allocate_shared_memory=allocate, warp_specialize=specialize, multiple_of=claimed_multiple,
    )  # fmt: skip


def claimed_multiple(number: Any, divisor: list[int]) -> Any:
    assert number % divisor[0] == 0, "the kernel tells the compiler what is not so"
    return number


def names(programs: int) -> dict[str, Any]:
    """The names that a generated module imports, for its Gluon."""
    return {
        "gl": language(programs), "gluon": SimpleNamespace(jit=jit), "mbarrier": MBARRIER,
        "fence_async_shared": lambda: here.actor.fence(),
        "warpgroup_mma": multiply, "warpgroup_mma_init": lambda of: of,
        "warpgroup_mma_wait": lambda pending, deps: products.wait(here.actor, pending, deps),
        "load_tile": load_tile, "stores_read": stores_read, "opaque": lambda number: number,
        "tile_read": lambda: here.actor.fence(),
        "running_max": lambda before, of: tile(np.fmax(plain(before), np.fmax.reduce(plain(of), 1))),
        "by_row_of": lambda of, numbers: numbers[:, None],
        "pack_float8": lambda numbers, dtype: numbers, "unpack_float8": lambda packed, layout, dtype: packed,
        "store_tile": lambda of, start, source: send_tile(of, start, source, add=False),
        "add_tile": lambda of, start, source: send_tile(of, start, source, add=True),
    }  # fmt: skip


def run_program(program: Program, kernel: Callable[..., Any], arguments: Any) -> None:
    program.enter()
    with np.errstate(all="ignore"):
        kernel(**arguments)
