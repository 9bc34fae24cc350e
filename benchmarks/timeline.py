"""Which thread runs which part of the compiler when, in a first step, with wall-clock and CPU seconds."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

COMPILER = "triton.backends.nvidia.compiler:CUDABackend."
WATCHED = (
    ("flexmod.backends.families:Generated.forward", "plan"),
    ("flexmod.backends.families:Generated.backward", "plan"),
    ("flexmod.backends.families:Generated.backward_compiler", "plan ahead"),
    ("flexmod.codegen.render:_rendered", "write text"),
    ("flexmod.codegen.cache:load", "load text"),
    ("flexmod.block_mask.generated:compile_ahead", "mask's kernels"),
    ("flexmod.runtime.private_triton:start_compiler", "start Triton"),
    ("flexmod.runtime.private_triton:read_own_files", "read Triton"),  # or wait for it
    ("flexmod.runtime.side_by_side:in_threads", "compile in threads"),
    ("flexmod.runtime.direct:compiled", "compile"),  # or the wait for another thread's compile
    ("triton.compiler.compiler:ASTSource.make_ir", "write IR"),
    ("triton.experimental.gluon._runtime:GluonASTSource.make_ir", "write IR"),
    (f"{COMPILER}make_ttir", "TTIR"),
    (f"{COMPILER}make_ttgir", "TTGIR"),
    (f"{COMPILER}gluon_to_ttgir", "TTGIR"),
    (f"{COMPILER}make_llir", "LLVM IR"),
    (f"{COMPILER}make_ptx", "PTX"),
    (f"{COMPILER}make_cubin", "ptxas"),
    ("triton.runtime.build:_build", "gcc"),
    ("triton.compiler.compiler:CompiledKernel._init_handles", "load kernel"),
    ("flexmod.runtime.compiler_bugs:losses", "judge"),
    ("flexmod.runtime.compiler_bugs:wrong", "judge"),
)  # fmt: skip
SHORTEST = 0.01  # seconds of a row


class Row(NamedTuple):
    """`kernel`: the one that the thread compiled last. `start` and `end` are seconds, `cpu` the thread's."""

    thread: str
    what: str
    kernel: str
    start: float
    end: float
    cpu: float


class Timeline:
    """Notes each call of the WATCHED functions, and what `note` surrounds."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._began = time.perf_counter()
        self._of_thread = threading.local()

    def watch(self) -> None:
        """Wraps the functions that this version of Triton has."""
        for place, what in WATCHED:
            owner, name, plain = find(place)
            if plain is not None:
                function = plain.__func__ if isinstance(plain, staticmethod) else plain
                wrapped = self._wrapped(function, what)
                setattr(owner, name, staticmethod(wrapped) if isinstance(plain, staticmethod) else wrapped)

    def note(self, what: str, run: Callable[[], Any]) -> Any:
        start, cpu = time.perf_counter() - self._began, time.thread_time()
        try:
            return run()
        finally:
            thread = threading.current_thread()
            name = "main" if thread is threading.main_thread() else f"{thread.name} {thread.native_id}"
            end, kernel = time.perf_counter() - self._began, getattr(self._of_thread, "kernel", "")
            self.rows.append(Row(name, what, kernel, start, end, time.thread_time() - cpu))

    def _wrapped(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            if what == "compile":
                self._of_thread.kernel = given[0].__name__
            return self.note(what, lambda: function(*given, **named))

        return run


def find(place: str) -> tuple[Any, str, Any]:
    """The owner of a function, its name there, and the function; None where there is none."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return owner, name, vars(owner).get(name)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """The rows in order of their start; threads are numbered in the order of their first row."""
    shown = [
        row
        for row in sorted(map(Row._make, rows), key=lambda row: row.start)
        if row.end - row.start >= SHORTEST
    ]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row.thread for row in shown))}
    lines = [
        (numbers[row.thread], row.what, row.kernel, row.start, row.end, row.end - row.start, row.cpu)
        for row in shown
    ]
    return tabulate(
        lines,
        ["thread", "what", "kernel", "start", "end", "seconds", "CPU"],
        tablefmt="github",
        floatfmt=".2f",
    )
