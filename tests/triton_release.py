"""Which of the two releases of Triton that are tested is at hand."""

from __future__ import annotations

import triton

# Its ptxas allocates registers in another way, and spills more: limits are a pair, (of 3.6, of the newest).
NEWEST = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
Limits = tuple[int, int]
