"""The generated kernels as a backend: a problem's mods are compiled, and its calls get plans.

By `hopper.py` where the kernels made for that chip can run, else by `triton.py`, which runs them all. Two
backends: ON_GPU, and INTERPRETED, the very same kernels in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexmod import config
from flexmod.backends import hopper, triton
from flexmod.backends.arguments import Operands, operands
from flexmod.backends.captured import gradients
from flexmod.backends.interface import Problem
from flexmod.backends.triton import Found, Incoming, Tiles
from flexmod.codegen.hopper import HopperKernels, Shape, Way, hopper_kernels, template, why_portable
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelName, KernelSpec, Tile, option
from flexmod.codegen.watch import Watch
from flexmod.compiler import Mod, capture_terms, compile_mod, kernels_for
from flexmod.errors import HopperTemplateError
from flexmod.ir.graph import Graph
from flexmod.ir.reductions import Term
from flexmod.plan import Launch, Place, Plan, Writer, contiguous, extents_of, named
from flexmod.runtime import launch, tuned
from flexmod.runtime.bound import Bound, sample
from flexmod.runtime.target import family_of, target_of

Tensors = Sequence[Tensor | None]
Results = tuple[Place | None, ...]
NO_TILES: Mapping[KernelName, Tile] = {}


@dataclass(frozen=True)
class Generated:
    """Makes the plans of calls, bound to the kinds of their tensors."""

    interpreted: bool

    def forward(self, problem: Problem, tensors: Tensors, *, want_max: bool, keep: bool) -> Bound:
        """Bound to query, key, value, what the score_mod captures, and the tensors of the mask.

        Its results are those of `Forward`, and with `keep` what a backward takes as `kept`.

        Raises:
            NoTileFits, RoundedProductsError, MisaddressedProductsError: see `launch.settle`.
            BlockSizeError, OptionValueError: see `ladder`.
            BlockMaskPartsError: see `mask_arguments`.
        """
        compiled = self._compile(problem, tensors, backward=False)
        kernels, wants = compiled.kernels, {"want_max": want_max, "keep": keep}

        def write_own(writer: Writer, call: Operands, shape: Shape, tiles: Tiles) -> Results:
            return hopper.forward(writer, hopper_kernels(kernels), call, shape, **wants)

        def write(writer: Writer, call: Operands, tiles: Tiles) -> Results:
            return triton.forward(writer, kernels, call, tiles, **wants)

        if self._for_hopper("forward", compiled):
            try:
                return compiled.settled_shape(hopper_kernels(kernels), "forward", write_own)
            except hopper.NoShape as none:
                _portable("forward", kernels, str(none))
        return compiled.settled(kernels, write)

    def backward(
        self, problem: Problem, tensors: Tensors, needs: tuple[bool, bool, bool], kept: int
    ) -> Bound:
        """Bound to grad_out, grad_lse or None, query, key, value, out, lse, what the forward kept, what the
        score_mod captures, and the tensors of the mask.

        `kept` says how many tensors the forward kept. Its results are those of `Gradients`, one after the
        other. Raises as `forward`.
        """
        compiled = self._compile(problem, tensors, backward=True, kept=kept)
        deterministic = torch.are_deterministic_algorithms_enabled()
        if self._for_hopper("backward", compiled):
            own = replace(compiled, fused=True) if compiled.wanted else compiled
            kernels = hopper_kernels(own.kernels)
            facts = hopper.facts_of(compiled.qkv[1], tensors[0])

            def write_own(writer: Writer, call: Operands, shape: Shape, tiles: Tiles) -> Results:
                found = hopper.backward(writer, kernels, call, own.incoming, needs, shape, tiles, facts)
                return own.with_captured(writer, call, found)

            try:
                return own.settled_shape(kernels, "backward", write_own)
            except hopper.NoShape as none:
                _portable("backward", compiled.kernels, str(none))

        def write(writer: Writer, call: Operands, tiles: Tiles) -> Results:
            found = triton.backward(
                writer, compiled.kernels, call, compiled.incoming, needs, tiles, deterministic=deterministic
            )
            return compiled.with_captured(writer, call, found)

        return compiled.settled(compiled.kernels, write)

    def _for_hopper(self, way: Way, compiled: _Compiled) -> bool:
        """Do the kernels made for Hopper take this call?"""
        kernels, (q, k, v) = compiled.kernels, compiled.qkv
        target = "Triton's interpreter" if self.interpreted else target_of(q.device).name
        why = why_portable(
            kernels.spec, way, target, kernels.options,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        if why is None:
            why = hopper.call_obstacle(q, k, v, compiled.problem.mask if way == "backward" else None)
        if why is not None:
            _portable(way, kernels, why)
        return why is None

    def _compile(self, problem: Problem, tensors: Tensors, *, backward: bool, kept: int = 0) -> _Compiled:
        qkv = q, k, v = _query_key_value(tensors, backward)
        extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        score = compile_mod(problem.score.graph, extents) if problem.score else None
        mask = compile_mod(problem.mask.traced.graph, extents) if problem.mask else None
        spec = triton.kernel_spec(
            q, k, v, problem.mask, scale=problem.scale, precision=problem.precision, backward=backward
        )
        wanted = tuple(sorted(set(problem.capture_grad.loads))) if problem.capture_grad else ()
        lowered = (score.lowered if score else None, mask.lowered if mask else None)
        family = "" if self.interpreted else family_of(target_of(q.device).name)

        def make(fused: bool) -> Kernels:
            return kernels_for(spec, *lowered, problem.options, self.interpreted, wanted, fused, family)

        if option(dict(problem.options), "dq" if backward else "forward", "tuned", False):
            self._tune(problem, spec, [make(fused) for fused in (False, True)], q.device)
        numbers = (score.numbers if score else (), mask.numbers if mask else ())
        call = operands(q, k, v, problem, *numbers)
        return _Compiled(make, problem, tuple(tensors), qkv, call, score, wanted, backward, kept)

    def _tune(
        self, problem: Problem, spec: KernelSpec, kernels: Sequence[Kernels], device: torch.device
    ) -> None:
        """Have kernels run with the tiles that were found for them; raises where none were."""
        key = tuned.Key(
            "backward" if spec.backward else "forward",
            tuned.device_name(device, self.interpreted),
            spec,
            problem.score.graph if problem.score else None,
            problem.mask.traced.graph if problem.mask else None,
        )
        for each in kernels:
            tuned.apply(each, key, device)


@dataclass(frozen=True)
class _Compiled:
    """A call, and the kernels that its mods make: what its plans are written with.

    `make(fused)` makes the kernels; `wanted` are the captures that get gradients, and `fused` says that
    Hopper's backward makes them. `tensors` are what a plan is bound to.
    """

    make: Callable[[bool], Kernels]
    problem: Problem
    tensors: tuple[Tensor | None, ...]
    qkv: tuple[Tensor, Tensor, Tensor]
    call: Operands
    score: Mod | None
    wanted: tuple[int, ...]
    backward: bool
    kept: int
    fused: bool = False

    @cached_property
    def kernels(self) -> Kernels:
        return self.make(self.fused)

    @cached_property
    def incoming(self) -> Incoming:
        """The places of what comes from the forward and from autograd."""
        grad_out, grad_lse, _, _, _, out, lse = self.tensors[:7]
        assert out is not None and lse is not None and grad_out is not None
        return incoming(self.call, out, lse, grad_out, grad_lse, self.kept)

    @cached_property
    def inputs(self) -> Results:
        """The places of `tensors`."""
        if not self.backward:
            return self.call.inputs
        out, lse, grad_out, grad_lse, kept = self.incoming
        return (grad_out, grad_lse, *self.call.inputs[:3], out, lse, *kept, *self.call.inputs[3:])

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """What the names in plans are for the tensors."""
        processors = {"PROCESSORS": hopper.processors(self.qkv[0].device)}
        return {**extents_of(self.inputs, self.tensors), **processors}

    def plan(self, write: Callable[[Writer, Operands], Results]) -> Plan:
        """The plan that `write` writes; where kernels check indices, the host looks at the end."""
        writer = Writer()
        call, watch = watched(writer, self.call, config.check_bounds())
        results = write(writer, call)
        if watch is not None:
            watch.look()
        return writer.plan(self.inputs, results)

    def settled(self, kernels: Kernels, write: Callable[[Writer, Operands, Tiles], Results]) -> Bound:
        """The plan with the tile that each of its kernels takes, bound."""
        def plan(tiles: Tiles) -> Plan:
            return self.plan(lambda writer, call: write(writer, call, tiles))

        return self._bound(kernels, plan)

    def settled_shape(
        self, kernels: HopperKernels, way: Way, write: Callable[[Writer, Operands, Shape, Tiles], Results]
    ) -> Bound:
        """The same by the kernels for Hopper. Raises NoShape."""

        def plan(shape: Shape, tiles: Tiles) -> Plan:
            return self.plan(lambda writer, call: write(writer, call, shape, tiles))

        def arguments(shape: Shape) -> dict[str, Any]:
            (step,) = plan(shape, FirstRungs(kernels.portable)).launches(way)
            return self._sample(step)

        shape = hopper.settle(kernels, way, self.qkv[0].device, arguments)
        return self._bound(kernels.portable, lambda tiles: plan(shape, tiles))

    def _bound(self, kernels: Kernels, plan: Callable[[Tiles], Plan]) -> Bound:
        tiles = FirstRungs(kernels)
        with_tiles: list[Any] = [s.kernel for s in plan(tiles).launches() if isinstance(s.rung, Tile)]
        for name in dict.fromkeys(with_tiles):

            def arguments(tile: Tile, name: KernelName = name) -> list[dict[str, Any]]:
                return [self._sample(step) for step in plan(tiles.but(name, tile)).launches(name)]

            tiles[name] = launch.settle(kernels, name, self.qkv[0].device, arguments)
        return Bound(plan(tiles), self.tensors, self.qkv[0].device, self.extents)

    def _sample(self, step: Launch) -> dict[str, Any]:
        given = zip(self.inputs, self.tensors, strict=True)
        tensors = {place.name: tensor for place, tensor in given if place is not None and tensor is not None}
        return sample(step, tensors, self.extents)

    def with_captured(self, writer: Writer, call: Operands, found: Found) -> Results:
        """The gradients that a backward found, and those of captured tensors."""
        graph = self.score.lowered.score if self.score else None
        return with_captured(writer, call, found, graph, self.wanted, self.fused)


def watched(writer: Writer, call: Operands, checks: bool) -> tuple[Operands, Watch | None]:
    """The call as kernels that check indices take it, and what watches it; None where none check."""
    if not checks:
        return call, None
    watch = Watch(writer, call.extents[2:], call.q)  # type: ignore[arg-type]
    score, mask = (captured._replace(watch=watch) for captured in (call.score_captured, call.mask_captured))
    return replace(call, score_captured=score, mask_captured=mask), watch


def with_captured(
    writer: Writer, call: Operands, found: Found, score: Graph | None, wanted: tuple[int, ...], fused: bool
) -> Results:
    """Writes the gradients of the captured tensors `wanted`, which its sums give, beside a backward's.

    `fused`: Hopper's backward made the sums.
    """
    if not (wanted and score):
        return found[:3]
    captured = call.score_captured
    terms = _Terms(capture_terms(score, wanted, fused))
    grads = [
        Place(f"grad_{place.name}", place.shape, contiguous(place.shape), place.dtype)
        if number in wanted
        else None
        for number, place in enumerate(captured.tensors)
    ]
    given = (score, terms, found.sums, tuple(captured.tensors), tuple(captured.numbers), call.extents)
    return (*found[:3], *writer.call(gradients, given, grads))


def incoming(
    call: Operands, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, kept: int
) -> Incoming:
    """The places of what a backward of the call is run on besides its operands."""
    sizes = call.q.shape[:3]
    rows = (sizes, contiguous(sizes), lse.dtype)
    return Incoming(
        named("out", out, (*sizes, out.shape[3])),
        Place("lse", *rows),
        named("grad_out", grad_out, (*sizes, out.shape[3])),
        None if grad_lse is None else named("grad_lse", grad_lse, sizes),
        tuple(Place(f"kept{number}", *rows) for number in range(kept)),
    )


class _Terms(tuple[Term, ...]):
    """Terms as one argument of a step."""


class FirstRungs(dict[KernelName, Tile]):
    """The tiles of kernels; the first rung of its ladder for one that has not settled."""

    def __init__(self, kernels: Kernels, known: Mapping[KernelName, Tile] = NO_TILES) -> None:
        super().__init__(known)
        self._kernels = kernels

    def __missing__(self, kernel: KernelName) -> Tile:
        return self._kernels.ladder(kernel)[0]

    def but(self, kernel: KernelName, tile: Tile) -> FirstRungs:
        return FirstRungs(self._kernels, {**self, kernel: tile})


def _query_key_value(tensors: Tensors, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors[2:5] if backward else tensors[:3]
    assert query is not None and key is not None and value is not None
    return query, key, value


def _portable(way: Way, kernels: Kernels, why: str) -> None:
    """Says that the portable template runs, or raises where the options insist on Hopper's."""
    if template(kernels.options, way) == "hopper":
        raise HopperTemplateError(way=way, why=why)
    if config.debug_level() >= 1:
        print(f"flexmod: {way} on the portable template: {why}", file=sys.stderr)


ON_GPU = Generated(interpreted=False)
INTERPRETED = Generated(interpreted=True)
