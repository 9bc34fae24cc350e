"""Computes attention on packed sequences, without padding between them, and adds attention sinks to
results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor

from flexmod import errors, masks, mods
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import BlockMask
from flexmod.calls.attention import ScoreFunction, flex_attention
from flexmod.calls.checks import check_device
from flexmod.errors.base import a_type
from flexmod.masks.checks import MaskMod, check_kind, check_packing
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import ragged_dimension


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None = ...,
    score_mod: ScoreFunction | None = ..., mask_mod: MaskMod | None = ..., scale: float | None = ...,
    enable_gqa: bool = ..., return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ..., *, block_mask: BlockMask | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None = ...,
    score_mod: ScoreFunction | None = ..., mask_mod: MaskMod | None = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, return_lse: Literal[True], kernel_options: Mapping[str, Any] | None = ...,
    block_mask: BlockMask | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None = ...,
    score_mod: ScoreFunction | None = ..., mask_mod: MaskMod | None = ..., scale: float | None = ...,
    enable_gqa: bool = ..., return_lse: bool = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    block_mask: BlockMask | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    score_mod: ScoreFunction | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    block_mask: BlockMask | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes flex_attention within each packed sequence, differentiable.

    Shapes; dtypes are flex_attention's:

        query          [total, Hq, D]
        key, value     [total_kv, Hkv, D], [total_kv, Hkv, Dv]
        cu_seqlens     [n + 1]          integers that ascend from 0 to total: where each sequence begins
        cu_seqlens_kv  [n + 1]          the same for key and value; cu_seqlens if None
        output         [total, Hq, Dv]
        lse            [Hq, total]      natural logarithm, with return_lse

    For `score_mod` and `mask_mod` each sequence is a batch entry: b is its number, and q_idx and kv_idx start
    from 0. Positions after the last sequence form one more sequence. To use one mask for several calls, build
    it once and pass it as `block_mask` in place of `mask_mod`:

        mask_mod = masks.jagged(cu_seqlens, masks.causal())
        block_mask = create_block_mask(mask_mod, None, None, total, total)

    The other arguments are flex_attention's. Raises PackedShapeError, MaskTwiceError, LibraryArgumentError
    for other values of cu_seqlens (of a GPU's tensor with FLEXMOD_CHECK_BOUNDS=1), and the errors of
    flex_attention.

    Example:

        cu_seqlens = torch.tensor([0, 300, 700, 1024], device=query.device)
        packed = (x[0].transpose(0, 1) for x in (query, key, value))  # [1024, 8, 64]
        out = varlen_attention(*packed, cu_seqlens, mask_mod=masks.causal())
    """
    errors.ArgumentTypeError.check_flags(return_lse=return_lse)
    named: dict[str, Any] = {"query": query, "key": key, "value": value}
    starts = {"cu_seqlens": cu_seqlens, "cu_seqlens_kv": cu_seqlens_kv}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise errors.NotATensor(name=name, type=a_type(tensor), layout="[total, heads, head_dim]")
        if tensor.is_nested or tensor.dim() != 3:
            shape = "nested" if tensor.is_nested else list(tensor.shape)
            raise errors.PackedShapeError(name=name, shape=shape)
    if not torch.compiler.is_compiling():
        given = named | starts
        tensor_kinds.check({name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)})
    if key.shape[0] != value.shape[0]:
        raise errors.LengthMismatch(key=key.shape[0], value=value.shape[0], dimension="0")
    check_packing("varlen_attention", starts, query.shape[0], key.shape[0])
    for name, tensor in starts.items():
        if tensor is not None:
            check_device("query", query, name, tensor.device)
    heads_first = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    out, lse = _attend(
        heads_first, (cu_seqlens, cu_seqlens_kv), score_mod, mask_mod, block_mask,
        scale=scale, enable_gqa=enable_gqa, kernel_options=kernel_options,
    )  # fmt: skip
    return (out.transpose(0, 1), lse) if return_lse else out.transpose(0, 1)


@overload
def nested_attention(
    query: Tensor, key: Tensor, value: Tensor,
    score_mod: ScoreFunction | None = ..., mask_mod: MaskMod | None = ..., scale: float | None = ...,
    enable_gqa: bool = ..., return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ..., *, block_mask: BlockMask | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def nested_attention(
    query: Tensor, key: Tensor, value: Tensor,
    score_mod: ScoreFunction | None = ..., mask_mod: MaskMod | None = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, return_lse: Literal[True], kernel_options: Mapping[str, Any] | None = ...,
    block_mask: BlockMask | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def nested_attention(
    query: Tensor, key: Tensor, value: Tensor,
    score_mod: ScoreFunction | None = ..., mask_mod: MaskMod | None = ..., scale: float | None = ...,
    enable_gqa: bool = ..., return_lse: bool = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    block_mask: BlockMask | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def nested_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    block_mask: BlockMask | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes flex_attention on nested tensors of jagged layout, differentiable; returns nested tensors.

    Shapes; M* and N* are lengths that differ between batch entries:

        query       [B, Hq, M*, D]
        key, value  [B, Hkv, N*, D], [B, Hkv, N*, Dv]
        output      [B, Hq, M*, Dv], with query's lengths
        lse         [B, Hq, M*], natural logarithm, with return_lse

    For `score_mod` and `mask_mod` b is the batch entry, and q_idx and kv_idx are positions within its
    sequence. To use one `block_mask` for several calls, build it over the packed positions from
    `masks.jagged(query.offsets(), mask_mod)`. The kernel runs on query.values(), without padding or copies.

    The other arguments are flex_attention's. Raises NestedLayoutError, MaskTwiceError, and the errors of
    flex_attention.

    Source: torch.nested, and its scaled_dot_product_attention.

    Example:

        rows = [torch.randn(length, 8, 64, device=query.device) for length in (300, 700, 24)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        out = nested_attention(nested, nested, nested, mask_mod=masks.causal())
    """
    errors.ArgumentTypeError.check_flags(return_lse=return_lse)
    named: dict[str, Any] = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            layout = "[batch, heads, length, head_dim]"
            raise errors.NotATensor(name=name, type=a_type(tensor), layout=layout)
        _check_nested(name, tensor)
        check_device("query", query, name, tensor.device)
    _check_lengths(query, key, value)
    q, k, v = named.values()
    offsets, kv_offsets = q.offsets(), k.offsets()
    out, lse = _attend(
        (q.values(), k.values(), v.values()), (offsets, None if kv_offsets is offsets else kv_offsets),
        score_mod, mask_mod, block_mask,
        scale=scale, enable_gqa=enable_gqa, kernel_options=kernel_options,
    )  # fmt: skip
    nested, nested_lse = (
        torch.nested.nested_tensor_from_jagged(x, offsets=offsets, jagged_dim=2) for x in (out, lse)
    )
    return (nested, nested_lse) if return_lse else nested


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor, Tensor | None],
    score_mod: ScoreFunction | None,
    mask_mod: MaskMod | None,
    block_mask: BlockMask | None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Returns out [Hq, total, Dv] and lse [Hq, total] from query, key and value [heads, total, head_dim]."""
    if mask_mod is not None and block_mask is not None:
        raise errors.MaskTwiceError()
    query, key, value = tensors
    offsets, kv_offsets = cu_seqlens
    total, kv_total = query.shape[1], key.shape[1]
    lengths: dict[str, Any] = {"kv_offsets": kv_offsets, "total": total, "kv_total": kv_total}
    if block_mask is None and total and kv_total:
        jagged = masks.jagged(offsets, mask_mod, **lengths)
        block_mask = create_block_mask(jagged, None, query.shape[0], total, kv_total, device=query.device)
    if score_mod is not None:
        score_mod = mods.jagged(offsets, score_mod, **lengths)
    out, lse = flex_attention(
        query[None], key[None], value[None], score_mod, block_mask, return_lse=True, **rest
    )
    return out[0], lse[0]


def _check_nested(name: str, tensor: Any) -> None:
    if not tensor.is_nested or tensor.layout != torch.jagged:
        problem = "is not a nested tensor of jagged layout"
        advice = "make it with torch.nested.nested_tensor(list_of_tensors, layout=torch.jagged)"
    elif tensor.dim() != 4 or ragged_dimension(tensor) != 2:
        problem = f"has {tensor.dim()} dimensions, of which dimension {ragged_dimension(tensor)} is ragged"
        advice = f"let it be [batch, heads, length, head_dim], e.g. with {name}.transpose(1, 2)"
    elif tensor.lengths() is not None:
        problem = "has holes between its sequences"
        advice = f"close them, with {name}.transpose(1, 2).contiguous().transpose(1, 2)"
    else:
        return
    raise errors.NestedLayoutError(name=name, problem=problem, advice=advice)


def _check_lengths(query: Any, key: Any, value: Any) -> None:
    counts = [x.shape[0] for x in (query, key, value)]
    if len(set(counts)) > 1:
        raise errors.BatchMismatch(query=counts[0], key=counts[1], value=counts[2])
    # equal sizes of the ragged dimension mean the same offsets; otherwise compare the values
    if key.shape[2] != value.shape[2] and not torch.equal(key.offsets(), value.offsets()):
        raise errors.NestedLayoutError(
            name="value", problem="has sequences of other lengths than key",
            advice="give each sequence as many values as keys",
        )  # fmt: skip


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one more score, sink[h], to each row's softmax, without a value for it. Returns (out, lse):

        out * sigmoid(lse - sink),  log(exp(lse) + exp(sink))

    flex_attention returns `out` [B, Hq, M, Dv] and `lse` [B, Hq, M] with return_lse=True. The parameter
    `sink` is a floating-point tensor [Hq]; -inf is no sink. Results keep their dtypes. Gradients reach all
    three arguments, so you can train sinks. A row that attends to nothing keeps its output of 0.

    Raises LibraryArgumentError, DeviceMismatch, TensorKindError and FreedStorageError. Source: OpenAI,
    gpt-oss, 2025; Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023.

    Example:

        sink = torch.zeros(8, device=query.device, requires_grad=True)
        out, lse = flex_attention(query, key, value, return_lse=True)
        out, lse = apply_sink(out, lse, sink)
    """
    of_call = "write out, lse = flex_attention(query, key, value, return_lse=True)"
    is_float = isinstance(out, Tensor) and out.is_floating_point()
    rule = "a floating-point tensor [B, Hq, M, Dv]"
    check_kind("apply_sink", "out", out, (4,), is_float, rule=rule, advice=of_call)
    fits = isinstance(lse, Tensor) and lse.shape == out.shape[:3] and lse.is_floating_point()
    rule = f"a floating-point tensor of out's [B, Hq, M], {list(out.shape[:3])}"
    check_kind("apply_sink", "lse", lse, (3,), fits, rule=rule, advice=of_call)
    heads = out.shape[1]
    if not isinstance(sink, Tensor) or not sink.is_floating_point() or sink.shape != (heads,):
        given = f"{sink.dtype} {list(sink.shape)}" if isinstance(sink, Tensor) else a_type(sink)
        raise errors.LibraryArgumentError(
            function="apply_sink", name="sink", value=given,
            rule=f"a floating-point tensor of shape [{heads}], one number for each query head",
            advice=f"make it with torch.zeros({heads}, device=out.device), a parameter if it is learned",
        )  # fmt: skip
    for name, tensor in (("lse", lse), ("sink", sink)):
        check_device("out", out, name, tensor.device)
    if not torch.compiler.is_compiling():
        tensor_kinds.check({"out": out, "lse": lse, "sink": sink})
    lowest = torch.finfo(lse.dtype).min
    logits = sink.to(lse.dtype).clamp(min=lowest)[:, None]  # of -inf and an empty row, both results are NaN
    share = torch.sigmoid(lse - logits)
    total = torch.logaddexp(lse, logits)
    return (out * share[..., None]).to(out.dtype), total.masked_fill(total == lowest, -torch.inf)
