"""What a call saves for its backward, and whether it still is what it was.

torch's rule: what was saved is what is used, and a saved tensor that was written to is an error. Tensors go
through `save_for_backward`, which compares their versions. Those of a mask are compared here, and go through
it where there are hooks: a checkpoint computes them again, an offload returns copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask.launched import MaskSnapshot
from flexmod.errors import ModifiedBeforeBackwardError, RecomputedError, SavedTensorError
from flexmod.internals.torch import default_saved_hooks, saved_without_checks, version_of

WRITTEN = "modified by an inplace operation"  # in torch's own message


def save(ctx: Any, call: int, mask: MaskSnapshot | None, tensors: Sequence[Tensor]) -> None:
    """Saves tensors and a mask; `call` is a hash of all else that the backward depends on."""
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
    """The mask and the tensors that were saved. `names` gives what a user calls the tensors.

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
    """ctx.saved_tensors, with an error that names the tensor that was written to since `ctx.versions`."""
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
    """Shapes, dtypes and devices of saved tensors are those of the forward. Raises SavedTensorError."""
    for name, before, tensor in zip(names, then, tensors, strict=True):
        if place(tensor) != before:
            raise SavedTensorError(name=name, before=_said(before), now=_said(place(tensor)))


def place(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(facts: Any) -> str:
    shape, dtype, device = facts
    return f"{tuple(shape)} of {dtype} on {device}"


def _copied(mask: MaskSnapshot) -> MaskSnapshot:
    """With copies of tensors of inference mode that a user can reach: these know nothing of writes."""
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
    """The mask of the tensors that hooks gave back; `versions` are those that were saved with them."""
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
