"""Compiles the kernels of a variant ahead of time, for chips that need not be present.

    for job in jobs(variant(mods.softcap(30.0), masks.causal(), head_dim=128), "sm_90"):
        print(job.compile())

Each kernel is compiled with the tile that a launch would settle on, by the same rules: the first of its
ladder that fits the chip's shared memory and spills little, or else the one that spills least. Of Hopper's
shapes, one that the assembler made slow gives way too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton

from flexmod.backends.hopper import refusal_in_words
from flexmod.codegen import hopper
from flexmod.codegen.choose import Verdict, choose
from flexmod.codegen.hopper import BackwardShape, HopperKernels, Shape, Way, sum_block
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.mod_text import ModText
from flexmod.codegen.spec import KernelName, Tile
from flexmod.errors import (
    HopperTemplateError,
    MisaddressedProductsError,
    NoPtxError,
    NoTileFits,
    RoundedProductsError,
)
from flexmod.explain import Named
from flexmod.runtime import compiler_bugs, launch, machine_code, offline
from flexmod.runtime.gluon import descriptor_type
from flexmod.runtime.offline import Report
from flexmod.runtime.target import family_of, named
from flexmod.variant import Variant

Template = Literal["portable", "hopper"]

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip
OPERANDS = ("Q", "K", "V", "OUT", "GRAD_OUT", "GRAD_Q", "GRAD_K", "GRAD_V")
STATISTICS = ("LSE", "LSE2", "LARGE", "PEAK", "PEAKS", "TOTAL", "REST", "DELTA")
SUMS = ("_BY_ROW", "_BY_COLUMN", "_BY_DIAGONAL", "_BY_ELEMENT")
LISTS = ("_BLOCKS", "_INDICES", "_ROWS", "_RUNS", "_ORDER", "_COUNTS", "_TILES", "COUNTER")
ABSENT = ("MAX_SCORES", "GRAD_LSE", "_FIXED", "_LARGEST")
STAGES = 3  # Triton's own number, which launches of kernels for Hopper leave as it is
GIVES_WAY = "it spills so much that the portable template runs"
WRONG: dict[compiler_bugs.WrongProducts | None, str] = {
    RoundedProductsError: f"Triton {triton.__version__} multiplies float32 in TF32, though it is told not to",
    MisaddressedProductsError: machine_code.MISADDRESSED,
}
NAME_A_CHIP = "name a chip that need not be here, e.g. attend.ptx_for('sm_90')"


class Built(NamedTuple):
    """A kernel as it was compiled: on which template, with which tile or shape, and what the compiler says.

    `report` is None where nothing compiled; `problem` says what is wrong, or is "".
    """

    kernel: str
    template: Template
    tile: Tile | Shape | None
    report: Report | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.report is not None and self.report.fits


@dataclass(frozen=True)
class Job:
    """A kernel that is to be compiled."""

    target: str
    kernel: str
    template: Template
    kernels: Kernels | HopperKernels
    compile: Callable[[], Built]


def jobs(variant: Variant, target: str) -> list[Job]:
    """The kernels, forward and backward, that a call runs on a chip. Raises UnknownTarget.

    Left out are kernels that have no tile to choose (statistics, rounding), and sums by row beside Hopper's
    backward.
    """
    named(target)
    found = []
    for way in get_args(Way):
        kernels = kernels_on(variant, way, target)
        if isinstance(kernels, HopperKernels):
            work = partial(_first_shape, kernels, way, target, variant)
            found.append(Job(target, way, "hopper", kernels, work))
            kernels = kernels.portable
            beside: tuple[KernelName, ...] = ("scatter",) if kernels.captures.element else ()
        else:
            beside = portable_kernels(kernels)
        for name in beside:
            work = partial(_portable, kernels, name, target, variant)
            found.append(Job(target, name, "portable", kernels, work))
    return found


def kernels_on(variant: Variant, way: Way, target: str) -> Kernels | HopperKernels:
    """Those that a call runs on a chip, as torch's switch for determinism stands.

    Raises HopperTemplateError where the variant's options insist on Hopper's and they cannot be.
    """
    why = hopper.why_portable(
        variant.spec_of(way), way, target, dict(variant.options),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    family = family_of(target)
    if why is None:
        return HopperKernels(variant.kernels(way, fused=True, family=family))
    if hopper.template(dict(variant.options), way) == "hopper":
        raise HopperTemplateError(way=way, why=why)
    return variant.kernels(way, family=family)


def ptx(variant: Variant, target: str) -> Named[str]:
    """The PTX of each of `jobs`, by the kernel's name; compiles them.

    Raises:
        UnknownTarget: as `jobs`.
        NoPtxError: the chip is not NVIDIA's, or a kernel cannot be on it.
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


def portable_kernels(kernels: Kernels) -> tuple[KernelName, ...]:
    """Those of a forward, or of a backward, that have tiles."""
    if not kernels.spec.backward:
        return ("forward",)
    names: list[KernelName] = ["delta"] if kernels.spec.exact else []
    names += ["dq", "dkdv"]
    names += ["diagonal"] if kernels.captures.diagonal else []
    return (*names, "scatter") if kernels.captures.element else tuple(names)


def _portable(kernels: Kernels, name: KernelName, target: str, variant: Variant) -> Built:
    tile, report = first_tile(kernels, name, target, variant)
    problem = "" if report.fits else f"no tile fits {report.target.shared_limit} bytes of shared memory"
    problem = WRONG.get(compiler_bugs.wrong(kernels, report.asm), problem)
    return Built(name, "portable", tile, report, problem)


def first_tile(kernels: Kernels, name: KernelName, target: str, variant: Variant) -> tuple[Tile, Report]:
    """The tile that a launch takes, and its report; the last of the ladder's where none fits."""
    reports: dict[Tile, Report] = {}

    def judge(tile: Tile) -> Verdict:
        report = reports[tile] = compile_tile(kernels, name, tile, target, variant)
        refusal = compiler_bugs.wrong(kernels, report.asm) if report.fits else NoTileFits
        return Verdict(report.local // 4, refusal=refusal)

    tile = choose(kernels.ladder(name), judge, launch.LIMITS).rung or list(reports)[-1]
    return tile, reports[tile]


def compile_tile(kernels: Kernels, name: KernelName, tile: Tile, target: str, variant: Variant) -> Report:
    """One portable kernel with one tile, as a launch on dense aligned tensors specializes it."""
    kernel = getattr(kernels.module, f"{name}_kernel")
    grad = kernels.captures.by_kernel(kernels.grad).get(name)
    types = _types_of_mods(variant, kernels.score, grad, kernels.mask)
    signature, constants = signature_of(kernel.arg_names, types, TYPES[kernels.spec.q_dtype])
    strides = _strides_of_mods(variant, kernels.score, grad, kernels.mask)
    signature, constants, divisible = as_launched(kernel, signature, constants, strides)
    sides = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return offline.compile(
        kernel, signature, constants | sides, target,
        num_warps=tile.warps, num_stages=tile.stages, divisible=divisible,
    )  # fmt: skip


def as_launched(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, object], strides: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, object], dict[str, bool]]:
    """Signature, constants and divisibility as Triton finds them in a launch on dense aligned tensors.

    `strides` are those of captured tensors; all others are multiples of 16. A stride of 1 is a constant.
    """
    fixed = set(kernel.do_not_specialize)
    ones = {name: 1 for name, stride in strides.items() if stride == 1 and name in {*signature} - fixed}
    kinds = {name: kind for name, kind in signature.items() if name not in ones}
    seen = [name for name, kind in kinds.items() if name not in fixed and kind.startswith(("*", "i32"))]
    return kinds, {**constants, **ones}, {name: strides.get(name, 16) % 16 == 0 for name in seen}


def _strides_of_mods(
    variant: Variant, score: ModText | None, grad: ModText | None, mask: ModText | None
) -> dict[str, int]:
    texts = ((score, variant.score_tensors), (grad, variant.score_tensors), (mask, variant.mask_tensors))
    return {
        p.name: tensors[p.index].stride(p.dim)
        for text, tensors in texts
        for p in (text.parameters if text else ())
        if p.kind == "stride"
    }


def _types_of_mods(
    variant: Variant, score: ModText | None, grad: ModText | None, mask: ModText | None
) -> dict[str, str]:
    of_score = captured_types(score, variant.score_tensors) | captured_types(grad, variant.score_tensors)
    return of_score | captured_types(mask, variant.mask_tensors)


def captured_types(text: ModText | None, tensors: Sequence[torch.Tensor]) -> dict[str, str]:
    """Triton's types of the parameters that a mod brings along."""
    types = {}
    plain = {"number": "fp32", "double": "i64", "size": "i32", "stride": "i32", "found": "*i64"}
    for p in text.parameters if text else ():
        types[p.name] = f"*{TYPES[tensors[p.index].dtype]}" if p.kind == "pointer" else plain[p.kind]
    return types


def signature_of(
    names: list[str], types: Mapping[str, str], operand: str
) -> tuple[dict[str, str], dict[str, object]]:
    """Triton's types of the run-time parameters, and the values of the others but for the tile's sides."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    for name in names:
        if name in types:
            signature[name] = types[name]
        elif name in OPERANDS:
            signature[name] = f"*{operand}"
        elif name in STATISTICS or name.endswith(SUMS):
            signature[name] = "*fp32"
        elif name.endswith(LISTS):
            signature[name] = "*i32"
        elif name.endswith(ABSENT):
            constants[name] = None
        elif name.startswith("stride_") and name.endswith("d"):  # of a last dimension
            constants[name] = 1
        elif name not in ("BLOCK_M", "BLOCK_N"):
            signature[name] = "fp32" if name == "scale" else "i32"
    return signature, constants


def _first_shape(kernels: HopperKernels, way: Way, target: str, variant: Variant) -> Built:
    """As the launcher of the kernels for Hopper judges shapes."""
    reports: dict[Shape, Report] = {}

    def judge(shape: Shape) -> Verdict:
        try:
            report = reports[shape] = _compile_shape(kernels, way, shape, target, variant)
        # whatever the compiler has against a shape: the next one may do
        except Exception as error:
            return Verdict(refusal=error)
        refusal = compiler_bugs.wrong(kernels.portable, report.asm) if report.fits else NoTileFits
        return Verdict(report.local // 4, report.losses, refusal)

    chosen = choose(kernels.ladder(way), judge, hopper.LIMITS)
    if chosen.rung is not None:
        return Built(way, "hopper", chosen.rung, reports[chosen.rung])
    if chosen.runnable:
        shape = min(chosen.runnable, key=lambda shape: chosen.runnable[shape].spills)
        return Built(way, "hopper", shape, reports[shape], GIVES_WAY)
    shape, refusal = list(chosen.refusals.items())[-1]
    if refusal is NoTileFits:
        limit = reports[shape].target.shared_limit
        return Built(way, "hopper", shape, reports[shape], f"no shape fits {limit} bytes of shared memory")
    return Built(way, "hopper", None, None, f"no shape compiles: {refusal_in_words(refusal)}")


def _compile_shape(kernels: HopperKernels, way: Way, shape: Shape, target: str, variant: Variant) -> Report:
    portable, spec = kernels.portable, kernels.spec
    half, rows = spec.q_dtype, shape.block_m if isinstance(shape, BackwardShape) else 64
    wide, value = spec.head_tile, spec.value_tile
    tiles = {
        "Q": (rows, wide), "K": (shape.block_n, wide), "V": (shape.block_n, value), "OUT": (64, value),
        "GRAD_OUT": (rows, value), "GRAD_K": (64, wide), "GRAD_V": (64, value),
    }  # fmt: skip
    types = {name: descriptor_type((1, 1, *sides), half) for name, sides in tiles.items()}
    if way == "backward":
        types["SUM_GRAD_Q"] = descriptor_type(sum_block(wide, rows), torch.float32)
        types |= dict.fromkeys(("LSE2", "DELTA"), descriptor_type((rows,), torch.float32))
    grad = portable.captures.by_kernel(portable.grad)["dkdv"] if way == "backward" else None
    types |= _types_of_mods(variant, kernels.score, grad, portable.mask)
    constants: dict[str, Any] = {"num_stages": STAGES, **shape.arguments()}
    options: dict[str, Any] = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg")}
    kernel = getattr(kernels.module, f"{way}_kernel")
    if not variant.mask_tensors:  # its builder makes no order
        constants |= {name: None for name in kernel.arg_names if name.endswith("_ORDER")}
    names = [name for name in kernel.arg_names if name not in constants]
    signature, more = signature_of(names, types, TYPES[half])
    strides = _strides_of_mods(variant, kernels.score, grad, portable.mask)
    signature, constants, divisible = as_launched(kernel, signature, {**constants, **more}, strides)
    return offline.compile(kernel, signature, constants, target, divisible=divisible, **options)
