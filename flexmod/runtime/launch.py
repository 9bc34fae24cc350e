"""Chooses the best tile of a kernel that fits the device, and launches kernels."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from flexmod import config
from flexmod.codegen.choose import Chosen, Verdict, choose
from flexmod.codegen.kernels import Kernels, Made
from flexmod.codegen.spec import KernelName, Tile, option
from flexmod.errors import MisaddressedProductsError, NoTileFits
from flexmod.internals.triton import OutOfResources
from flexmod.plan import Launch, Source
from flexmod.runtime import compiler_bugs, jit, machine_code
from flexmod.runtime.compiler_bugs import WrongProducts
from flexmod.runtime.interpreter import interpreted

# kernel_options for AMD, which pass to Triton unchanged
AMD_OPTIONS = ("kpack", "waves_per_eu", "matrix_instr_nonkdim")

# Faults of compiled kernels, cached since each launch asks.
_known_faults: WeakKeyDictionary[Any, tuple[tuple[str, ...], WrongProducts | None]] = WeakKeyDictionary()


class NoRung(Exception):
    """Raised if no rung of a kernel works on this device, with the reason; another family must run."""


def choose_tile(
    kernels: Made, kernel: str, device: torch.device, arguments: Callable[[Any], Sequence[Mapping[str, Any]]]
) -> Any:
    """Returns the best rung of a kernel's ladder that fits the device.

    `arguments` returns the arguments of each launch with a rung. The first call compiles the ladder's rungs
    in order, without running them. It skips a rung that the device refuses, whose registers spill much, or
    that the compilers made wrong. It caches the result, also if no rung works. Other strides make another
    variant of the kernel, which may need more resources, so the next call tries the ladder again.

    Raises:
        NoRung: no rung works, and another family's kernels can run.
        NoTileFits: the device has too little shared memory for the last rung.
        RoundedProductsError: all rungs round float32 that must not be rounded.
        MisaddressedProductsError: all rungs read wrong addresses.
    """

    def judge(rung: Any) -> Verdict:
        try:
            return worst([verdict(kernels, kernel, device, given) for given in arguments(rung)])
        # the compiler or the loader may fail in any way on one rung; the next one may work
        except Exception as error:
            if not kernels.limits.gives_way:
                raise
            return Verdict(refusal=error)

    known = kernels.tiles.get((kernel, device))
    if known is None or not isinstance(known, str) and judge(known).refusal is not None:
        _ = kernels.module  # raises for a fault in its text, which no rung can avoid
        chosen = choose(kernels.ladder(kernel), judge, kernels.limits)
        known = kernels.tiles[kernel, device] = _best(kernels, kernel, chosen, device)
    if isinstance(known, str):
        raise NoRung(known)
    return known


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the worst of the verdicts on a tile's launches."""
    return Verdict(
        max(verdict.spills for verdict in verdicts),
        tuple(dict.fromkeys(loss for verdict in verdicts for loss in verdict.losses)),
        next((verdict.refusal for verdict in verdicts if verdict.refusal is not None), None),
    )


def verdict(kernels: Made, kernel: str, device: torch.device, arguments: Mapping[str, Any]) -> Verdict:
    """Compiles a launch with these arguments and judges it; the interpreter accepts any rung."""
    if kernels.interpreted:
        return Verdict()
    function = getattr(kernels.module, f"{kernel}_kernel")
    return judged(kernels, jit.compiled(function, device, arguments), device)


def judged(kernels: Made, compiled: Any, device: torch.device) -> Verdict:
    """Loads a compiled kernel and judges it.

    Kernels with the same text share compiled kernels, so a refused one stays refused.
    """
    try:
        with torch.cuda.device(device):
            compiled[(1,)]  # loads it; `compiled.run` would raise only once
    except OutOfResources as error:
        return Verdict(refusal=error)
    slow, wrong = _faults(kernels, compiled)
    return Verdict(int(compiled.n_spills), slow, wrong)


def _faults(kernels: Made, compiled: Any) -> tuple[tuple[str, ...], WrongProducts | None]:
    """Returns a compiled kernel's slow instructions, if its family counts them, and its error; cached."""
    if compiled not in _known_faults:
        # users may tell Triton to store machine code only: then the text is unknown
        asm = compiled.asm
        slow = machine_code.losses(asm.get("ptx", ""), asm["cubin"]) if kernels.limits.by_code else ()
        _known_faults[compiled] = slow, compiler_bugs.wrong(kernels, asm)
    return _known_faults[compiled]


def _best(kernels: Made, kernel: str, chosen: Chosen[Any], device: torch.device) -> Any:
    """Returns the chosen rung. Raises NoRung if another family must run, or the error for no rung."""
    loud = kernels.limits.gives_way and config.debug_level() >= 1
    passing = kernels.limits.passed
    for rung, of in chosen.runnable.items() if loud else ():
        if not passing(of):
            print(f"flexmod: {kernel} of {kernels.family}: {rung} gives way: {of}", file=sys.stderr)
    found = chosen.rung
    if found is None and not kernels.limits.gives_way:
        raise _refused(chosen, device)
    if found is None and chosen.runnable:
        found = f"a thread spills {min(of.spills for of in chosen.runnable.values())} registers at least"
    elif found is None:
        refused = "; ".join(f"{rung}: {refusal_in_words(why)}" for rung, why in chosen.refusals.items())
        found = f"no shape of it compiles: {refused}"
        warnings.warn(f"the {kernel} does not run on the template {kernels.family!r}, {found}", stacklevel=2)
    if loud:
        print(f"flexmod: {kernel} of {kernels.family}: {found}", file=sys.stderr)
    return found


def _refused(chosen: Chosen[Any], device: torch.device) -> Exception:
    """Returns the error to raise if each rung is refused."""
    too_large = {rung: why for rung, why in chosen.refusals.items() if isinstance(why, OutOfResources)}
    for error in chosen.refusals.values():
        if isinstance(error, type):
            tried = [str(rung) for rung, why in chosen.refusals.items() if why is error]
            made: Exception = error(triton=triton.__version__, device=device, tried=", ".join(tried))
            return made
    return NoTileFits(
        limit=list(too_large.values())[-1].limit,
        device=device,
        tried=", ".join(f"{rung}: {e.required} bytes" for rung, e in too_large.items()),
    )


def refusal_in_words(refusal: object) -> str:
    """Returns the first line of the reason against a rung, from the compiler, the loader or flexmod."""
    if refusal is MisaddressedProductsError:
        return machine_code.MISADDRESSED
    while isinstance(refusal, BaseException) and refusal.__cause__ is not None:
        refusal = refusal.__cause__  # Triton's outer error has only the place
    said = getattr(refusal, "error_message", None) or str(refusal)
    return said.strip().partition("\n")[0] or type(refusal).__name__


def start(
    source: Source, name: str, device: torch.device, grid: tuple[int], arguments: Mapping[str, Any]
) -> Any:
    """Launches a kernel of a module on a GPU, or in the interpreter on CPU tensors.

    Returns Triton's compiled kernel, None in the interpreter.
    """
    if source.interpreted:
        jit.start(getattr(interpreted(source.module), name), grid, None, arguments)
        return None
    return jit.start(getattr(source.module, name), grid, device, arguments)


def rung_arguments(step: Launch) -> dict[str, Any]:
    """Returns a launch's arguments for its tile or shape."""
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
