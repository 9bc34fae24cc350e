"""Tensors that are not plain: each kind as a function of a plain one, and what its results show.

`disguised(x, kind)` raises NotMade where torch makes no such tensor of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map


class NotMade(Exception):
    """torch has no tensor of this kind for these numbers."""


class Subclass(Tensor):
    """A subclass with nothing of its own."""


class Function(Tensor):
    """A subclass that sees torch functions, and lets them pass."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A wrapper subclass: its own storage holds nothing, `elem` has the numbers."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, elem.shape, strides=elem.stride(), dtype=elem.dtype, device=elem.device
        )
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_elem, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def _elem(x: Any) -> Any:
    return x.elem if isinstance(x, Wrapper) else x


def _fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


def _freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def _negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def _conjugated(x: Tensor) -> Tensor:
    return torch.complex(x, torch.zeros_like(x)).conj()


def _nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nested.nested_tensor(list(x.unbind(0)), layout=layout)


def _quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.05, 0, torch.qint8)


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _uninitialized(x: Tensor) -> Tensor:
    return torch.nn.parameter.UninitializedParameter()


def _unaligned(x: Tensor) -> Tensor:
    """Its first element lies one element behind where memory begins."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def _masked(x: Tensor) -> Tensor:
    return torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool))


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


def _elsewhere(x: Tensor) -> Tensor:
    return x.to("cpu" if x.is_cuda else "meta")


# kind -> how it is made
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "subclass": lambda x: x.as_subclass(Subclass),
    "function": lambda x: x.as_subclass(Function),
    "wrapper": Wrapper,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "buffer": lambda x: torch.nn.Buffer(x),
    "meta": lambda x: x.to("meta"),
    "fake": _fake,
    "elsewhere": _elsewhere,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "nested": _nested(torch.strided),
    "jagged": _nested(torch.jagged),
    "quantized": _quantized,
    "mkldnn": lambda x: x.to_mkldnn(),
    "negated": _negated,
    "conjugated": _conjugated,
    "freed": _freed,
    "inference": _inference,
    "functional": torch._to_functional_tensor,
    "masked": _masked,
    "uninitialized": _uninitialized,
    "unaligned": _unaligned,
    "complex": _as(torch.complex64),
    "float8": _as(torch.float8_e4m3fn),
    "whole": _as(torch.int32),
    "truth": _as(torch.bool),
    "long": _as(torch.int64),
    "numpy": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "number": lambda x: 1.0,
    "none": lambda x: None,
}
# whose numbers are others: no result is right
OTHER_NUMBERS = ("freed", "quantized", "complex", "conjugated", "float8", "whole", "long", "truth", "number",
                 "none", "uninitialized")  # fmt: skip


# how torch, or the class of a tensor, refuses what such a tensor meets; as it refuses torch's own operations
OWN_REFUSALS = (
    "Inference tensors cannot be saved", "Multiple dispatch failed",
    "Attempted to use an uninitialized parameter",
    "Please convert all Tensors to FakeTensors first", "Mixing fake modes",
    "not implemented for 'Complex", "not implemented for 'Float8_e4m3fn'",
    "promoteTypes with quantized numbers", "not supported on quantized tensors",
)  # fmt: skip


def disguised(x: Any, kind: str) -> Any:
    if not kind:
        return x
    try:
        return KINDS[kind](x)
    except Exception as error:
        raise NotMade(f"{kind}: {error}") from error


def revealed(x: Any) -> Any:
    """The plain tensor within one that a call gave; of a meta or a fake one itself."""
    if isinstance(x, Wrapper):
        return x.elem
    if torch._is_functional_tensor(x):
        return torch._from_functional_tensor(x)
    return x.as_subclass(Tensor) if isinstance(x, Subclass | Function) else x
