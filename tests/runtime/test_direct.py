"""A compiled kernel launched again: what its launcher in C is given, in Triton 3.6's way and in 3.9's.

The launchers here are stand-ins that write down what they get; tests/gpu launches real ones.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexmod.runtime import direct
from flexmod.runtime.direct import COUNTER, KEPT, Direct, filled, kind_of_number
from flexmod.runtime.gluon import layout_of

DEVICE = torch.device("cuda", 0)
BLOCK = (1, 1, 64, 64)


class CudaLauncher:
    """As Triton 3.6 has it: a function around the launcher where there are descriptors."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, descriptors: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        launcher = Written(self.calls)

        def inner(*arguments: Any) -> None:
            launcher(*arguments)

        self.launch = inner if descriptors else launcher


class Written:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __call__(self, *arguments: Any) -> None:
        self._calls.append(arguments)


def make_tensordesc_arg(descriptor: Any, meta: str, *others: None) -> list[Any]:
    MADE.append(descriptor.base.data_ptr())
    return [f"{meta} at {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]


MADE: list[int] = []


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index, raising=False)
    MADE.clear()


def compiled(launcher: Any, metas: Any = ()) -> Any:
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.function, kernel.packed_metadata, kernel._run = 99, (4, 1, 1024), launcher
    kernel.metadata = SimpleNamespace(tensordesc_meta=metas)
    return kernel


def described(tensor: torch.Tensor) -> TensorDescriptor:
    layout = layout_of(BLOCK, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(BLOCK), layout)


def test_pointers() -> None:
    launcher = CudaLauncher(descriptors=False)
    one, other = torch.zeros(4), torch.ones(4)
    launch = Direct(compiled(launcher), DEVICE, (5,), [one, 3, None, other, 0.5], {0: 1, 3: 0})
    for tensors in ([one, other], [other, other]):
        launch(tensors)
        head = (5, 1, 1, 7, 99, False, True, None, None, (4, 1, 1024), None, None, None)
        pointers = [tensor.data_ptr() for tensor in tensors]
        assert launcher.calls[-1] == (*head, pointers[1], 3, None, pointers[0], 0.5)


def test_numbers() -> None:
    """Each launch has its own; others stay what they were."""
    launcher = CudaLauncher(descriptors=False)
    tensor = torch.zeros(4)
    launch = Direct(compiled(launcher), DEVICE, (5,), [tensor, 3, 40, 0.5, True], {0: 0, 2: 1, 3: 2, 4: 3})
    for numbers in ([41, 0.25, False], [-(2**31), float("inf"), True]):
        launch([tensor, *numbers])
        assert launcher.calls[-1][-5:] == (tensor.data_ptr(), 3, *numbers)


def test_kinds_of_numbers() -> None:
    """What Triton types them as."""
    assert [kind_of_number(number) for number in (0, 2**31 - 1, -(2**31))] == [32, 32, 32]
    assert [kind_of_number(number) for number in (2**31, -(2**31) - 1, 2**63 - 1)] == [64, 64, 64]
    assert [kind_of_number(number) for number in (1, True, 1.0)] == [32, bool, float]


@pytest.mark.parametrize("triton", ["3.6", "3.9"])
def test_descriptors(triton: str) -> None:
    launcher: Any = CudaLauncher(descriptors=True)
    if triton == "3.9":
        launcher.arg_annotations, launcher.kernel_signature = ["annotations"], b"signature"
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    launch = Direct(compiled(launcher, ["meta"]), DEVICE, (5,), [described(x), 3], {0: 0})
    for tensor in (x, torch.ones_like(x), x):
        launch([tensor])
        values = (f"meta at {tensor.data_ptr()}", *x.shape, *x.stride(), 3)
        start, packed, nothing = (5, 1, 1, 7, 99, False, True), (4, 1, 1024), (None, None, None)
        if triton == "3.9":
            *head, given = launcher.calls[-1]
            assert head == [*start, packed, *nothing, None, None, ["annotations"], b"signature"]
            assert tuple(given) == values
        else:
            assert launcher.calls[-1] == (*start, None, None, packed, *nothing, *values)
    assert len(MADE) == 2


def test_a_counter_is_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each stream and device, kept; in a graph that is being recorded, one of the graph's own."""
    made: list[torch.Tensor] = []
    stream, capturing = [7], [False]

    def zero(device: int) -> torch.Tensor:
        made.append(torch.zeros(1, dtype=torch.int32))
        return made[-1]

    monkeypatch.setattr(direct, "_zero", zero)
    monkeypatch.setattr(direct, "_made_outside", zero)
    monkeypatch.setattr(direct, "_kept", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0])
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    launcher = CudaLauncher(descriptors=False)
    launch = Direct(compiled(launcher), DEVICE, (5,), [COUNTER, 3], {})
    for number, graph in ((7, False), (8, False), (7, False), (7, True), (7, True), (8, False)):
        stream[0], capturing[0] = number, graph
        launch([])
    assert [call[3] for call in launcher.calls] == [7, 8, 7, 7, 7, 8]
    of_seven, of_eight, *of_graphs = (tensor.data_ptr() for tensor in made)
    assert [call[13] for call in launcher.calls] == [of_seven, of_eight, of_seven, *of_graphs, of_eight]
    assert len(of_graphs) == 2
    stream[0] = 8
    given = {"COUNTER": COUNTER, "X": made[0]}
    assert filled(given, DEVICE) == {"COUNTER": made[1], "X": made[0]}
    plain = {"X": made[0]}
    assert filled(plain, DEVICE) is plain


def test_a_counter_is_made_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is of no memory pool of this one. What goes to this stream waits for it."""
    threads, waited = [], []
    stream = SimpleNamespace(record_event=lambda: "zeroed", wait_event=waited.append)

    def zero(device: int) -> torch.Tensor:
        threads.append(threading.get_ident())
        return torch.zeros(1, dtype=torch.int32)

    monkeypatch.setattr(direct, "_zero", zero)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert direct._made_outside(0).tolist() == [0]
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert waited == ["zeroed"]


def test_how_many_descriptors_are_kept() -> None:
    launcher = CudaLauncher(descriptors=True)
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    launch = Direct(compiled(launcher, ["meta"]), DEVICE, (5,), [described(x)], {0: 0})
    for number in range(3 * KEPT):
        launch([SimpleNamespace(data_ptr=lambda number=number: number)])
        assert launcher.calls[-1][13] == f"meta at {number}"
        assert len(launch._descriptors[0][2]) <= KEPT


def test_another_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Guard:
        def __init__(self, index: int) -> None:
            entered.append(index)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Guard)
    launcher = CudaLauncher(descriptors=False)
    launch = Direct(compiled(launcher), torch.device("cuda", 1), (5,), [], {})
    launch([])
    assert entered == [1] and launcher.calls[0][3] == 8


def unknown(name: str) -> Any:
    launcher: Any = CudaLauncher(descriptors=name != "pointers")
    if name == "scratch":
        launcher.global_scratch_size = 1
    if name == "instrumented":
        launcher.arg_annotations, launcher.kernel_signature, launcher.gsan_enabled = [], b"", True
    if name == "wrapped otherwise":
        launcher.launch = lambda *arguments: None
    if name == "wrapped twice":
        launcher.launch = wrapped(launcher.launch)
    return compiled(launcher, [] if name == "no metadata" else ["meta"])


def wrapped(launcher: Any) -> Any:
    return lambda *arguments: launcher(*arguments)


@pytest.mark.parametrize(
    "name", ["scratch", "instrumented", "wrapped otherwise", "wrapped twice", "no metadata"]
)
def test_launchers_that_are_not_known(name: str) -> None:
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    with pytest.raises(LookupError):
        Direct(unknown(name), DEVICE, (5,), [described(x)], {0: 0})


def test_other_kernels() -> None:
    with pytest.raises(LookupError):
        Direct(SimpleNamespace(run=CudaLauncher(False)), DEVICE, (5,), [], {})
    with pytest.raises(LookupError):
        Direct(compiled(SimpleNamespace()), DEVICE, (5,), [], {})
