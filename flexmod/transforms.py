"""What torch's function transforms (torch.func, forward-mode AD) make of the tensors of a call.

Inside a transform a tensor is a wrapper of another, level by level. torch's operations see through it, a
kernel does not. Wrappers of `grad` and `vjp` are taken off by autograd.Function; the rest is refused here, in
the words of `errors`, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd import forward_ad

from flexmod.errors import ForwardModeError, VmapError
from flexmod.internals import torch as internals

active: Callable[[], bool] = internals.in_transform
"""Whether this code runs inside a transform of torch.func."""
paused: Callable[[], AbstractContextManager[object]] = internals.outside_transforms
"""For work on plain tensors: what is made here is not wrapped either."""
is_wrapped: Callable[[Tensor], bool] = internals.is_wrapped


def is_batched(tensor: Tensor) -> bool:
    """Whether a vmap at any level maps over the tensor."""
    while is_wrapped(tensor):
        if internals.is_vmap_wrapper(tensor):
            return True
        tensor = internals.unwrapped(tensor)
    return internals.is_vmap_wrapper(tensor)


def plain(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself, out of all wrappers. For what has no derivative.

    Raises:
        VmapError: it holds one value for each entry of a mapped dimension.
    """
    if is_batched(tensor):
        raise VmapError(name=name)
    return innermost(tensor)


def innermost(tensor: Tensor) -> Tensor:
    """The tensor below all wrappers of grad, vjp and vmap. A functionalized one stays what it is."""
    while is_wrapped(tensor) and not internals.is_functional_wrapper(tensor):
        tensor = internals.unwrapped(tensor)
    return tensor


def check(tensors: Mapping[str, object]) -> None:
    """What is no tensor passes: others say what is wrong with it.

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
