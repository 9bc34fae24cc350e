"""Traces the mask_mod of a block mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flexmod import tensor_kinds, transforms
from flexmod.errors import MaskCaptureGradientError
from flexmod.ir.trace import Traced
from flexmod.ir.traces import remembered

MaskMod = Callable[..., Any]


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """The mask_mod that keeps every score."""
    return batch.new_ones((), dtype=torch.bool)


def trace_mask(mask_mod: MaskMod, device: torch.device) -> Traced:
    """Traces a mask_mod. Unwraps its captures from torch.func's wrappers, which a mask outlives.

    Raises every error of tracing, VmapError, TensorKindError, FreedStorageError, and MaskCaptureGradientError
    for a wrapper that requires a gradient.
    """
    return unwrapped(remembered(mask_mod, "mask", device))


def unwrapped(traced: Traced) -> Traced:
    """The traced mask with captures unwrapped from torch.func's wrappers. Raises as `trace_mask`."""
    captured = []
    for capture, tensor in zip(traced.graph.captures, traced.tensors, strict=True):
        if transforms.is_wrapped(tensor) and tensor.requires_grad:
            raise MaskCaptureGradientError(name=capture.name)
        name = f"{capture.name}, captured by mask_mod"
        captured.append(tensor_kinds.as_plain_class(transforms.plain(tensor, name)))
        if not tensor_kinds.has_no_values(captured[-1]):
            tensor_kinds.check_readable({f"{name},": captured[-1]})
    return replace(traced, tensors=tuple(captured))
