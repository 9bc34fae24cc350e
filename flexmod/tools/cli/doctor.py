"""flexmod doctor: reports the installation, the backend that would run, and why."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import get_args

import click
import torch
from rich.text import Text

from flexmod.codegen.spec import Direction
from flexmod.codegen.variant import variant
from flexmod.runtime import config, tuned
from flexmod.runtime.target import OLDEST, Target, target_of
from flexmod.tools.terminal import hint, show, table

# What flexmod needs, and what a part of it needs: packages, and the part.
PACKAGES = {
    **dict.fromkeys(("flexmod", "torch", "triton", "jinja2", "rich", "click"), ""),
    "numpy": "Triton's interpreter", "matplotlib": "plots", "transformers": "its models",
}  # fmt: skip
DIMS = (32, 64, 128, 256)


@click.command()
def doctor() -> int:
    """What is installed, which backend would run, and why. The exit status is 1 if something is amiss."""
    troubles = list(_troubles())
    show(
        table(("installed", "version", "for"), _installed(), words=(0, 1, 2)), "",
        table(("device", "chip", "memory", "shared memory of a block"), _devices(), words=(0, 1)), "",
        table(("tensors on", "runs", "why"), _runs(), words=(0, 1, 2)), "",
        *_folders(), "",
        *(Text(f"trouble: {trouble}", "red") for trouble in troubles),
        Text(f"{len(troubles)} to see to", "red") if troubles else Text("nothing is amiss", "green"),
    )  # fmt: skip
    if not troubles:
        hint("flexmod compare sliding_window document causal")
    return 1 if troubles else 0


def _installed() -> Iterator[tuple[str, str, str]]:
    yield "Python", platform.python_version(), ""
    for name, purpose in PACKAGES.items():
        yield name, version(name), purpose


def version(name: str) -> str:
    """Of a distribution; "-" where it is not installed."""
    try:
        if name in ("flexmod", "torch", "triton"):  # these may run from a folder
            return str(importlib.import_module(name).__version__)
        return importlib.metadata.version(name)
    except ImportError:
        return "-"


def _targets() -> list[tuple[torch.device, Target]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", number) for number in range(count)]
    return [(device, target_of(device)) for device in devices]


def _devices() -> Iterator[tuple[str, str, str, str]]:
    yield "cpu", platform.machine(), "", ""
    for device, target in _targets():
        memory = torch.cuda.get_device_properties(device).total_memory
        chip = f"{torch.cuda.get_device_name(device)} ({target.name})"
        yield str(device), chip, f"{memory >> 30} GiB", f"{target.shared_limit} bytes"


def _runs() -> Iterator[tuple[str, str, str]]:
    if version("triton") == "-":
        yield "cpu", "block-sparse torch", "no kernels without Triton, which has wheels for Linux alone"
        return
    from flexmod.backends.families import serving

    yield "cpu", "block-sparse torch", "no kernels there; BACKEND='INTERPRET' interprets Triton's"
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "no device is found" if built else "this torch is built without CUDA"
        yield "cuda", "nothing", why
    for device, target in _targets():
        for direction in get_args(Direction):
            dims: dict[tuple[str, str], list[str]] = {}
            for dim in DIMS:
                family, passed = serving(variant(head_dim=dim), direction, target.name)
                why = "; ".join(passed.values()) or f"the chip is {target.name}"
                dims.setdefault((family.title, why), []).append(str(dim))
            for (title, why), alike in dims.items():
                yield str(device), f"{direction}, bfloat16, head dimension {', '.join(alike)}: {title}", why


def _folders() -> Iterator[str]:
    folder = config.cache_dir()
    # os.path and glob.glob: no error where a folder may not be searched
    modules, found = (
        len(glob(name, root_dir=where)) for where, name in ((folder, "*.py"), (tuned.folder(), "*.json"))
    )
    yield f"cache folder {folder}: {modules} generated modules, {found} tuned"
    for name in (config.DEBUG, config.CACHE_DIR, "TRITON_CACHE_DIR", "TRITON_INTERPRET"):
        if os.environ.get(name):
            yield f"{name}={os.environ[name]}"


def _troubles() -> Iterator[str]:
    """What keeps something from running."""
    if sys.platform == "linux" and version("triton") == "-":
        yield 'Triton is not installed: no kernel runs. pip install "triton>=3.6".'
    folder = config.cache_dir()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.access(existing, os.W_OK):
        yield f"{existing} cannot be written: modules go to a temporary folder. Set {config.CACHE_DIR}."
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield "TRITON_INTERPRET=1: Triton compiles nothing in this process. Use BACKEND='INTERPRET'."
    if torch.cuda.is_available():
        for device, target in _targets():
            if target.backend == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
                yield f"{device} is older than {OLDEST}: Triton does not compile for it."
    if torch.version.cuda and Path("/dev/nvidia0").exists() and not torch.cuda.is_available():
        yield "there is an NVIDIA device, but torch does not find it: look at the driver with nvidia-smi."
