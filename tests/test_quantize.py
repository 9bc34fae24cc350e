"""flexmod.quantize: scales by group, rounding, what is not finite, the rotation, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import long_but
from torch import Tensor

from flexmod import errors, quantize
from flexmod.codegen.spec import SCALE_BLOCK

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# bits of the mantissa, smallest normal number
FORMATS = {E4M3: (3, 2.0**-6), E5M2: (2, 2.0**-14)}
GROUPS = ("tensor", "head", "block")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * torch.arange(1, shape[1] + 1).view(-1, 1, 1)).to(dtype)  # heads differ in size


def scale_of_rows(scale: Tensor, by: str, length: int) -> Tensor:
    """The scale of each row, [1 or B, 1 or H, 1 or length, 1], read from the sizes that quantize states."""
    if by == "tensor":
        return scale.view(1, 1, 1, 1)
    if by == "head":
        return scale[:, :, None, None]
    return scale[:, :, torch.arange(length) // SCALE_BLOCK, None]


def restored(tensor: Tensor, scale: Tensor, by: str) -> Tensor:
    return tensor.double() * scale_of_rows(scale, by, tensor.shape[2]).double()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("by", GROUPS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_round_trip(dtype: torch.dtype, by: Any, length: int) -> None:
    """Half a unit in the last place, also where a group's numbers are small."""
    x = normal(2, 3, length, 16)
    tensor, scale = quantize(x, dtype, by)
    assert (tensor.dtype, tensor.shape, scale.dtype) == (dtype, x.shape, torch.float32)
    groups = {"tensor": (), "head": (2, 3), "block": (2, 3, -(-length // SCALE_BLOCK))}
    assert scale.shape == groups[by]
    bits, least = FORMATS[dtype]
    row_scale = scale_of_rows(scale, by, length).double()
    error = (restored(tensor, scale, by) - x.double()).abs()
    allowed = x.double().abs().clamp(min=least * row_scale) * 2.0 ** -(bits + 1)
    assert (error <= allowed * (1 + 1e-6)).all()
    assert (error > 0).any()


@pytest.mark.parametrize("by", GROUPS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_each_group_reaches_the_largest_number(dtype: torch.dtype, by: Any) -> None:
    x = normal(2, 3, 300, 16)
    tensor, scale = quantize(x, dtype, by)
    pieces = {"tensor": (300 * 6,), "head": (300,), "block": (128, 128, 44)}[by]
    wide = x.reshape(1, 1, -1, 16) if by == "tensor" else x
    largest = torch.stack([part.abs().amax((-1, -2)) for part in wide.split(pieces, 2)], -1)
    torch.testing.assert_close(scale.flatten(), largest.flatten() / torch.finfo(dtype).max)
    stored = tensor.float().reshape(wide.shape)
    reached = torch.stack([part.abs().amax((-1, -2)) for part in stored.split(pieces, 2)], -1)
    assert (reached == torch.finfo(dtype).max).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_of_x(dtype: torch.dtype) -> None:
    x = normal(1, 2, 40, 24, dtype=dtype)
    for one, other in zip(quantize(x, by="head"), quantize(x.float(), by="head"), strict=True):
        assert torch.equal(one.float(), other.float())


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dim_first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every_second": lambda x: torch.stack((x, x + 1), -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("rotate", [False, True])
def test_strides(strides: str, rotate: bool) -> None:
    x = STRIDES[strides](normal(2, 3, 150, 16))
    tensor, scale = quantize(x, by="block", rotate=rotate)
    expected, expected_scale = quantize(x.contiguous(), by="block", rotate=rotate)
    assert tensor.is_contiguous()
    assert torch.equal(tensor.float(), expected.float()) and torch.equal(scale, expected_scale)


@pytest.mark.parametrize("by", GROUPS)
@pytest.mark.parametrize("shape", [(2, 3, 0, 16), (0, 3, 5, 16), (2, 0, 5, 16)])
def test_no_elements(shape: tuple[int, ...], by: Any) -> None:
    tensor, scale = quantize(torch.zeros(shape), by=by, rotate=True)
    assert tensor.shape == shape
    blocks = -(-shape[2] // SCALE_BLOCK)
    assert scale.shape == {"tensor": (), "head": shape[:2], "block": (*shape[:2], blocks)}[by]
    assert (scale == 1).all()


def test_zeros_have_scale_1() -> None:
    x = normal(1, 2, 300, 16)
    x[0, 1, 128:256] = 0
    tensor, scale = quantize(x, by="block")
    assert scale[0, 1, 1] == 1 and (scale != 1).sum() == 5
    assert (tensor[0, 1, 128:256].float() == 0).all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3.4e38])
@pytest.mark.parametrize("dtype", FORMATS)
def test_tiny_and_huge_numbers(dtype: torch.dtype, size: float) -> None:
    """No scale underflows to 0, and no number becomes NaN."""
    tensor, scale = quantize(torch.tensor([size, -size, 0.0, size / 2]).view(1, 1, 1, 4), dtype)
    assert scale > 0 and scale.isfinite() and tensor.float().isfinite().all()
    if size > 1e-33:
        expected = torch.tensor([size, -size, 0.0, size / 2], dtype=torch.float64)
        torch.testing.assert_close(restored(tensor, scale, "tensor").flatten(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("by", GROUPS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_are_not_finite_become_nan(dtype: torch.dtype, by: Any, x_dtype: torch.dtype) -> None:
    """Scales come from the other rows."""
    clean = normal(1, 2, 300, 16, dtype=x_dtype)
    bad = torch.tensor([10, 11, 12, 200])
    clean[0, :, bad] = 0
    x = clean.clone()
    x[0, :, bad, 3] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300], dtype=x_dtype)
    x[0, :, bad, 4] = 1e30
    tensor, scale = quantize(x, dtype, by)
    expected, expected_scale = quantize(clean, dtype, by)
    assert torch.equal(scale, expected_scale)
    is_bad = torch.zeros(300, dtype=torch.bool).index_fill(0, bad, True)
    assert torch.equal(tensor.float()[:, :, ~is_bad], expected.float()[:, :, ~is_bad])
    assert tensor.float()[:, :, is_bad].isnan().all()


@pytest.mark.parametrize("dim", [8, 16, 48, 64, 80, 128, 192, 256])
def test_rotation_leaves_products(dim: int) -> None:
    """Of rotated queries with rotated keys alone."""
    q, k = normal(1, 2, 20, dim), normal(1, 2, 30, dim, seed=1)
    rotated = [restored(*quantize(x, by="head", rotate=True), "head") for x in (q, k)]
    plain = [restored(*quantize(x, by="head"), "head") for x in (q, k)]
    exact = q.double() @ k.double().mT
    spread = q.double().norm(dim=-1)[..., None] * k.double().norm(dim=-1)[..., None, :]
    for one, other in (rotated, plain):
        assert ((one @ other.mT - exact).abs() / spread).max() < 2.0**-4
    assert ((rotated[0] @ plain[1].mT - exact).abs() / spread).max() > 2.0**-3


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_rotation_spreads_an_outlier(dim: int) -> None:
    """One large number becomes `dim` numbers of equal size, with both signs."""
    x = torch.eye(dim).view(1, 1, dim, dim) * 100
    tensor, scale = quantize(x, rotate=True)
    assert (tensor.float().abs() == 448).all()
    torch.testing.assert_close(scale * 448, torch.tensor(100 * dim**-0.5))
    assert tensor.float().sum(-1).count_nonzero() == 1  # only one row of a Hadamard matrix has one sign
    signs = tensor.float()[0, 0, :, 0].sign()
    assert 0.25 * dim < (signs < 0).sum() < 0.75 * dim


def test_parts_of_a_row_are_rotated_alone() -> None:
    x = torch.zeros(1, 1, 1, 48)
    x[..., 20] = 1  # in the second part of 16
    tensor, _ = quantize(x, rotate=True)
    assert tensor[0, 0, 0].float().nonzero().flatten().tolist() == list(range(16, 32))


def test_autocast_rotates_in_float32() -> None:
    x = normal(1, 2, 40, 64)
    expected, scale = quantize(x, rotate=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, found_scale = quantize(x, rotate=True)
    assert torch.equal(found.float(), expected.float()) and torch.equal(found_scale, scale)


@pytest.mark.parametrize("by", long_but({"block"}, GROUPS))
def test_torch_compile(by: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(quantize, backend="eager", fullgraph=True)
    for length in (300, 129):
        x = normal(1, 2, length, 48)
        for one, other in zip(compiled(x, E5M2, by, True), quantize(x, E5M2, by, True), strict=True):
            assert torch.equal(one.float(), other.float())


def test_tensors_without_values() -> None:
    tensor, scale = quantize(torch.zeros(2, 3, 300, 64, device="meta"), by="block", rotate=True)
    assert (tensor.device.type, tensor.shape, scale.shape) == ("meta", (2, 3, 300, 64), (2, 3, 3))


def test_a_gradient_that_nobody_asks_for() -> None:
    x = normal(1, 2, 10, 16).requires_grad_()
    with torch.no_grad():
        tensor, scale = quantize(x)
    assert not tensor.requires_grad and not scale.requires_grad
    assert torch.equal(tensor.float(), quantize(x.detach())[0].float())


X = torch.zeros(2, 3, 5, 24)
MISTAKES: list[tuple[type[errors.FlexmodError], Callable[[], Any], str]] = [
    (
        errors.NotATensor,
        lambda: quantize([1.0]),  # type: ignore[arg-type]
        "x is a list, not a torch.Tensor.\n"
        "  Instead: pass a tensor of shape [batch, heads, length, head_dim].",
    ),
    (
        errors.TensorKindError,
        lambda: quantize(X.to_sparse()),
        "x is a tensor of layout torch.sparse_coo; no kernel can read it.\n  Instead: pass x.to_dense().",
    ),
    (
        errors.NotFourDimensional,
        lambda: quantize(X[0]),
        "x has 3 dimensions, shape [3, 5, 24]; attention takes [batch, heads, length, head_dim].\n"
        "  Instead: add the missing dimensions, e.g. x.unsqueeze(0), or merge the extra ones.",
    ),
    (
        errors.EmptyHeadDim,
        lambda: quantize(X[..., :0]),
        "x has a head_dim of 0, shape [2, 3, 5, 0].\n"
        "  Instead: give it one element at least; batch, heads and lengths may be 0.",
    ),
    (
        errors.LibraryArgumentError,
        lambda: quantize(X.int()),
        "quantize: x is torch.int32; it must be float16, bfloat16, float32 or float64.\n"
        "  Instead: write quantize(x.float()).",
    ),
    (
        errors.LibraryArgumentError,
        lambda: quantize(X, torch.float8_e4m3fnuz),
        "quantize: dtype is torch.float8_e4m3fnuz; it must be torch.float8_e4m3fn or torch.float8_e5m2.\n"
        "  Instead: leave it out for torch.float8_e4m3fn.",
    ),
    (
        errors.LibraryArgumentError,
        lambda: quantize(X, by="row"),  # type: ignore[arg-type]
        "quantize: by is 'row'; it must be 'tensor', 'head' or 'block'.\n  Instead: write e.g. by=\"head\".",
    ),
    (
        errors.ArgumentTypeError,
        lambda: quantize(X, by="head", rotate=8),  # type: ignore[arg-type]
        "rotate is 8.\n  Instead: give rotate=True or rotate=False.",
    ),
    (
        errors.LibraryArgumentError,
        lambda: quantize(X, rotate=True),
        "quantize: head_dim is 24; it must be a power of two or a multiple of 16 with rotate=True.\n"
        "  Instead: leave rotate out for both query and key.",
    ),
    (
        errors.QuantizeGradientError,
        lambda: quantize(X.clone().requires_grad_()),
        "x requires a gradient, and rounding to float8 has none.\n"
        "  Instead: write flexmod.quantize(x.detach()), or call under torch.no_grad().",
    ),
]


@pytest.mark.parametrize(("error", "mistake", "message"), MISTAKES)
def test_mistakes(error: type[errors.FlexmodError], mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(error) as raised:
        mistake()
    assert str(raised.value) == message


def test_rotate_may_be_a_symbol_of_a_compiled_graph() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def both(x: Any) -> Any:
        return quantize(x, by="head", rotate=x.shape[2] > 100)

    for length in (129, 300, 40):
        x = normal(1, 2, length, 48)
        for one, other in zip(both(x), quantize(x, by="head", rotate=length > 100), strict=True):
            assert torch.equal(one.float(), other.float())
