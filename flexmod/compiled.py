"""flexmod.compile: one attention variant as a callable, whose mods are traced beforehand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from flexmod import autograd, calls, errors, library, tensor_kinds
from flexmod.attention import AuxOutput, AuxRequest, ScoreFunction, by_override, results_of
from flexmod.backends.interface import Forward
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.launched import MaskSnapshot, is_captured
from flexmod.block_mask.mask_mod import MaskMod, unwrapped
from flexmod.codegen.spec import KernelSpec
from flexmod.inspection import CALL, Inspection, Latest
from flexmod.ir.copies import deep_copied_traces
from flexmod.ir.fingerprint import Seen, tensor_key
from flexmod.ir.offsets import OffsetLike, Positions, positions_in, positions_of, stated
from flexmod.ir.replay import leaves, replay
from flexmod.ir.source import mod_name
from flexmod.ir.trace import Traced, trace
from flexmod.ir.traces import Known, remember
from flexmod.ir.watched import Links, Watched, hold, links_of
from flexmod.kernel_options import parse
from flexmod.layouts import LayoutName, layout_of
from flexmod.variant import EXTENTS, spec_for

MASKS = 64  # that a handle remembers, by lengths
BLOCK = (128, 128)  # of these masks


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
    """A callable that attends as flex_attention does with these arguments, at less cost a call.

    The mods are traced here, once for each device: a number that one captures stays what it is now, a tensor
    that a function captures stays this very tensor, of whatever values it holds when the handle is
    called. A tensor that is assigned to an attribute of an object (`module.window = other`,
    `load_state_dict(assign=True)`) is seen: the mods are traced again, as after a captured tensor became
    another in shape, strides, dtype or device. A mod whose graph depends on values (`t.item()`, `t[0]`,
    `if t > 3`) is traced at each call. From `mask_mod` a block mask is built for each pair of
    lengths, and again after a captured tensor was written to or got other memory (`t.data = other`,
    `torch.utils.swap_tensors`). Writes that torch does not count are not seen: through `t.data` or
    `t.numpy()`, or by a kernel of one's own. Making a handle renders and compiles nothing.

    dtype, head_dim, value_dim: of query, key and value; of query and key; of value, head_dim if None. They
    are for what a handle shows and saves, not for its calls: until the first call it shows what one with
    these would run, on this machine's GPU if it has one, and with `enable_gqa` where heads share keys. A
    call may come with others, and from then on the latest call decides.

    q_offset, kv_offset: as in flex_attention, for both mods. A number stays what it is now; for positions
    that move with each call give a tensor, and write to it. A call with a block mask has the offsets of that,
    where the handle has none.

    The other arguments are those of flex_attention and create_block_mask. Raises what tracing raises,
    LayoutError, UnknownOption or OptionValueError, OffsetTypeError, OffsetValueError or OffsetShapeError, and
    LibraryArgumentError where of dtype and head_dim one is given alone, value_dim is given without them, or
    one of the three cannot be.

    Example:

        attend = compile(mods.softcap(50.0), masks.causal(), dtype=torch.bfloat16, head_dim=64)
        print(attend.source["forward"])
        out = attend(query, key, value)
    """
    given = (score_mod, mask_mod, scale, enable_gqa, kernel_options, layout)
    return CompiledAttention(*given, dtype, head_dim, value_dim, stated(q_offset, kv_offset))


class CompiledAttention(Inspection):
    """One variant of attention, its mods traced beforehand, as a function of tensors; `compile` makes it.

    A copy attends as this handle does: its mods are what they were when they were traced. copy.deepcopy
    copies captured tensors where it copies the mod (a method, a module, a partial, an object that is called)
    and shares them where the mod is a function. A pickle holds graphs and captured tensors in place of the
    mods; torch.load reads one with weights_only=False. What a handle remembers of its calls is not copied.
    """

    __name__ = "CompiledAttention"  # a __torch_function__ may ask for that of the function it sees

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
        self._scale, self._enable_gqa, self._options = scale, enable_gqa, parse(kernel_options)
        self._layout = layout_of(layout)
        self._on: dict[torch.device, _TracedMods] = {}
        self._bound: dict[object, _KnownCall] = {}
        self._in_graphs: dict[int, Any] = {}  # masks that CUDA graphs read at each replay, by id
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._first = torch.empty(0, device=accelerator or "cpu").device
        self._variant(self._first)
        self._latest = self._described(dtype, head_dim, value_dim)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_mask: BlockMask | None = None,
        return_lse: bool = False,
        *,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
        """As flex_attention, with its shapes, results and errors.

        A `block_mask` takes the place of the one that the mask_mod makes.
        """
        compiling, tensors = torch.compiler.is_compiling(), (query, key, value)
        if not compiling and has_torch_function(tensors) and tensor_kinds.overridden(tensors):
            return by_override(self, tensors, block_mask, return_lse, return_aux=return_aux)
        tensor_kinds.refuse_nested(query, key, value)
        # inside torch.compile it runs as it does outside: the graph breaks around it
        attend = torch.compiler.disable(self._attend) if compiling else self._attend
        return results_of(attend, (query, key, value, block_mask), return_lse, return_aux, self._layout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any, want_max: bool) -> Forward:
        if self._positions is not None:
            self._positions.check_values()
        facts = None if block_mask is not None else calls.kinds(query, key, value, self._options)
        bound = self._bound.get((facts, want_max))
        if bound is not None:
            if bound.holds():
                self._latest = bound.latest
                if bound.mask is not None and is_captured(query.device):
                    self._in_graphs[id(bound.mask)] = bound.mask
                return autograd.run(bound.call, bound.mask, query, key, value, bound.captured, plain=True)
            self._bound = {}  # lets go of masks that are stale
        score, masks = calls.NO_SCORE, None
        if isinstance(query, Tensor) and isinstance(key, Tensor):  # or else checks say what they are
            variant = self._variant(query.device)
            traces = variant.current()
            score = self._score(traces, block_mask)
            if block_mask is None and traces.mask is not None and query.dim() == key.dim() == 4:
                masks = variant.masks(traces.mask)
                block_mask = masks.block_mask(query, key)
                if is_captured(query.device):
                    self._in_graphs[id(block_mask)] = block_mask
        asked = calls.CallOptions(score, self._scale, self._enable_gqa, self._options, want_max)
        result = calls.attend(query, key, value, block_mask, asked, library.dispatch)
        self._latest = self._latest_of(query, key, value)
        ready = None if facts is None else calls.known(query, key, value, block_mask, asked)
        lasting = not (traces.eager or is_captured(query.device))
        if ready is not None and not ready.autocast and lasting:
            bound = _bound(ready, block_mask, variant, masks, self._latest)
            remember(self._bound, (facts, want_max), bound, MASKS)
        return result

    def _score(self, traces: _Traces, block_mask: Any) -> calls.Score:
        """The score mod at the positions of the call's mask. Raises OffsetMismatchError."""
        of_mask = positions_in(block_mask)
        if self._positions is not None and block_mask is not None:
            self._positions.check_agrees(of_mask, "the handle")
        elif of_mask is not None:
            of_mask.check_values()
            if traces.score is not None:
                return calls.score_of(of_mask.score(replay(traces.score)))
        return traces.known_score()

    def _latest_of(self, query: Tensor, key: Tensor, value: Tensor) -> Latest:
        of_query, of_key, of_value = calls.dtypes_under_autocast(query, key, value)
        spec = KernelSpec(
            of_query, of_key, of_value, query.shape[3], value.shape[3], mask_block=BLOCK,
            precision=_precision(of_query),
            positive_scale=self._positive_scale,
            shared_kv=query.shape[:2] != key.shape[:2], backward=True,
        )  # fmt: skip
        batch, heads, length, _ = query.shape
        return Latest(query.device, spec, (batch, heads, length, key.shape[2]))

    def _described(self, dtype: Any, head_dim: Any, value_dim: Any) -> Latest | None:
        """What stands for the latest call until there is one."""
        if dtype is head_dim is value_dim is None:
            return None
        _check_described(dtype, head_dim, value_dim)
        spec = spec_for(
            dtype, head_dim, value_dim, BLOCK,
            precision=_precision(dtype), positive_scale=self._positive_scale, shared_kv=self._enable_gqa,
        )  # fmt: skip
        return Latest(self._first, spec, EXTENTS)

    def _traced(self) -> dict[str, Traced]:
        return self._variant(self._latest.device if self._latest else self._first).traces.by_kind()

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
        """What is pickled: in place of a mod its graph, as it was traced, and what it captures."""
        state = self._state()
        on = {
            device: {kind: leaves(traced) for kind, traced in traces.items()}
            for device, traces in state["_on"].items()
        }
        mods = {kind: replay(on[self._first][kind], mod_name(mod)) for kind, mod in self._mods.items()}
        return {**state, "_mods": mods, "_on": on}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_positions": None, **state})
        given = state["_on"].items()
        self._on = {device: _TracedMods(self._mods, device, traces) for device, traces in given}

    def _state(self) -> dict[str, Any]:
        """Its attributes. Nothing of its calls: of its variants the traces alone."""
        on = {device: variant.traces.by_kind() for device, variant in [*self._on.items()]}
        return {**self.__dict__, "_on": on, "_bound": {}, "_in_graphs": {}}


def _precision(dtype: torch.dtype) -> Literal["ieee", "tf32"]:
    """torch's switch is for float32 alone."""
    return calls.float32_precision() if dtype is torch.float32 else "ieee"


def _check_described(dtype: Any, head_dim: Any, value_dim: Any) -> None:
    """A dtype and a head_dim, each of them possible; value_dim may be None."""
    value_dim = head_dim if value_dim is None else value_dim
    size = "a whole number above 0, with dtype beside it"
    for name, value, right, rule in (
        ("dtype", dtype, isinstance(dtype, torch.dtype), "a torch.dtype, with head_dim beside it"),
        ("head_dim", head_dim, type(head_dim) is int and head_dim > 0, size),
        ("value_dim", value_dim, type(value_dim) is int and value_dim > 0, size),
    ):
        if not right:
            advice = f"write {CALL}, or neither"
            raise errors.LibraryArgumentError(
                function="compile", name=name, value=repr(value), rule=rule, advice=advice
            )


class _Traces(NamedTuple):
    """The mods of a handle as they were traced on a device.

    `kinds`: the tensors that the graphs depend on, and what they were. `name` stands for the score_mod where
    calls are known by what they see.
    """

    score: Traced | None
    mask: Traced | None
    kinds: tuple[tuple[Tensor, object], ...]
    name: object

    def by_kind(self) -> dict[str, Traced]:
        """The traces that there are, "score" and "mask"."""
        given = {"score": self.score, "mask": self.mask}
        return {kind: traced for kind, traced in given.items() if traced is not None}

    @property
    def eager(self) -> bool:
        """May the graphs depend on values?"""
        return any(traced is not None and traced.eager for traced in (self.score, self.mask))

    def known_score(self) -> calls.Score:
        traced = self.score
        if traced is None:
            return calls.NO_SCORE
        keys = [tensor_key(tensor) for tensor in traced.tensors]
        seen = None if traced.eager or None in keys else Seen((self.name, *keys), traced.tensors)
        known = Known(traced.graph, tuple(range(len(traced.tensors))))
        return calls.Score(lambda device: (traced, known), seen)


class _Masks:
    """The block masks of a traced mask_mod, by lengths, while what it captures stays as it is."""

    def __init__(self, traced: Traced, device: torch.device) -> None:
        self.watched = Watched(traced.tensors)
        self._graph = traced.graph
        self._mask_mod, self._device = replay(traced), device
        self._by_sizes: dict[object, BlockMask] = {}

    def serve(self, traced: Traced) -> bool:
        """Are they the masks of this trace?"""
        same = self._graph == traced.graph and [*map(id, self.watched.tensors)] == [*map(id, traced.tensors)]
        return same and self.watched.unchanged()

    def block_mask(self, query: Tensor, key: Tensor) -> BlockMask:
        """That of a call's lengths."""
        batch, heads, length, _ = query.shape
        reads = self._graph.reads
        sizes = (batch if "b" in reads else None, heads if "h" in reads else None, length, key.shape[2])
        if tensor_kinds.recorded_by_torch():  # a mask of the mode that is active, for this call
            return create_block_mask(self._mask_mod, *sizes, device=self._device, BLOCK_SIZE=BLOCK)
        mask = self._by_sizes.get(sizes)
        if mask is None:
            mask = create_block_mask(self._mask_mod, *sizes, device=self._device, BLOCK_SIZE=BLOCK)
            if not is_captured(self._device):  # or else its tiles are there after a replay alone
                remember(self._by_sizes, sizes, mask, MASKS)
        return mask


class _TracedMods:
    """The mods of a handle on a device: their traces and the block masks, as long as these hold."""

    def __init__(
        self,
        mods: Mapping[str, ScoreFunction],
        device: torch.device,
        traced: Mapping[str, Traced] | None = None,
    ) -> None:
        """`traced`: the traces of the mods, where they are there already."""
        self._mods, self._device = mods, device
        self._masks: _Masks | None = None
        self.links: Links | None
        self.traces = self._traces_of(self._trace() if traced is None else traced)
        # of a copy not before its first call: the objects that its mods reach may not be copied yet
        self.links = self._find_links() if traced is None else None

    def current(self) -> _Traces:
        """The traces, made again where a mod may have another graph by now."""
        traces = self.traces
        changed = any(tensor_key(tensor) != kind for tensor, kind in traces.kinds)
        if traces.eager or changed or not hold(self.links or ()):
            traces = self.traces = self._traces_of(self._trace())
            self.links = None
        if self.links is None:
            self.links = self._find_links()
        return traces

    def masks(self, traced: Traced) -> _Masks:
        """The block masks of the traced mask_mod, of what it captures as it is now."""
        masks = self._masks
        if masks is None or not masks.serve(traced):
            masks = self._masks = _Masks(traced, self._device)
        return masks

    def _trace(self) -> dict[str, Traced]:
        found = {kind: trace(mod, kind, self._device) for kind, mod in self._mods.items()}
        return {kind: unwrapped(traced) if kind == "mask" else traced for kind, traced in found.items()}

    @staticmethod
    def _traces_of(traced: Mapping[str, Traced]) -> _Traces:
        read = {id(t): t for x in traced.values() for t in (*x.tensors, *x.described)}
        kinds = tuple([(tensor, tensor_key(tensor)) for tensor in read.values()])
        return _Traces(traced.get("score"), traced.get("mask"), kinds, object())

    def _find_links(self) -> Links:
        """Of traces that hold for more than one call."""
        by_kind = {} if self.traces.eager else self.traces.by_kind()
        return links_of([(self._mods[kind], (*x.tensors, *x.described)) for kind, x in by_kind.items()])


class _KnownCall(NamedTuple):
    """A call of a handle that is known: all that it needs but for query, key and value.

    `captured`: what the score mod captures. `kinds`: as in `_Traces`, without `watched`, the captures of the
    mask.
    """

    call: autograd.PreparedCall
    mask: MaskSnapshot | None
    captured: tuple[Tensor, ...]
    kinds: tuple[tuple[Tensor, object], ...]
    links: Links
    watched: Watched | None
    latest: Latest

    def holds(self) -> bool:
        """Is what the mods capture as it was?"""
        for tensor, kind in self.kinds:
            if tensor_key(tensor) != kind:
                return False
        return hold(self.links) and (self.watched is None or self.watched.unchanged())


def _bound(
    ready: calls.CheckedCall,
    block_mask: BlockMask | None,
    variant: _TracedMods,
    masks: _Masks | None,
    latest: Latest,
) -> _KnownCall:
    traces = variant.traces
    of_score = traces.score.tensors if traces.score else ()
    mask = ready.mask(None if block_mask is None else block_mask.snapshot())
    captured = tuple(of_score[place] for place in ready.places)
    watched = masks.watched if masks else None
    twice = {id(tensor) for tensor in watched.tensors} if watched else set()
    kinds = tuple([(tensor, kind) for tensor, kind in traces.kinds if id(tensor) not in twice])
    return _KnownCall(ready.call, mask, captured, kinds, variant.links or (), watched, latest)
