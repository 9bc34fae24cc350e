"""Kernels in Triton's interpreter, from a process that has imported the compiling Triton."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tiers import long_but

from flexmod.codegen import cache
from flexmod.errors import BackendDeviceError, InterpreterOperationError
from flexmod.runtime import interpreter, offline
from flexmod.runtime.interpreter import interpreted
from flexmod.runtime.interpreter_corrections import narrow, widen

ROOT = Path(__file__).parents[2]
HEAD = "import triton\nimport triton.language as tl\n\n\n"

ATTENTION = (
    HEAD
    + '''
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_step(s, m, l):
    """The online softmax: weights, the new maximum, the new sum, the factor for what was before."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2((s - safe[:, None]) * LOG2E)
    alpha = tl.math.exp2((m - safe) * LOG2E)
    return p, m_new, l * alpha + tl.sum(p, 1), alpha


@triton.jit(do_not_specialize=["M", "N"])
def attention(Q, K, V, Out, Lse, scale, M, N, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tl.static_assert(D >= 16, "a dot needs 16 columns")
    bh = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q_at = bh * M * D + row.to(tl.int64)[:, None] * D + d[None, :]
    q = tl.load(Q + q_at, mask=row[:, None] < M, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    last = tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M)
    for j in tl.range(0, tl.cdiv(last, BLOCK_N), num_stages=2):
        column = j * BLOCK_N + tl.arange(0, BLOCK_N)
        kv_at = bh * N * D + column.to(tl.int64)[:, None] * D + d[None, :]
        inside = column[:, None] < N
        k = tl.load(K + kv_at, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((row[:, None] >= column[None, :]) & (column[None, :] < N), s, float("-inf"))
        p, m, l, alpha = softmax_step(s, m, l)
        v = tl.load(V + kv_at, mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    tl.store(Out + q_at, (acc / l[:, None]).to(Out.dtype.element_ty), mask=row[:, None] < M)
    tl.store(Lse + bh * M + row, m + tl.math.log2(l) / LOG2E, mask=row < M)
'''
)
POINTERS = dict.fromkeys(("Q", "K", "V", "Out"), "*bf16")
SIGNATURE = POINTERS | {"Lse": "*fp32", "scale": "fp32", "M": "i32", "N": "i32"}
CONSTEXPRS = {"D": 32, "BLOCK_M": 64, "BLOCK_N": 64}


def kernel(body: str, *parameters: str) -> Any:
    """The interpreted kernel `run` with these parameters and this body; X is float32, given whole as `x`."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    text = f"{HEAD}@triton.jit\ndef run({', '.join(parameters)}):\n{lines}"
    return interpreted(cache.load(text, "test_interpreter")).run


def run_attention(
    module: ModuleType, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel's out and lse, and the causal attention of float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 100, 32, generator=generator).to(dtype).unbind()
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 100), torch.nan)
    arguments = (q, k, v, out, lse, 32**-0.5, 100, 100)
    interpreted(module).attention[(2, 2)](*arguments, **CONSTEXPRS, num_warps=4, num_stages=2)
    truth = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    return out, lse, truth


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 2e-6)]
)
def test_attention(dtype: torch.dtype, tolerance: float) -> None:
    out, lse, truth = run_attention(cache.load(ATTENTION, "attention"), dtype)
    torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=0)
    assert lse.isfinite().all()


def test_compiling_goes_on_before_between_and_after() -> None:
    module = cache.load(ATTENTION, "attention")
    originals = {name: getattr(tl, name) for name in ("max", "load", "range", "reduce", "zeros")}
    for seed in range(2):
        report = offline.compile(module.attention, SIGNATURE, CONSTEXPRS, "sm_90")
        assert report.matrix_instructions["HGMMA"]
        run_attention(module, torch.bfloat16, seed)
    assert originals == {name: getattr(tl, name) for name in originals}
    assert isinstance(tl.max, triton.JITFunction)
    # another width: the report above may come from Triton's cache
    assert offline.compile(module.attention, SIGNATURE, CONSTEXPRS | {"D": 64}, "sm_90").registers


def test_threads() -> None:
    module = cache.load(ATTENTION, "attention")
    expected = [run_attention(module, torch.bfloat16, seed)[0] for seed in range(4)]
    found: dict[int, torch.Tensor] = {}

    def work(seed: int) -> None:
        found[seed] = run_attention(module, torch.bfloat16, seed)[0]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in range(4))


def test_a_module_has_one_twin() -> None:
    module = cache.load(ATTENTION, "attention")
    assert interpreted(module) is interpreted(module)
    assert interpreted(module).attention.__name__ == "attention"


STANDARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tl.max(x, 1)[:, None] + tl.zeros([16, 16], tl.float32)": lambda x: x.amax(1, keepdim=True),
    "tl.min(x, 1, keep_dims=True) + tl.zeros_like(x)": lambda x: x.amin(1, keepdim=True),
    "x / tl.sum(tl.abs(x), 0)[None, :]": lambda x: x / x.abs().sum(0),
    "tl.trans(tl.softmax(tl.trans(x)))": lambda x: x.softmax(1),
    "tl.sigmoid(x)": torch.sigmoid,
    "tl.cumsum(x, 0)": lambda x: x.cumsum(0),
    "tl.broadcast_to(tl.argmax(x, 1)[:, None], [16, 16]).to(tl.float32)": lambda x: x.argmax(1, True).float(),
    "x.sum(1)[:, None] - x.max(0)[None, :]": lambda x: x.sum(1, keepdim=True) - x.amax(0),
    "tl.where(x > 0, tl.math.log2(tl.math.exp2(x)), tl.minimum(x, -1.0))": lambda x: x.where(
        x > 0, x.clamp(max=-1)
    ),
    "tl.fma(x, x, x) + tl.clamp(x, -0.5, 0.5)": lambda x: x * x + x + x.clamp(-0.5, 0.5),
    "tl.math.rsqrt(tl.math.erf(x) + 2.0)": lambda x: (x.erf() + 2).rsqrt(),
    "tl.multiple_of(tl.max_contiguous(x, [16, 16]), [1, 16])": lambda x: x,
    "tl.cast(tl.cdiv(7, 2), tl.float32) * x": lambda x: 4 * x,
    "tl.dot(x, tl.trans(x), input_precision='ieee').to(tl.float64).to(tl.float32)": lambda x: x @ x.T,
}


@pytest.mark.parametrize("expression", STANDARD)
def test_standard_functions(expression: str) -> None:
    body = f"""
i = tl.arange(0, 16)
at = i[:, None] * 16 + i[None, :]
x = tl.load(X + at)
tl.store(Y + at, {expression})
"""
    x, y = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)), torch.empty(16, 16)
    kernel(body, "X", "Y")[(1,)](x, y)
    torch.testing.assert_close(y, STANDARD[expression](x).expand(16, 16), atol=1e-5, rtol=1e-5)


def test_numbers_and_loop_variables_are_tensors() -> None:
    body = """
count = 0
total = tl.zeros([1], tl.int64)
for j in range(0, n):
    count += 1
    total = total + j.to(tl.int64) * 2147483647
for j in tl.range(n, 2 * n, num_stages=3):
    count = count + j.to(tl.int32)
for j in tl.static_range(3):
    power: tl.constexpr = 2**j
    count += power
while count > 100:
    count -= 100
tl.store(Y + tl.arange(0, 1), total + count.to(tl.int64))
"""
    y = torch.empty(1, dtype=torch.int64)
    kernel(body, "Y", "n")[(1,)](y, 4)
    assert y.item() == 6 * 2147483647 + 4 + (4 + 5 + 6 + 7) + 7


def test_a_comparison_of_two_numbers_meets_that_of_a_block() -> None:
    x = torch.arange(4.0)
    body = "i = tl.arange(0, 4)\nkept = (limit > 1) & (tl.load(X + i) > limit)\n"
    kernel(body + "tl.store(X + i, kept.to(tl.float32))", "X, limit")[(1,)](x, 1.5)
    assert x.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_tuples_from_device_functions() -> None:
    text = HEAD + (
        "@triton.jit\ndef pair(x):\n    return x + 1, 2.5\n\n\n"
        "@triton.jit\ndef single(x):\n    return (x * 2,)\n\n\n"
        "@triton.jit\ndef first(both):\n    return both[0]\n\n\n"
        "@triton.jit\ndef run(X, Y):\n"
        "    both = pair(tl.load(X))\n"
        "    a, b = both\n"
        "    (c,) = single(a)\n"
        "    d, e = 1, pair(c)\n"
        "    tl.store(Y, c + b.to(tl.float32) + first(both) + d.to(tl.float32) + e[0] * e[1])\n"
    )
    module = cache.load(text, "tuples")
    x, y = torch.tensor([3.0]), torch.empty(1)
    interpreted(module).run[(1,)](x, y)
    assert y.item() == 8 + 2.5 + 4 + 1 + 9 * 2.5
    assert offline.compile(module.run, {"X": "*fp32", "Y": "*fp32"}, {}, "sm_80").registers


def test_arguments_have_the_types_of_a_launch() -> None:
    body = """
tl.static_assert(i.dtype == tl.int32)
tl.static_assert(big.dtype == tl.int64)
tl.static_assert(wide.dtype == tl.int64)
tl.static_assert(x.dtype == tl.float32)
tl.static_assert(flag.dtype == tl.int1)
tl.static_assert(missing is None)
tl.static_assert(OUT == tl.float64)
tl.static_assert(Y.dtype.element_ty == OUT)
if flag and i == 7:
    tl.store(Y, x.to(OUT) + (big - 5000000000).to(OUT))
"""
    parameters = ("Y", "i", "big", "wide: tl.int64", "x", "flag", "missing", "OUT: tl.constexpr")
    y = torch.zeros(1, dtype=torch.float64)
    kernel(body, *parameters)[(1,)](y, 7, 5000000001, 3, 0.1, flag=True, missing=None, OUT=tl.float64)
    assert y.item() == torch.tensor(0.1).double() + 1


def test_float64_and_64_bit_offsets() -> None:
    body = """
row = tl.program_id(0) * 1073741824 * 2
far = tl.program_id(0).to(tl.int64) * 1073741824 * 2
tl.store(Y + tl.program_id(0), tl.load(X + far - far) * tl.load(X) + (far - row).to(tl.float64))
"""
    x, y = torch.tensor([1 / 3], dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    kernel(body, "X", "Y")[(2,)](x, y)
    # int32 wraps around as on a chip: row is -2**31 in the second program
    assert y.tolist() == [1 / 9, 1 / 9 + 2.0**32]


def test_masked_load_reads_nothing_outside() -> None:
    body = """
i = tl.arange(0, 16)
x = tl.load(X + i.to(tl.int64) * 1099511627776, mask=i < 1, other=-2.0)
tl.store(Y + i, x, mask=i < n)
"""
    x, y = torch.tensor([5.0]), torch.zeros(16)
    kernel(body, "X", "Y", "n")[(1,)](x, y, 3)
    assert y.tolist() == [5.0, -2.0, -2.0] + [0.0] * 13


def test_strided_views_and_a_grid_of_three() -> None:
    body = """
at = tl.program_id(0) * s0 + tl.program_id(1) * s1 + tl.program_id(2) * s2
tl.store(X + at, tl.program_id(0) * 100 + tl.program_id(1) * 10 + tl.num_programs(2))
"""
    x = torch.zeros(4, 3, 2, dtype=torch.int32).transpose(0, 2)[:, :2, ::2]
    kernel(body, "X", "s0", "s1", "s2")[tuple(x.shape)](x, *x.stride())
    expected = torch.arange(2)[:, None] * 100 + torch.arange(2)[None, :] * 10 + 2
    assert torch.equal(x, expected[:, :, None].expand(2, 2, 2).int())


# bfloat16


def test_rounding_to_bfloat16() -> None:
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0)).int()
    ties = (torch.arange(-(2**15), 2**15) << 16 | 0x8000).int()
    x = torch.cat([bits, ties]).view(torch.float32)
    narrowed = torch.from_numpy(narrow(x.numpy()).view("int16")).view(torch.bfloat16)
    torch.testing.assert_close(narrowed, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    finite = x.nan_to_num()
    assert torch.equal(torch.from_numpy(widen(narrow(finite.numpy()))), finite.to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32, torch.bool])
def test_casts_to_and_from_bfloat16(dtype: torch.dtype) -> None:
    x = (torch.randn(16, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    there, back = torch.empty(16, dtype=torch.bfloat16), torch.empty_like(x)
    body = """
i = tl.arange(0, 16)
half = tl.load(X + i).to(tl.bfloat16)
tl.store(There + i, half)
tl.store(Back + i, half.to(Back.dtype.element_ty))
"""
    kernel(body, "X", "There", "Back")[(1,)](x, there, back)
    assert torch.equal(there, x.to(torch.bfloat16))
    assert torch.equal(back, x.to(torch.bfloat16).to(dtype))


def test_bfloat16_arithmetic() -> None:
    body = """
i = tl.arange(0, 64)
x = tl.load(X + i)
y = tl.load(Y + i)
z = tl.where(x < y, x * y + x, -y) + tl.full([64], 1.5, tl.bfloat16)
tl.store(Y + i, z)
"""
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().unbind()
    expected = torch.where(x < y, x * y + x, -y) + 1.5
    kernel(body, "X", "Y")[(1,)](x, y)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_product_and_its_transpose_have_the_same_bits(dtype: torch.dtype) -> None:
    """As on a chip: a backward that computes scores by columns must get the scores of the forward."""
    body = """
i = tl.arange(0, 64)
at = i[:, None] * 64 + i[None, :]
x = tl.load(X + at)
y = tl.load(Y + at)
tl.store(ByRow + at, tl.dot(x, tl.trans(y), input_precision="ieee"))
tl.store(ByColumn + at, tl.trans(tl.dot(y, tl.trans(x), input_precision="ieee")))
"""
    x, y = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    by_row, by_column = torch.full((2, 64, 64), torch.nan).unbind()
    kernel(body, "X", "Y", "ByRow", "ByColumn")[(1,)](x, y, by_row, by_column)
    assert torch.equal(by_row, by_column)
    assert torch.allclose(by_row, x.float() @ y.float().T, atol=1e-4)


# What is refused


@pytest.mark.parametrize(
    "body",
    [
        "x = tl.arange(0, 4)\nif x > 1:\n    tl.store(X, 1.0)",
        "x = tl.arange(0, 4)\ny = (x > 1) and (x < 3)",
        "x = tl.arange(0, 4)\ny = not (x > 1)",
        "x = tl.arange(0, 4)\ny = 1.0 if x > 1 else 2.0",
    ],
)
def test_a_block_has_no_truth(body: str) -> None:
    with pytest.raises(InterpreterOperationError, match=r"of a block of shape \[4\] does not work"):
        kernel(body, "X")[(1,)](torch.zeros(1))


def test_a_reduction_of_bfloat16_is_refused() -> None:
    with pytest.raises(InterpreterOperationError, match="a reduction or scan of bfloat16"):
        kernel("x = tl.sum(tl.full([4], 1.0, tl.bfloat16), 0)", "X")[(1,)](torch.zeros(1))


@pytest.mark.filterwarnings("error")
def test_the_largest_of_nan_alone_makes_no_warning() -> None:
    x = torch.tensor([math.nan, math.nan, 1.0, math.nan]).view(2, 2)
    body = "i = tl.arange(0, 2)\nx = tl.load(X + i[:, None] * 2 + i)\n"
    for name in ("max", "min"):
        y, z = torch.empty(2), torch.empty(1)
        stores = f"tl.store(Y + i, tl.{name}(x, 1))\ntl.store(Z, tl.{name}(x))"
        kernel(body + stores, "X, Y, Z")[(1,)](x, y, z)
        torch.testing.assert_close(y, torch.tensor([math.nan, 1.0]), equal_nan=True)
        assert z.item() == 1.0


def test_libdevice_can_be_imported_and_is_refused_when_called() -> None:
    text = HEAD.replace("\n\n\n", "\nfrom triton.language.extra import libdevice\n\n\n") + (
        "@triton.jit\ndef run(X, FAST: tl.constexpr):\n"
        "    if FAST:\n        tl.store(X, libdevice.tanh(tl.load(X)))\n"
    )
    twin = interpreted(cache.load(text, "libdevice"))
    twin.run[(1,)](torch.zeros(1), FAST=False)
    with pytest.raises(InterpreterOperationError, match="libdevice.tanh does not work"):
        twin.run[(1,)](torch.zeros(1), FAST=True)


def test_wrong_arguments() -> None:
    run = kernel("tl.store(X, 1.0)", "X")
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_wraps'"):
        run[(1,)](torch.zeros(1), num_wraps=4)
    with pytest.raises(BackendDeviceError, match="cpu tensors"):
        run[(1,)](torch.zeros(1, device="meta"))


def test_an_error_names_the_line_of_the_generated_file() -> None:
    module = cache.load(f"{HEAD}@triton.jit\ndef run(X):\n    y = 1\n    tl.store(X, unknown)\n", "wrong")
    with pytest.raises(NameError) as raised:
        interpreted(module).run[(1,)](torch.zeros(1))
    last = raised.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (module.__file__, 8)


@pytest.mark.parametrize("variable", long_but({"1"}, ["0", "1"]))
def test_the_environment_does_not_matter(variable: str) -> None:
    script = (
        "import torch\n"
        "from flexmod.codegen import cache\n"
        "from flexmod.runtime.interpreter import interpreted\n"
        f"text = {HEAD!r} + '@triton.jit\\ndef run(X):\\n    i = tl.arange(0, 4)\\n"
        "    tl.store(X + i, tl.max(tl.load(X + i), 0) + tl.cdiv(7, 2))\\n'\n"
        "x = torch.arange(4.0)\n"
        "interpreted(cache.load(text, 'env')).run[(1,)](x)\n"
        "print(x.tolist())\n"
    )
    environment = {"TRITON_INTERPRET": variable, "PATH": "", "PYTHONPATH": str(ROOT)}
    done = forked.python(script, env=environment)
    assert done.stdout == "[7.0, 7.0, 7.0, 7.0]\n", done.stderr


def test_quicker_checks_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of dtypes and shapes, beside an interpreter that is not quickened."""
    quick = interpreter.language()
    monkeypatch.setattr(interpreter, "quicken", lambda *modules: None)
    plain = interpreter._load_language.__wrapped__()  # type: ignore[attr-defined]
    names = ("int1", "int8", "int32", "int64", "uint8", "uint32") + ("fp16", "bf16", "fp32", "fp64")
    operations = (operator.add, operator.mul, operator.truediv, operator.and_, operator.lt)

    def result(tl: Any, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> str:
        a, b = (tl.full(x[1], 3, tl.dtype(x[0])) if isinstance(x, tuple) else x for x in (a, b))
        try:
            with np.errstate(all="ignore"):
                c = operation(a, b)
        except Exception as error:
            return f"{type(error).__name__} {error}"
        return f"{c.type} {c.shape} {c.dtype} {c.handle.data.dtype} {c.handle.data.tolist()}"

    blocks = [*product(names, ([], [4])), ("int32", [2, 1]), ("fp32", [2, 1])]
    numbers = (2, -2, 2.5, 0.0, -0.0)
    pairs = [*product(blocks, (*blocks, *numbers)), *product(numbers, blocks)]
    for operation, pair in product(operations, pairs):
        wanted = result(plain.tl, operation, *pair)
        for _ in range(2):  # the second call knows the type of the result
            assert result(quick.tl, operation, *pair) == wanted, pair
