"""Lets a mod state its number of heads, batch entries or positions; a call with another number raises.

    slopes[expect_size(h, len(slopes), "mods.alibi", "slopes")]

The trace records the size if the index is b, h, q_idx or kv_idx itself, or q_idx or kv_idx plus a number,
such as an offset. Any other index that a user computes, such as h + first_head, selects an entry on purpose,
and the call's size is not checked.
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
    """Returns `index`, and records that the mod has `size` entries for it; see `check_sizes`.

    `owner` and `argument` appear in the error: the library's function, and its argument with that size.
    """
    if has_torch_function_unary(index):
        return handle_torch_function(expect_size, (index,), index, size, owner, argument)
    if torch.compiler.is_compiling() and _recorded():
        return CARRIER(index, size, owner, argument)  # type: ignore[call-arg]
    return index


@assume_constant
def _recorded() -> bool:
    """Does TorchDynamo run the mod in a Recorder (`record.py`)?

    There, `has_torch_function_unary` ignores modes, and a mode sees only torch's own functions. So the
    Recorder reads a call of CARRIER with these arguments as a call of `expect_size`.
    """
    return innermost_mode_name() == "Recorder"


def check_sizes(graph: Graph, sizes: Sequence[int], place: str) -> None:
    """Raises CallSizeError if a mod's sizes do not fit (B, H, M, N) of a call or a block mask.

    `place` names it in the error: "the call" or "the block mask".
    Numbers of batch entries and heads must be equal. Positions may be fewer, since a shorter sequence or a
    shortened block mask has the first positions.
    """
    for axis, size, owner, argument, start in graph.expected:
        given = sizes[POSITIONS.index(axis)]
        if given + start > size or (given < size and axis in UNIFORM):
            raise CallSizeError.of(graph.kind, axis, size, given, owner, argument, place, start)
