"""Runs a graph's Triton text over a whole [B, H, M, N]: in the interpreter, or compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexmod.codegen import cache, prelude
from flexmod.codegen.mod_text import ModText
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


def source(mod: ModText) -> str:
    """The module with one kernel, `run`, that stores what the mod says."""
    names = [p.name for p in mod.parameters]
    return KERNEL.format(
        mod=mod,
        prelude=prelude.used_by(mod.text),
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
