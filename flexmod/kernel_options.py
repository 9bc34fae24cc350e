"""The `kernel_options` of flex_attention: one table, checked before anything else happens.

Names are torch's, but for BLOCK_M3, BLOCK_N3, TEMPLATE and tuned. Each may carry the prefix `fwd_` or `bwd_`,
which wins over the bare name in its kernels.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexmod import errors


@dataclass(frozen=True)
class Option:
    accepted: str
    check: Callable[[Any], bool]
    meaning: str


def _power_of_two(value: Any) -> bool:
    return _positive(value) and value >= 16 and value & (value - 1) == 0


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _among(*numbers: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value in numbers


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


BACKENDS = ("AUTO", "TRITON", "INTERPRET", "REFERENCE")
TEMPLATES = ("auto", "hopper", "portable")
_TILE = "a power of two, 16 or more"
_INFERRED = "accepted and without effect: flexmod infers it"
_NO_CHOICE = "accepted and without effect: there is one kernel"
_OWN_LOADS = "accepted and without effect: flexmod chooses how tiles are loaded"
_AMD = "AMD: passed to Triton"

OPTIONS: Mapping[str, Option] = {
    "BACKEND": Option(
        "one of " + ", ".join(map(repr, BACKENDS)), lambda v: v in BACKENDS,
        "AUTO and TRITON: flexmod's own choice; INTERPRET: the Triton kernel in Triton's interpreter, on CPU "
        "tensors; REFERENCE: dense torch, any dtype",
    ),
    "TEMPLATE": Option(
        "one of " + ", ".join(map(repr, TEMPLATES)), lambda v: v in TEMPLATES,
        "auto: the kernels made for Hopper chips where they can run, the portable ones elsewhere; the others "
        "insist on one kind",
    ),
    "num_warps": Option("1, 2, 4, 8, 16 or 32", _among(1, 2, 4, 8, 16, 32), "warps of a program"),
    "num_stages": Option("a positive integer", _positive, "depth of the software pipeline"),
    "BLOCK_M": Option(_TILE, _power_of_two, "queries of a tile, forward"),
    "BLOCK_N": Option(_TILE, _power_of_two, "keys of a tile, forward"),
    "BLOCK_M1": Option(_TILE, _power_of_two, "queries of a tile, dK/dV"),
    "BLOCK_N1": Option(_TILE, _power_of_two, "keys of a tile, dK/dV"),
    "BLOCK_M2": Option(_TILE, _power_of_two, "queries of a tile, dQ"),
    "BLOCK_N2": Option(_TILE, _power_of_two, "keys of a tile, dQ"),
    "BLOCK_M3": Option(_TILE, _power_of_two, "queries of a tile, gradients of captured tensors alone"),
    "BLOCK_N3": Option(_TILE, _power_of_two, "keys of a tile, gradients of captured tensors alone"),
    "tuned": Option("True or False", _flag, "the tiles that flexmod tune found on this device"),
    "deterministic": Option("True or False", _flag, "bit-equal reruns, of the backward too"),
    "PRESCALE_QK": Option("True or False", _flag, _INFERRED),
    "ROWS_GUARANTEED_SAFE": Option("True or False", _flag, _INFERRED),
    "BLOCKS_ARE_CONTIGUOUS": Option("True or False", _flag, _INFERRED),
    "WRITE_DQ": Option("True or False", _flag, _INFERRED),
    "FORCE_USE_FLEX_ATTENTION": Option("True or False", _flag, _NO_CHOICE),
    "USE_TMA": Option("True or False", _flag, _OWN_LOADS),
    "kpack": Option("1 or 2", _among(1, 2), _AMD),
    "waves_per_eu": Option("0 or a positive integer", lambda v: _among(0)(v) or _positive(v), _AMD),
    "matrix_instr_nonkdim": Option("0, 4, 16 or 32", _among(0, 4, 16, 32), _AMD),
}  # fmt: skip

PREFIXES = ("fwd_", "bwd_")


@dataclass(frozen=True)
class KernelOptions:
    """Checked options. `tiles` holds what shapes a launch, prefixes and all, sorted by name."""

    backend: str = "AUTO"
    tiles: tuple[tuple[str, Any], ...] = ()


NONE = KernelOptions()


def parse(options: Mapping[str, Any] | None) -> KernelOptions:
    """Checks names and values.

    Raises UnknownOption, OptionValueError, FlashBackendError, DecodeBackendError.
    """
    if not options:
        return NONE
    backend = options.get("BACKEND", "AUTO")
    if backend == "FLASH":
        raise errors.FlashBackendError()
    if backend == "TRITON_DECODE":
        raise errors.DecodeBackendError()
    for name, value in options.items():
        bare = name[4:] if name.startswith(PREFIXES) else name
        option = OPTIONS.get(bare)
        if option is None or (bare == "BACKEND" and bare != name):
            near = difflib.get_close_matches(bare, OPTIONS, 1, 0.6)
            close = f" Did you mean {near[0]!r}?" if near else ""
            raise errors.UnknownOption(name=name, close=close, known=", ".join(OPTIONS))
        if not option.check(value):
            raise errors.OptionValueError(name=name, value=value, accepted=option.accepted)
    return KernelOptions(backend, tuple(sorted((k, v) for k, v in options.items() if k != "BACKEND")))
