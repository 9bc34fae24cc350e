"""The tiles of a mask are a cache of what its mask_mod says: they are found again where that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from flexmod.block_mask.mask_mod import trace_mask
from flexmod.ir.watched import Watched

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask


class Refreshed:
    """A mask that watches what its mask_mod captures."""

    # (mask, its traced mask_mod) -> its tiles, as `held`; the builder puts itself here
    find_tiles: ClassVar[Callable[..., Any]]
    _watched: Watched | None = None
    _on_gpu = False
    # tiles that CUDA graphs read: a replay must find their memory
    _in_graphs: tuple[Any, ...] = ()

    def watch(self, captured: Sequence[Tensor], device: torch.device) -> None:
        """From now on changes of these tensors count. `device` is that of the tiles."""
        self._watched = Watched(captured, strict=False) if captured else None
        self._on_gpu = device.type == "cuda"

    def refresh(self) -> bool:
        """Finds the tiles again if what mask_mod captures has changed since they were found. Has it?

        Calls and the methods of a mask do it. Inside torch.compile, and while a CUDA graph is captured, the
        tiles stay as they are. Writes that torch does not count are not seen, nor are those to tensors of
        inference mode. Raises what building the mask raises.
        """
        watched, mask = self._watched, cast("BlockMask", self)
        if watched is None or torch.compiler.is_compiling():
            return False
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            if not any(held is mask._held for held in self._in_graphs):
                self._in_graphs += (mask._held,)
            return False
        if watched.unchanged() or not mask.classified or mask.numel() == 0:
            return False
        traced = mask._traced if watched.same_kinds() else trace_mask(mask.mask_mod, mask.device)
        watched = Watched(traced.tensors, strict=False)  # before tiles are found: a write meanwhile counts
        held = self.find_tiles(mask, traced)
        if traced is not mask._traced:
            mask._know(traced)
        mask._held, mask.full_tiles_padded, self._watched = held, False, watched
        mask._seen = mask._lists_now()
        return True


def fresh(mask: Any) -> BlockMask:
    """The mask, with tiles of what its mask_mod captures now."""
    mask.refresh()
    return cast("BlockMask", mask)
