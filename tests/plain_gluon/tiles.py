"""Tiles in registers. Arithmetic is float64, or float32 in `single()`; layouts mean nothing here.

A tile of float64 is rounded where a text rounds it to the dtype of a tensor, and to no other; by mods to
theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_REAL: list[type] = [np.float64]


@contextmanager
def single() -> Iterator[None]:
    """Here tiles are float32, as a chip has them: each operation rounds its result."""
    _REAL.append(np.float32)
    try:
        yield
    finally:
        _REAL.pop()


class Tile(np.ndarray):
    """`product`: whose result it is, as it stands. `kind`: its type in Triton, where it comes from there."""

    product: Any = None
    kind: Any = None
    type = SimpleNamespace(layout=None)

    def __array_finalize__(self, of: Any) -> None:
        self.product, self.kind = getattr(of, "product", None), getattr(of, "kind", None)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, out: Any = None, **named: Any) -> Any:
        # never in place: two names may stand for one array
        return tile(getattr(function, method)(*map(plain, given), **named))

    def to(self, dtype: torch.dtype) -> Tile:
        return tile(rounded(plain(self), dtype))


def real(x: Any) -> Any:
    """A number as a tile holds it."""
    return x if np.ndim(x) else _REAL[-1](x)


def tile(x: Any, product: Any = None) -> Any:
    made = np.asarray(x)
    if made.ndim == 0:
        return x
    if made.dtype.kind == "f":
        made = made.astype(_REAL[-1], copy=False)
    made = made.view(Tile)
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
