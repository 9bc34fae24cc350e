"""Saves tensors for the backward, and raises if a user wrote to them in between.

That is torch's rule. `save_for_backward` compares the versions of a call's tensors; this module compares a
mask's tensors. With saved-tensor hooks the mask's tensors also go through `save_for_backward`: a checkpoint
computes them again, an offload returns copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask.launched import MaskSnapshot
from flexmod.errors import ModifiedBeforeBackwardError, RecomputedError, SavedTensorError
from flexmod.internals.torch import default_saved_hooks, saved_without_checks, version_of

WRITTEN = "modified by an inplace operation"  # part of torch's message


def save(ctx: Any, call: int, mask: MaskSnapshot | None, tensors: Sequence[Tensor]) -> None:
    """Saves tensors and a mask; `call` is a hash of everything else that the backward depends on."""
    ctx.versions = [*map(version_of, tensors)]
    if mask is not None:
        mask = _copied(mask) if mask.in_inference_mode else mask
        ctx.states = mask.states()
    ctx.mask = mask
    ctx.hooked = default_saved_hooks()
    if not ctx.hooked:
        ctx.save_for_backward(*tensors)
        return
    ctx.facts = (call, 0 if mask is None else mask.facts)
    versions = () if mask is None else map(version_of, mask.tensors)
    extra = () if mask is None else mask.tensors
    facts = torch.tensor([*ctx.facts, *versions], dtype=torch.int64, device="cpu")
    ctx.place = (place(facts),)
    ctx.save_for_backward(*tensors, facts, *extra)


def restored(ctx: Any, names: Callable[[], Sequence[str]]) -> tuple[MaskSnapshot | None, list[Tensor]]:
    """Returns the saved mask and tensors. `names` returns the users' names of the tensors.

    Raises ModifiedBeforeBackwardError, RecomputedError, SavedTensorError.
    """
    mask = ctx.mask
    if mask is not None and not ctx.hooked:
        _check_states(mask, ctx.states, mask.states())
    tensors = unpacked(ctx, names)
    if not ctx.hooked:
        return mask, tensors
    count = 0 if mask is None else len(mask.tensors)
    end = len(tensors) - count - 1
    check_places(("a tensor of integers",), ctx.place, tensors[end : end + 1])
    of_call, of_mask, *versions = tensors[end].tolist()
    _check_facts(ctx.facts, (of_call, of_mask))
    return None if mask is None else _restored_mask(mask, tensors[end + 1 :], versions), tensors[:end]


def unpacked(ctx: Any, names: Callable[[], Sequence[str]]) -> list[Tensor]:
    """Returns ctx.saved_tensors; an error names a tensor that changed its version in `ctx.versions`."""
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if WRITTEN not in str(error):
            raise
        for name, saved, version in zip(names(), saved_without_checks(ctx), ctx.versions, strict=False):
            if version_of(saved) != version:
                raise _written(name) from error
        raise


def check_places(names: Sequence[str], then: Sequence[object], tensors: Sequence[Tensor]) -> None:
    """Raises SavedTensorError if a saved tensor changed its shape, dtype or device since the forward."""
    for name, before, tensor in zip(names, then, tensors, strict=True):
        if place(tensor) != before:
            raise SavedTensorError(name=name, before=_said(before), now=_said(place(tensor)))


def place(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(facts: Any) -> str:
    shape, dtype, device = facts
    return f"{tuple(shape)} of {dtype} on {device}"


def _copied(mask: MaskSnapshot) -> MaskSnapshot:
    """Copies the mask's inference-mode tensors that a user can reach, since they have no version counter."""
    reachable = mask.tensors if mask.storage.form == "lists" else mask.mod.tensors
    if not any(tensor.is_inference() for tensor in reachable):
        return mask
    count = len(mask.tensors) - len(reachable)
    copies = [tensor.clone() if tensor.is_inference() else tensor for tensor in reachable]
    return mask.with_tensors((*mask.tensors[:count], *copies))


def _check_states(mask: MaskSnapshot, then: Sequence[object], now: Sequence[object]) -> None:
    if then != now:
        for name, before, after in zip(mask.names, then, now, strict=True):
            if before != after:
                raise _written(name)


def _check_facts(then: tuple[int, int], now: Sequence[int]) -> None:
    for what, before, after in zip(("score_mod, scale or options", "block_mask"), then, now, strict=False):
        if before != after:
            raise RecomputedError(what=what)


def _restored_mask(mask: MaskSnapshot, found: Sequence[Tensor], versions: Sequence[int]) -> MaskSnapshot:
    """Returns the mask with the tensors that hooks returned; `versions` are their saved versions."""
    check_places(mask.names, [place(tensor) for tensor in mask.tensors], found)
    for name, tensor, own, version in zip(mask.names, found, mask.tensors, versions, strict=True):
        same_memory = tensor.data_ptr() == own.data_ptr() and tensor.numel() > 0
        if same_memory and version_of(own) != version:
            raise _written(name)
    if all(tensor is own for tensor, own in zip(found, mask.tensors, strict=True)):
        return mask
    return mask.with_tensors(found)


def _written(name: str) -> ModifiedBeforeBackwardError:
    bare = name.split(",")[0]
    return ModifiedBeforeBackwardError(name=name, bare=bare)
