"""Registers attention with torch's autograd as two Functions: the attention and its gradient.

Both have a `setup_context`, which torch.func needs: each tensor that may carry a gradient is an argument, and
the backward reads arguments and results only. The reference backend does not use them, since torch
differentiates it.

`save` saves tensors for the backward, which raises if a user wrote to them in between. That is torch's rule.
`save_for_backward` compares the versions of a call's tensors; this module compares a
mask's tensors. With saved-tensor hooks the mask's tensors also go through `save_for_backward`: a checkpoint
computes them again, an offload returns copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flexmod import errors
from flexmod.backends import backend
from flexmod.backends.arguments import SINGLE, Forward, Problem, dtype_of_sums
from flexmod.block_mask.storage import MaskSnapshot, is_captured
from flexmod.codegen.compiler import capture_grad
from flexmod.ir.evaluate import all_on_device
from flexmod.ir.fingerprint import remember
from flexmod.ir.graph import flowing, used_captures
from flexmod.ir.trace import Traced
from flexmod.runtime import config, tensor_kinds
from flexmod.runtime.private_torch import (
    default_saved_hooks,
    in_transform,
    is_view,
    is_wrapped,
    outside_of_graphs,
    saved_without_checks,
    version_of,
)
from flexmod.runtime.tensor_kinds import tensor_key

if TYPE_CHECKING:
    from flexmod.runtime.bound import Bound, Tensors

GRADIENTS = {0: "the gradient of the output", 1: "the gradient of lse"}  # of `BackwardInputs`
BACKWARDS = 64  # that a call remembers
_in_graphs: dict[int, MaskSnapshot] = {}  # masks of -inf branches, by id


class _ForMask(NamedTuple):
    """A bound plan, and the kinds of the mask tensors that it was bound to."""

    kinds: tuple[object, ...] | None
    bound: Bound

    def serves(self, mask: MaskSnapshot | None) -> bool:
        kinds = None if mask is None else mask.kinds
        return kinds is self.kinds or kinds == self.kinds


def _has_kinds(mask: MaskSnapshot | None) -> bool:
    return mask is None or None not in mask.kinds


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A checked call without its tensors and its mask; it runs all calls that differ only in tensor values.

    `whole` puts tensors and mask into the problem. Some fields:

        track         autograd records the call
        host_numbers  a mod captures a number on the host, see `ir/evaluate.py`
        own           the mask from the score mod's -inf branches
        places        where the score mod's captured tensors stand among the tensors of the fingerprint, or
                      of an operation
        autocast      autocast is enabled
        results       the layouts of an operation's results
    """

    problem: Problem
    backend: str
    want_max: bool
    track: bool
    host_numbers: bool
    own: MaskSnapshot | None
    places: tuple[int, ...]
    autocast: bool
    results: Sequence[Any] = ()
    _forward: list[_ForMask] = field(default_factory=list)  # one, when the call has run
    _backward: dict[object, _ForMask] = field(default_factory=dict)
    _places: list[object] = field(default_factory=list)  # see `check_places`; from the first forward

    def mask(self, given: MaskSnapshot | None) -> MaskSnapshot | None:
        """Returns the mask for a call that passes `given`.

        Keeps the mask alive if a CUDA graph is being captured: each replay reads its tiles.
        """
        own = self.own
        if own is None:
            return given
        if is_captured(own.device):
            _in_graphs[id(own)] = own
        return own

    def lasts(self, device: torch.device) -> bool:
        """Returns whether later calls may reuse it.

        They may not if the mask depends on values of captured tensors, since each call builds such a mask.
        They may not while a CUDA graph is captured, since the mask has no tiles before a replay.
        """
        return self.own is None or not (self.own.traced.tensors or is_captured(device))

    @cached_property
    def facts(self) -> int:
        """A hash of everything that a backward depends on, except tensors and the mask."""
        problem = self.problem
        score = None if problem.score is None else problem.score.graph
        return hash((score, problem.scale, problem.options, problem.precision, self.backend))

    def saved_names(self, kept: int) -> list[str]:
        """Returns the users' names of the tensors that a forward saves; see `Attention`."""
        of_score = self.problem.score.graph.captured_names if self.problem.score else ()
        return ["query", "key", "value", "out", "lse", *["lse"] * kept, *of_score]

    @cached_property
    def used(self) -> tuple[bool, ...]:
        """Whether the score depends on each captured tensor."""
        if self.problem.score is None:
            return ()
        graph = self.problem.score.graph
        numbers = used_captures(graph.nodes)
        return tuple(number in numbers for number in range(len(graph.captures)))

    @cached_property
    def flowing(self) -> tuple[int, ...]:
        """The numbers of the captured tensors to which torch gives a gradient, if only of zeros."""
        return used_captures(flowing(self.problem.score.graph.result)) if self.problem.score else ()

    def whole(
        self, mask: MaskSnapshot | None, captured: Sequence[Tensor], grad_captures: Sequence[bool] = ()
    ) -> Problem:
        """Returns the problem with its mask, captured tensors, and derivatives by `grad_captures`.

        A scale of values follows the captured tensors.
        """
        problem, score = self.problem, self.problem.score
        if problem.value_scale is not None:
            *captured, value_scale = captured
            problem = replace(problem, value_scale=value_scale)
        if score is None:
            return replace(problem, mask=mask)
        numbers = tuple(number for number, want in enumerate(grad_captures) if want)
        return replace(
            problem,
            score=Traced(score.graph, tuple(captured)),
            mask=mask,
            capture_grad=capture_grad(score.graph, numbers) if numbers else None,
        )

    def forward(self, mask: MaskSnapshot | None, tensors: tuple[Tensor, ...]) -> Tensors:
        """Returns out, lse, the row maximum or None, and the tensors that the backend saves for its backward.

        `tensors` are query, key, value and the score mod's captured tensors.
        """
        mask_tensors = () if mask is None else mask.tensors
        for known in self._forward:
            if known.serves(mask):
                return known.bound.run((*tensors, *mask_tensors), mask)
        if nothing(*tensors[:2]):
            return self._of_nothing(*tensors[:3])
        tensors = tuple(map(torch.resolve_neg, tensors))
        given = (*tensors, *map(torch.resolve_neg, mask_tensors))
        problem = self.whole(mask, tensors[3:])
        bound = backend(self.backend).forward(
            problem, given, want_max=self.want_max, keep=self.track,
            meanwhile=self._backward_beforehand(mask, given),
        )  # fmt: skip
        found: Tensors = bound.run(given, mask)
        if _has_kinds(mask):
            self._forward[:] = [_ForMask(None if mask is None else mask.kinds, bound)]
        if self.track and not self._places:
            results = (t for place, t in enumerate(found) if place != 2)
            saved_ones = (*tensors[:3], *results, *tensors[3:])
            self._places[:] = [place(tensor) for tensor in saved_ones if tensor is not None]
        return found

    def _backward_beforehand(
        self, mask: MaskSnapshot | None, tensors: tuple[Tensor, ...]
    ) -> Callable[[Tensors], Callable[[], object] | None] | None:
        """Returns `Generated.backward_compiler` as a function of a forward's results, or None.

        `tensors` are the tensors of the forward and of the mask. The job assumes that only the output gets a
        gradient, with the output's strides; a backward with another gradient still finds most kernels.
        """
        count = len(tensors) - (0 if mask is None else len(mask.tensors))
        needs = tuple(tensor.requires_grad for tensor in tensors[:count])
        # one thread alone keeps the compiler's printed stages in order
        if not (self.track and any(needs)) or config.debug_level():
            return None

        def compiler(found: Tensors) -> Callable[[], object] | None:
            out, lse, _, *kept = found
            incoming = (out, None, *tensors[:3], out, lse, *kept, *tensors[3:])
            problem = self.whole(mask, tensors[3:count], needs[3:])
            return backend(self.backend).backward_compiler(problem, incoming, needs[:3], len(kept))

        return compiler

    def _of_nothing(self, query: Tensor, key: Tensor, value: Tensor) -> Tensors:
        """Returns the results without queries or without keys: each query attends to nothing."""
        shape = query.shape[:3]
        lse = query.new_full(shape, -torch.inf, dtype=dtype_of_sums(query.dtype))
        dtype = self.problem.out_dtype or query.dtype
        return (
            query.new_zeros((*shape, value.shape[3]), dtype=dtype),
            lse,
            lse.clone() if self.want_max else None,
        )

    def backward(
        self, mask: MaskSnapshot | None, needs: tuple[bool, ...], kept: int, given: tuple[Any, ...]
    ) -> Tensors:
        """Returns gradients of query, key, value and each captured tensor, None where `needs` is False.

        `given`: a `BackwardInputs` in order, with `kept` tensors of the forward. Raises SavedTensorError.
        """
        if nothing(*given[2:4]):
            of = (*given[2:5], *given[SINGLE + kept :])
            return tuple(torch.zeros_like(x) if need else None for x, need in zip(of, needs, strict=True))
        tensors: Any = [None if x is None else x.resolve_neg() for x in given]
        rows = slice(SINGLE - 1, SINGLE + kept)  # lse and `kept`; saved-tensor hooks may change their strides
        tensors[rows] = [x.contiguous() for x in tensors[rows]]
        facts = [None if tensor is None else tensor_key(tensor) or object() for tensor in tensors]
        case = (needs, kept, torch.are_deterministic_algorithms_enabled(), *facts)
        known = self._backward.get(case)
        mask_tensors = () if mask is None else mask.tensors
        if known is None or not known.serves(mask):
            _check_readable(tensors)
            if self._places:
                check_places(self.saved_names(kept), self._places, tensors[2:])
            problem = self.whole(mask, tensors[SINGLE + kept :], needs[3:])
            tensors = (*tensors, *map(torch.resolve_neg, mask_tensors))
            bound = backend(self.backend).backward(problem, tensors, needs[:3], kept)
            if _has_kinds(mask):
                kinds = None if mask is None else mask.kinds
                remember(self._backward, case, _ForMask(kinds, bound), BACKWARDS)
        else:
            tensors, bound = (*tensors, *mask_tensors), known.bound
        found = bound.run(tensors, mask)
        captured = given[SINGLE + kept :]
        asked = zip(found[3:] or (None,) * len(captured), needs[3:], strict=True)
        of_captured = [grad if need else None for grad, need in asked]
        for number in self.flowing:  # a derivative that is 0 everywhere has no term
            if needs[3 + number] and of_captured[number] is None:
                of_captured[number] = torch.zeros_like(captured[number])
        return (*found[:3], *of_captured)


def _check_readable(tensors: Tensors) -> None:
    """Checks the tensors of a `BackwardInputs`, in order. Raises TensorKindError, FreedStorageError."""
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            name = GRADIENTS.get(number, "a tensor saved for the backward")
            tensor_kinds.check_readable({name: tensor})


def nothing(query: Tensor | None, key: Tensor | None) -> bool:
    """Returns whether a call has no scores at all."""
    return query is not None and key is not None and not (query.numel() and key.numel())


def run(
    call: PreparedCall,
    mask: MaskSnapshot | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    plain: bool,
) -> Forward:
    """Runs a call. `plain`: no tensor is a torch.func wrapper, and none was unwrapped."""
    if call.host_numbers:  # once, so that the backward uses the values of its forward
        captured = all_on_device(captured, query.device)
        mask = None if mask is None else mask.with_numbers_on(query.device)
    wrapped = not plain and in_transform() and any(map(is_wrapped, (query, key, value, *captured)))
    if call.backend == "reference" and not nothing(query, key) or not (call.track or wrapped):
        out, lse, largest, *_ = call.forward(mask, (query, key, value, *captured))
        return Forward(out, lse, largest)  # type: ignore[arg-type]
    captured = [t if used else t.detach() for t, used in zip(captured, call.used, strict=True)]
    # the rest of Function.apply serves torch.func only
    apply = super(torch.autograd.Function, Attention).apply if plain else Attention.apply
    return Forward(*apply(call, mask, query, key, value, *captured)[:3])


def _no_view(x: Tensor) -> Tensor:
    """Returns the same memory as a tensor of its own. Autograd lets nobody write to a function's views."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class Attention(torch.autograd.Function):
    """The attention as a node of autograd: apply(call, mask, query, key, value, *captured)."""

    @staticmethod
    def forward(*arguments: Any) -> Tensors:
        call, mask, *tensors = arguments
        result: Tensors = call.forward(mask, tuple(tensors))
        return tuple([_no_view(x) if x is not None and is_view(x) else x for x in result])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, mask, query, key, value, *captured = inputs
        out, lse, max_scores, *kept = output
        ctx.call, ctx.kept = call, len(kept)
        # autograd cannot save a tensor of inference mode, which has no version counter: save a copy
        captured = [t.clone() if t.is_inference() else t for t in captured]
        save(ctx, call.facts, mask, (query, key, value, out, lse, *kept, *captured))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (max_scores, *kept) if t is not None))

    @staticmethod
    @outside_of_graphs  # TorchDynamo compiles what runs inside of a compiled function, a backward too
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> Tensors:
        mask, tensors = restored(ctx, lambda: ctx.call.saved_names(ctx.kept))
        if grad_out is None:  # only the lse was used
            out = tensors[3]
            grad_out = out.new_zeros(()).expand_as(out)
        arguments = (ctx.call, mask, ctx.needs_input_grad[2:], ctx.kept, grad_out, grad_lse, *tensors)
        again = torch.is_grad_enabled() or in_transform() or tensor_kinds.is_batched(grad_out)
        return (None, None, *(Gradient.apply(*arguments) if again else Gradient.forward(*arguments)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise errors.ForwardModeError(name="query, key, value or a captured tensor")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise errors.VmapError(name="query, key, value or a captured tensor")


class Gradient(torch.autograd.Function):
    """The backward of Attention as a node of autograd. Differentiating it raises DoubleBackwardError.

    apply(call, mask, needs, number of kept tensors, then a `BackwardInputs` in order)
    """

    @staticmethod
    def forward(*arguments: Any) -> Tensors:
        call, mask, needs, kept, grad_out, *others = arguments
        if tensor_kinds.is_batched(grad_out):
            raise errors.VmapError(name="the gradient of the output")
        with tensor_kinds.no_autocast(grad_out.device.type):
            return call.backward(mask, needs, kept, (grad_out, *others))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.backend = inputs[0].backend

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise errors.DoubleBackwardError(backend=ctx.backend.upper())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise errors.ForwardModeError(name="the gradient of the output")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise errors.VmapError(name="the gradient of the output")


# torch asks for the signature at every call; a stored one takes a tenth of the time.
for function in (Attention, Gradient):
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]


WRITTEN = "modified by an inplace operation"  # part of torch's message


def save(ctx: Any, call: int, mask: MaskSnapshot | None, tensors: Sequence[Tensor]) -> None:
    """Saves tensors and a mask; `call` is a hash of everything else that the backward depends on."""
    ctx.versions = [*map(version_of, tensors)]
    if mask is not None:
        mask = _copied(mask) if mask.in_inference_mode else mask
        ctx.states = mask.states()
    ctx.mask = mask
    ctx.hooked = default_saved_hooks()
    if not ctx.hooked:
        ctx.save_for_backward(*tensors)
        return
    ctx.facts = (call, 0 if mask is None else mask.facts)
    versions = () if mask is None else map(version_of, mask.tensors)
    extra = () if mask is None else mask.tensors
    facts = torch.tensor([*ctx.facts, *versions], dtype=torch.int64, device="cpu")
    ctx.place = (place(facts),)
    ctx.save_for_backward(*tensors, facts, *extra)


def restored(ctx: Any, names: Callable[[], Sequence[str]]) -> tuple[MaskSnapshot | None, list[Tensor]]:
    """Returns the saved mask and tensors. `names` returns the users' names of the tensors.

    Raises ModifiedBeforeBackwardError, RecomputedError, SavedTensorError.
    """
    mask = ctx.mask
    if mask is not None and not ctx.hooked:
        _check_states(mask, ctx.states, mask.states())
    tensors = unpacked(ctx, names)
    if not ctx.hooked:
        return mask, tensors
    count = 0 if mask is None else len(mask.tensors)
    end = len(tensors) - count - 1
    check_places(("a tensor of integers",), ctx.place, tensors[end : end + 1])
    of_call, of_mask, *versions = tensors[end].tolist()
    _check_facts(ctx.facts, (of_call, of_mask))
    return None if mask is None else _restored_mask(mask, tensors[end + 1 :], versions), tensors[:end]


def unpacked(ctx: Any, names: Callable[[], Sequence[str]]) -> list[Tensor]:
    """Returns ctx.saved_tensors; an error names a tensor that changed its version in `ctx.versions`."""
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if WRITTEN not in str(error):
            raise
        for name, saved, version in zip(names(), saved_without_checks(ctx), ctx.versions, strict=False):
            if version_of(saved) != version:
                raise _written(name) from error
        raise


def check_places(names: Sequence[str], then: Sequence[object], tensors: Sequence[Tensor]) -> None:
    """Raises SavedTensorError if a saved tensor changed its shape, dtype or device since the forward."""
    for name, before, tensor in zip(names, then, tensors, strict=True):
        if place(tensor) != before:
            raise errors.SavedTensorError(name=name, before=_said(before), now=_said(place(tensor)))


def place(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(facts: Any) -> str:
    shape, dtype, device = facts
    return f"{tuple(shape)} of {dtype} on {device}"


def _copied(mask: MaskSnapshot) -> MaskSnapshot:
    """Copies the mask's writable tensors of inference mode, since they have no version counter."""
    count = len(mask.tensors) - len(mask.writable)
    copies = [tensor.clone() if tensor.is_inference() else tensor for tensor in mask.writable]
    return mask.with_tensors((*mask.tensors[:count], *copies))


def _check_states(mask: MaskSnapshot, then: Sequence[object], now: Sequence[object]) -> None:
    if then != now:
        for name, before, after in zip(mask.names, then, now, strict=True):
            if before != after:
                raise _written(name)


def _check_facts(then: tuple[int, int], now: Sequence[int]) -> None:
    for what, before, after in zip(("score_mod, scale or options", "block_mask"), then, now, strict=False):
        if before != after:
            raise errors.RecomputedError(what=what)


def _restored_mask(mask: MaskSnapshot, found: Sequence[Tensor], versions: Sequence[int]) -> MaskSnapshot:
    """Returns the mask with the tensors that hooks returned; `versions` are their saved versions."""
    check_places(mask.names, [place(tensor) for tensor in mask.tensors], found)
    for name, tensor, own, version in zip(mask.names, found, mask.tensors, versions, strict=True):
        same_memory = tensor.data_ptr() == own.data_ptr() and tensor.numel() > 0
        if same_memory and version_of(own) != version:
            raise _written(name)
    if all(tensor is own for tensor, own in zip(found, mask.tensors, strict=True)):
        return mask
    pairs = zip(found, mask.tensors, strict=True)  # kernels take no strides of the tiles
    return mask.with_tensors([x.contiguous() if own.is_contiguous() else x for x, own in pairs])


def _written(name: str) -> errors.ModifiedBeforeBackwardError:
    bare = name.split(",")[0]
    return errors.ModifiedBeforeBackwardError(name=name, bare="tensor" if " " in bare else bare)
