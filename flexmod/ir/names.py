"""Torch functions and operators by name: which ones cast, reduce, draw random numbers or write in place."""

from __future__ import annotations

from functools import cache

import torch

CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "bool": torch.bool,
}  # fmt: skip
FILLS = {"full_like": None, "zeros_like": 0, "ones_like": 1, "new_full": None, "new_zeros": 0, "new_ones": 1}
# an operator's method name, without underscores, to the table's operation
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "pow": "pow",
    "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
REDUCTIONS = {
    "sum", "mean", "prod", "all", "any", "amax", "amin", "argmax", "argmin", "std", "var", "norm", "cumsum",
    "cumprod", "softmax", "log_softmax", "logsumexp", "sort", "topk", "median", "nonzero", "matmul", "dot",
    "einsum", "bincount", "count_nonzero", "unique",
}  # fmt: skip
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "binomial", "multinomial", "normal", "log_normal", "poisson", "uniform", "exponential", "cauchy",
    "geometric", "random", "standard_gamma", "sample_dirichlet", "gumbel_softmax", "rrelu", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    "native_dropout",
}  # fmt: skip
# functions that do not read a tensor's values
METADATA = {
    torch.promote_types, torch.Tensor.__len__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_nested")
    ),
}  # fmt: skip


@cache
def draws(name: str) -> bool:
    """Does a torch function of this name draw random numbers?"""
    # `__rand__` is the & of a number and a tensor
    return name.strip("_") in RANDOM and not name.startswith("__")


@cache
def writes(name: str) -> bool:
    """Does a torch function of this name write in place?"""
    if not name.startswith("__"):
        return name.endswith("_")
    bare = name.strip("_")
    return name in ("__setitem__", "__set__") or bare[:1] == "i" and bare[1:] in BINARY
