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
def tanh(x):
    """1 - 2 / (1 + e^2x), in float32 with the chip's reciprocal: an absolute error near 2e-7."""
    grown = 1.0 + tl.exp2(x * 2.8853900817779268)
    if grown.dtype == tl.float64:
        inverse = 1.0 / grown
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], tl.float32, is_pure=True, pack=1
        )
    return 1.0 - 2.0 * inverse


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
