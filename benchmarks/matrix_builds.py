"""The compile matrix: what is built of every mask and mod of the library, and what is expected of it."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton

from flexmod import masks, mods
from flexmod.block_mask import generated
from flexmod.block_mask.tiles import MaskLayout
from flexmod.codegen.variant import Variant, variant
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced, trace
from flexmod.runtime import launch, offline
from flexmod.runtime.private_triton import canonicalize_dtype
from flexmod.runtime.target import named
from flexmod.tools.ahead import GIVES_WAY, Built, Job, jobs

TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
DTYPES = ("float16", "bfloat16", "float32")
LENGTH = 4096
MATRIX = {
    "sm_80": ("HMMA",),
    "sm_86": ("HMMA",),
    "sm_90": ("HGMMA",),
    "sm_100": ("UTCHMMA",),
    "gfx942": ("v_mfma",),
}
SPILLS = 256
"""Bytes of local memory of a thread, 64 registers: beyond them a launch tries another tile."""


def _places(count: int = LENGTH) -> torch.Tensor:
    return torch.arange(count)


def _learned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


MASKS: dict[str, Callable[[], Any]] = {
    "block_diffusion": lambda: masks.block_diffusion(2048, block=32),
    "by_head": lambda: masks.by_head(torch.tensor([1]), masks.causal(), masks.sliding_window(512)),
    "causal": masks.causal,
    "dilated_window": lambda: masks.dilated_window(64, dilation=3),
    "document": lambda: masks.document(_places() // 500, causal=True),
    "global_window": lambda: masks.global_window(512, tokens=4),
    "jagged": lambda: masks.jagged(torch.tensor([0, 1000, 4096]), masks.prefix_lm(100)),
    "natten": lambda: masks.natten((64, 64), kernel=7),
    "padding": lambda: masks.padding(torch.tensor([4000])),
    "prefix_lm": lambda: masks.prefix_lm(1000),
    "reordered": lambda: masks.reordered(
        masks.natten((64, 64), kernel=7), masks.tile_order((64, 64), (8, 8))
    ),
    "segments": lambda: masks.segments(_places() // 500, _places() // 400),
    "shared_prefix": lambda: masks.shared_prefix(512, _places() // 512),
    "sliding_tiles": lambda: masks.sliding_tiles(extent=(4, 32, 32), tile=(2, 8, 8), kernel=(1, 3, 3)),
    "sliding_window": lambda: masks.sliding_window(1000),
    "standalone_window": lambda: masks.standalone_window(height=64, width=64, window=8),
    "tree": lambda: masks.tree(_places(64) - 1, context=LENGTH - 64),
    "vision_cross": lambda: masks.vision_cross(torch.tensor([[4, 20], [20, 64]]), _places() // 2048),
}
MODS: dict[str, Callable[[], Any]] = {
    "alibi": lambda: mods.alibi(16),
    "causal_score": mods.causal_score,
    "chain": lambda: mods.chain(mods.alibi(16), mods.softcap(30.0)),
    "graphormer_edge": lambda: mods.graphormer_edge(
        _learned(2, 8, 4), torch.zeros(LENGTH, LENGTH, 2, dtype=torch.int8)
    ),
    "graphormer_spatial": lambda: mods.graphormer_spatial(
        _learned(8, 16), torch.zeros(LENGTH, LENGTH, dtype=torch.int8)
    ),
    "jagged": lambda: mods.jagged(torch.tensor([0, 1000, 4096]), mods.relative_position()),
    "mla_rope": lambda: mods.mla_rope(torch.zeros(1, 1, LENGTH, 8), torch.zeros(1, LENGTH, 8), 0.1),
    "relative_bias": lambda: mods.relative_bias(_learned(2 * LENGTH - 1)),
    "relative_position": mods.relative_position,
    "sandwich": lambda: mods.sandwich(16, length=LENGTH, dim=64),
    "sink": lambda: mods.sink(_learned(16)),
    "softcap": lambda: mods.softcap(30.0),
    "t5_bias": lambda: mods.t5_bias(_learned(32, 16), max_distance=128),
    "temperature": lambda: mods.temperature(2.0),
}
OF_BLOCK_MASKS = "block mask"


@dataclass(frozen=True)
class Build:
    """The kernels of one mask or mod for one chip, one pair of head dimensions and one dtype.

    The string `known` is the digest of its texts from an earlier build, or "". A `part` is "masks", "mods"
    (with the causal mask), or "block mask": kernels that build a mask and have no dimensions or dtype.
    """

    part: str
    name: str
    target: str
    dims: tuple[int, int] = (0, 0)
    dtype: str = ""
    known: str = ""

    def __str__(self) -> str:
        numbers = f" D{self.dims[0]}/{self.dims[1]} {self.dtype}" if self.dtype else ""
        return f"{self.target} {self.part} {self.name}{numbers}"


def builds() -> list[Build]:
    """All of them; in an order in which each chip, dimension and dtype comes again and again, others first.

    So whatever part of it there was time for is a sample of all.
    """
    kernels = [
        [
            Build(part, name, target, dims, dtype)
            for part, names in (("masks", MASKS), ("mods", MODS))
            for name in names
        ]
        for dims, dtype, target in itertools.product(DIMS, DTYPES, TARGETS)
    ]
    makers = [[Build(OF_BLOCK_MASKS, name, target) for name in MASKS] for target in TARGETS]
    columns = [sorted(column, key=lambda b: _digest(str(b))) for column in (*kernels, *makers)]
    return [b for rank in itertools.zip_longest(*columns) for b in rank if b is not None]


def compile_build(build: Build) -> dict[str, Any] | None:
    """What became of its kernels, and the digest of their texts; None where these are `build.known`."""
    work = list(_of_block_mask(build) if build.part == OF_BLOCK_MASKS else _of_attention(build))
    digest = _digest(triton.__version__, *(str(each.text) for each in work))
    if digest == build.known:
        return None
    with TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        return {"digest": digest, "kernels": [_facts(built) for each in work for built in each.compile()]}


class _Work(NamedTuple):
    text: tuple[str, ...]
    """What the outcome depends on."""
    compile: Callable[[], list[Built]]


def _of_attention(build: Build) -> Iterator[_Work]:
    made = (MASKS if build.part == "masks" else MODS)[build.name]()
    score, mask = (None, made) if build.part == "masks" else (made, masks.causal())
    if build.name == "causal_score":  # becomes a mask by itself
        mask = None
    of = variant(
        score, mask,
        head_dim=build.dims[0], value_dim=build.dims[1], dtype=getattr(torch, build.dtype),
    )  # fmt: skip
    for job in jobs(of, build.target):
        ladder = repr(job.kernels.ladder(job.kernel))
        yield _Work((_key(job.kernels.module, f"{job.kernel}_kernel"), ladder), partial(_compiled, job, of))


def _compiled(job: Job, of: Variant) -> list[Built]:
    """Compiles a job; if its kernel does not fit, also compiles the portable kernels that replace it."""
    built = job.compile()
    if built.problem != GIVES_WAY:
        return [built]
    portable = jobs(replace(of, options=(("TEMPLATE", "portable"),)), job.target)
    backward = job.kernel == "backward"
    return [built, *(other.compile() for other in portable if other.kernels.spec.backward == backward)]


def _of_block_mask(build: Build) -> Iterator[_Work]:
    """As a launch specializes them where no size is 1 or a multiple of 16."""
    launches: list[tuple[Any, str, dict[str, Any]]] = []

    def noted(source: Any, name: str, device: Any, grid: Any, arguments: dict[str, Any]) -> None:
        given = {name: value for name, value in arguments.items() if name != "enable_fp_fusion"}
        launches.append((source.module, name, given))

    sizes = (3, 2, LENGTH + 7, LENGTH + 7)
    traced = trace(MASKS[build.name](), "mask")
    traced = Traced(fitted(traced.graph, sizes), traced.tensors)
    generated._builder_part.cache_clear()
    with patch.object(launch, "start", noted):
        generated.build(
            traced, MaskLayout(sizes, (128, 128), torch.device("cpu"), True), interpreted=True
        )
    for module, name, arguments in launches:
        work = partial(_builder_kernel, module, name, arguments, build.target)
        yield _Work((_key(module, name),), work)


def _builder_kernel(module: ModuleType, name: str, arguments: dict[str, Any], target: str) -> list[Built]:
    kernel = getattr(module, name)
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    constants = {n: v for n, v in arguments.items() if n in fixed or v is None}
    signature = {
        n: f"*{canonicalize_dtype(v.dtype)}" if isinstance(v, torch.Tensor) else "i32"
        for n, v in arguments.items()
        if n not in constants
    }
    report = offline.compile(kernel, signature, constants, target, num_warps=4, enable_fp_fusion=False)
    return [Built(name, "portable", None, report)]


def _facts(built: Built) -> dict[str, Any]:
    report = built.report
    facts = {"kernel": built.kernel, "template": built.template, "tile": str(built.tile or "-")}
    if report is None:
        return {**facts, "problem": built.problem}
    return {
        **facts, "problem": built.problem, "shared": report.shared, "registers": report.registers,
        "spills": report.local, "matrix": dict(report.matrix_instructions), "warnings": len(report.warnings),
    }  # fmt: skip


def _key(module: ModuleType, name: str) -> str:
    """Returns Triton's cache key of a kernel and the functions that it calls."""
    return str(getattr(module, name).cache_key)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def faults(build: Build, kernel: dict[str, Any]) -> list[str]:
    """What of a kernel is not as it should be, each in a few words."""
    if kernel["problem"]:
        return [] if kernel["problem"] == GIVES_WAY else [kernel["problem"]]
    found = []
    limit = named(build.target).shared_limit
    if kernel["shared"] > limit:
        found.append(f"{kernel['shared']} of {limit} bytes of shared memory")
    if kernel["spills"] > SPILLS:
        found.append(f"{kernel['spills']} bytes of spills, {SPILLS} allowed")
    wanted = () if build.part == OF_BLOCK_MASKS else matrix_instructions(build)
    if wanted and not any(kernel["matrix"].get(name) for name in wanted):
        found.append(f"no {' or '.join(wanted)}")
    if build.dtype == "float32" and build.target != "gfx942" and kernel["matrix"]:
        found.append(f"float32 products by {', '.join(kernel['matrix'])}")
    return found


def matrix_instructions(build: Build) -> tuple[str, ...]:
    """One of these must stand in a kernel. NVIDIA's matrix units cannot multiply float32 as such."""
    if build.dtype == "float32":
        return ("v_mfma",) if build.target == "gfx942" else ()
    return MATRIX[build.target]
