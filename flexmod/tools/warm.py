"""Fills a folder with compiled kernels to ship: a process that uses the folder need not compile them.

    for target, built in warm("kernels", mods.softcap(30.0), masks.causal(), head_dim=128, targets=["sm_90"]):
        print(target, built.kernel)

    FLEXMOD_CACHE_DIR=kernels python train.py

The chips need not be present. The folder gets forward and backward kernels for dense tensors [B, H, M, D]
whose head dimension is a multiple of 16. It lacks kernels that build block masks, and separate kernels for
gradients of captured tensors. To add these, run the model on such a chip with TRITON_CACHE_DIR set to the
folder's part `compiled`. Each host builds Triton's launchers in C itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.codegen.variant import variant
from flexmod.errors.commands import WarmFolderError
from flexmod.internals.triton import cache_folder, keeps_elsewhere
from flexmod.runtime.config import cache_dir_at
from flexmod.runtime.side_by_side import in_threads
from flexmod.runtime.target import MEASURED
from flexmod.tools.ahead import Built, all_jobs


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
    """Compiles kernels into the folder while you iterate, all kernels of a chip in parallel; yields them.

    It does not compile kernels again that the folder has. A kernel's text quotes the lines of its mod, so the
    same formula in other lines is another kernel: pass the functions that training calls. Raises
    WarmFolderError, UnknownTarget, and what tracing raises.
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
    """Creates the folder and returns its absolute path. Raises WarmFolderError if it cannot store kernels."""
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
