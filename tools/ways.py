"""Counts the files of flexmod that a query, a score_mod, a mask_mod and a block_mask pass through in a call.

    python tools/ways.py [--files]

The tool watches one new call, forward and backward, in Triton's interpreter. A call enters a file when one of
its functions gets the thing or a product of it: a tensor on the same memory, the mod's graph and text, the
mask's data. It counts the changes from one file to another as `steps`, and changes to an earlier file as
`returns`. Fewer are better, since an engineer who changes a call's arguments must know these files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import flexmod
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.storage import MaskSnapshot, TileStorage
from flexmod.block_mask.tiles import Runs
from flexmod.codegen.compiler import Lowered
from flexmod.codegen.kernels import ModText
from flexmod.ir.graph import Graph

PACKAGE = Path(flexmod.__file__).parent
DEPTH = 3  # of records within records that are looked into
LENGTH = 16


@dataclass
class Way:
    """The files that a thing came through, in order; `holds`: is a value the thing, or made of it?"""

    name: str
    holds: Callable[[Any], bool]
    entered: list[str]

    def visit(self, file: str) -> None:
        if not self.entered or self.entered[-1] != file:
            self.entered.append(file)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.entered))

    @property
    def returns(self) -> int:
        return len(self.entered) - len(self.files)


def ways(query: Tensor, score_mod: Any, mask_mod: Any) -> list[Way]:
    memory = query.untyped_storage().data_ptr()

    def of_query(value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory

    def of_mod(kind: str, mod: Any) -> Callable[[Any], bool]:
        def holds(value: Any) -> bool:
            if isinstance(value, Lowered):
                value = value.graph
            if isinstance(value, Graph):
                return value.kind == kind
            return value is mod or isinstance(value, ModText) and f"def {kind}_mod(" in value.text

        return holds

    def of_mask(value: Any) -> bool:
        return isinstance(value, (BlockMask, MaskSnapshot, TileStorage, Runs))

    return [
        Way("query", of_query, []),
        Way("score_mod", of_mod("score", score_mod), []),
        Way("mask_mod", of_mod("mask", mask_mod), []),
        Way("block_mask", of_mask, []),
    ]


def inside(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """The value, and what it holds if it is a container or a record."""
    yield value
    if depth == 0 or isinstance(value, (Graph, ModText)):
        return
    parts: Any = ()
    if isinstance(value, (tuple, list)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name, None) for field in fields(value))
    for part in parts:
        yield from inside(part, depth - 1)


@cache
def name_of(file: str) -> str | None:
    """A file of the package by its place there; None for another one."""
    path = Path(file)
    return str(path.relative_to(PACKAGE)) if PACKAGE in path.parents else None


def watch(run: Callable[[], object], found: list[Way]) -> None:
    """Runs it, and follows the arguments of each call of a function of the package."""

    def called(frame: FrameType, event: str, _: object) -> None:
        file = name_of(frame.f_code.co_filename) if event == "call" else None
        if file is None:
            return
        sys.setprofile(None)  # the tool's own reads of arguments are no part of the call
        try:
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            arguments = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[: count + 2]]
            held = [part for argument in arguments for part in inside(argument)]
            for way in found:
                if any(map(way.holds, held)):
                    way.visit(file)
        finally:
            sys.setprofile(called)

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files, in order")
    asked = parser.parse_args()

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 5)

    query, key, value = (torch.randn(1, 1, LENGTH, 16, requires_grad=True) for _ in range(3))
    found = ways(query, capped, window)

    def run() -> None:
        mask = flexmod.create_block_mask(window, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        out = flexmod.flex_attention(query, key, value, capped, mask, kernel_options={"BACKEND": "INTERPRET"})
        out.sum().backward()

    watch(run, found)
    rows = [[way.name, len(way.files), len(way.entered) - 1, way.returns] for way in found]
    print(tabulate(rows, ["", "files", "steps", "returns"]))
    for way in found if asked.files else ():
        print(f"\n{way.name}: " + ", ".join(way.files))


if __name__ == "__main__":
    main()
