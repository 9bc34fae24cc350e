"""Checks a call's tensors inside torch's function transforms (torch.func, forward-mode AD).

Inside a transform a tensor wraps another one, level by level. torch's operations unwrap it; a kernel cannot.
autograd.Function removes the wrappers of `grad` and `vjp`. This module raises an error for all others, before
anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd import forward_ad

from flexmod.errors import ForwardModeError, JitTraceError, VmapError
from flexmod.runtime import private_torch as internals

active: Callable[[], bool] = internals.in_transform
"""Whether this code runs inside a transform of torch.func."""
paused: Callable[[], AbstractContextManager[object]] = internals.outside_transforms
"""For work on plain tensors: what is made here is not wrapped either."""
is_wrapped: Callable[[Tensor], bool] = internals.is_wrapped


def refuse_jit_trace() -> None:
    """Raises JitTraceError inside torch.jit.trace."""
    if internals.in_jit_trace():
        raise JitTraceError()


def is_batched(tensor: Tensor) -> bool:
    """Returns whether a vmap at any level maps over the tensor."""
    while is_wrapped(tensor):
        if internals.is_vmap_wrapper(tensor):
            return True
        tensor = internals.unwrapped(tensor)
    return internals.is_vmap_wrapper(tensor)


def plain(tensor: Tensor, name: str) -> Tensor:
    """Removes all wrappers from a tensor that needs no derivative.

    Raises:
        VmapError: the tensor has a value for each entry of a mapped dimension.
    """
    if is_batched(tensor):
        raise VmapError(name=name)
    return innermost(tensor)


def innermost(tensor: Tensor) -> Tensor:
    """Returns the tensor below all wrappers of grad, vjp and vmap; keeps a functionalized tensor."""
    while is_wrapped(tensor) and not internals.is_functional_wrapper(tensor):
        tensor = internals.unwrapped(tensor)
    return tensor


def check(tensors: Mapping[str, object]) -> None:
    """Checks the tensors of a call; ignores objects that are no tensors, which other checks refuse.

    Raises:
        VmapError: a tensor is mapped over.
        ForwardModeError: a tensor carries a tangent.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if is_batched(tensor):
            raise VmapError(name=name)
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise ForwardModeError(name=name)
