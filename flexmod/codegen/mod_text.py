"""A mod as Triton text: the pieces that the kernel templates splice in, and the kernel parameters they need.

    text      the device functions, complete
    program   a statement that reads neither q_idx nor kv_idx; it stands where b and h are known
    row       a statement that reads q_idx; it stands outside the loop of the forward and of dQ
    column    a statement that reads kv_idx; it stands outside the loop of dK/dV
    call      the expression of the whole, over b, h, q_idx, kv_idx (and score, grad)

A statement that nothing needs is "". `arguments` are those of the call that come before the parameters.
`held_by_column` counts the numbers, truth values apart, that the column statement makes. The call of a mask
gives an int1 tile, that of a score or of its derivative a float32 tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["pointer", "size", "stride", "number"]


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter that a mod needs.

    `index` counts captured tensors, or for kind "number" the promoted constants; `dim` is the dimension whose
    size or stride (in elements) it is.
    """

    name: str
    kind: Kind
    index: int
    dim: int = 0
    comment: str = ""

    def value(self, tensors: Sequence[torch.Tensor], numbers: Sequence[bool | int | float]) -> object:
        """The launch argument that this parameter stands for."""
        if self.kind == "number":
            return numbers[self.index]
        tensor = tensors[self.index]
        if self.kind == "size":
            return tensor.shape[self.dim]
        return tensor.stride(self.dim) if self.kind == "stride" else tensor


@dataclass(frozen=True)
class ModText:
    """What `codegen.triton_text.write` makes of a graph; see the head of this file."""

    text: str
    call: str
    program: str = ""
    row: str = ""
    column: str = ""
    parameters: tuple[Parameter, ...] = ()
    held_by_column: int = 0
    arguments: tuple[str, ...] = ()
