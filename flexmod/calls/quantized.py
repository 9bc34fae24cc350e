"""Quantizes queries, keys and values to float8."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexmod import errors
from flexmod.codegen.spec import FLOAT8, SCALE_BLOCK
from flexmod.runtime import tensor_kinds

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GROUPS = ("tensor", "head", "block")


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

    Rounding has no gradient. Raises NotATensor, NotFourDimensional, EmptyHeadDim, QuantizeGradientError and
    LibraryArgumentError. Source: Shah et al., FlashAttention-3, 2024 (incoherent processing); Ashkboos et
    al., QuaRot, 2024.

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
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if kind in ("cuda", "cpu") else nullcontext():
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
        raise errors.NotATensor(name="x", type=type(x).__name__, layout=layout)
    if not torch.compiler.is_compiling():
        tensor_kinds.check({"x": x})
    if x.dim() != 4:
        raise errors.NotFourDimensional(name="x", rank=x.dim(), shape=list(x.shape), layout=layout)
    dim = int(x.shape[-1])
    if not dim:
        raise errors.EmptyHeadDim(name="x", shape=list(x.shape))
    rotates = not rotate or dim % 16 == 0 or _rotation_size(dim) == dim
    floats, float8 = "float16, bfloat16, float32 or float64", " or ".join(map(str, FLOAT8))
    sizes = "a power of two or a multiple of 16 with rotate=True"
    for name, value, right, rule, advice in (
        ("x", x.dtype, x.dtype in _FLOATS, floats, "write quantize(x.float())"),
        ("dtype", dtype, dtype in FLOAT8, float8, "leave it out for torch.float8_e4m3fn"),
        ("by", repr(by), by in _GROUPS, "'tensor', 'head' or 'block'", 'write e.g. by="head"'),
        ("head_dim", dim, rotates, sizes, "leave rotate out for both query and key"),
    ):
        if not right:
            raise errors.LibraryArgumentError(
                function="quantize", name=name, value=value, rule=rule, advice=advice
            )
    if x.requires_grad and torch.is_grad_enabled():
        raise errors.QuantizeGradientError()
