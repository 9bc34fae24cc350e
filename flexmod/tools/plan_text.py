"""Writes the steps of a plan as Python, for a file that needs torch and Triton only.

    out = torch.empty((B, HQ, M, 64), dtype=q.dtype, device=q.device)
    forward_kernel[lambda meta: (B * HQ * triton.cdiv(M, meta["BLOCK_M"]),)](
        Q=q, stride_qb=(q.stride(0) if B > 1 else 0), ...
        **TILES["forward"],
    )

Extents are names of the file; `B`, `HQ`, `M`, `N`, `KV_B` and `HKV` are variables there.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

import torch

from flexmod.runtime.plan import Allocate, Launch, Place, Plan, Size

WIDTH = 110
# a plan's names for the sides of a tile that the file chooses
SIDES = ("BLOCK_M", "BLOCK_N")
# functions in expressions
FUNCTIONS = {"cdiv": "triton.cdiv", "bits": "int.bit_length"}
_WORD = re.compile(r"[A-Za-z_]\w*")
_OF_TENSOR = re.compile(r"(\w+)_(size|stride)(\d+)")


class PlanText:
    """Writes a plan's steps. `names` has the file's expressions for places and parameters, if they differ."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names, self._like = names, names["query"]

    def statements(self, plan: Plan, indent: int = 0) -> str:
        """Writes all steps; a plan for a file only allocates and launches."""
        lines = []
        for step in plan.steps:
            if isinstance(step, Allocate):
                lines.append(self._allocated(step))
            else:
                assert isinstance(step, Launch), f"no statement for {step}"
                lines.append(self._launched(step, indent))
        return textwrap.indent("\n".join(lines), " " * indent)

    def _allocated(self, step: Allocate) -> str:
        place = step.place
        dtype = str(place.dtype) if place.dtype in (torch.float32, torch.int32) else f"{self._like}.dtype"
        sizes = ", ".join(map(self.expression, place.shape))
        sizes += "," if len(place.shape) == 1 else ""
        kind, device = "zeros" if step.zeros else "empty", f"{self._like}.device"
        return f"{self.expression(place)} = torch.{kind}(({sizes}), dtype={dtype}, device={device})"

    def _launched(self, step: Launch, indent: int) -> str:
        given = [f"{name}={self._given(name, value)}" for name, value in step.arguments.items()]
        wrapped = textwrap.wrap(
            ", ".join(each.replace(" ", "\0") for each in given), WIDTH - indent - 4, break_long_words=False
        )
        grid = self.expression(step.grid)
        sides = [side for side in SIDES if side in _WORD.findall(grid)]
        for side in sides:
            grid = re.sub(rf"\b{side}\b", f'meta["{side}"]', grid)
        grid = f"lambda meta: ({grid},)" if sides else f"({grid},)"
        options = "enable_fp_fusion=True" if step.rung is None else f'**TILES["{step.kernel}"]'
        lines = [f"    {line}".replace("\0", " ").rstrip() for line in wrapped]
        return "\n".join([f"{step.name}[{grid}](", *lines[:-1], f"{lines[-1]},", f"    {options},", ")"])

    def _given(self, parameter: str, value: Any) -> str:
        return self._names[parameter] if parameter in self._names else self.expression(value)

    def expression(self, value: Any) -> str:
        if isinstance(value, Place):
            return self._names.get(value.name, value.name)
        if not isinstance(value, Size):
            return repr(value)
        return _WORD.sub(lambda word: self._word(word[0]), value.text)

    def _word(self, word: str) -> str:
        of_tensor = _OF_TENSOR.fullmatch(word)
        if of_tensor is None:
            return FUNCTIONS.get(word, word)
        tensor, what, dim = of_tensor.groups()
        tensor = self._names.get(tensor, tensor)
        return f"{tensor}.shape[{dim}]" if what == "size" else f"{tensor}.stride({dim})"
