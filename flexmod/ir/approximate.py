"""Functions that a mod may use besides torch's: chips have instructions that torch has no name for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from flexmod.ir.sizes import expect_size


def tanh_approximate(x: Any) -> Any:
    """tanh(x) for use in a mod, with a relative error of up to 2^-11, about 5e-4.

    Kernels for NVIDIA's chips use one instruction, tanh.approx.f32, in float32. Other chips, the CPU, torch's
    tensors, the interpreter and standalone files compute the exact tanh. The derivative is 1 - y * y, where y
    is the function's own result.

    Source: NVIDIA, Parallel Thread Execution ISA, tanh (sm_75 and newer; the error is the one stated there).
    """
    if has_torch_function_unary(x):
        return handle_torch_function(tanh_approximate, (x,), x)
    return torch.tanh(x)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (tanh_approximate, expect_size)
}
