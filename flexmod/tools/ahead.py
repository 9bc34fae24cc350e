"""Compiles the kernels of a variant ahead of time, for chips that need not be present.

    for job in jobs(variant(mods.softcap(30.0), masks.causal(), head_dim=128), "sm_90"):
        print(job.compile())

Each kernel gets the tile that a launch would choose: the first one of its ladder that fits the chip's shared
memory and spills little, or else the one that spills least. A family may also skip tiles for which the
assembler serialized instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import triton

from flexmod.backends.families import serving
from flexmod.backends.generated import NO_RUNGS
from flexmod.backends.of_variant import VariantCall
from flexmod.backends.triton import Rungs
from flexmod.codegen.kernels import Kernels, Made
from flexmod.codegen.spec import Chosen, Direction, KernelName, Tile, Verdict, choose
from flexmod.codegen.variant import Variant
from flexmod.errors import (
    MisaddressedProductsError,
    NoPtxError,
    NoTileFits,
    RoundedProductsError,
)
from flexmod.runtime import compiler_bugs, machine_code, offline
from flexmod.runtime.launch import refusal_in_words
from flexmod.runtime.offline import Report
from flexmod.runtime.plan import Launch
from flexmod.runtime.target import MEASURED, family_of, named
from flexmod.tools.explanation import Named

GIVES_WAY = "it spills so much that the portable template runs"
WRONG: dict[object, str] = {
    RoundedProductsError: f"Triton {triton.__version__} multiplies float32 in TF32, though it is told not to",
    MisaddressedProductsError: machine_code.MISADDRESSED,
}
NAME_A_CHIP = f"name a chip that need not be here, e.g. attend.ptx_for({MEASURED!r})"


class Built(NamedTuple):
    """A compiled kernel: its template, its tile or shape, and the compiler's report.

    `report` is None if nothing compiled. `problem` says why, or is "".
    """

    kernel: str
    template: str
    tile: Any
    report: Report | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.report is not None and self.report.fits


@dataclass(frozen=True)
class Job:
    """A kernel to compile; `compile()` compiles it."""

    target: str
    kernel: str
    template: str
    kernels: Made
    compile: Callable[[], Built]


def jobs(variant: Variant, target: str) -> list[Job]:
    """Returns the forward and backward kernels of a call on a chip; leaves out kernels without a choice of
    tiles (statistics, rounding). Raises UnknownTarget, and the errors of `kernels_on`.
    """
    return [job for job, step in _launched(variant, target) if step.rung is not None]


def all_jobs(variant: Variant, target: str) -> list[Job]:
    """Returns the same as `jobs`, and the kernels without a choice of tiles."""
    return [job for job, _ in _launched(variant, target)]


def _launched(variant: Variant, target: str) -> list[tuple[Job, Launch]]:
    named(target)
    call, found = VariantCall(variant), []
    for direction in get_args(Direction):
        kernels = kernels_on(variant, direction, target)
        for name, step in {step.kernel: step for step in call.plan(direction, kernels).launches()}.items():
            source: Any = step.source
            work = partial(_built, call, kernels, name, target)
            found.append((Job(target, name, source.family, source, work), step))
    return found


def kernels_on(variant: Variant, direction: Direction, target: str) -> Made:
    """Returns the kernels of one direction on a chip; reads torch's switch for determinism.

    Raises TemplateError if the variant's options ask for a family that cannot run it.
    """
    family, _ = serving(variant.spec_of(direction), direction, target, dict(variant.options))
    return family.kernels(
        variant.kernels(direction, reduce_in_backward=family.reduce_in_backward, family=family_of(target))
    )


def ptx(variant: Variant, target: str) -> Named[str]:
    """Compiles `jobs` and returns their PTX by the kernel's name.

    Raises:
        UnknownTarget: as `jobs`.
        NoPtxError: the chip is not NVIDIA's, or a kernel does not compile for it.
    """
    if named(target).backend != "cuda":
        raise NoPtxError(of=target, why="it is not a chip of NVIDIA's", advice=NAME_A_CHIP)
    texts = {}
    for job in jobs(variant, target):
        built = job.compile()
        if built.report is None or built.problem:
            raise NoPtxError(
                of=f"the {job.kernel} on {target}", why=built.problem,
                advice="name another chip, or compile a handle with kernel_options={'TEMPLATE': 'portable'}",
            )  # fmt: skip
        texts[job.kernel] = built.report.asm["ptx"]
    return Named(texts)


def portable_kernels(kernels: Kernels, variant: Variant) -> tuple[KernelName, ...]:
    """Returns the names of the portable kernels of a direction that have a choice of tiles."""
    plan = VariantCall(variant).plan("backward" if kernels.spec.backward else "forward", kernels)
    return tuple(dict.fromkeys(step.kernel for step in plan.launches() if step.rung))  # type: ignore[misc]


def first_tile(kernels: Kernels, name: KernelName, target: str, variant: Variant) -> Built:
    """Compiles a portable kernel with the tile of a launch, or the ladder's last one if no tile fits."""
    return _built(VariantCall(variant), kernels, name, target)


def compiled(
    call: VariantCall,
    kernels: Made,
    name: str,
    target: str,
    rungs: Rungs = NO_RUNGS,
) -> Report:
    """Compiles one kernel with one tile or shape, as for a launch on dense aligned tensors.

    If launches differ, returns the report of the one that needs most.
    """
    plan = call.plan(_direction_of(kernels, name), kernels, rungs)
    reports = {}
    for step in plan.launches(name):
        facts = offline.specialized(getattr(step.source.module, step.name), call.arguments(plan, step))
        if repr(facts) not in reports:
            kernel, signature, constants, divisible, options = facts
            reports[repr(facts)] = offline.compile(
                kernel, signature, constants, target, divisible=divisible, **options
            )
    return max(reports.values(), key=lambda report: (not report.fits, report.local))


def _direction_of(kernels: Made, name: str) -> Direction:
    return "backward" if kernels.spec.backward and name != "forward" else "forward"


def _built(call: VariantCall, kernels: Made, name: str, target: str) -> Built:
    """Compiles a kernel with the rung that a launch would choose."""
    direction = _direction_of(kernels, name)
    step = call.plan(direction, kernels).launches(name)[0]
    source: Any = step.source
    if step.rung is None:  # no tile to choose
        return Built(name, source.family, None, compiled(call, kernels, name, target))
    reports: dict[Any, Report] = {}

    def judge(rung: Any) -> Verdict:
        try:
            report = reports[rung] = compiled(call, kernels, name, target, {name: rung})
        # the compiler may fail in any way on one shape and compile the next
        except Exception as error:
            if not source.limits.gives_way:
                raise
            return Verdict(refusal=error)
        refusal = compiler_bugs.wrong(source, report.asm) if report.fits else NoTileFits
        return Verdict(report.local // 4, report.losses if source.limits.by_code else (), refusal)

    chosen = choose(source.ladder(name), judge, source.limits)
    rung, problem = _outcome(chosen, reports)
    return Built(name, source.family, rung, reports.get(rung), problem)


def _outcome(chosen: Chosen[Any], reports: Mapping[Any, Report]) -> tuple[Any, str]:
    """Returns the chosen rung and "", or the last rung that compiled and its problem."""
    if chosen.rung is not None:
        return chosen.rung, ""
    if chosen.runnable:
        return min(chosen.runnable, key=lambda rung: chosen.runnable[rung].spills), GIVES_WAY
    rung, refusal = list(chosen.refusals.items())[-1]
    if isinstance(refusal, BaseException):
        return None, f"no shape compiles: {refusal_in_words(refusal)}"
    if refusal in WRONG:
        return rung, WRONG[refusal]
    limit, one = reports[rung].target.shared_limit, "tile" if isinstance(rung, Tile) else "shape"
    return rung, f"no {one} fits {limit} bytes of shared memory"
