"""Launches a compiled kernel on other tensors without Triton's launcher in Python.

At each launch, Triton's launcher inspects all arguments to find the compiled kernel, and rebuilds TMA
descriptors. A launch that differs from an earlier one only in pointers of equal alignment needs none of this.

Only this file knows how Triton 3.6 and 3.9 call their launchers in C.

`counter` gives a launch a counter in memory, which is zero before and after the launch. Each stream has its
own counter, since launches of one stream run in order and other streams may run at the same time. So a call
neither allocates nor clears a counter.

`start` compiles and launches kernels with Triton's own launcher.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import getclosurevars
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flexmod.codegen.device_functions import WAIT
from flexmod.runtime.gluon import TensorDescriptor
from flexmod.runtime.private_torch import current_device, current_stream, is_stream_capturing
from flexmod.runtime.private_triton import CompiledKernel, knobs

# Descriptors in a launch's cache, by pointer: the allocator often returns the same addresses.
KEPT = 64
STREAM = 3  # the index of the stream in a launcher's arguments


def hooked() -> bool:
    """Returns whether hooks watch launches, as a profiler does; only Triton's launcher calls them."""
    runtime = knobs.runtime
    return bool(_calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook))


def _calls(hook: Any) -> Any:
    return getattr(hook, "calls", hook)


def kind_of_number(number: bool | int | float) -> object:
    """Returns a number's type in a compiled kernel that Triton may not specialize for the number."""
    if type(number) is not int:
        return type(number)
    return next((bits for bits in (32, 64) if -(1 << bits - 1) <= number < 1 << bits - 1), 0)


class Direct:
    """Launches `compiled` in a 1-D grid.

    `arguments` are the kernel's arguments in order. For tensors, descriptors and numbers that change, `slots`
    maps an argument's place to an input of a later call. Such a number keeps its kind (`kind_of_number`), and
    the kernel must not be specialized for it. A COUNTER becomes the stream's counter.

    Raises:
        LookupError: the launcher is unknown, or needs its own memory.
    """

    def __init__(
        self,
        compiled: object,
        device: torch.device,
        grid: tuple[int],
        arguments: Sequence[Any],
        slots: Mapping[int, int],
    ) -> None:
        if not isinstance(compiled, CompiledKernel) or type(compiled.run).__name__ != "CudaLauncher":
            raise LookupError
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise LookupError
        assert device.index is not None
        self._device = device.index
        self._launch = _in_c(launcher.launch)
        self._pointers: list[tuple[int, int]] = []
        self._numbers: list[tuple[int, int]] = []
        self._counters: list[int] = []
        self._descriptors: list[tuple[int, int, dict[int, Any], Callable[[int], Any]]] = []
        values = self._values = list[Any]()
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for place, value in enumerate(arguments):
            if isinstance(value, TensorDescriptor):
                make = _descriptor_maker(launcher, value, next(metas, None))
                self._descriptors.append((len(values), slots[place], {}, make))
                values += [None, *value.shape, *value.strides]
            elif value is COUNTER:
                self._counters.append(len(values))
                values.append(None)
            elif place in slots:
                kind = self._numbers if isinstance(value, (bool, int, float)) else self._pointers
                kind.append((len(values), slots[place]))
                values.append(None)
            else:
                values.append(value)
        start = [*grid, 1, 1, None, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl]
        nothing = (None, None, None)  # launch metadata, and the hooks before and after
        self._tuple = hasattr(launcher, "arg_annotations")
        if self._tuple:  # Triton 3.9
            if getattr(launcher, "gsan_enabled", False):
                raise LookupError
            signature = (launcher.arg_annotations, launcher.kernel_signature)
            self._head = [*start, compiled.packed_metadata, *nothing, None, None, *signature]
        else:
            self._head = [*start, None, None, compiled.packed_metadata, *nothing]

    def __call__(self, room: Sequence[Any]) -> None:
        """Launches on the current stream."""
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                self._start(room)
        else:
            self._start(room)

    def _start(self, room: Sequence[Any]) -> None:
        values = self._values.copy()
        for place, slot in self._pointers:
            values[place] = room[slot].data_ptr()
        for place, slot in self._numbers:
            values[place] = room[slot]
        for place, slot, known, make in self._descriptors:
            pointer = room[slot].data_ptr()
            found = known.get(pointer)
            if found is None:
                if len(known) >= KEPT:
                    known.clear()
                found = known[pointer] = make(pointer)
            values[place] = found
        stream = current_stream(self._device)
        for place in self._counters:
            values[place] = counter(self._device, stream).data_ptr()
        head = self._head.copy()
        head[STREAM] = stream
        if self._tuple:
            self._launch(*head, values)
        else:
            self._launch(*head, *values)


def _in_c(launch: Any) -> Callable[..., None]:
    """Returns the launcher in C, without the function that Triton wraps around it for descriptors."""
    if isinstance(launch, FunctionType):
        launch = getclosurevars(launch).nonlocals["launcher"]
    if isinstance(launch, FunctionType):
        raise LookupError
    return launch


def _descriptor_maker(launcher: Any, descriptor: TensorDescriptor, meta: Any) -> Callable[[int], Any]:
    """Returns Triton's function that makes a TMA descriptor, for other addresses."""
    make = getattr(sys.modules[type(launcher).__module__], "make_tensordesc_arg", None)
    if make is None or meta is None:
        raise LookupError
    pattern = copy.copy(descriptor)
    pattern.base = None
    others = (None,) if hasattr(launcher, "arg_annotations") else ()

    def made(pointer: int) -> Any:
        at = copy.copy(pattern)
        at.base = SimpleNamespace(data_ptr=lambda: pointer)  # a descriptor needs only the address
        return make(at, meta, *others)[0]

    return made


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


def start(function: Any, grid: tuple[int], device: torch.device, arguments: Mapping[str, Any]) -> Any:
    """Runs function[grid](**arguments) on the device. Returns Triton's compiled kernel."""
    with torch.cuda.device(device):
        return function[grid](**_ready(function, arguments, device))


def compiled(function: Any, device: torch.device, arguments: Mapping[str, Any]) -> Any:
    """Returns the compiled kernel for a launch with these arguments."""
    with torch.cuda.device(device):
        return function.warmup(grid=(1,), **_ready(function, arguments, device))


def with_counters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a launch with stand-ins of counters, without memory."""
    counter = torch.empty(1, dtype=torch.int32, device="meta")
    return {name: counter if value is COUNTER else value for name, value in arguments.items()}


def options_of(function: Any) -> dict[str, Any]:
    """Returns options of Triton's backend for a kernel, if a launch has no others.

    Products are fused with sums; Triton's default for it will change. A kernel that waits for
    earlier kernels may start before their end, by CUDA's "programmatic dependent launch".
    """
    waits = f"\n    {WAIT}" in getattr(function, "src", "")
    return {"enable_fp_fusion": True, **({"launch_pdl": True} if waits else {})}


def _ready(function: Any, arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {**options_of(function), **filled(arguments, device)}
