"""The functions that the table of operations calls, for every chip.

They use only `tl` functions and operators: no libdevice, no inline assembly, no new tensors. So one text
serves every target and the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def floor_divide(a, b):
    """Python's a // b on integers; `//` of Triton truncates."""
    quotient = a // b
    rest = a - quotient * b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(quotient.dtype)


@triton.jit
def remainder(a, b):
    """Python's a % b, with the sign of b; `%` of Triton takes the sign of a."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def rounded_product(a, b):
    """a * b, rounded on its own: the compiler would fuse it with a sum, and round both at once."""
    product = a * b
    return tl.where(product == 0, product, tl.fma(a, b, 0.0))  # -0.0 + 0.0 is 0.0


@triton.jit
def safe_divisor(b):
    """Replaces 0 and -1 by 1: compilers assume that no kernel divides by 0, or the smallest number by -1."""
    if b.dtype.is_int_signed():
        return tl.where((b == 0) | (b == -1), 1, b).to(b.dtype)
    return tl.where(b == 0, 1, b).to(b.dtype)


@triton.jit
def negated_by_minus_one(quotient, b):
    """Turns a quotient by `safe_divisor(b)` into the quotient by b: a divisor of -1 was replaced by 1."""
    if b.dtype.is_int_signed():
        quotient = tl.where(b == -1, -quotient, quotient)
    return quotient


@triton.jit
def safe_floor_divide(a, b):
    """Python's a // b on integers; 0 counts as 1."""
    return negated_by_minus_one(floor_divide(a, safe_divisor(b)), b)


@triton.jit
def safe_trunc_divide(a, b):
    """a / b on integers, towards 0; 0 counts as 1."""
    return negated_by_minus_one(a // safe_divisor(b), b)


@triton.jit
def safe_remainder(a, b):
    """Python's a % b on integers, with the sign of b; 0 counts as 1."""
    return remainder(a, safe_divisor(b))


@triton.jit
def safe_fmod(a, b):
    """The remainder of a / b on integers, with the sign of a; 0 counts as 1."""
    return a % safe_divisor(b)


@triton.jit
def fmod(a, b, STEPS: tl.constexpr = 10):
    """The exact remainder of a / b, with the sign of a. Each of ten steps takes 28 bits of the quotient."""
    if a.dtype == tl.float64:
        rest = fmod_of_doubles(tl.abs(a), tl.abs(b))
    else:  # a product of 28 bits and float32's 24 is a float64
        rest = tl.abs(a).to(tl.float64)
        size = tl.abs(b).to(tl.float64)
        inverse = 1.0 / size
        for step in tl.static_range(STEPS):
            turns = tl.floor(rest * (inverse * 2.0 ** (28 * (step + 1 - STEPS))))
            rest -= turns * (size * 2.0 ** (28 * (STEPS - 1 - step)))
        rest = tl.where(rest < 0, rest + size, rest)
        rest = tl.where(rest >= size, rest - size, rest)
    rest = tl.where(a < 0, -rest, rest).to(a.dtype)
    return tl.where((tl.abs(b) == float("inf")) & (tl.abs(a) != float("inf")), a, rest)


@triton.jit
def power_of_two(n):
    """2^(23 * (n // 3)), a float64."""
    return ((tl.cast(n, tl.int64) // 3 * 23 + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def fmod_of_doubles(a, b):
    """a % b for numbers that are not negative. Each step takes 23 bits of the quotient, rounded to nearest.

    A product with all 53 bits would be rounded; products with the upper and the lower half are exact.
    """
    rest = tl.where(b == b, a, a)  # with the broadcast shape
    for step in range(92):  # a float64 does not hold 2^(23 * 91)
        scaled = b * power_of_two(93 - step) * power_of_two(92 - step) * power_of_two(91 - step)
        divisor = tl.where(scaled == float("inf"), 1.0, scaled)
        turns = tl.floor(rest / divisor + 0.5)
        turns = tl.where(turns * divisor == float("inf"), turns - 1, turns)
        turns = tl.where((tl.abs(rest) < scaled) & (tl.abs(rest) != float("inf")), 0.0, turns)
        upper = (divisor.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
        rest = (rest - turns * upper) - turns * (divisor - upper)
    return tl.where(b == 0, float("nan"), tl.where(rest < 0, rest + b, rest))


@triton.jit
def remainder_float(a, b, STEPS: tl.constexpr = 10):
    """Python's a % b, with the sign of b."""
    rest = fmod(a, b, STEPS)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide_float(a, b, STEPS: tl.constexpr = 10):
    """floor(a / b) from the exact remainder, so that 1.0 // 0.1 is 9."""
    rest = fmod(a, b, STEPS)
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a - rest, b)
    else:
        quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    nearest = tl.floor(quotient)
    nearest = tl.where(quotient - nearest > 0.5, nearest + 1, nearest)
    return tl.where(b == 0, a / b, nearest)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_half_even(x):
    below = tl.floor(x)
    rest = x - below
    even = tl.floor(below * 0.5) * 2 == below
    return tl.where((rest > 0.5) | ((rest == 0.5) & (even == 0)), below + 1, below)


@triton.jit
def sign(x):
    """-1, 0 or 1; nan gives 0, as in torch."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def logistic(x):
    """1 / (1 + 2^x)."""
    return 1.0 / (1.0 + tl.exp2(x))


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def divide(a, b):
    return a / b


@triton.jit
def tanh(x):
    """1 - 2 / (1 + e^2x), with an absolute error near 2e-7; exact at both infinities."""
    return 1.0 - divide(2.0, 1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def tanh_relative(x):
    """Cephes' tanhf: a polynomial where 1 - 2 / (1 + e^2x) would cancel. A relative error near 2e-7."""
    if x.dtype == tl.float64:
        grown = expm1(2.0 * tl.minimum(x, 30.0, propagate_nan=tl.PropagateNan.ALL))
        result = grown / (grown + 2.0)
    else:
        large = 1.0 - divide(2.0, 1.0 + tl.exp2(x * 2.8853900817779268))
        square = x * x
        series = -5.70498872745e-3 * square + 2.06390887954e-2
        series = series * square - 5.37397155531e-2
        series = series * square + 1.33314422036e-1
        series = series * square - 3.33332819422e-1
        result = tl.where(tl.abs(x) < 0.625, series * square * x + x, large)
    return result


@triton.jit
def tanh_approximate(x):
    """The usual tanh, for chips without an instruction for it."""
    return tanh(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def log2(x):
    return tl.log2(x)


@triton.jit
def log1p(x):
    """log(1 + x), where 1 + x has no digits to lose; in float64 corrected for its rounding.

    The polynomial's relative error is below 3e-8 up to 0.13, by a Chebyshev fit.
    """
    shifted = 1.0 + x
    if x.dtype == tl.float64:
        exact = tl.log(shifted) * (x / (shifted - 1.0))
        result = tl.where(shifted == 1.0, x, tl.where(shifted == x, tl.log(shifted), exact))
    else:
        series = -0.16956106 * x + 0.20342899
        series = series * x - 0.24998635
        series = series * x + 0.33331515
        series = series * x - 0.5
        result = tl.where(tl.abs(x) < 0.13, series * x * x + x, log(shifted))
    return result


@triton.jit
def expm1(x):
    """e^x - 1, corrected for the rounding of e^x."""
    grown = exp(x)
    exact = (grown - 1.0) * (x / tl.log(grown))
    return tl.where(grown == 1.0, x, tl.where((grown < 1e-7) | (grown > 1e7), grown - 1.0, exact))


@triton.jit
def sinh(x):
    """sinh from e^x - 1, which keeps the digits of small x, or from e^(x/2), which overflows later."""
    size = tl.abs(x)
    grown = expm1(size)
    root = exp(size * 0.5)
    large = tl.where(size < 20, 0.5 * (grown + grown / (grown + 1.0)), 0.5 * root * root)
    return tl.where(size < 1e-9, x, tl.where(x < 0, -large, large))


@triton.jit
def cosh(x):
    """cosh from e^(x/2), which is finite wherever the result is."""
    root = exp(tl.abs(x) * 0.5)
    return 0.5 * root * root + 0.5 / (root * root)


@triton.jit
def atan(x):
    """From |x| up to tan(pi / 8), by a polynomial with a relative error of 4e-15; the rest by reflection."""
    size = tl.abs(x)
    far, middle = size > 2.414213562373095, size > 0.4142135623730951
    near = tl.where(far, -1.0 / size, tl.where(middle, (size - 1.0) / (size + 1.0), size))
    square = near * near
    series = -0.027244625714129084
    series = series * square + 0.05169909443388437
    series = series * square + -0.06551314029234698
    series = series * square + 0.07681127810107558
    series = series * square + -0.09090265694370937
    series = series * square + 0.1111109032159028
    series = series * square + -0.14285713956307727
    series = series * square + 0.1999999999821795
    series = series * square + -0.33333333333334214
    angle = near + near * square * series
    angle = tl.where(far, angle + 1.5707963267948966, tl.where(middle, angle + 0.7853981633974483, angle))
    return tl.where(size < 1e-9, x, tl.where(x < 0, -angle, angle))


@triton.jit
def atan2(y, x):
    """The angle of (x, y), from the ratio of the shorter to the longer side; the signs of zeros count."""
    tall, wide = tl.abs(y), tl.abs(x)
    low, high = tl.where(tall < wide, tall, wide), tl.where(tall < wide, wide, tall)
    angle = atan(tl.where(low == high, (high > 0).to(high.dtype), low / high))
    angle = tl.where(tall > wide, 1.5707963267948966 - angle, angle)
    angle = tl.where((x < 0) | (1.0 / x == float("-inf")), 3.141592653589793 - angle, angle)
    angle = tl.where((y < 0) | (1.0 / y == float("-inf")), -angle, angle)
    return tl.where((x == x) & (y == y), angle, x + y)


@triton.jit
def hypot(a, b):
    """sqrt(a^2 + b^2) without the squares, which would overflow."""
    a, b = tl.abs(a), tl.abs(b)
    low, high = tl.where(a > b, b, a), tl.where(a > b, a, b)
    ratio = low / high
    found = tl.where(high == 0, low + high, high * tl.sqrt(1.0 + ratio * ratio))
    return tl.where((a == float("inf")) | (b == float("inf")), float("inf"), found)


@triton.jit
def lgamma(x):
    """log |gamma(x)| by Stirling's series at 8 or more, in float64: near 1 and 2 its terms cancel."""
    z = x.to(tl.float64)
    left = z < 0.5
    y = tl.where(left, 1.0 - z, z)  # gamma(z) * gamma(1 - z) = pi / sin(pi * z)
    small = y < 8
    product = y * (y + 1.0) * (y + 2.0) * (y + 3.0) * (y + 4.0) * (y + 5.0) * (y + 6.0) * (y + 7.0)
    product = tl.where(small, product, 1.0)
    y = tl.where(small, y + 8.0, y)
    square = 1.0 / (y * y)
    series = -0.0019175269175269176 * square + 0.0008417508417508417
    series = series * square - 0.0005952380952380953
    series = series * square + 0.0007936507936507937
    series = series * square - 0.002777777777777778
    series = (series * square + 0.08333333333333333) / y
    found = (y - 0.5) * (tl.log(y) - 1.0) + (series + 0.41893853320467274) - tl.log(product)
    turn = tl.abs(z - tl.floor(z + 0.5))
    sine = tl.where(turn < 1e-9, turn, tl.sin(turn * 3.141592653589793) * 0.3183098861837907)
    found = tl.where(left, -tl.log(sine) - found, found)
    return tl.where((tl.abs(z) == float("inf")) | (left & (turn == 0)), float("inf"), found).to(x.dtype)


# `scaled` is (1 + 2x) * e^(x^2) * erfc(x) as a polynomial of 1 - 5 / (x + 2.5), interpolated at Chebyshev
# points; its relative error is 1e-14.
@triton.jit
def erfc(x):
    """1 - erf(x), with a small relative error: the subtraction would cancel for large x."""
    near = 1.0 - 5.0 / (tl.abs(x) + 2.5)
    scaled = -4.703990740937661e-08
    scaled = scaled * near + -5.235577553086046e-08
    scaled = scaled * near + 3.7411117351187194e-07
    scaled = scaled * near + 6.378431400500165e-07
    scaled = scaled * near + -1.3958300637772539e-06
    scaled = scaled * near + -4.311962092221314e-06
    scaled = scaled * near + 2.4678747384640446e-06
    scaled = scaled * near + 2.2753319319188147e-05
    scaled = scaled * near + 6.3331461963030945e-06
    scaled = scaled * near + -0.00011354295172675801
    scaled = scaled * near + -8.849941317280273e-05
    scaled = scaled * near + 0.000632129536669872
    scaled = scaled * near + 0.0004918694773093713
    scaled = scaled * near + -0.004382079162490372
    scaled = scaled * near + 0.000931892450088061
    scaled = scaled * near + 0.032760893343064576
    scaled = scaled * near + -0.10296705602164427
    scaled = scaled * near + 0.15762991902000814
    scaled = scaled * near + -0.09902453957383224
    scaled = scaled * near + -0.12235676308236185
    scaled = scaled * near + 1.2648381843668615
    small = exp(-x * x) * (scaled / (1.0 + 2.0 * x))
    return tl.where(x < 0.5, 1.0 - tl.erf(x), small)


@triton.jit
def power(a, b):
    """a ** b for floats, as exp2(b * log2 |a|)."""
    size = tl.where(tl.abs(a) == 1, 1.0, tl.exp2(b * tl.log2(tl.abs(a))))
    whole = tl.floor(b) == b
    odd = whole & (tl.floor(b * 0.5) * 2 != b)
    signed = tl.where(odd & ((a < 0) | (1.0 / a == float("-inf"))), -size, size)
    real = tl.where((a < 0) & (whole == 0) & (tl.abs(a) != float("inf")), float("nan"), signed)
    return tl.where((b == 0) | (a == 1), 1.0, real)


@triton.jit
def power_int(a, b):
    """a ** b for integers, by squaring. With b < 0 the result is 0, unless a is 1 or -1."""
    result = a * 0 + b * 0 + 1
    base = result * a
    exponent = tl.abs(result * b)
    for _ in range(result.dtype.primitive_bitwidth - 1):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return tl.where((b < 0) & (a != 1) & (a + 1 != 0), 0, result)


@triton.jit
def shift_left(a, b):
    """a << b; 0 if b is negative, or at least the number's width."""
    count = b & (a.dtype.primitive_bitwidth - 1)  # more than that is undefined
    return tl.where(count == b, a << count, 0)


@triton.jit
def shift_right(a, b):
    """a >> b; only the sign, 0 or -1, if b is negative, or at least the number's width."""
    count = b & (a.dtype.primitive_bitwidth - 1)  # more than that is undefined
    return tl.where(count == b, a >> count, -(a < 0).to(a.dtype))


@triton.jit
def unsigned_lt(a, b):
    """a < b for 32-bit numbers as unsigned: negative numbers are larger than all others."""
    return tl.cast(a, tl.uint32) < tl.cast(b, tl.uint32)


@triton.jit
def unsigned_max(a, b):
    """The larger of two 32-bit numbers as unsigned: negative numbers are larger than all others."""
    return tl.maximum(tl.cast(a, tl.uint32), tl.cast(b, tl.uint32)).to(tl.int32)


@triton.jit
def in_range(index, size):
    """0 <= index < size, in 32 bits: as unsigned numbers, negative ones are larger than all others."""
    return tl.cast(index, tl.uint32) < size


@triton.jit
def wrap(index, size):
    """Counts a negative 32-bit index from the end; an index before the start stays negative."""
    return tl.minimum(tl.cast(index, tl.uint32), tl.cast(index + size, tl.uint32)).to(tl.int32)


@triton.jit
def wrap_any(index, size):
    """Counts a negative index from the end."""
    return tl.where(index < 0, index + size, index)


@triton.jit
def check_bounds(found, index, size, live):
    """Records an index outside of 0..size at a live position: 2 * index + 1, or -2 * index if negative."""
    place = tl.cast(index, tl.int64)
    met = tl.where(place < 0, -2 * place, 2 * place + 1)
    tl.atomic_max(found + place * 0, met, mask=((place < 0) | (place >= size)) & live, sem="relaxed")
