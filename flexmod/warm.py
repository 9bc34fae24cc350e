"""Fills a folder with compiled kernels, which can be shipped: a process that uses it compiles none of them.

    for target, built in warm("kernels", mods.softcap(30.0), masks.causal(), head_dim=128, targets=["sm_90"]):
        print(target, built.kernel)

    FLEXMOD_CACHE_DIR=kernels python train.py

The chips need not be present. Kernels are those of the forward and the backward of dense tensors [B, H, M, D]
whose head dimension is a multiple of 16. Not among them: kernels that build block masks, and sums of captured
gradients apart from the backward. To have these too, fill the folder by a run on such a chip, with
TRITON_CACHE_DIR at its part `compiled`. Triton's launchers in C are made by each host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flexmod.ahead import STAGES, TYPES, Built, Job, Template, as_launched, jobs, kernels_on, signature_of
from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.codegen.hopper import HopperKernels
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import statistics_rows
from flexmod.command_errors import WarmFolderError
from flexmod.config import cache_dir_at
from flexmod.internals.triton import cache_folder, keeps_elsewhere
from flexmod.runtime import offline
from flexmod.variant import Variant, variant

NOT_MADE = ("LSE2", "PEAK", "REST", "PEAKS", "LARGE")  # by the portable backward, of scores that may be large


def warm(
    folder: str | Path,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    targets: Sequence[str] = ("sm_90",),
) -> Iterator[tuple[str, Built]]:
    """Compiles the kernels one by one, as the iterator is advanced; yields each with its chip.

    What the folder has already is found, not compiled. A kernel's text quotes the lines of its mod, and is
    another kernel with others: give the very functions that training calls. Raises WarmFolderError,
    UnknownTarget, and what tracing raises.
    """
    path = checked_folder(folder)
    with cache_dir_at(path), cache_folder(path / COMPILED):
        made = variant(score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
        work = [job for target in targets for job in all_jobs(made, target)]
    for job in work:
        with cache_dir_at(path), cache_folder(path / COMPILED):
            built = job.compile()
        yield job.target, built


def checked_folder(folder: str | Path) -> Path:
    """Its absolute path; the folder is made. Raises WarmFolderError where kernels cannot be kept there."""
    path = Path(folder).expanduser().absolute()
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


def all_jobs(made: Variant, target: str) -> list[Job]:
    """Those of `ahead.jobs`, and the kernels of a backward that have no tile to choose."""
    backward = kernels_on(made, "backward", target)
    if isinstance(backward, HopperKernels):
        beside = [_job(backward, "hopper", name, target) for name in ("statistics", "round")]
    elif backward.spec.exact:
        beside = []
    else:
        absent = () if backward.small_scores else NOT_MADE
        beside = [_job(backward, "portable", "statistics", target, absent)]
    return jobs(made, target) + beside


def _job(
    kernels: Kernels | HopperKernels, template: Template, name: str, target: str, absent: Sequence[str] = ()
) -> Job:
    def work() -> Built:
        return Built(name, template, None, _compile(kernels, name, target, absent))

    return Job(target, name, template, kernels, work)


def _compile(
    kernels: Kernels | HopperKernels, name: str, target: str, absent: Sequence[str]
) -> offline.Report:
    """As a launch without num_warps and num_stages compiles it; parameters of `absent` are None there."""
    kernel = getattr(kernels.module, f"{name}_kernel")
    types = {"SUM_GRAD_Q": "*fp32"}
    signature, constants = signature_of(kernel.arg_names, types, TYPES[kernels.spec.q_dtype])
    signature = {parameter: kind for parameter, kind in signature.items() if parameter not in absent}
    sides = {"BLOCK_M": statistics_rows(kernels.spec)} if "BLOCK_M" in kernel.arg_names else {}
    constants = {**constants, **dict.fromkeys(absent), **sides}
    signature, constants, divisible = as_launched(kernel, signature, constants, {})
    return offline.compile(
        kernel, signature, constants, target, num_warps=4, num_stages=STAGES, divisible=divisible
    )
