"""Times attentions against each other: flexmod's, SDPA's, and torch's compiled flex_attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexmod.block_mask.build import create_block_mask, create_mask
from flexmod.block_mask.format import BlockMask
from flexmod.calls.attention import flex_attention
from flexmod.ir.trace import trace
from flexmod.runtime.lazy_imports import lazy_imports
from flexmod.tools.mod_names import Mod, Mods, Setting

Inputs = tuple[Tensor, Tensor, Tensor]

# Floating-point operations of attention for each pair of a query and a key and each element of the head
# dimension: two products forward, five backward.
FORWARD_FLOPS = 4
BACKWARD_FLOPS = 10


CAUSAL = 50.0  # the percentage of all pairs that causal SDPA skips


class Implementation(NamedTuple):
    """One way to compute attention."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]


class Timing(NamedTuple):
    """Median times in milliseconds, and TFLOP/s over the tiles that the mask keeps."""

    attention: str
    forward_ms: float
    forward_tflops: float
    backward_ms: float
    backward_tflops: float

    def cells(self) -> tuple[str, ...]:
        """Returns the fields as a table shows them."""
        name, forward, rate, backward, backward_rate = self
        return name, f"{forward:.3f}", f"{rate:.3g}", f"{backward:.3f}", f"{backward_rate:.3g}"


def block_mask_of(mask_mod: Mod | None, setting: Setting) -> BlockMask | None:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, *mask_sizes(mask_mod, setting), device=setting.device)


def skipped(block_mask: BlockMask | None) -> float:
    """Returns the percentage of all pairs whose tiles the mask skips."""
    return 0.0 if block_mask is None else block_mask.sparsity()


def mask_sizes(mask_mod: Mod, setting: Setting) -> tuple[int, int, int, int]:
    """Returns a mask's numbers of batch entries and heads, 1 if it is the same for all, and its lengths."""
    reads, length = trace(mask_mod, "mask").graph.reads, setting.seq
    return setting.batch if "b" in reads else 1, setting.heads if "h" in reads else 1, length, length


def random_inputs(setting: Setting) -> Inputs:
    generator = torch.Generator(setting.device).manual_seed(0)
    shape = (setting.batch, setting.heads, setting.seq, setting.dim)

    def tensor() -> Tensor:
        values = torch.randn(shape, generator=generator, device=setting.device, dtype=setting.dtype)
        return values.requires_grad_()

    return tensor(), tensor(), tensor()


def flexmod_attention(
    name: str, score_mod: Mod | None, block_mask: BlockMask | None, **options: str
) -> Implementation:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod, block_mask, kernel_options=options)

    return Implementation(name, call)


def sdpa_causal(setting: Setting) -> Implementation:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return causal(q, k, v)

    if setting.device.type == "cuda" and setting.dtype in (torch.float16, torch.bfloat16):
        return Implementation("SDPA causal (flash)", flash)
    return Implementation("SDPA causal", causal)


def sdpa_masked(mask_mod: Mod | None, setting: Setting) -> Implementation:
    """Returns SDPA with the materialized mask, bool [1 or B, 1 or H, S, S]; a row with no key gives 0."""
    if mask_mod is None:
        return Implementation("SDPA", F.scaled_dot_product_attention)
    dense = create_mask(mask_mod, *mask_sizes(mask_mod, setting), device=setting.device)
    alive = dense.any(-1, keepdim=True)
    all_alive = bool(alive.all())
    # SDPA's kernels differ on rows without keys (0 or NaN): let such a row attend to all, then zero it.
    widened = dense if all_alive else dense | ~alive

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, widened)
        return out if all_alive else out * alive

    return Implementation("SDPA + mask", call)


def compiled_flex(chosen: Mods, setting: Setting) -> Implementation:
    from torch.nn.attention import flex_attention as torch_flex

    block_mask = None
    if chosen.mask is not None:
        sizes = mask_sizes(chosen.mask, setting)
        block_mask = torch_flex.create_block_mask(chosen.mask, *sizes, device=setting.device)
    # Dynamo counts a function's recompilations, and after a few of them runs it dense without a warning.
    torch.compiler.reset()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    return Implementation(
        "flex_attention (torch)", lambda q, k, v: compiled(q, k, v, chosen.score, block_mask)
    )


def timed(attention: Implementation, inputs: Inputs, setting: Setting, skips: float) -> Timing:
    """Times an attention; its TFLOP/s leave out the percentage of all pairs that it `skips`."""
    out = attention.call(*inputs)
    grad_out = torch.randn_like(out)
    forward_ms = median_ms(lambda: attention.call(*inputs), setting.device)
    backward_ms = median_ms(
        lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True), setting.device
    )
    pairs = (1 - skips / 100) * setting.batch * setting.heads * setting.seq**2
    tera = 1e-9 * pairs * setting.dim  # a thousandth of 1e-12: times are in milliseconds
    return Timing(
        attention.name,
        forward_ms,
        FORWARD_FLOPS * tera / forward_ms,
        backward_ms,
        BACKWARD_FLOPS * tera / backward_ms,
    )


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        with lazy_imports():
            from triton.testing import do_bench

        return float(do_bench(call, return_mode="median"))
    import statistics

    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.3 and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
