"""Runs of tiles from a traced mask by generated kernels: on a GPU, or in Triton's interpreter on CPU tensors.

    terms_kernel       what the mask reads of rows or columns alone, bounded over each of their tiles
    squares_kernel     squares of tiles by their bounds, then the tiles of those that stay open
    elements_kernel    what is still open, element by element
    runs_kernel        what the tiles are, as runs by row and by column

Where the runs might need much room they are counted first, which takes the one synchronization there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.block_mask import tiles
from flexmod.block_mask.held import Axis
from flexmod.block_mask.runs import Runs
from flexmod.codegen.builder_kernels import Builder
from flexmod.codegen.builder_text import BuilderTerm
from flexmod.compiler import builder, runs_module
from flexmod.ir.graph import POSITIONS
from flexmod.ir.trace import Traced
from flexmod.runtime.interpreter import interpreted as interpret
from flexmod.runtime.target import target_of

# Tiles in a square, on a side. Elements that a program looks at together. Positions, and tiles of some lines.
SIDE = 32
ROWS, COLUMNS = 16, 128
CHUNK = 128
LINES, TILES = 4, 256
# Bytes of runs for which room is made without counting them, and of what is told of the tiles at once.
UNCOUNTED = 32 << 20
TILES_AT_ONCE = 256 << 20

Arguments = dict[str, object]


def build(
    traced: Traced,
    sizes: Sequence[int],
    block: tuple[int, int],
    device: torch.device,
    separate: bool,
    interpreted: bool = False,
) -> dict[Axis, Runs | None]:
    """The runs of a mask of `sizes` (B, H, Q_LEN, KV_LEN): "kv" by row, "q" by column.

    `traced` is fitted to the sizes. A batch dimension is 1 where the graph does not read it. `separate` False
    makes full tiles partial.
    """
    found = builder(traced.graph, (sizes[0], sizes[1], sizes[2], sizes[3]))
    batch, heads = (
        size if name in traced.graph.reads else 1 for name, size in zip(POSITIONS, sizes[:2], strict=False)
    )
    grid = tiles.tile_count(sizes[2], block[0]), tiles.tile_count(sizes[3], block[1])
    step = max(1, TILES_AT_ONCE // (grid[0] * grid[1]))
    job = _Job(found, traced.tensors, heads, (sizes[2], sizes[3]), block, grid, device, interpreted)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        parts = [
            job.runs(first, min(step, batch * heads - first), separate)
            for first in range(0, batch * heads, step)
        ]
    joined: dict[Axis, Runs | None] = {}
    for axis, of_axis in zip(("kv", "q"), zip(*parts, strict=True), strict=True):
        whole = runs_of_parts(of_axis)
        joined[axis] = Runs(whole.rows.view(batch, heads, -1, 2, 3), whole.spans)  # type: ignore[index]
    return joined


def runs_of_parts(parts: Sequence[Runs]) -> Runs:
    """Runs one after another, [groups, R, 2, 3] each."""
    if len(parts) == 1:
        return parts[0]
    offset, rows = 0, []
    for part in parts:
        rows.append(part.rows + part.rows.new_tensor([0, 0, offset]))
        offset += len(part.spans)
    return Runs(torch.cat(rows), torch.cat([part.spans for part in parts]))


class _Job:
    """One mask to build."""

    def __init__(
        self,
        found: Builder,
        tensors: Sequence[Tensor],
        heads: int,
        lengths: tuple[int, int],
        block: tuple[int, int],
        grid: tuple[int, int],
        device: torch.device,
        interpreted: bool,
    ) -> None:
        self.found = found
        self.tensors = tensors
        self.grid = grid
        self.lengths = lengths
        self.device = device
        self.interpreted = interpreted
        self.sizes: Arguments = {
            "H": heads, "M": lengths[0], "N": lengths[1], "Qb": grid[0], "KVb": grid[1],
            "Q_BLOCK": min(block[0], lengths[0] + 1), "KV_BLOCK": min(block[1], lengths[1] + 1),
        }  # fmt: skip

    def runs(self, first_group: int, groups: int, separate: bool) -> tuple[Runs, Runs]:
        """The runs of some batches and heads, [groups, R, 2, 3]."""
        kinds = self._kinds(first_group, groups)
        if not separate:
            kinds.clamp_(max=tiles.PARTIAL)
        down, across = self.grid
        by_row, by_column = (self._new((groups, lines, 2, 3), torch.int32) for lines in self.grid)
        programs = groups * (-(-down // LINES) + -(-across // LINES))
        arguments = {
            "KINDS": kinds, "KV_ROWS": by_row, "Q_ROWS": by_column,
            "groups": groups, "Qb": down, "KVb": across, "LINES": LINES, "TILES": TILES,
        }  # fmt: skip
        slots = {"kv_slots": (across + 1) // 2, "q_slots": (down + 1) // 2}
        room = [2 * groups * down * slots["kv_slots"], 2 * groups * across * slots["q_slots"]]
        placed = sum(room) * 8 > UNCOUNTED and not self._capturing()
        if placed:
            none = {"KV_SPANS": None, "Q_SPANS": None, "PLACED": False, "kv_slots": 0, "q_slots": 0}
            self._start(runs_module(), "runs_kernel", programs, {**arguments, **none})
            room = torch.stack([_place(by_row), _place(by_column)]).tolist()
        spans = [self._new((max(1, count), 2), torch.int32) for count in room]
        given = {"KV_SPANS": spans[0], "Q_SPANS": spans[1], "PLACED": placed, **slots}
        self._start(runs_module(), "runs_kernel", programs, {**arguments, **given})
        return Runs(by_row, spans[0]), Runs(by_column, spans[1])

    def _kinds(self, first_group: int, groups: int) -> Tensor:
        """What each tile is, uint8 [groups, Qb, KVb]."""
        module, (down, across) = self.found.kernels.module, self.grid
        squares = groups * -(-down // SIDE) * -(-across // SIDE)
        kinds, states = self._new((groups, down, across), torch.uint8), self._new((squares,), torch.uint8)
        shared = {**self.sizes, "first_group": first_group}
        terms = self._terms(module, groups, shared)
        arguments = {
            "KINDS": kinds, "STATES": states, **terms, **self._captured("squares_kernel"), **shared,
            "groups": groups, "SIDE": SIDE,
        }  # fmt: skip
        self._start(module, "squares_kernel", squares, arguments)
        # few squares have work, those along an edge of the mask: the others cost a program that ends at once
        parts = max(1, min(SIDE, self._programs() // squares))
        arguments = {
            "KINDS": kinds, "STATES": states, **self._captured("elements_kernel"), **shared,
            "parts": parts, "SIDE": SIDE, "ROWS": ROWS, "COLUMNS": COLUMNS,
        }  # fmt: skip
        self._start(module, "elements_kernel", squares * parts, arguments)
        return kinds

    def _terms(self, module: ModuleType, groups: int, shared: Arguments) -> dict[str, Tensor]:
        """The bounds of each term over the tiles of its axis, by the names that kernels give them."""
        terms = self.found.kernels.terms
        if not terms:
            return {}
        made = {term.name.upper(): self._bounds(term, groups) for term in terms}
        axes = {term.axis for term in terms}
        programs = (
            ("row" in axes) * self.grid[0]
            + ("column" in axes) * self.grid[1]
            + ("diagonal" in axes) * -(-sum(self.lengths) // CHUNK)
        )
        arguments = {
            **made, **self._captured("terms_kernel"), **shared, "groups": groups, "CHUNK": CHUNK
        }  # fmt: skip
        self._start(module, "terms_kernel", groups * programs, arguments)
        for term in terms:
            if term.axis == "diagonal":
                counts = made[term.name.upper()]
                torch.cumsum(counts, -1, dtype=torch.int32, out=counts)
        return made

    def _bounds(self, term: BuilderTerm, groups: int) -> Tensor:
        if term.axis == "diagonal":
            return self._new((groups, sum(self.lengths)), torch.int32)
        return self._new((2, groups, self.grid[term.axis == "column"]), term.stored)

    def _captured(self, kernel: str) -> Arguments:
        return self.found.captured(kernel, self.tensors)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _programs(self) -> int:
        """As many as keep the device busy where most of them end at once."""
        return 8 if self.interpreted else 128 * (target_of(self.device).processors or 1)

    def _capturing(self) -> bool:
        """Is a CUDA graph being recorded? It cannot wait for a count."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _start(self, module: ModuleType, name: str, programs: int, arguments: Any) -> None:
        if self.interpreted:
            getattr(interpret(module), name)[(programs,)](**arguments)
            return
        # bounds of floating-point numbers hold where each operation rounds as it does in torch
        getattr(module, name)[(programs,)](**arguments, enable_fp_fusion=False)


def _place(rows: Tensor) -> Tensor:
    """Gives the runs of each row their place, one row after another. How many runs there are, int64 []."""
    number = rows[..., 1].movedim(-1, 0).flatten()
    stops = number.cumsum(0)
    rows[..., 2] = (stops - number).view(2, *rows.shape[:-2]).movedim(0, -1)
    return stops[-1]
