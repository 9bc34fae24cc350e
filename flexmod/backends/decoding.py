"""Plans a forward of few queries on many keys, as in decoding, by the portable kernels.

A tile of such a call is mostly empty, or its programs are few. So the queries of `group` heads that share
keys become the rows of one tile: the kernels see queries [B, HQ, M, D] as [B, HQ / group, group * M, D]. The
mods' graphs map a row back to its head and its position. Several programs share the keys of a tile. Each
writes its part of the output, and `combine_kernel` merges the parts.

Source: Dao et al., Flash-Decoding for long-context inference, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, float32, int32

from flexmod import errors
from flexmod.backends.arguments import Operands, grid, order_of, processors, strided
from flexmod.backends.options import DECODE
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import FLOAT8, Decoding, option, padded
from flexmod.errors.base import counted
from flexmod.ir.graph import Graph, GraphBuilder, Node, dtype_name, rebuild
from flexmod.ir.ops import HALF
from flexmod.runtime import config
from flexmod.runtime.plan import Extent, Place, PlanWriter, Size, bits, cdiv, if_several, least

OTHERS = ("TEMPLATE", "tuned", "FORCE_USE_FLEX_ATTENTION")  # options that ask for other kernels
MOST_ROWS = 64  # of a tile

# With more rows, products of wide heads take longer than reading the keys.
FEW_ROWS = 16

# With so few keys one program has them all.
SHORTEST = 64

# With fewer keys for each tile, other kernels take less time, although processors are idle.
PER_TILE = 48

# A part has LEAST keys or more, or EQUAL keys in each batch. There are PROGRAMS for each processor.
LEAST, EQUAL, MOST_PARTS, PROGRAMS = 128, 512, 128, 2

# If parts save a program fewer keys, the merge takes longer than those.
SAVED = 768

# The widest heads in float32: the parts of wider ones do not fit a thread's registers.
WIDEST_SINGLE = 128

# The columns of the output that a program merges at a time.
WIDTH = 64


def is_decoding(q: Tensor, k: Tensor, options: Mapping[str, Any], *, keep: bool) -> bool:
    """Returns whether a call is one of few queries.

    `keep`: the call keeps results for a backward. Raises DecodeBackendError if the options ask for these
    kernels, and the call is another one.
    """
    why = "gradients are wanted" if keep else _obstacle(q, k, options)
    if why is not None and options.get("BACKEND") == DECODE:
        raise errors.DecodeBackendError(why=why)
    return why is None


def decoding(q: Tensor, k: Tensor, mask: MaskSnapshot | None, options: Mapping[str, Any]) -> Decoding:
    """Returns how kernels compute a call of few queries."""
    group = _group(q, k, mask)
    batch, heads, length, keys = q.shape[0], q.shape[1] // group, group * q.shape[2], k.shape[2]
    programs = grid(batch, heads, length, MOST_ROWS)
    parts = _parts(options, programs, keys, processors(q.device))
    several = keys * (parts - 1) >= SAVED * max(parts, 1)
    return Decoding(min(padded(length), MOST_ROWS), group, several)


def _obstacle(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> str | None:
    """Returns why a call is not one of few queries, or None if it is."""
    if not has_few(q, k, 0 if _is_deterministic(options) else processors(q.device)):
        heads = f"heads of {q.shape[3]} columns in {dtype_name(q.dtype)}"
        return f"it has {counted(q.shape[2], 'query')}, {counted(k.shape[2], 'key')} and {heads}"
    name = other_kernels(options)
    if name is not None:
        return f"kernel option {name} asks for other kernels"
    return "FLEXMOD_CHECK_BOUNDS asks for checks" if config.check_bounds() else None


def other_kernels(options: Mapping[str, Any]) -> str | None:
    """Returns the name of a kernel option that asks for other kernels, or None."""
    return next((x for x in OTHERS if option(options, "forward", x, False) not in (False, "auto")), None)


def has_few(q: Tensor, k: Tensor, available: int = 0) -> bool:
    """Returns whether there are few queries [B, HQ, M, D] on many keys [B or 1, HKV, N, D].

    Few tiles are few queries, too: at most half as many as there are `available` processors, or as many where
    heads are narrow.
    """
    batch, heads, length, dim = q.shape
    keys = k.shape[2]
    known = q.dtype in (*HALF, *FLOAT8) or q.dtype == float32 and dim <= WIDEST_SINGLE
    if not known or keys <= SHORTEST or not q.numel():
        return False
    tiles: Any = grid(batch, heads, length, MOST_ROWS)
    few_tiles = tiles <= (available if dim <= 64 else available // 2) and keys > PER_TILE * tiles
    if length > MOST_ROWS:
        return few_tiles
    shared = heads > k.shape[1] and 2 * length <= MOST_ROWS
    return length <= FEW_ROWS or dim <= 64 or shared or few_tiles


def _is_deterministic(options: Mapping[str, Any]) -> bool:
    """Returns whether the bits of a batch entry must not depend on the others."""
    return bool(option(options, "forward", "deterministic", False))


def _group(q: Tensor, k: Tensor, mask: MaskSnapshot | None) -> int:
    """Returns how many heads become rows of one tile: they share keys and mask, and have one stride."""
    length, heads = q.shape[2], q.shape[1] // k.shape[1]
    # the output's strides have the order of q's: a batch between rows and heads would part its heads
    apart = q.stride(1) != length * q.stride(2) or order_of(q) == (2, 0, 1)
    if length > 1 and apart or mask is not None and not _is_one_row(mask):
        return 1
    most = MOST_ROWS if mask is None else math.gcd(MOST_ROWS, mask.BLOCK_SIZE[0])
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or padded(n * length) <= most))


def _is_one_row(mask: MaskSnapshot) -> bool:
    """Returns whether all queries of all heads read the same row of blocks."""
    runs = mask.storage.runs("kv")
    of_rows = [runs.rows] if runs else mask.storage.by_row()
    return all((x.shape[1] == 1 or x.stride(1) == 0) and x.shape[2] == 1 for x in of_rows)


def _parts(options: Mapping[str, Any], programs: Any, keys: Any, processors: Any) -> Any:
    """Returns the number of programs that share a tile's keys, for integers or `Size`s; 0 for one."""
    if _is_deterministic(options):
        return least(cdiv(keys, EQUAL), MOST_PARTS)
    return least(least(cdiv(keys, LEAST), MOST_PARTS), PROGRAMS * processors // programs)


def packed_graph(graph: Graph, group: int, length: int) -> Graph:
    """Returns a mod's graph for rows of `group` heads with `length` queries each."""

    def change(builder: GraphBuilder, node: Node, args: tuple[Node, ...]) -> Node | None:
        if not (node.is_input("h") or node.is_input("q_idx")):
            return None
        row = builder.input("q_idx", node.dtype)  # type: ignore[arg-type]

        def of(op: str, one: Node, number: int) -> Node:
            return builder.node(op, (one, builder.const(number, int32)), node.dtype)

        if node.is_input("q_idx"):
            return builder.const(0, int32) if length == 1 else of("remainder", row, length)
        member = row if length == 1 else of("floor_divide", row, length)
        head = of("mul", builder.input("h", node.dtype), group)  # type: ignore[arg-type]
        return builder.node("add", (head, member), node.dtype)

    return rebuild(graph, change)


class ForwardTarget(NamedTuple):
    """What a forward's kernel reads and writes, and the batch entries of its grid."""

    call: Operands
    out: Place
    max_scores: Place | None
    statistics: Mapping[str, Any]
    entries: Extent


def begin(writer: PlanWriter, kernels: Kernels, target: ForwardTarget) -> ForwardTarget:
    """Returns what a kernel for few queries reads and writes for a call; `finish` follows if it is split."""
    assert kernels.spec.decoding is not None
    group = kernels.spec.decoding.group
    call = replace(target.call, q=packed(target.call.q, group))
    if not kernels.spec.split:
        return target._replace(call=call, out=packed(target.out, group))
    batch, heads, length, keys = call.extents
    programs = grid(batch, heads, length, MOST_ROWS)
    parts = _parts(kernels.options, programs, keys, Size("PROCESSORS"))
    shape = (batch, parts, heads, length)
    part_max = None if target.max_scores is None else writer.empty("part_max", shape)
    part_out = writer.empty("part_out", (*shape, target.out.shape[3]))
    flat = replace(part_out, shape=(batch * parts, *part_out.shape[2:]), strides=part_out.strides[1:])
    statistics = {name: writer.empty(name.lower(), shape) for name in kernels.kept}
    return ForwardTarget(call, flat, part_max, {**statistics, "PARTS": parts}, batch * parts)


def finish(
    writer: PlanWriter, kernels: Kernels, target: ForwardTarget, made: Sequence[Place | None]
) -> None:
    """Writes the launch that merges the parts into the results `made`."""
    spec, call = kernels.spec, target.call
    out, lse, max_scores, *_ = made
    assert out is not None and spec.decoding is not None
    batch, heads, length, _ = call.extents
    raw = kernels.score is None and spec.positive_scale
    arguments = {
        "PART_OUT": target.out,
        **dict.fromkeys(("REST", "TOTAL")),
        **target.statistics,
        "PART_MAX": target.max_scores,
        **strided("OUT", "o", "m", packed(out, spec.decoding.group)),
        "LSE": lse,
        "MAX_SCORES": max_scores,
        "unit": call.scale if raw else 1.0,
        "HQ": heads,
        "M": length,
        "DV": spec.value_dim,
        "WIDTH": min(WIDTH, padded(spec.value_dim)),
        "BITS": bits(target.statistics["PARTS"] - 1),
    }
    writer.launch(kernels, "combine", batch * heads * length, arguments)


def packed(place: Place, group: int) -> Place:
    """Returns the place of [B, HQ, M, dim] as one of [B, HQ / group, group * M, dim], of the same memory."""
    if group == 1:
        return place
    batch, heads, length, dim = place.shape
    of_batch, of_head, of_row, of_dim = place.strides
    return replace(
        place,
        shape=(batch, heads // group, group * length, dim),
        strides=(of_batch, group * of_head, if_several(length, of_row, of_head), of_dim),
    )
