"""Float8 tensors: `quantize` makes them, and a call checks and converts them before its kernels run.

A float8 tensor x stands for x * scale. `lowered` turns such a call into one that kernels and backends know:

    query, key   Their scales become factors of a score_mod, which multiply q.k before the user's mod sees it.
                 Both stay float8 where the chip multiplies float8. Elsewhere they become `out_dtype`, which
                 holds them exactly.
    value        With a scale by tensor or by head it stays float8 where query does, and the scale multiplies
                 the output. Otherwise it is dequantized once, to `out_dtype`.

Beside half-type queries, float8 keys and values are converted once, before the kernel.

There is no backward: a call that needs a gradient raises Float8GradientError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexmod import errors
from flexmod.backends.arguments import Forward
from flexmod.backends.decoding import has_few, other_kernels
from flexmod.backends.options import KernelOptions
from flexmod.calls import checks
from flexmod.codegen.spec import FLOAT8, SCALE_BLOCK
from flexmod.errors.base import a_type, counted
from flexmod.ir.composed import Derived
from flexmod.ir.graph import dtype_name
from flexmod.runtime import config, tensor_kinds
from flexmod.runtime.locks import lazy_imports
from flexmod.runtime.private_torch import assume_constant, has_symbols, is_wrapped
from flexmod.runtime.target import target_of

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the default first
_GROUPS = ("tensor", "head", "block")


class Scales(NamedTuple):
    """The scales of float8 tensors in `flex_attention`: a tensor x stands for x * scale.

    Each is float32 and positive, on the tensor's device, or None for 1:

        []           one number for the whole tensor; [1] too
        [B, H]       one for each head, with the tensor's own B and H
        [B, H, n]    one for each block of 128 positions, n = ceil(length / 128)

    `quantize` makes tensors and their scales.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


class Float8Call(NamedTuple):
    """A call on float8 tensors as kernels compute it.

    `value_scale`: a kernel multiplies the output by it. `factor`: the caller does, see `scaled`. If no tensor
    is float8, the call stays as it is, and `out_dtype` is None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Any] | None
    out_dtype: torch.dtype | None = None
    value_scale: Tensor | None = None
    factor: Tensor | None = None


def scaled(result: Forward, factor: Tensor | None) -> Forward:
    """Multiplies the output by a scale of values, [] or [B or 1, Hkv]."""
    out = result.out
    if factor is None or not out.numel():
        return result
    if factor.dim() == 2:
        factor = factor.repeat_interleave(out.shape[1] // factor.shape[1], 1)[:, :, None, None]
    return result._replace(out=(out * factor).to(out.dtype))


@dataclass(frozen=True, eq=False)
class ScaledScore(Derived):
    """A score_mod of the product of float8 queries and keys; the user's `score_mod` gets natural scores.

    `group`: query heads for each key head. `shared`: all batch entries have the same keys.
    """

    score_mod: Callable[..., Any]
    query: Tensor | None
    key: Tensor | None
    group: int
    shared: bool

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        of_key = (b * 0 if self.shared else b), h // self.group if self.group > 1 else h
        of_query = _entry(self.query, b, h, q_idx)
        factor = _entry(self.key, *of_key, kv_idx)
        if of_query is not None:
            factor = of_query if factor is None else of_query * factor
        # kernels need no product for each element, since the factor is not negative
        score = score if factor is None else score * factor.abs()
        return self.score_mod(score, b, h, q_idx, kv_idx)


def _natural(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def _entry(scale: Tensor | None, b: Any, h: Any, index: Any) -> Any:
    """Returns the scale of a row of a tensor."""
    if scale is None or scale.dim() == 0:
        return scale
    return scale[b, h] if scale.dim() == 2 else scale[b, h, index // SCALE_BLOCK]


def lowered(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None,
    scales: Scales | None,
    out_dtype: torch.dtype | None,
    enable_gqa: bool,
    options: KernelOptions,
) -> Float8Call:
    """Checks a call on tensors [B, H, length, dim], and returns it as kernels compute it.

    Raises the errors of `check_tensors` and of `tensor_kinds.check`, Float8MixedError, Float8HeadDimError,
    Float8GradientError, OutDtypeError, ScalesTypeError, ScalesUnusedError, ScalesShapeError,
    ScalesValueError, DeviceMismatch.
    """
    equal = checks.with_equal_heads(query, key, value, enable_gqa)
    new_key, new_value = equal or (key, value)
    checks.check_tensors(query, new_key, new_value, enable_gqa)
    if not checks.is_float8(query, key, value, scales, out_dtype):  # in a graph: spares TorchDynamo the rest
        return Float8Call(query, new_key, new_value, score_mod)
    tensors = {"query": query, "key": key, "value": value}
    if not torch.compiler.is_compiling():
        tensor_kinds.check(tensors)
    _check_formats(query, key, value)
    dtype = _out_dtype(query, out_dtype)
    scales = _checked(Scales() if scales is None else scales, tensors)
    if value.dtype not in FLOAT8:
        return Float8Call(query, new_key, new_value, score_mod)
    _check_gradients(tensors, scales)
    if scales.query is not None or scales.key is not None:
        group, shared = query.shape[1] // max(1, key.shape[1]), key.shape[0] != query.shape[0]
        score_mod = ScaledScore(score_mod or _natural, scales.query, scales.key, group, shared)
    scale = scales.value
    if equal is not None and scale is not None and scale.dim():
        scale = scale.repeat_interleave(new_value.shape[1] // value.shape[1], 1)
    key, value = new_key, new_value
    by_block = scale is not None and scale.dim() == 3
    on_gpu = query.device.type == "cuda" and options.backend != "REFERENCE"
    # a symbol counts as any length: a graph that compared it would serve some lengths alone
    few = not has_symbols(query, key) and has_few(query, key) and not other_kernels(dict(options.tiles))
    kept = on_gpu and _multiplies(query.device) and (query.dtype in FLOAT8 or few)
    if not kept:
        query, key = (x if x.dtype == dtype else _dequantized(x, None, dtype) for x in (query, key))
    if not kept or by_block:
        value = _dequantized(value, scale if by_block else None, dtype)
    scale = None if by_block else scale
    in_kernel = on_gpu and not torch.compiler.is_compiling()
    return Float8Call(query, key, value, score_mod, dtype, *((scale, None) if in_kernel else (None, scale)))


def _dequantized(value: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns a float8 tensor times its scale by block, in `dtype`."""
    of_torch = torch.compiler.is_compiling() or tensor_kinds.any_dispatched((value,)) or is_wrapped(value)
    if not of_torch and value.device.type == "cuda" and _multiplies(value.device):
        with lazy_imports():
            from flexmod.runtime.dequantize import dequantized

        return dequantized(value, scale, dtype)
    if scale is None:
        return value.to(dtype)
    rows = scale.repeat_interleave(SCALE_BLOCK, 2)[:, :, : value.shape[2], None]
    return (value.to(torch.float32) * rows).to(dtype)


@assume_constant
def _multiplies(device: torch.device) -> bool:
    return target_of(device).float8


def _check_formats(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks which tensors are float8, that they have one format, and their head dimensions."""
    tensors = {"query": query, "key": key, "value": value}
    float8 = [name for name, tensor in tensors.items() if tensor.dtype in FLOAT8]
    others = {tensor.dtype for name, tensor in tensors.items() if name not in float8}
    formats = {tensors[name].dtype for name in float8}
    if len(formats) > 1 or (float8 and (float8 != [*tensors][-len(float8) :] or len(others) > 1)):
        names = [dtype_name(tensor.dtype) for tensor in tensors.values()]
        raise errors.Float8MixedError(
            query=names[0], key=names[1], value=names[2], format=min(map(str, formats))
        )
    for name in float8:
        dim = tensors[name].shape[3]
        if dim % 16:
            raise errors.Float8HeadDimError(name=name, dim=dim, more=-dim % 16)


def _out_dtype(query: Tensor, asked: Any) -> torch.dtype:
    """Returns the output's dtype: as asked, else bfloat16 for float8 queries and the queries' for others."""
    allowed: tuple[torch.dtype, ...]
    if query.dtype in FLOAT8:
        allowed, rule = OUT_DTYPES, "float8 queries give bfloat16, float16 or float32"
    else:
        allowed, rule = (query.dtype,), f"queries in {dtype_name(query.dtype)} give that dtype"
    if asked is not None and asked not in allowed:
        given = str(asked) if isinstance(asked, torch.dtype) else repr(asked)
        raise errors.OutDtypeError(given=given, rule=rule)
    return asked or allowed[0]


def _checked(scales: Any, tensors: dict[str, Tensor]) -> Scales:
    """Checks scales, and makes a scale of one element a 0-d tensor."""
    if not isinstance(scales, Scales):
        raise errors.ScalesTypeError(name="scales", given=a_type(scales))
    return Scales(*(_checked_scale(name, scale, tensors[name]) for name, scale in scales._asdict().items()))


def _checked_scale(name: str, scale: Any, tensor: Tensor) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        raise errors.ScalesTypeError(name=f"scales.{name}", given=a_type(scale))
    if not torch.compiler.is_compiling():
        tensor_kinds.check({f"scales.{name}": scale})
    if scale.dtype != torch.float32:
        raise errors.ScalesTypeError(name=f"scales.{name}", given=f"a tensor of {dtype_name(scale.dtype)}")
    if tensor.dtype not in FLOAT8:
        raise errors.ScalesUnusedError(name=name, dtype=dtype_name(tensor.dtype))
    batch, heads, length, _ = tensor.shape
    allowed = ((), (1,), (batch, heads), (batch, heads, -(-length // SCALE_BLOCK)))
    if not any(tuple(scale.shape) == shape for shape in allowed):  # `in` compares no symbols of a graph
        raise errors.ScalesShapeError(
            name=name, shape=tuple(scale.shape), head=allowed[2], block=allowed[3], rows=SCALE_BLOCK
        )
    if scale.device != tensor.device:
        raise errors.DeviceMismatch.of(name, tensor.device, f"scales.{name}", scale.device)
    if not torch.compiler.is_compiling():
        _check_values(name, scale)
    return scale.reshape(()) if scale.shape == (1,) else scale


def _check_values(name: str, scale: Tensor) -> None:
    """Checks values on the CPU; on a GPU only with FLEXMOD_CHECK_BOUNDS=1, since that waits for it."""
    hidden = tensor_kinds.is_hidden(scale)
    if hidden or not scale.numel() or (scale.device.type != "cpu" and not config.check_bounds()):
        return
    wrong = ~((scale > 0) & (scale < torch.inf))
    if wrong.any():
        raise errors.ScalesValueError(name=name, value=float(scale[wrong].flatten()[0]))


def _check_gradients(tensors: dict[str, Tensor], scales: Scales) -> None:
    if torch.is_grad_enabled():
        of_scales = {f"scales.{name}": scale for name, scale in scales._asdict().items()}
        for name, tensor in {**tensors, **of_scales}.items():
            if tensor is not None and tensor_kinds.requires_grad(tensor):
                raise errors.Float8GradientError(name=name)


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    by: Literal["tensor", "head", "block"] = "tensor",
    rotate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantizes `x` to float8. Returns (tensor, scale), with x about tensor * scale.

    Shapes and dtypes:

        x       [B, H, length, D]  float16, bfloat16, float32 or float64, with any strides
        tensor  [B, H, length, D]  `dtype`, float8_e4m3fn or float8_e5m2; contiguous
        scale   float32: [] by "tensor", [B, H] by "head", [B, H, ceil(length / 128)] by "block"

    A block is 128 rows. The largest magnitude of a tensor, head or block becomes the largest number of
    `dtype`, 448 or 57344. A scale is positive: 1 for zeros alone, and at least 2^-126. A row with NaN,
    infinity or a number beyond float32 becomes NaN, and scales ignore it.

    With `rotate` each row is first multiplied by an orthogonal matrix: random signs, then a Hadamard matrix.
    This spreads outliers over the row. The matrix depends on D alone, so rotating both query and key leaves
    their products unchanged; rotating only one does not. D must be a power of two or a multiple of 16. Rows
    are rotated in parts as long as the largest power of two that divides D.

    Rounding has no gradient. Raises NotATensor, NotFourDimensional, EmptyHeadDim, TensorKindError,
    FreedStorageError, QuantizeGradientError, ArgumentTypeError and LibraryArgumentError. Source: Shah et al.,
    FlashAttention-3, 2024 (incoherent processing); Ashkboos et al., QuaRot, 2024.

    Example:

        quantized_query, query_scale = quantize(query, by="head", rotate=True)
        quantized_key, key_scale = quantize(key, by="head", rotate=True)
        quantized_value, value_scale = quantize(value, by="head")
    """
    _check(x, dtype, by, rotate)
    values = _rotated(x) if rotate else x
    row_max = torch.linalg.vector_norm(values, torch.inf, -1).to(torch.float32)
    finite = row_max.isfinite()
    scale, row_scale = _scales(torch.where(finite, row_max, 0.0), by, torch.finfo(dtype).max)
    divisor = torch.where(finite, row_scale, torch.nan)[..., None]
    return (values / divisor).to(dtype).contiguous(), scale


def _scales(row_max: Tensor, by: str, largest: float) -> tuple[Tensor, Tensor]:
    """Returns the scales of the groups, and that of each row; `row_max` is [B, H, length]."""
    length = row_max.shape[-1]
    if by == "tensor":
        group_max = pad(row_max.flatten(), (0, 1)).amax()  # a 0 more: there may be no rows
    elif by == "head":
        group_max = pad(row_max, (0, 1)).amax(-1)
    else:
        blocks = (length + SCALE_BLOCK - 1) // SCALE_BLOCK
        whole = pad(row_max, (0, blocks * SCALE_BLOCK - length))
        group_max = whole.unflatten(-1, (blocks, SCALE_BLOCK)).amax(-1)
    scale = (group_max / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(group_max == 0, 1.0, scale)
    if by == "block":
        return scale, scale.repeat_interleave(SCALE_BLOCK, -1)[..., :length]
    return scale, (scale[..., None] if by == "head" else scale).expand_as(row_max)


def _rotated(x: Tensor) -> Tensor:
    """Multiplies each part of each row by the same orthogonal matrix, in float32."""
    parts = x.to(torch.float32).unflatten(-1, (-1, _rotation_size(x.shape[-1])))
    with tensor_kinds.no_autocast(x.device.type):
        return (parts @ _rotation(parts.shape[-1], x.device)).flatten(-2)


def _rotation_size(dim: int) -> int:
    """Returns the largest power of two that divides D."""
    return dim & -dim


def _rotation(size: int, device: torch.device) -> Tensor:
    """Returns an orthogonal matrix [size, size] in float32: random signs of rows times a Hadamard matrix.

    A hash of the row's number gives its sign, which is thereby the same on every device. A few small
    operations make the matrix. It is not cached: a CUDA graph or a trace of torch would own the tensor.
    """
    rows = torch.arange(size, device=device)
    bits = ((rows[:, None] >> torch.arange(size.bit_length(), device=device)) & 1).float()
    mixed = ((rows + 1) * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) >> 20
    return (1 - 2 * ((bits @ bits.T + (mixed & 1)[:, None]) % 2)) * size**-0.5


def _check(x: Any, dtype: object, by: object, rotate: bool) -> None:
    layout = "[batch, heads, length, head_dim]"
    if not isinstance(x, Tensor):
        raise errors.NotATensor(name="x", type=a_type(x), layout=layout)
    if x.is_nested:
        raise errors.TensorKindError(name="x", kind="nested", advice="its sequences, x.unbind(), one by one")
    if not torch.compiler.is_compiling():
        tensor_kinds.check({"x": x})
    if x.dim() != 4:
        rank = counted(x.dim(), "dimension")
        raise errors.NotFourDimensional(name="x", rank=rank, shape=list(x.shape), layout=layout)
    dim = int(x.shape[-1])
    if not dim:
        raise errors.EmptyHeadDim(name="x", shape=list(x.shape))
    errors.ArgumentTypeError.check_flags(rotate=rotate)
    rotates = not rotate or dim % 16 == 0 or _rotation_size(dim) == dim
    floats, float8 = "float16, bfloat16, float32 or float64", " or ".join(map(str, FLOAT8))
    sizes = "a power of two or a multiple of 16 with rotate=True"
    errors.LibraryArgumentError.check(
        "quantize",
        ("x", x.dtype, x.dtype in checks.TORCH_DTYPES, floats, "write quantize(x.float())"),
        ("dtype", dtype, dtype in FLOAT8, float8, "leave it out for torch.float8_e4m3fn"),
        ("by", by, by in _GROUPS, "'tensor', 'head' or 'block'", 'write e.g. by="head"'),
        ("head_dim", dim, rotates, sizes, "leave rotate out for both query and key"),
    )
    if x.requires_grad and torch.is_grad_enabled():
        raise errors.QuantizeGradientError()
