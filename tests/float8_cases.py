"""Attention on float8 tensors: cases for the CPU, the interpreter and a GPU, and their truth in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz.float8_model import rounded_weights, summed_in_14_bits
from gpu.poison import poison
from torch import Tensor

import flexmod
from benchmarks import dense
from flexmod import AuxRequest, Scales, create_block_mask, flex_attention, masks, mods

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Float8Case:
    """A call. `float8`: which tensors are; `by`: the scale of each of them, "" for none."""

    score: Any = None
    mask: Any = None
    sizes: tuple[int, int, int, int, int] = (2, 4, 2, 140, 300)  # B, Hq, Hkv, M, N
    dims: tuple[int, int] = (32, 32)
    format: torch.dtype = E4M3
    float8: tuple[str, ...] = NAMES
    by: tuple[str, str, str] = ("head", "head", "head")
    others: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    shared: bool = False
    offset: int = 0
    layout: Any = "bhsd"


def _holes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every third query attends to nothing."""
    return (q_idx % 3 != 0) & (kv_idx <= q_idx + h)


CASES = {
    "plain": Float8Case(),
    "no scales": Float8Case(by=("", "", ""), mask=masks.causal()),
    "by tensor": Float8Case(by=("tensor", "tensor", "tensor"), mask=masks.sliding_window(50)),
    "by block": Float8Case(by=("block", "block", "block"), score=mods.softcap(5.0)),
    "mixed scales": Float8Case(by=("head", "block", "tensor"), mask=_holes),
    "alibi": Float8Case(score=mods.alibi(4), mask=masks.causal()),
    "the other format": Float8Case(format=E5M2, score=mods.softcap(20.0)),
    "float16 out": Float8Case(out_dtype=torch.float16, mask=_holes),
    "float32 out": Float8Case(out_dtype=torch.float32),
    "wide values": Float8Case(dims=(64, 128), sizes=(1, 2, 2, 257, 129)),
    "wide heads": Float8Case(dims=(128, 64), sizes=(1, 4, 1, 130, 200), mask=masks.prefix_lm(60)),
    "narrow heads": Float8Case(dims=(16, 16), mask=masks.causal(), score=mods.softcap(5.0)),
    "one query": Float8Case(sizes=(2, 4, 2, 1, 333), offset=332, mask=masks.causal()),
    "one query, by block": Float8Case(
        sizes=(2, 4, 2, 1, 333), offset=332, mask=masks.causal(), score=mods.alibi(4), by=("block",) * 3
    ),
    "one key head of all": Float8Case(shared=True, sizes=(3, 2, 1, 65, 190)),
    "bshd": Float8Case(layout="bshd", score=mods.alibi(4)),
    "keys and values": Float8Case(float8=NAMES[1:], mask=masks.causal()),
    "keys and values of few queries": Float8Case(float8=NAMES[1:], sizes=(1, 4, 2, 3, 300)),
    "keys and values by block": Float8Case(
        float8=NAMES[1:], others=torch.float16, by=("", "block", "block"), score=mods.softcap(5.0)
    ),
    "values": Float8Case(float8=NAMES[2:], others=torch.float16),
    "values without scales": Float8Case(float8=NAMES[2:], others=torch.float16, by=("", "", "")),
}
# the shapes of a tutorial kernel with values in float8
for _sizes in ((4, 32, 32, 64), (4, 32, 64, 64), (1, 2, 128, 128), (2, 2, 128, 256), (1, 2, 256, 256)):
    _batch, _heads, _length, _dim = _sizes
    CASES[f"values, {_sizes}"] = replace(
        CASES["values"], sizes=(_batch, _heads, _heads, _length, _length), dims=(_dim, _dim),
        mask=masks.causal(),
    )  # fmt: skip


def _quantized(x: Tensor, case: Float8Case, by: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """A tensor in float8, its scale, and in float64 what both stand for."""
    batch, heads, length, _ = x.shape
    if not by:
        made = x.to(case.format)
        return made, None, made.double()
    blocks = -(-length // 128)
    rows = torch.nn.functional.pad(x, (0, 0, 0, blocks * 128 - length)).unflatten(2, (blocks, 128))
    largest = rows.abs().amax((3, 4))
    if by != "block":
        largest = largest.amax() if by == "tensor" else largest.amax(2)
    scale = (largest / torch.finfo(case.format).max).float()
    each = scale.repeat_interleave(128, 2)[:, :, :length, None] if by == "block" else scale
    each = each[:, :, None, None] if by == "head" else each
    made = (x / each).to(case.format)
    return made, scale, made.double() * each.double()


@dataclass(frozen=True)
class Made:
    """The arguments of a case's call, and its operands in float64."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    truth: tuple[Tensor, Tensor, Tensor]


def made(case: Float8Case, device: str = "cpu") -> Made:
    batch, heads, kv_heads, length, keys = case.sizes
    kv_batch = 1 if case.shared else batch
    torch.manual_seed(1)
    shapes = (
        (batch, heads, length, case.dims[0]), (kv_batch, kv_heads, keys, case.dims[0]),
        (kv_batch, kv_heads, keys, case.dims[1]),
    )  # fmt: skip
    given, truth, scales = [], [], {}
    for name, shape, by in zip(NAMES, shapes, case.by, strict=True):
        x = torch.randn(shape, device=device)
        if name in case.float8:
            x, scales[name], exact = _quantized(x, case, by)
        else:
            x, scales[name] = x.to(case.others), None
            exact = x.double()
        given.append(x.transpose(1, 2).contiguous() if case.layout == "bshd" else x)
        truth.append(exact)
    block_mask = None
    if case.mask is not None:
        block_mask = create_block_mask(
            case.mask, None, heads if case.mask is _holes else None, length, keys, device=device,
            q_offset=case.offset or None,
        )  # fmt: skip
    options: dict[str, Any] = {"score_mod": case.score, "block_mask": block_mask, "enable_gqa": True}
    options |= {"layout": case.layout, "out_dtype": case.out_dtype}
    if any(scale is not None for scale in scales.values()):
        options["scales"] = Scales(**scales)
    return Made(tuple(given), options, tuple(truth))  # type: ignore[arg-type]


def _at(offset: int, mod: Any, place: int) -> Any:
    """A mod of positions, for the dense reference's indices."""

    def shifted(*arguments: Any) -> Any:
        return mod(*arguments[:place], arguments[place] + offset, *arguments[place + 1 :])

    return None if mod is None else shifted


def _in_steps(call: Made, variant: dense.Mods, weights: torch.dtype) -> Tensor:
    """Attention as a matrix unit computes it, else in float64.

    It has weights, relative to the row's largest, in a dtype of few digits.
    """
    query, key, value = call.truth
    wide = key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    noise = (summed_in_14_bits(query, wide) - query @ wide) * query.shape[-1] ** -0.5
    mod = variant.score_mod or (lambda score, *positions: score)
    noisy = variant._replace(score_mod=lambda score, *positions: mod(score + noise, *positions))
    eye = torch.eye(key.shape[2], dtype=torch.float64, device=key.device).expand(*key.shape[:2], -1, -1)
    exact, _ = dense.attention(query, key, eye, noisy)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return rounded_weights(exact, weights) @ value


def check(
    case: Float8Case, way: Callable[..., Any], device: str = "cpu", weights: torch.dtype | None = None
) -> None:
    """Compares a way to call with the truth, and its error with eager torch's in the output's dtype.

    `weights`: the dtype of weights in their product with values, if it has fewer digits than the output's.
    """
    call = made(case, device)
    variant = dense.Mods(_at(case.offset, case.score, 3), _at(case.offset, case.mask, 2))
    out, lse = dense.attention(*call.truth, variant)
    dtype = case.out_dtype or (torch.bfloat16 if "query" in case.float8 else case.others)
    eager, _ = dense.attention(*[x.to(dtype) for x in call.truth], variant)
    poison(torch.empty(out.shape, dtype=dtype, device=device))
    found, found_lse, largest = way(*call.tensors, **call.options)
    found = found.transpose(1, 2) if case.layout == "bshd" else found
    assert found.dtype is dtype and found.shape == out.shape and found_lse.dtype is torch.float32
    largest_error, typical = (eager - out).abs().max(), (eager - out).square().mean().sqrt()
    if weights is not None:
        coarse = _in_steps(call, variant, weights) - out
        largest_error, typical = largest_error + coarse.abs().max(), typical + coarse.square().mean().sqrt()
    assert (found - out).abs().max() <= 2 * largest_error + 1e-5
    assert (found - out).square().mean().sqrt() <= 1.5 * typical + 1e-6
    torch.testing.assert_close(found_lse.double(), lse, atol=2e-3, rtol=1e-3)
    assert (largest <= found_lse + 1e-3).all() and ((largest == -torch.inf) == (lse == -torch.inf)).all()


def eager(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, aux = flex_attention(*tensors, return_aux=AuxRequest(lse=True, max_scores=True), **options)
    assert aux.lse is not None and aux.max_scores is not None
    return out, aux.lse, aux.max_scores


def handle(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a handle, twice."""
    of_call = {name: options.pop(name) for name in ("block_mask", "scales", "out_dtype") if name in options}
    attend = flexmod.compile(**options)
    asked = AuxRequest(lse=True, max_scores=True)
    first, _ = attend(*tensors, return_aux=asked, **of_call)
    out, aux = attend(*tensors, return_aux=asked, **of_call)
    assert torch.equal(first, out)
    assert aux.lse is not None and aux.max_scores is not None
    return out, aux.lse, aux.max_scores
