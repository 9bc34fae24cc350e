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

from flexmod.ahead import Built, all_jobs
from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.command_errors import WarmFolderError
from flexmod.config import cache_dir_at
from flexmod.internals.triton import cache_folder, keeps_elsewhere
from flexmod.runtime.side_by_side import in_threads
from flexmod.runtime.target import MEASURED
from flexmod.variant import variant


def warm(
    folder: str | Path,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    targets: Sequence[str] = (MEASURED,),
) -> Iterator[tuple[str, Built]]:
    """Compiles the kernels as the iterator is advanced, those of a chip side by side; yields them.

    What the folder has already is found, not compiled. A kernel's text quotes the lines of its mod, and is
    another kernel with others: give the very functions that training calls. Raises WarmFolderError,
    UnknownTarget, and what tracing raises.
    """
    path = checked_folder(folder)
    with cache_dir_at(path), cache_folder(path / COMPILED):
        made = variant(score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
        work = [all_jobs(made, target) for target in targets]
    for jobs in work:
        with cache_dir_at(path), cache_folder(path / COMPILED):
            found = in_threads([job.compile for job in jobs])
        yield from ((job.target, built) for job, built in zip(jobs, found, strict=True))


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
