"""One row of the peers' table: build each peer, check it, then let them take turns on the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.dense import Attention, Mods, differentiated
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


class FirstCalls(NamedTuple):
    """The forward and the backward as calls without arguments, their first calls in s, and the results."""

    runs: Runs
    seconds: dict[str, float]
    results: Attention


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
    runs: dict[str, Runs] = {}
    for name, build in builders(row, mods, device, case.tiny).items():
        with noted(result["faults"], name):
            first = first_calls(build(), query, key, value, grad_out, mods.learned)
            result["first_call_s"][name] = first.seconds
            result["errors"][name] = errors(row, first.results, truth)
            runs[name] = first.runs
    worst = result["errors"].get("flexmod", {}).get("worst", float("nan"))
    result["verdict"] = "ok" if worst <= LARGEST_ERROR else "WRONG"
    take_turns(runs, case.rounds, result)
    for name, times in result["ms"].items():
        work = 4e-9 * row.batch * row.heads * row.length**2 * result["density"]
        flops = {"forward": work * (row.head_dim + row.value_dim) / 2}
        flops["backward"] = work * (1.5 * row.head_dim + row.value_dim)
        result["tflops"][name] = {way: flops[way] / ms for way, ms in times.items()}
    return result


@contextmanager
def noted(faults: dict[str, str], peer: str) -> Iterator[None]:
    """A peer that fails is out of the race; what it said is kept."""
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
    compiled, create = compiled_flex()
    mask = None
    if mods.mask_mod is not None:
        mask = create(mods.mask_mod, None, None, row.length, row.length, device=str(device))
    shared = row.heads != row.kv_heads

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, score_mod=mods.score_mod, block_mask=mask, enable_gqa=shared)

    return forward


def compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch.compile(flex_attention) and create_block_mask, from a fresh start, without a dense fallback."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1000
    # The clock runs the backward many times over one graph.
    torch._functorch.config.donated_buffer = False
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
    forward: Forward, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, learned: tuple[Tensor, ...]
) -> FirstCalls:
    started = time.perf_counter()
    out = forward(query, key, value)
    _wait()
    middle = time.perf_counter()
    inputs = (query, key, value, *learned)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    gradients = backward()
    _wait()
    seconds = {"forward": middle - started, "backward": time.perf_counter() - middle}
    runs: Runs = {"forward": lambda: forward(query, key, value), "backward": backward}
    return FirstCalls(runs, seconds, Attention(out.detach(), out.new_empty(0), *gradients[:3]))


def slice_of_truth(
    row: Row, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mods: Mods
) -> Attention:
    """float64 results of the last batch and key head, with all query heads that share it."""
    heads = slice(row.heads - row.heads // row.kv_heads, row.heads)
    parts = (query[-1:, heads], key[-1:, -1:], value[-1:, -1:], grad_out[-1:, heads])
    q, k, v, g = (part.detach().double() for part in parts)
    return differentiated(q, k, v, g, mods, batch=row.batch - 1, head=heads.start)


def errors(row: Row, found: Attention, truth: Attention) -> dict[str, float]:
    """Relative errors (Frobenius norms) of out and gradients on that slice; NaN counts as infinite."""
    heads = row.heads // row.kv_heads
    result = {}
    for name, count in (("out", heads), ("dq", heads), ("dk", 1), ("dv", 1)):
        exact = getattr(truth, name)
        ours = getattr(found, name)[-1:, -count:].double()
        relative = ((ours - exact).norm() / exact.norm()).item()
        result[name] = relative if relative == relative else float("inf")
    result["worst"] = max(result.values())
    return result


def take_turns(runs: dict[str, Runs], rounds: int, result: dict[str, Any]) -> None:
    """Fills in ms (medians over the rounds) and rounds_ms. A peer that fails leaves the race."""
    until = time.perf_counter() + WARM_UP_S
    while runs and torch.cuda.is_available() and time.perf_counter() < until:
        next(iter(runs.values()))["forward"]()
        _wait()
    for _ in range(rounds):
        for way in ("forward", "backward"):
            for name in [name for name in runs if name not in result["faults"]]:
                with noted(result["faults"], name):
                    times = result["rounds_ms"].setdefault(name, {}).setdefault(way, [])
                    times.append(milliseconds(runs[name][way]))
    for name, ways in result["rounds_ms"].items():
        result["ms"][name] = {way: statistics.median(times) for way, times in ways.items() if times}


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call, the L2 cleared before each."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    from triton.testing import do_bench

    return float(do_bench(call, warmup=25, rep=80, return_mode="median"))


def speed_of_a_matmul() -> float:
    """TFLOP/s of a bf16 product of 8192^3: what the card gives at this moment."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2e-9 * 8192**3 / milliseconds(lambda: a @ b)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
