"""The mask_mods of combined block masks (`a & b`, `a | b`, `~a`, `BlockMask.cat`) and of dense masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexmod.block_mask.mask_mod import MaskMod
from flexmod.block_mask.tiles import FULL, PARTIAL
from flexmod.ir.composed import Derived, moved
from flexmod.ir.sizes import expect_size

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


@dataclass(frozen=True, eq=False)
class Dense(Derived):
    """A mask_mod that reads a dense mask. `dense` bool [B or 1, H or 1, Q_LEN, KV_LEN]."""

    dense: Tensor

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch, heads, queries, keys = self.dense.shape
        b = expect_size(b, batch, "a dense mask", "shape[0]") if batch > 1 else 0
        h = expect_size(h, heads, "a dense mask", "shape[1]") if heads > 1 else 0
        q_idx = expect_size(q_idx, queries, "a dense mask", "shape[2]")
        return self.dense[b, h, q_idx, expect_size(kv_idx, keys, "a dense mask", "shape[3]")]

    __name__ = "dense"

    def to(self, device: torch.device | str) -> Dense:
        return Dense(self.dense.to(device))


@dataclass(frozen=True, eq=False)
class OfBatch(Derived):
    """The mask_mod of masks concatenated along the batch: the first `batch` entries are those of `first`, all
    others those of `second`, which counts them from 0.
    """

    first: MaskMod
    second: MaskMod
    batch: int

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # both run for every b, so each needs a batch entry of its own mask
        first = self.first(b.clamp(max=self.batch - 1), h, q_idx, kv_idx)
        second = self.second((b - self.batch).clamp(min=0), h, q_idx, kv_idx)
        return ((b < self.batch) & first) | ((b >= self.batch) & second)

    @property
    def __name__(self) -> str:
        return f"cat({_name(self.first)}, {_name(self.second)})"

    def to(self, device: torch.device | str) -> OfBatch:
        return OfBatch(moved(self.first, device), moved(self.second, device), self.batch)


def _name(mask_mod: MaskMod) -> str:
    return getattr(mask_mod, "__name__", type(mask_mod).__name__)
