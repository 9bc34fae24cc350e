"""How many heads, batch entries or positions a mod was made for, so that a call of another number is refused.

    slopes[expect_size(h, len(slopes), "mods.alibi", "slopes")]

The trace notes the size where the index is a position of the call as it is, and of q_idx and kv_idx where a
number is added, as an offset is. Any other index that a user computed, such as h + first_head, says which
entry is meant, and nothing is expected of the call then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from flexmod.errors import CallSizeError
from flexmod.internals.torch import assume_constant, innermost_mode_name
from flexmod.ir.graph import POSITIONS, UNIFORM, Graph

CARRIER = torch.positive


def expect_size(index: Any, size: Any, owner: str, argument: str) -> Any:
    """The index, b, h, q_idx or kv_idx of a mod that has `size` entries for it; see `check_sizes`.

    `owner` and `argument` are for the message: the function of the library, and its argument of that size.
    """
    if has_torch_function_unary(index):
        return handle_torch_function(expect_size, (index,), index, size, owner, argument)
    if torch.compiler.is_compiling() and _recorded():
        return CARRIER(index, size, owner, argument)  # type: ignore[call-arg]
    return index


@assume_constant
def _recorded() -> bool:
    """Does TorchDynamo run the mod in a Recorder (`record.py`)?

    There, `has_torch_function_unary` knows nothing of modes, and a mode sees torch's own functions alone: the
    Recorder takes a call of CARRIER with these arguments for one of `expect_size`.
    """
    return innermost_mode_name() == "Recorder"


def check_sizes(graph: Graph, sizes: Sequence[int], place: str) -> None:
    """The sizes that a mod was made for against (B, H, M, N) of `place`, "the call" or "the block mask".

    Batch entries and heads must be as many. Positions may be fewer: those of a shorter sequence, or of a
    block mask that was cut down, are the first ones. Raises CallSizeError.
    """
    for axis, size, owner, argument, start in graph.expected:
        given = sizes[POSITIONS.index(axis)]
        if given + start > size or (given < size and axis in UNIFORM):
            raise CallSizeError.of(graph.kind, axis, size, given, owner, argument, place, start)
