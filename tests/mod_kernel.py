"""Runs a graph's Triton text over a whole [B, H, M, N]: in the interpreter, or compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexmod.codegen import cache, device_functions
from flexmod.codegen.kernels import ModText
from flexmod.codegen.term_text import write_exponent
from flexmod.codegen.triton_text import write
from flexmod.ir.graph import Graph
from flexmod.runtime.interpreter import interpreted

KERNEL = """
import triton
import triton.language as tl


{prelude}

{mod.text}

@triton.jit(do_not_specialize=[{unspecialized}])
def run(OUT, SCORE, GRAD, {names}H, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    {mod.program}
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    q_idx = rows[:, None]
    kv_idx = columns[None, :]
    {mod.row}
    {mod.column}
    at = (tl.program_id(0) * M + q_idx) * N + kv_idx
    inside = (q_idx < M) & (kv_idx < N)
    score = tl.load(SCORE + at, mask=inside, other=0.0)
    grad = tl.load(GRAD + at, mask=inside, other=0.0)
    value = {mod.call}
    tl.store(OUT + at, value, mask=inside)
"""


# As `score` a product of `SCALE` and, with keys from `start_n` on, the exponent of it.
EXPONENT_KERNEL = (
    KERNEL.replace("{names}H", "scale, start_n, {names}H")
    .replace("columns = ", "offset = tl.arange(0, BLOCK_N)[None, :]\n    columns = ")
    .replace("kv_idx = columns[None, :]", "kv_idx = start_n + offset")
    .replace("* N + kv_idx", "* N + offset")
    .replace("(kv_idx < N)", "(offset < N)")
)


def source(mod: ModText, kernel: str = KERNEL) -> str:
    """The module with one kernel, `run`, that stores what the mod says."""
    names = [p.name for p in mod.parameters]
    return kernel.format(
        mod=mod,
        prelude=device_functions.used_by(mod.text),
        names="".join(f"{n}, " for n in names),
        unspecialized=", ".join(f'"{p.name}"' for p in mod.parameters if p.kind in ("size", "number")),
    )


def run(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    extents: tuple[int, int, int, int],
    *,
    score: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    numbers: Sequence[Any] = (),
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The graph's first result, [B, H, M, N]; halves come as the float32 in which kernels hold them."""
    batch, heads, length, keys = extents
    mod = write(graph)
    module = cache.load(source(mod), "mod_kernel")
    kernel = (module if torch.device(device).type == "cuda" else interpreted(module)).run
    dtype = graph.result.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    out = torch.empty(extents, dtype=torch.float32 if half else dtype, device=device)
    values = {p.name: p.value([t.detach() for t in tensors], numbers) for p in mod.parameters}
    ones = torch.ones(extents, dtype=torch.float32, device=device)
    block = {"BLOCK_M": _power_of_two(length), "BLOCK_N": _power_of_two(keys)}
    kernel[(batch * heads,)](
        out, ones if score is None else score, ones if grad is None else grad, **values,
        H=heads, M=length, N=keys, **block,
    )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def run_exponent(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    extents: tuple[int, int, int, int],
    product: torch.Tensor,
    scale: float,
    start: int,
) -> torch.Tensor:
    """The exponent of a score graph, with what its rows share, for keys from `start` on: [B, H, M, N]."""
    batch, heads, length, keys = extents
    mod = write_exponent(graph)
    factor = "1.0" if mod.in_base_2 else "1.4426950408889634"
    names = "value, shift" if mod.shift else "value"
    sum_of_row = f"(value{' + shift' if mod.shift else ''}) * {factor} * ({mod.unit or '1.0'})"
    value = f"{names} = {{mod.call}}\n    value = {sum_of_row}"
    kernel = EXPONENT_KERNEL.replace("value = {mod.call}", value)
    out = torch.empty(extents)
    values = {p.name: p.value([t.detach() for t in tensors], ()) for p in mod.parameters}
    interpreted(cache.load(source(mod, kernel), "mod_kernel")).run[(batch * heads,)](
        out, product, product, scale=scale, start_n=start, **values, H=heads, M=length, N=keys,
        BLOCK_M=_power_of_two(length), BLOCK_N=_power_of_two(keys),
    )  # fmt: skip
    return out
