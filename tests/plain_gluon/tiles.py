"""Tiles in registers. Arithmetic is float64; layouts mean nothing here.

A tile is rounded where a text rounds it to the dtype of a tensor, and to no other; by mods to theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Tile(np.ndarray):
    """`product`: whose result it is, as it stands. `kind`: its type in Triton, where it comes from there."""

    product: Any = None
    kind: Any = None

    def __array_finalize__(self, of: Any) -> None:
        self.product, self.kind = getattr(of, "product", None), getattr(of, "kind", None)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, out: Any = None, **named: Any) -> Any:
        # never in place: two names may stand for one array
        return tile(getattr(function, method)(*map(plain, given), **named))

    def to(self, dtype: torch.dtype) -> Tile:
        return tile(rounded(plain(self), dtype))


def tile(x: Any, product: Any = None) -> Any:
    if np.ndim(x) == 0:
        return x
    made = np.asarray(x).view(Tile)
    made.product = product
    return made


def plain(x: Any) -> Any:
    """The array of a tile that is used; anything else as it is."""
    if not isinstance(x, Tile):
        return x
    if x.product is not None:
        x.product.use()
    return x.view(np.ndarray)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Floats as a type holds them."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).double().numpy()
