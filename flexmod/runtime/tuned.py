"""Stores tiles from `flexmod tune` in the cache folder, for calls with `{"tuned": True}`.

Each direction of a variant on a device has a file. Its name depends on the KernelSpec, the structure of the
mods, and the versions of flexmod and Triton, but not on constants or lengths.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flexmod.codegen.cache import write_file
from flexmod.codegen.kernels import Made
from flexmod.codegen.spec import Direction, KernelSpec
from flexmod.errors import NotTunedError
from flexmod.ir.graph import Graph
from flexmod.runtime import config
from flexmod.runtime.locks import lazy_imports

# Change it when kernels or the files' contents change; older files then count as absent.
FORMAT = 3

Kinds = tuple[type, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """The tuned kernels and tiles of a direction; flexmod chooses the rest by its usual rules.

    `tiles` has rungs by kernel. `family`: this family's kernels run, even if another one could.
    """

    tiles: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""

    def of(self, kernels: Made) -> dict[str, Any]:
        """Returns the rungs of a family's kernels."""
        return {name: tile for name, tile in self.tiles.items() if isinstance(tile, kernels.rungs)}

    def __str__(self) -> str:
        names = [f"{name} {tile}" for name, tile in self.tiles.items()]
        names += [f"{self.family} template"] if self.family else []
        return ", ".join(names) or "flexmod's own choice"


@dataclass(frozen=True)
class Key:
    """The key of a choice: a direction of a variant, on a device."""

    direction: Direction
    device: str
    spec: KernelSpec
    score: Graph | None
    mask: Graph | None

    @property
    def path(self) -> Path:
        with lazy_imports():
            import triton
        graphs = [graph.skeleton[0] if graph else None for graph in (self.score, self.mask)]
        facts = (FORMAT, triton.__version__, self.device, self.direction, self.spec, graphs)
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '_', self.device)}_{self.direction}_{key}.json"


def folder() -> Path:
    """Returns the folder of the files, which need not exist."""
    return config.cache_dir() / "tuned"


def write(key: Key, choice: Choice, facts: Mapping[str, Any]) -> Path:
    """Writes a choice to a file, with facts for people who read it; returns its path."""
    tiles = {name: {"kind": type(tile).__name__, **asdict(tile)} for name, tile in choice.tiles.items()}
    text = json.dumps({**facts, "tiles": tiles, "family": choice.family}, indent=1)
    write_file(key.path, f"{text}\n".encode())
    _read.cache_clear()
    _renew()
    return key.path


def read(key: Key, kinds: Kinds) -> Choice | None:
    """Returns a stored choice, or None without a valid file. `kinds` are the classes of rungs."""
    try:
        return _read(key.path, kinds)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # absent, unreadable, damaged
        return None


@lru_cache(256)  # but for errors: another process may write the file meanwhile
def _read(path: Path, kinds: Kinds) -> Choice:
    kept = json.loads(path.read_bytes())
    by_name = {kind.__name__: kind for kind in kinds}
    tiles = {name: by_name[tile.pop("kind")](**tile) for name, tile in kept["tiles"].items()}
    return Choice(tiles, str(kept["family"]))


class Applied(NamedTuple):
    """Kernels that run with a choice."""

    key: Key
    kernels: Made


_tried: dict[Direction, tuple[Choice, list[Applied]]] = {}


# Replaced when tuning stores or tries a choice; part of the keys of calls with tuned kernels.
_state = object()


def state() -> object:
    """Returns the same object as long as calls with tuned kernels keep the same choices."""
    return _state


def _renew() -> None:
    global _state
    _state = object()


@contextmanager
def trying(direction: Direction, choice: Choice) -> Iterator[list[Applied]]:
    """Makes tuned calls in a block run with this choice; yields the kernels that took it."""
    seen: list[Applied] = []
    _tried[direction] = choice, seen
    _renew()
    try:
        yield seen
    finally:
        del _tried[direction]
        _renew()


# The current choice by kernels.
_applied: WeakKeyDictionary[Made, Choice] = WeakKeyDictionary()


def apply(kernels: Made, key: Key, device: torch.device, kinds: Kinds) -> None:
    """Makes kernels run with their stored choice. `kinds`: as in `read`.

    Raises:
        NotTunedError: there is no stored choice.
    """
    if key.direction in _tried:
        choice, seen = _tried[key.direction]
        seen.append(Applied(key, kernels))
    else:
        found = read(key, kinds)
        if found is None:
            raise NotTunedError(direction=key.direction, device=key.device, folder=folder())
        choice = found
    if _applied.get(kernels) is choice:
        return
    _applied[kernels] = choice
    for known in [of for of in kernels.tiles if of[1] == device]:
        del kernels.tiles[known]
    kernels.tiles.update({(name, device): tile for name, tile in choice.of(kernels).items()})
    if kernels.spec.exact and "dq" in choice.tiles:  # both kernels must add in one order
        kernels.tiles["delta", device] = choice.tiles["dq"]
    if kernels.limits.gives_way and choice.family not in ("", kernels.family):
        kernels.tiles[key.direction, device] = f"the {choice.family} template was found to be faster"
