"""Finds the runs of a mask's tiles with generated kernels: on a GPU, or in Triton's interpreter.

        terms_kernel        bounds the terms that read rows or columns only, over each tile
        squares_kernel      decides squares of tiles by their bounds, then tiles by bounds and by corners
        elements_kernel     decides the remaining tiles element by element
        runs_kernel         writes the tiles as runs by row and by column
        order_kernel        sorts rows and columns by their number of tiles, if the mask captures tensors.
                            Without captures, the first or the last ones have most tiles.

If the runs may need much memory, they are counted first, which takes the only synchronization.

The kernels take a second or more to compile, torch takes some milliseconds. So torch finds the tiles of the
first mask of a mask_mod on a GPU (`is_first`), and a thread compiles the kernels. It starts late, since the
first attention kernels are needed earlier. The second mask waits until the kernels are compiled.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.backends.families import reads_order
from flexmod.block_mask.storage import Axis, is_captured
from flexmod.block_mask.tiles import PARTIAL, MaskLayout, Runs
from flexmod.codegen.builder_text import BuilderKernels, BuilderTerm
from flexmod.codegen.compiler import builder, runs_module
from flexmod.codegen.kernels import IndexWatch
from flexmod.ir.fingerprint import remember
from flexmod.ir.graph import Graph
from flexmod.ir.trace import Traced
from flexmod.runtime import config
from flexmod.runtime.bound import Bound
from flexmod.runtime.direct import kind_of_number
from flexmod.runtime.locks import Lock
from flexmod.runtime.plan import Place, Plan, PlanWriter, contiguous, named
from flexmod.runtime.private_triton import start_compiler
from flexmod.runtime.side_by_side import compiles, in_threads, later, threads
from flexmod.runtime.target import target_of
from flexmod.runtime.tensor_kinds import tensor_key

# Side of a square, in tiles. Elements that a program evaluates together. Positions, and tiles of some lines.
SIDE = 32
ROWS, COLUMNS = 16, 128
CHUNK = 128
LINES, TILES = 4, 128
# Bytes of runs that are allocated without a count, and bytes of tile kinds that are written at once.
UNCOUNTED = 32 << 20
TILES_AT_ONCE = 256 << 20
# Rows of larger blocks are not sorted: with an order, kernels compute the whole last block, past the end too.
ORDERED_BLOCK = 128

# Seconds that a thread leaves to attention's kernels: by then a forward's and a backward's are mostly
# past their Python part. It checks every PAUSE seconds whether the process ends.
DELAY, PAUSE = 2.0, 0.05
# Torch needs much time and memory for masks of more tiles.
MOST_TILES = 1 << 22
REMEMBERED = 1024  # mask_mods whose first mask is known, and parts of builds

PLANS = 16  # plans for one mask_mod and grid, one for each kind of captured tensors and numbers
Arguments = dict[str, Any]


def build(traced: Traced, layout: MaskLayout, interpreted: bool = False) -> dict[Axis, Runs | None]:
    """Finds the runs of a mask: "kv" by row, "q" by column.

    A batch dimension is 1 if the graph does not read it.
    """
    batch, heads = traced.graph.groups(layout.sizes)
    with torch.cuda.device(layout.device) if layout.device.type == "cuda" else nullcontext():
        parts, numbers = _parts_of(traced.graph, layout, interpreted)
        found = [part.runs(traced.tensors, numbers) for part in parts]
    kv, q = found[0] if len(found) == 1 else map(runs_of_parts, zip(*found, strict=True))
    return {"kv": _by_head(kv, batch, heads), "q": _by_head(q, batch, heads)}


def compile_ahead(traced: Traced, layout: MaskLayout) -> None:
    """Compiles the kernels of a `build` with these arguments, in threads; it loads and launches none."""
    with torch.cuda.device(layout.device):
        parts, numbers = _parts_of(traced.graph, layout, False)
        parts[0].compile(traced.tensors, numbers)


def is_ordered(block: tuple[int, int], device: torch.device, interpreted: bool = False) -> bool:
    """Are the rows and columns of a mask that captures tensors sorted by their number of tiles?"""
    return (interpreted or reads_order(target_of(device).name)) and max(block) <= ORDERED_BLOCK


def _parts_of(graph: Graph, layout: MaskLayout, interpreted: bool) -> tuple[list[_BuilderPart], list[Any]]:
    """Returns the parts of a build, and the numbers that their kernels take."""
    ordered = is_ordered(layout.block, layout.device, interpreted)
    return _parts(graph, layout, interpreted, ordered, config.check_bounds())


@lru_cache(REMEMBERED)
def _parts(
    graph: Graph, layout: MaskLayout, interpreted: bool, ordered: bool, checked: bool
) -> tuple[list[_BuilderPart], list[Any]]:
    batch, heads = graph.groups(layout.sizes)
    found = builder(graph, layout.sizes)
    step = max(1, TILES_AT_ONCE // math.prod(layout.grid()))
    same = layout._replace(sizes=(batch, heads, *layout.sizes[2:]))
    parts = [
        _builder_part(found.kernels, same, first, min(step, batch * heads - first), ordered, interpreted)
        for first in range(0, batch * heads, step)
    ]
    return parts, list(found.run_numbers())


def runs_of_parts(parts: Sequence[Runs]) -> Runs:
    """Concatenates runs, [groups, R, 2, 3] each."""
    offset, rows = 0, []
    for part in parts:
        rows.append(part.rows + part.rows.new_tensor([0, 0, offset]))
        offset += len(part.spans)
    orders = [part.order for part in parts if part.order is not None]
    spans = torch.cat([part.spans for part in parts])
    return Runs(torch.cat(rows), spans, torch.cat(orders) if orders else None)


def _by_head(runs: Runs, batch: int, heads: int) -> Runs:
    order = None if runs.order is None else runs.order.view(batch, heads, -1)
    return Runs(runs.rows.view(batch, heads, -1, 2, 3), runs.spans, order).with_fixed_sizes()


class _BuilderPart:
    """Builds some batches and heads, for all masks that differ only in their captured values."""

    def __init__(
        self,
        kernels: BuilderKernels,
        layout: MaskLayout,
        first_group: int,
        groups: int,
        ordered: bool,
        interpreted: bool,
    ) -> None:
        (_, heads, queries, keys), block, self.device, self.separate = layout
        self.kernels = kernels
        self.lengths = queries, keys
        self.grid = down, across = layout.grid()
        self.groups = groups
        self.interpreted = interpreted
        self.squares = groups * -(-down // SIDE) * -(-across // SIDE)
        # enough to keep the device busy although most end at once: only squares along an edge have work
        programs = 8 if interpreted else 128 * (target_of(self.device).processors or 1)
        self.parts = max(1, min(SIDE, programs // self.squares))
        sizes: Arguments = {
            "first_group": first_group, "H": heads, "M": queries, "N": keys, "Qb": down, "KVb": across,
            "Q_BLOCK": min(block[0], queries + 1), "KV_BLOCK": min(block[1], keys + 1),
        }  # fmt: skip
        self.for_terms = {**sizes, "groups": groups, "CHUNK": CHUNK}
        self.for_squares = {**sizes, "groups": groups, "SIDE": SIDE}
        self.for_elements = {**sizes, "parts": self.parts, "SIDE": SIDE, "ROWS": ROWS, "COLUMNS": COLUMNS}
        self.for_runs: Arguments = {
            "groups": groups, "Qb": down, "KVb": across, "LINES": LINES, "TILES": TILES
        }  # fmt: skip
        self.slots = {"kv_slots": (across + 1) // 2, "q_slots": (down + 1) // 2}
        self.room = [2 * groups * down * self.slots["kv_slots"], 2 * groups * across * self.slots["q_slots"]]
        self.ordered = ordered
        # each tile's kind, and the runs of each row and of each column
        self.kinds = Place("kinds", (groups, *self.grid), contiguous((groups, *self.grid)), torch.uint8)
        lines = (("rows", (groups, down, 2, 3)), ("columns", (groups, across, 2, 3)))
        self.by_axis = [Place(name, shape, contiguous(shape), torch.int32) for name, shape in lines]
        self.bound: dict[tuple[object, ...], Bound] = {}
        self.runs_programs = groups * (-(-down // LINES) + -(-across // LINES))

    def runs(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Runs, Runs]:
        """Finds the runs of the mask with captured `tensors` and `numbers`, [groups, R, 2, 3].

        Takes two plans if runs are counted before their allocation: the host reads the counts in between.
        """
        kinds = (*map(tensor_key, tensors), *map(kind_of_number, numbers))
        key = (config.check_bounds(), self._counts(), *kinds)
        bound = None if None in key else self.bound.get(key)
        if bound is None:
            bound = Bound(self.compile(tensors, numbers), tensors, self.device)
            if None not in key:
                remember(self.bound, key, bound, PLANS)
        made: Any = bound.run(tensors, numbers=numbers)
        if self._counts():
            *found, counts = made
            made = Bound(self._counted_plan(counts.tolist(), bool(tensors)), found, self.device).run(found)
        half = len(made) // 2
        return Runs(*made[:half]), Runs(*made[half:])

    def compile(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Plan:
        """Returns the plan of `runs`. Compiles its kernels that this process lacks, if threads can help."""
        plan = self._plan(tensors)
        known = {number.name: value for number, value in zip(plan.numbers, numbers, strict=True)}
        in_threads(compiles(plan, tensors, self.device, known))
        return plan

    def _plan(self, tensors: Sequence[Tensor]) -> Plan:
        """The plan from captured tensors to runs, or to the inputs of `_counted_plan` and the counts."""
        writer = PlanWriter()
        captured = tuple(named(f"capture{number}", tensor) for number, tensor in enumerate(tensors))
        writer.allocate([self.kinds])
        watch = IndexWatch(writer, self.lengths, self.kinds) if config.check_bounds() else None
        self._write_kinds(writer, captured, watch)
        if watch is not None:
            watch.raise_if_out_of_bounds()
        if not self.separate:
            writer.call(without_full_tiles, (self.kinds,))
        writer.allocate(self.by_axis)
        if not self._counts():
            results = self._write_runs(writer, self.room, bool(tensors))
            return writer.plan(captured, results, self.kernels.numbers)
        none = {"KV_SPANS": None, "Q_SPANS": None, "PLACED": False, "kv_slots": 0, "q_slots": 0}
        self._launch_of_runs(writer, "runs", {"KINDS": self.kinds, **none})
        counts = writer.call(place_runs, self.by_axis, [Place("counts", (2,), (1,), torch.int64)])
        return writer.plan(captured, (self.kinds, *self.by_axis, *counts), self.kernels.numbers)

    def _counted_plan(self, room: Sequence[int], captures: bool) -> Plan:
        """The plan from the kinds of tiles, and rows with the places of their runs, to `room` runs."""
        writer = PlanWriter()
        results = self._write_runs(writer, room, captures, placed=True)
        return writer.plan((self.kinds, *self.by_axis), results)

    def _launch_of_runs(self, writer: PlanWriter, kernel: str, given: Arguments) -> None:
        """Writes the launch of a kernel that takes the runs of all rows and columns."""
        rows = {"KV_ROWS": self.by_axis[0], "Q_ROWS": self.by_axis[1]}
        self._launch(writer, runs_module(), kernel, self.runs_programs, {**self.for_runs, **rows, **given})

    def _write_runs(
        self, writer: PlanWriter, room: Sequence[int], captures: bool, placed: bool = False
    ) -> tuple[Place, ...]:
        """Writes the steps for the runs' tensors, by row and then by column."""
        spans = [
            writer.empty(f"{axis}_spans", (max(1, count), 2), torch.int32)
            for axis, count in zip(("kv", "q"), room, strict=True)
        ]
        of_spans = {"KV_SPANS": spans[0], "Q_SPANS": spans[1], "PLACED": placed, **self.slots}
        self._launch_of_runs(writer, "runs", {"KINDS": self.kinds, **of_spans})
        rows, columns = self.by_axis
        if not (captures and self.ordered):
            return rows, spans[0], columns, spans[1]
        orders = [
            writer.empty(f"{axis}_order", (self.groups, lines), torch.int32)
            for axis, lines in zip(("kv", "q"), self.grid, strict=True)
        ]
        self._launch_of_runs(writer, "order", {"KV_ORDER": orders[0], "Q_ORDER": orders[1]})
        return rows, spans[0], orders[0], columns, spans[1], orders[1]

    def _counts(self) -> bool:
        """Are runs counted before their allocation? A CUDA graph cannot wait for a count."""
        return sum(self.room) * 8 > UNCOUNTED and not is_captured(self.device)

    def _write_kinds(
        self, writer: PlanWriter, captured: Sequence[Place], watch: IndexWatch | None
    ) -> None:
        """Writes the steps for the kind of each tile, uint8 [groups, Qb, KVb]."""
        kernels, module = self.kernels, self.kernels.module
        states = writer.empty("states", (self.squares,), torch.uint8)
        terms = self._write_terms(writer, module, captured, watch) if kernels.terms else {}
        known = {"KINDS": self.kinds, "STATES": states}
        given = kernels.captured("squares_kernel", captured, watch)
        arguments = {**self.for_squares, **known, **terms, **given}
        self._launch(writer, module, "squares", self.squares, arguments)
        arguments = {**self.for_elements, **known, **kernels.captured("elements_kernel", captured, watch)}
        self._launch(writer, module, "elements", self.squares * self.parts, arguments)

    def _write_terms(
        self, writer: PlanWriter, module: ModuleType, captured: Sequence[Place], watch: IndexWatch | None
    ) -> dict[str, Place]:
        """Writes the steps for each term's bounds over its axis's tiles. Returns them by kernel name."""
        terms = self.kernels.terms
        made = {term.name.upper(): self._bounds(writer, term) for term in terms}
        axes = {term.axis for term in terms}
        programs = (
            ("row" in axes) * self.grid[0]
            + ("column" in axes) * self.grid[1]
            + ("diagonal" in axes) * -(-sum(self.lengths) // CHUNK)
        )
        given = self.kernels.captured("terms_kernel", captured, watch)
        self._launch(writer, module, "terms", self.groups * programs, {**self.for_terms, **made, **given})
        for term in terms:
            if term.axis == "diagonal":
                writer.call(running_sums, (made[term.name.upper()],))
        return made

    def _bounds(self, writer: PlanWriter, term: BuilderTerm) -> Place:
        name = f"bounds_of_{term.name}"
        if term.axis == "diagonal":
            return writer.empty(name, (self.groups, sum(self.lengths)), torch.int32)
        return writer.empty(name, (2, self.groups, self.grid[term.axis == "column"]), term.stored)

    def _launch(
        self, writer: PlanWriter, module: ModuleType, kernel: str, programs: int, arguments: Arguments
    ) -> None:
        # bounds of floating-point numbers need each operation to round as in torch
        exact = {**arguments, "enable_fp_fusion": False}
        writer.launch(_BuilderSource(module, self.interpreted), kernel, programs, exact)


class _BuilderSource(NamedTuple):
    module: ModuleType
    interpreted: bool


_builder_part = lru_cache(1024)(_BuilderPart)


def without_full_tiles(kinds: Tensor) -> tuple[()]:
    """Makes full tiles partial."""
    kinds.clamp_(max=PARTIAL)
    return ()


def running_sums(counts: Tensor) -> tuple[()]:
    torch.cumsum(counts, -1, dtype=torch.int32, out=counts)
    return ()


def place_runs(by_row: Tensor, by_column: Tensor) -> tuple[Tensor]:
    """Gives the runs of all rows and columns consecutive places. Returns their numbers, int64 [2]."""
    return (torch.stack([_place(by_row), _place(by_column)]),)


def _place(rows: Tensor) -> Tensor:
    """Gives the runs of all rows consecutive places. Returns the number of runs, int64 []."""
    number = rows[..., 1].movedim(-1, 0).flatten()
    stops = number.cumsum(0)
    rows[..., 2] = (stops - number).view(2, *rows.shape[:-2]).movedim(0, -1)
    return stops[-1]


_turn = Lock()  # held by a thread whose kernels nobody waits for; of many mask_mods, one compiles at a time


class _Ahead:
    """A thread that runs a job after DELAY seconds in its turn, or at once if its result is needed."""

    def __init__(self, job: Callable[[], object]) -> None:
        self.needed = threading.Event()
        self.thread = later(partial(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        start_compiler()
        end = time.monotonic() + DELAY
        while not self.needed.wait(PAUSE):
            if not threading.main_thread().is_alive():
                return
            if time.monotonic() >= end and _turn.take():
                try:
                    job()
                finally:
                    _turn.release()
                return
        job()

    def finish(self) -> None:
        self.needed.set()
        if self.thread.is_alive():
            self.thread.join()


_known: dict[object, _Ahead | None] = {}  # by the graph without its numbers, and device
_guard = Lock()


def is_first(traced: Traced, layout: MaskLayout) -> bool:
    """Should torch find the tiles, since this is the first mask of the mask_mod? Starts the kernels' compile.

    If a thread compiles the kernels, waits for it. Kernels alone find tiles without reading values, check
    indices, and find the tiles of very large masks.
    """
    key = traced.graph.skeleton[0], layout.device.index
    with _guard:
        first = key not in _known and _torch_can(traced, layout)
        ahead = _Ahead(partial(compile_ahead, traced, layout)) if first else _known.pop(key, None)
        remember(_known, key, ahead, REMEMBERED)
    if ahead is not None and not first:
        ahead.finish()
    return first


def _torch_can(traced: Traced, layout: MaskLayout) -> bool:
    if threads() == 1 or config.check_bounds() or is_captured(layout.device):
        return False
    if torch.cuda.get_sync_debug_mode():
        return False
    return math.prod((*traced.graph.groups(layout.sizes), *layout.grid())) <= MOST_TILES
