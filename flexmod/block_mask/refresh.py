"""The tiles of a mask are a cache of what its mask_mod says: they are found again where that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from flexmod.block_mask.launched import is_captured
from flexmod.block_mask.mask_mod import trace_mask
from flexmod.ir.fingerprint import tensor_key
from flexmod.ir.trace import Traced
from flexmod.ir.watched import Watched

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask


class Refreshed:
    """A mask that watches what its mask_mod captures, and what a trace of it read (`t.item()`, `t.shape`)."""

    # (mask, its traced mask_mod) -> its tiles, as `held`; the builder puts itself here
    find_tiles: ClassVar[Callable[..., Any]]
    _watched: Watched | None = None
    _described: tuple[tuple[Tensor, object], ...] = ()
    _on_gpu = False
    # tiles that CUDA graphs read: a replay must find their memory
    _in_graphs: tuple[Any, ...] = ()

    def watch(self, traced: Traced, device: torch.device) -> None:
        """From now on changes of the tensors of a trace count. `device` is that of the tiles."""
        self._watched = _watched(traced)
        self._described = tuple([(tensor, tensor_key(tensor)) for tensor in traced.described])
        self._on_gpu = device.type == "cuda"

    def refresh(self) -> bool:
        """Finds the tiles again if what mask_mod captures has changed since they were found. Has it?

        Calls and the methods of a mask do it. Inside torch.compile, and while a CUDA graph is captured, the
        tiles stay as they are. Writes that torch does not count are not seen, nor are those to tensors of
        inference mode. Raises what building the mask raises.
        """
        watched, mask = self._watched, cast("BlockMask", self)
        if (watched is None and not self._described) or torch.compiler.is_compiling():
            return False
        if self._on_gpu and is_captured(mask.device):
            if not any(held is mask._held for held in self._in_graphs):
                self._in_graphs += (mask._held,)
            return False
        described = any(tensor_key(tensor) != kind for tensor, kind in self._described)
        changed = described or (watched is not None and not watched.unchanged())
        if not changed or not mask.classified or mask.numel() == 0:
            return False
        same = watched is None or watched.same_kinds()
        again = described or mask._traced.read or not same
        traced = trace_mask(mask.mask_mod, mask.device) if again else mask._traced
        watched = _watched(traced)  # before tiles are found: a write meanwhile counts
        held = self.find_tiles(mask, traced)
        if again:
            mask._know(traced)
        mask._held, mask.full_tiles_padded, self._watched = held, False, watched
        mask._seen = mask._lists_now()
        return True


def fresh(mask: Any) -> BlockMask:
    """The mask, with tiles of what its mask_mod captures now."""
    mask.refresh()
    return cast("BlockMask", mask)


def _watched(traced: Traced) -> Watched | None:
    tensors = (*traced.tensors, *traced.read)
    return Watched(tensors, strict=False) if tensors else None
