"""float32 products follow torch's switches, whichever of them was used."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
from reference_case import make_case

from flexmod import flex_attention
from flexmod.calls import prepared
from flexmod.codegen import compiler


def specs(dtype: torch.dtype) -> list[tuple[str, bool]]:
    """(precision, backward) of the kernels that a call asks for."""
    prepared.forget()  # one that is known asks for none
    found = []
    kernels_for = compiler.kernels_for
    q, k, v = (x.requires_grad_() for x in make_case(q_len=16, dtype=dtype).inputs)

    def watch(spec, *arguments, **named):  # type: ignore[no-untyped-def]
        found.append((spec.precision, spec.backward))
        return kernels_for(spec, *arguments, **named)

    with mock.patch("flexmod.codegen.variant.kernels_for", watch):
        flex_attention(q, k, v, kernel_options={"BACKEND": "INTERPRET"}).sum().backward()
    return found


@pytest.mark.parametrize(
    ("switch", "wanted"),
    [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32"), (True, "tf32"), (False, "ieee")],
    ids=str,
)
def test_the_switches_of_a_process(switch: str | bool, wanted: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        if isinstance(switch, str):
            torch.set_float32_matmul_precision(switch)
        else:
            torch.backends.cuda.matmul.allow_tf32 = switch
        assert specs(torch.float32) == [(wanted, False), (wanted, True)]
        assert specs(torch.bfloat16) == [("ieee", False), ("ieee", True)], "half types take no heed"
    finally:
        torch.set_float32_matmul_precision(before)


# The new switches, after which torch refuses to be asked by the old ones: in a process of its own.
SCRIPT = """
import torch
from test_precision import specs

def show():
    print({precision for precision, _ in specs(torch.float32)}.pop())

torch.backends.cuda.matmul.fp32_precision = "tf32"; show()
torch.backends.cuda.matmul.fp32_precision = "ieee"; show()
torch.backends.fp32_precision = "tf32"; show()
torch.backends.cuda.matmul.fp32_precision = "none"; show()
torch.backends.fp32_precision = "ieee"; show()
"""


def test_the_new_switches() -> None:
    folder = Path(__file__).parent
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
    done = forked.python(paths + SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["tf32", "ieee", "ieee", "tf32", "ieee"]


def test_float64_is_exact_to_rounding() -> None:
    """Whatever the switches say, and on both paths that take it: beside sums of the same terms by torch."""
    case = make_case(q_len=70, kv_len=45, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in case.inputs]
    exact = torch.nn.functional.scaled_dot_product_attention(*leaves)
    wanted = exact, *torch.autograd.grad(exact, leaves, case.grad_out)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        for backend in ("AUTO", "REFERENCE"):
            out = flex_attention(*leaves, kernel_options={"BACKEND": backend})
            found = out, *torch.autograd.grad(out, leaves, case.grad_out)
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=20 * torch.finfo(torch.float64).eps)
    finally:
        torch.set_float32_matmul_precision(before)
