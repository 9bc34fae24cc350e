"""flexmod.compile: turns an attention variant into a callable, and traces its mods beforehand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from flexmod import errors
from flexmod.backends.arguments import Forward
from flexmod.backends.options import LayoutName, layout_of, parse
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.data import positions_in
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.parts import unwrapped
from flexmod.block_mask.storage import MaskSnapshot, is_captured
from flexmod.calls import autograd, checks, float8, library, prepared
from flexmod.calls.attention import AuxOutput, AuxRequest, ScoreFunction, by_override, results_of
from flexmod.calls.float8 import Scales
from flexmod.codegen.spec import KernelSpec
from flexmod.codegen.variant import EXTENTS, spec_for
from flexmod.ir.composed import MaskMod
from flexmod.ir.fingerprint import Seen, remember
from flexmod.ir.offsets import OffsetLike, Positions, positions_of, stated
from flexmod.ir.replay import deep_copied_traces, leaves, replay
from flexmod.ir.source import mod_name
from flexmod.ir.trace import Traced, trace
from flexmod.ir.watched import NEVER, Links, Watched, hold, links_of
from flexmod.runtime import tensor_kinds
from flexmod.runtime.private_torch import outside_of_graphs
from flexmod.runtime.tensor_kinds import tensor_key
from flexmod.tools.inspection import CALL, Inspection, Latest

MASKS = 64  # masks that a handle caches, by lengths
BLOCK = (128, 128)  # the block size of these masks


@outside_of_graphs
def compile(
    score_mod: ScoreFunction | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    layout: LayoutName = "bhsd",
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    q_offset: OffsetLike = None,
    kv_offset: OffsetLike = None,
) -> CompiledAttention:
    """Returns a callable that computes flex_attention with these arguments, with less overhead per call.

    Arguments, further ones as in flex_attention and create_block_mask:

        dtype      of query, key and value
        head_dim   of query and key
        value_dim  of value; head_dim if None
        q_offset   as in flex_attention, for both mods. A number is fixed now. For positions that change from
                   call to call pass a tensor and write to it. If you pass no offset here, a call takes the
                   offsets of its block mask.
        kv_offset  likewise

    Only inspection and `save` use dtype, head_dim and value_dim, and only before the first call. They then
    describe a call on this machine's GPU, if it has one; with `enable_gqa`, heads share keys. Calls may have
    other dtypes and dimensions. After a call, inspection describes the latest call.

    This function traces the mods, once for each device, and compiles no kernels. It fixes captured numbers.
    Captured tensors are read at each call, so writes to them take effect.

    The next call traces the mods again if a captured tensor changes its shape, strides, dtype or device. So
    it does if another tensor takes its place: `module.window = other`, `load_state_dict(assign=True)`, a
    variable of a closure, an entry of a list. So it does if the same object gets another tensor:
    `tables.append(other)`, or `module.override = other` where that was None. If a mod's graph depends on
    values (`t.item()`, `t[0]`, `if t > 3`), or if a tensor's place is hidden (a weak reference), each call
    traces it.

    From `mask_mod` the handle builds a block mask for each pair of lengths. It builds the mask again after a
    write to a captured tensor, or after the tensor gets other memory (`t.data = other`,
    `torch.utils.swap_tensors`). It does not see writes that torch does not count: through `t.data` or
    `t.numpy()`, by an optimizer with `fused=True`, or by your own kernel.

    Raises what tracing raises, ScaleError, ScaleValueError, LayoutError, UnknownOption, OptionValueError,
    OffsetTypeError, OffsetValueError and OffsetShapeError. Raises ArgumentTypeError for an invalid
    enable_gqa, or kernel_options that are no dict. Raises LibraryArgumentError for an invalid dtype, head_dim
    or value_dim, for only one of dtype and head_dim, and for value_dim without them.

    Example:

        attend = compile(mods.softcap(50.0), masks.causal(), dtype=torch.bfloat16, head_dim=64)
        print(attend.source["forward"])
        out = attend(query, key, value)
    """
    given = (score_mod, mask_mod, scale, enable_gqa, kernel_options, layout)
    return CompiledAttention(*given, dtype, head_dim, value_dim, stated(q_offset, kv_offset))


class CompiledAttention(Inspection):
    """A variant of attention with traced mods, which you call on tensors; `compile` makes it.

    A copy computes the same attention, with the mods as `compile` traced them. If the mod is a function,
    copy.deepcopy shares its captured tensors; it copies them with a method, a module, a partial or a callable
    object. A pickle has graphs and captured tensors in place of the mods; torch.load reads it with
    weights_only=False. Copies and pickles leave out the handle's caches.
    """

    __name__ = "CompiledAttention"  # a __torch_function__ may read the name of its function

    def __init__(
        self,
        score_mod: ScoreFunction | None,
        mask_mod: MaskMod | None,
        scale: float | None,
        enable_gqa: bool,
        kernel_options: Mapping[str, Any] | None,
        layout: LayoutName,
        dtype: torch.dtype | None,
        head_dim: int | None,
        value_dim: int | None,
        positions: Positions | None,
    ) -> None:
        positions = positions or positions_of(mask_mod)
        if positions is not None:
            score_mod = None if score_mod is None else positions.score(score_mod)
            mask_mod = None if mask_mod is None else positions.mask(mask_mod)
        self._positions = positions
        given = {"score": score_mod, "mask": mask_mod}
        self._mods = {kind: mod for kind, mod in given.items() if mod is not None}
        errors.ArgumentTypeError.check_flags(enable_gqa=enable_gqa)
        self._scale, self._enable_gqa = prepared.checked_scale(scale), enable_gqa
        self._options = parse(kernel_options)
        self._layout = layout_of(layout)
        self._on: dict[torch.device, _TracedMods] = {}
        self._bound: dict[object, _KnownCall] = {}
        self._in_graphs: dict[int, Any] = {}  # keeps masks alive that CUDA graphs read at each replay, by id
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._first = torch.empty(0, device=accelerator or "cpu").device
        self._variant(self._first)
        self._latest = self._described(dtype, head_dim, value_dim)

    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None = ...,
        return_lse: Literal[False] = ..., *, return_aux: None = ..., scales: Scales | None = ...,
        out_dtype: torch.dtype | None = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None = ...,
        *, return_lse: Literal[True], return_aux: None = ..., scales: Scales | None = ...,
        out_dtype: torch.dtype | None = ...,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None = ...,
        return_lse: Literal[False] = ..., *, return_aux: AuxRequest, scales: Scales | None = ...,
        out_dtype: torch.dtype | None = ...,
    ) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip

    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None = ...,
        return_lse: bool = ..., *, return_aux: AuxRequest | None = ..., scales: Scales | None = ...,
        out_dtype: torch.dtype | None = ...,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...  # fmt: skip

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_mask: BlockMask | None = None,
        return_lse: bool = False,
        *,
        return_aux: AuxRequest | None = None,
        scales: Scales | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
        """Computes attention with flex_attention's shapes, results and errors.

        A `block_mask` replaces the one from the handle's mask_mod.
        """
        compiling, tensors = torch.compiler.is_compiling(), (query, key, value)
        if not compiling and has_torch_function(tensors) and tensor_kinds.overridden(tensors):
            of_float8 = {"scales": scales, "out_dtype": out_dtype}
            return by_override(self, tensors, block_mask, return_lse, return_aux=return_aux, **of_float8)
        tensor_kinds.refuse_nested(query, key, value)
        given = (query, key, value, block_mask, scales, out_dtype)
        return results_of(self._attend, given, return_lse, return_aux, self._layout, compiling)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scales: Scales | None,
        out_dtype: torch.dtype | None, want_max: bool,
    ) -> Forward:  # fmt: skip
        tensor_kinds.refuse_jit_trace()
        if self._positions is not None:
            self._positions.check_values()
        in_float8 = checks.is_float8(query, key, value, scales, out_dtype)
        known = block_mask is None and not in_float8
        facts = prepared.kinds(query, key, value, self._options) if known else None
        bound = self._bound.get((facts, want_max))
        if bound is not None:
            if bound.holds():
                self._latest = bound.latest
                if bound.mask is not None and is_captured(query.device):
                    self._in_graphs[id(bound.mask)] = bound.mask
                return autograd.run(bound.call, bound.mask, query, key, value, bound.captured, plain=True)
            self._bound = {}  # frees stale masks
        score, masks = prepared.NO_SCORE, None
        if isinstance(query, Tensor) and isinstance(key, Tensor):  # otherwise checks raise
            variant = self._variant(query.device)
            traces = variant.current()
            score, of_mask = self._score(traces, block_mask), traces.by_kind.get("mask")
            # a mask has positions; without queries or keys there is nothing to mask
            some = query.dim() == key.dim() == 4 and query.shape[2] and key.shape[2]
            if block_mask is None and of_mask is not None and some:
                masks = variant.masks(of_mask)
                block_mask = masks.block_mask(query, key)
                if is_captured(query.device):
                    self._in_graphs[id(block_mask)] = block_mask
        value_scale = factor = None
        if in_float8:
            mod: Any = replay(score.trace(query.device)[0]) if score.trace else None
            query, key, value, mod, out_dtype, value_scale, factor = float8.lowered(
                query, key, value, mod, scales, out_dtype, self._enable_gqa, self._options
            )
            score = prepared.score_of(mod)
        of_handle = self._scale, self._enable_gqa, self._options
        asked = prepared.CallOptions(score, *of_handle, want_max, out_dtype, value_scale)
        result = prepared.attend(query, key, value, block_mask, asked, library.dispatch)
        self._latest = self._latest_of(query, key, value, out_dtype)
        ready = None if facts is None else prepared.known(query, key, value, block_mask, asked)
        lasting = not (traces.eager or is_captured(query.device))
        if ready is not None and not ready.autocast and lasting:
            bound = _bound(ready, block_mask, traces, variant.links or (), masks, self._latest)
            if variant.traces is traces:  # otherwise the links may be of another thread's newer traces
                remember(self._bound, (facts, want_max), bound, MASKS)
        return float8.scaled(result, factor)

    def _score(self, traces: _Traces, block_mask: Any) -> prepared.Score:
        """Returns the score mod with the offsets of the call's mask. Raises OffsetMismatchError."""
        of_mask = positions_in(block_mask)
        if self._positions is not None and block_mask is not None:
            self._positions.check_agrees(of_mask, "the handle")
        elif of_mask is not None:
            of_mask.check_values()
            if "score" in traces.by_kind:
                return prepared.score_of(of_mask.score(replay(traces.by_kind["score"])))
        return traces.known_score()

    def _latest_of(self, query: Tensor, key: Tensor, value: Tensor, out_dtype: torch.dtype | None) -> Latest:
        of_query, of_key, of_value = prepared.dtypes_under_autocast(query, key, value)
        spec = KernelSpec(
            of_query, of_key, of_value, query.shape[3], value.shape[3], mask_block=BLOCK,
            precision=_precision(of_query),
            positive_scale=self._positive_scale,
            shared_kv=query.shape[:2] != key.shape[:2], backward=True,
            out_dtype=None if out_dtype is of_query else out_dtype,
        )  # fmt: skip
        batch, heads, length, _ = query.shape
        return Latest(query.device, spec, (batch, heads, length, key.shape[2]))

    def _described(self, dtype: Any, head_dim: Any, value_dim: Any) -> Latest | None:
        """Checks and describes a call with these dtypes and dimensions, for inspection before the first."""
        if dtype is head_dim is value_dim is None:
            return None
        size = "a whole number above 0, with dtype beside it"
        of_value = head_dim if value_dim is None else value_dim
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        a_float, advice = "a floating-point torch.dtype, with head_dim beside it", f"write {CALL}, or neither"
        errors.LibraryArgumentError.check(
            "compile",
            ("dtype", dtype, is_float, a_float, advice),
            ("head_dim", head_dim, type(head_dim) is int and head_dim > 0, size, advice),
            ("value_dim", of_value, type(of_value) is int and of_value > 0, size, advice),
        )
        spec = spec_for(
            dtype, head_dim, value_dim, BLOCK,
            precision=_precision(dtype), positive_scale=self._positive_scale, shared_kv=self._enable_gqa,
        )  # fmt: skip
        return Latest(self._first, spec, EXTENTS)

    def _traced(self) -> Mapping[str, Traced]:
        return self._variant(self._latest.device if self._latest else self._first).current().by_kind

    def _variant(self, device: torch.device) -> _TracedMods:
        found = self._on.get(device)
        if found is None:
            found = self._on[device] = _TracedMods(self._mods, device)
        return found

    def __copy__(self) -> CompiledAttention:
        new = type(self).__new__(type(self))
        new.__setstate__(self._state())
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledAttention:
        new = memo[id(self)] = type(self).__new__(type(self))
        state = self._state()
        mods: dict[str, Any] = {}
        on: dict[torch.device, dict[str, Traced]] = {device: {} for device in state["_on"]}
        for kind, mod in self._mods.items():
            traces = [traces[kind] for traces in state["_on"].values()]
            mods[kind], copied = deep_copied_traces(mod, traces, memo)
            for of_device, traced in zip(on.values(), copied, strict=True):
                of_device[kind] = traced
        positions = copy.deepcopy(self._positions, memo)
        new.__setstate__({**state, "_mods": mods, "_on": on, "_positions": positions})
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle: graphs and captured tensors in place of the mods."""
        state = self._state()
        on = {
            device: {kind: leaves(traced) for kind, traced in traces.items()}
            for device, traces in state["_on"].items()
        }
        mods = {kind: replay(on[self._first][kind], mod_name(mod)) for kind, mod in self._mods.items()}
        return {**state, "_mods": mods, "_on": on}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        given = state["_on"].items()
        self._on = {device: _TracedMods(self._mods, device, traces) for device, traces in given}

    def _state(self) -> dict[str, Any]:
        """Returns the attributes without caches of calls; of its variants only the traces."""
        on = {device: variant.current().by_kind for device, variant in [*self._on.items()]}
        return {**self.__dict__, "_on": on, "_bound": {}, "_in_graphs": {}}


def _precision(dtype: torch.dtype) -> Literal["ieee", "tf32"]:
    """Returns the precision of products; torch's switch applies to float32 only."""
    return prepared.float32_precision() if dtype is torch.float32 else "ieee"


class _Traces(NamedTuple):
    """The traces of a handle's mods on a device, by "score" and "mask"; a missing mod has no entry.

    `kinds`: the tensors that the graphs depend on, with the kinds they had. `name` stands for the score_mod
    in the keys of cached calls.
    """

    by_kind: Mapping[str, Traced]
    kinds: tuple[tuple[Tensor, object], ...]
    name: object

    @property
    def eager(self) -> bool:
        """Returns whether the graphs may depend on values of tensors."""
        return any(traced.eager for traced in self.by_kind.values())

    def known_score(self) -> prepared.Score:
        traced = self.by_kind.get("score")
        if traced is None:
            return prepared.NO_SCORE
        keys = [tensor_key(tensor) for tensor in traced.tensors]
        seen = None if traced.eager or None in keys else Seen((self.name, *keys), traced.tensors)
        return prepared.Score(lambda device: (traced, tuple(range(len(traced.tensors)))), seen)


class _Masks:
    """Caches the block masks of a traced mask_mod by lengths, while its captured tensors do not change."""

    def __init__(self, traced: Traced, device: torch.device) -> None:
        self.watched = Watched(traced.tensors)
        self._graph = traced.graph
        self._mask_mod, self._device = replay(traced), device
        self._by_sizes: dict[object, BlockMask] = {}

    def serve(self, traced: Traced) -> bool:
        """Returns whether these are the masks of this trace."""
        same = self._graph == traced.graph and [*map(id, self.watched.tensors)] == [*map(id, traced.tensors)]
        return same and self.watched.unchanged()

    def block_mask(self, query: Tensor, key: Tensor) -> BlockMask:
        """Returns the block mask for a call's lengths."""
        batch, heads, length, _ = query.shape
        reads = self._graph.reads
        sizes = (batch if "b" in reads else None, heads if "h" in reads else None, length, key.shape[2])
        recorded = tensor_kinds.recorded_by_torch()
        mask = None if recorded else self._by_sizes.get(sizes)
        if mask is None:
            mask = create_block_mask(self._mask_mod, *sizes, device=self._device, BLOCK_SIZE=BLOCK)
            # a recorded mask belongs to the active mode; during capture a mask has no tiles before a replay
            if not recorded and not is_captured(self._device):
                remember(self._by_sizes, sizes, mask, MASKS)
        return mask


class _TracedMods:
    """The mods of a handle on a device: caches their traces and block masks, and renews stale ones."""

    def __init__(
        self,
        mods: Mapping[str, ScoreFunction],
        device: torch.device,
        traced: Mapping[str, Traced] | None = None,
    ) -> None:
        """`traced`: the traces of the mods, if they exist already."""
        self._mods, self._device = mods, device
        self._masks: _Masks | None = None
        self.links: Links | None
        self.traces = self._trace(traced)
        # a copy finds them at its first call: deepcopy may not have copied its mods' objects yet
        self.links = self._find_links() if traced is None else None

    def current(self) -> _Traces:
        """Returns the traces; traces again if a mod's graph may have changed."""
        if self.links is None:
            self.links = self._find_links()
        traces = self.traces
        changed = any(tensor_key(tensor) != kind for tensor, kind in traces.kinds)
        if traces.eager or changed or not hold(self.links):
            traces = self.traces = self._trace()
            if self.links is not NEVER:  # a search may take longer than a trace
                self.links = self._find_links()
        return traces

    def masks(self, traced: Traced) -> _Masks:
        """Returns the cache of block masks for the mask_mod's captured tensors in their current state."""
        masks = self._masks
        if masks is None or not masks.serve(traced):
            masks = self._masks = _Masks(traced, self._device)
        return masks

    def _trace(self, traced: Mapping[str, Traced] | None = None) -> _Traces:
        if traced is None:
            found = {kind: trace(mod, kind, self._device) for kind, mod in self._mods.items()}
            traced = {kind: unwrapped(x) if kind == "mask" else x for kind, x in found.items()}
        read = {id(t): t for x in traced.values() for t in (*x.tensors, *x.described)}
        kinds = tuple([(tensor, tensor_key(tensor)) for tensor in read.values()])
        return _Traces(traced, kinds, object())

    def _find_links(self) -> Links:
        """Returns the links of the mods, if the traces serve more than one call."""
        by_kind = {} if self.traces.eager else self.traces.by_kind
        return links_of([(self._mods[kind], (*x.tensors, *x.described)) for kind, x in by_kind.items()])


class _KnownCall(NamedTuple):
    """A handle's cached call, with everything it needs except query, key and value.

    `captured`: the score mod's captured tensors. `watched`: the mask's captured tensors. `kinds`: as in
    `_Traces`, without `watched`.
    """

    call: autograd.PreparedCall
    mask: MaskSnapshot | None
    captured: tuple[Tensor, ...]
    kinds: tuple[tuple[Tensor, object], ...]
    links: Links
    watched: Watched | None
    latest: Latest

    def holds(self) -> bool:
        """Returns whether the mods' captured tensors are unchanged."""
        for tensor, kind in self.kinds:
            if tensor_key(tensor) != kind:
                return False
        return hold(self.links) and (self.watched is None or self.watched.unchanged())


def _bound(
    ready: autograd.PreparedCall,
    block_mask: BlockMask | None,
    traces: _Traces,
    links: Links,
    masks: _Masks | None,
    latest: Latest,
) -> _KnownCall:
    mask = ready.mask(None if block_mask is None else block_mask.snapshot())
    captured = tuple(traces.by_kind["score"].tensors[place] for place in ready.places)
    watched = masks.watched if masks else None
    twice = {id(tensor) for tensor in watched.tensors} if watched else set()
    kinds = tuple([(tensor, kind) for tensor, kind in traces.kinds if id(tensor) not in twice])
    return _KnownCall(ready, mask, captured, kinds, links, watched, latest)
