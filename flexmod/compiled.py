"""flexmod.compile: one attention variant as a callable, whose mods are traced beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from flexmod import autograd, calls, errors, library, tensor_kinds
from flexmod.attention import AuxOutput, AuxRequest, ScoreMod, by_override, results_of
from flexmod.backends.interface import Forward
from flexmod.block_mask.build import create_block_mask
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.held import version
from flexmod.block_mask.launched import launched_tensors
from flexmod.block_mask.mask_mod import MaskMod, trace_mask
from flexmod.codegen.spec import KernelSpec
from flexmod.ir.evaluate import replay
from flexmod.ir.fingerprint import Seen, tensor_key
from flexmod.ir.trace import Traced, trace
from flexmod.ir.traces import Known, remember
from flexmod.kernel_options import parse
from flexmod.layouts import LayoutName, layout_of
from flexmod.shown import CALL, Latest, Shown
from flexmod.variant import EXTENTS, spec_for

MASKS = 64  # that a handle remembers, by lengths
BLOCK = (128, 128)  # of these masks


def compile(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    layout: LayoutName = "bhsd",
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
) -> CompiledAttention:
    """A callable that attends as flex_attention does with these arguments, at less cost a call.

    The mods are traced here, and not again on the same device: a number that one captures stays what it is
    now, a captured tensor stays this very tensor, of whatever values it holds when it is called. From
    `mask_mod` a block mask is built for each pair of lengths, and again after a captured tensor was written
    to. Making a handle renders and compiles nothing.

    dtype, head_dim, value_dim: of query, key and value; of query and key; of value, head_dim if None. They
    are for what a handle shows and saves, not for its calls: until the first call it shows what one with
    these would run, on this machine's GPU if it has one, and with `enable_gqa` where heads share keys. A
    call may come with others, and from then on the latest call decides.

    The other arguments are those of flex_attention and create_block_mask. Raises what tracing raises,
    LayoutError, UnknownOption or OptionValueError, and LibraryArgumentError where of dtype and head_dim one
    is given alone, value_dim is given without them, or one of the three cannot be.

    Example:

        attend = compile(mods.softcap(50.0), masks.causal(), dtype=torch.bfloat16, head_dim=64)
        print(attend.source["forward"])
        out = attend(query, key, value)
    """
    given = (score_mod, mask_mod, scale, enable_gqa, kernel_options, layout)
    return CompiledAttention(*given, dtype, head_dim, value_dim)


class CompiledAttention(Shown):
    """One variant of attention, its mods traced beforehand, as a function of tensors; `compile` makes it."""

    __name__ = "CompiledAttention"  # a __torch_function__ may ask for that of the function it sees

    def __init__(
        self,
        score_mod: ScoreMod | None,
        mask_mod: MaskMod | None,
        scale: float | None,
        enable_gqa: bool,
        kernel_options: Mapping[str, Any] | None,
        layout: LayoutName,
        dtype: torch.dtype | None,
        head_dim: int | None,
        value_dim: int | None,
    ) -> None:
        given = {"score": score_mod, "mask": mask_mod}
        self._mods = {kind: mod for kind, mod in given.items() if mod is not None}
        self._scale, self._enable_gqa, self._options = scale, enable_gqa, parse(kernel_options)
        self._layout = layout_of(layout)
        self._on: dict[torch.device, _Variant] = {}
        self._bound: dict[object, _Bound] = {}
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._first = torch.empty(0, device=accelerator).device
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
        facts = None if block_mask is not None else calls.kinds(query, key, value, self._options)
        bound = self._bound.get((facts, want_max))
        if bound is not None and bound.holds():
            self._latest = bound.latest
            tensors = (query, key, value, bound.captured)
            return autograd.run(bound.call, bound.mask, *tensors, plain=True, beside=bound.beside)
        score = calls.NO_SCORE
        if isinstance(query, Tensor) and isinstance(key, Tensor):  # or else checks say what they are
            variant = self._variant(query.device)
            score = variant.score()
            if block_mask is None and variant.mask is not None and query.dim() == key.dim() == 4:
                block_mask = variant.block_mask(query, key)
        asked = calls.Asked(score, self._scale, self._enable_gqa, self._options, want_max)
        result = calls.attend(query, key, value, block_mask, asked, library.dispatch)
        self._latest = self._latest_of(query, key, value)
        ready = None if facts is None else calls.known(query, key, value, block_mask, asked)
        if ready is not None and not ready.autocast:
            remember(self._bound, (facts, want_max), _bound(ready, block_mask, variant, self._latest), MASKS)
        return result

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
        variant = self._variant(self._latest.device if self._latest else self._first)
        given = {"score": variant.traced, "mask": variant.mask}
        return {kind: traced for kind, traced in given.items() if traced is not None}

    def _variant(self, device: torch.device) -> _Variant:
        found = self._on.get(device)
        if found is None:
            found = self._on[device] = _Variant(self._mods.get("score"), self._mods.get("mask"), device)
        return found


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


class _Bound(NamedTuple):
    """A call of a handle that is known: all that it needs but for query, key and value.

    `captured`: what the score mod captures. `beside`: what is launched of the mask. `watched`: what the mods
    capture, each as it was then; of a mask's, the version too.
    """

    call: autograd.Call
    mask: BlockMask | None
    captured: tuple[Tensor, ...]
    beside: tuple[Tensor, ...]
    watched: tuple[tuple[Tensor, object, float | None], ...]
    latest: Latest

    def holds(self) -> bool:
        """Is what the mods capture as it was?"""
        for tensor, kind, then in self.watched:
            if tensor_key(tensor) != kind or (then is not None and version(tensor) != then):
                return False
        return True


def _bound(ready: calls.Ready, block_mask: BlockMask | None, variant: _Variant, latest: Latest) -> _Bound:
    of_score = variant.traced.tensors if variant.traced else ()
    of_mask = variant.mask.tensors if variant.mask else ()
    watched: list[tuple[Tensor, object, float | None]] = [(t, tensor_key(t), None) for t in of_score]
    watched += [(t, tensor_key(t), version(t)) for t in of_mask]
    mask = block_mask if ready.mask is None else ready.mask
    captured = tuple(of_score[place] for place in ready.places)
    return _Bound(ready.call, mask, captured, launched_tensors(mask), tuple(watched), latest)


class _Variant:
    """The mods of a handle, traced for a device."""

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, device: torch.device) -> None:
        self._device = device
        self.traced = None if score_mod is None else trace(score_mod, "score", device)
        self.mask = None if mask_mod is None else trace_mask(mask_mod, device)
        self._name = object()  # stands for the score_mod where calls are known by what they see
        self._masks: dict[object, tuple[BlockMask, list[float]]] = {}

    def score(self) -> calls.Score:
        if self.traced is None:
            return calls.NO_SCORE
        tensors = self.traced.tensors
        keys = [tensor_key(tensor) for tensor in tensors]
        return calls.Score(self._known, None if None in keys else Seen((self._name, *keys), tensors))

    def _known(self, device: torch.device) -> tuple[Traced, Known]:
        assert self.traced is not None
        return self.traced, Known(self.traced.graph, tuple(range(len(self.traced.tensors))))

    def block_mask(self, query: Tensor, key: Tensor) -> BlockMask:
        """Of the mask_mod, for the lengths of a call; as captured tensors are at the moment."""
        traced = self.mask
        assert traced is not None
        batch, heads, length, _ = query.shape
        reads = traced.graph.reads
        sizes = (batch if "b" in reads else None, heads if "h" in reads else None, length, key.shape[2])
        versions = [version(tensor) for tensor in traced.tensors]
        if tensor_kinds.recorded_by_torch():  # a mask of the mode that is active, for this call
            return create_block_mask(replay(traced), *sizes, device=self._device, BLOCK_SIZE=BLOCK)
        mask, built = self._masks.get(sizes, (None, ()))
        # the version of a tensor of inference mode is not equal to itself
        if mask is None or any(now != then for now, then in zip(versions, built, strict=True)):
            mask = create_block_mask(replay(traced), *sizes, device=self._device, BLOCK_SIZE=BLOCK)
            remember(self._masks, sizes, (mask, versions), MASKS)
        return mask
