"""flex_attention: checks and dispatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexmod import autograd, checks, errors, transforms
from flexmod.backends.interface import Forward, Problem
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import BlockMask, from_torch
from flexmod.compiler import lower
from flexmod.ir.evaluate import replay
from flexmod.ir.graph import Graph, used_captures
from flexmod.ir.trace import Traced, trace
from flexmod.kernel_options import KernelOptions
from flexmod.kernel_options import parse as parse_options

ScoreMod = Callable[..., Any]


class AuxRequest(NamedTuple):
    """What flex_attention returns besides the output: the log-sum-exp, the largest score of each row."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """float32 [B, Hq, M] each (float64 for float64 inputs), None where not asked for.

    lse: natural logarithm of the sum of exponentials of a row's scores; -inf where nothing is attended to.
    max_scores: a row's largest score after the mods; not differentiable.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """softmax(score_mod(scale * query @ key^T), masked by block_mask) @ value, differentiable.

    Shapes and dtypes:
        query         [B, Hq, M, D]       float16, bfloat16 or float32; on the CPU and REFERENCE float64 too
        key           [B or 1, Hkv, N, D]  query's dtype, or a lower one in a forward without gradients
        value         [B or 1, Hkv, N, Dv] key's dtype
        output        [B, Hq, M, Dv]      query's dtype
        lse           [B, Hq, M]          natural logarithm, float32 (float64 for float64)
    Any lengths and head dims from 1 on, any strides. Hq is Hkv, or with `enable_gqa` a multiple of it.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score, on scalars; score is float32 and natural, h the
            query head.
        block_mask: from create_block_mask, or torch's own. Without one every pair is attended to.
        scale: of the scores; 1/sqrt(D) if None.
        return_lse: return (output, lse).
        return_aux: return (output, AuxOutput) with what the AuxRequest asks for.
        kernel_options: see docs/kernel_options.md.

    A query with nothing to attend to has output 0, lse -inf and gradients 0. Raises a class of
    flexmod.errors, before anything is launched, for what it cannot do. Source: FlexAttention,
    https://arxiv.org/abs/2412.05496.
    """
    if return_lse and return_aux is not None:
        raise errors.ReturnArgumentsError()
    # Inside torch.compile attention runs as it does outside: the graph breaks around it.
    attend = torch.compiler.disable(_attend) if torch.compiler.is_compiling() else _attend
    want_max = return_aux is not None and return_aux.max_scores
    result = attend(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, want_max)
    if return_lse:
        return result.out, result.lse
    if return_aux is not None:
        return result.out, AuxOutput(result.lse if return_aux.lse else None, result.max_scores)
    return result.out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
    want_max: bool,
) -> Forward:
    """The call as `flex_attention` gets it: checks, then runs."""
    options = parse_options(kernel_options)
    reference = options.backend == "REFERENCE"
    if not reference:
        transforms.check({"query": query, "key": key, "value": value})
    checks.check_tensors(query, key, value, enable_gqa)
    backend = _backend(options, query)
    query, key, value = (_autocast(t) for t in (query, key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    with autograd.no_autocast(query.device.type):
        source = None if score_mod is None else trace(score_mod, "score", query.device)
        if source is not None and not reference:
            names = (f"{capture.name}, captured by score_mod" for capture in source.graph.captures)
            transforms.check(dict(zip(names, source.tensors, strict=True)))
        tensors = (query, key, value, *(source.tensors if source else ()))
        track = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        track |= transforms.active() and any(map(transforms.is_wrapped, tensors))
        checks.check_dtypes(query, key, value, backend, track)
        problem = _problem(query, key, source, block_mask, scale, backend, track)
        problem = replace(problem, options=options.tiles, precision=_precision())
        return autograd.run(problem, backend, query, key, value, want_max=want_max, track=track)


def _precision() -> Literal["ieee", "tf32"]:
    """float32 products follow torch's own switches, old and new; `allow_tf32` raises after a new one."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _autocast(tensor: Tensor) -> Tensor:
    """autocast casts query, key and value, as it does for torch's own attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _backend(options: KernelOptions, query: Tensor) -> str:
    """Which backend runs: "triton", "cpu", "interpret" or "reference". Nothing falls back by itself."""
    kind = query.device.type
    if kind not in ("cuda", "cpu"):
        raise errors.UnsupportedDevice(device=query.device)
    if options.backend == "REFERENCE":
        return "reference"
    if options.backend == "INTERPRET":
        if kind != "cpu":
            raise errors.BackendDeviceError(backend="INTERPRET", wanted="cpu", device=query.device)
        return "interpret"
    if options.backend == "TRITON" and kind != "cuda":
        raise errors.BackendDeviceError(backend="TRITON", wanted="cuda", device=query.device)
    return "triton" if kind == "cuda" else "cpu"


def _problem(
    query: Tensor,
    key: Tensor,
    source: Traced | None,
    block_mask: Any,
    scale: float,
    backend: str,
    wants_grad: bool,
) -> Problem:
    """The mods checked against the tensors, and a mask for the -inf branches of the score_mod."""
    mask = _block_mask(block_mask)
    if mask is not None:
        checks.check_mask(mask, query, key)
    if source is None:
        return Problem(None, None, mask, scale)
    checks.check_captures(source, "score", query)
    split = mask is None
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    lowered = lower(source.graph, extents, split=split)
    if split and lowered.split is not None:
        decides = tuple(tensor.detach() for tensor in source.tensors)
        mask = _mask_of(Traced(lowered.split, decides), extents, query.device)
    score = None if lowered.score is None else Traced(lowered.score, source.tensors)
    return Problem(score, lowered.grad if wants_grad else None, mask, scale)


def _block_mask(block_mask: Any) -> BlockMask | None:
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if type(block_mask).__name__ == "BlockMask" and hasattr(block_mask, "kv_num_blocks"):
        return from_torch(block_mask)
    raise errors.NotABlockMask(type=type(block_mask).__name__)


def _mask_of(split: Traced, extents: tuple[int, int, int, int], device: torch.device) -> BlockMask:
    """The block mask of a score_mod's -inf branches, remembered when it captures no tensor."""
    batch, heads, length, keys = extents
    sizes = (batch if "b" in split.graph.reads else 1, heads if "h" in split.graph.reads else 1, length, keys)
    if used_captures(split.graph.nodes):
        return create_block_mask(replay(split), *sizes, device=device)
    return _remembered_mask(split.graph, sizes, device)


@lru_cache(64)
def _remembered_mask(graph: Graph, sizes: tuple[int, int, int, int], device: torch.device) -> BlockMask:
    return create_block_mask(replay(Traced(graph)), *sizes, device=device)
