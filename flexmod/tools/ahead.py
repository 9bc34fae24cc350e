"""Plans and compiles the kernels of a variant without a call, for chips that need not be present.

    for job in jobs(variant(mods.softcap(30.0), masks.causal(), head_dim=128), "sm_90"):
        print(job.compile())

Each kernel gets the tile that a launch would choose: the first one of its ladder that fits the chip's shared
memory and spills little, or else the one that spills least. A family may also skip tiles for which the
assembler serialized instructions.

`warm` fills a folder with compiled kernels to ship: a process that uses the folder need not compile them.

    for target, built in warm("kernels", mods.softcap(30.0), masks.causal(), head_dim=128, targets=["sm_90"]):
        print(target, built.kernel)

    FLEXMOD_CACHE_DIR=kernels python train.py

The chips need not be present. The folder gets forward and backward kernels for dense tensors [B, H, M, D]
whose head dimension is a multiple of 16, and forward kernels of calls without gradients. Short calls have
kernels of their own, which `length` asks for. The folder lacks kernels that build block masks, kernels for
gradients of captured tensors alone, and kernels for few queries. To add these, run the model on such a chip
with TRITON_CACHE_DIR set to the folder's part `compiled`. Each host builds Triton's launchers in C itself.

`VariantCall` stands for a call, and `by_family` has the plans that `explain` shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.backends import families
from flexmod.backends.arguments import Problem, operands
from flexmod.backends.copies import aligned, with_copied_bias
from flexmod.backends.triton import Rungs
from flexmod.block_mask.storage import MaskSnapshot, TileStorage
from flexmod.block_mask.tiles import LISTS, Runs
from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.codegen.kernels import Made
from flexmod.codegen.spec import FLOAT8, Chosen, Direction, Tile, Verdict, choose
from flexmod.codegen.variant import Variant, variant
from flexmod.errors import ArgumentTypeError, NoPtxError
from flexmod.errors.base import WarmFolderError
from flexmod.ir.trace import Traced
from flexmod.runtime import compiler_bugs, offline
from flexmod.runtime.config import cache_dir_at
from flexmod.runtime.launch import limit_in_words, refusal_in_words, refused, sample
from flexmod.runtime.offline import Report
from flexmod.runtime.plan import Launch, Place, Plan, Size, contiguous, extents_of
from flexmod.runtime.private_triton import OutOfResources, cache_folder, keeps_elsewhere
from flexmod.runtime.side_by_side import in_threads
from flexmod.runtime.target import MEASURED, NAMES, family_of, named

GIVES_WAY = "it spills so much that the portable template runs"
NAME_A_CHIP = f"name a chip that need not be here, e.g. attend.ptx_for({MEASURED!r})"
LENGTH = 512  # of the stand-in call; plans have a name for it
OF_A_CALL = {"PROCESSORS": 128}  # values of names that do not follow from tensors' sizes


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


def jobs(variant: Variant, target: str, every: bool = False, length: int | None = None) -> list[Job]:
    """Returns the forward and backward kernels of a call on a chip. Raises UnknownTarget, and the errors of
    `kernels_on`.

    `every`: also the forward of a call without gradients, and kernels without a choice of tiles (statistics,
    rounding). All again for a large call, if that copies a bias to aligned rows. `length`: the call's queries
    and keys, None for many.
    """
    named(target)
    kept: list[tuple[bool, Direction]] = [(True, direction) for direction in variant.spec.directions]
    if every and "backward" in variant.spec.directions:
        kept.append((False, "forward"))
    calls, found = list[tuple[VariantCall, Direction]](), []
    for keep, direction in kept:
        made = variant.of_length(length, direction)
        calls.append((VariantCall(made, keep), direction))
        if every and (copied := with_copied_bias(made, direction, length or LENGTH)) is not None:
            calls.append((VariantCall(copied, keep, ", bias copied"), direction))
    for call, direction in calls:
        kernels = kernels_on(call.variant, direction, target)
        for name, step in {step.kernel: step for step in call.plan(direction, kernels).launches()}.items():
            source: Any = step.source
            if every or step.rung is not None:
                work = partial(first_tile, call, kernels, name, target)
                found.append(Job(target, name + call.suffix, source.family, source, work))
    return found


def kernels_on(variant: Variant, direction: Direction, target: str) -> Made:
    """Returns the kernels of one direction on a chip; reads torch's switch for determinism.

    Raises TemplateError if the variant's options ask for a family that cannot run it.
    """
    family, _ = families.serving(variant, direction, target)
    return families.kernels_of(family, variant, direction, family_of(target))


def ptx(variant: Variant, target: str) -> dict[str, str]:
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
    return texts


def compiled(
    call: VariantCall, kernels: Made, name: str, target: str, rungs: Rungs = families.NO_RUNGS
) -> Report:
    """Compiles one kernel with one tile or shape, as for a launch on dense aligned tensors.

    If launches differ, returns the report of the one that needs most.
    """
    plan = call.plan(_direction_of(kernels, name), kernels, rungs)
    reports = {}
    for step in plan.launches(name):
        kernel = getattr(step.source.module, step.name)
        signature, constants, options = facts = offline.specialized(kernel, call.arguments(plan, step))
        if repr(facts) not in reports:
            reports[repr(facts)] = offline.compile(kernel, signature, constants, target, **options)
    return max(reports.values(), key=lambda report: (not report.fits, report.local))


def _direction_of(kernels: Made, name: str) -> Direction:
    return "backward" if kernels.spec.backward and name != "forward" else "forward"


def first_tile(call: VariantCall, kernels: Made, name: str, target: str) -> Built:
    """Compiles a kernel with the tile or shape that a launch would choose, or the last one if none fits."""
    direction = _direction_of(kernels, name)
    step = call.plan(direction, kernels).launches(name)[0]
    source: Any = step.source
    if step.rung is None:  # no tile to choose
        return Built(name + call.suffix, source.family, None, compiled(call, kernels, name, target))
    reports: dict[Any, Report] = {}

    def judge(rung: Any) -> Verdict:
        try:
            report = reports[rung] = compiled(call, kernels, name, target, {name: rung})
        except Exception as error:
            return refused(error, source.limits)
        refusal = report.too_large or compiler_bugs.wrong(source, report.asm)
        size, losses = (report.size, report.losses) if source.limits.by_code else (0, ())
        return Verdict(report.local // 4, losses, refusal, size)

    chosen = choose(source.ladder(name), judge, source.limits)
    rung, problem = _outcome(chosen)
    return Built(name + call.suffix, source.family, rung, reports.get(rung), problem)


def _outcome(chosen: Chosen[Any]) -> tuple[Any, str]:
    """Returns the chosen rung and "", or the last rung that compiled and its problem."""
    if chosen.rung is not None:
        return chosen.rung, ""
    if chosen.runnable:
        return min(chosen.runnable, key=lambda rung: chosen.runnable[rung].spills), GIVES_WAY
    rung, refusal = list(chosen.refusals.items())[-1]
    if isinstance(refusal, OutOfResources):
        one = "tile" if isinstance(rung, Tile) else "shape"
        return rung, f"no {one} fits {limit_in_words(refusal)}"
    if isinstance(refusal, BaseException):
        return None, f"no shape compiles: {refusal_in_words(refusal)}"
    return rung, refusal_in_words(refusal)


def warm(
    folder: str | Path,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    targets: Sequence[str] = (MEASURED,),
    length: int | None = None,
) -> Iterator[tuple[str, Built]]:
    """Compiles kernels into the folder while you iterate, all kernels of a chip in parallel; yields them.

    `length`: the queries and keys of a call, which is short if they are few (docs/kernel_options.md); None
    for many. It does not compile kernels again that the folder has. A kernel's text quotes the lines of its
    mod, so the same formula in other lines is another kernel: pass the functions that training calls. Raises
    WarmFolderError, UnknownTarget, ArgumentTypeError, and what tracing raises.
    """
    advice = f"give a list of chips, targets=[{targets!r}]"
    ArgumentTypeError.check(not isinstance(targets, str), "targets", targets, advice)
    path = checked_folder(folder)
    with cache_dir_at(path), cache_folder(path / COMPILED):
        made = variant(score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
        work = [jobs(made, target, every=True, length=length) for target in targets]
    for of_chip in work:
        with cache_dir_at(path), cache_folder(path / COMPILED):
            found = in_threads([job.compile for job in of_chip])
        yield from ((job.target, built) for job, built in zip(of_chip, found, strict=True))


def checked_folder(folder: str | Path) -> Path:
    """Creates the folder and returns its absolute path. Raises WarmFolderError if it cannot store kernels."""
    ArgumentTypeError.check_path("folder", folder)
    path = Path(os.path.expanduser(folder)).absolute()
    if keeps_elsewhere():
        raise WarmFolderError(
            folder=path, problem="TRITON_CACHE_MANAGER has Triton keep kernels elsewhere",
            advice="unset TRITON_CACHE_MANAGER for this command",
        )  # fmt: skip
    try:
        (path / COMPILED).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    if not os.access(path / COMPILED, os.W_OK):
        raise _unwritable(path, "Permission denied")
    return path


def _unwritable(path: Path, problem: str) -> WarmFolderError:
    advice = "name a folder that can be written, e.g. --into kernels"
    return WarmFolderError(folder=path, problem=problem, advice=advice)


class VariantCall:
    """A call of a variant on tensors without memory. Its plans have names for sizes.

    Rows of queries, keys, values and the output's gradient are aligned, so that plans copy none. A long call
    of other rows launches the same kernels on its copies.

    `keep`: the forward keeps tensors for a backward, if the variant has one. `suffix` ends the names of
    kernels in reports; it says if the forward could keep them and does not.
    """

    def __init__(self, made: Variant, keep: bool = True, suffix: str = "") -> None:
        spec = made.spec
        self.variant = made
        trains = "backward" in spec.directions
        self.keep, self.suffix = keep and trains, (", no grad" if trains and not keep else "") + suffix
        self.directions: tuple[Direction, ...] = spec.directions if self.keep else ("forward",)
        query, key = (_rows(dtype, spec.head_dim) for dtype in (spec.q_dtype, spec.k_dtype))
        self._qkv = query, key, _rows(spec.v_dtype, spec.value_dim)
        score: Any = SimpleNamespace(tensors=made.score_tensors)
        self._mask = _mask_of(made)
        self._value_scale = torch.empty(2, 2, device="meta") if spec.value_scale else None
        problem = Problem(
            score, None, self._mask, spec.head_dim**-0.5,
            out_dtype=spec.out_dtype, value_scale=self._value_scale,
        )  # fmt: skip
        self.call = operands(*self._qkv, problem, (), (), _list)

    def plan(
        self, direction: Direction, made: Made, rungs: Rungs = families.NO_RUNGS, *, captured: bool = True
    ) -> Plan:
        """Returns the plan of a forward or a backward on these kernels, with the first rungs by default.

        `captured`: the plan ends with the gradients of captured tensors, otherwise with their sums.
        """
        family = next(one for one in families.families() if one.name == made.family)
        given = self._tensors
        tensors: tuple[Tensor | None, ...] = self._qkv
        if direction == "backward":
            tensors = (given["grad_out"], None, *self._qkv, given["out"], given["lse"])
        variant, score = replace(self.variant, spec=self.variant.spec_of(direction)), self.variant.score
        if score and score.graph:  # as in calls, where equal mods share a graph
            variant = replace(variant, score=replace(score, graph=replace(score.graph, lines=False)))
        call = families.PlannedCall(
            variant, self.call, tensors, keep=self.keep, kept=2, captured=captured
        )
        return call.plan(family, families.FirstRungs(made, rungs))

    def arguments(self, plan: Plan, step: Launch) -> dict[str, Any]:
        """Returns the arguments of a launch of the plan, as a compiler sees them."""
        given = [None if place is None else self._tensors[place.name] for place in plan.inputs]
        return sample(step, self._tensors, {**extents_of(plan.inputs, given), **OF_A_CALL})

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """The stand-ins for the inputs, by name."""
        query, key, value = self._qkv
        grad_out = _rows(self.call.out_dtype or query.dtype, value.shape[3])
        out = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        named = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out, "lse": lse}
        named |= {"kept0": lse, "kept1": lse}
        if self._value_scale is not None:
            named["value_scale"] = self._value_scale
        for mod, tensors in (("score", self.variant.score_tensors), ("mask", self.variant.mask_tensors)):
            named |= {f"{mod}_capture{number}": _unfilled(tensor) for number, tensor in enumerate(tensors)}
        if self._mask is not None:
            named |= dict(zip(self._mask.storage.parts(), self._mask.storage.tensors(), strict=True))
        return named


def by_family(made: Variant) -> tuple[dict[str, Plan], dict[str, str], tuple[str, ...]]:
    """Returns the plans, the modules, and which family runs where: see `Explanation`.

    Sizes in plans are names. The kernel_options choose no family here.
    """
    call, asked = VariantCall(made), replace(made, options=())
    plans, sources, lines = dict[str, Plan](), dict[str, str](), []
    for direction in made.spec.directions:
        whys, runs = [], []
        for family in families.families():
            why = families.obstacle(family, asked, direction, family.target)
            if why is not None:
                whys.append(why)
                continue
            kernels: Any = families.kernels_of(family, made, direction)
            plans[f"{family.name} {direction}"] = call.plan(direction, kernels)
            if family is not families.PORTABLE:
                sources[f"{family.name} {direction}"] = kernels.text
                runs.append(f"{family.name} on {family.target}, {kernels.ladder(direction)[0]} first")
        said = [*runs, "portable elsewhere"] if runs else [f"portable everywhere: {'; '.join(whys)}"]
        lines.append(f"{direction} template: {'; '.join(said)}")
    if made.spec.q_dtype in FLOAT8:
        chips = ", ".join(name for name in NAMES if named(name).float8)
        lines.append(f"products in float8 on {chips}; elsewhere a call converts the tensors to a half type")
    return plans, sources, tuple(lines)


def _rows(dtype: torch.dtype, dim: int) -> Tensor:
    return aligned((2, 2, LENGTH, dim), dtype)


def _unfilled(tensor: Tensor) -> Tensor:
    """Returns a tensor with this one's strides and without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _list(name: str, tensor: Tensor) -> Place:
    """Returns the place of a dense list of a mask's blocks; all lists of a mask share names of sizes."""
    sides = ("Q_BLOCKS", "KV_BLOCKS") if "kv_" in name else ("KV_BLOCKS", "Q_BLOCKS")
    shape = tuple(map(Size, ("MASK_B", "MASK_H", *sides)))[: tensor.dim()]
    return Place(name, shape, contiguous(shape), tensor.dtype)


def _mask_of(made: Variant) -> MaskSnapshot | None:
    """Returns a stand-in mask, of which plans read only the parts. With captured tensors it has an order."""
    if made.mask is None or made.spec.mask_block is None or made.mask.graph is None:
        return None

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def runs() -> Runs:
        return Runs(empty(2, 2, 4, 2, 3), empty(4, 2), empty(16) if made.mask_tensors else None)

    if made.spec.mask_form == "lists":
        storage = TileStorage.of_lists(
            {name: empty(16, 16, 16, *[16] * name.endswith("indices")) for name in LISTS}
        )
    else:
        storage = TileStorage((2, 2), (4, 4), {"kv": runs(), "q": runs()}, {})
    traced = Traced(made.mask.graph, made.mask_tensors)
    return MaskSnapshot(storage, (LENGTH, LENGTH), made.spec.mask_block, False, traced)
