"""Wraps private names of Triton, so that only this file depends on them.

Triton documents `triton`, `triton.language`, `triton.testing` and `triton.experimental.gluon`; everything
else is private. This file works with Triton 3.6 to 3.9.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton import knobs as knobs
from triton._utils import canonicalize_dtype as canonicalize_dtype
from triton.backends.compiler import BaseBackend
from triton.backends.compiler import GPUTarget as GPUTarget
from triton.compiler import ASTSource
from triton.compiler import CompiledKernel as CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin as builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import build
from triton.runtime.cache import FileCacheManager
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources as OutOfResources
from triton.runtime.jit import JITCallable, create_function_from_signature

from flexmod.runtime.locks import Lock

# compiles without a launch


class Specialized(NamedTuple):
    """What Triton specializes a jit function on, in Triton's own form."""

    signature: dict[str, str]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: dict[str, Any]
    target: GPUTarget

    def source(self, function: Any) -> Any:
        kind = GluonASTSource if function.is_gluon() else ASTSource
        return kind(function, self.signature, self.constexprs, self.attrs)


def compile_same(function: Any, facts: Specialized) -> Any:
    """Compiles a jit function as a launch in any process would that has the same facts."""
    settle_key(function)
    return triton.compile(
        _written_in_turn(facts.source(function)), target=facts.target, options=facts.options
    )


def compile_for(
    target: GPUTarget,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    divisible: Mapping[str, bool],
    options: Mapping[str, object],
) -> Any:
    """Compiles a kernel; of the result, `asm` has every stage by name, `metadata.shared` is in bytes.

    The argument `signature` has Triton's types of the run-time parameters. For each parameter that a launch
    inspects, `divisible` says whether it is a multiple of 16. A launch with the same facts finds this kernel
    in Triton's cache.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    sixteens = {
        (names.index(name),): [["tt.divisibility", 16]] if divisible[name] else []
        for name in names
        if name in divisible
    }
    return compile_same(kernel, Specialized(types, dict(constexprs), sixteens, dict(options), target))


def specialized(
    function: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[str, bool], dict[str, Any]]:
    """Returns what Triton specializes a jit function on for a launch with these arguments, see `compile_for`:
    the signature, the constants, which parameters are multiples of 16, and the options among the arguments.
    """
    bind = create_function_from_signature(function.signature, function.params, BaseBackend)
    values, kinds, options = bind(**arguments)
    signature, constants, divisible = {}, {}, {}
    for name, (kind, mark) in zip(values, kinds, strict=True):
        if kind == "constexpr":
            constants[name] = values[name]
            continue
        signature[name] = kind
        if mark is not None:
            divisible[name] = "D" in mark
    return signature, constants, divisible, options


def assembler(target: GPUTarget) -> list[str]:
    """Returns Triton's ptxas command for a chip, with its flags that change the use of registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    return [get_ptxas(target.arch).path, *_assembler_flags()]


@cache
def _assembler_flags() -> list[str]:
    """Later versions have such a flag."""
    from triton.backends.nvidia.compiler import CUDABackend

    found = re.search(r"--regAllocOptLevel=\d", inspect.getsource(CUDABackend.make_cubin))
    return [found[0]] if found else []


def disassembler() -> Path | None:
    """cuobjdump; None where Triton came without it."""
    tool = Path(knobs.nvidia.cuobjdump.path)
    return tool if tool.exists() else None


# Triton's cache of compiled kernels: a folder for each, by its key

Compile = Callable[[], Any]


def around_compiles(function: Any, run: Callable[[str, Specialized, Compile], Any]) -> None:
    """Has `run(key, facts, compile)` do each compile of a jit function, and return what `compile()` returns.

    A compile may find the kernel in Triton's cache. `key` is the same in all processes that would find the
    same one. Nothing changes where Triton has no such step.
    """
    plain = getattr(function, "_do_compile", None)
    if plain is None:
        return

    def compile_one(
        kind: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> Any:
        with _in_python:
            settle_key(function)
        target = driver.active.get_current_target()
        facts = Specialized(signature, constexprs, attrs, vars(options), target)
        places = (function.cache_key, kind, target, knobs.cache.dir)
        key = hashlib.sha256(str(places).encode()).hexdigest()

        def compile_kernel() -> Any:
            known = function.device_caches[device][0].get(kind)
            if known is not None:  # another thread made it while this one waited
                return known
            start_compiler()
            read_own_files()
            _write_in_turn(function)
            return plain(kind, signature, device, constexprs, options, attrs, warmup)

        return run(key, facts, compile_kernel)

    function._do_compile = compile_one


# Parsing and writing IR is Python, which one thread runs at a time in any case. Python 3.11.0 to 3.11.7 raise
# SystemError where two threads parse at once: https://github.com/python/cpython/issues/106905
_in_python = Lock(threading.RLock)


def settle_key(function: Any) -> None:
    """Gives a jit function the same `cache_key` in every process, whichever kernels were compiled before.

    A key includes the constants of called functions, but only if these have a key already. So called
    functions get their keys first.
    """
    with _in_python:
        if not isinstance(function, JITCallable) or function.hash is not None:
            return
        code, names = function.fn.__code__, function.__globals__
        used = [names[name] for name in code.co_names if name in names]
        modules = [one for one in used if isinstance(one, ModuleType)]
        for called in [*used, *(getattr(one, name, None) for one in modules for name in code.co_names)]:
            if called is not function:
                settle_key(called)
        function.cache_key  # noqa: B018 - found by the lookup


def has_compiled(function: Any, device: int | None) -> bool:
    """Has this process a kernel of a jit function for the device, whatever its arguments are?"""
    caches = function.device_caches.get(device or 0)
    return caches is not None and bool(caches[0])


def start_compiler() -> None:
    """Has Triton find its driver, and a thread read Triton's own files for keys; threads would each do both.

    Each takes some tenths of a second, mostly outside of Python. Only a compile needs the files.
    """
    with _starting:
        _start_reading()
        driver.active.get_current_target()


@cache
def _start_reading() -> None:
    with suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=read_own_files).start()


_starting, _reading = Lock(), Lock()


def read_own_files() -> str:
    """Has Triton read its own files, and returns the hash of them that its keys contain; "" if unknown."""
    with _reading, suppress(ImportError):  # later versions may keep it elsewhere
        from triton.runtime.cache import triton_key

        return triton_key()
    return ""


def settings() -> tuple[str, str]:
    """Returns what another process needs in order to leave a kernel where this one looks for it.

    That is the hash of Triton's files, which it need not read again, and the folder of Triton's cache.
    """
    return read_own_files(), knobs.cache.dir


def take_settings(found: tuple[str, str]) -> None:
    key, knobs.cache.dir = found
    if key:
        triton.runtime.cache.triton_key = lambda: key


def load_launchers_apart() -> None:
    """Has Triton give each launcher in C a module of its own, when it loads one.

    Python has one module for all extension modules of a name, if they are without state, and Triton calls all
    launchers alike. A launcher that is loaded again is written into the module of another one, from which a
    second thread may be about to read its own. See `compiler_bugs`.
    """
    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return

    def load_apart(name: str, path: str) -> ModuleType:
        module = ModuleType(name)
        with _loading:
            vars(module).update(vars(load(name, path)))
        return module

    build._load_module_from_path = load_apart


_loading = Lock()
load_launchers_apart()


def build_launcher(compiled: Any) -> None:
    """Builds the launcher in C of a compiled kernel, which lies in Triton's cache then. Loads no kernel."""
    if isinstance(compiled, CompiledKernel):
        driver.active.launcher_cls(compiled.src, compiled.metadata)


def build_launcher_of(source: Any) -> None:
    """Builds the launcher in C for a kernel that is not compiled yet, from its written source.

    The C text depends on the source and on the kind of its tensor descriptors. Gluon's are the GPU's own.
    """
    descriptors = sum(str(kind).startswith("tensordesc") for kind in source.signature.values())
    unknown = dict.fromkeys(
        ["global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"], 0
    )
    gluon = isinstance(source, GluonASTSource)
    metadata = SimpleNamespace(
        **unknown,
        tensordesc_meta=[{}] * descriptors if gluon else None,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )
    driver.active.launcher_cls(source, metadata)


_of_thread = threading.local()  # `begin`: see `after_writing`


@contextmanager
def after_writing(begin: Callable[[Any], object]) -> Iterator[None]:
    """Calls `begin` once: when this thread has written the IR of a kernel that it compiles inside.

    To write IR is Python, in which other threads would slow it down; the rest of a compile is not. `begin`
    gets the kernel's source. Where no IR is written, it gets None at the end; where the body raises, perhaps
    it is not called.
    """
    _of_thread.begin = begin
    try:
        yield
        tell_written(None)
    finally:
        _of_thread.begin = None


def tell_written(source: Any) -> None:
    """Ends this thread's wait for the IR of a kernel, see `after_writing`."""
    begin, _of_thread.begin = getattr(_of_thread, "begin", None), None
    if begin is not None:
        begin(source)


def _write_in_turn(function: Any) -> None:
    """Has the IR of a jit function's kernels be written in turn.

    Triton sets `ASTSource` before the first compile for each device.
    """
    make = getattr(function, "ASTSource", None)
    if make is not None and not isinstance(make, _InTurn):
        function.ASTSource = _InTurn(make)


class _InTurn(NamedTuple):
    make: Any

    def __call__(self, *given: Any) -> Any:
        return _written_in_turn(self.make(*given))


def _written_in_turn(source: Any) -> Any:
    """A source for Triton's compiler; its IR is written by one thread at a time."""
    write = source.make_ir

    def make_ir(*given: Any) -> Any:
        with _in_python:
            written = write(*given)
        tell_written(source)
        return written

    source.make_ir = make_ir
    return source


def compiles_always() -> bool:
    """TRITON_ALWAYS_COMPILE: what lies in the cache is not used."""
    return bool(knobs.compilation.always_compile)


def keeps_elsewhere() -> bool:
    """TRITON_CACHE_MANAGER: Triton keeps kernels in no folder of its own."""
    return knobs.cache.manager_class not in (None, FileCacheManager)


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """As TRITON_CACHE_DIR, for all threads of this process meanwhile."""
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        yield


def add_compiled(folder: Path) -> int:
    """Lets Triton's cache find the kernels of a folder that was one of its own, on any machine.

    Triton notes by absolute paths which files are a kernel's, so a folder that was moved has nothing for it.
    These notes are written again, in Triton's own folder; the files stay where they are. Returns how many
    kernels there are; 0 where Triton was given a cache of another kind (TRITON_CACHE_MANAGER).
    """
    if keeps_elsewhere() or not folder.is_dir():
        return 0
    count = 0
    for kernel in sorted(folder.iterdir()):
        files = {file.name: str(file) for file in kernel.iterdir()} if kernel.is_dir() else {}
        parts = {name: path for name, path in files.items() if not name.startswith(("__grp__", "tmp."))}
        for name in [name for name in parts if name.endswith(".json")]:
            manager = FileCacheManager(kernel.name)
            found = manager.get_group(name) or {}
            if name not in found or len(found) < len(parts):
                manager.put_group(name, parts)
            count += 1
    return count


# Gluon

if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def add_tile(descriptor, coord, tile, _semantic=None):  # type: ignore[no-untyped-def]
        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, tile.handle)
