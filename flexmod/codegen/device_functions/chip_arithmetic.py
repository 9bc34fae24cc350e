"""Functions of `arithmetic` with instructions of chips: `CHIP_FUNCTIONS` of this folder says of which."""

import triton
import triton.language as tl


@triton.jit
def tanh_approximate(x):
    """The chip's own tanh, with a relative error of up to 2^-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x.to(tl.float32)], tl.float32, is_pure=True, pack=1
    ).to(x.dtype)


@triton.jit
def exp(x):
    """2^(x * log2(e)), whose instruction makes 0 of results below 2^-126; `tl.exp` scales around them."""
    if x.dtype == tl.float64:
        result = tl.exp(x)
    else:
        result = tl.exp2(x * 1.4426950408889634)
    return result


@triton.jit
def divide(a, b):
    """a times the chip's reciprocal of b: in float32, a relative error of up to 2e-7."""
    if b.dtype == tl.float64:
        result = a / b
    else:
        result = a * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def log(x):
    return 0.6931471805599453 * log2(x)


@triton.jit
def log2(x):
    """The chip's logarithm, with an error of up to 2^-22: absolute from 1/2 to 2, relative elsewhere."""
    if x.dtype == tl.float64:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def logistic(x):
    """1 / (1 + 2^x), with one reciprocal for two neighbors in a row: 1 / a = b / (a * b).

    If one of them is nan, both results are. 2^x stops at 2^60, so that the product of two is finite.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, inverse;
        min.NaN.f32 a, $2, 0f42700000;
        min.NaN.f32 b, $3, 0f42700000;
        ex2.approx.ftz.f32 a, a;
        ex2.approx.ftz.f32 b, b;
        add.f32 a, a, 0f3F800000;
        add.f32 b, b, 0f3F800000;
        mul.f32 inverse, a, b;
        rcp.approx.ftz.f32 inverse, inverse;
        mul.f32 $0, inverse, b;
        mul.f32 $1, inverse, a;
        }""",
        "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2,
    )
