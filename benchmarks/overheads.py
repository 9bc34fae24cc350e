"""The cost around the kernels: compiling a mod, building a mask, one call, another value in a closure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

import flexmod
from benchmarks.measure_row import compiled_flex
from benchmarks.rows import SETS, document_ids
from flexmod import masks, mods

PARTS = ("explain", "block mask", "call", "new value")
ROUNDS = 40  # of calls, in turns; a tenth on the CPU, where a call is its kernels too
CALLS = 20  # a round and variant


def measure(part: str) -> dict[str, Any]:
    """One part, as {line: {column: value}}."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts: dict[str, Callable[[torch.device], dict[str, Any]]] = {
        "explain": explain,
        "block mask": block_mask,
        "call": call,
        "new value": new_value,
    }
    return parts[part](device)


def tables(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    titles = {
        "explain": "trace to source, ms",
        "block mask": "create_block_mask, ms and peak MiB",
        "call": "CPU time of a call, us; a shared host's noise only adds",
        "new value": "first call after another window, s",
    }
    return [
        tabulate(
            [[line, *columns.values()] for line, columns in found[part].items()],
            [title, *next(iter(found[part].values()))],
            tablefmt="github",
            floatfmt=".3g",
        )
        for part, title in titles.items()
        if found.get(part)
    ]


def explain(device: torch.device) -> dict[str, dict[str, float]]:
    """From a fresh mod to the text of its kernels."""
    result = {}
    for row in SETS["D128"]:
        times = []
        for _ in range(20):
            mods = row.mods(row, device)
            started = time.perf_counter()
            _ = flexmod.explain(score_mod=mods.score_mod, mask_mod=mods.mask_mod).source
            times.append((time.perf_counter() - started) * 1e3)
        result[row.name] = {"first": times[0], "median": statistics.median(times)}
    return result


def block_mask(device: torch.device) -> dict[str, dict[str, float | str]]:
    from torch.nn.attention.flex_attention import create_block_mask

    result: dict[str, dict[str, float | str]] = {}
    for name, length in (("causal", 8192), ("documents", 8192), ("documents", 32768)):
        length = length if device.type == "cuda" else length // 16
        mask_mod = masks.causal()
        if name == "documents":
            mask_mod = masks.document(document_ids(length, 8, device), causal=True)
        line = result.setdefault(f"{name} {length}", {})
        for peer, create in (("flexmod", flexmod.create_block_mask), ("torch, eager", create_block_mask)):
            build = partial(create, mask_mod, None, None, length, length, device=str(device))
            ms, mebibytes = _build(build, device)
            line |= {f"{peer}, ms": ms, f"{peer}, MiB": mebibytes}
    return result


def _build(create: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    times = []
    for _ in range(6):
        started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            started = time.perf_counter()
            create()
            torch.cuda.synchronize()
            mebibytes = (torch.cuda.max_memory_allocated() - before) / 2**20
        else:
            create()
            mebibytes = float("nan")
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:]), mebibytes


def call(device: torch.device) -> dict[str, dict[str, float]]:
    """Tiny kernels that the CPU cannot keep up with: the time is the CPU's own.

    The median of the rounds, and the best of them: what else a shared host does only adds to a time.
    """
    query, key, value = (
        torch.randn(1, 1, 128, 64, device=device, dtype=torch.float16, requires_grad=True) for _ in range(3)
    )
    mask = flexmod.create_block_mask(masks.causal(), None, None, 128, 128, device=device)
    slopes = torch.rand(1, device=device)
    handle = flexmod.compile(mask_mod=masks.causal())
    plain = flexmod.compile()
    of_alibi = flexmod.compile(mods.alibi(slopes), masks.causal())
    rows = flexmod.compile(mask_mod=masks.causal(), layout="bshd")
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (query, key, value)]
    calls = {
        "flexmod": lambda: flexmod.flex_attention(query, key, value, block_mask=mask),
        "flexmod, no mask": lambda: flexmod.flex_attention(query, key, value),
        "flexmod, alibi": lambda: flexmod.flex_attention(query, key, value, mods.alibi(slopes), mask),
        "flexmod, handle": lambda: handle(query, key, value),
        "flexmod, handle, no mask": lambda: plain(query, key, value),
        "flexmod, handle, alibi": lambda: of_alibi(query, key, value),
        "flexmod, handle, bshd": lambda: rows(*turned),
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True),
    }
    if device.type == "cuda":
        compiled, create = compiled_flex()
        theirs = create(masks.causal(), None, None, 128, 128, device=str(device))
        calls["flex"] = lambda: compiled(query, key, value, block_mask=theirs)
    result: dict[str, dict[str, float]] = {name: {} for name in calls}
    steps = {name: partial(_step, forward) for name, forward in calls.items()}
    rounds = ROUNDS if device.type == "cuda" else ROUNDS // 10
    for way, runs, wants_grad in (("forward", calls, False), ("forward + sum + backward", steps, True)):
        with torch.set_grad_enabled(wants_grad):
            times = in_turns(runs, rounds)
        for name, microseconds in times.items():
            result[name] |= {way: statistics.median(microseconds), f"{way}, best": min(microseconds)}
    return result


def _step(forward: Callable[[], Any]) -> None:
    forward().sum().backward()


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call, by name and round; what disturbs a round disturbs all. Two are not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(2 + rounds):
        for name, run in runs.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append((time.perf_counter() - started) / CALLS * 1e6)
    return {name: found[2:] for name, found in times.items()}


def new_value(device: torch.device) -> dict[str, dict[str, float]]:
    """Windows of other sizes, one after another: from the function through mask, forward and backward."""
    length = 1024
    inputs = [
        torch.randn(1, 2, length, 64, device=device, dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    ]
    peers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "flexmod": (flexmod.flex_attention, flexmod.create_block_mask)
    }
    if device.type == "cuda":
        peers["flex"] = compiled_flex()
    result: dict[str, dict[str, float]] = {}
    for name, (attend, create) in peers.items():
        line = result.setdefault(name, {})
        for size in (100, 200, 300, 400):
            started = time.perf_counter()
            mask = create(masks.sliding_window(size), None, None, length, length, device=str(device))
            attend(*inputs, block_mask=mask).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            line[str(size)] = time.perf_counter() - started
    return result
