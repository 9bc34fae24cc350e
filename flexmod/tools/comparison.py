"""Compares flexmod with its peers on one mask or score mod: first the results, then the times.

flexmod.compare("sliding_window")
flexmod.compare(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 100, seq=4096)
python -m flexmod compare causal

The peers are SDPA with its causal flag, SDPA with the mask as a tensor, and torch's compiled flex_attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexmod.block_mask.build import create_block_mask, create_mask
from flexmod.block_mask.format import BlockMask
from flexmod.calls.attention import flex_attention
from flexmod.errors import ArgumentTypeError, FlexOnCpuError
from flexmod.ir.graph import as_int
from flexmod.ir.trace import trace
from flexmod.runtime.locks import lazy_imports
from flexmod.tools.mod_names import Mod, Mods, Setting, choose, fitting, name_of, usual_setting

# The largest RMS(difference) / RMS(reference) that passes. float32 leaves room for TF32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# The dense reference and its gradients need about this many float32 matrices of S x S for each head, and may
# take this many bytes.
REFERENCE_MATRICES = 8
REFERENCE_BYTES = 4 << 30

Inputs = tuple[Tensor, Tensor, Tensor]

# Floating-point operations of attention for each pair of a query and a key and each element of the head
# dimension: two products forward, five backward.
FORWARD_FLOPS = 4
BACKWARD_FLOPS = 10

CAUSAL = 50.0  # the percentage of all pairs that causal SDPA skips


class Agreement(NamedTuple):
    """The error of a result: its largest difference from the reference, and the ratio of RMS values."""

    result: str
    largest: float
    relative: float
    agrees: bool


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`; `str` gives the printed tables."""

    name: str
    setting: Setting
    reference: str
    agreements: tuple[Agreement, ...]
    first_call_ms: float
    timings: tuple[Timing, ...]
    block_mask: BlockMask | None

    @property
    def agrees(self) -> bool:
        return all(agreement.agrees for agreement in self.agreements)

    def __repr__(self) -> str:
        return f"<Comparison {self.name}, {self.setting}: {'agrees' if self.agrees else 'DIFFERS'}>"

    def __str__(self) -> str:
        with lazy_imports():
            from flexmod.tools.terminal import plain
        return plain(*self.parts())

    def parts(self, color: bool = False) -> tuple[Any, ...]:
        """Returns the title, tables and picture as renderables of rich."""
        with lazy_imports():
            from flexmod.tools.terminal import picture, table, verdict
        title = f"{self.name}, {self.setting}"
        if self.setting.device.type == "cpu":
            title += "\n(on the CPU: a size that takes seconds; the kernels need a GPU)"
        agreement = table(
            (f"flexmod against {self.reference}", "largest difference", "relative RMS", ""),
            (
                (row.result, f"{row.largest:.1e}", f"{row.relative:.1e}", verdict(row.agrees))
                for row in self.agreements
            ),
            words=(0, 3),
        )
        *others, ours = self.timings
        rows = [*(each.cells(each.gains(ours)) for each in others), ours.cells(("", ""))]
        faster = "flexmod is\nfaster by"
        header = ("attention", "forward\nms", "TFLOP/s", faster, "backward\nms", "TFLOP/s", faster)
        first = f"\nflexmod's first forward and backward, compiling too: {self.first_call_ms:.0f} ms"
        drawn = () if self.block_mask is None else ("", *picture(self.block_mask, color=color))
        return title, "", agreement, "", table(header, rows), first, *drawn


def compare(
    mod: str | Mod = "causal",
    *,
    score_mod: str | Mod | None = None,
    batch: int | None = None,
    heads: int | None = None,
    seq: int | None = None,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    flex: bool = False,
    show: bool = True,
) -> Comparison:
    """Compares flexmod's results and times with SDPA's, forward and backward, and prints the tables.

        mod        a mask_mod, a score_mod, or a name, see `mod_names.py`
        score_mod  a score_mod to combine with a mask_mod, or its name
        batch, heads, seq, dim, dtype
                   of the random inputs [batch, heads, seq, dim]. Defaults depend on the device; on the CPU
                   the comparison takes seconds.
        flex       also times torch's compiled flex_attention (CUDA only)
        show       prints the tables

    SDPA with the materialized mask checks a mask; flexmod's dense reference checks a score_mod. Times are
    medians. TFLOP/s count the tiles that the mask keeps, and half of all pairs for causal SDPA.

    Raises UnknownModName for an unknown name, ModPlaceError for two score mods or two masks,
    ArgumentTypeError for an invalid size or dtype, FlexOnCpuError for `flex` without CUDA, NoDeviceError, and
    the errors of create_block_mask and flex_attention.

    Source: the comparison of the FlexAttention notebook, 2024.

    Example:

        compare("sliding_window", heads=2, seq=512)
    """
    given: dict[str, Any] = {"batch": batch, "heads": heads, "seq": seq, "dim": dim, "dtype": dtype}
    _check(given)
    setting = fitting(mod, usual_setting(device, **given))
    if flex and setting.device.type != "cuda":
        raise FlexOnCpuError(device=setting.device.type)
    chosen = choose(mod, setting, score_mod)
    block_mask = block_mask_of(chosen.mask, setting)
    inputs = random_inputs(setting)

    flexmod = flexmod_attention("flexmod", chosen.score, block_mask)
    start = time.perf_counter()
    results = _out_and_gradients(flexmod, inputs)
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    first_call_ms = 1e3 * (time.perf_counter() - start)

    sdpa = sdpa_masked(chosen.mask, setting)
    reference = sdpa if chosen.score is None else _dense(chosen.score, block_mask, setting)
    agreements = _agreements(results, reference, inputs, setting)
    del results

    attentions = (sdpa, *([compiled_flex(chosen, setting)] if flex else []), flexmod)
    skips = skipped(block_mask)
    causal = timed(sdpa_causal(setting), inputs, setting, CAUSAL)
    timings = (causal, *(timed(each, inputs, setting, skips) for each in attentions))
    name = " with ".join(name_of(each) for each in (mod, score_mod) if each is not None)
    comparison = Comparison(name, setting, reference.name, agreements, first_call_ms, timings, block_mask)
    if show:
        print(comparison)
    return comparison


def _check(given: dict[str, Any]) -> None:
    """Checks sizes and the dtype, as far as they are given. Raises ArgumentTypeError."""
    for name, value in given.items():
        if name == "dtype":
            right, advice = value in TOLERANCE, f"give {', '.join(map(str, TOLERANCE))}"
        else:
            right, advice = (as_int(value) or 0) > 0, "give a whole number above 0, e.g. 64"
        ArgumentTypeError.check(value is None or right, name, value, advice)


def _dense(score_mod: Mod, block_mask: BlockMask | None, setting: Setting) -> Implementation:
    """Returns flexmod's dense reference in float32 or float64, for one batch entry and the heads that fit."""
    matrix = 4 * setting.seq**2
    real = torch.promote_types(setting.dtype, torch.float32)
    heads = max(1, min(setting.heads, REFERENCE_BYTES // (REFERENCE_MATRICES * matrix)))
    front = None if block_mask is None else block_mask[:1, :heads]

    def of_part(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # a sum: a mod that was made for all heads refuses a call of fewer, but not numbers that it computed
        return score_mod(score, b + 0, h + 0, q_idx, kv_idx)

    dense = flexmod_attention("the dense reference", of_part, front, BACKEND="REFERENCE")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense.call(*(tensor[:1, :heads].to(real) for tensor in (q, k, v)))

    return dense._replace(call=call)


def _out_and_gradients(attention: Implementation, inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns out and the gradients of q, k and v, for a fixed random gradient of the output."""
    out = attention.call(*inputs)
    generator = torch.Generator(out.device).manual_seed(1)
    grad_out = torch.randn(inputs[0].shape, generator=generator, device=out.device, dtype=inputs[0].dtype)
    batch, heads = out.shape[:2]
    gradients = torch.autograd.grad(out, inputs, grad_out[:batch, :heads].to(out.dtype))
    return out.detach(), *gradients


def _agreements(
    results: tuple[Tensor, ...], reference: Implementation, inputs: Inputs, setting: Setting
) -> tuple[Agreement, ...]:
    """Compares results with the reference over the batches and heads that it computed."""
    expected = _out_and_gradients(reference, inputs)
    batch, heads = expected[0].shape[:2]
    rows = []
    names = ("out", "grad of q", "grad of k", "grad of v")
    for name, ours, theirs in zip(names, results, expected, strict=True):
        truth = theirs[:batch, :heads].double()
        difference = ours[:batch, :heads].double() - truth
        relative = float(difference.square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-30))
        agrees = relative <= TOLERANCE[setting.dtype]
        rows.append(Agreement(name, float(difference.abs().max()), relative, agrees))
    return tuple(rows)


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

    def gains(self, ours: Timing) -> tuple[Any, Any]:
        """Returns how many times faster `ours` is, forward and backward, as texts of rich."""
        with lazy_imports():
            from flexmod.tools.terminal import times_faster
        forward = times_faster(self.forward_ms, ours.forward_ms)
        return forward, times_faster(self.backward_ms, ours.backward_ms)

    def cells(self, gains: Sequence[object]) -> tuple[object, ...]:
        """Returns the fields as a table shows them, with a gain of the forward and one of the backward."""
        name, forward, rate, backward, backward_rate = self
        times = f"{forward:.3f}", f"{rate:.3g}", gains[0], f"{backward:.3f}", f"{backward_rate:.3g}", gains[1]
        return name, *times


def block_mask_of(mask_mod: Mod | None, setting: Setting) -> BlockMask | None:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, *mask_sizes(mask_mod, setting), device=setting.device)


def skipped(block_mask: BlockMask | None) -> float:
    """Returns the percentage of all pairs whose tiles the mask skips."""
    return 0.0 if block_mask is None else block_mask.sparsity()


def mask_sizes(mask_mod: Mod, setting: Setting) -> tuple[int, int, int, int]:
    """Returns a mask's numbers of batch entries and heads, 1 if it is the same for all, and its lengths."""
    groups = trace(mask_mod, "mask").graph.groups((setting.batch, setting.heads))
    return *groups, setting.seq, setting.seq


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
    rates = FORWARD_FLOPS * tera / forward_ms, BACKWARD_FLOPS * tera / backward_ms
    return Timing(attention.name, forward_ms, rates[0], backward_ms, rates[1])


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
