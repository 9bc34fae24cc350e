"""One row of the peers' table: build each peer, check it, then let them take turns on the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.dense import Mods, attention, with_learned
from benchmarks.gpu_time import milliseconds, wait_for
from benchmarks.rows import Row, find

PEERS = ("flexmod", "flex", "cuDNN", "flash")
WARM_UP_S = 0.5  # the card's clock settles
LARGEST_ERROR = 2e-2  # of a result in half precision, relative to its own size

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Runs = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class RowCase:
    row: str
    rounds: int
    tiny: bool


class Results(NamedTuple):
    """out, the gradients of q, k and v, and the gradients of captured tensors; None for unknown ones."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    learned: tuple[Tensor, ...] = ()


def measure_row(case: RowCase) -> dict[str, Any]:
    """Times in ms, TFLOP/s, first calls in s, errors, faults; each by peer."""
    row = shrunk(find(case.row)) if case.tiny else find(case.row)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    query, key, value, grad_out = tensors(row, device)
    mods = row.mods(row, device)
    kinds = ("faults", "errors", "first_call_s", "ms", "rounds_ms", "tflops")
    result: dict[str, Any] = {kind: {} for kind in kinds}
    result["density"] = density(mods, row.length, device)
    truth = slice_of_truth(row, query, key, value, grad_out, mods)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the truth of a long row took most of the card
    inputs = (query, key, value, *mods.learned)
    runs: dict[str, Runs] = {}
    for name, build in builders(row, mods, device, case.tiny).items():
        found: list[Results] = []
        with noted(result["faults"], name):
            runs[name], seconds = {}, result["first_call_s"].setdefault(name, {})
            first_calls(build(), inputs, grad_out, runs[name], seconds, found)
        if found:
            result["errors"][name] = errors(row, found[-1], truth)
    worst = result["errors"].get("flexmod", {}).get("worst", float("nan"))
    result["verdict"] = "ok" if worst <= LARGEST_ERROR else "WRONG"
    take_turns(runs, case.rounds, result)
    for name, times in result["ms"].items():
        work = 4e-9 * row.batch * row.heads * row.length**2 * result["density"]
        flops = {"forward": work * (row.head_dim + row.value_dim) / 2}
        flops["backward"] = work * (1.5 * row.head_dim + row.value_dim)
        result["tflops"][name] = {way: flops[way] / ms for way, ms in times.items()}
    return result


def prepare(case: RowCase) -> dict[str, dict[str, float]]:
    """The first calls of each peer, which compile and leave what they made on disk: seconds, by peer."""
    row = shrunk(find(case.row)) if case.tiny else find(case.row)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    query, key, value, grad_out = tensors(row, device)
    mods = row.mods(row, device)
    seconds: dict[str, dict[str, float]] = {}
    for name, build in builders(row, mods, device, case.tiny).items():
        with noted({}, name):
            inputs = (query, key, value, *mods.learned)
            first_calls(build(), inputs, grad_out, {}, seconds.setdefault(name, {}), [])
    return seconds


def measure_memory(case: RowCase) -> dict[str, Any]:
    """Peak MiB of a forward and backward beyond their inputs; the out of some queries beside float64."""
    row = shrunk(find(case.row)) if case.tiny else find(case.row)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    query, key, value, grad_out = tensors(row, device)
    mods = row.mods(row, device)
    inputs = (query, key, value, *mods.learned)
    last = min(256, row.length)
    exact, _ = attention(
        *(x[-1:, -1:].detach().double() for x in (query[:, :, -last:], key, value)),
        mods, batch=row.batch - 1, head=row.heads - 1, row=row.length - last,
    )  # fmt: skip
    result: dict[str, Any] = {"faults": {}, "errors": {}, "mib": {}, "input_mib": _mib(inputs)}
    for name, build in builders(row, mods, device, case.tiny).items():
        with noted(result["faults"], name):
            forward = build()

            def step(forward: Forward = forward) -> Tensor:
                out = forward(query, key, value)
                torch.autograd.grad(out, inputs, grad_out)
                return out.detach()

            out = step()[-1:, -1:, -last:].double()
            error = ((out - exact).norm() / exact.norm()).item()
            result["errors"][name] = {"out": error, "worst": error}
            result["mib"][name] = peak_mib(step)
    worst = result["errors"].get("flexmod", {}).get("worst", float("nan"))
    result["verdict"] = "ok" if worst <= LARGEST_ERROR else "WRONG"
    return result


def peak_mib(step: Callable[[], Any]) -> float:
    """What a call allocates beyond what is there, at its most, by torch's count."""
    if not torch.cuda.is_available():
        step()
        return float("nan")
    _wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    _wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _mib(tensors: Iterable[Tensor]) -> float:
    return sum(x.nbytes for x in tensors) / 2**20


@contextmanager
def noted(faults: dict[str, str], peer: str) -> Iterator[None]:
    """A peer that fails goes no further; what it said is kept."""
    try:
        yield
    except Exception as fault:
        faults[peer] = f"{type(fault).__name__}: {str(fault)[:1500]}"


def shrunk(row: Row) -> Row:
    """The same row at a size that a CPU runs in a moment."""
    heads = row.heads // row.kv_heads
    length = 144 if round(row.length**0.5) ** 2 == row.length else 256
    return replace(row, batch=1, heads=heads, kv_heads=1, length=length, dtype=torch.float32)


def tensors(row: Row, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = (
        (row.heads, row.head_dim),
        (row.kv_heads, row.head_dim),
        (row.kv_heads, row.value_dim),
        (row.heads, row.value_dim),
    )
    query, key, value, grad_out = (
        torch.randn(row.batch, heads, row.length, width, device=device, dtype=row.dtype)
        for heads, width in shapes
    )
    for x in (query, key, value):
        x.requires_grad_()
    return query, key, value, grad_out


def density(mods: Mods, length: int, device: torch.device) -> float:
    """Share of the (query, key) pairs that the mask, or the score mod's -inf, leaves."""
    if mods == Mods():
        return 1.0
    zero = torch.zeros((), device=device, dtype=torch.int64)
    keys = torch.arange(length, device=device)
    kept = 0
    for start in range(0, length, 1024):
        rows = keys[start : start + 1024]
        positions = (zero, zero, rows[:, None], keys[None, :])
        live = torch.ones(len(rows), length, dtype=torch.bool, device=device)
        if mods.mask_mod is not None:
            live &= mods.mask_mod(*positions)
        if mods.score_mod is not None:
            with torch.no_grad():
                live &= mods.score_mod(live.float(), *positions) != -float("inf")
        kept += int(live.sum())
    return kept / length**2


def builders(row: Row, mods: Mods, device: torch.device, tiny: bool) -> dict[str, Callable[[], Forward]]:
    """By peer, what makes its forward. Only SDPA's own two masks have a fused SDPA beside them."""
    found: dict[str, Callable[[], Forward]] = {"flexmod": lambda: flexmod_forward(row, mods, device)}
    if not tiny:
        found["flex"] = lambda: flex_forward(row, mods, device)
    if row.sdpa and not tiny:
        found["cuDNN"] = lambda: sdpa_forward(row, SDPBackend.CUDNN_ATTENTION)
        found["flash"] = lambda: sdpa_forward(row, SDPBackend.FLASH_ATTENTION)
    return found


def flexmod_forward(row: Row, mods: Mods, device: torch.device) -> Forward:
    import flexmod

    mask = None
    if mods.mask_mod is not None:
        mask = flexmod.create_block_mask(mods.mask_mod, None, None, row.length, row.length, device=device)
    shared = row.heads != row.kv_heads

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flexmod.flex_attention(
            query, key, value, score_mod=mods.score_mod, block_mask=mask, enable_gqa=shared
        )
        assert isinstance(out, Tensor)
        return out

    return forward


def flex_forward(row: Row, mods: Mods, device: torch.device) -> Forward:
    """torch's own, compiled with its defaults, each row from a fresh start."""
    compiled, create = compiled_flex(once=row.memory)
    mask = None
    if mods.mask_mod is not None:
        mask = create(mods.mask_mod, None, None, row.length, row.length, device=str(device))
    shared = row.heads != row.kv_heads

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, score_mod=mods.score_mod, block_mask=mask, enable_gqa=shared)

    return forward


def compiled_flex(once: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch.compile(flex_attention) and create_block_mask, from a fresh start, without a dense fallback.

    `once`: a graph's backward runs once, so that its buffers may be used again, as they are by default.
    """
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1000
    torch._functorch.config.donated_buffer = once
    return torch.compile(flex_attention), create_block_mask


def sdpa_forward(row: Row, backend: SDPBackend) -> Forward:
    shared = row.heads != row.kv_heads

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=row.sdpa == "causal", enable_gqa=shared
            )

    return forward


def first_calls(
    forward: Forward,
    inputs: tuple[Tensor, ...],
    grad_out: Tensor,
    runs: Runs,
    seconds: dict[str, float],
    found: list[Results],
) -> None:
    """Fills in, way by way, the calls without arguments, the first call in s, and the results so far."""
    started = time.perf_counter()
    out = forward(*inputs[:3])
    _wait()
    seconds["forward"] = time.perf_counter() - started
    runs["forward"] = lambda: forward(*inputs[:3])
    found.append(Results(out.detach()))
    started = time.perf_counter()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    dq, dk, dv, *learned = backward()
    _wait()
    seconds["backward"] = time.perf_counter() - started
    runs["backward"] = backward
    found.append(Results(out.detach(), dq, dk, dv, tuple(learned)))


def slice_of_truth(
    row: Row, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mods: Mods
) -> Results:
    """float64 results of the last batch and key head, with all query heads that share it.

    A captured tensor's gradients for these heads are sums over all batch entries.
    """
    heads = slice(row.heads - row.heads // row.kv_heads, row.heads)
    learned = [torch.zeros_like(x, dtype=torch.float64) for x in mods.learned]
    for batch in range(0 if learned else row.batch - 1, row.batch):
        here = slice(batch, batch + 1)
        parts = (query[here, heads], key[here, -1:], value[here, -1:], grad_out[here, heads])
        q, k, v, g = (part.detach().double() for part in parts)
        found, gradients = with_learned(q, k, v, g, mods, batch=batch, head=heads.start)
        for total, gradient in zip(learned, gradients, strict=True):
            total += gradient
    return Results(found.out, found.dq, found.dk, found.dv, tuple(learned))


def errors(row: Row, found: Results, truth: Results) -> dict[str, float]:
    """Relative errors (Frobenius norms) of out and gradients on that slice; NaN counts as infinite."""
    heads = row.heads // row.kv_heads
    pairs = {"out": (found.out[-1:, -heads:], truth.out)}
    if found.dq is not None and found.dk is not None and found.dv is not None:
        pairs |= {"dq": (found.dq[-1:, -heads:], truth.dq), "dk": (found.dk[-1:, -1:], truth.dk)}
        pairs |= {"dv": (found.dv[-1:, -1:], truth.dv)}
    for number, gradient in enumerate(found.learned):
        pairs[f"learned {number}"] = (gradient[-heads:], truth.learned[number][-heads:])
    result = {}
    for name, (ours, exact) in pairs.items():
        relative = ((ours.double() - exact).norm() / exact.norm()).item()
        result[name] = relative if relative == relative else float("inf")
    result["worst"] = max(result.values())
    return result


def take_turns(runs: dict[str, Runs], rounds: int, result: dict[str, Any]) -> None:
    """Fills in ms (medians over the rounds) and rounds_ms. What fails is not called again."""
    until = time.perf_counter() + WARM_UP_S
    forwards = [run["forward"] for run in runs.values() if "forward" in run]
    while forwards and torch.cuda.is_available() and time.perf_counter() < until:
        forwards[0]()
        _wait()
    for way in rounds * ("forward", "backward"):
        waits = of_each(runs, way, wait_for, result["faults"])
        wait = max(waits.values(), default=0.0)  # the same for all
        times = of_each(runs, way, partial(milliseconds, wait_ms=wait), result["faults"])
        for name, ms in times.items():
            result["rounds_ms"].setdefault(name, {}).setdefault(way, []).append(ms)
    for name, ways in result["rounds_ms"].items():
        result["ms"][name] = {way: statistics.median(times) for way, times in ways.items() if times}


def of_each(
    runs: dict[str, Runs], way: str, measure: Callable[[Callable[[], Any]], float], faults: dict[str, str]
) -> dict[str, float]:
    """What `measure` says of each peer's call. One that fails is dropped from `runs`."""
    found = {}
    for name in [name for name, ways in runs.items() if way in ways]:
        failed: dict[str, str] = {}
        with noted(failed, name):
            found[name] = measure(runs[name][way])
        if failed:
            del runs[name][way]
            faults |= failed
    return found


def speed_of_a_matmul() -> float:
    """TFLOP/s of a bf16 product of 8192^3: what the card gives at this moment."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2e-9 * 8192**3 / milliseconds(lambda: a @ b)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
