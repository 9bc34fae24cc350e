"""Tiles that `flexmod tune` found, in the cache folder; used where a call asks for them by `{"tuned": True}`.

A file for each direction of a variant on a device: the KernelSpec, the structure of the mods, the versions of
flexmod and Triton decide which. The values of constants and the lengths of a call do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flexmod import config
from flexmod.codegen.hopper import BackwardShape, ForwardShape, Shape, Way, hopper_kernels
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelName, KernelSpec, Tile
from flexmod.command_errors import NotTunedError
from flexmod.ir.graph import Graph
from flexmod.lazy_imports import lazy_imports

# A change of kernels or of what is kept makes what was found before unknown.
FORMAT = 1
PORTABLE = "the portable template was found to be faster"


@dataclass(frozen=True, eq=False)
class Choice:
    """What a direction of a variant runs with; what is not named, flexmod chooses as ever.

    `shape` is that of the kernels made for Hopper; `portable`: the portable ones run there too.
    """

    tiles: Mapping[KernelName, Tile] = field(default_factory=dict)
    shape: Shape | None = None
    portable: bool = False

    def __str__(self) -> str:
        names = [f"{name} {tile}" for name, tile in self.tiles.items()]
        names += [str(self.shape)] if self.shape else []
        return ", ".join(names + (["portable template"] if self.portable else [])) or "flexmod's own choice"


@dataclass(frozen=True)
class Key:
    """What is tuned: a direction of a variant, on a device."""

    way: Way
    device: str
    spec: KernelSpec
    score: Graph | None
    mask: Graph | None

    @property
    def path(self) -> Path:
        return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '_', self.device)}_{self.way}_{self._hash}.json"

    @property
    def _hash(self) -> str:
        with lazy_imports():
            import triton
        graphs = [graph.skeleton[0] if graph else None for graph in (self.score, self.mask)]
        facts = (FORMAT, triton.__version__, self.device, self.way, self.spec, graphs)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def folder() -> Path:
    """Where the files are; it need not exist."""
    return config.cache_dir() / "tuned"


def device_name(device: torch.device, interpreted: bool) -> str:
    return "Triton's interpreter" if interpreted else torch.cuda.get_device_name(device)


def write(key: Key, choice: Choice, facts: Mapping[str, Any]) -> Path:
    """Keep a choice, with facts for people who read the file; returns its path."""
    shape = {"kind": type(choice.shape).__name__, **asdict(choice.shape)} if choice.shape else None
    tiles = {name: asdict(tile) for name, tile in choice.tiles.items()}
    text = json.dumps({**facts, "tiles": tiles, "shape": shape, "portable": choice.portable}, indent=1)
    key.path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=key.path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, key.path)
    _read.cache_clear()
    _renew()
    return key.path


def read(key: Key) -> Choice | None:
    """What was found, None where nothing was, or its file is damaged."""
    return _read(key.path)


@lru_cache(256)
def _read(path: Path) -> Choice | None:
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text())
        tiles = {name: Tile(**tile) for name, tile in kept["tiles"].items()}
        shape: Shape | None = None
        if kept["shape"]:
            kinds = {"ForwardShape": ForwardShape, "BackwardShape": BackwardShape}
            shape = kinds[kept["shape"].pop("kind")](**kept["shape"])
        return Choice(tiles, shape, kept["portable"])
    except (ValueError, LookupError, TypeError, AttributeError):  # damaged
        return None


class Applied(NamedTuple):
    """Kernels that took a choice."""

    key: Key
    kernels: Kernels


_tried: dict[Way, tuple[Choice, list[Applied]]] = {}


# Replaced whenever something is found or tried: calls that ask for tuned kernels are known by it.
_state = object()


def state() -> object:
    """The same object as long as calls that ask for tuned kernels run with the same ones."""
    return _state


def _renew() -> None:
    global _state
    _state = object()


@contextmanager
def trying(way: Way, choice: Choice) -> Iterator[list[Applied]]:
    """Within it, calls that ask for tuned kernels run with this choice; gives the kernels that took it."""
    seen: list[Applied] = []
    _tried[way] = choice, seen
    _renew()
    try:
        yield seen
    finally:
        del _tried[way]
        _renew()


# The choice that kernels run with now.
_applied: WeakKeyDictionary[Kernels, Choice] = WeakKeyDictionary()


def apply(kernels: Kernels, key: Key, device: torch.device) -> None:
    """Have kernels run with what was found for them.

    Raises:
        NotTunedError: nothing was.
    """
    if key.way in _tried:
        choice, seen = _tried[key.way]
        seen.append(Applied(key, kernels))
    else:
        found = read(key)
        if found is None:
            raise NotTunedError(way=key.way, device=key.device, folder=folder())
        choice = found
    if _applied.get(kernels) is choice:
        return
    _applied[kernels] = choice
    for known in [of for of in kernels.tiles if of[1] == device]:
        del kernels.tiles[known]
    kernels.tiles.update({(name, device): tile for name, tile in choice.tiles.items()})
    if kernels.spec.exact and "dq" in choice.tiles:  # both add up in one order
        kernels.tiles["delta", device] = choice.tiles["dq"]
    settled = hopper_kernels(kernels).settled
    settled.pop((key.way, device), None)
    if choice.shape or choice.portable:
        settled[key.way, device] = choice.shape or PORTABLE
