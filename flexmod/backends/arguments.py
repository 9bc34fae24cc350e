"""The arguments and results of every backend: as tensors, as places of a plan, and as arguments of kernels.

A backend makes the plan of a call, bound to the kinds of its tensors:

    forward(problem, tensors, *, want_max, keep) -> Bound
    backward(problem, tensors, needs, kept) -> Bound

The `tensors` are q, k, v and the score mod's captures, or a `BackwardInputs` in order; then the mask's
tensors. Backends in plain torch (`in_torch`) have plans of one step, which calls one of these functions;
the reference has only the first:

    forward(problem, q, k, v, *, want_max) -> Forward
    backward(problem, given, needs) -> Gradients        with the tensors of a `BackwardInputs`

    q          [B, Hq, M, D]
    k          [B or 1, Hkv, N, D]        Hq is a multiple of Hkv
    v          [B or 1, Hkv, N, Dv]
    out        [B, Hq, M, Dv]             in q's dtype; `grad_out` has its shape
    lse        [B, Hq, M]                 natural log; float32, or float64 when q is float64
    grad_lse   like lse, or None when lse was not used
    needs      whether q, k and v get a gradient; captured tensors do if `problem.capture_grad` is set
    keep       whether a backward will follow: the forward then also returns `kept` tensors for it

The caller has checked all shapes, dtypes and devices, so a backend does not check again. Scores are
`scale * q.k` after the score mod, and -inf where the mask is False. A row that attends to nothing has out 0,
lse -inf and gradients 0.

Plans of generated kernels have `Operands`, and kernels get the arguments and grids made of them.
`codegen/device_functions/attention.py` decides which program computes which tile, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from flexmod.block_mask.storage import Axis, MaskSnapshot
from flexmod.codegen.kernels import NOTHING, Captured
from flexmod.errors import BlockMaskPartsError
from flexmod.ir.derivative import CaptureGrad
from flexmod.ir.graph import Graph
from flexmod.ir.trace import Traced
from flexmod.runtime.plan import (
    Call,
    Extent,
    Place,
    PlanWriter,
    Size,
    cdiv,
    contiguous,
    fixed,
    if_several,
    named,
)
from flexmod.runtime.target import target_of


@dataclass(frozen=True)
class Problem:
    """The attention variant: how a call changes its scores, without its tensors.

        score         the score mod after the graph passes, None if it changes nothing
        score_grad    its derivative, with inputs score, grad, b, h, q_idx, kv_idx and the captures of
                      `score`; None if a call needs no gradients
        capture_grad  the same with derivatives by captured elements; None without gradients of captures
        options       the checked kernel options
        precision     of float32 products
        out_dtype     of the output, for queries in float8; None for the queries' dtype
        value_scale   the scale of the values, float32 [] or [B or 1, Hkv]; None for 1

    Only generated kernels use the last four. Before a call has its tensors, True stands for the scale.
    """

    score: Traced | None
    score_grad: Graph | None
    mask: MaskSnapshot | None
    scale: float
    options: tuple[tuple[str, Any], ...] = ()
    precision: Literal["ieee", "tf32"] = "ieee"
    capture_grad: CaptureGrad | None = None
    out_dtype: torch.dtype | None = None
    value_scale: Any = None


SINGLE: Final = 7  # inputs of a backward before `kept` and `captured`


class BackwardInputs(NamedTuple):
    """The inputs of a backward except the mask, as places in a plan. A run takes tensors in the same order.

    Shapes as above. `grad_lse` may be None. `kept` comes from the forward; `captured` has the score mod's
    captured tensors.
    """

    grad_out: Any
    grad_lse: Any
    query: Any
    key: Any
    value: Any
    out: Any
    lse: Any
    kept: tuple[Any, ...] = ()
    captured: tuple[Any, ...] = ()

    def in_order(self) -> tuple[Any, ...]:
        """Returns all inputs as one tuple, in order."""
        return (*self[:SINGLE], *self.kept, *self.captured)


class Forward(NamedTuple):
    """The results of a forward.

    The tensor `max_scores` [B, Hq, M], in lse's dtype, has each row's largest score after the score mod and
    the mask, -inf for a row that attends to nothing. It is None if the call did not ask for it.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None


class Gradients(NamedTuple):
    """The gradients, in the shapes and dtypes of their tensors; None where `needs` is False.

    `captures` belongs to the captures of `problem.score`. An entry is None if the call needs no gradient, or
    if the score does not depend on the tensor differentiably. Empty without a `problem.capture_grad`.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    captures: tuple[Tensor | None, ...]


Arguments = dict[str, object]
Numbers = Sequence[bool | int | float]


def results(
    q: Place, dim: Extent, order: Sequence[int], *, want_max: bool, kept: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Place | None, ...]:  # fmt: skip
    """Returns places for a forward's results: out, lse, the row maximum, and tensors `kept` for a backward.

    out [B, HQ, M, dim] has q's order of strides, and `dtype` or q's. The others are [B, HQ, M].
    """
    rows = q.shape[:3], contiguous(q.shape[:3]), dtype_of_sums(q.dtype)
    out = Place("out", (*q.shape[:3], dim), tuple(strides_in_order(q.shape, dim, order)), dtype or q.dtype)
    largest = Place("max_scores", *rows) if want_max else None
    return out, Place("lse", *rows), largest, *(Place(name, *rows) for name in kept)


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of lse and of sums for operands in `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the dimensions 0 to 2 (batch, heads, rows) by stride, the smallest first."""
    return tuple(sorted((2, 1, 0), key=tensor.stride))


def strides_in_order(shape: Sequence[Extent], dim: Extent, order: Sequence[int]) -> list[Extent]:
    """Returns the strides of [*shape[:3], dim] without gaps, with the dimensions in this order."""
    strides: list[Extent] = [0, 0, 0, 1]
    step: Extent = dim
    for i in order:
        strides[i] = step
        step = shape[i] * step
    return strides


@dataclass(frozen=True, eq=False)
class Operands:
    """A plan's inputs as places, in order, and its run-time numbers.

    q [B, HQ, M, D], k [KV_B, HKV, N, D], v [KV_B, HKV, N, DV]; `orders` has the order of each one's strides.
    `copied_heads`: k and v have copies of heads, whose gradients are to be summed, so they get more digits.
    Places stand for the tensors of the mask and for the mods' captured tensors.
    """

    q: Place
    k: Place
    v: Place
    orders: Mapping[str, tuple[int, ...]]
    scale: float
    mask: MaskSnapshot | None = None
    score_captured: Captured = NOTHING
    mask_captured: Captured = NOTHING
    inputs: tuple[Place | None, ...] = ()
    out_dtype: torch.dtype | None = None
    value_scale: Place | None = None
    copied_heads: bool = False

    @property
    def of_mask(self) -> tuple[Place | None, ...]:
        """The inputs that belong to the mask."""
        return self.inputs[3 + len(self.score_captured.tensors) + (self.value_scale is not None) :]

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents B, HQ, M and N."""
        return (*self.q.shape[:3], self.k.shape[2])

    def like(
        self, writer: PlanWriter, name: str, place: Place, dtype: torch.dtype | None = None, heads: int = 1
    ) -> Place:
        """Allocates a tensor like q, k or v, in the same order of strides, with `heads` for each head."""
        shape = (place.shape[0], place.shape[1] * heads, *place.shape[2:])
        strides = strides_in_order(shape, shape[3], self.orders[place.name])
        return writer.empty(name, shape, dtype or place.dtype, strides)

    def results(
        self, writer: PlanWriter, kept: Sequence[str], want_max: bool, keep: bool
    ) -> tuple[Place | None, ...]:
        """Allocates a forward's results, see `results`; with `keep` also the `kept` tensors."""
        names = [name.lower() for name in kept] if keep else ()
        order = self.orders["query"]
        made = results(self.q, self.v.shape[3], order, want_max=want_max, kept=names, dtype=self.out_dtype)
        writer.allocate(made)
        return made


def incoming(call: Operands, tensors: Sequence[Any], kept: int) -> BackwardInputs:
    """Returns the places of a backward's inputs: `tensors` in order, of which the forward kept `kept`."""
    grad_out, grad_lse, _, _, _, out, lse = tensors[:SINGLE]
    sizes = call.q.shape[:3]
    rows = (sizes, contiguous(sizes), lse.dtype)
    return BackwardInputs(
        named("grad_out", grad_out, (*sizes, grad_out.shape[3])),
        None if grad_lse is None else named("grad_lse", grad_lse, sizes),
        call.q, call.k, call.v,
        named("out", out, (*sizes, out.shape[3])),
        Place("lse", *rows),
        tuple(Place(f"kept{number}", *rows) for number in range(kept)),
        tuple(call.score_captured.tensors),
    )  # fmt: skip


def operands(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, score_numbers: Numbers, mask_numbers: Numbers,
    lists: Callable[[str, Tensor], Place] = fixed,
) -> Operands:  # fmt: skip
    """Returns a call's operands: query, key and value, the mods' captured tensors, the mask's tiles.

    `lists` makes the places of a mask's lists, since a user's lists may have any strides.
    """
    batch, heads, length, shared_batch, shared, keys = map(Size, ("B", "HQ", "M", "KV_B", "HKV", "N"))
    query = named("query", q, (batch, heads, length, q.shape[3]))
    key = named("key", k, (shared_batch, shared, keys, k.shape[3]))
    value = named("value", v, (shared_batch, shared, keys, v.shape[3]))
    captured = captured_places("score", problem.score)
    mask, of_mask = None, tuple[Place, ...]()
    if problem.mask is not None:
        of_mask = places_of_mask(problem.mask, lists)
        mask = problem.mask.with_tensors(of_mask)  # type: ignore[arg-type]
    scale = None
    if problem.value_scale is not None:
        shape = (shared_batch, shared)[: problem.value_scale.dim()]
        scale = named("value_scale", problem.value_scale, shape)
    return Operands(
        query, key, value,
        {"query": order_of(q), "key": order_of(k), "value": order_of(v)},
        problem.scale, mask,
        Captured(captured, score_numbers),
        Captured(mask.mod.tensors if mask else (), mask_numbers),  # type: ignore[arg-type]
        (query, key, value, *captured, *([] if scale is None else [scale]), *of_mask),
        problem.out_dtype, scale,
    )  # fmt: skip


def captured_places(mod: str, traced: Traced | None) -> tuple[Place, ...]:
    tensors = traced.tensors if traced else ()
    return tuple(named(f"{mod}_capture{number}", tensor) for number, tensor in enumerate(tensors))


def places_of_mask(mask: MaskSnapshot, lists: Callable[[str, Tensor], Place] = fixed) -> tuple[Place, ...]:
    """Returns places for all tensors of a mask, in their order."""
    names = mask.storage.parts()
    make = lists if mask.storage.form == "lists" else named
    tiles = tuple(make(name, tensor) for name, tensor in zip(names, mask.storage.tensors(), strict=True))
    return (*tiles, *captured_places("mask", mask.mod))


def block_of(mask: MaskSnapshot) -> tuple[int, int]:
    """Returns the (queries, keys) of a block for kernels, which walk each block to its end.

    A single block may have any size; torch uses 2^30 for "no mask". This function shortens it to a power of
    two just beyond the positions, since each block size needs its own kernels.
    """
    sizes = zip(mask.BLOCK_SIZE, mask.seq_lengths, strict=True)
    rows, columns = (min(int(size), max(128, 1 << (length - 1).bit_length())) for size, length in sizes)
    return rows, columns


def strided(name: str, letters: str, row: str, tensor: Place | None) -> Arguments:
    """Returns a tensor and its strides by a kernel's names. A batch of 1 serves every batch entry."""
    b, h, m, d = tensor.strides if tensor is not None else (0, 0, 0, 0)
    return {
        name: tensor,
        f"stride_{letters}b": if_several(tensor.shape[0], b) if tensor is not None else 0,
        f"stride_{letters}h": h,
        f"stride_{letters}{row}": m,
        f"stride_{letters}d": d,
    }


def sizes(call: Operands) -> Arguments:
    q, k = call.q, call.k
    return {"scale": call.scale, "HQ": q.shape[1], "HKV": k.shape[1], "M": q.shape[2], "N": k.shape[2]}


def value_scale_arguments(scale: Place | None) -> Arguments:
    """Returns the values' scale and its strides, 0 where one number serves all."""
    if scale is None:
        return {}
    b, h = (if_several(scale.shape[0], scale.strides[0]), scale.strides[1]) if scale.shape else (0, 0)
    return {"V_SCALE": scale, "stride_sb": b, "stride_sh": h}


def grad_lse_arguments(grad_lse: Place | None) -> Arguments:
    strides = grad_lse.strides if grad_lse is not None else (0, 0, 0)
    return {"GRAD_LSE": grad_lse, **dict(zip(("stride_lb", "stride_lh", "stride_lm"), strides, strict=True))}


def mask_arguments(writer: PlanWriter, mask: MaskSnapshot | None, axis: Axis) -> Arguments:
    """Returns the mask's blocks of keys by row ("kv"), or its blocks of queries by column ("q")."""
    if mask is None:
        return {}
    if axis == "q" and not mask.storage.by_column:
        raise BlockMaskPartsError(
            problem="block_mask has no q_num_blocks and q_indices, and a gradient is summed up by keys",
            advice="build it with create_block_mask, or from_kv_blocks(..., compute_q_blocks=True)",
        )
    runs = mask.storage.runs(axis)
    if runs is not None:
        rows: Any = runs.rows
        return {
            f"{axis.upper()}_ROWS": rows, f"{axis.upper()}_RUNS": runs.spans, **mask_strides(rows.shape[:3])
        }  # fmt: skip
    names = [f"{axis}_num_blocks", f"{axis}_indices", f"full_{axis}_num_blocks", f"full_{axis}_indices"]
    lists: list[Any] = [mask.storage.list(name) for name in names]
    present: list[Place] = [place for place in lists if place is not None]
    # if a mask is the same for each batch entry or head, its lists are expanded views of one copy: take it
    for dim in (0, 1):
        if all(place.shape[dim] == 1 or place.strides[dim] == 0 for place in present):
            shapes = [(*place.shape[:dim], 1, *place.shape[dim + 1 :]) for place in present]
            present = [replace(place, shape=shape) for place, shape in zip(present, shapes, strict=True)]
    counts, indices, *full = [dense(writer, place) for place in present]
    full_counts, full_indices = full if full else (None, None)
    return {
        names[0].upper(): counts,
        names[1].upper(): indices,
        f"{axis}_slots": indices.shape[3],
        names[2].upper(): full_counts,
        names[3].upper(): full_indices,
        f"full_{axis}_slots": full_indices.shape[3] if full_indices is not None else 0,
        **mask_strides(counts.shape),
    }


def dense(writer: PlanWriter, place: Place) -> Place:
    """Returns the place itself if it is contiguous, else a copy."""
    dense = contiguous(place.shape)
    layout = zip(place.shape, place.strides, dense, strict=True)
    if all(size == 1 or stride == wanted for size, stride, wanted in layout):
        return place
    known = [step.makes[0] for step in writer.steps if isinstance(step, Call) and step.function is copied]
    made = Place(f"{place.name}_copied", place.shape, dense, place.dtype)
    if made not in known:
        writer.call(copied, (place, place.shape, place.strides), (made,))
    return made


def copied(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> tuple[Tensor]:
    """Returns a contiguous copy of a view that begins at the tensor's first element."""
    view = tensor.as_strided(shape, strides, tensor.storage_offset())
    return (view.clone(memory_format=torch.contiguous_format),)


def mask_strides(shape: Sequence[Extent]) -> Arguments:
    """Returns the batch and head strides of [batches, heads, lines], in lines; 0 for a single entry."""
    batch, heads, lines = shape
    return {
        "stride_mask_b": if_several(batch, heads * lines),
        "stride_mask_h": if_several(heads, lines),
    }


def processors(device: torch.device) -> int:
    """Returns a GPU's number of processors; 1 for any other device."""
    return target_of(device).processors or 1 if device.type == "cuda" else 1


def diagonal_count(length: Extent, keys: Extent, block_m: int, block_n: int) -> Extent:
    """The number of diagonals of tiles, of `block_m` queries by `block_n` keys, a divisor."""
    return cdiv(keys, block_n) + (cdiv(length, block_m) - 1) * (block_m // block_n)


def grid(batch: Extent, heads: Extent, length: Extent, block: int) -> Extent:
    """The number of programs for `length` rows in tiles of `block`, for each head of each batch entry."""
    return batch * heads * cdiv(length, block)
