"""flexmod beside SDPA on one mask or score mod: first whether it is right, then how fast it is.

flexmod.compare("sliding_window")
flexmod.compare(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 100, seq=4096)
python -m flexmod compare causal
"""

from __future__ import annotations

import difflib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexmod import masks, mods
from flexmod.attention import flex_attention
from flexmod.block_mask.build import create_block_mask, create_mask
from flexmod.block_mask.format import BlockMask
from flexmod.errors import FlexOnCpuError, UnknownComparison
from flexmod.ir.source import mod_kind
from flexmod.ir.trace import trace

Mod = Callable[..., Any]
Inputs = tuple[Tensor, Tensor, Tensor]

# Floating-point operations of attention for each pair of a query and a key and each element of the head
# dimension: two products forward, five backward.
FORWARD_FLOPS = 4
BACKWARD_FLOPS = 10

# How far flexmod may be from the reference, as a ratio of root mean squares. float32 leaves room for TF32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# The dense reference and its gradients hold about this many float32 matrices of S x S a head, and may take
# so many bytes.
REFERENCE_MATRICES = 8
REFERENCE_BYTES = 4 << 30


@dataclass(frozen=True)
class Setting:
    """Self-attention on [batch, heads, seq, dim] tensors."""

    batch: int
    heads: int
    seq: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B={self.batch} H={self.heads} S={self.seq} D={self.dim} {dtype} on {self.device.type}"

    @property
    def side(self) -> int:
        """Of the largest square image whose pixels fit in the sequence."""
        return math.isqrt(self.seq)


class Mods(NamedTuple):
    mask: Mod | None = None
    score: Mod | None = None


class Attention(NamedTuple):
    """One way to compute attention, and the share of all pairs of positions that it is credited with."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    density: float = 1.0


class Agreement(NamedTuple):
    """How near a result is to the reference: the largest difference, and RMS(difference) / RMS(reference)."""

    result: str
    largest: float
    relative: float
    agrees: bool


class Timing(NamedTuple):
    """Medians in milliseconds, and the TFLOP/s that they mean for the tiles that the mask keeps."""

    attention: str
    forward_ms: float
    forward_tflops: float
    backward_ms: float
    backward_tflops: float


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` found; `str` is what it prints."""

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
        parts = [f"{self.name}, {self.setting}"]
        if self.setting.device.type == "cpu":
            parts.append("(on the CPU: a size that takes seconds; the kernels need a GPU)")
        parts += ["", self._agreement_table(), "", self._timing_table(), ""]
        parts.append(f"flexmod's first forward and backward, compiling too: {self.first_call_ms:.0f} ms")
        if self.block_mask is not None:
            parts += ["", str(self.block_mask)]
        return "\n".join(parts)

    def _agreement_table(self) -> str:
        header = (f"flexmod against {self.reference}", "largest difference", "relative RMS", "")
        rows = [
            (result, f"{largest:.1e}", f"{relative:.1e}", "agrees" if agrees else "DIFFERS")
            for result, largest, relative, agrees in self.agreements
        ]
        return tabulate(rows, header, disable_numparse=True, colalign=("left", "right", "right", "left"))

    def _timing_table(self) -> str:
        header = ("attention", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s")
        return tabulate(self.timings, header, floatfmt=("", ".3f", ".3g", ".3f", ".3g"))


def compare(
    mod: str | Mod = "causal",
    *,
    score_mod: Mod | None = None,
    batch: int | None = None,
    heads: int | None = None,
    seq: int | None = None,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    flex: bool = False,
    show: bool = True,
) -> Comparison:
    """Compare flexmod with SDPA, in result and in time, forward and backward, and print the tables.

    `mod` is a name of NAMED, a mask_mod, or a score_mod; `score_mod` adds a score_mod to a mask_mod. q, k and
    v are random, [batch, heads, seq, dim]; sizes that are not given follow from the device, and on the CPU
    they are such that the comparison takes seconds. `flex` adds torch's compiled flex_attention (CUDA only).

    A mask is checked against SDPA with the materialized mask, a score_mod against flexmod's dense reference.
    Times are medians. TFLOP/s count the tiles that the mask keeps, and half of all pairs for causal SDPA.

    Raises UnknownComparison for a name that is none, FlexOnCpuError for `flex` without CUDA, and what
    create_block_mask and flex_attention raise.
    """
    given: dict[str, Any] = {"batch": batch, "heads": heads, "seq": seq, "dim": dim, "dtype": dtype}
    usual = usual_setting(device)
    setting = replace(usual, **{field: value for field, value in given.items() if value is not None})
    if mod in IMAGES:
        setting = replace(setting, seq=setting.side**2)
    if flex and setting.device.type != "cuda":
        raise FlexOnCpuError(device=setting.device.type)
    chosen = _mods(mod, score_mod, setting)
    block_mask = _block_mask(chosen.mask, setting)
    density = 1.0 if block_mask is None else 1 - block_mask.sparsity() / 100
    inputs = _inputs(setting)

    flexmod = _flexmod("flexmod", chosen.score, block_mask, density)
    start = time.perf_counter()
    results = _out_and_gradients(flexmod, inputs)
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    first_call_ms = 1e3 * (time.perf_counter() - start)

    sdpa = _sdpa_masked(chosen.mask, setting, density)
    reference = sdpa if chosen.score is None else _dense(chosen.score, block_mask, setting)
    agreements = _agreements(results, reference, inputs, setting)
    del results

    others = [_torch_flex(chosen, setting, density)] if flex else []
    attentions = (_sdpa_causal(setting), sdpa, *others, flexmod)
    timings = tuple(_timing(attention, inputs, setting) for attention in attentions)
    name = mod if isinstance(mod, str) else getattr(mod, "__name__", type(mod).__name__)
    comparison = Comparison(name, setting, reference.name, agreements, first_call_ms, timings, block_mask)
    if show:
        print(comparison)
    return comparison


def _eight_documents(setting: Setting) -> Tensor:
    return torch.arange(setting.seq, device=setting.device) * 8 // setting.seq


NAMED: dict[str, Callable[[Setting], Mods]] = {
    "noop": lambda s: Mods(),
    "causal": lambda s: Mods(masks.causal()),
    "sliding_window": lambda s: Mods(masks.sliding_window(s.seq // 8)),
    "prefix_lm": lambda s: Mods(masks.prefix_lm(s.seq // 4)),
    "document": lambda s: Mods(masks.document(_eight_documents(s), causal=True)),
    "standalone_window": lambda s: Mods(masks.standalone_window(s.side, s.side, 8)),
    "natten": lambda s: Mods(masks.natten((s.side, s.side), 7)),
    "alibi": lambda s: Mods(masks.causal(), mods.alibi(s.heads)),
    "softcap": lambda s: Mods(masks.causal(), mods.softcap(30.0)),
    "relative_position": lambda s: Mods(masks.causal(), mods.relative_position()),
    "causal_score": lambda s: Mods(None, mods.causal_score()),
}
IMAGES = ("standalone_window", "natten")


def usual_setting(device: torch.device | str | None = None) -> Setting:
    """The sizes of a comparison where none are given: large on a GPU, a matter of seconds on the CPU."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cpu":
        return Setting(batch=1, heads=4, seq=2048, dim=64, dtype=torch.float32, device=place)
    return Setting(batch=4, heads=16, seq=8192, dim=128, dtype=torch.bfloat16, device=place)


def choose(name: str, setting: Setting) -> Mods:
    """The mask_mod and score_mod of a name of NAMED, sized for the setting; else UnknownComparison."""
    if name not in NAMED:
        near = difflib.get_close_matches(name, NAMED, 1)
        close = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownComparison(name=name, close=close, known=", ".join(NAMED))
    return NAMED[name](setting)


def _mods(mod: str | Mod, score_mod: Mod | None, setting: Setting) -> Mods:
    if isinstance(mod, str):
        chosen = choose(mod, setting)
    else:
        chosen = Mods(mask=mod) if mod_kind(mod) == "mask" else Mods(score=mod)
    return chosen if score_mod is None else chosen._replace(score=score_mod)


def _block_mask(mask_mod: Mod | None, setting: Setting) -> BlockMask | None:
    if mask_mod is None:
        return None
    batch, heads = _mask_extent(mask_mod, setting)
    return create_block_mask(mask_mod, batch, heads, setting.seq, setting.seq, device=setting.device)


def _mask_extent(mask_mod: Mod, setting: Setting) -> tuple[int, int]:
    """The batch and head counts of a mask: 1 where it is the same for all."""
    reads = trace(mask_mod, "mask").graph.reads
    return (setting.batch if "b" in reads else 1, setting.heads if "h" in reads else 1)


def _inputs(setting: Setting) -> Inputs:
    generator = torch.Generator(setting.device).manual_seed(0)
    shape = (setting.batch, setting.heads, setting.seq, setting.dim)

    def tensor() -> Tensor:
        values = torch.randn(shape, generator=generator, device=setting.device, dtype=setting.dtype)
        return values.requires_grad_()

    return tensor(), tensor(), tensor()


def _flexmod(
    name: str, score_mod: Mod | None, block_mask: BlockMask | None, density: float, **options: str
) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cast(Tensor, flex_attention(q, k, v, score_mod, block_mask, kernel_options=options))

    return Attention(name, call, density)


def _sdpa_causal(setting: Setting) -> Attention:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return causal(q, k, v)

    if setting.device.type == "cuda" and setting.dtype in (torch.float16, torch.bfloat16):
        return Attention("SDPA causal (flash)", flash, 0.5)
    return Attention("SDPA causal", causal, 0.5)


def _sdpa_masked(mask_mod: Mod | None, setting: Setting, density: float) -> Attention:
    """SDPA with the materialized mask, [1 or B, 1 or H, S, S] booleans; a row with no key gives 0."""
    if mask_mod is None:
        return Attention("SDPA", F.scaled_dot_product_attention)
    batch, heads = _mask_extent(mask_mod, setting)
    dense = create_mask(mask_mod, batch, heads, setting.seq, setting.seq, device=setting.device)
    alive = dense.any(-1, keepdim=True)
    all_alive = bool(alive.all())
    # SDPA's kernels differ on dead rows (0 or NaN): here such a row attends to all, and counts for nothing.
    widened = dense if all_alive else dense | ~alive

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, widened)
        return out if all_alive else out * alive

    return Attention("SDPA + mask", call, density)


def _dense(score_mod: Mod, block_mask: BlockMask | None, setting: Setting) -> Attention:
    """flexmod's dense reference, in float32 or more; the first batch, as many heads as memory allows."""
    matrix = 4 * setting.seq**2
    real = torch.promote_types(setting.dtype, torch.float32)
    heads = max(1, min(setting.heads, REFERENCE_BYTES // (REFERENCE_MATRICES * matrix)))
    front = None if block_mask is None else block_mask[:1, :heads]
    dense = _flexmod("the dense reference", score_mod, front, 1.0, BACKEND="REFERENCE")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense.call(*(tensor[:1, :heads].to(real) for tensor in (q, k, v)))

    return dense._replace(call=call)


def _torch_flex(chosen: Mods, setting: Setting, density: float) -> Attention:
    from torch.nn.attention import flex_attention as torch_flex

    block_mask = None
    if chosen.mask is not None:
        batch, heads = _mask_extent(chosen.mask, setting)
        block_mask = torch_flex.create_block_mask(
            chosen.mask, batch, heads, setting.seq, setting.seq, device=setting.device
        )
    # Dynamo counts recompilations of a function, and after a few runs it dense without a word.
    torch.compiler.reset()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    return Attention(
        "flex_attention (torch)", lambda q, k, v: compiled(q, k, v, chosen.score, block_mask), density
    )


def _out_and_gradients(attention: Attention, inputs: Inputs) -> tuple[Tensor, ...]:
    """out and the gradients of q, k and v, for a fixed random gradient of the output."""
    out = attention.call(*inputs)
    generator = torch.Generator(out.device).manual_seed(1)
    grad_out = torch.randn(inputs[0].shape, generator=generator, device=out.device, dtype=inputs[0].dtype)
    batch, heads = out.shape[:2]
    gradients = torch.autograd.grad(out, inputs, grad_out[:batch, :heads].to(out.dtype))
    return out.detach(), *gradients


def _agreements(
    results: tuple[Tensor, ...], reference: Attention, inputs: Inputs, setting: Setting
) -> tuple[Agreement, ...]:
    """Over the batches and heads that the reference computed."""
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


def _timing(attention: Attention, inputs: Inputs, setting: Setting) -> Timing:
    out = attention.call(*inputs)
    grad_out = torch.randn_like(out)
    forward_ms = _median_ms(lambda: attention.call(*inputs), setting.device)
    backward_ms = _median_ms(
        lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True), setting.device
    )
    pairs = attention.density * setting.batch * setting.heads * setting.seq**2
    tera = 1e-9 * pairs * setting.dim  # a thousandth of 1e-12: times are in milliseconds
    return Timing(
        attention.name,
        forward_ms,
        FORWARD_FLOPS * tera / forward_ms,
        backward_ms,
        BACKWARD_FLOPS * tera / backward_ms,
    )


def _median_ms(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, return_mode="median"))
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.3 and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
