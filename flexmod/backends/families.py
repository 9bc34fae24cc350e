"""Runs generated kernels as a backend, and selects the kernel family that makes them.

flexmod asks the families in order; the first one without an obstacle makes the kernels of a forward or a
backward. The last family, "portable", has no obstacles. A family is an object with the methods of `Family`;
`insert` adds one.

There are two backends: ON_GPU, and INTERPRETED, which runs the same kernels in Triton's interpreter on CPU
tensors. They compile a problem's mods and make plans for its calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flexmod.backends import arguments as call_arguments
from flexmod.backends import decoding, triton
from flexmod.backends import options as kernel_options
from flexmod.backends.arguments import BackwardInputs, Operands, Problem, incoming, operands
from flexmod.backends.captured import write_gradients
from flexmod.backends.copies import (
    CopiedOperands,
    aligned,
    copied_bias,
    copied_rows,
    copies_of_heads,
    is_copied,
)
from flexmod.backends.hopper import HopperFamily
from flexmod.backends.triton import Found, PortableFamily, Rungs
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.codegen import compiled_kernels
from flexmod.codegen.by_distance import with_tables
from flexmod.codegen.compiler import compile_mod
from flexmod.codegen.device_functions import Family as Chips
from flexmod.codegen.kernels import IndexWatch, Kernels, Made
from flexmod.codegen.spec import Direction, KernelSpec, option, template
from flexmod.codegen.variant import Variant
from flexmod.errors import TemplateError
from flexmod.runtime import config, launch, side_by_side, tuned
from flexmod.runtime.bound import Bound
from flexmod.runtime.launch import sample
from flexmod.runtime.plan import Place, Plan, PlanWriter, extents_of
from flexmod.runtime.side_by_side import Job
from flexmod.runtime.target import family_of, target_of

Tensors = Sequence[Tensor | None]
Places = tuple[Place | None, ...]
Meanwhile = Callable[[Tensors], Job | None]
NO_RUNGS: Rungs = {}


class Family(Protocol):
    """A kernel family. `name` is its name in kernel option TEMPLATE, `title` its name in sentences.

        target              the chip for which `explain` shows it
        reads_order         there, its kernels follow the order of a mask's rows and columns
        reduce_in_backward  its backward kernel reduces gradients of captures that only b and h index
    """

    name: str
    title: str
    target: str
    reduce_in_backward: bool
    reads_order: bool

    def aligned_bytes(self, dtype: torch.dtype) -> int:
        """Returns the number of bytes at whose multiples rows begin that its kernels read fast."""

    def obstacle(
        self, variant: Variant, direction: Direction, target: str, *, deterministic: bool
    ) -> str | None:
        """Returns why the family cannot make a variant's kernels for a chip, or None if it can.

        `deterministic`: reruns must agree bit for bit, beside what the variant's options ask.
        """

    def call_obstacle(self, q: Tensor, k: Tensor, v: Tensor, by_column: MaskSnapshot | None) -> str | None:
        """Returns why its kernels cannot take these tensors and this mask's columns, or None if they can."""

    def kernels(self, portable: Kernels) -> Made:
        """Returns the family's kernels for the same spec and mods as `portable`, always the same object.

        Except for the portable family, the result has `text`, the module's source, and `choices(direction)`,
        the rungs that tuning tries.
        """

    def forward(
        self, writer: PlanWriter, made: Any, call: Operands, rungs: Rungs, *, want_max: bool, keep: bool
    ) -> Places:
        """See `triton.forward`."""

    def backward(
        self, writer: PlanWriter, made: Any, call: Operands, incoming: BackwardInputs,
        needs: tuple[bool, bool, bool], rungs: Rungs, key: Tensor, grad_out: Tensor,
    ) -> Found:  # fmt: skip
        """See `triton.backward`. `key` and `grad_out` are tensors of the call, or stand-ins."""


PORTABLE: Family = PortableFamily()
INTERPRETER = "Triton's interpreter"  # replaces a chip's name
_known: tuple[Family, ...] = (HopperFamily(), PORTABLE)


def families() -> tuple[Family, ...]:
    """Returns all families, in the order in which flexmod asks them."""
    return _known


def insert(family: Family) -> Callable[[], None]:
    """Adds a family in the first place; returns a function that removes it. Calls get new plans."""
    _set((family, *_known))
    return lambda: _set(tuple(other for other in _known if other is not family))


def _set(known: Sequence[Family]) -> None:
    global _known
    _known = tuple(known)
    kernel_options.set_family_names([family.name for family in _known])


def reads_order(target: str) -> bool:
    """Returns whether any family on a chip follows the order of a mask's rows and columns."""
    return any(family.reads_order and family.target == target for family in _known)


def obstacle(family: Family, variant: Variant, direction: Direction, target: str) -> str | None:
    """Returns why a family cannot make a variant's kernels for a chip; reads torch's switch for determinism.

    Raises TemplateError if there is an obstacle and the variant's options ask for this family.
    """
    options = dict(variant.options)
    if template(options, direction) not in ("auto", family.name):
        return "kernel option TEMPLATE asks for another"
    deterministic = torch.are_deterministic_algorithms_enabled()
    why = family.obstacle(variant, direction, target, deterministic=deterministic)
    if why is not None:
        check_not_asked_for(family, direction, options, why)
    return why


def check_not_asked_for(family: Family, direction: Direction, options: Mapping[str, Any], why: str) -> None:
    """Raises TemplateError if the options ask for a family that cannot run."""
    if template(options, direction) == family.name:
        raise TemplateError(template=family.name, direction=direction, why=why)


def kernels_of(
    family: Family, variant: Variant, direction: Direction, chips: Chips = "", interpreted: bool = False
) -> Made:
    """Returns a family's kernels for one direction of a variant, for these chips or the interpreter."""
    return family.kernels(variant.kernels(direction, family.reduce_in_backward, chips, interpreted))


def serving(variant: Variant, direction: Direction, target: str) -> tuple[Family, dict[str, str]]:
    """Returns the first family without an obstacle on a chip, and the obstacles of earlier ones by name.

    Raises the error of `obstacle`.
    """
    passed: dict[str, str] = {}
    for family in _known:
        why = obstacle(family, variant, direction, target)
        if why is None:
            return family, passed
        passed[family.name] = why
    raise AssertionError("the portable family has no obstacle")


@dataclass(frozen=True)
class Generated:
    """Makes plans of calls, bound to the kinds of their tensors."""

    interpreted: bool

    def forward(
        self,
        problem: Problem,
        tensors: Tensors,
        *,
        want_max: bool,
        keep: bool,
        meanwhile: Meanwhile | None = None,
    ) -> Bound:
        """Returns a plan bound to query, key, value, the score_mod's captured tensors and the mask's tensors.

        Its results are a `Forward`, and with `keep` the `kept` tensors for a backward. If its kernels need
        compiling, a thread calls `meanwhile` with stand-ins of the results during the compilation, and then
        the job that it returns.

        Raises:
            NoTileFits, RoundedProductsError, MisaddressedProductsError: see `launch.choose_tile`.
            BlockSizeError, OptionValueError: see `ladder`.
            BlockMaskPartsError: see `mask_arguments`.
        """
        if meanwhile is not None and not self.interpreted:
            side_by_side.start_second_process()
        compiled = self._compile(problem, tensors, backward=False, want_max=want_max, keep=keep)
        return self._served(compiled, meanwhile)

    def backward(
        self, problem: Problem, tensors: Tensors, needs: tuple[bool, bool, bool], kept: int
    ) -> Bound:
        """Returns a plan bound to a `BackwardInputs` in order, and the mask's tensors.

        `kept` is the number of tensors that the forward kept. The results are the tensors of a `Gradients`,
        in order. Raises the errors of `forward`.
        """
        return self._served(self._compile(problem, tensors, backward=True, needs=needs, kept=kept))

    def backward_compiler(
        self, problem: Problem, tensors: Tensors, needs: tuple[bool, bool, bool], kept: int
    ) -> Job | None:
        """Returns a job that compiles the first kernels of `backward`, or None if nothing needs compiling.

        It takes the arguments of `backward`, also stand-ins, and raises the same errors. The job keeps no
        tensors alive. A thread may call it while another one compiles the forward.
        """
        compiled = self._compile(problem, tensors, backward=True, needs=needs, kept=kept)
        family = next(one for one, why in self._families(compiled) if why is None)
        plan = compiled.plan(family, FirstRungs(compiled.kernels(family)))
        jobs = side_by_side.compiles(plan, compiled.tensors, compiled.device, compiled.extents, apart=True)
        return partial(side_by_side.in_threads, jobs) if jobs else None

    def _families(self, compiled: PlannedCall) -> Iterator[tuple[Family, str | None]]:
        """Yields the families in order, each with its obstacle or None."""
        mask = compiled.call.mask if compiled.direction == "backward" else None
        target = INTERPRETER if self.interpreted else target_of(compiled.device).name
        for family in families():
            why = obstacle(family, compiled.variant, compiled.direction, target)
            yield family, why or family.call_obstacle(*compiled.qkv, mask)

    def _served(self, compiled: PlannedCall, meanwhile: Meanwhile | None = None) -> Bound:
        """Returns the bound plan of the first family that takes the call and has a rung for it."""
        options, direction = dict(compiled.variant.options), compiled.direction
        for family, why in self._families(compiled):
            if why is None:
                try:
                    return compiled.chosen(family, meanwhile)
                except launch.NoRung as none:
                    why = str(none)
            check_not_asked_for(family, direction, options, why)
            if config.debug_level() >= 1:
                print(f"flexmod: {direction} not on the template {family.name!r}: {why}", file=sys.stderr)
        raise AssertionError("the portable family takes every call")

    def _compile(self, problem: Problem, tensors: Tensors, *, backward: bool, **asked: Any) -> PlannedCall:
        """Compiles the mods of a call. `asked`: further fields of the PlannedCall."""
        q, k, v = _query_key_value(tensors, backward)
        options, few = dict(problem.options), None
        if not backward and decoding.is_decoding(q, k, options, keep=asked["keep"]):
            few = decoding.decoding(q, k, problem.mask, options)
        group = 1 if few is None else few.group
        extents = (q.shape[0], q.shape[1] // group, q.shape[2] * group, k.shape[2])
        graphs = [problem.score and problem.score.graph, problem.mask and problem.mask.traced.graph]
        if group > 1:
            graphs = [graph and decoding.packed_graph(graph, group, q.shape[2]) for graph in graphs]
        score, mask = (compile_mod(graph, extents) if graph else None for graph in graphs)
        spec = triton.kernel_spec(q, k, v, problem, backward=backward, few=few)
        grad_captures = tuple(sorted(set(problem.capture_grad.loads))) if problem.capture_grad else ()
        lowered = (score.lowered if score else None, mask.lowered if mask else None)
        of_score = problem.score.tensors if problem.score else ()
        alone = _is_alone(spec, options)  # what is copied may depend on the batch, and change bits
        copies = CopiedOperands(
            copied_bias(spec, score.lowered, of_score, extents) if score and not alone else None,
            copies_of_heads(q, k, alone, call_arguments.processors(q.device)) if backward else 1,
        )
        of_score = copies.as_read(of_score)
        variant = Variant(spec, *lowered, of_score, learned=grad_captures, options=problem.options)
        numbers = (score.numbers if score else (), mask.numbers if mask else ())
        call = operands(q, k, v, problem, *numbers)
        compiled = PlannedCall(variant, call, tuple(tensors), self.interpreted, copies=copies, **asked)
        if option(options, spec.direction, "tuned", False):
            self._tune(problem, compiled)
        return compiled

    def _tune(self, problem: Problem, compiled: PlannedCall) -> None:
        """Applies tuned tiles to the kernels of a call. Raises NotTunedError if there are none.

        A choice serves batches of any size. Whether a call copies a bias depends on the size, and does not
        count.
        """
        kernels, device = [compiled.kernels(family) for family in families()], compiled.device
        spec = kernels[0].spec
        if compiled.copies.bias is not None:
            spec = replace(spec, pair_tile=None)
        key = tuned.Key(
            spec.direction,
            INTERPRETER if self.interpreted else torch.cuda.get_device_name(device),
            spec,
            problem.score.graph if problem.score else None,
            problem.mask.traced.graph if problem.mask else None,
        )
        for each in kernels:
            tuned.apply(each, key, device, tuple(kind for one in kernels for kind in one.rungs))


@dataclass(frozen=True)
class PlannedCall:
    """A forward or a backward of a variant, whose plans are bound to the kinds of `tensors`.

    The tensors may be stand-ins. `want_max`, `keep` and `needs`: see `arguments.py`. `kept`: the number of
    tensors that the forward kept. `captured` False: the plan ends with the sums for gradients of captured
    tensors.
    """

    variant: Variant
    call: Operands
    tensors: tuple[Tensor | None, ...]
    interpreted: bool = False
    want_max: bool = False
    keep: bool = False
    needs: tuple[bool, bool, bool] = (True, True, True)
    kept: int = 0
    captured: bool = True
    copies: CopiedOperands = CopiedOperands()

    @property
    def direction(self) -> Direction:
        return self.variant.spec.direction

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return _query_key_value(self.tensors, self.variant.spec.backward)

    @property
    def device(self) -> torch.device:
        return self.qkv[0].device

    def kernels(self, family: Family) -> Made:
        """Returns a family's kernels, for the chip of the tensors."""
        chips = "" if self.interpreted else family_of(target_of(self.device).name)
        return kernels_of(family, self.variant, self.direction, chips, self.interpreted)

    @cached_property
    def incoming(self) -> BackwardInputs:
        """The places of a backward's inputs."""
        return incoming(self.call, self.tensors, self.kept)

    @cached_property
    def inputs(self) -> Places:
        """The places of `tensors`."""
        if self.direction == "forward":
            return self.call.inputs
        return (*self.incoming.in_order(), *self.call.of_mask)

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """The values of the names in plans for the tensors."""
        processors = {"PROCESSORS": call_arguments.processors(self.device)}
        return {**extents_of(self.inputs, self.tensors), **processors}

    def plan(self, family: Family, rungs: FirstRungs) -> Plan:
        """Returns the plan on a family's kernels. If they check indices, its last step reads the result."""
        writer, call, variant, made = PlanWriter(), self.call, self.variant, rungs.made
        watch = None
        if any(mod.checked for mod in (variant.score, variant.mask) if mod):
            watch = IndexWatch(writer, call.extents[2:], call.q)  # type: ignore[arg-type]
            score, mask = (x._replace(watch=watch) for x in (call.score_captured, call.mask_captured))
            call = replace(call, score_captured=score, mask_captured=mask)
        given = call
        call = self.copies.begin(writer, call, self.qkv, family.aligned_bytes)
        if made.portable.by_distance is not None:
            tables = with_tables(writer, made.portable, call.score_captured, call.extents)
            call = replace(call, score_captured=tables)
        results: Places
        if self.direction == "forward":
            results = family.forward(writer, made, call, rungs, want_max=self.want_max, keep=self.keep)
        else:
            grad_out: Any = self.tensors[0]
            incoming = self.incoming
            if is_copied(grad_out, *self.qkv[:2], family.aligned_bytes(grad_out.dtype)):
                incoming = incoming._replace(grad_out=copied_rows(writer, incoming.grad_out))
                grad_out = aligned(grad_out.shape, grad_out.dtype)
            of_call = incoming, self.needs, rungs, self.qkv[1], grad_out
            found = self.copies.end(writer, given, family.backward(writer, made, call, *of_call))
            results = (*found[:3], *(place for sums in found.sums.values() for place in sums))
            if self.captured and variant.learned:
                learned = write_gradients(writer, given, found.sums, variant, family.reduce_in_backward)
                results = (*found[:3], *learned)
        if watch is not None:
            watch.raise_if_out_of_bounds()
        return writer.plan(self.inputs, results)

    def chosen(self, family: Family, meanwhile: Meanwhile | None = None) -> Bound:
        """Chooses a rung for each kernel and returns the bound plan. Raises NoRung.

        It compiles the first rungs in parallel; see `Generated.forward`. A plan with another rung may launch
        more kernels.
        """
        plans: dict[object, Plan] = {}

        def plan(rungs: FirstRungs) -> Plan:
            key = rungs.later()
            if key not in plans:
                plans[key] = self.plan(family, rungs)
            return plans[key]

        rungs = FirstRungs(self.kernels(family))
        first = plan(rungs)
        jobs = side_by_side.compiles(first, self.tensors, self.device, self.extents)
        given = zip(self.inputs, self.tensors, strict=True)
        named = {place.name: tensor for place, tensor in given if place is not None and tensor is not None}
        ahead = None
        if meanwhile and jobs:
            ahead = partial(meanwhile, self._results(first))
        elif meanwhile and not self.interpreted:  # an earlier call compiled them: nothing compiles ahead
            compiled_kernels.stop_second()
        with side_by_side.beside(ahead):
            if len(jobs) > 1:
                side_by_side.in_threads(jobs)
            while left := [s for s in plan(rungs).launches() if s.rung is not None and s.kernel not in rungs]:
                source: Any = left[0].source
                name = left[0].kernel

                def arguments(rung: Any, name: str = name) -> list[dict[str, Any]]:
                    steps = plan(rungs.but(name, rung)).launches(name)
                    return [sample(step, named, self.extents) for step in steps]

                rungs[name] = launch.choose_tile(source, name, self.device, arguments)
        return Bound(plan(rungs), self.tensors, self.device, self.extents)

    def _results(self, plan: Plan) -> tuple[Tensor | None, ...]:
        """Returns stand-ins of a plan's results."""
        return tuple(
            None if place is None else side_by_side.stand_in_of(place, self.extents) for place in plan.results
        )


class FirstRungs(dict[str, Any]):
    """The chosen rungs by kernel; the ladder's first one for a kernel without a choice."""

    def __init__(self, made: Made, known: Rungs = NO_RUNGS) -> None:
        super().__init__(known)
        self.made = made

    def __missing__(self, kernel: str) -> Any:
        return self.made.ladder(kernel)[0]

    def but(self, kernel: str, rung: Any) -> FirstRungs:
        return FirstRungs(self.made, {**self, kernel: rung})

    def later(self) -> frozenset[tuple[str, Any]]:
        """Returns the chosen rungs that are not the first; plans with the same ones are the same."""
        return frozenset((name, rung) for name, rung in self.items() if rung != self.made.ladder(name)[0])


def _is_alone(spec: KernelSpec, options: Mapping[str, Any]) -> bool:
    """Must each batch entry have the bits that it has alone? torch's switch asks for it in a backward."""
    asked = option(options, spec.direction, "deterministic", False)
    return bool(asked or spec.backward and torch.are_deterministic_algorithms_enabled())


def _query_key_value(tensors: Tensors, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors[2:5] if backward else tensors[:3]
    assert query is not None and key is not None and value is not None
    return query, key, value


ON_GPU = Generated(interpreted=False)
INTERPRETED = Generated(interpreted=True)
