"""Registers attention with torch.library, forward and backward, for torch.compile and torch.export.

The operations take tensors, numbers and texts only, so that a graph means the same in every process. Mods
become Records (`ir/record.py`). A block mask becomes its tensors, and the running graph builds the mask from
them again. All other facts of a call, its OperationConstants, are one text, a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flexmod import errors
from flexmod.backends.arguments import Forward, dtype_of_sums, order_of, results, strides_in_order
from flexmod.backends.options import KernelOptions, families_version
from flexmod.block_mask.build import GraphMask, masked, present_tiles, storage_of
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.storage import MaskSnapshot, TileStorage
from flexmod.block_mask.tiles import LISTS, MaskLayout
from flexmod.calls import autograd, checks, float8, prepared
from flexmod.ir import record
from flexmod.ir.evaluate import captures_on_device, on_device
from flexmod.ir.record import Recorded, listed, unlisted
from flexmod.ir.trace import Traced
from flexmod.runtime import config, tensor_kinds, tuned
from flexmod.runtime.plan import contiguous, extents_of, named, values_of
from flexmod.runtime.private_torch import assume_constant, version_of
from flexmod.runtime.tensor_kinds import tensor_key


@dataclass(frozen=True)
class OperationConstants:
    """A call's constants. `names`: of its mask's parts. `score` and `mask` are texts, as in Recorded."""

    score: str
    mask: str
    form: str  # of the mask: "none", "storage", "graph" or "lists", torch's own
    names: tuple[str, ...]
    flags: tuple[bool, bool, bool]  # separate, full_tiles_padded, classified
    enable_gqa: bool
    backend: str
    tiles: tuple[tuple[str, Any], ...]
    want_max: bool
    out_dtype: torch.dtype | None = None


@assume_constant
def _text_of(*facts: Any) -> str:
    return record.encoded(facts)


@lru_cache(4096)
def _variant(text: str) -> OperationConstants:
    return OperationConstants(*record.decoded(text))


NO_MOD = ""


def no_mod() -> Recorded:
    return Recorded(NO_MOD, [], [], [])


@dataclass
class Parts:
    """The parts of a block mask: constants, then inputs of the graph."""

    form: str
    names: tuple[str, ...]
    flags: tuple[bool, bool, bool]
    mod: Recorded
    tiles: list[Tensor]
    numbers: list[int]  # the graph's numbers, block and lengths, then the storage's


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    asked: prepared.CallOptions,
) -> Forward:
    """Runs a call inside TorchDynamo or torch.export. Checks of values run when the graph runs."""
    query, key, value = prepared.cast_by_autocast(query, key, value)
    mod = no_mod() if score_mod is None else record.record(score_mod, "score", query.device)
    return _operate(query, key, value, mod, parts_of(block_mask, query.device), asked)


def dispatch(call: prepared.TracedCall) -> Forward:
    """Runs a checked call outside of a graph, as one operation that a __torch_dispatch__ sees."""
    query, key, value, source, mask, asked, _ = call
    mod = no_mod() if source is None else record.of_graph(captures_on_device(source, query.device))
    mod = replace(mod, captured=[*map(tensor_kinds.with_storage, mod.captured)])
    result = _operate(query, key, value, mod, parts_of(mask, query.device), asked)
    return float8.scaled(result, asked.value_scale)


def _operate(
    query: Tensor, key: Tensor, value: Tensor, mod: Recorded, mask: Parts, asked: prepared.CallOptions
) -> Forward:
    # with one tensor on meta, torch would run what computes shapes, and return uninitialized results
    for name, tensors in (
        ("a tensor, captured by score_mod", mod.captured), ("block_mask", mask.tiles),
        ("a tensor, captured by mask_mod", mask.mod.captured),
    ):  # fmt: skip
        for tensor in tensors:
            checks.check_device("query", query, name, tensor.device)
    track = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *mod.captured))
    variant = _text_of(
        mod.text, mask.mod.text, mask.form, mask.names, mask.flags, asked.enable_gqa,
        asked.options.backend, asked.options.tiles, asked.want_max, asked.out_dtype,
    )  # fmt: skip
    out, lse, max_scores, _, _ = torch.ops.flexmod.attention(
        query, key, value, listed(mod.captured), mod.integers, mod.reals, listed(mask.tiles), mask.numbers,
        listed(mask.mod.captured), mask.mod.integers, mask.mod.reals, asked.scale, variant, track,
    )  # fmt: skip
    return Forward(out, lse, max_scores if asked.want_max else None)


def parts_of(mask: Any, device: torch.device) -> Parts:
    if mask is None:
        return Parts("none", (), (True, False, False), no_mod(), [], [])
    if isinstance(mask, GraphMask):
        sizes, block, _, separate = mask.layout
        numbers = [-1, *block, *sizes[2:], *sizes[:2]]
        return Parts("graph", (), (separate, False, True), mask.tiled, mask.tiles, numbers)
    if isinstance(mask, BlockMask):
        traced = mask._traced
        if torch.is_grad_enabled() and any(t.requires_grad for t in traced.tensors):
            raise errors.MaskCaptureGradientError(name="a tensor")
        known = [mask.graph_number, *mask.BLOCK_SIZE, *mask._seq_lengths]
        flags = mask.full_tiles_padded, mask._classified
        return _storage_parts(mask._storage, traced, known, flags, device)
    if isinstance(mask, MaskSnapshot):
        known = [record.numbered(mask.mod.graph)[1], *mask.BLOCK_SIZE, *mask.seq_lengths]
        return _storage_parts(mask.storage, mask.mod, known, (mask.full_tiles_padded, False), device)
    if type(mask).__name__ == "BlockMask" and hasattr(mask, "kv_num_blocks"):
        names = tuple([name for name in LISTS if getattr(mask, name) is not None])
        tiles = [getattr(mask, name) for name in names]
        mod, numbers = record.record(mask.mask_mod, "mask", device), [-1, *mask.BLOCK_SIZE, *mask.seq_lengths]
        return Parts("lists", names, (True, False, False), mod, tiles, numbers)
    raise errors.NotABlockMask.of(mask)


def _storage_parts(
    storage: TileStorage, traced: Traced, known: list[int], flags: tuple[bool, bool], device: torch.device
) -> Parts:
    """Returns the parts of a mask from its storage. Raises BlockMaskPartsError.

    `known`: the graph's number, block and lengths. `flags`: full_tiles_padded, classified.
    """
    checks.check_dimensions(storage)
    names, tiles, numbers = storage.taken_apart()
    mod = Recorded(NO_MOD, [on_device(tensor, device) for tensor in traced.tensors], [], [])
    return Parts("storage", names, (storage.separate, *flags), mod, tiles, [*known, *numbers])


class Given(NamedTuple):
    """The operations' arguments besides query, key, value and results."""

    captured: Sequence[Tensor]
    integers: Sequence[int]
    reals: Sequence[float]
    tiles: Sequence[Tensor]
    numbers: Sequence[int]
    mask_captured: Sequence[Tensor]
    mask_integers: Sequence[int]
    mask_reals: Sequence[float]
    scale: float | None
    variant: str

    @classmethod
    def of(cls, *arguments: Any) -> Given:
        """Of an operation's arguments."""
        *lists, scale, variant = arguments
        return cls(*[*map(unlisted, lists), scale, variant])


_GIVEN = (
    "Tensor?[] captured, SymInt[]? integers, float[]? reals, Tensor?[] tiles, SymInt[]? numbers, "
    "Tensor?[] mask_captured, SymInt[]? mask_integers, float[]? mask_reals, float? scale, str variant"
)
_FORWARD = f"(Tensor query, Tensor key, Tensor value, {_GIVEN}, bool track)"
_BACKWARD = (
    "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"Tensor first, Tensor second, {_GIVEN}, bool[] needs)"
)


def _put_together(
    query: Tensor, key: Tensor, value: Tensor, given: Given, track: bool
) -> tuple[autograd.PreparedCall, MaskSnapshot | None]:
    """Returns the call and its mask."""
    variant = _variant(given.variant)
    mask = _mask_of(variant, given, query.device)
    tensors = (query, key, value, *given.captured, *(() if mask is None else mask.tensors))
    keys = [tensor_key(tensor) for tensor in tensors]
    numbers = (*given.integers, None, *given.numbers, None, *given.mask_integers)
    # 0.0 is equal to -0.0, and nan to nothing
    reals = [None if x is None else x.hex() for x in (given.scale, *given.reals, None, *given.mask_reals)]
    state = torch.get_default_dtype(), config.check_bounds(), tuned.state() if variant.tiles else None
    facts = (
        given.variant, track, numbers, *reals, prepared.float32_precision(), families_version(), *state, *keys
    )  # fmt: skip
    ready = prepared.of_operation(
        None if None in keys else facts,
        query.device,
        lambda: _made_ready(query, key, value, given, variant, mask, track),
    )
    return ready, ready.mask(mask)


def _made_ready(
    query: Tensor, key: Tensor, value: Tensor, given: Given, variant: OperationConstants,
    mask: MaskSnapshot | None, track: bool,
) -> autograd.PreparedCall:  # fmt: skip
    source, places = None, tuple[int, ...]()
    checks.check_tensors(query, key, value, variant.enable_gqa)
    lists = {"captured": given.captured, "tiles": given.tiles, "mask_captured": given.mask_captured}
    named = {f"{name}[{i}]": tensor for name, tensors in lists.items() for i, tensor in enumerate(tensors)}
    tensor_kinds.check_readable({"query": query, "key": key, "value": value, **named})
    if variant.score != NO_MOD:
        mod = Recorded(variant.score, given.captured, given.integers, given.reals)
        source, places = mod.traced(query.device)
    options = KernelOptions(variant.backend, variant.tiles)
    asked = prepared.CallOptions(
        prepared.NO_SCORE, given.scale, variant.enable_gqa, options, variant.want_max, variant.out_dtype
    )
    traced = prepared.TracedCall(query, key, value, source, mask, asked, track)
    return replace(prepared.checked(traced, places), results=_results(query, value, variant, track))


def _mask_of(variant: OperationConstants, given: Given, device: torch.device) -> MaskSnapshot | None:
    """Returns the mask from its parts, for the launches of this call."""
    if variant.form == "none":
        return None
    graph, *numbers = given.numbers
    block, lengths, rest = (numbers[0], numbers[1]), (numbers[2], numbers[3]), numbers[4:]
    captured, known = given.mask_captured, (given.mask_integers, given.mask_reals)
    if variant.form == "lists":
        mod = record.record_of(variant.mask)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return mod.run((b, h, q_idx, kv_idx), captured, known)

        lists: dict[str, Any] = dict.fromkeys(LISTS) | dict(zip(variant.names, given.tiles, strict=True))
        return BlockMask(lengths, **lists, BLOCK_SIZE=block, mask_mod=mask_mod).snapshot()
    separate, padded, classified = variant.flags
    layout = MaskLayout((rest[0], rest[1], *lengths), block, device, separate)
    outside = variant.form == "storage"
    if outside:
        traced, _ = Recorded(record.GRAPH, captured, [graph], []).traced(device)
        storage = TileStorage.put_together(variant.names, given.tiles, rest, layout.grid(), separate)
    else:
        traced, _ = Recorded(variant.mask, captured, *known).traced(device)
        storage = storage_of(given.tiles, traced.graph, layout)
    found = present_tiles(storage, traced, layout, outside) if classified else storage
    return masked(found, traced, layout, padded and found is storage)


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Returns out, lse, the row maximum, and two tensors for the backward; absent ones have no elements."""
    given, track = Given.of(*rest[:-1]), rest[-1]
    with tensor_kinds.no_autocast(query.device.type):
        call, mask = _put_together(query, key, value, given, track)
        captured = [given.captured[place] for place in call.places]
        found = call.forward(mask, (query, key, value, *captured))
    return tuple([layout.of(result, query) for layout, result in zip_longest(call.results, found)])


class _ResultLayout(NamedTuple):
    """The memory layout that a graph expects of a result."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype

    def empty(self, like: Tensor) -> Tensor:
        """Returns an uninitialized tensor on the device of `like`."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)

    def of(self, found: Tensor | None, like: Tensor) -> Tensor:
        """Returns `found` in this layout, or an uninitialized tensor for None."""
        if found is None:
            return self.empty(like)
        return found if found.stride() == tuple(self.strides) else self.empty(like).copy_(found)


def _results(query: Tensor, value: Tensor, variant: OperationConstants, track: bool) -> list[_ResultLayout]:
    """Returns the layouts of `_attention`'s results, as a plan makes them for tensors of these sizes."""
    generated = query.device.type == "cuda" or variant.backend == "INTERPRET"
    kept = ("first", "second") if track and generated and query.dtype != torch.float64 else ()
    of_query, of_value = named("query", query), named("value", value)
    sizes = extents_of((of_query, of_value), (query, value))
    places = results(
        of_query, of_value.shape[3], order_of(query),
        want_max=variant.want_max, kept=kept, dtype=variant.out_dtype,
    )  # fmt: skip
    nothing = _ResultLayout((0,), (1,), dtype_of_sums(query.dtype))
    made = [
        nothing
        if place is None
        else _ResultLayout(values_of(place.shape, sizes), values_of(place.strides, sizes), place.dtype)
        for place in places
    ]
    return made + [nothing] * (5 - len(made))


attention = torch.library.custom_op(
    "flexmod::attention",
    _attention,
    mutates_args=(),
    schema=f"{_FORWARD} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *given, track = rest
    variant = _variant(Given.of(*given).variant)
    checks.check_tensors(query, key, value, variant.enable_gqa)
    return tuple(layout.empty(query) for layout in _results(query, value, variant, track))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, *rest, _ = inputs
    out, lse, max_scores, *kept = output
    given = Given.of(*rest)
    ctx.given = given._replace(captured=(), tiles=(), mask_captured=())
    ctx.empty = [one is not None and not len(one) for one in rest[:8]]
    ctx.lists = [len(given.captured), len(given.tiles), len(given.mask_captured)]
    tensors = (*given.captured, *given.tiles, *given.mask_captured)
    kept_all = (query, key, value, out, lse, *kept, *tensors)
    ctx.versions = [*map(version_of, kept_all)]
    ctx.save_for_backward(*kept_all)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_scores, *kept)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, first, second, *rest = autograd.unpacked(ctx, lambda: _saved_names(ctx))
    remaining = iter(rest)
    captured, tiles, mask_captured = ([next(remaining) for _ in range(count)] for count in ctx.lists)
    lists = {"captured": captured, "tiles": tiles, "mask_captured": mask_captured}
    given = ctx.given._replace(**{name: listed(tensors) for name, tensors in lists.items()})
    if grad_out is None:  # only the lse was used
        grad_out = torch.zeros_like(out)
    needs = list(ctx.needs_input_grad[:3])
    needs += list(ctx.needs_input_grad[3]) if captured else []
    found = iter(gradient(grad_out, grad_lse, query, key, value, out, lse, first, second, *given, needs))
    grads = [next(found) if need else None for need in needs]
    # torch takes a list for tensors, an empty one for an empty list, and None for all else
    of_tensors = {name: [None] * len(tensors) for name, tensors in lists.items() if tensors}
    if captured:
        of_tensors["captured"] = grads[3:]
    fields = zip(Given._fields, ctx.empty, strict=False)
    of_lists = [of_tensors.get(name, [] if empty else None) for name, empty in fields]
    return (*grads[:3], *of_lists, None, None, None)


def _saved_names(ctx: Any) -> list[str]:
    """Returns the users' names of the tensors that `_remember` saved."""
    captured, tiles, of_mask = ctx.lists
    lists = [f"block_mask.{name}" for name in _variant(ctx.given.variant).names if name in LISTS]
    return [
        "query", "key", "value", "out", "lse", "lse", "lse", *["a tensor captured by score_mod"] * captured,
        *["the tiles of block_mask"] * (tiles - len(lists)), *lists,
        *["a tensor captured by mask_mod"] * of_mask,
    ]  # fmt: skip


attention.register_autograd(_differentiate, setup_context=_remember)


def _gradient(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    lse: Tensor, first: Tensor, second: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Returns gradients of query, key, value and each captured tensor, in this order, if `needs` is True."""
    given, needs = Given.of(*rest[:-1]), rest[-1]
    with tensor_kinds.no_autocast(query.device.type):
        call, mask = _put_together(query, key, value, given, True)
        named = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}
        _check_gradient(query, value, {**named, "first": first, "second": second})
        kept: tuple[Any, ...] = tuple(tensor for tensor in (first, second) if tensor.numel())
        of_mod = (needs[3 + place] and used for place, used in zip(call.places, call.used, strict=True))
        captured = [given.captured[place] for place in call.places]
        if not kept and call.backend in checks.GENERATED:  # no tensor required a gradient in the trace
            kept = call.forward(mask, (query, key, value, *captured))[3:]
        found = call.backward(
            mask, (*needs[:3], *of_mod), len(kept),
            (grad_out, grad_lse, query, key, value, out, lse, *kept, *captured),
        )  # fmt: skip
    grads: list[Tensor | None] = [*found[:3], *([None] * len(given.captured))]
    for place, grad in zip(call.places, found[3:], strict=True):
        grads[3 + place] = grad
    asked = [grad for grad, need in zip(grads, needs, strict=True) if need]
    layouts = _gradients(query, key, value, given, needs)
    return [
        layout.empty(query).zero_() if grad is None else layout.of(grad, query)
        for layout, grad in zip(layouts, asked, strict=True)
    ]


def _check_gradient(query: Tensor, value: Tensor, given: Mapping[str, Tensor | None]) -> None:
    """Checks a backward's tensors: autograd checks them, but a __torch_dispatch__ may not.

    Raises OperationTensorError.
    """
    real = dtype_of_sums(query.dtype)
    rows, dim = tuple(query.shape[:3]), value.shape[3]
    for name, tensor in given.items():
        if tensor is None:
            continue
        absent = name in ("first", "second") and tuple(tensor.shape) == (0,)
        shape, dtype = ((*rows, dim), query.dtype) if name.endswith("out") else (rows, real)
        expected = ((0,) if absent else shape, dtype, query.device)
        found = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if found != expected:
            raise errors.OperationTensorError(
                operation="attention_backward", name=name, found=", ".join(map(str, found)),
                expected=", ".join(map(str, expected)),
            )  # fmt: skip


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, given: Given, needs: Sequence[bool]
) -> list[_ResultLayout]:
    """Returns the layouts of `_gradient`'s results."""

    def laid_out(x: Tensor, strides: Sequence[Any]) -> _ResultLayout:
        return _ResultLayout(x.shape, strides, x.dtype)

    of_call = [laid_out(x, strides_in_order(x.shape, x.shape[3], order_of(x))) for x in (query, key, value)]
    of_mod = [laid_out(x, contiguous(x.shape)) for x in given.captured]
    return [layout for layout, need in zip((*of_call, *of_mod), needs, strict=True) if need]


gradient = torch.library.custom_op(
    "flexmod::attention_backward", _gradient, mutates_args=(), schema=f"{_BACKWARD} -> Tensor[]"
)


@gradient.register_fake
def _(*inputs: Any) -> list[Tensor]:
    (query, key, value), (*given, needs) = inputs[2:5], inputs[9:]
    return [layout.empty(query) for layout in _gradients(query, key, value, Given.of(*given), needs)]


def _refuse(ctx: Any, *gradients: Any) -> NoReturn:
    raise errors.DoubleBackwardError(backend=ctx.backend)


def _remember_backend(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query = inputs[2]
    given = _variant(Given.of(*inputs[9:-1]).variant)
    ctx.backend = prepared.backend_of(KernelOptions(given.backend, given.tiles), query).upper()


gradient.register_autograd(_refuse, setup_context=_remember_backend)
