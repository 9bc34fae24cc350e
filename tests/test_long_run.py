"""What a long process keeps is bounded: every cache, every registry, every generated module."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import linecache
import pkgutil
import sys
import weakref
from collections.abc import Iterator, Sized
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from tiers import long_but
from torch.utils.weak import WeakIdKeyDictionary

import flexmod
from benchmarks import long_run
from benchmarks.host_path import on_an_h200
from flexmod import flex_attention
from flexmod.block_mask import generated
from flexmod.calls import prepared
from flexmod.codegen import cache, compiler
from flexmod.ir import fingerprint
from flexmod.ir.trace import trace

# Functions with a cache that no limit holds, and what their arguments are: few in a process.
FINITE = {
    "runtime.config.config": "nothing",
    "ir.formulas.draws": "names of torch's functions",
    "ir.formulas.writes": "names of torch's functions",
    "ir.proxy._dtypes": "operations and dtypes",
    "ir.graph._input": "inputs and dtypes",
    "runtime.private_torch.ask_modes_of_constructors": "nothing",
    "runtime.private_torch.ask_modes_of_unary_operators": "nothing",
    "runtime.private_torch.correct_recorded_values": "nothing",
    "runtime.private_torch.linear_on_cpu": "nothing",
    "backends.products._has_quick_product": "nothing",
    "codegen.device_functions.module_text": "files of device functions",
    "codegen.device_functions.functions": "files of device functions",
    "codegen.device_functions._call": "names of device functions",
    "codegen.render._environment": "nothing",
    "codegen.cache._warn_once": "folders",
    "runtime.side_by_side.start_second_process": "nothing",
    "codegen.cache._temporary_directory": "nothing",
    "codegen.compiled_kernels.find_compiled": "cache folders",
    "block_mask.build._with_kernels": "nothing",
    "codegen.compiler.runs_module": "nothing",
    "backends.backend": "backends",
    "runtime.target._read": "devices",
    "runtime.private_triton._assembler_flags": "nothing",
    "runtime.private_triton._start_reading": "nothing",
    "runtime.interpreter._load_language": "nothing",
}
# Registries of modules that calls fill, and how long they get; weak ones go with what they are about.
# `_users` and `_dead` count modules that other tests of this process use, too.
LIMITS = {
    "calls.prepared._known_calls": prepared.KNOWN,
    "ir.fingerprint._known": fingerprint.REMEMBERED,
    "block_mask.generated._known": generated.REMEMBERED,
    "ir.fingerprint._codes": fingerprint.CODES,
    "codegen.cache._modules": cache.KEPT,
    "codegen.cache._users": cache.KEPT,
    "codegen.cache._dead": cache.KEPT,
}
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, WeakIdKeyDictionary)


def modules() -> Iterator[tuple[str, ModuleType]]:
    for found in pkgutil.walk_packages(flexmod.__path__, "flexmod."):
        if not found.name.endswith("__main__"):
            yield found.name.removeprefix("flexmod."), importlib.import_module(found.name)


def registries() -> dict[str, int]:
    """The size of each container that a module of flexmod holds, but for weak ones."""
    sizes = {}
    for name, module in modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("__") or isinstance(value, (str, bytes, tuple, frozenset, *WEAK)):
                continue
            if isinstance(value, Sized) and not inspect.isclass(value):
                sizes[f"{name}.{attribute}"] = len(value)
    return sizes


def test_every_cache_has_a_limit() -> None:
    unlimited = {
        f"{name}.{attribute}"
        for name, module in modules()
        for attribute, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper) and value.cache_info().maxsize is None
        if getattr(value, "__module__", "") == f"flexmod.{name}"
    }
    assert unlimited == set(FINITE)


@pytest.mark.long
@pytest.mark.parametrize("launches", long_but({"stubbed"}, ("cpu", "stubbed")))
def test_no_registry_grows_beyond_its_limit(launches: str) -> None:
    """A few hundred calls, of which no two are alike."""
    context = on_an_h200() if launches == "stubbed" else nullcontext()
    dtype = torch.float16 if launches == "stubbed" else torch.float32
    with context:
        long_run.run(len(long_run.KINDS), dtype, len(long_run.KINDS))
        gc.collect()
        before = registries()
        long_run.run(200, dtype, 200)
        gc.collect()
    grown = {name: size for name, size in registries().items() if size > before.get(name, 0)}
    others = {name: before[name] for name in ("codegen.cache._users", "codegen.cache._dead")}
    assert grown.keys() <= LIMITS.keys()
    assert {name: size for name, size in grown.items() if size > LIMITS[name] + others.get(name, 0)} == {}


@pytest.mark.long
def test_masks_and_calls_leave_no_cycles() -> None:
    """What a call made is freed at once, not when the collector comes around."""
    number = 1000
    for kind in (long_run.window, long_run.documents, long_run.split_by_tensor):
        kind(number, torch.float32)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(x) is flexmod.BlockMask for x in gc.get_objects())
        for kind in (long_run.window, long_run.documents, long_run.split_by_tensor):
            kind(number + 1, torch.float32)
        assert sum(type(x) is flexmod.BlockMask for x in gc.get_objects()) == before
        mask = long_run.mask_of(lambda b, h, q, k: q >= k, 40)
        flex_attention(*long_run.tensors(1, torch.float32, length=40), block_mask=mask)
        alive = weakref.ref(mask)
        del mask
        assert alive() is None
    finally:
        gc.enable()


def text(number: int) -> str:
    return f"NUMBER = {number}\n\n\ndef double():\n    return 2 * NUMBER\n"


def test_modules_go_when_nothing_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT", 3)
    used = cache.load(text(-1), "used")
    double, path = used.double, used.__file__
    dropped = weakref.ref(cache.load(text(-2), "dropped"))
    lines = len(linecache.cache)
    for number in range(40):
        assert cache.load(text(number), "made").double() == 2 * number
    gc.collect()
    assert len(cache._modules) == 3
    assert sum(name.startswith("flexmod_generated.made_") for name in sys.modules) == 3
    assert len(linecache.cache) <= lines + 4
    assert dropped() is None
    assert double() == -2 and path in linecache.cache  # it is in use: here
    assert "2 * NUMBER" in inspect.getsource(used)
    again = cache.load(text(-1), "used")
    assert again is not used and again.double() == double()
    del again
    for number in range(3):
        cache.load(text(number), "made")
    gc.collect()
    assert path in linecache.cache
    assert cache.load(text(-2), "dropped").double() == -4


def test_kernels_run_after_others_took_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of many formulas in turn, by recorded launches too, with room for two modules."""
    monkeypatch.setattr(cache, "KEPT", 2)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 20, 8) for _ in range(3))
    steps = (
        lambda s, b, h, q, k: s + q, lambda s, b, h, q, k: s * 2 - k, lambda s, b, h, q, k: s * s,
        lambda s, b, h, q, k: torch.where(q > k, s, s + 1), lambda s, b, h, q, k: s - (q - k) * 0.25,
    )  # fmt: skip
    handles = [flexmod.compile(step, kernel_options={"BACKEND": "INTERPRET"}) for step in steps]
    for _ in range(3):
        for step, handle in zip(steps, handles, strict=True):
            wanted = flex_attention(query, key, value, step, kernel_options={"BACKEND": "REFERENCE"})
            found = flex_attention(query, key, value, step, kernel_options={"BACKEND": "INTERPRET"})
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
            torch.testing.assert_close(handle(query, key, value), wanted, rtol=0, atol=2e-6)
    assert len(cache._modules) == 2


def test_constants_that_are_forgotten_are_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "GRAPHS", 2)
    constants = compiler.Constants()

    def graph(power: int, number: float) -> Any:
        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            for _ in range(power):
                s = s * number
            return s

        return trace(score_mod, "score").graph

    for number in (2.0, 3.0, 4.0):
        for power in (1, 2, 3, 4):
            promoted, numbers = constants.promote(graph(power, number))
            assert numbers == (number,) * power
            given = [n.value for n in promoted.nodes if n.is_const]
            assert all(value == number for value in given)  # a constant of the graph is this call's
    assert len(constants._known) == 2
    again = constants.promote(graph(4, 9.0))[0]
    assert not any(n.is_const for n in again.nodes)  # the last one is still known
