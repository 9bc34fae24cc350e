"""The mask_mods of combined block masks, `a & b`, `a | b` and `~a`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexmod.block_mask.mask_mod import MaskMod
from flexmod.block_mask.tiles import FULL, PARTIAL
from flexmod.ir.composed import Derived, moved

How = Literal["and", "or"]


@dataclass(frozen=True, eq=False)
class Combined(Derived):
    """A mask_mod that keeps the elements that both of two mask_mods keep, or that either keeps."""

    how: How
    first: MaskMod
    second: MaskMod

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        first, second = (mask_mod(b, h, q_idx, kv_idx) for mask_mod in (self.first, self.second))
        return first & second if self.how == "and" else first | second

    @property
    def __name__(self) -> str:
        return f"({_name(self.first)} {self.how} {_name(self.second)})"

    def to(self, device: torch.device | str) -> Combined:
        return Combined(self.how, moved(self.first, device), moved(self.second, device))


@dataclass(frozen=True, eq=False)
class Complement(Derived):
    """A mask_mod that keeps the elements that another mask_mod drops."""

    mask_mod: MaskMod

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = self.mask_mod(b, h, q_idx, kv_idx)
        return not kept if isinstance(kept, bool) else ~kept

    @property
    def __name__(self) -> str:
        return f"(not {_name(self.mask_mod)})"

    def to(self, device: torch.device | str) -> Complement:
        return Complement(moved(self.mask_mod, device))


@dataclass(frozen=True, eq=False)
class Listed(Derived):
    """A mask_mod for a mask with a user's own lists. It keeps all elements of full tiles, and in partial
    tiles the elements that the mask's mask_mod keeps.

    `tiles` int8 [B or 1, H or 1, Qb, KVb].
    """

    mask_mod: MaskMod
    tiles: Tensor
    block: tuple[int, int]

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch, heads = self.tiles.shape[:2]
        place = (
            b if batch > 1 else 0, h if heads > 1 else 0, q_idx // self.block[0], kv_idx // self.block[1]
        )  # fmt: skip
        kind = self.tiles[place]
        return (kind == FULL) | ((kind == PARTIAL) & self.mask_mod(b, h, q_idx, kv_idx))

    @property
    def __name__(self) -> str:
        return _name(self.mask_mod)

    def to(self, device: torch.device | str) -> Listed:
        return Listed(moved(self.mask_mod, device), self.tiles.to(device), self.block)


def _name(mask_mod: MaskMod) -> str:
    return getattr(mask_mod, "__name__", type(mask_mod).__name__)
