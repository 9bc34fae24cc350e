"""Captured numbers of the host: 0-d CPU tensors in calls on another device.

torch takes a 0-d CPU tensor in operations on any device, and so does a mod. Each call reads the number and
copies it to the call's device, where a kernel reads it like any captured tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexmod import transforms
from flexmod.internals.torch import in_forward_ad
from flexmod.ir.trace import Traced


def is_host_number(tensor: Tensor, device: torch.device) -> bool:
    """Is it a 0-d CPU tensor in a call on another device?"""
    return device.type != "cpu" and tensor.dim() == 0 and tensor.device.type == "cpu"


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, or a host number's present value as a new tensor on the device.

    Differentiable, and does not synchronize with the device. A captured CUDA graph keeps the value, unless
    the number requires a gradient.
    """
    if not is_host_number(tensor, device):
        return tensor
    if torch.compiler.is_compiling() or _is_differentiated(tensor):
        return tensor.to(device, non_blocking=True)
    # a launch with the value as its argument: a copy of pageable memory cannot be part of a CUDA graph
    return torch.full((), tensor.item(), dtype=tensor.dtype, device=device)


def all_on_device(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return tuple([on_device(tensor, device) for tensor in tensors])


def captures_on_device(traced: Traced, device: torch.device) -> Traced:
    """The graph with its host numbers on the device."""
    if not any(is_host_number(tensor, device) for tensor in traced.tensors):
        return traced
    return replace(traced, tensors=all_on_device(traced.tensors, device))


def _is_differentiated(tensor: Tensor) -> bool:
    if transforms.active() or in_forward_ad():
        return True
    return tensor.requires_grad and torch.is_grad_enabled()
