"""The best tile of a kernel that fits the device, remembered, and launches of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from flexmod.codegen.choose import Chosen, Limits, Verdict, choose
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelName, Tile, option
from flexmod.errors import NoTileFits
from flexmod.internals.triton import OutOfResources
from flexmod.plan import Launch, Source
from flexmod.runtime import jit
from flexmod.runtime.compiler_bugs import WrongProducts, wrong
from flexmod.runtime.interpreter import interpreted

# kernel_options that Triton takes as they are, on AMD alone
AMD_OPTIONS = ("kpack", "waves_per_eu", "matrix_instr_nonkdim")

# of portable kernels
LIMITS = Limits(passing=64)

# What is known of compiled kernels: each launch asks.
_wrong: WeakKeyDictionary[Any, WrongProducts | None] = WeakKeyDictionary()


def settle(
    kernels: Kernels,
    kernel: KernelName,
    device: torch.device,
    arguments: Callable[[Tile], Sequence[Mapping[str, Any]]],
) -> Tile:
    """The tile for a kernel of the module that has a ladder: the best that fits the device.

    `arguments` makes those of each of its launches with a tile. The first call compiles the rungs of the
    ladder in order, and runs none: one that the device refuses, whose registers spill much, or that the
    compilers made wrong gives way to the next. Where all spill much, the one that spills least is taken.
    Other strides make another variant of the kernel, which may need more: then the ladder is tried again.

    Raises:
        NoTileFits: the device has too little shared memory for the last rung.
        RoundedProductsError: all rungs round float32 that must not be rounded.
        MisaddressedProductsError: all rungs read wrong addresses.
    """

    def judge(tile: Tile) -> Verdict:
        return worst([verdict(kernels, kernel, device, given) for given in arguments(tile)])

    tile = kernels.tiles.get((kernel, device))
    if tile is None or judge(tile).refusal is not None:
        tile = kernels.tiles[kernel, device] = _best(choose(kernels.ladder(kernel), judge, LIMITS), device)
    return tile


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a tile by those on its launches."""
    return Verdict(
        max(verdict.spills for verdict in verdicts),
        tuple(dict.fromkeys(loss for verdict in verdicts for loss in verdict.losses)),
        next((verdict.refusal for verdict in verdicts if verdict.refusal is not None), None),
    )


def verdict(
    kernels: Kernels, kernel: KernelName, device: torch.device, arguments: Mapping[str, Any]
) -> Verdict:
    """What a launch with these arguments is judged by; the interpreter takes any tile."""
    if kernels.interpreted:
        return Verdict()
    function = getattr(kernels.module, f"{kernel}_kernel")
    return judged(kernels, jit.compiled(function, device, arguments), device)


def judged(
    kernels: Kernels,
    compiled: Any,
    device: torch.device,
    losses: Callable[[str, bytes], tuple[str, ...]] | None = None,
) -> Verdict:
    """Loads what was compiled, and judges it. `losses` names what the machine code lacks.

    Kernels of one text have what was compiled in common: one that was refused before is refused again.
    """
    try:
        with torch.cuda.device(device):
            compiled[(1,)]  # loads it; `compiled.run` says once only that it cannot be
    except OutOfResources as error:
        return Verdict(refusal=error)
    # Triton may be told to store machine code alone: then nothing is known of the text
    slow = losses(compiled.asm.get("ptx", ""), compiled.asm["cubin"]) if losses else ()
    return Verdict(int(compiled.n_spills), slow, known_wrong(kernels, compiled))


def known_wrong(kernels: Kernels, compiled: Any) -> WrongProducts | None:
    """As `compiler_bugs.wrong`, of what was compiled; looked at once."""
    if compiled not in _wrong:
        _wrong[compiled] = wrong(kernels, compiled.asm)
    return _wrong[compiled]


def _best(chosen: Chosen[Tile], device: torch.device) -> Tile:
    if chosen.rung is not None:
        return chosen.rung
    too_large = {tile: why for tile, why in chosen.refusals.items() if isinstance(why, OutOfResources)}
    for error in chosen.refusals.values():
        if isinstance(error, type):
            tried = [str(tile) for tile, why in chosen.refusals.items() if why is error]
            raise error(triton=triton.__version__, device=device, tried=", ".join(tried))
    raise NoTileFits(
        limit=list(too_large.values())[-1].limit,
        device=device,
        tried=", ".join(f"{tile}: {e.required} bytes" for tile, e in too_large.items()),
    )


def start(
    source: Source, name: str, device: torch.device, grid: tuple[int], arguments: Mapping[str, Any]
) -> Any:
    """One launch of a kernel of a module: on a GPU, or through the interpreter on CPU tensors.

    Returns what Triton compiled, None in the interpreter.
    """
    if source.interpreted:
        jit.start(getattr(interpreted(source.module), name), grid, None, arguments)
        return None
    return jit.start(getattr(source.module, name), grid, device, arguments)


def rung_arguments(step: Launch) -> dict[str, Any]:
    """What a launch is given for its tile or shape."""
    if step.rung is None:
        return {}
    if isinstance(step.rung, Tile):
        return _tile_arguments(step.source, step.kernel, step.rung)  # type: ignore[arg-type]
    return dict(step.rung.arguments())


def _tile_arguments(kernels: Kernels, kernel: KernelName, tile: Tile) -> dict[str, Any]:
    names = AMD_OPTIONS if torch.version.hip else ()
    given = {name: option(kernels.options, kernel, name, None) for name in names}
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **{name: value for name, value in given.items() if value is not None},
    }
