"""Gradients of captured tensors on the GPU: their errors beside those of eager attention in the same dtype.

`measure` runs in worker processes, so it takes plain data and returns plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from learned_mods import causal, learned_mods, random
from reference_case import error_size, make_case
from torch import Tensor

import flexmod
from benchmarks.dense import Mods, attention
from gpu.poison import poison

BATCH, HEADS, DRAWS = 2, 4, 4
Errors = dict[str, tuple[float, float]]  # an RMS error and its limit, by result
NAMES = tuple(learned_mods(BATCH, HEADS, 2, 2))


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    head_dim: int
    rows: int
    columns: int
    causal: bool
    captured: str = "float32"
    template: str = "auto"

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        captured = "" if self.captured == "float32" else f" ({self.captured})"
        sizes = f"D{self.head_dim}-{self.rows}x{self.columns}"
        template = "" if self.template == "auto" else f"-{self.template}"
        return f"{self.name}{captured}-{self.dtype}-{sizes}-{mask}{template}".replace(" ", "_")


# Here a bias is the same for a whole row, and softmax takes it out again: the true gradient is 0, and what
# is found is how the output was rounded, from which the backward makes rowsum(out * grad_out).
CANCELLED = ("with -inf", "in two places")

# For Hopper's backward alone: terms that it sums itself, and terms that portable kernels sum beside it.
BESIDE = ("bias of pairs", "bias of rows")
OWN = ("slopes", "slopes of distances as floats", "alibi of the library", "bias of keys", "relative table")
OWN_BY_SCORE = ("temperature", "scalar", "one element", "in two places", "clamped distances", "several")

HOPPER_CASES = [
    *(
        Case(name, dtype, 64, 517, 1031, causal=causal, template="hopper")
        for name in OWN + OWN_BY_SCORE + BESIDE
        for dtype, causal in (("bfloat16", True), ("float16", False))
    ),
    *(Case(name, "bfloat16", 128, 1024, 1024, causal=True, template="hopper") for name in OWN + BESIDE),
    # "several" spills too much there: insisted on, it is refused by name
    *(
        Case(name, "bfloat16", 256, 517, 1031, causal=True, template="hopper")
        for name in OWN + OWN_BY_SCORE
        if name != "several"
    ),
]
CASES = [
    *(Case(name, "bfloat16", 128, 1031, 1031, causal=True) for name in NAMES),
    *(Case(name, "float16", 64, 300, 2100, causal=False, captured="float16") for name in NAMES),
    *(Case(name, "float32", 64, 517, 300, causal=True) for name in NAMES),
]


def measure(case: Case) -> dict[str, Any]:
    """ "errors": by result, the RMS error and its limit; "equal": do deterministic runs agree bit for bit?

    Over several draws: the error of a gradient of few elements is a matter of luck, for eager attention too.
    A case over a limit gets four times as many, and the RMS of all of them decides.
    """
    draws = [draw(case, number) for number in range(DRAWS)]
    if any(not error <= limit for error, limit in together(draws).values()):
        draws += [draw(case, number) for number in range(DRAWS, 4 * DRAWS)]
    return {"errors": together(draws), "equal": all(equal for _, equal in draws)}


def together(draws: Sequence[tuple[Errors, bool]]) -> Errors:
    """The RMS of errors and of limits, by result."""
    found = [errors for errors, _ in draws]
    return {name: tuple(_rms([each[name][place] for each in found]) for place in (0, 1)) for name in found[0]}


def draw(case: Case, number: int) -> tuple[Errors, bool]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, captured = getattr(torch, case.dtype), getattr(torch, case.captured)
    make, shapes = learned_mods(BATCH, HEADS, case.rows, case.columns, device)[case.name]
    tensors = [random(*shape, seed=9 * number + n).to(device, captured) for n, shape in enumerate(shapes)]
    call = make_case(
        batch=BATCH, kv_batch=1, heads=HEADS, kv_heads=2, q_len=case.rows, kv_len=case.columns,
        head_dim=case.head_dim, dtype=dtype, device=device, seed=number,
    )  # fmt: skip
    mask_mod = causal if case.causal else None
    inputs = (*call.inputs, call.grad_out)
    ours = compiled(make, tensors, mask_mod, *inputs, options={"bwd_TEMPLATE": case.template})
    again = [compiled(make, tensors, mask_mod, *inputs, options={"deterministic": True})]
    with nothing_waits():
        again.append(compiled(make, tensors, mask_mod, *inputs, options={"deterministic": True}))
    eager = written_out(make, tensors, mask_mod, *inputs)
    truth = written_out(make, [x.double() for x in tensors], mask_mod, *(x.double() for x in inputs))
    names = ["dq", "dk", "dv", *(f"capture {n}" for n in range(len(tensors)))]
    found: Errors = {}
    for name, mine, fixed, other, exact in zip(names, ours, again[0], eager, truth, strict=True):
        limit = limit_of(case, error_size(other, exact)[0], exact, mine.dtype)
        found[name] = error_size(mine, exact)[0], limit
        found[f"{name}, deterministic"] = error_size(fixed, exact)[0], limit
    return found, all(torch.equal(x, y) for x, y in zip(*again, strict=True))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What makes the host wait for the device raises an error inside."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def limit_of(case: Case, eager: float, truth: Tensor, dtype: torch.dtype) -> float:
    """What the RMS error may be: that of eager attention, and a part of the rounding of the result."""
    if case.name == "by the score":  # a score that is rounded otherwise is in another bucket
        return eager + 1e-2 * truth.square().mean().sqrt().item()
    factor = 1.2 if case.dtype == "float32" else 0.9
    few = (2.0 if truth.numel() < 64 else 1.0) * (2.0 if case.name in CANCELLED else 1.0)
    return few * factor * eager + torch.finfo(dtype).eps / 4 * truth.abs().max().item()


def _rms(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def compiled(
    make: Any, tensors: list[Tensor], mask_mod: Any, query: Tensor, key: Tensor, value: Tensor,
    grad_out: Tensor, options: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """flexmod's gradients, from memory that held NaN before each call."""
    inputs, learned = leaves([query, key, value]), leaves(tensors)
    rows, columns = query.shape[2], key.shape[2]
    mask = None
    if mask_mod is not None:
        mask = flexmod.create_block_mask(mask_mod, None, None, rows, columns, device=query.device)
    statistics = torch.empty(query.shape[:-1], device=query.device)
    out = flexmod.flex_attention(*inputs, make(*learned), mask, enable_gqa=True, kernel_options=options)
    poison(query, key, value, statistics, torch.empty_like(statistics[:, :, :1]).expand(-1, -1, columns))
    return torch.autograd.grad(out, [*inputs, *learned], grad_out)


def written_out(
    make: Any, tensors: list[Tensor], mask_mod: Any, query: Tensor, key: Tensor, value: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same from plain torch."""
    inputs, learned = leaves([query, key, value]), leaves(tensors)
    out, _ = attention(*inputs, Mods(make(*learned), mask_mod))
    return torch.autograd.grad(out, [*inputs, *learned], grad_out)
