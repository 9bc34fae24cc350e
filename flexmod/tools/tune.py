"""tune(): times tiles of a variant's kernels on this device, and stores the fastest in the cache folder.

Calls with kernel_options={"tuned": True} use the stored tiles.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.backends.families import INTERPRETER, PORTABLE, kernels_of, serving
from flexmod.calls.attention import flex_attention
from flexmod.codegen.kernels import Made
from flexmod.codegen.spec import SMALLEST_TILE, Direction, KernelName, Tile
from flexmod.codegen.variant import variant
from flexmod.errors.base import TuneDeviceError
from flexmod.runtime import tuned
from flexmod.runtime.target import family_of, target_of
from flexmod.runtime.tuned import Choice
from flexmod.tools.comparison import block_mask_of, median_ms, random_inputs
from flexmod.tools.mod_names import Mods, Setting
from flexmod.tools.terminal import plain, table

# tune drops a choice whose result differs by more from that of flexmod's default, as a ratio of norms.
TOLERANCE = 1e-2
SIDES = (32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
# Scores in a tile: below, overhead dominates; above, registers do not suffice.
FEWEST, MOST = 32 * 64, 128 * 128


class Search(NamedTuple):
    """The choices for one kernel, `part`; `wanted` are the operands whose gradients it computes."""

    part: str
    direction: Direction
    wanted: tuple[int, ...]
    choices: Sequence[Choice]


class Trial(NamedTuple):
    """A choice and its time in milliseconds, or why it has none."""

    choice: Choice
    ms: float | None
    problem: str = ""


@dataclass
class Tuning:
    """The result of `tune`: the trials of each part, and the files with the fastest choices."""

    name: str
    setting: Setting
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)

    def best(self, part: str) -> Trial:
        """Returns the fastest trial; the first one, flexmod's default, if none is faster."""
        return min(self.trials[part], key=lambda trial: float("inf") if trial.ms is None else trial.ms)

    def __str__(self) -> str:
        rows = []
        for part, trials in self.trials.items():
            own, best = trials[0].ms, self.best(part)
            timed = sum(trial.ms is not None for trial in trials)
            gain = f"{own / best.ms:.2f}x" if own and best.ms else "-"
            rows.append((part, timed, str(best.choice), _ms(own), _ms(best.ms), gain))
        header = ("kernel", "timed", "fastest", "own choice ms", "fastest ms", "gain")
        kept = "\n".join(f"kept in {path}" for path in self.paths)
        return plain(f"{self.name}, {self.setting}\n", table(header, rows, words=(0, 2)), f"\n{kept}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def tune(
    mods: Mods,
    setting: Setting,
    *,
    name: str = "",
    seconds: float = 60.0,
    options: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda part, done, count: None,
) -> Tuning:
    """Times tiles of the forward and the backward, and stores the fastest of each in the cache folder.

        mods      the variant
        setting   the sizes for timing
        seconds   the time limit of each kernel's search; choices close to flexmod's default come first
        options   kernel_options of all calls
        progress  called with the kernel, the number of finished choices, and the number of all choices

    Raises TuneDeviceError if there is no GPU and the options do not ask for the interpreter.
    """
    options = options or {}
    if options.get("BACKEND") != "INTERPRET":
        check_device(setting.device)
    found = Tuning(name, setting)
    bench = _Bench(mods, setting, options)
    for _, searches in itertools.groupby(_searches(mods, setting), key=lambda search: search.direction):
        best, keys = Choice(), set[tuned.Key]()
        for search in searches:
            trials = found.trials[search.part] = []
            stop = time.monotonic() + seconds
            for number, choice in enumerate(search.choices):
                if number and time.monotonic() > stop:
                    break
                trials.append(bench.trial(search, _merged(best, choice), choice, keys))
                progress(search.part, number + 1, len(search.choices))
            progress(search.part, len(search.choices), len(search.choices))
            best = _merged(best, found.best(search.part).choice)
        (key,) = keys
        facts = {"name": name, "setting": str(setting), "device": key.device}
        found.paths.append(tuned.write(key, best, facts))
    return found


def check_device(device: torch.device) -> None:
    """Raises TuneDeviceError if the device is no GPU."""
    if device.type != "cuda":
        raise TuneDeviceError(device=device)


def _merged(first: Choice, second: Choice) -> Choice:
    return replace(second, tiles={**first.tiles, **second.tiles})


class _Bench:
    """Times calls of one variant."""

    def __init__(self, mods: Mods, setting: Setting, options: dict[str, Any]) -> None:
        self.mods, self.setting, self.options = mods, setting, options
        self.inputs = random_inputs(setting)
        self.block_mask = block_mask_of(mods.mask, setting)
        self.grad_out = torch.randn_like(self.inputs[0])
        self._expected: dict[str, list[Tensor]] = {}

    def trial(self, search: Search, choice: Choice, shown: Choice, keys: set[tuned.Key]) -> Trial:
        """Times a choice; compares its first result with that of flexmod's default, the first choice."""
        with tuned.trying(search.direction, choice) as seen:
            try:
                call = self._call(search)
                results = call()
                if not all(_runs(choice, *applied) for applied in seen):
                    return Trial(shown, None, "does not fit")
                expected = self._expected.setdefault(search.part, results)
                for ours, theirs in zip(results, expected, strict=True):
                    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
                    if not error < TOLERANCE:
                        return Trial(shown, None, f"wrong by {float(error):.1e}")
                return Trial(shown, median_ms(call, self.setting.device))
            # the compiler or the device may fail in any way on one choice; others may work
            except Exception as error:
                if search.choices and shown is search.choices[0]:
                    raise
                return Trial(shown, None, str(error).partition("\n")[0])
            finally:
                keys.update(applied.key for applied in seen)

    def _call(self, search: Search) -> Callable[[], list[Tensor]]:
        prefix = "fwd_" if search.direction == "forward" else "bwd_"
        options = {**self.options, f"{prefix}tuned": True}

        # only the wanted operands require gradients, so that the backward computes no others
        q, k, v = (x.detach().requires_grad_(n in search.wanted) for n, x in enumerate(self.inputs))

        def forward() -> Tensor:
            out = flex_attention(q, k, v, self.mods.score, self.block_mask, kernel_options=options)
            assert isinstance(out, Tensor)
            return out

        if search.direction == "forward":
            return lambda: [forward()]
        out, wanted = forward(), [(q, k, v)[n] for n in search.wanted]
        return lambda: list(torch.autograd.grad(out, wanted, self.grad_out, retain_graph=True))


def _runs(choice: Choice, key: tuned.Key, kernels: Made) -> bool:
    """Returns whether a launch used the choice; a launch replaces tiles that do not fit the device."""
    taken = {name: tile for (name, _), tile in kernels.tiles.items()}
    return all(taken.get(name, tile) == tile for name, tile in choice.of(kernels).items())


def _searches(mods: Mods, setting: Setting) -> Iterator[Search]:
    """Yields the choices for each kernel on the device, flexmod's default first."""
    made = variant(mods.score, mods.mask, head_dim=setting.dim, dtype=setting.dtype)
    target = target_of(setting.device).name if setting.device.type == "cuda" else INTERPRETER
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        family, _ = serving(made, direction, target)
        kernels: Any = kernels_of(family, made, direction, family_of(target), target == INTERPRETER)
        if family is not PORTABLE:
            rungs = (Choice({direction: rung}) for rung in kernels.choices(direction))
            yield Search(direction, direction, (0, 1, 2), [Choice(), *rungs, Choice(family=PORTABLE.name)])
            continue
        parts: dict[KernelName, tuple[int, ...]] = {"forward": ()}
        if direction == "backward":
            parts = {"dq": (0,), "dkdv": (1, 2)}
        for part, wanted in parts.items():
            rungs = kernels.ladder(part)
            tiles = dict.fromkeys(
                [*rungs, *sorted(_tiles(kernels.spec.mask_block), key=lambda t: _far(t, rungs[0]))]
            )
            yield Search(part, direction, wanted, [Choice(), *(Choice({part: tile}) for tile in tiles)])


def _tiles(block: tuple[int, int] | None) -> Iterator[Tile]:
    for m, n, warps, stages in itertools.product(SIDES, SIDES, WARPS, STAGES):
        divides = block is None or not (block[0] % m or block[1] % n)
        if divides and FEWEST <= m * n <= MOST and min(m, n) >= SMALLEST_TILE:
            yield Tile(m, n, warps, stages)


def _far(tile: Tile, first: Tile) -> float:
    """Returns a tile's distance from the ladder's first one, in halvings, doublings and stages."""
    pairs = zip(
        (tile.block_m, tile.block_n, tile.warps), (first.block_m, first.block_n, first.warps), strict=True
    )
    return sum(abs(a.bit_length() - b.bit_length()) for a, b in pairs) + 0.5 * abs(tile.stages - first.stages)
