"""flex_attention, the public call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flexmod import errors
from flexmod.backends.arguments import Forward
from flexmod.backends.options import USUAL, Layout, LayoutName, layout_of
from flexmod.backends.options import parse as parse_options
from flexmod.block_mask.data import positions_in
from flexmod.block_mask.format import BlockMask
from flexmod.calls import checks, float8, library, prepared
from flexmod.calls.float8 import Scales
from flexmod.ir.graph import as_bool
from flexmod.ir.offsets import OffsetLike, of_call
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import compiles_frames, dynamo, in_forward_ad, in_transform

ScoreFunction = Callable[..., Any]


class AuxRequest(NamedTuple):
    """Asks flex_attention for more results than the output; they come as an AuxOutput.

    lse: the log-sum-exp of each row. max_scores: the largest score of each row.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The results that an AuxRequest asked for, float32 [B, Hq, M] each; None for the others.

    Inputs in float64 give float64.

    lse: natural logarithm of the sum of exp(score) over a row; -inf where a query attends to nothing.
    max_scores: a row's largest score after the mods; not differentiable.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreFunction | None = ...,
    block_mask: BlockMask | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    return_aux: None = ..., layout: LayoutName = ..., q_offset: OffsetLike = ..., kv_offset: OffsetLike = ...,
    scales: Scales | None = ..., out_dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreFunction | None = ...,
    block_mask: BlockMask | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    *, return_lse: Literal[True], kernel_options: Mapping[str, Any] | None = ...,
    return_aux: None = ..., layout: LayoutName = ..., q_offset: OffsetLike = ..., kv_offset: OffsetLike = ...,
    scales: Scales | None = ..., out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreFunction | None = ...,
    block_mask: BlockMask | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    return_aux: AuxRequest, layout: LayoutName = ..., q_offset: OffsetLike = ..., kv_offset: OffsetLike = ...,
    scales: Scales | None = ..., out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreFunction | None = ...,
    block_mask: BlockMask | None = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: bool = ..., kernel_options: Mapping[str, Any] | None = ..., *,
    return_aux: AuxRequest | None = ..., layout: LayoutName = ..., q_offset: OffsetLike = ...,
    kv_offset: OffsetLike = ..., scales: Scales | None = ..., out_dtype: torch.dtype | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...  # fmt: skip


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    layout: LayoutName = "bhsd",
    q_offset: OffsetLike = None,
    kv_offset: OffsetLike = None,
    scales: Scales | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Computes softmax(score_mod(scale * query @ key^T), masked by block_mask) @ value, differentiable.

    Lengths, head dimensions and strides may be any. Shapes and dtypes:

        query   [B, Hq, M, D]        float16, bfloat16 or float32; on the CPU and REFERENCE float64 too
        key     [B or 1, Hkv, N, D]  query's dtype, or a lower one in a forward without gradients
        value   [B or 1, Hkv, N, Dv] key's dtype
        output  [B, Hq, M, Dv]       query's dtype, or `out_dtype`
        lse     [B, Hq, M]           natural logarithm, float32 (float64 for float64)

    Options:

        score_mod       score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars. The score is float32, for
                        exp (not exp2); h is the query head.
        block_mask      from create_block_mask, or torch's own. Without one each query attends to all keys.
        scale           multiplies query @ key^T; 1/sqrt(D) if None
        enable_gqa      allows Hq to be a multiple of Hkv. Key and value may then have different numbers of
                        heads that both divide Hq, as in differential attention; the heads are copied until
                        both have as many.
        return_lse      returns (output, lse)
        return_aux      returns (output, AuxOutput) with the results that the AuxRequest names
        kernel_options  see docs/kernel_options.md
        layout          "bshd" for query, key, value and output as [B, M, Hq, D], without a copy. The shape of
                        lse and max_scores and the indices of mods do not change.
        q_offset        the position of the first query, where q_idx begins: an integer up to 2^30, or an
                        int32 or int64 tensor with one element, or one for each batch entry, or an `Offset`.
                        A call takes the offsets of its block_mask if it states none.
        kv_offset       the same for the first key and kv_idx
        scales          of float8 tensors, see `Scales`
        out_dtype       of the output for float8 queries: bfloat16 (also for None), float16 or float32

    All three tensors may be float8_e4m3fn or float8_e5m2, in a forward without gradients; or key and value;
    or value alone. Their head dimensions are multiples of 16. See docs/float8.md.

    A query that attends to nothing has output 0, lse -inf and gradients 0; without keys every query does. An
    empty batch gives an empty output.

    Raises, before it launches a kernel:

        tensors  NotATensor, NotStrided, NestedTensorInput, TensorKindError, FreedStorageError,
                 NotFourDimensional, EmptyHeadDim, ExtentError, HeadDimMismatch, LengthMismatch,
                 BatchMismatch, KeyValueHeadsMismatch, HeadCountMismatch, HeadRatioError, DeviceMismatch,
                 UnsupportedDevice, UnsupportedDtype, MixedDtypes, LowerPrecisionBackward, ScaleError,
                 ScaleValueError, FakeTensorError, OffsetTypeError, OffsetValueError, OffsetShapeError;
                 after the launch CaptureBoundsError, which kernels find
        float8   Float8MixedError, Float8HeadDimError, Float8GradientError, OutDtypeError,
                 ScalesTypeError, ScalesUnusedError, ScalesShapeError, ScalesValueError
        masks    NotABlockMask, MaskLengthError, MaskBroadcastError, MaskReadsBroadcastIndex,
                 SlicedTorchMaskError, OffsetMismatchError
        mods     what tracing raises: ModArityError, ControlFlowError, UnknownOperationError, ...
        options  ArgumentTypeError, LayoutError, ReturnArgumentsError, UnknownOption, OptionValueError,
                 FlashBackendError, DecodeBackendError, BackendDeviceError, TemplateError, NotTunedError,
                 NoTileFits, RoundedProductsError, MisaddressedProductsError

    Transforms of torch.func raise VmapError and ForwardModeError, a second backward DoubleBackwardError,
    torch.jit.trace JitTraceError.

    A class with a __torch_function__ and an active TorchFunctionMode see this function. A class or a mode
    with a __torch_dispatch__ (DTensor, FakeTensor, make_fx) sees torch.ops.flexmod.attention.

    Source: Dong et al., Flex Attention, 2024, https://arxiv.org/abs/2412.05496.

    Example:

        block_mask = create_block_mask(masks.causal(), None, None, 1024, 1024, device=query.device)
        out = flex_attention(query, key, value, mods.softcap(50.0), block_mask)
    """
    given = (
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, q_offset, kv_offset,
        scales, out_dtype,
    )  # fmt: skip
    compiling, tensors = torch.compiler.is_compiling(), (query, key, value)
    if not compiling and has_torch_function(tensors) and tensor_kinds.overridden(tensors):
        rest = (*given[3:7], return_lse, kernel_options)
        offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
        named = {"layout": layout, **offsets, "scales": scales, "out_dtype": out_dtype}
        return by_override(flex_attention, tensors, *rest, return_aux=return_aux, **named)
    tensor_kinds.refuse_nested(query, key, value)
    return results_of(_attend, given, return_lse, return_aux, layout_of(layout), compiling, _attend_in_graph)


def by_override(
    function: Callable[..., Any],
    tensors: tuple[Any, ...],
    *rest: Any,
    return_aux: AuxRequest | None,
    **named: Any,
) -> Any:
    """Calls a class's __torch_function__, or an active TorchFunctionMode, for function(*tensors, *rest)."""
    flat = None if return_aux is None else _Flat(*return_aux)
    result = handle_torch_function(function, tensors, *tensors, *rest, return_aux=flat, **named)
    return result if return_aux is None else (result[0], AuxOutput(*result[1]))


class _Flat(AuxRequest):
    """Asks for a plain tuple.

    To wrap the results of a subclass, torch calls the tuple's class with a list; AuxOutput takes none.
    """


def results_of(
    attend: Callable[..., Forward],
    given: tuple[Any, ...],
    return_lse: bool,
    return_aux: AuxRequest | None,
    layout: Layout,
    compiling: bool,
    in_graph: Callable[..., Forward] | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Calls attend(*given, want_max) and returns its results in the form that the caller asked for.

    The function `attend` takes tensors [B, heads, length, dim]; `given` has them in the layout. Inside of
    torch.compile, `in_graph` is called in its place; without one the graph breaks.
    """
    if compiling and in_graph is not None:
        attend = in_graph
    elif compiling or compiles_frames():
        attend = torch.compiler.disable(attend)
    errors.ArgumentTypeError.check_flags(return_lse=return_lse)
    if return_lse and return_aux is not None:
        raise errors.ReturnArgumentsError()
    if return_aux is not None:  # torch's AuxRequest has these fields too
        right = all(isinstance(getattr(return_aux, name, None), bool) for name in ("lse", "max_scores"))
        advice = "give AuxRequest(lse=True, max_scores=True), with False for what you do not need"
        errors.ArgumentTypeError.check(right, "return_aux", return_aux, advice)
    want_max = return_aux is not None and as_bool(return_aux.max_scores)
    result = attend(*given, want_max) if layout == USUAL else _heads_first(attend, layout, *given, want_max)
    if return_lse:
        return result.out, result.lse
    if return_aux is not None:
        aux = AuxOutput(result.lse if return_aux.lse else None, result.max_scores)
        return result.out, tuple(aux) if isinstance(return_aux, _Flat) else aux  # type: ignore[return-value]
    return result.out


def _heads_first(
    attend: Callable[..., Forward], layout: Layout, query: Any, key: Any, value: Any, *rest: Any
) -> Forward:
    """Calls attend() on views [B, heads, length, dim]. Errors name dimensions in the caller's layout."""
    given = (query, key, value)
    for tensor in given:
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            checks.check_tensors(*given, True, layout)
    try:
        views = [tensor.transpose(1, 2) for tensor in given]
    except RuntimeError:  # torch makes no view of freed storage
        tensor_kinds.check({"query": query, "key": key, "value": value})
        raise
    if torch.compiler.is_compiling():  # a graph break inside a try block is an error
        result = attend(*views, *rest)
    else:
        try:
            result = attend(*views, *rest)
        except errors.FlexmodError:
            checks.check_tensors(*given, True, layout)
            raise
    return Forward(result.out.transpose(1, 2), result.lse, result.max_scores)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
    q_offset: OffsetLike,
    kv_offset: OffsetLike,
    scales: Scales | None,
    out_dtype: torch.dtype | None,
    want_max: bool,
) -> Forward:
    """Runs flex_attention's call outside of torch.compile."""
    tensor_kinds.refuse_jit_trace()
    errors.ArgumentTypeError.check_flags(enable_gqa=enable_gqa)
    options = parse_options(kernel_options)
    of_mask = positions_in(block_mask)
    if q_offset is not None or kv_offset is not None or of_mask is not None:
        positions = of_call(q_offset, kv_offset, query, of_mask, block_mask is not None)
        score_mod = score_mod if positions is None or score_mod is None else positions.score(score_mod)
    value_scale = factor = None
    if checks.is_float8(query, key, value, scales, out_dtype):
        query, key, value, score_mod, out_dtype, value_scale, factor = float8.lowered(
            query, key, value, score_mod, scales, out_dtype, enable_gqa, options
        )
    score = prepared.score_of(score_mod)
    asked = prepared.CallOptions(score, scale, enable_gqa, options, want_max, out_dtype, value_scale)
    result = prepared.attend(query, key, value, block_mask, asked, library.dispatch)
    return result if factor is None else float8.scaled(result, factor)


def _attend_in_graph(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Forward:
    """Runs flex_attention's call inside torch.compile or torch.export.

    The REFERENCE backend breaks the graph, since torch differentiates it to any order. A mistake breaks it
    too: the call then runs outside of the graph and raises its error there.
    """
    score_mod, block_mask, scale, enable_gqa, kernel_options, *others = rest
    q_offset, kv_offset, scales, out_dtype, want_max = others
    try:
        errors.ArgumentTypeError.check_flags(enable_gqa=enable_gqa)
        options = parse_options(kernel_options)
        of_mask = positions_in(block_mask)
        positions = of_call(q_offset, kv_offset, query, of_mask, block_mask is not None)
        if options.backend == "REFERENCE":
            why = "the REFERENCE backend runs outside of a graph"
        elif in_transform() or in_forward_ad():
            why = "torch.func and forward_ad see no derivative of an operation of torch.library"
        elif isinstance(scale, bool) or not isinstance(scale, (int, float, type(None))):
            why = "the scale of a graph is a plain number"
        elif isinstance(scale, int) and abs(scale) > prepared.LARGEST_SCALE:
            why = "the scale of a graph is a number of 64 bits"
        else:
            mod = score_mod if positions is None or score_mod is None else positions.score(score_mod)
            call = float8.lowered(query, key, value, mod, scales, out_dtype, enable_gqa, options)
            choices = scale, as_bool(enable_gqa), options, want_max, call.out_dtype
            asked = prepared.CallOptions(prepared.NO_SCORE, *choices)
            result = library.attend(call.query, call.key, call.value, call.score_mod, block_mask, asked)
            return float8.scaled(result, call.factor)
    except errors.FlexmodError as error:
        why = error.message
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            # the call outside of the graph names the line; a program of it would run in this process alone
            _attend(query, key, value, *rest)
            raise
    dynamo().graph_break(msg=why)
    return torch.compiler.disable(_attend)(query, key, value, *rest)
