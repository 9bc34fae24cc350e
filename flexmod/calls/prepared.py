"""Checks and prepares a call once, and reuses the result for later calls with the same key.

The key has everything that checks, traces and kernels depend on: the kinds of the tensors (shapes, strides,
dtypes, devices, alignment), the score mod's fingerprint, the mask's tensors, options, and torch's state. It
has no values of tensors. Some calls have no key: tensors of other classes, transforms, a mod without a
fingerprint. flexmod checks and traces such a call each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexmod import errors
from flexmod.backends.arguments import Forward, Problem
from flexmod.backends.options import KernelOptions, families_version
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import from_torch
from flexmod.block_mask.storage import MaskSnapshot, is_captured
from flexmod.calls import autograd, checks
from flexmod.calls.autograd import PreparedCall
from flexmod.codegen.compiler import Lowered, lower
from flexmod.codegen.spec import FLOAT8
from flexmod.errors.base import a_type
from flexmod.ir.evaluate import is_host_number
from flexmod.ir.fingerprint import Seen, find, fingerprint, remember
from flexmod.ir.graph import Graph, check_sizes, used_captures
from flexmod.ir.proxy import plain_number
from flexmod.ir.replay import replay
from flexmod.ir.trace import Traced
from flexmod.runtime import config, tensor_kinds, tuned
from flexmod.runtime.private_torch import (
    dispatch_mode_count,
    in_forward_ad,
    in_transform,
    is_wrapped,
    outside_transforms,
)
from flexmod.runtime.tensor_kinds import tensor_key

LARGEST_SCALE = torch.finfo(torch.float32).max
KNOWN = 1024  # calls in the cache


class Score(NamedTuple):
    """A score mod: `trace` makes its graph, `seen` is its fingerprint.

    `trace` also returns where `seen` has its captured tensors, see `find`.
    """

    trace: Callable[[torch.device], tuple[Traced, tuple[int, ...] | None]] | None
    seen: Seen | None


NO_SCORE = Score(None, Seen((), ()))


def score_of(score_mod: Callable[..., Any] | None) -> Score:
    if score_mod is None:
        return NO_SCORE
    seen = fingerprint(score_mod)
    return Score(lambda device: find(score_mod, "score", device, seen), seen)


class CallOptions(NamedTuple):
    """A call's arguments except its tensors and its mask. See `flex_attention` and `Problem`."""

    score: Score
    scale: float | None
    enable_gqa: bool
    options: KernelOptions
    want_max: bool
    out_dtype: torch.dtype | None = None
    value_scale: Tensor | None = None

    @property
    def extra_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that follow the captured ones."""
        return () if self.value_scale is None else (self.value_scale,)


class TracedCall(NamedTuple):
    """A call with its traced score mod, `source`. `track`: autograd records it."""

    query: Tensor
    key: Tensor
    value: Tensor
    source: Traced | None
    mask: MaskSnapshot | None
    asked: CallOptions
    track: bool


Dispatch = Callable[[TracedCall], Forward]  # runs a checked call

_known_calls: dict[object, PreparedCall] = {}  # of flex_attention, and of operations


def forget() -> None:
    """Empties the cache of calls."""
    _known_calls.clear()


def attend(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, asked: CallOptions, dispatch: Dispatch
) -> Forward:
    """Runs attention from the cache, or checks and runs a new call.

    `dispatch` runs a call that torch does not dispatch to kernels, see `tensor_kinds`.
    """
    mask = _snapshot(block_mask)
    facts = _facts(query, key, value, mask, asked)
    ready = _known_calls.get(facts)
    if ready is None:
        return _check_and_attend(query, key, value, mask, asked, facts, dispatch)
    seen = asked.score.seen
    assert seen is not None
    captured = [*(seen.tensors[place] for place in ready.places), *asked.extra_tensors]
    mask = ready.mask(mask)
    if not ready.autocast:
        return autograd.run(ready, mask, query, key, value, captured, plain=True)
    query, key, value = cast_by_autocast(query, key, value)
    with tensor_kinds.no_autocast(query.device.type):
        return autograd.run(ready, mask, query, key, value, captured, plain=True)


def known(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, asked: CallOptions
) -> PreparedCall | None:
    """Returns a call's cache entry, or None if the call is new."""
    return _known_calls.get(_facts(query, key, value, _snapshot(block_mask), asked))


def of_operation(facts: object, device: torch.device, make: Callable[[], PreparedCall]) -> PreparedCall:
    """Returns the cache entry of a torch.library operation's call. `facts` is its key, None for no cache."""
    ready = _known_calls.get(facts)
    if ready is None:
        ready = make()
        if facts is not None and ready.lasts(device):
            remember(_known_calls, facts, ready, KNOWN)
    return ready


def _facts(
    query: Any, key: Any, value: Any, mask: MaskSnapshot | None, asked: CallOptions
) -> tuple[object, ...] | None:
    """Returns a call's key, which has no values of tensors, or None if the call has none."""
    score, scale, enable_gqa, options, want_max, out_dtype, value_scale = asked
    if score.seen is None or type(scale) not in (float, int, type(None)):
        return None
    of_tensors = kinds(query, key, value, options)
    if of_tensors is None:
        return None
    of_mask = () if mask is None else mask.capture_kinds()
    name = None if mask is None else mask.name
    of_value = () if value_scale is None else tensor_key(value_scale)
    if of_mask is None or of_value is None:
        return None
    # 0.0 is equal to -0.0, and nan to nothing
    of_scale = scale.hex() if type(scale) is float else scale
    return (
        of_tensors, name, of_mask, score.seen.key, of_scale, bool(enable_gqa), options.backend, options.tiles,
        want_max, out_dtype, of_value,
    )  # fmt: skip


def kinds(query: Any, key: Any, value: Any, options: KernelOptions) -> tuple[object, ...] | None:
    """Returns the part of a call's key for its tensors and torch's state, or None if it has none."""
    if in_transform() or in_forward_ad() or dispatch_mode_count():
        return None
    if config.debug_level() or config.check_bounds():
        return None
    of_query, of_key, of_value = tensor_key(query), tensor_key(key), tensor_key(value)
    if of_query is None or of_key is None or of_value is None:
        return None
    kind = query.device.type
    if kind not in ("cuda", "cpu"):
        return None
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    precision = float32_precision() if query.dtype is torch.float32 else None
    return (
        of_query, of_key, of_value, tensor_kinds.records_gradients(), torch.get_default_dtype(), autocast,
        precision, tuned.state() if options.tiles else None, families_version(),
    )  # fmt: skip


def _check_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskSnapshot | None,
    asked: CallOptions,
    facts: object,
    dispatch: Dispatch,
) -> Forward:
    """Checks a call and runs it; caches it under `facts` unless that is None."""
    options = asked.options
    reference = options.backend == "REFERENCE"
    if not reference:
        tensor_kinds.check_transforms({"query": query, "key": key, "value": value})
    equal = checks.with_equal_heads(query, key, value, asked.enable_gqa)
    if equal is not None:
        return attend(query, *equal, mask, asked, dispatch)
    checks.check_tensors(query, key, value, asked.enable_gqa)
    given = query, key, value
    query, key, value = map(tensor_kinds.as_plain_class, given)
    if any(one is not other for one, other in zip((query, key, value), given, strict=True)):
        return attend(query, key, value, mask, asked, dispatch)
    tensor_kinds.check({"query": query, "key": key, "value": value})
    backend_of(options, query)  # raises before any cast or trace
    asked = asked._replace(scale=checked_scale(asked.scale))
    autocast = tensor_kinds.autocasts(query.device.type)
    query, key, value = cast_by_autocast(query, key, value)
    with tensor_kinds.no_autocast(query.device.type):
        source, places = asked.score.trace(query.device) if asked.score.trace else (None, ())
        if source is not None:
            named = source.named()
            tensor_kinds.check(named)
            if not reference:
                tensor_kinds.check_transforms({name.rstrip(","): tensor for name, tensor in named.items()})
        tensors = (query, key, value, *(source.tensors if source else ()))
        track = tensor_kinds.records_gradients() and any(map(tensor_kinds.requires_grad, tensors))
        of_mask = () if mask is None else mask.tensors
        dispatched = tensor_kinds.any_dispatched((*tensors, *of_mask))
        traced = TracedCall(query, key, value, source, mask, asked, track)
        if dispatched and not reference:
            tensor_kinds.refuse_transformed(_named(traced))
            _check(traced)
            with tensor_kinds.naming_mixed(_named(traced)):
                return dispatch(traced)
        call = checked(traced, places or (), autocast)
        traced = traced._replace(mask=mask if call.own is None else call.own)
        captured = source.tensors if source is not None and call.problem.score is not None else ()
        if facts is not None and places is not None and call.lasts(query.device):
            remember(_known_calls, facts, call, KNOWN)
        captured = (*captured, *asked.extra_tensors)
        naming = tensor_kinds.naming_mixed(_named(traced)) if dispatched else nullcontext()
        # a transform would wrap the results of kernels, also of tensors that it does not wrap
        outside = in_transform() and not (track or reference or any(map(is_wrapped, tensors)))
        with naming, outside_transforms() if outside else nullcontext():
            return autograd.run(call, traced.mask, query, key, value, captured, plain=False)


def _named(call: TracedCall) -> dict[str, Tensor]:
    """Returns all tensors of a call by the user's names."""
    mask = call.mask
    of_mask = {} if mask is None else dict(zip(mask.names, mask.tensors, strict=True))
    captured = {} if call.source is None else call.source.named()
    return {"query": call.query, "key": call.key, "value": call.value, **captured, **of_mask}


def checked(call: TracedCall, places: tuple[int, ...], autocast: bool = False) -> PreparedCall:
    """Checks and prepares a call; `places` and `autocast` as in `PreparedCall`."""
    query, key, _, source, mask, asked, track = call
    backend = _check(call)
    scale = checked_scale(asked.scale)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    lowered, own = (None, None) if source is None else _lowered(backend, query, key, source, mask)
    problem = Problem(
        Traced(lowered.graph) if lowered and lowered.graph else None,
        lowered.grad if lowered and track else None,
        None, scale, asked.options.tiles, float32_precision(), out_dtype=asked.out_dtype,
        value_scale=None if asked.value_scale is None else True,
    )  # fmt: skip
    captured = [x.tensors for x in (source, mask and mask.mod, own and own.mod) if x is not None]
    numbers = any(is_host_number(tensor, query.device) for tensors in captured for tensor in tensors)
    places = () if problem.score is None else places
    return PreparedCall(problem, backend, asked.want_max, track, numbers, own, places, autocast)


def _check(call: TracedCall) -> str:
    """Checks a call, and returns its backend."""
    query, key, value, source, mask, asked, track = call
    backend = backend_of(asked.options, query)
    if asked.out_dtype is not None and track:
        raise errors.Float8GradientError(name="a tensor captured by score_mod")
    checks.check_dtypes(query, key, value, backend, track)
    if backend in checks.GENERATED:
        checks.check_extents(query, key)
    if mask is not None:
        checks.check_mask(mask, query, key)
    if source is not None:
        checks.check_captures(source, query)
        check_sizes(source.graph, (*query.shape[:3], key.shape[2]), "the call")
    return backend


def checked_scale(scale: Any) -> float | None:
    """Returns the scale as a float. Raises ScaleError (also for a tensor, which would get no gradient) and
    ScaleValueError.
    """
    if scale is None:
        return None
    number, advice = None, "give a number, or None for 1/sqrt(head_dim)"
    if isinstance(scale, Tensor):
        advice = "give scale=1.0, and a score_mod that reads the tensor at each call: score * scale"
    else:
        with suppress(TypeError):  # an array of several numbers
            number = plain_number(scale)
    if number is None or isinstance(number, bool):
        raise errors.ScaleError(type=a_type(scale), advice=advice)
    if not abs(number) <= LARGEST_SCALE:
        value = f"an integer of {number.bit_length()} bits" if isinstance(number, int) else number
        raise errors.ScaleValueError(value=value)
    return float(number)


def float32_precision() -> Literal["ieee", "tf32"]:
    """Returns the precision of float32 products by torch's switches, old and new.

    torch's `allow_tf32` raises once a new switch was set.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts query, key and value under autocast, as autocast does for torch's own attention."""
    if not tensor_kinds.autocasts(tensors[0].device.type):
        return tensors
    return tuple(t.to(dtype) for t, dtype in zip(tensors, dtypes_under_autocast(*tensors), strict=True))


def dtypes_under_autocast(*tensors: Tensor) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of query, key and value after autocast's casts."""
    kind = tensors[0].device.type
    if not tensor_kinds.autocasts(kind):
        return tuple(t.dtype for t in tensors)
    dtype = torch.get_autocast_dtype(kind)
    kept = (torch.float64, *FLOAT8)
    return tuple(dtype if t.is_floating_point() and t.dtype not in kept else t.dtype for t in tensors)


def backend_of(options: KernelOptions, query: Tensor) -> str:
    """Returns the backend to run: "triton", "cpu", "interpret" or "reference". No backend falls back."""
    kind = query.device.type
    if kind not in ("cuda", "cpu", "meta"):
        raise errors.UnsupportedDevice(device=query.device)
    if options.backend == "REFERENCE":
        return "reference"
    if options.backend == "INTERPRET":
        if kind != "cpu":
            raise errors.BackendDeviceError(backend="INTERPRET", wanted="cpu", device=query.device)
        return "interpret"
    if options.backend.startswith("TRITON") and kind != "cuda":
        raise errors.BackendDeviceError(backend=options.backend, wanted="cuda", device=query.device)
    return "triton" if kind == "cuda" else "cpu"


def _lowered(
    backend: str, query: Tensor, key: Tensor, source: Traced, mask: MaskSnapshot | None
) -> tuple[Lowered, MaskSnapshot | None]:
    """Returns the lowered score_mod of a checked call, and a mask from its -inf branches."""
    batch, heads, length, keys = (max(1, int(size)) for size in (*query.shape[:3], key.shape[2]))
    extents = (batch, heads, length, keys)
    split, own = mask is None and not autograd.nothing(query, key), None
    # kernels are for equal graphs; what torch evaluates may raise, and then names this mod's line
    graph = source.graph if backend in checks.GENERATED else source.graph.with_lines
    lowered = lower(graph, extents, split=split)
    if split and lowered.split is not None:
        decides = tuple(tensor.detach() for tensor in source.tensors)
        own = _mask_of(Traced(lowered.split, decides), extents, query.device)
    return lowered, own


def _snapshot(block_mask: Any) -> MaskSnapshot | None:
    """Takes a snapshot of the mask, so that its later changes do not reach the call or its backward."""
    if block_mask is None or isinstance(block_mask, MaskSnapshot):
        return block_mask
    return from_torch(block_mask).snapshot()


def _mask_of(split: Traced, extents: tuple[int, int, int, int], device: torch.device) -> MaskSnapshot:
    """Builds the block mask of a score_mod's -inf branches; caches it if it captures no tensor."""
    sizes = (*split.graph.groups(extents), *extents[2:])
    if used_captures(split.graph.nodes) or is_captured(device):
        return create_block_mask(replay(split), *sizes, device=device).snapshot()
    return _remembered_mask(split.graph, sizes, device)


@lru_cache(64)
def _remembered_mask(graph: Graph, sizes: tuple[int, int, int, int], device: torch.device) -> MaskSnapshot:
    return create_block_mask(replay(Traced(graph)), *sizes, device=device).snapshot()
