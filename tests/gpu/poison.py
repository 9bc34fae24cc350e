"""NaN in freed memory: an element that a kernel forgets to write then shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def poison(*likes: Tensor) -> None:
    """Leave NaN in freed blocks of the sizes of `likes`, from where the next allocations take theirs.

    Twice each: a call allocates its results and as much again for what it computes on the way.
    """
    blocks = [torch.full_like(like, float("nan")) for like in (*likes, *likes)]
    if likes[0].is_cuda:
        torch.cuda.synchronize()
    del blocks


def finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tensors)
