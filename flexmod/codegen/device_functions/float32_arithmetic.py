"""More accurate versions of functions in `arithmetic`, for kernels on float32."""

import triton

from flexmod.codegen.device_functions.arithmetic import tanh_relative


@triton.jit
def tanh(x):
    return tanh_relative(x)
