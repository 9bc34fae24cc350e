"""Starts a kernel with the best tile that fits the device, and remembers which one that was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from triton.runtime.errors import OutOfResources

from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelName, Tile, option
from flexmod.errors import MisaddressedProductsError, NoTileFits, RoundedProductsError
from flexmod.runtime import machine_code, tape
from flexmod.runtime.interpreter import interpreted

# kernel_options that Triton takes as they are, on AMD alone
AMD_OPTIONS = ("kpack", "waves_per_eu", "matrix_instr_nonkdim")

# Registers that a thread may spill before another tile is tried.
SPILLS_ALLOWED = 64

WrongProducts = type[RoundedProductsError] | type[MisaddressedProductsError]
# What is known of compiled kernels: each launch asks.
_wrong: WeakKeyDictionary[Any, WrongProducts | None] = WeakKeyDictionary()


def launch(
    kernels: Kernels,
    kernel: KernelName,
    device: torch.device,
    grid: Callable[[Tile], tuple[int]],
    arguments: Mapping[str, object] | Callable[[Tile], Mapping[str, object]],
) -> Tile:
    """Run a kernel of the module that has a ladder, on the device's current stream; returns the tile it took.

    `arguments` are all but the tile's, or a function that makes those of a tile. The first call tries the
    rungs of the ladder in order. Triton refuses one that does not fit before anything runs; one whose
    registers spill much gives way to the next, and where all do the one that spills least is kept; one that
    the compilers made wrong is left, and never runs. A kernel writes all of its results, or what it adds to
    is made for each try: a second one replaces the first.

    Raises:
        NoTileFits: the device has too little shared memory for the last rung.
        RoundedProductsError: all rungs round float32 that must not be rounded.
        MisaddressedProductsError: all rungs read wrong addresses.
    """

    def run(tile: Tile) -> Any:
        """What was compiled, None in the interpreter. A wrong one may read anywhere: it does not run."""
        chosen = _tile_arguments(kernels, kernel, tile)
        given = {**(arguments(tile) if callable(arguments) else arguments), **chosen}
        name = f"{kernel}_kernel"
        if not kernels.interpreted:
            compiled = tape.compiled(getattr(kernels.module, name), device, given)
            if known_wrong(kernels, compiled):
                return compiled
        return start(kernels, name, device, grid(tile), given)

    settled = kernels.tiles.get((kernel, device))
    if settled is not None:
        try:
            if not known_wrong(kernels, run(settled)):
                return settled
        except OutOfResources:  # other strides make another variant of the kernel, which may need more
            pass
    kernels.tiles[kernel, device] = _settle(kernels, kernels.ladder(kernel), device, run)
    return kernels.tiles[kernel, device]


def wrong(kernels: Kernels, asm: Mapping[str, Any]) -> WrongProducts | None:
    """What the compilers did to a kernel that makes its results wrong: the error that says so, or None.

    Triton 3.6 multiplies float32 in TF32 on sm_100, though it is told not to, where a product has multiples
    of 64 rows, now and then; it is mended in later ones (triton-lang/triton, issue 10176). Its ptxas loses
    addresses on sm_90: see `machine_code`.
    """
    if kernels.spec.exact and "kind::tf32" in asm.get("ptx", ""):
        return RoundedProductsError
    if machine_code.misaddressed(asm.get("cubin", b"")):
        return MisaddressedProductsError
    return None


def known_wrong(kernels: Kernels, compiled: Any) -> WrongProducts | None:
    """As `wrong`, of what was compiled: None in the interpreter."""
    if compiled is None:
        return None
    if compiled not in _wrong:
        _wrong[compiled] = wrong(kernels, compiled.asm)
    return _wrong[compiled]


def _settle(
    kernels: Kernels, rungs: Sequence[Tile], device: torch.device, run: Callable[[Tile], Any]
) -> Tile:
    """Run the tile that later calls shall take, last. `run` gives what was compiled, or None."""
    spilled: dict[Tile, int] = {}
    refused = []
    left: dict[WrongProducts, list[Tile]] = {}
    tile = rungs[0]
    for tile in rungs:
        try:
            compiled = run(tile)
        except OutOfResources as e:
            refused.append((tile, e))
            continue
        fault = known_wrong(kernels, compiled)
        if fault is not None:
            left.setdefault(fault, []).append(tile)
            continue
        spilled[tile] = compiled.n_spills if compiled else 0
        if spilled[tile] <= SPILLS_ALLOWED:
            break
    if not spilled and left:
        error, tiles = next(iter(left.items()))
        raise error(triton=triton.__version__, device=device, tried=", ".join(map(str, tiles)))
    if not spilled:
        raise NoTileFits(
            limit=refused[-1][1].limit,
            device=device,
            tried=", ".join(f"{tile}: {e.required} bytes" for tile, e in refused),
        )
    best = min(spilled, key=lambda t: spilled[t])
    if best != tile:
        run(best)
    return best


def start(
    kernels: Kernels, name: str, device: torch.device, grid: tuple[int], arguments: Mapping[str, Any]
) -> Any:
    """One launch of a kernel of the module: on a GPU, or through the interpreter on CPU tensors.

    Returns what Triton compiled, None in the interpreter.
    """
    if kernels.interpreted:
        tape.start(getattr(interpreted(kernels.module), name), grid, None, arguments)
        return None
    return tape.start(getattr(kernels.module, name), grid, device, arguments)


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
