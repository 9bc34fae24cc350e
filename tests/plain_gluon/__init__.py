"""Hopper's generated kernels as plain Python: each partition of warps a thread, its tiles arrays of float64.

    with on_python():
        planned.forward(hopper_kernels, ...), planned.backward(hopper_kernels, ...)
        flex_attention(..., kernel_options={"BACKEND": "INTERPRET", "TEMPLATE": "hopper"})

The partitions take turns, in an order drawn from a seed, and copies come late. To hang is an error (`Stuck`).
So is, whatever the order, to read what has not come or to write what may still be read (`Race`): `order.py`.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexmod.backends import arguments, hopper
from flexmod.backends.families import families
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.storage import Axis
from flexmod.codegen.device_functions import WAIT
from flexmod.codegen.hopper import TARGET, HopperKernels, text
from flexmod.codegen.spec import Direction
from flexmod.codegen.variant import Variant
from flexmod.runtime import launch
from flexmod.runtime.direct import COUNTER
from plain_gluon.language import names, run_program
from plain_gluon.memory import Descriptor, Pointer
from plain_gluon.mods import called, functions_of, kernel, split
from plain_gluon.order import SOURCE, Program, Race
from plain_gluon.tasks import Stuck, Tasks

__all__ = ["Race", "Stuck", "on_python"]

PROCESSORS = 3
OPTIONS = ("num_warps", "maxnreg")


@contextmanager
def on_python(
    changed: Callable[[str], str] = lambda source: source, seed: int = 0, ordered: bool = False
) -> Iterator[None]:
    """Here the launches of `backends/hopper.py` run as plain Python, from texts that are `changed`.

    Calls with BACKEND="INTERPRET" come there where a Hopper chip's would. `seed`: of the order of turns, and
    of the shape where a call has none. `ordered`: masks of runs have an order of rows, as a chip may make it.
    """
    own_order = hopper._order

    def order(mask: BlockMask | None, axis: Axis, wanted: bool = True) -> Mapping[str, Any]:
        given = own_order(mask, axis, wanted)
        if not given or not ordered:
            return given
        return {name: mask.storage.runs(axis).rows for name in given}  # `start` makes the order of it

    own_start = launch.start

    def start(kernels: Any, name: str, device: Any, programs: tuple[int], arguments: Any) -> None:
        if not isinstance(kernels, HopperKernels):
            own_start(kernels, name, device, programs, arguments)
            return
        p = kernels.portable
        source = _text(p.spec, kernels.score, p.mask, p.grad, p.captures)
        if ordered:
            rows = {n: x for n, x in arguments.items() if n.endswith("_ORDER") and x is not None}
            arguments = {**arguments, **{n: by_length(x) for n, x in rows.items()}}
        run_kernel(changed(source), name, programs[0], arguments, seed)

    own_settle = launch.choose_tile

    def choose_tile(kernels: Any, name: str, *given: Any) -> Any:
        if not isinstance(kernels, HopperKernels):
            return own_settle(kernels, name, *given)
        shapes = kernels.ladder(name)
        return shapes[seed % len(shapes)]

    def why(variant: Variant, way: Direction, target: str, **facts: bool) -> str | None:
        return hopper.obstacle(variant, way, TARGET, **facts)

    first, _ = families()
    with (
        mock.patch.object(launch, "start", start),
        mock.patch.object(hopper, "_order", order),
        mock.patch.object(launch, "choose_tile", choose_tile),
        mock.patch.object(first, "obstacle", why),
        # a call of another seed has another shape
        mock.patch("flexmod.calls.autograd._has_kinds", lambda mask: False),
        mock.patch.object(arguments, "processors", lambda device: PROCESSORS),
        mock.patch.object(launch, "TensorDescriptor", described),
        mock.patch.object(launch, "layout", lambda block, dtype: None),
    ):
        yield


_text = lru_cache(16)(text)  # one for the launches of a backward


def by_length(rows: Tensor) -> Tensor:
    """The rows of a mask, those with most tiles first; see `block_mask/tiles.py`."""
    return rows[..., 0].sum(-1).argsort(descending=True).int()


def run_kernel(source: str, name: str, programs: int, arguments: Mapping[str, Any], seed: int = 0) -> None:
    """Run a kernel of a module; raises the first error of any partition."""
    code, functions, lines = _compiled(source)
    linecache.cache[SOURCE] = (len(source), None, lines, SOURCE)
    if name in functions:
        kernel(functions[name])[(programs,)](**arguments)
        return
    scope = names(programs) | {key: called(function) for key, function in functions.items()}
    exec(code, scope)
    counter = torch.zeros(1, dtype=torch.int32)
    given = {key: _given(x, counter) for key, x in arguments.items() if key not in OPTIONS}
    tasks = Tasks(seed)

    def run_one(number: int) -> None:
        run_program(Program(number, tasks), scope[name], given)

    tasks.run([(f"program {number}", partial(run_one, number)) for number in range(programs)])
    assert counter[0] == 0, "the next launch begins with a counter of zero"


@lru_cache(16)
def _compiled(source: str) -> tuple[CodeType, dict[str, Callable[..., Any]], list[str]]:
    """The module's Gluon, its functions in Triton, its lines."""
    triton, gluon = split(source.replace(WAIT, "pass"))  # launches run one after the other here
    return compile(gluon, SOURCE, "exec"), functions_of(triton), source.splitlines(keepends=True)


def described(base: Tensor, shape: list[int], strides: list[int], block: list[int], _: None) -> Descriptor:
    """In place of a TensorDescriptor, also for float64."""
    places = [base.data_ptr(), *(stride * base.element_size() for stride in strides[:-1])]
    assert strides[-1] == 1 and not any(place % 16 for place in places), "what the TMA unit can address"
    return Descriptor(base.as_strided(shape, strides), block)


def _given(x: Any, counter: Tensor) -> Any:
    """A launch argument as a kernel has it here."""
    if x is COUNTER:
        return Pointer(counter)
    return Pointer(x) if isinstance(x, Tensor) else x
