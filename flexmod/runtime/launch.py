"""Chooses the best tile of a kernel that fits the device, and launches kernels.

`BoundLaunch` binds a launch to kinds of tensors. The first run uses Triton's launcher; later runs use
`direct.py` if it knows the launcher.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from flexmod.codegen.kernels import Made
from flexmod.codegen.spec import Chosen, Limits, Verdict, choose, option
from flexmod.errors import MisaddressedProductsError, NoTileFits, RoundedProductsError
from flexmod.errors.base import counted
from flexmod.runtime import compiler_bugs, config, direct
from flexmod.runtime.compiler_bugs import WrongProducts
from flexmod.runtime.direct import Direct
from flexmod.runtime.gluon import TensorDescriptor, layout_of
from flexmod.runtime.locks import lazy_imports
from flexmod.runtime.plan import Binding, Descriptor, Launch, Place, RunNumber, Source, value_of, values_of
from flexmod.runtime.private_triton import OutOfResources

# kernel_options for AMD, which pass to Triton unchanged
AMD_OPTIONS = ("kpack", "waves_per_eu", "matrix_instr_nonkdim")

WRONG_PRODUCTS: dict[object, str] = {
    RoundedProductsError: f"Triton {triton.__version__} multiplies float32 in TF32, though it is told not to",
    MisaddressedProductsError: compiler_bugs.MISADDRESSED,
}
# Faults of compiled kernels, cached since each launch asks.
_known_faults: WeakKeyDictionary[Any, tuple[int, tuple[str, ...], WrongProducts | None]] = WeakKeyDictionary()


class NoRung(Exception):
    """Raised if no rung of a kernel works on this device, with the reason; another family must run."""


def choose_tile(
    kernels: Made, kernel: str, device: torch.device, arguments: Callable[[Any], Sequence[Mapping[str, Any]]]
) -> Any:
    """Returns the best rung of a kernel's ladder that fits the device.

    `arguments` returns the arguments of each launch with a rung. The first call compiles the ladder's rungs
    in order, without running them. It skips a rung that the device refuses, whose registers spill much, or
    that the compilers made wrong. It caches the result, also if no rung works. Other strides make another
    variant of the kernel, which may need more resources, so the next call tries the ladder again. It does so
    too after an error of the machine, which is raised.

    Raises:
        NoRung: no rung works, and another family's kernels can run.
        NoTileFits: the device has too little memory for the last rung.
        RoundedProductsError: all rungs round float32 that must not be rounded.
        MisaddressedProductsError: all rungs read wrong addresses.
    """

    def judge(rung: Any) -> Verdict:
        try:
            return worst([verdict(kernels, kernel, device, given) for given in arguments(rung)])
        except Exception as error:
            return refused(error, kernels.limits)

    known = kernels.tiles.get((kernel, device))
    if known is None or not isinstance(known, str) and judge(known).refusal is not None:
        if not kernels.interpreted:  # raises for a fault in the module's text, which no rung can avoid
            getattr(kernels.module, f"{kernel}_kernel")
        chosen = choose(kernels.ladder(kernel), judge, kernels.limits)
        known = kernels.tiles[kernel, device] = _best(kernels, kernel, chosen, device)
    if isinstance(known, str):
        raise NoRung(known)
    return known


def refused(error: Exception, limits: Limits) -> Verdict:
    """Returns the verdict on a rung whose compiler or loader raised an error of any kind: the next may work.

    Raises the error if no other family's kernels can run. Raises it too if it says nothing of the kernel: no
    memory, a full disk, a device that failed.
    """
    of_machine = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    # Triton's loader has only the text
    if not limits.gives_way or isinstance(error, of_machine) or "out of memory" in str(error):
        raise error
    return Verdict(refusal=error)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the worst of the verdicts on a tile's launches."""
    return Verdict(
        max(verdict.spills for verdict in verdicts),
        tuple(dict.fromkeys(loss for verdict in verdicts for loss in verdict.losses)),
        next((verdict.refusal for verdict in verdicts if verdict.refusal is not None), None),
        max(verdict.size for verdict in verdicts),
    )


def verdict(kernels: Made, kernel: str, device: torch.device, arguments: Mapping[str, Any]) -> Verdict:
    """Compiles a launch with these arguments and judges it; the interpreter accepts any rung."""
    if kernels.interpreted:
        return Verdict()
    function = getattr(kernels.module, f"{kernel}_kernel")
    return judged(kernels, direct.compiled(function, device, arguments), device)


def judged(kernels: Made, compiled: Any, device: torch.device) -> Verdict:
    """Loads a compiled kernel and judges it.

    Kernels with the same text share compiled kernels, so a refused one stays refused.
    """
    try:
        with torch.cuda.device(device):
            compiled[(1,)]  # loads it; `compiled.run` would raise only once
    except OutOfResources as error:
        return Verdict(refusal=error)
    size, slow, wrong = _faults(kernels, compiled)
    return Verdict(int(compiled.n_spills), slow, wrong, size)


def _faults(kernels: Made, compiled: Any) -> tuple[int, tuple[str, ...], WrongProducts | None]:
    """Returns a compiled kernel's size and slow instructions, if its family asks, and its error; cached."""
    if compiled not in _known_faults:
        # users may tell Triton to store machine code only: then the text is unknown
        asm = compiled.asm
        code = asm["cubin"] if kernels.limits.by_code else b""
        slow = compiler_bugs.losses(asm.get("ptx", ""), code)
        _known_faults[compiled] = compiler_bugs.size(code), slow, compiler_bugs.wrong(kernels, asm)
    return _known_faults[compiled]


def _best(kernels: Made, kernel: str, chosen: Chosen[Any], device: torch.device) -> Any:
    """Returns the chosen rung. Raises NoRung if another family must run, or the error for no rung."""
    loud = kernels.limits.gives_way and config.debug_level() >= 1
    passing = kernels.limits.passed
    for rung, of in chosen.runnable.items() if loud else ():
        if not passing(of, rung):
            print(f"flexmod: {kernel} of {kernels.family}: {rung} gives way: {of}", file=sys.stderr)
    found = chosen.rung
    if found is None and not kernels.limits.gives_way:
        raise _refused(chosen, device)
    if found is None and chosen.runnable:
        fewest = min(of.spills for of in chosen.runnable.values())
        found = f"a thread spills {counted(fewest, 'register')} at least"
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
            return error(triton=triton.__version__, device=device, tried=", ".join(tried))
    return no_tile_fits(too_large, device)


# units of the memories of a block, by the names that Triton's loader has for them
UNITS = {"shared memory": "bytes", "tensor memory": "columns"}


def no_tile_fits(tried: Mapping[Any, OutOfResources], device: object) -> NoTileFits:
    """Returns the error for rungs that need more memory than a block has."""
    last = list(tried.values())[-1]
    needs = [f"{rung}: {why.required} {UNITS.get(why.name, why.name)}" for rung, why in tried.items()]
    return NoTileFits(limit=limit_in_words(last), device=device, tried=", ".join(needs))


def limit_in_words(error: OutOfResources) -> str:
    """Returns what a block has, e.g. "232448 bytes of shared memory"."""
    of = f" of {error.name}" if error.name in UNITS else ""
    return f"{error.limit} {UNITS.get(error.name, error.name)}{of}"


def refusal_in_words(refusal: object) -> str:
    """Returns the first line of the reason against a rung, from the compiler, the loader or flexmod."""
    if refusal in WRONG_PRODUCTS:
        return WRONG_PRODUCTS[refusal]
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
        with lazy_imports():  # numpy, which a GPU does not need
            from flexmod.runtime.interpreter import interpreted
        getattr(interpreted(source.module), name)[grid](**arguments)
        return None
    return direct.start(getattr(source.module, name), grid, device, arguments)


def rung_arguments(step: Launch) -> dict[str, Any]:
    """Returns a launch's arguments for its tile or shape."""
    if step.rung is None:
        return {}
    options, names = getattr(step.source, "options", {}), AMD_OPTIONS if torch.version.hip else ()
    given = {name: option(options, step.kernel, name, None) for name in names}  # type: ignore[arg-type]
    return {**step.rung.arguments(), **{name: value for name, value in given.items() if value is not None}}


layout = lru_cache(layout_of)


def sample(step: Launch, tensors: Mapping[str, Tensor], extents: Mapping[str, int]) -> dict[str, Any]:
    """Returns the arguments of a launch as a compiler sees them, with stand-ins for missing tensors.

    `tensors` has the known tensors by name. A stand-in has the right dtype, on the same device, or on meta if
    no tensor is known. `extents` includes the numbers of a run.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device("meta"))
    room: dict[str, Any] = {**extents, **tensors}
    for place in step.places():
        if place.name not in room:
            room[place.name] = torch.empty(1, dtype=place.dtype, device=device)
    slots = {name: slot for slot, name in enumerate(room)}
    return BoundLaunch(step, Binding(slots, extents, device)).arguments([*room.values()])


class BoundLaunch:
    """A launch with computed grid and numbers."""

    def __init__(self, step: Launch, to: Binding) -> None:
        self._step, self._device = step, to.device
        self._grid = (value_of(step.grid, to.extents),)
        self._fixed: dict[str, Any] = {}
        self._slots: dict[str, int] = {}
        self._descriptors: dict[str, Callable[[Tensor], TensorDescriptor]] = {}
        for name, value in {**step.arguments, **rung_arguments(step)}.items():
            if isinstance(value, Descriptor):
                self._slots[name] = to.slots[value.base.name]
                self._descriptors[name] = _describer(value, to.extents)
            elif isinstance(value, (Place, RunNumber)):
                self._slots[name] = to.slots[value.name]
            else:
                self._fixed[name] = value_of(value, to.extents)
        self._direct: Direct | None = None

    def run(self, room: list[Any], mask: Any) -> None:
        if self._direct is not None:
            self._direct(room)
            return
        arguments = self.arguments(room)
        compiled = start(self._step.source, self._step.name, self._device, self._grid, arguments)
        self._direct = self._made_direct(compiled, arguments)

    def watched(self, room: list[Any], mask: Any) -> None:
        arguments = self.arguments(room)
        start(self._step.source, self._step.name, self._device, self._grid, arguments)

    def arguments(self, room: list[Any]) -> dict[str, Any]:
        """Returns the arguments of a run."""
        given = {name: room[slot] for name, slot in self._slots.items()}
        described = {name: describe(given[name]) for name, describe in self._descriptors.items()}
        return {**self._fixed, **given, **described}

    def _made_direct(self, compiled: Any, arguments: Mapping[str, Any]) -> Direct | None:
        if compiled is None:
            return None
        names = getattr(self._step.source.module, self._step.name).arg_names
        try:
            values = [arguments[name] for name in names]
            places = {place: self._slots[name] for place, name in enumerate(names) if name in self._slots}
            return Direct(compiled, self._device, self._grid, values, places)
        except (LookupError, AttributeError):  # an unknown launcher
            return None


def _describer(value: Descriptor, known: Mapping[str, int]) -> Callable[[Tensor], TensorDescriptor]:
    shape, strides = list(values_of(value.shape, known)), list(values_of(value.strides, known))
    block, of = list(value.block), layout(value.block, value.base.dtype)
    return lambda base: TensorDescriptor(base, shape, strides, block, of)
